"""Device memory that another process opens by its handle. README.md: what has been seen running."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo_megatron.weights.checksum import checksum
from grpo_megatron.weights.device_memory import allocate_shareable, export_handle, pin
from grpo_megatron.weights.shared_buffer import SharedBuffer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ROOT = Path(__file__).parents[2]
NUM_BYTES = 40 * 1024**2
READ = """
import json, sys, torch
from grpo_megatron.weights.checksum import checksum
from grpo_megatron.weights.device_memory import open_handle
memory = open_handle(json.loads(sys.stdin.readline()))
for _ in sys.stdin:
    print(checksum(memory), flush=True)
"""


@pytest.fixture(params=["expandable_segments:False", "expandable_segments:True"])
def settings(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(request.param)
    yield request.param
    torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")


def test_another_process_reads_what_is_written_now_and_later(settings: str) -> None:
    """The handle is given once; the memory stays open, and stays the same through many fillings."""
    neighbour = torch.empty(NUM_BYTES, dtype=torch.uint8, device="cuda")
    memory = allocate_shareable(NUM_BYTES, torch.device("cuda", 0))
    assert torch._C._accelerator_getAllocatorSettings() == settings
    handle = json.dumps(export_handle(memory))
    command = [sys.executable, "-c", READ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        reader.stdin.write(handle + "\n")
        for _ in range(3):
            memory.random_(0, 256)
            torch.cuda.synchronize()
            reader.stdin.write("again\n")
            reader.stdin.flush()
            assert int(reader.stdout.readline()) == checksum(memory)
        reader.stdin.close()
    assert reader.returncode == 0
    del neighbour


def test_shared_host_memory_can_be_pinned() -> None:
    buffer = SharedBuffer.create(NUM_BYTES)
    pin(buffer.tensor)
    source = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, device="cuda")
    buffer.tensor.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert checksum(buffer.tensor) == checksum(source)
    assert buffer.tensor.is_pinned()
    buffer.close()
