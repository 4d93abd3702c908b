"""What a checkpoint is made of: the state protocol, the error that users see, and how ranks talk while saving."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

Value = TypeVar("Value")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found or read. The message names the path, the reason and the fix."""


class Stateful(Protocol):
    """Anything a resumed run must remember."""

    def state_dict(self) -> Mapping[str, Any]:
        """Plain data only: dicts with string keys, lists, tuples, numbers, strings, booleans, None, tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Coordination(Protocol):
    """The few collectives that saving and loading need. Every rank of the run must reach every call."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def from_rank_zero(self, value: Value | None) -> Value:
        """Rank 0's value on every rank."""

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, in rank order, on every rank."""

    def agree(self, error: str | None, what: str) -> None:
        """Return only if no rank has an error.

        Raises:
            CheckpointError: on every rank, naming the ranks that failed and what each said.
        """


class OneProcess:
    """Coordination of a run of one rank, for tools and unit tests."""

    rank = 0
    world_size = 1

    def from_rank_zero(self, value: Value | None) -> Value:
        return value  # type: ignore[return-value]

    def gather(self, value: Value) -> list[Value]:
        return [value]

    def agree(self, error: str | None, what: str) -> None:
        if error is not None:
            raise CheckpointError(f"{what} failed: {error}")
