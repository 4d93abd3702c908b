"""A real SGLang server for tests."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config.schema import Config, ModelSection, ModulesSection, RolloutSection, RunSection
from grpo_megatron.families.describe import describe
from grpo_megatron.platform.device import current_platform
from grpo_megatron.rollout.sglang.build import EngineGroup, build_sglang_engine
from grpo_megatron.rollout.sglang.engine import SglangEngine

NEEDS_SGLANG = pytest.mark.skipif(find_spec("sglang") is None, reason="bash tools/install_sglang.sh")
"""The package is not imported for it: nothing of SGLang belongs into the trainer's process."""


def start_sglang(
    folder: Path,
    logs: Path,
    *,
    max_sequence_tokens: int = 128,
    tensor: int = 1,
    dtype: str = "float32",
    sglang: Mapping[str, Any] | None = None,
    **rollout: object,
) -> SglangEngine:
    """An engine that serves the folder's weights; `set_version` makes them count as published."""
    settings = {"max_concurrent_rollouts": 32, "engine_stall_seconds": 5.0, "engine_threads": 1, **rollout}
    config = Config(
        run=RunSection(start_deadline_seconds=300.0),
        model=ModelSection(policy=str(folder), dtype=dtype),  # type: ignore[arg-type]
        modules=ModulesSection(rollout=RolloutSection(engine="sglang", **settings)),  # type: ignore[arg-type]
        sglang=dict(sglang or {}),
    )
    return build_sglang_engine(
        config,
        EngineGroup(rank=0, local_rank=0, local_world_size=tensor, world_size=tensor, tensor=tensor),
        current_platform(),
        describe(folder),
        decode=lambda ids: " ".join(map(str, ids)),
        max_sequence_tokens=max_sequence_tokens,
        logs=logs,
        say=print,
    )
