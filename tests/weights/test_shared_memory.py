"""The shared-memory sink against a receiver in another process that is slow, hangs, dies or refuses."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from grpo_megatron.weights.checksum import checksum
from grpo_megatron.weights.shared_buffer import SharedBuffer
from grpo_megatron.weights.shared_memory import ReceiverFailure, Request, SharedMemoryReceiver, SharedMemorySink
from grpo_megatron.weights.sink import Bucket, BucketEntry
from tests.weights.receiving import ReceiverProcess

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")


class _Pair(ReceiverProcess):
    """A sink here, a slow receiver in another process."""

    def __init__(self) -> None:
        super().__init__(seconds=0.2)
        self.buffer = self.sink.allocate(256, CPU)

    def put(self, index: int, value: float) -> None:
        self.sink.put(_bucket(self.buffer, index, value))

    def checksum(self, name: str) -> int:
        return self.sink.checksums([name])[name]


@pytest.fixture(scope="module")
def pair() -> Iterator[_Pair]:
    """One receiver for many tests: every whole version consists of buckets 0 and 1."""
    made = _Pair()
    yield made
    assert made.end() == 0


def _bucket(buffer: torch.Tensor, index: int, value: float) -> Bucket:
    buffer[:128].view(torch.bfloat16).fill_(value)
    entries = (BucketEntry(f"a{index}", torch.bfloat16, (8, 8), 0), BucketEntry(f"b{index}", torch.float32, (32,), 128))
    return Bucket(index, entries, buffer[:256])


def _expected(value: float) -> int:
    return checksum(torch.full((8, 8), value, dtype=torch.bfloat16))


def test_buckets_arrive_one_version_after_another(pair: _Pair) -> None:
    for version in (1, 2):
        pair.sink.begin(version)
        assert pair.sink.version() == -1
        pair.put(0, version)
        pair.put(1, version + 0.5)
        pair.sink.commit()
        assert pair.sink.version() == version
        assert (pair.checksum("a0"), pair.checksum("a1")) == (_expected(version), _expected(version + 0.5))


def test_the_receiver_s_own_copies_are_compared_and_not_the_bucket(pair: _Pair) -> None:
    bucket = _bucket(pair.buffer, 0, 8.0)
    pair.sink.begin(1)
    pair.sink.put(bucket)
    pair.buffer.fill_(255)
    assert pair.sink.compare(bucket)["a0"] == _expected(8.0)


def test_a_bucket_from_other_memory_is_copied_into_the_shared_buffer(pair: _Pair) -> None:
    pair.sink.begin(3)
    pair.sink.put(_bucket(torch.zeros(256, dtype=torch.uint8), 0, 3.0))
    assert pair.checksum("a0") == _expected(3.0)
    with pytest.raises(ValueError, match="call allocate before begin"):
        pair.sink.put(Bucket(1, (), torch.zeros(300, dtype=torch.uint8)))


def test_a_slow_receiver_has_read_the_bucket_before_put_returns(pair: _Pair) -> None:
    """Case W1: the buffer is overwritten at once after `put`, and nothing of that arrives."""
    pair.sink.begin(4)
    pair.put(0, 1.0)
    pair.buffer.fill_(255)
    assert pair.checksum("a0") == _expected(1.0)


def test_an_incomplete_version_is_refused_and_not_served(pair: _Pair) -> None:
    pair.sink.begin(5)
    pair.put(0, 1.0)
    pair.put(1, 1.0)
    pair.sink.commit()
    pair.sink.begin(6)
    pair.put(0, 2.0)
    with pytest.raises(ReceiverFailure, match=r"still old: \['a1', 'b1'\]"):
        pair.sink.commit()
    assert pair.sink.version() == -1
    with pytest.raises(ReceiverFailure, match="sent twice"):
        pair.put(0, 2.0)
    pair.sink.abort()
    with pytest.raises(ReceiverFailure, match="put without begin"):
        pair.put(0, 2.0)
    with pytest.raises(ReceiverFailure, match="never received: zz"):
        pair.checksum("zz")


def test_a_receiver_that_hangs_runs_into_the_deadline_and_its_late_answer_confuses_nobody(pair: _Pair) -> None:
    pair.sink.begin(7)
    pair.sink._deadline_seconds = 0.5
    os.kill(pair.process.pid or 0, signal.SIGSTOP)
    with pytest.raises(ReceiverFailure, match="answer to `put` did not come within 0.5 s"):
        pair.put(0, 1.0)
    os.kill(pair.process.pid or 0, signal.SIGCONT)
    pair.sink._deadline_seconds = 30.0
    pair.sink.abort()
    pair.sink.begin(8)
    pair.put(0, 2.0)
    pair.put(1, 2.0)
    pair.sink.commit()
    assert pair.sink.version() == 8
    assert pair.checksum("a0") == _expected(2.0)


def test_a_receiver_that_dies_is_noticed_at_once() -> None:
    pair = _Pair()
    pair.sink.begin(1)
    os.kill(pair.process.pid or 0, signal.SIGKILL)
    pair.process.join(10)
    start = time.monotonic()
    with pytest.raises(ReceiverFailure, match="is gone; waited for the weight receiver's answer to `put`"):
        pair.put(0, 1.0)
    assert time.monotonic() - start < 5
    pair.end()


def test_a_receiver_that_stops_reading_cannot_block_the_sender() -> None:
    """The request is larger than the line's buffer, so sending it blocks."""
    ours, theirs = multiprocessing.Pipe()
    sink = SharedMemorySink(ours, deadline_seconds=0.5)
    buffer = sink.allocate(64, CPU)
    entries = tuple(BucketEntry(f"tensor-{i}" * 20, torch.uint8, (1,), 0) for i in range(20000))
    start = time.monotonic()
    with pytest.raises(ReceiverFailure, match="did not read `put` within"):
        sink.put(Bucket(0, entries, buffer))
    with pytest.raises(ReceiverFailure, match="did not read `put`"):
        sink.commit()
    assert time.monotonic() - start < 10
    sink.close()
    theirs.close()


def test_memory_that_cannot_be_reserved_is_refused_before_anything_is_written() -> None:
    with pytest.raises(OSError, match="cannot reserve 1152921504606846976 bytes .* make the buckets smaller"):
        SharedBuffer.create(2**60)


def test_shared_memory_has_no_name_and_another_one_at_its_path_is_noticed() -> None:
    first = SharedBuffer.create(100)
    before = set(os.listdir("/dev/shm"))
    again = SharedBuffer.open(first.path, 100)
    first.tensor[3] = 7
    assert again.tensor[3] == 7 and again.is_at(first.path)
    with pytest.raises(ValueError, match="has 100 bytes, not 50"):
        SharedBuffer.open(first.path, 50)
    first.close()
    assert not again.is_at(first.path)
    other = SharedBuffer.create(100)
    assert other.path == first.path and not again.is_at(other.path)  # the same number, another memory
    assert again.tensor[3] == 7
    other.close()
    assert set(os.listdir("/dev/shm")) == before


def test_the_receiver_ends_when_the_sender_is_gone_and_complains_when_it_is_late() -> None:
    ours, theirs = multiprocessing.Pipe()
    receiver = SharedMemoryReceiver(theirs, deadline_seconds=0.1, idle_seconds=0.2)
    with pytest.raises(TimeoutError, match="waited 0.2 s for the next publish"):
        receiver.serve()
    ours.send(Request(1, "begin", version=4))
    with pytest.raises(TimeoutError, match="next request of publish 4"):
        receiver.serve()
    ours.close()
    receiver.serve()
