"""Entry point of every rank: `torchrun --nproc-per-node N -m grpo_megatron.train FILE [key.path=value ...]`.

Exit codes: 0 done, 1 refused by the configuration or the checks before the start, 2 wrong usage, 3 failed while
running, 4 stopped by a health rule, 5 ended early on a signal with everything saved (start again to go on).
"""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from grpo_megatron.config.loader import load_config
from grpo_megatron.config.problems import ConfigError
from grpo_megatron.platform.environment import end_early_on_signals, end_with_launcher, read_launch_environment
from grpo_megatron.scheduler.checks import check_start

USAGE = "usage: torchrun --nproc-per-node N -m grpo_megatron.train FILE [key.path=value ...]"


def main(arguments: Sequence[str]) -> int:
    """Parse, build, run, close; returns the exit code."""
    launch = read_launch_environment()
    end_early_on_signals(exit_code=5)
    if launch.master_port:
        end_with_launcher()
    say = print if launch.rank == 0 else (lambda *_, **__: None)
    if not arguments or arguments[0].startswith("-"):
        say(USAGE, file=sys.stderr)
        return 2
    try:
        loaded = load_config(Path(arguments[0]), arguments[1:])
        check = check_start(loaded, world_size=launch.world_size, ranks_per_machine=launch.local_world_size)
        if check.problems:
            raise ConfigError(check.problems)
    except ConfigError as error:
        say(error, file=sys.stderr)
        return 1

    # Only now the heavy libraries: a typo is answered at once.
    from grpo_megatron.platform.megatron_on_cpu import install

    install()
    from grpo_megatron.scheduler.session import run_session

    return run_session(loaded, launch)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        code = 3
    sys.exit(code)
