"""A process that trains and saves, and stops for ever with one file of the third save written.

`python -m tests.checkpoint.save_until_killed MODEL CHECKPOINTS`. Version n is the policy after n steps. It says
`saved 1`, `saved 2`, `writing 3`.
"""

import sys
import time
from pathlib import Path
from typing import Any

from grpo_megatron.platform.megatron_on_cpu import install


def main(model: Path, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from grpo_megatron.checkpoint.base import OneProcess
    from grpo_megatron.checkpoint.checkpointer import RunState, open_checkpointer
    from grpo_megatron.checkpoint.random_state import RandomState
    from grpo_megatron.parallel.grid import RankGrid
    from grpo_megatron.parallel.groups import build_groups
    from tests.checkpoint.policies import TinyPolicy
    from tests.checkpoint.stores import DESCRIPTION

    torch.set_num_threads(1)
    groups = build_groups(RankGrid(1), backend="gloo", timeout_seconds=60, store=dist.HashStore())
    policy = TinyPolicy(model, groups, dtype="bfloat16")
    checkpointer = open_checkpointer(folder, keep=1, coordination=OneProcess())
    for step in range(3):
        if step == 2:
            _stop_after_first_file(FileSystemWriterAsync)
        policy.train(range(step, step + 1))
        state = RunState(per_rank={"random": RandomState()})
        checkpointer.save(step + 1, policy.state, state, DESCRIPTION)
        print(f"saved {step + 1}", flush=True)


def _stop_after_first_file(writer: Any) -> None:
    write = writer.write_preloaded_data

    def write_and_stop(transforms: Any, index: int, *args: Any, **kwargs: Any) -> None:
        if index == 0:
            write(transforms, index, *args, **kwargs)
            print("writing 3", flush=True)
        time.sleep(600)

    writer.write_preloaded_data = staticmethod(write_and_stop)


if __name__ == "__main__":
    install()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
