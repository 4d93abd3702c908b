"""A run: the parts that the loop uses. Below this floor nobody sees the whole configuration."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from grpo_megatron.config.schema import PhaseName
from grpo_megatron.memory.manager import MemoryManager
from grpo_megatron.scheduler.batches import Batches, ForwardPasses
from grpo_megatron.scheduler.evaluation import Evaluation
from grpo_megatron.scheduler.publishing import PolicyWeights
from grpo_megatron.scheduler.recovery import Recovery, RunProgress
from grpo_megatron.scheduler.reporting import Reporter
from grpo_megatron.scheduler.rollouts import Rollouts
from grpo_megatron.scheduler.scores import Scores
from grpo_megatron.scheduler.updates import Updates
from grpo_megatron.utils.spans import PhaseTimer


@dataclass(frozen=True)
class Run:
    """Everything that one GRPO run consists of. Made by `build_run`, used by `loop.train`."""

    num_steps: int
    progress: RunProgress
    timer: PhaseTimer
    memory: MemoryManager
    rollouts: Rollouts
    scores: Scores
    batches: Batches
    forward: ForwardPasses
    updates: Updates
    weights: PolicyWeights
    reporter: Reporter
    evaluation: Evaluation | None
    recovery: Recovery
    finish: Callable[[], None]
    """Export, plots, run report: what a run leaves behind when all steps are done. Collective over the world."""
    resources: ExitStack
    """What must be closed, in reverse order of opening."""

    def remaining_steps(self) -> Iterator[int]:
        """Steps from 0 that are not done yet; each begins a new count of seconds."""
        for step in range(self.progress.next_step, self.num_steps):
            self.timer.finish_step()  # what lies between two steps (evaluation, checkpoint) belongs to neither
            yield step

    @contextmanager
    def phase(self, name: PhaseName) -> Iterator[None]:
        """The one place where memory moves: make resident what the phase needs, time it, name it in errors."""
        try:
            with self.timer.span(name):
                with self.timer.span("memory"):
                    self.memory.enter(name)
                yield
        except Exception as error:
            error.add_note(f"in phase {name} of step {self.progress.next_step + 1}")
            raise

    def evaluate_if_due(self, version: int) -> None:
        """Held-out accuracy of this version, if the configuration asks for it now. Collective over the world."""
        if self.evaluation is not None and self.evaluation.is_due(version, num_steps=self.num_steps):
            with self.phase("rollout"):
                self.evaluation.run(version)

    def close(self) -> None:
        """End workers, engine and files; safe to call after any failure."""
        self.resources.close()
