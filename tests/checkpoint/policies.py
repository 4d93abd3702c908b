"""A tiny policy with its trainer, steps that depend on their number only, and its tensors as a table to compare."""

from pathlib import Path
from typing import Any

import torch

from grpo_megatron.batch import MiniBatch
from grpo_megatron.checkpoint.model_state import ModelState
from grpo_megatron.config.schema import TrainingSection
from grpo_megatron.platform.device import current_platform
from grpo_megatron.trainer.optimizer import inner_optimizers
from grpo_megatron.trainer.policy import PolicyTrainer
from tests.building import ANSWERS, PROMPT, build_tiny_policy, pack_by_hand


class TinyPolicy:
    def __init__(self, folder: Path, groups: Any, *, dtype: str = "float32", **section: Any) -> None:
        self.groups = groups
        self.chunks = build_tiny_policy(folder, groups, dtype=dtype)
        self.trainer = PolicyTrainer(
            self.chunks, TrainingSection(**section), temperature=1.0, platform=current_platform()
        )
        self.state = ModelState(self.trainer.wrapped, self.trainer.optimizer)

    def train(self, steps: range, *, learning_rate: float = 1e-3) -> list[dict[str, float]]:
        """One update per step number; replicas get different answers. Returns loss (last stage) and gradient norm."""
        history = []
        for step in steps:
            stats = self.trainer.update(self._batch(step), learning_rate=learning_rate, first_mini_batch=True)
            loss = sum(sums.totals["loss/total"].item() for sums in stats.sums)
            history.append({"loss": loss, "gradient_norm": stats.gradient_norm})
        return history

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's weights, masters and Adam states."""
        table = {name: p.detach().clone() for chunk in self.chunks for name, p in chunk.named_parameters()}
        for optimizer in inner_optimizers(self.trainer.optimizer):
            for index, master in enumerate(each for group in optimizer.param_groups for each in group["params"]):
                table[f"master.{index}"] = master.detach().clone()
                for key, value in optimizer.state[master].items():
                    table[f"{key}.{index}"] = value.clone()
        return table

    def _batch(self, step: int) -> MiniBatch:
        advantages = [0.5 - ((step + index + self.groups.replica) % 3) for index in range(len(ANSWERS))]
        micro_batches = [
            pack_by_hand(PROMPT, [answer], advantages=[advantage], first_rollout=index)
            for index, (answer, advantage) in enumerate(zip(ANSWERS, advantages, strict=True))
        ]
        return MiniBatch(tuple(micro_batches), num_loss_tokens=16, num_loss_rollouts=len(ANSWERS))


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, different
