"""Groups of tensors that move together between the device and the far tier."""

from typing import Literal, Protocol

Tier = Literal["device", "far", "discarded"]
"""`far` is pinned host memory on a GPU machine and the disk on a CPU machine."""

AwayTier = Literal["far", "discarded"]


class TensorGroup(Protocol):
    """One owner's tensors of one kind. `scheduler/phases.py` says which phase needs which group."""

    name: str
    tier: Tier
    away: AwayTier
    """Where the group goes when it is not needed: `discarded` if it is made anew (gradients), else `far`."""

    @property
    def num_bytes(self) -> int: ...

    def move(self, tier: Tier) -> None:
        """Move, then assert that every tensor reachable from the owner is on the right side."""
