"""Logged means, maxima and sums over ranks and micro-batches equal those computed in one piece.

Formula: mean = sum of totals / sum of counts over all pieces; a mean of the ranks' means is another number. All values
are multiples of 1/8, so equality is exact. Not tested here: which rank contributes what in a real update.
"""

from grpo_megatron.monitor.metrics import MetricSums, merge, reduce_over_ranks
from grpo_megatron.parallel.collectives import gather_objects
from tests.distributed.harness import CaseContext, case

PER_RANK = [[1.0], [0.125 * i for i in range(99)], [], [-7.5, 30.0]]
"""Uneven on purpose: 1, 99, 0 and 2 values."""


def _check(context: CaseContext) -> None:
    groups = context.groups()
    everything = [value for values in PER_RANK[: context.world_size] for value in values]
    own = PER_RANK[context.rank]
    micro_batches = [MetricSums.of_values("v", own[start : start + 10]) for start in range(0, len(own), 10)]
    micro_batches.append(MetricSums(sums={"tokens": float(len(own))}))
    whole = reduce_over_ranks(merge(micro_batches), gather=lambda mine: gather_objects(mine, groups.world)).values()
    assert whole == {
        "v_mean": sum(everything) / len(everything),
        "v_max": max(everything),
        "v_min": min(everything),
        "tokens": float(len(everything)),
    }, whole


@case(world_size=2)
def metrics_of_two_ranks_are_those_of_one_piece(context: CaseContext) -> None:
    _check(context)


@case(world_size=4)
def metrics_of_four_ranks_with_an_empty_one_are_those_of_one_piece(context: CaseContext) -> None:
    _check(context)
