"""The account of every sampled answer: trained once, or dropped with a reason."""

import json
from pathlib import Path

from grpo_megatron.scheduler.batches import StepBatch
from grpo_megatron.scheduler.scores import ScoredStep


class Ledger:
    """One file per step, `ledger/step-000040.jsonl`, one line per prompt; a step that is done again replaces its file.

    Example of a line: {"prompt_id": "a", "version": 39, "trained": [0, 2], "dropped": {"no_signal": [1, 3]}}
    """

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        """Open the run's ledger. Files of steps after `resume_step` are of work that is lost, and go."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for path in folder.glob("step-*.jsonl"):
            number = path.stem.removeprefix("step-")
            if number.isdecimal() and int(number) > resume_step:
                path.unlink()

    def write(self, step: int, scored: ScoredStep, batch: StepBatch) -> None:
        """Account for every rollout of the step (counted from 1)."""
        lines: dict[str, dict] = {}
        for each, reason, advantage in zip(scored.scored, batch.drop_reasons, batch.trained_advantages, strict=True):
            rollout = each.rollout
            line = lines.setdefault(
                each.prompt.id,
                {"prompt_id": each.prompt.id, "version": rollout.versions[0].version, "trained": [], "dropped": {}},
            )
            if advantage is not None:
                line["trained"].append(rollout.index)
            else:
                line["dropped"].setdefault(reason, []).append(rollout.index)
        text = "".join(json.dumps(line) + "\n" for line in lines.values())
        path = self._folder / f"step-{step:06d}.jsonl"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(path)
