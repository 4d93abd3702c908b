"""The loss of one packed micro-batch, from the last stage's hidden states."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from grpo_megatron.algorithms.loss_weights import loss_weights
from grpo_megatron.algorithms.mismatch import measure_gap, truncated_importance_weights
from grpo_megatron.algorithms.policy_loss import policy_loss
from grpo_megatron.algorithms.token_sums import TokenSums
from grpo_megatron.batch import MicroBatch, MiniBatch
from grpo_megatron.config.schema import TrainingSection
from grpo_megatron.execution.pipeline import Finished
from grpo_megatron.models.forward import PackedInputs, packed_inputs, read_targets


@dataclass(frozen=True)
class DeviceBatch:
    """One micro-batch on the device."""

    inputs: PackedInputs
    loss_mask: torch.Tensor  # float32 [targets]
    advantages: torch.Tensor  # float32 [targets]
    rollout_logprobs: torch.Tensor  # float32 [targets]
    reference_logprobs: torch.Tensor | None  # float32 [targets]
    proximal_logprobs: torch.Tensor | None  # float32 [targets]
    rollout_ids: torch.Tensor  # int64 [targets]


def to_device(batch: MicroBatch, device: torch.device) -> DeviceBatch:
    """Copy a packed micro-batch to the device."""

    def floats(values: np.ndarray | None) -> torch.Tensor | None:
        return None if values is None else torch.from_numpy(values).to(device, torch.float32)

    return DeviceBatch(
        inputs=packed_inputs(batch, device),
        loss_mask=floats(batch.loss_mask),  # type: ignore[arg-type]
        advantages=floats(batch.advantages),  # type: ignore[arg-type]
        rollout_logprobs=floats(batch.rollout_logprobs),  # type: ignore[arg-type]
        reference_logprobs=floats(batch.reference_logprobs),
        proximal_logprobs=floats(batch.proximal_logprobs),
        rollout_ids=torch.from_numpy(batch.rollout_ids).to(device, torch.int64),
    )


def grpo_loss(
    section: TrainingSection, mini_batch: MiniBatch, *, temperature: float, first_mini_batch: bool
) -> Callable[[GPTModel, torch.Tensor, DeviceBatch], Finished[TokenSums]]:
    """The `finish` function of `run_micro_batches` for one mini-batch.

    The train-vs-rollout gap is measured where the policy is still the one that sampled: in the first mini-batch, and
    at the proximal log-probs where those were recomputed.
    """

    def finish(model: GPTModel, hidden: torch.Tensor, batch: DeviceBatch) -> Finished[TokenSums]:
        read = read_targets(model, hidden, batch.inputs, temperature=temperature)
        sampled_by = batch.proximal_logprobs
        if sampled_by is None and first_mini_batch:
            sampled_by = read.logprobs.detach()
        old = batch.rollout_logprobs if section.ratio_reference == "bypass" else batch.proximal_logprobs
        statistics = TokenSums()
        importance = None
        if sampled_by is not None:
            statistics = statistics.joined(
                measure_gap(sampled_by, rollout_logprobs=batch.rollout_logprobs, loss_mask=batch.loss_mask)
            )
        if section.mismatch.correction == "truncate":
            assert sampled_by is not None, "the correction needs the log-probs of the policy that sampled"
            corrected = truncated_importance_weights(
                sampled_by,
                rollout_logprobs=batch.rollout_logprobs,
                loss_mask=batch.loss_mask,
                cap=section.mismatch.cap,
            )
            importance, statistics = corrected.weights, statistics.joined(corrected.statistics)
        loss = policy_loss(
            read.logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            weights=loss_weights(
                batch.loss_mask,
                rollout_ids=batch.rollout_ids,
                loss_mean=section.loss_mean,
                num_loss_tokens=mini_batch.num_loss_tokens,
                num_loss_rollouts=mini_batch.num_loss_rollouts,
            ),
            clip=section.clip,
            kl=section.kl,
            old_logprobs=old,
            reference_logprobs=batch.reference_logprobs,
            importance_weights=importance,
            entropy=read.entropy,
        )
        return Finished(loss.loss, statistics.joined(loss.statistics))

    return finish
