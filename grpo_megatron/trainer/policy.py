"""The policy update: one optimizer step per mini-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from grpo_megatron.algorithms.token_sums import TokenSums
from grpo_megatron.batch import MiniBatch
from grpo_megatron.config.schema import TrainingSection
from grpo_megatron.execution.pipeline import run_micro_batches
from grpo_megatron.models.forward import hidden_states
from grpo_megatron.platform.device import Platform
from grpo_megatron.trainer.loss import DeviceBatch, grpo_loss, to_device
from grpo_megatron.trainer.optimizer import OptimizedPolicy, step_if_finite, wrap_policy
from grpo_megatron.weights.naming import unwrap


@dataclass(frozen=True)
class UpdateStats:
    """What one optimizer step did. Token sums are this replica's; they are whole after a sum over replicas."""

    sums: tuple[TokenSums, ...]
    """One per micro-batch, on the last pipeline stage; empty elsewhere."""
    gradient_norm: float
    """Before clipping, over all ranks."""
    learning_rate: float
    stepped: bool
    """False where the gradient was not finite: the weights are as they were."""


class PolicyTrainer:
    """Owns gradients, masters and moments; the chunks are shared with the embedded engine."""

    def __init__(
        self, chunks: Sequence[GPTModel], section: TrainingSection, *, temperature: float, platform: Platform
    ) -> None:
        self.chunks = list(chunks)
        self._section = section
        self._temperature = temperature
        self._platform = platform
        self._policy: OptimizedPolicy = wrap_policy(chunks, section)
        self.wrapped = self._policy.wrapped
        self.optimizer = self._policy.optimizer

    def update(
        self,
        mini_batch: MiniBatch,
        *,
        learning_rate: float,
        first_mini_batch: bool,
        on_micro_batch: Callable[[], None] = lambda: None,
    ) -> UpdateStats:
        """Forward, backward, reduce, clip, step. Collective over all ranks.

        `on_micro_batch` is called when the forward of each micro-batch begins (progress).
        """
        # What generation left in there are inference tensors, which cannot be saved for backward.
        parallel_state.get_global_memory_buffer().buffer.clear()
        for chunk in self.chunks:
            chunk.train()
        for each in self.wrapped:
            each.zero_grad_buffer()
        self.optimizer.zero_grad()
        finish = grpo_loss(self._section, mini_batch, temperature=self._temperature, first_mini_batch=first_mini_batch)

        def forward(model: torch.nn.Module, batch: DeviceBatch) -> torch.Tensor:
            on_micro_batch()
            return hidden_states(unwrap(model), batch.inputs)

        sums = run_micro_batches(
            self.wrapped,
            [to_device(each, self._platform.device) for each in mini_batch.micro_batches],
            forward=forward,
            finish=lambda model, hidden, batch: finish(unwrap(model), hidden, batch),
            mode="training",
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        stepped, gradient_norm = step_if_finite(self.optimizer)
        return UpdateStats(tuple(sums), gradient_norm, learning_rate, stepped)
