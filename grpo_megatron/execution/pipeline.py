"""Running model chunks over micro-batches on megatron-core's pipeline schedules.

What a micro-batch is and what is computed from it is the caller's business: it passes `forward` and `finish`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

Batch = TypeVar("Batch")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Finished(Generic[Result]):
    """What the last stage makes of one micro-batch."""

    loss: torch.Tensor  # [], summed and already divided by global counts
    result: Result


def run_micro_batches(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Batch],
    *,
    forward: Callable[[Any, Batch], torch.Tensor],
    finish: Callable[[Any, torch.Tensor, Batch], Finished[Result]],
    mode: Literal["forward_only", "training"],
) -> list[Result]:
    """Results of `finish` in the order of the micro-batches, on the last pipeline stage; [] on the others.

    `forward` gives a chunk's hidden states, on every stage; `finish` goes on from the last stage's. With `training`,
    the gradients of the summed losses are accumulated and then reduced over data-parallel ranks (a sum, not a mean).
    Collective over the model-parallel group, and in training over the data-parallel group; every rank of a
    data-parallel group must bring equally many micro-batches, which may be empty of targets.
    """
    assert micro_batches, "a schedule needs at least one micro-batch; pack an empty one"
    assert len(chunks) == 1, "virtual pipelining is refused by the configuration"
    results: list[Result] = []

    def forward_step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Callable]:
        batch = next(batches)
        output = forward(model, batch)

        def loss_of(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
            finished = finish(model, hidden, batch)
            # With per-token losses the schedule multiplies by nothing; the token count that it sums up is not used.
            return finished.loss, torch.zeros((), dtype=torch.int), finished.result

        return output, loss_of

    with torch.set_grad_enabled(mode == "training"):
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=list(chunks),
            num_microbatches=len(micro_batches),
            seq_length=1,  # not used: stages tell each other the shape
            micro_batch_size=1,
            forward_only=mode == "forward_only",
        )
    return results
