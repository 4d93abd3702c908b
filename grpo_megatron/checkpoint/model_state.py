"""The policy's weights and its optimizer, saved and restored bit by bit in any parallel layout.

Files are those of megatron-core's torch_dist with the optimizer in `fully_reshardable` form: masters and moments are
stored as whole parameters, so tensor, pipeline and data parallel sizes may change between saving and loading.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer

from grpo_megatron.checkpoint.base import CheckpointError, Coordination
from grpo_megatron.checkpoint.torch_dist import has_part, load_sharded, save_sharded
from grpo_megatron.platform.optimizer_checkpoint import repair

GatherOptimizer = Literal["every_rank", "first_rank"]
"""Where a data-parallel group puts its optimizer together before it is written: `every_rank` needs host memory for 12
bytes a parameter on each, over the device's network; `first_rank` on one only, over gloo."""


@dataclass(frozen=True)
class ModelState:
    """The owners whose tensors are saved: unwrapped or wrapped chunks in pipeline order, and their optimizer.

    `optimizer` is None where only weights matter, as in a converted model.
    """

    chunks: Sequence[torch.nn.Module]
    optimizer: MegatronOptimizer | None
    gather_optimizer: GatherOptimizer = "every_rank"

    def num_bytes(self) -> int:
        """About what this rank's share adds to a checkpoint: an upper bound for the check of free space."""
        replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        weights = sum(p.numel() * p.element_size() for p in self._parameters())
        states = 0 if self.optimizer is None else 12 * sum(p.numel() for p in self._parameters())
        return -(-(weights + states) // replicas)

    def save(self, folder: Path, coordination: Coordination) -> None:
        """Write all tensors into an empty folder. Collective over the world."""
        self._assert_on_device("saved")
        save_sharded(self._sharded_state("save"), folder, coordination)

    def load(self, folder: Path) -> None:
        """Put a checkpoint's values into the tensors that are there, masters included. Collective over the world.

        Raises:
            CheckpointError: the model or the optimizer in the folder is another one; names what differs.
        """
        self._assert_on_device("loaded")
        if self.optimizer is not None and not has_part(folder, "optimizer"):
            raise CheckpointError(f"{folder} has weights but no optimizer: it was not saved by a training run")
        loaded = load_sharded(self._sharded_state("load"), folder)
        for key, module in self._modules():
            module.load_state_dict(loaded[key], strict=True)
        if self.optimizer is None:
            return
        configured = [dict(group) for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(loaded["optimizer"])
        # The checkpoint's learning rate, decay and betas came along; those of this run's configuration count.
        for group, before in zip(self.optimizer.param_groups, configured, strict=True):
            group.update({key: value for key, value in before.items() if key not in ("params", "step")})

    def refresh_masters(self) -> None:
        """After weights came from elsewhere: without this the next step would write the old masters over them."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def _sharded_state(self, purpose: Literal["save", "load"]) -> dict[str, Any]:
        repair()
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": self.gather_optimizer == "first_rank",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        state = {key: module.sharded_state_dict(metadata=metadata) for key, module in self._modules()}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.sharded_state_dict(
                dict(state), is_loading=purpose == "load", metadata=metadata
            )
        return state

    def _modules(self) -> Iterator[tuple[str, Any]]:
        """The chunks below their wrappers, under the names that megatron-core's optimizer expects."""
        for index, chunk in enumerate(self.chunks):
            module: Any = chunk
            while hasattr(module, "module"):
                module = module.module
            yield ("model" if len(self.chunks) == 1 else f"model{index}"), module

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for _, module in self._modules():
            yield from module.parameters()

    def _assert_on_device(self, what: str) -> None:
        """Reading or writing a tensor whose storage was moved away would crash the process without a message."""
        for key, module in self._modules():
            for name, parameter in module.named_parameters():
                away = parameter.numel() > 0 and parameter.untyped_storage().nbytes() == 0
                assert not away, f"{key}.{name} is off the device: enter the checkpoint phase before it is {what}"
        for state in _optimizer_states(self.optimizer):
            for name, tensor in state.items():
                away = (
                    isinstance(tensor, torch.Tensor) and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
                )
                assert not away, f"optimizer {name} is off the device: enter the checkpoint phase before it is {what}"


def _optimizer_states(optimizer: Any) -> Iterator[dict[str, Any]]:
    """The states of the torch optimizers below, however many are chained."""
    for part in getattr(optimizer, "chained_optimizers", [] if optimizer is None else [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is not None:
            yield from inner.state.values()
            yield from ({"master": master} for group in inner.param_groups for master in group["params"])
