"""One step's tokens through this rank's pipeline stage."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from grpo_megatron.parallel.groups import Groups
from grpo_megatron.platform.compatibility import generating
from grpo_megatron.rollout.megatron.context import StepContext
from grpo_megatron.rollout.megatron.rows import StepPlan


class StageForward:
    """Runs the trainer's own module. Collective over the model-parallel group."""

    def __init__(self, model: GPTModel, context: StepContext, groups: Groups) -> None:
        self._model = model
        self._context = context
        self._groups = groups
        self._ranks = dist.get_process_group_ranks(groups.pipeline)

    def __call__(self, plan: StepPlan) -> torch.Tensor | None:
        """Logits [sequences, vocabulary] of each sequence's last token on the last stage, None on the others."""
        config = self._model.config
        # no_grad and not inference_mode: megatron-core keeps its rotary tables for the next update, and an inference
        # tensor cannot be saved for a backward pass.
        with torch.no_grad(), generating():
            inputs = self._context.begin_step(plan)
            if not self._groups.is_first_stage:
                num_tokens = inputs.token_ids.size(1) // (self._groups.grid.tensor if config.sequence_parallel else 1)
                received = torch.empty(
                    (num_tokens, 1, config.hidden_size), dtype=config.pipeline_dtype, device=inputs.token_ids.device
                )
                dist.recv(received, src=self._ranks[self._groups.stage - 1], group=self._groups.pipeline)
                self._model.set_input_tensor(received)
            output = self._model(
                inputs.token_ids,
                inputs.position_ids,
                None,
                inference_context=self._context,
                runtime_gather_output=True,
            )
            if not self._groups.is_last_stage:
                dist.send(output.contiguous(), dst=self._ranks[self._groups.stage + 1], group=self._groups.pipeline)
                return None
        return output[0] if output.size(0) == 1 else output[:, 0]


@contextmanager
def borrowed_for_generation(model: GPTModel) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module is as it was, and nothing of the rollout is left in it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        model.set_input_tensor(None)
        # Buffers that generation has filled without gradients: sequence-parallel training would build on them.
        parallel_state.get_global_memory_buffer().buffer.clear()
