"""The optimizer steps of one phase, and their numbers summed over micro-batches and replicas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_megatron.algorithms.learning_rate import learning_rate
from grpo_megatron.config.schema import TrainingSection
from grpo_megatron.monitor.metrics import MetricSums, merge, reduce_over_ranks
from grpo_megatron.monitor.progress import Progress
from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.scheduler.batches import StepBatch
from grpo_megatron.trainer.policy import PolicyTrainer, UpdateStats


@dataclass(frozen=True)
class StepStats:
    """Numbers of all updates of one step, the same on every rank."""

    sums: MetricSums
    gradient_norms: tuple[float, ...]
    """One per optimizer step, before clipping."""
    learning_rate: float
    num_skipped: int
    """Mini-batches left out because a gradient was not finite, later ones of the step included."""
    num_packed_tokens: int
    """Tokens that went through the model, over all replicas, padding included."""


class Updates:
    """Applies a step's mini-batches one after another."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        section: TrainingSection,
        groups: Groups,
        *,
        num_steps: int,
        open_progress: Callable[[str, int], Progress],
    ) -> None:
        self._trainer = trainer
        self._section = section
        self._groups = groups
        self._num_steps = num_steps
        self._open_progress = open_progress

    def apply(self, batch: StepBatch, step: int) -> StepStats:
        """Run every mini-batch that has something to train. Collective over the world."""
        rate = learning_rate(step, self._section, num_steps=self._num_steps)
        trained = [each for each in batch.train.mini_batches if each.num_loss_tokens > 0]  # the same on every rank
        num_micro_batches = sum(len(each.micro_batches) for each in trained)
        stats: list[UpdateStats] = []
        with self._open_progress(f"update of step {step + 1}", num_micro_batches) as progress:
            for index, mini_batch in enumerate(trained):
                stats.append(
                    self._trainer.update(
                        mini_batch,
                        learning_rate=rate,
                        first_mini_batch=index == 0,
                        on_micro_batch=progress.advance,
                    )
                )
                if not stats[-1].stepped:  # on every rank; a health rule ends the run
                    break
        num_tokens = sum(micro.num_tokens for each in trained for micro in each.micro_batches)
        return StepStats(
            sums=self._reduce(stats),
            gradient_norms=tuple(each.gradient_norm for each in stats),
            learning_rate=rate,
            num_skipped=len(trained) - sum(each.stepped for each in stats),
            num_packed_tokens=self._over_replicas(num_tokens),
        )

    def _reduce(self, stats: Sequence[UpdateStats]) -> MetricSums:
        groups = self._groups
        holds_the_loss = groups.is_last_stage and groups.tensor_rank == 0
        own = merge(
            MetricSums(
                means=MetricSums.of_shares(sums.means()).means,
                maxima=sums.largest(),
            )
            for each in stats
            for sums in (each.sums if holds_the_loss else ())
        )
        return reduce_over_ranks(own, gather=lambda mine: gather_objects(mine, groups.world))

    def _over_replicas(self, number: int) -> int:
        groups = self._groups
        return sum(gather_objects(number if groups.is_model_leader else 0, groups.world))
