"""What a run of the quickstart reached, as one JSON object on one line: the last line of `examples/quickstart.sh`.

    python tools/quickstart_summary.py runs/NAME

Reads the run's `report.json`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

FIGURES = ("accuracy_before", "accuracy_after", "anywhere_before", "anywhere_after", "num_problems", "train_seconds")


def summarize(folder: Path) -> dict[str, Any]:
    """The figures of a finished run.

    Raises:
        ValueError: the report lacks one, or the run exported no checkpoint.
    """
    file = folder / "report.json"
    if not file.is_file():
        raise ValueError(f"{file} is not there: did the run end?")
    report = json.loads(file.read_text())
    missing = [key for key in (*FIGURES, "export") if report.get(key) is None]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}: did the run end, with both evaluations and an export?")
    summary = {key: report[key] for key in FIGURES} | {"run": str(folder), "checkpoint": report["export"]}
    if not (Path(summary["checkpoint"]) / "config.json").is_file():
        raise ValueError(f"{file} names the checkpoint {summary['checkpoint']}, and no config.json is there")
    return summary


def main() -> int:
    """0: printed; 1: the run has no result; 2: wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    try:
        print(json.dumps(summarize(parser.parse_args().run)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
