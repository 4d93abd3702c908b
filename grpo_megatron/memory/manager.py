"""The one place where memory moves: `enter(phase)` makes resident what the phase needs."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_megatron.memory.base import TensorGroup
from grpo_megatron.memory.planner import GroupState, Move, Planner
from grpo_megatron.memory.storage_group import StorageGroup


@dataclass(frozen=True)
class MoveReport:
    """What one phase boundary cost on this rank."""

    phase: str
    bytes_in: int
    """On the device again, copied or, if they had been discarded, as zeros."""
    bytes_out: int
    """To the far tier; what was discarded needed no copy and is not in here."""
    bytes_discarded: int
    seconds: float
    moves: tuple[Move, ...]


class MemoryManager:
    """Registers groups and carries out a planner's moves. `needs` names, for each phase, the groups it touches."""

    def __init__(self, groups: Iterable[TensorGroup], *, planner: Planner, needs: Mapping[Any, frozenset[Any]]) -> None:
        self._groups = {group.name: group for group in groups}
        self._planner = planner
        self._needs = needs

    def register(self, group: TensorGroup) -> None:
        assert group.name not in self._groups, f"group {group.name} is there already"
        self._groups[group.name] = group

    def enter(self, phase: str) -> MoveReport:
        """Evict, then bring in. A needed name that no group has (a model that this run lacks) needs nothing."""
        assert phase in self._needs, f"phase {phase} is not in the table of phases"
        return self.require(phase, self._needs[phase])

    def require(self, what: str, names: Iterable[str]) -> MoveReport:
        """The same for a set of groups outside the table, such as those that a checkpoint reads."""
        self._assert_disjoint()
        started = time.monotonic()
        needed = frozenset(names)
        moves = self._planner.plan(self.states(), needed)
        for move in moves:
            self._groups[move.group].move(move.tier)
        moved = tuple(move for move in moves if move.num_bytes > 0)
        for name in needed & set(self._groups):
            tier = self._groups[name].tier
            assert tier == "device", f"{what} needs {name}, which the planner left {tier}"
        return MoveReport(
            phase=what,
            bytes_in=sum(move.num_bytes for move in moved if move.tier == "device"),
            bytes_out=sum(move.num_bytes for move in moved if move.tier == "far"),
            bytes_discarded=sum(move.num_bytes for move in moved if move.tier == "discarded"),
            seconds=time.monotonic() - started,
            moves=moved,
        )

    def states(self) -> tuple[GroupState, ...]:
        return tuple(GroupState(group.name, group.tier, group.away, group.num_bytes) for group in self._groups.values())

    def close(self) -> None:
        for group in self._groups.values():
            if isinstance(group, StorageGroup):
                group.close()

    def _assert_disjoint(self) -> None:
        """Two groups over one storage would each believe that they know where it is."""
        owner_of: dict[int, str] = {}
        for group in self._groups.values():
            if not isinstance(group, StorageGroup):
                continue
            for identity in group.storage_identities():
                other = owner_of.setdefault(identity, group.name)
                assert other == group.name, f"groups {other} and {group.name} share memory"
