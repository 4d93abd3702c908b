"""What is wrong with a configuration, where it stands and how to mend it: the records and their text."""

from collections.abc import Iterable
from dataclasses import dataclass

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Example:
        >>> str(Origin("grpo.yaml", 4)), str(Origin(COMMAND_LINE)), str(Origin("grpo.yaml", is_default=True))
        ('grpo.yaml:4', 'command line', 'default')
    """

    file: str
    """The configuration file, or `COMMAND_LINE`."""
    line: int | None = None
    is_default: bool = False

    def __str__(self) -> str:
        if self.is_default:
            return "default"
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in words for the person who wrote the configuration.

    Example:
        >>> print(Problem("grpo.yaml", 4, "run.steps", "0 is too small", "write 1 or more"))
        grpo.yaml:4: run.steps: 0 is too small
          fix: write 1 or more
    """

    file: str
    line: int | None
    key: str
    """Dotted path, or empty when the problem is the file's."""
    message: str
    fix: str = ""
    """What to write instead; may have several lines."""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        head = ": ".join(part for part in (place, self.key, self.message) if part)
        if not self.fix:
            return head
        return f"{head}\n  fix: " + self.fix.replace("\n", "\n       ")


class ConfigError(ValueError):
    """All problems of a configuration at once; its text is what the user sees."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = in_reading_order(problems)
        super().__init__(format_problems(self.problems))


def in_reading_order(problems: Iterable[Problem]) -> list[Problem]:
    """The file from top to bottom, then what has no line, then the command line."""
    return sorted(problems, key=lambda problem: (problem.file == COMMAND_LINE, problem.line or 10**9))


def format_problems(problems: Iterable[Problem]) -> str:
    """One block per problem."""
    return "\n".join(str(problem) for problem in problems)


def shown(value: object) -> str:
    """A value the way it is named in a message.

    Example:
        >>> shown(True), shown(None), shown("ten"), shown([1]), shown({}), shown(0.5)
        ('true', 'nothing', "'ten'", 'a list', 'a section', '0.5')
    """
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = ascii(value)
    return text if len(text) <= 60 else text[:50] + "..." + text[-1]
