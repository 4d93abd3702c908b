"""What a configuration means, before anything starts: values and where they come from, layout, memory, refusals.

    python tools/check_config.py FILE [key.path=value ...] [--world-size N]

Imports no deep-learning library. Exit codes: 0 it can run, 1 refused, 2 wrong usage.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.config.availability import find_refusals
from grpo_megatron.config.loader import LoadedConfig, load_config
from grpo_megatron.config.model_fit import find_misfits
from grpo_megatron.config.options import find_options, is_pass_through, value_at
from grpo_megatron.config.problems import ConfigError, Origin, Problem, format_problems, in_reading_order
from grpo_megatron.config.resolved import fingerprint
from grpo_megatron.config.schema import Config
from grpo_megatron.families.base import ModelDescription
from grpo_megatron.families.counting import RankBytes, count_parameters, count_rank_bytes
from grpo_megatron.families.describe import describe
from grpo_megatron.parallel.grid import RankGrid
from grpo_megatron.scheduler.phases import PHASES, GroupName

_MOST_RANKS_SHOWN = 16


@dataclass(frozen=True)
class Request:
    """What was asked on the command line."""

    file: Path
    overrides: tuple[str, ...]
    world_size: int | None


def main(arguments: list[str]) -> int:
    """Print the report to standard output and what is wrong to standard error."""
    request = _parse(arguments)
    try:
        loaded = load_config(request.file, request.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return _conclude(error.problems)
    config = loaded.config
    problems = find_refusals(config, world_size=request.world_size, origins=loaded.origins)
    print("\n".join(_describe_values(loaded)))
    model, model_problems = _read_model(loaded, refused={problem.key for problem in problems})
    grid = _make_grid(config, request.world_size)
    if grid is not None:
        print("\n".join(_describe_ranks(grid, is_given=request.world_size is not None)))
        print("\n".join(_describe_batch(config, grid)))
        stages: list[RankBytes] = []
        if model is not None:
            try:
                stages = _count_stages(config, model, grid)
            except ValueError as error:
                model_problems += _as_problems(error, loaded)
            print("\n".join(_describe_model(config, model, stages)))
        print("\n".join(_describe_phases(config, stages)))
    problems = in_reading_order([*problems, *model_problems])
    if problems:
        print(flush=True)
        print(format_problems(problems), file=sys.stderr)
    return _conclude(problems)


def _parse(arguments: list[str]) -> Request:
    parser = argparse.ArgumentParser(
        usage="check_config.py FILE [key.path=value ...] [--world-size N]",
        description="Say what a configuration means, without starting anything.",
        epilog="FILE is YAML, for instance examples/seed.yaml; key.path=value replaces a value of the file.",
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--world-size", type=_positive, metavar="N", help="ranks that torchrun will start")
    options = parser.parse_intermixed_args(arguments)
    if not options.words:
        parser.error("FILE is missing")
    return Request(Path(options.words[0]), tuple(options.words[1:]), options.world_size)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks")
    return int(text)


def _conclude(problems: list[Problem]) -> int:
    if problems:
        count = len(problems)
        print(f"\nrefused: {count} {'thing' if count == 1 else 'things'} to change", file=sys.stderr)
        return 1
    print("\nfine: this can start")
    return 0


def _describe_values(loaded: LoadedConfig) -> Iterator[str]:
    """One line a key, a star before those that were set."""
    rows = [(key, _written(value), str(loaded.origins[key])) for key, value in _values(loaded)]
    key_width = max(len(key) for key, _, _ in rows)
    value_width = min(44, max(len(value) for _, value, _ in rows))
    yield "values"
    for key, value, origin in rows:
        yield f"{' ' if origin == 'default' else '*'} {key:{key_width}}  {value:{value_width}}  {origin}"
    yield f"fingerprint {fingerprint(loaded.config)[:16]}"


def _values(loaded: LoadedConfig) -> Iterator[tuple[str, object]]:
    for key in find_options():
        value = value_at(loaded.config, key)
        if is_pass_through(key):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_written, value))}]"
    return str(value).replace("\n", "\\n")


def _make_grid(config: Config, world_size: int | None) -> RankGrid | None:
    """None when the ranks do not divide; the refusals say so."""
    sizes = {name: getattr(config.parallel, name) for name in ("tensor", "pipeline", "context")}
    one_replica = config.parallel.tensor * config.parallel.pipeline * config.parallel.context
    if world_size is not None and world_size % one_replica:
        return None
    return RankGrid(world_size or one_replica, **sizes)


def _describe_ranks(grid: RankGrid, *, is_given: bool) -> Iterator[str]:
    sizes = f"tensor {grid.tensor} x pipeline {grid.pipeline} x data {grid.data}"
    yield f"\nranks: {grid.world_size} = {sizes}" + ("" if is_given else "  (one replica; tell --world-size for more)")
    for rank in range(min(grid.world_size, _MOST_RANKS_SHOWN)):
        place = grid.coordinates(rank)
        yield f"  rank {rank:<3}  tensor {place.tensor}  pipeline {place.pipeline}  data {place.data}"
    if grid.world_size > _MOST_RANKS_SHOWN:
        yield f"  ... to rank {grid.world_size - 1}"


def _describe_batch(config: Config, grid: RankGrid) -> Iterator[str]:
    rollout, training = config.modules.rollout, config.modules.training
    rollouts, updates = rollout.batch_size * rollout.group_size, training.num_mini_batches
    prompt_tokens, answer_tokens = config.data.max_prompt_tokens, rollout.max_new_tokens
    longest = prompt_tokens + answer_tokens
    fitting = max(1, training.micro_batch_tokens // longest)
    yield f"\nbatch: {rollout.batch_size} prompts x {rollout.group_size} answers = {rollouts} rollouts a step"
    yield (
        f"  {updates} mini-batch{'es' if updates > 1 else ''} of {_share(rollouts, updates)} rollouts,"
        f" {_share(rollouts, updates * grid.data)} for each of {grid.data} replica{'s' if grid.data > 1 else ''}"
    )
    yield f"  a rollout has at most {prompt_tokens} + {answer_tokens} = {longest} tokens;"
    yield f"  a micro-batch of {training.micro_batch_tokens} tokens takes {fitting} that long"
    steps = config.run.steps
    yield f"  the run: {steps} steps, {steps * rollout.batch_size} prompts, {steps * rollouts} rollouts"


def _share(total: int, parts: int) -> str:
    return str(total // parts) if total % parts == 0 else f"about {total / parts:.1f}"


def _read_model(loaded: LoadedConfig, *, refused: set[str]) -> tuple[ModelDescription | None, list[Problem]]:
    """The model's sizes, and what is wrong with it; nothing when its folder is refused already."""
    folder = loaded.config.model.policy
    if folder is None or not (Path(folder) / "config.json").is_file():
        assert "model.policy" in refused, folder
        return None, []
    try:
        model = describe(Path(folder))
    except ValueError as error:
        origin = loaded.origins["model.policy"]
        return None, [Problem(origin.file, origin.line, "model.policy", line) for line in str(error).splitlines()]
    sizes = {"max_positions": model.max_positions, "vocab_size": model.vocab_size}
    return model, find_misfits(loaded.config, **sizes, origins=loaded.origins)


def _as_problems(error: ValueError, loaded: LoadedConfig) -> list[Problem]:
    """An error of the form `key: message`."""
    key, _, message = str(error).partition(": ")
    origin = loaded.origins.get(key, Origin(str(loaded.file)))
    return [Problem(origin.file, origin.line, key, message)]


def _count_stages(config: Config, model: ModelDescription, grid: RankGrid) -> list[RankBytes]:
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


def _describe_model(config: Config, model: ModelDescription, stages: list[RankBytes]) -> Iterator[str]:
    yield f"\nmodel: {model.family}, {count_parameters(model):,} parameters, {config.model.dtype}"
    yield (
        f"  {model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads"
        f" ({model.num_key_value_heads} for keys and values), vocabulary {model.vocab_size},"
        f" {model.max_positions} positions, head {'tied' if model.tie_embeddings else 'untied'}"
    )
    for stage, size in enumerate(stages):
        yield f"  each rank of stage {stage}: {size.num_parameters:,} parameters, {_bytes(size.total)} together"
        yield (
            f"    weights {_bytes(size.parameters)}, gradients {_bytes(size.gradients)},"
            f" fp32 masters {_bytes(size.masters)}, Adam moments {_bytes(size.moments)}"
        )


def _describe_phases(config: Config, stages: list[RankBytes]) -> Iterator[str]:
    """What each phase needs, with the bytes on the fullest rank where the model is known."""
    fullest = max(stages, key=lambda stage: stage.total, default=None)
    groups: dict[GroupName, int | None] = dict.fromkeys(
        ("policy_parameters", "policy_gradients", "optimizer_masters", "optimizer_moments")
    )
    if fullest is not None:
        groups["policy_parameters"], groups["policy_gradients"] = fullest.parameters, fullest.gradients
        groups["optimizer_masters"], groups["optimizer_moments"] = fullest.masters, fullest.moments
    if "reference_model" in config.modules.inference.models:
        groups["reference_parameters"] = groups["policy_parameters"]
    yield f"\nphases ({config.schedule_mode}; {_offload_in_words(config)})"
    for number, phase in enumerate(config.schedule.order, start=1):
        needed = [group for group in groups if group in PHASES[phase]]
        if "kv_cache" in PHASES[phase]:
            needed.append("kv_cache")
        shown = [f"{group} {_bytes(size)}" if (size := groups.get(group)) is not None else group for group in needed]
        beside = "  beside it: rewards" if phase == "rollout" and "rewards" in config.schedule.overlap else ""
        yield f"  {number} {phase:8} needs {', '.join(shown)}{beside}"


def _offload_in_words(config: Config) -> str:
    memory = config.memory_management
    if not memory.dynamic_offload:
        return "everything stays on the device"
    if memory.offload_trigger_threshold == 0:
        return "what a phase does not need leaves the device"
    return f"what a phase does not need leaves the device above {memory.offload_trigger_threshold:.0%}"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
