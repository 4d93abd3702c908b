"""Which groups move when a phase begins. Numbers and names only: imports no torch and moves nothing.

A planner is asked at every phase boundary. Moves are carried out in the order given, and every planner puts what
leaves before what comes, so that memory never holds both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from grpo_megatron.memory.base import AwayTier, Tier

OffloadPolicy = Literal["never", "always"]


@dataclass(frozen=True)
class GroupState:
    """What a planner knows about one group.

    Example:
        >>> GroupState("optimizer_moments", tier="device", away="far", num_bytes=1080).num_bytes
        1080
    """

    name: str
    tier: Tier
    away: AwayTier
    num_bytes: int


@dataclass(frozen=True)
class Move:
    group: str
    tier: Tier
    """Where it goes."""
    num_bytes: int


class Planner(Protocol):
    def plan(self, groups: Sequence[GroupState], needed: frozenset[str]) -> tuple[Move, ...]:
        """Moves after which everything `needed` is on the device; what leaves comes first."""


class NeverOffload:
    """Everything stays where it is, which is the device."""

    def plan(self, groups: Sequence[GroupState], needed: frozenset[str]) -> tuple[Move, ...]:
        return ()


class AlwaysOffload:
    """Only what the phase needs is on the device.

    Example:
        >>> moments = GroupState("moments", "device", "far", 8)
        >>> weights = GroupState("weights", "far", "far", 2)
        >>> [(move.group, move.tier) for move in AlwaysOffload().plan([weights, moments], frozenset({"weights"}))]
        [('moments', 'far'), ('weights', 'device')]
    """

    def plan(self, groups: Sequence[GroupState], needed: frozenset[str]) -> tuple[Move, ...]:
        leaving = [
            Move(group.name, group.away, group.num_bytes)
            for group in groups
            if group.name not in needed and group.tier == "device"
        ]
        coming = [
            Move(group.name, "device", group.num_bytes)
            for group in groups
            if group.name in needed and group.tier != "device"
        ]
        return tuple(leaving + coming)


def make_planner(policy: OffloadPolicy) -> Planner:
    """The planner of the configuration's choice."""
    return AlwaysOffload() if policy == "always" else NeverOffload()
