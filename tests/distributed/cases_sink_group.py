"""Sinks on every rank of an engine's group, as on GPUs: whatever fails on one rank, all of them go on together.

Device memory and its handles are played by shared host memory, the server by threads of the leader.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from grpo_megatron.rollout.sglang import sink as sink_module
from grpo_megatron.rollout.sglang.control import EngineFailure
from grpo_megatron.rollout.sglang.sink import SglangSink
from grpo_megatron.weights.shared_buffer import SharedBuffer
from grpo_megatron.weights.sink import Bucket, BucketEntry
from tests.distributed.harness import CaseContext, case
from tests.rollout.sglang_pretended import HIDDEN, VOCABULARY, FusedModel, PretendedServer

SHAPES = {"embed": (VOCABULARY, HIDDEN), "q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN)}
SHAPES["norm"] = (HIDDEN,)
DEVICE = torch.device("cuda", 0)


@contextmanager
def _pretended_device(*, export_fails: bool = False, reads_wrong: bool = False) -> Iterator[None]:
    """Where a device would be asked for memory, for a handle, or to wait."""
    buffers: list[SharedBuffer] = []

    def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
        buffers.append(SharedBuffer.create(num_bytes))
        return buffers[-1].tensor

    def export(buffer: torch.Tensor) -> dict[str, Any]:
        if export_fails:
            raise RuntimeError("expandable segments cannot be exported")
        if reads_wrong:
            buffer[7] ^= 1
        return {"path": buffers[-1].path, "num_bytes": buffer.nbytes}

    with (
        mock.patch.object(sink_module, "allocate_shareable", allocate),
        mock.patch.object(sink_module, "export_handle", export),
        mock.patch.object(sink_module, "pin", lambda buffer: None),
        mock.patch.object(torch.cuda, "synchronize", lambda device=None: None),
    ):
        yield
    for buffer in buffers:
        buffer.close()


class _Side:
    """One rank: its sink, and on the leader the server with two tensor-parallel ranks."""

    def __init__(self, context: CaseContext) -> None:
        self.rank = context.rank
        self.server = PretendedServer([[FusedModel(rank=rank, size=2)] for rank in range(2)])
        groups = context.groups(tensor=2)
        control = (lambda: self.server) if self.rank == 0 else None
        self.sink = SglangSink(control, tensor_parallel=2, group=groups.tensor, deadline_seconds=20.0)
        self.buffer = self.sink.allocate(4096, DEVICE)
        generator = torch.Generator().manual_seed(1)
        self.values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    def bucket(self) -> Bucket:
        entries: list[BucketEntry] = []
        for name, value in self.values.items():
            start = entries[-1].end_bytes if entries else 0
            entries.append(BucketEntry(name, torch.float32, tuple(value.shape), start))
            if self.buffer is not None:
                entries[-1].view(self.buffer).copy_(value)
        return Bucket(0, tuple(entries), self.buffer)

    def publish(self, version: int) -> None:
        self.sink.begin(version)
        self.sink.put(self.bucket())
        self.sink.settle()
        compared = self.sink.compare(self.bucket())
        assert (compared is None) == (self.rank != 0)
        self.sink.commit()
        assert self.sink.version() == version
        if self.rank == 0:
            models = [models[0] for models in self.server.ranks]
            assert torch.equal(torch.cat([one.embed for one in models])[:VOCABULARY], self.values["embed"])
            assert self.server.weight_version == str(version)


@case(world_size=2)
def every_rank_hands_over_its_own_memory(context: CaseContext) -> None:
    """The receiver of rank 1 reads what rank 1 has written: rank 0's memory is another one."""
    with _pretended_device():
        side = _Side(context)
        assert (side.sink.transport, side.sink.reason) == ("device memory", "")
        side.publish(1)
        if context.rank == 1:
            side.values["q"] = side.values["q"] + 1
        side.sink.begin(2)
        side.sink.put(side.bucket())
        side.sink.settle()
        try:
            side.sink.compare(side.bucket())
        except EngineFailure as failure:
            assert "the ranks of the engine received different bytes" in str(failure)
        else:
            raise AssertionError("different bytes on the two ranks were not noticed")
        if side.rank == 0:
            second = side.server.ranks[1][0].qkv_proj[: HIDDEN // 2]
            assert torch.equal(second, side.values["q"][HIDDEN // 2 :] + 1)
        side.sink.abort()
        side.sink.close()


@case(world_size=2)
def memory_that_one_rank_cannot_export_or_the_engine_misreads_is_replaced_on_all(context: CaseContext) -> None:
    for faults, said in (
        ({"export_fails": context.rank == 1}, "rank 1: RuntimeError: expandable segments cannot be exported"),
        ({"reads_wrong": context.rank == 1}, "the engine reads other bytes than were written, on its ranks [1]"),
    ):
        with _pretended_device(**faults):
            side = _Side(context)
            assert side.sink.transport == "pinned shared memory" and said in side.sink.reason, side.sink.reason
            assert (side.buffer is None) == (context.rank != 0)
            side.publish(1)
            side.sink.close()


@case(world_size=2)
def a_device_that_fails_on_one_rank_stops_all_of_them(context: CaseContext) -> None:
    def fail(device: object = None) -> None:
        if context.rank == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with _pretended_device():
        side = _Side(context)
        side.sink.begin(1)
        bucket = side.bucket()
        with mock.patch.object(torch.cuda, "synchronize", fail):
            try:
                side.sink.put(bucket)
            except RuntimeError as failure:
                assert "illegal memory access" in str(failure)
            else:
                raise AssertionError("handed over what is not there")
        side.sink.abort()
        side.publish(2)
        side.sink.close()


@case(world_size=2)
def a_failure_of_the_leader_is_raised_on_every_rank_of_the_engine(context: CaseContext) -> None:
    with _pretended_device():
        side = _Side(context)
        for refused in ("/begin_weight_update", "/end_weight_update"):
            side.server.refuse = refused
            try:
                side.publish(1)
            except EngineFailure as failure:
                assert f"{refused} is refused" in str(failure)
            else:
                raise AssertionError(f"published although {refused} is refused")
            side.sink.abort()
            assert side.sink.version() == -1
        side.server.refuse = ""
        side.publish(2)
        side.sink.close()
