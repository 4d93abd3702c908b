"""Write the arithmetic problems of the quickstart: train.jsonl and evaluation.jsonl.

    python tools/make_arithmetic.py --folder data/arithmetic [--seed 1234]

a + b and a - b with numbers from 1 to 20 (a >= b), a * b with numbers from 2 to 12: every distinct problem once, 731
in all. Problems that differ in the order of their numbers only (3 + 5 and 5 + 3) lie on one side. The prompt is chat
markup as plain text, without a system message (data.apply_chat_template must be false), because the chat template of
SmolLM2 would add one. The reward is `number`; `must_end` gives credit only to answers that end by themselves.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NUM_EVALUATION = 243
"""At least; the last family is taken whole."""


@dataclass(frozen=True)
class Problem:
    """One problem.

    Example:
        >>> Problem("mul", 7, 8, 56).question
        '7 * 8'
    """

    kind: str
    a: int
    b: int
    answer: int

    @property
    def question(self) -> str:
        return f"{self.a} {SIGNS[self.kind]} {self.b}"

    @property
    def family(self) -> tuple[str, int, int]:
        """The same for problems of which one gives away the other."""
        a, b = (self.a, self.b) if self.kind == "sub" else sorted((self.a, self.b))
        return (self.kind, a, b)


SIGNS = {"add": "+", "sub": "-", "mul": "*"}


def all_problems() -> Iterator[Problem]:
    for a in range(1, 21):
        for b in range(1, 21):
            yield Problem("add", a, b, a + b)
    for a in range(1, 21):
        for b in range(1, a + 1):
            yield Problem("sub", a, b, a - b)
    for a in range(2, 13):
        for b in range(2, 13):
            yield Problem("mul", a, b, a * b)


def split(problems: Sequence[Problem], *, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Problems to train on and problems held out, whole families on one side."""
    families: dict[tuple[str, int, int], list[Problem]] = {}
    for problem in problems:
        families.setdefault(problem.family, []).append(problem)
    order = sorted(families)
    random.Random(seed).shuffle(order)
    train: list[Problem] = []
    evaluation: list[Problem] = []
    for family in order:
        (evaluation if len(evaluation) < NUM_EVALUATION else train).extend(families[family])
    return train, evaluation


def to_line(problem: Problem) -> str:
    prompt = (
        f"<|im_start|>user\nWhat is {problem.question}? Reply with only the number.<|im_end|>\n<|im_start|>assistant\n"
    )
    fields = {
        "id": f"{problem.kind}-{problem.a}-{problem.b}",
        "prompt": prompt,
        "answer": problem.answer,
        "reward": "number",
        "source": problem.kind,
        "must_end": True,
    }
    return json.dumps(fields) + "\n"


def write_if_changed(file: Path, problems: Sequence[Problem]) -> None:
    text = "".join(map(to_line, problems))
    if file.is_file() and file.read_text(encoding="utf-8") == text:
        print(f"{file}: {len(problems)} problems, there already")
        return
    # Under another name first: a reader never sees half a file.
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)
    print(f"{file}: {len(problems)} problems written")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the two files go; made if it is not there")
    parser.add_argument("--seed", type=int, default=1234, help="which problems are held out (default: %(default)s)")
    arguments = parser.parse_args()
    train, evaluation = split(list(all_problems()), seed=arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_if_changed(arguments.folder / "train.jsonl", train)
    write_if_changed(arguments.folder / "evaluation.jsonl", evaluation)


if __name__ == "__main__":
    main()
