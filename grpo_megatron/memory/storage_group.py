"""A group over whole storages: parameters, flat buffers, optimizer states alike.

PyTorch's tensors point to a storage, and the storage points to memory. Emptying and refilling the storage frees the
memory and brings the same bytes back while every tensor, view, bucket and tied weight goes on pointing to the same
storage. Touching such a tensor while its storage is empty is not an error message but a crash: that is what
`scheduler/phases.py` is for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from grpo_megatron.memory.base import AwayTier, Tier
from grpo_megatron.memory.far import FarSpace, release_freed_memory
from grpo_megatron.platform.device import Platform

ALIGNMENT_BYTES = 4096
NamedTensors = Iterable[tuple[str, torch.Tensor]]
Contents = Literal["change", "constant"]
"""`constant`: nobody writes to the tensors, so the far copy of the first move stays valid and leaving costs nothing."""


@dataclass(frozen=True)
class _Away:
    """A storage without memory."""

    storage: torch.UntypedStorage
    num_bytes: int
    offset: int | None
    """Of its bytes in the far space; None: discarded."""


class StorageGroup:
    """The unique storages behind an owner's tensors. A `TensorGroup`.

    `tensors` is asked anew at every move, so it may grow (Adam's moments appear at the first step) and shrink.
    """

    def __init__(
        self,
        name: str,
        tensors: Callable[[], NamedTensors],
        *,
        platform: Platform,
        space: FarSpace | None,
        contents: Contents = "change",
    ) -> None:
        self.name = name
        self.away: AwayTier = "discarded" if space is None else "far"
        self._tensors = tensors
        self._platform = platform
        self._space = space
        self._contents: Contents = contents
        self._tier: Tier = "device"
        self._absent: dict[int, _Away] = {}
        self._far_copies: dict[int, _Away] = {}
        """Of storages that are on the device, where the far copy is still valid."""

    @property
    def tier(self) -> Tier:
        return self._tier

    @property
    def num_bytes(self) -> int:
        """Of all storages, wherever their bytes are."""
        return sum(self._size(identity, storage) for identity, (_, storage) in self._storages().items())

    @property
    def num_device_bytes(self) -> int:
        return sum(storage.nbytes() for _, storage in self._storages().values())

    def storage_identities(self) -> frozenset[int]:
        """To check that no two groups would move the same memory."""
        return frozenset(self._storages())

    def move(self, tier: Tier) -> None:
        if tier == "device":
            self._bring_back()
        else:
            self._send_away(tier)
        self._tier = tier
        self._assert_where_it_should_be()

    def close(self) -> None:
        """Forget what is away; the owner must not use its tensors afterwards unless they are on the device."""
        self._absent.clear()
        self._far_copies.clear()
        if self._space is not None:
            self._space.close()

    def _send_away(self, tier: AwayTier) -> None:
        present = {identity: named for identity, named in self._storages().items() if named[1].nbytes() > 0}
        for name, storage in present.values():
            assert storage.resizable(), f"{self.name}: the memory of {name} belongs to someone else; copy it first"
        if tier == "far":
            leaving = self._copy_to_far_space({identity: storage for identity, (_, storage) in present.items()})
        else:
            leaving = {identity: _Away(storage, storage.nbytes(), None) for identity, (_, storage) in present.items()}
        for away in leaving.values():
            away.storage.resize_(0)
        self._absent |= leaving
        release_freed_memory(self._platform)

    def _copy_to_far_space(self, storages: Mapping[int, torch.UntypedStorage]) -> dict[int, _Away]:
        assert self._space is not None, f"{self.name} has no far space: it can only be discarded"
        copies = {identity: copy for identity, copy in self._far_copies.items() if identity in storages}
        occupied = [*copies.values(), *self._absent.values()]
        end = max((away.offset + away.num_bytes for away in occupied if away.offset is not None), default=0)
        new: dict[int, _Away] = {}
        for identity, storage in storages.items():
            if identity not in copies:
                offset = _aligned(end)
                new[identity] = _Away(storage, storage.nbytes(), offset)
                end = offset + storage.nbytes()
        self._space.reserve(end)
        for away in new.values():
            assert away.offset is not None
            self._space.write(_as_bytes(away.storage), away.offset)
        self._space.wait()
        return copies | new

    def _bring_back(self) -> None:
        reachable = self._storages()
        returning = {identity: away for identity, away in self._absent.items() if identity in reachable}
        for away in returning.values():
            away.storage.resize_(away.num_bytes)
            if away.offset is None:
                _as_bytes(away.storage).zero_()
            else:
                assert self._space is not None
                self._space.read(_as_bytes(away.storage), away.offset)
        if self._space is not None:
            self._space.wait()
        self._far_copies = returning if self._contents == "constant" else {}
        self._absent.clear()

    def _assert_where_it_should_be(self) -> None:
        for name, tensor in self._movable():
            has_memory = tensor.untyped_storage().nbytes() > 0
            assert has_memory == (self._tier == "device"), f"{self.name}: {name} is on the wrong side of {self._tier}"

    def _movable(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that have elements and lie on the device; step counters may lie in host memory, and stay there."""
        for name, tensor in self._tensors():
            if tensor.numel() > 0 and tensor.device.type == self._platform.kind:
                yield name, tensor

    def _storages(self) -> dict[int, tuple[str, torch.UntypedStorage]]:
        """By identity, each with the name of the first tensor that points to it."""
        found: dict[int, tuple[str, torch.UntypedStorage]] = {}
        for name, tensor in self._movable():
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, (name, storage))
        return found

    def _size(self, identity: int, storage: torch.UntypedStorage) -> int:
        away = self._absent.get(identity)
        return storage.nbytes() if away is None else away.num_bytes


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
