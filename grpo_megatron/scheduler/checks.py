"""Everything that can be refused before the start, in a second and without torch: used by the trainer and by tools."""

from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.config.availability import find_refusals
from grpo_megatron.config.loader import LoadedConfig
from grpo_megatron.config.model_fit import find_misfits
from grpo_megatron.config.problems import Origin, Problem, in_reading_order
from grpo_megatron.families.base import ModelDescription
from grpo_megatron.families.counting import RankBytes, count_rank_bytes
from grpo_megatron.families.describe import describe
from grpo_megatron.parallel.grid import RankGrid


@dataclass(frozen=True)
class StartCheck:
    """What a configuration comes to on a number of ranks."""

    problems: tuple[Problem, ...]
    """Empty: this can start."""
    model: ModelDescription | None
    """None where `model.policy` is refused."""
    grid: RankGrid | None
    """None where the ranks do not divide."""
    stages: tuple[RankBytes, ...]
    """Bytes on a rank of each pipeline stage; empty without model or grid, or where they do not fit together."""


def check_start(loaded: LoadedConfig, *, world_size: int | None, ranks_per_machine: int | None = None) -> StartCheck:
    """Check a configuration against this version's features, the model's folder and the ranks.

    Args:
        world_size: number of ranks; None: not known yet, one replica is assumed.
        ranks_per_machine: None: all of them are on one.
    """
    config = loaded.config
    ranks = {"world_size": world_size, "ranks_per_machine": ranks_per_machine}
    problems = find_refusals(config, **ranks, origins=loaded.origins)
    model = None
    folder = config.model.policy
    if folder is not None and (Path(folder) / "config.json").is_file():
        try:
            model = describe(Path(folder))
        except ValueError as error:
            origin = loaded.origins["model.policy"]
            problems += [Problem(origin.file, origin.line, "model.policy", line) for line in str(error).splitlines()]
    if model is not None:
        sizes = {"max_positions": model.max_positions, "vocab_size": model.vocab_size}
        problems += find_misfits(config, **sizes, origins=loaded.origins)
    grid = _make_grid(loaded, world_size)
    stages: list[RankBytes] = []
    if grid is not None and model is not None:
        try:
            stages = _count_stages(loaded, model, grid)
        except ValueError as error:
            problems += _as_problems(error, loaded)
    return StartCheck(tuple(in_reading_order(problems)), model, grid, tuple(stages))


def _make_grid(loaded: LoadedConfig, world_size: int | None) -> RankGrid | None:
    parallel = loaded.config.parallel
    one_replica = parallel.tensor * parallel.pipeline * parallel.context
    if world_size is not None and world_size % one_replica:
        return None  # among the refusals
    return RankGrid(world_size or one_replica, parallel.tensor, parallel.pipeline, parallel.context)


def _count_stages(loaded: LoadedConfig, model: ModelDescription, grid: RankGrid) -> list[RankBytes]:
    config = loaded.config
    in_float32 = config.modules.training.reduce_gradients_in_float32
    return [
        count_rank_bytes(
            model,
            tensor=grid.tensor,
            pipeline=grid.pipeline,
            stage=stage,
            virtual_pipeline=config.parallel.virtual_pipeline,
            optimizer_ranks=grid.data * grid.context,
            dtype=config.model.dtype,
            gradient_dtype="float32" if in_float32 else config.model.dtype,
        )
        for stage in range(grid.pipeline)
    ]


def _as_problems(error: ValueError, loaded: LoadedConfig) -> list[Problem]:
    """From an error of the form `key: message`."""
    key, _, message = str(error).partition(": ")
    origin = loaded.origins.get(key, Origin(str(loaded.file)))
    return [Problem(origin.file, origin.line, key, message)]
