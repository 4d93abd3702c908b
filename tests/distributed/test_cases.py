"""Each multi-rank case as one test; the launch for a world size happens once, when its first case is asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import Case, all_cases

pytestmark = pytest.mark.distributed
_launched: dict[tuple[int, bool], tuple[Path, str]] = {}


@pytest.fixture
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):  # noqa: ANN201
    """Run all selected cases of a world size in one torchrun, those with engines in another; returns folder, output."""

    def run(like: Case) -> tuple[Path, str]:
        world_size, key = like.world_size, (like.world_size, like.with_engines)
        if key in _launched:
            return _launched[key]
        selected = [
            item.callspec.params["current"]
            for item in request.session.items
            if "current" in getattr(getattr(item, "callspec", None), "params", {})
        ]
        names = [case.name for case in selected if (case.world_size, case.with_engines) == key]
        folder = tmp_path_factory.mktemp(f"world-{world_size}")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        command += ["-m", "tests.distributed.harness", str(folder), *names]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=60 + like.seconds * len(names),
                cwd=Path(__file__).parents[2],
            )
            output = done.stdout
        except subprocess.TimeoutExpired as expired:
            output = f"timed out\n{(expired.stdout or b'').decode(errors='replace')}"
        _launched[key] = (folder, output)
        return _launched[key]

    return run


@pytest.mark.parametrize("current", all_cases(), ids=lambda current: f"world-{current.world_size}-{current.name}")
def test_case_holds_on_every_rank(current: Case, launch) -> None:  # noqa: ANN001
    folder, output = launch(current)
    for rank in range(current.world_size):
        result = folder / current.name / f"rank-{rank}.json"
        assert result.exists(), f"rank {rank} did not get to the end\n{output[-6000:]}"
        error = json.loads(result.read_text())["error"]
        assert error is None, f"rank {rank}\n{error}"
