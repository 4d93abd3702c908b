"""A rank that hangs in a call says where, when another one has waited too long for it."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from grpo_megatron.parallel.store import SharedStore

pytestmark = pytest.mark.unit

HANGING = """
import sys, time
from pathlib import Path
import torch.distributed as dist
from grpo_megatron.parallel.store import STACKS_SIGNAL, SharedStore
from grpo_megatron.utils.logging import dump_stacks_on

file = dump_stacks_on(STACKS_SIGNAL, Path(sys.argv[1]), rank=1)
store = SharedStore(dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False), rank=1, world_size=2)

def where_it_hangs():
    time.sleep(60)

where_it_hangs()
"""


def test_the_stacks_of_a_missing_rank_are_written(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = SharedStore(server, rank=0, world_size=2)
    other = subprocess.Popen([sys.executable, "-W", "ignore", "-c", HANGING, str(tmp_path), str(server.port)])
    try:
        store.get("process/rank-1", deadline_seconds=60)
        with pytest.raises(TimeoutError, match=r"ranks \[1\] did not arrive"):
            store.meet("step", what="a step", deadline_seconds=0.1)
        file, deadline = tmp_path / "stacks-rank-1.log", time.monotonic() + 20
        while "where_it_hangs" not in file.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "where_it_hangs" in file.read_text()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
