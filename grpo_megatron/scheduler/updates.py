"""The optimizer steps of one phase, and their numbers summed over micro-batches and replicas."""

from collections.abc import Iterable
from dataclasses import dataclass

from grpo_megatron.algorithms.learning_rate import learning_rate
from grpo_megatron.algorithms.token_sums import TokenSums
from grpo_megatron.batch import TrainBatch
from grpo_megatron.config.schema import TrainingSection
from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.trainer.policy import PolicyTrainer, UpdateStats


@dataclass(frozen=True)
class StepStats:
    """Numbers of all updates of one step, over all ranks."""

    means: dict[str, tuple[float, float]]
    """Name -> (total, count); the mean is their quotient."""
    maxima: dict[str, float]
    gradient_norms: tuple[float, ...]
    learning_rate: float
    num_skipped: int
    """Optimizer steps left out because the gradient was not finite."""


class Updates:
    """Applies a step's mini-batches one after another."""

    def __init__(self, trainer: PolicyTrainer, section: TrainingSection, groups: Groups, *, num_steps: int) -> None:
        self._trainer = trainer
        self._section = section
        self._groups = groups
        self._num_steps = num_steps

    def apply(self, batch: TrainBatch, step: int) -> StepStats:
        """Run every mini-batch that has something to train. Collective over the world."""
        rate = learning_rate(step, self._section, num_steps=self._num_steps)
        stats = [
            self._trainer.update(mini_batch, learning_rate=rate, first_mini_batch=index == 0)
            for index, mini_batch in enumerate(batch.mini_batches)
            if mini_batch.num_loss_tokens > 0  # the same number on every rank
        ]
        return self._merge(stats, rate)

    def _merge(self, stats: list[UpdateStats], rate: float) -> StepStats:
        counts = self._groups.is_last_stage and self._groups.tensor_rank == 0
        sums = [each for update in stats for each in update.sums] if counts else []
        means, maxima = merge_sums(sums)
        parts = gather_objects((means, maxima), self._groups.world)
        totals: dict[str, tuple[float, float]] = {}
        largest: dict[str, float] = {}
        for part_means, part_maxima in parts:
            for name, (total, count) in part_means.items():
                old_total, old_count = totals.get(name, (0.0, 0.0))
                totals[name] = (old_total + total, old_count + count)
            for name, value in part_maxima.items():
                largest[name] = max(value, largest.get(name, value))
        return StepStats(
            means=totals,
            maxima=largest,
            gradient_norms=tuple(update.gradient_norm for update in stats),
            learning_rate=rate,
            num_skipped=sum(not update.stepped for update in stats),
        )


def merge_sums(sums: Iterable[TokenSums]) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Totals with counts, and maxima, over several micro-batches."""
    means: dict[str, tuple[float, float]] = {}
    maxima: dict[str, float] = {}
    for each in sums:
        for name, (total, count) in each.means().items():
            old_total, old_count = means.get(name, (0.0, 0.0))
            means[name] = (old_total + total, old_count + count)
        for name, value in each.largest().items():
            maxima[name] = max(value, maxima.get(name, value))
    return means, maxima
