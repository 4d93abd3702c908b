"""The same update on every parallel layout, against HF transformers on one process.

Formula: loss = -(1 / N) sum over the trained tokens of ratio x advantage with ratio = 1, N = trained tokens of the
whole mini-batch. Its value, its gradient norm and the log-probs of the updated weights must not depend on the layout,
the packing, the number of micro-batches or the padding. Not tested here: mixed precision, context and expert parallel.
"""

from functools import cache
from pathlib import Path

import torch

from grpo_megatron.batch import MicroBatch, MiniBatch
from grpo_megatron.config.schema import TrainingSection
from grpo_megatron.forward.logprobs import LogprobScorer
from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.platform.device import current_platform
from grpo_megatron.trainer.policy import PolicyTrainer
from tests.building import (
    ADVANTAGES,
    ANSWERS,
    PROMPT,
    answers_after,
    build_tiny_policy,
    empty_micro_batch,
    pack_by_hand,
)
from tests.distributed.harness import CaseContext, case
from tests.tiny import make_tiny_llama

NUM_TOKENS = sum(map(len, ANSWERS))
LEARNING_RATE = 1e-3


def _model_folder(context: CaseContext, *, tie_embeddings: bool) -> Path:
    folder = context.shared_folder / f"llama-tied-{tie_embeddings}"
    if context.rank == 0 and not folder.exists():
        make_tiny_llama(folder, tie_embeddings=tie_embeddings)
    torch.distributed.barrier()
    return folder


@cache
def _expected(folder: Path) -> tuple[float, float]:
    """Loss and gradient norm by HF transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs = answers_after(model, PROMPT, ANSWERS)
    weights = torch.cat([torch.full((len(a),), v) for a, v in zip(ANSWERS, ADVANTAGES, strict=True)])
    # The ratio is 1 and its gradient is the log-prob's.
    loss = -(torch.exp(logprobs - logprobs.detach()) * weights).sum() / NUM_TOKENS
    loss.backward()
    norm = torch.stack([p.grad.norm() ** 2 for p in model.parameters()]).sum().sqrt()
    return loss.item(), norm.item()


def _one_answer_each(multiple: int) -> list[MicroBatch]:
    return [
        pack_by_hand(PROMPT, [answer], advantages=[advantage], pad_to_multiple=multiple, first_rollout=index)
        for index, (answer, advantage) in enumerate(zip(ANSWERS, ADVANTAGES, strict=True))
    ]


def _check(
    context: CaseContext,
    micro_batches: list[MicroBatch],
    *,
    tensor: int = 1,
    pipeline: int = 1,
    sequence_parallel: bool = False,
    tie_embeddings: bool = True,
) -> None:
    groups = context.groups(tensor=tensor, pipeline=pipeline)
    folder = _model_folder(context, tie_embeddings=tie_embeddings)
    chunks = build_tiny_policy(folder, groups, sequence_parallel=sequence_parallel)
    platform = current_platform()
    trainer = PolicyTrainer(chunks, TrainingSection(clip_gradient_norm=100.0), temperature=1.0, platform=platform)
    before = LogprobScorer(chunks, temperature=1.0, platform=platform).logprobs(MiniBatch(tuple(micro_batches), 1, 1))
    stats = trainer.update(
        MiniBatch(tuple(micro_batches), NUM_TOKENS, len(ANSWERS)), learning_rate=LEARNING_RATE, first_mini_batch=True
    )
    expected_loss, expected_norm = _expected(folder)
    assert stats.stepped
    assert abs(stats.gradient_norm - expected_norm) < 1e-5 * expected_norm, (stats.gradient_norm, expected_norm)
    loss, ratios = _loss_over_replicas(groups, stats.sums)
    assert abs(loss - expected_loss) < 1e-5, (loss, expected_loss)
    assert all(ratio == 1.0 for ratio in ratios), ratios
    _check_weights_moved_alike(context, groups, chunks, micro_batches, before, f"tied-{tie_embeddings}")


def _loss_over_replicas(groups: Groups, sums) -> tuple[float, list[float]]:  # noqa: ANN001
    """Sum of the losses over micro-batches and replicas, from one rank of each last stage."""
    counts = groups.is_last_stage and groups.tensor_rank == 0
    mine = [
        (each.totals["loss/total"].item(), each.maxima["policy/ratio_max"].item()) for each in (sums if counts else [])
    ]
    everything = [pair for part in gather_objects(mine, groups.world) for pair in part]
    return sum(loss for loss, _ in everything), [ratio for _, ratio in everything if ratio != float("-inf")]


def _check_weights_moved_alike(context, groups, chunks, micro_batches, before, key) -> None:  # noqa: ANN001
    """After the step all layouts give the same log-probs, which are not those from before the step."""
    scorer = LogprobScorer(chunks, temperature=1.0, platform=current_platform())
    after = scorer.logprobs(MiniBatch(tuple(micro_batches), 1, 1))
    by_rollout = {}
    for micro_batch, old, new in zip(micro_batches, before, after, strict=groups.is_last_stage):
        for rollout in set(micro_batch.rollout_ids.tolist()):
            chosen = torch.from_numpy(micro_batch.rollout_ids == rollout)
            by_rollout[rollout] = (old[chosen], new[chosen])
    merged = {k: v for part in gather_objects(by_rollout, groups.world) for k, v in part.items()}
    assert len(merged) == len(ANSWERS)
    moved = max((old - new).abs().max().item() for old, new in merged.values())
    assert moved > 1e-3, f"the step changed nothing: {moved}"
    path = context.shared_folder / f"after-{key}-rank-{context.rank}.pt"
    if path.exists():
        earlier = torch.load(path)
        for rollout, (_, new) in merged.items():
            difference = (new - earlier[rollout]).abs().max().item()
            assert difference < 2e-4, (rollout, difference)
    else:
        torch.save({k: new for k, (_, new) in merged.items()}, path)


@case(world_size=1)
def packed_apart_shared_and_padded(context: CaseContext) -> None:
    """Cases L3, L4: packing, sharing the prompt, padding and cutting into micro-batches change nothing."""
    whole = {"advantages": ADVANTAGES}
    _check(context, [pack_by_hand(PROMPT, ANSWERS, **whole)])
    _check(context, [pack_by_hand(PROMPT, ANSWERS, share_prefix=True, **whole)])
    _check(context, [pack_by_hand(PROMPT, ANSWERS, pad_to_multiple=16, **whole)])
    _check(context, [*_one_answer_each(1), empty_micro_batch()])
    _check(context, [pack_by_hand(PROMPT, ANSWERS, **whole)], tie_embeddings=False)


@case(world_size=2)
def tensor_parallel(context: CaseContext) -> None:
    _check(context, [pack_by_hand(PROMPT, ANSWERS, advantages=ADVANTAGES)], tensor=2)
    _check(context, [pack_by_hand(PROMPT, ANSWERS, advantages=ADVANTAGES)], tensor=2, tie_embeddings=False)


@case(world_size=2)
def tensor_parallel_with_sequence_parallel(context: CaseContext) -> None:
    """Case L4: an odd packed length is padded to a multiple of the tensor-parallel size."""
    _check(context, _one_answer_each(2), tensor=2, sequence_parallel=True)
    shared = pack_by_hand(PROMPT, ANSWERS, advantages=ADVANTAGES, share_prefix=True, pad_to_multiple=2)
    _check(context, [shared], tensor=2, sequence_parallel=True)


@case(world_size=2)
def pipeline_parallel(context: CaseContext) -> None:
    """Micro-batches of different lengths travel between the stages."""
    _check(context, _one_answer_each(1), pipeline=2)
    _check(context, [pack_by_hand(PROMPT, ANSWERS, advantages=ADVANTAGES)], pipeline=2, tie_embeddings=False)


@case(world_size=2)
def data_parallel_with_uneven_and_empty_shares(context: CaseContext) -> None:
    """Cases L5, L6: 1 and 14 tokens, or nothing at all, on one of two ranks."""
    apart = _one_answer_each(1)
    _check(context, apart[:2] if context.rank == 0 else apart[2:])
    _check(context, [*apart[:1], empty_micro_batch(), empty_micro_batch()] if context.rank == 0 else apart[1:])
    _check(context, apart if context.rank == 0 else [empty_micro_batch()] * len(apart))


@case(world_size=4)
def tensor_and_pipeline_parallel(context: CaseContext) -> None:
    _check(context, _one_answer_each(1), tensor=2, pipeline=2)
    _check(context, _one_answer_each(2), tensor=2, pipeline=2, sequence_parallel=True, tie_embeddings=False)


@case(world_size=4)
def tensor_and_data_parallel(context: CaseContext) -> None:
    apart = _one_answer_each(1)
    replica = context.groups(tensor=2).replica
    _check(context, apart[:2] if replica == 0 else apart[2:], tensor=2)


@case(world_size=4)
def vocabulary_of_151_on_four_tensor_ranks(context: CaseContext) -> None:
    """Case W7 for training: one padded row, never in the softmax."""
    _check(context, [pack_by_hand(PROMPT, ANSWERS, advantages=ADVANTAGES)], tensor=4)
