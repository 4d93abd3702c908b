"""Log-probs of packed rollouts under a model that is not trained now: the reference, or the policy before an update."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from grpo_megatron.batch import MicroBatch, MiniBatch, TrainBatch
from grpo_megatron.execution.pipeline import Finished, run_micro_batches
from grpo_megatron.models.forward import PackedInputs, hidden_states, packed_inputs, read_targets
from grpo_megatron.platform.device import Platform

LogprobKind = Literal["reference_logprobs", "proximal_logprobs"]


class LogprobScorer:
    """Runs one model forward over packed micro-batches, sharded as the policy is."""

    def __init__(self, chunks: Sequence[GPTModel], *, temperature: float, platform: Platform) -> None:
        self.chunks = list(chunks)
        self._temperature = temperature
        self._platform = platform

    def attach(self, batch: TrainBatch, kind: LogprobKind) -> TrainBatch:
        """The batch with this model's log-probs at every target, on the last pipeline stage.

        On the other stages it comes back unchanged: no loss is computed there. Collective over the replica.
        """
        return replace(batch, mini_batches=tuple(self._attach(each, kind) for each in batch.mini_batches))

    def _attach(self, mini_batch: MiniBatch, kind: LogprobKind) -> MiniBatch:
        logprobs = self.logprobs(mini_batch)
        if not parallel_state.is_pipeline_last_stage():
            return mini_batch
        pairs = zip(mini_batch.micro_batches, logprobs, strict=True)
        scored: tuple[MicroBatch, ...] = tuple(replace(micro, **{kind: each.numpy()}) for micro, each in pairs)
        return replace(mini_batch, micro_batches=scored)

    def logprobs(self, mini_batch: MiniBatch) -> list[torch.Tensor]:
        """float32 [targets] per micro-batch on the last pipeline stage, [] elsewhere. Collective over the replica."""
        parallel_state.get_global_memory_buffer().buffer.clear()  # generation leaves inference tensors in there

        def finish(model: GPTModel, hidden: torch.Tensor, inputs: PackedInputs) -> Finished[torch.Tensor]:
            read = read_targets(model, hidden, inputs, temperature=self._temperature)
            return Finished(read.logprobs.sum(), read.logprobs.cpu())

        return run_micro_batches(
            self.chunks,
            [packed_inputs(each, self._platform.device) for each in mini_batch.micro_batches],
            forward=hidden_states,
            finish=finish,
            mode="forward_only",
        )
