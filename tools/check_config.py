"""What a configuration means, before anything starts: values and where they come from, layout, memory, refusals.

    python tools/check_config.py FILE [key.path=value ...] [--world-size N] [--ranks-per-machine M]

Imports no deep-learning library. Exit codes: 0 it can run, 1 refused, 2 wrong usage.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.config.loader import LoadedConfig, load_config
from grpo_megatron.config.options import find_options, is_pass_through, value_at
from grpo_megatron.config.problems import ConfigError, Problem, format_problems
from grpo_megatron.config.resolved import fingerprint
from grpo_megatron.config.schema import Config
from grpo_megatron.config.sglang_package import find_sglang
from grpo_megatron.families.base import ModelDescription
from grpo_megatron.families.counting import RankBytes, count_parameters
from grpo_megatron.parallel.grid import RankGrid
from grpo_megatron.rollout.sglang.plan import EnginePlan, plan_engines
from grpo_megatron.scheduler.checks import check_start
from grpo_megatron.scheduler.phases import PHASES, PHASES_WITH_ENGINE_WEIGHTS, GroupName

_MOST_RANKS_SHOWN = 16


@dataclass(frozen=True)
class Request:
    """What was asked on the command line."""

    file: Path
    overrides: tuple[str, ...]
    world_size: int | None
    ranks_per_machine: int | None


def main(arguments: list[str]) -> int:
    """Print the report to standard output and what is wrong to standard error."""
    request = _parse(arguments)
    try:
        loaded = load_config(request.file, request.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return _conclude(error.problems)
    config = loaded.config
    check = check_start(loaded, world_size=request.world_size, ranks_per_machine=request.ranks_per_machine)
    print("\n".join(_describe_values(loaded)))
    if check.grid is not None:
        print("\n".join(_describe_ranks(check.grid, is_given=request.world_size is not None)))
        print("\n".join(_describe_batch(config, check.grid)))
        engines = None
        if check.model is not None:
            print("\n".join(_describe_model(config, check.model, list(check.stages))))
            if config.modules.rollout.engine == "sglang":
                engines = _plan(config, check.model, request.ranks_per_machine or check.grid.world_size)
                print("\n".join(_describe_engines(config, engines)))
        print("\n".join(_describe_phases(config, list(check.stages), engines)))
    problems = list(check.problems)
    if problems:
        print(flush=True)
        print(format_problems(problems), file=sys.stderr)
    return _conclude(problems)


def _parse(arguments: list[str]) -> Request:
    parser = argparse.ArgumentParser(
        usage="check_config.py FILE [key.path=value ...] [--world-size N] [--ranks-per-machine M]",
        description="Say what a configuration means, without starting anything.",
        epilog="FILE is YAML, for instance examples/seed.yaml; key.path=value replaces a value of the file.",
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--world-size", type=_positive, metavar="N", help="ranks that torchrun will start")
    parser.add_argument("--ranks-per-machine", type=_positive, metavar="M", help="default: all of them are on one")
    options = parser.parse_intermixed_args(arguments)
    if not options.words:
        parser.error("FILE is missing")
    return Request(Path(options.words[0]), tuple(options.words[1:]), options.world_size, options.ranks_per_machine)


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


def _plan(config: Config, model: ModelDescription, ranks_per_machine: int) -> EnginePlan:
    return plan_engines(
        config,
        model,
        tensor=config.engine_tensor,
        ranks_per_machine=ranks_per_machine,
        cores=len(os.sched_getaffinity(0)),
        max_sequence_tokens=_longest_sequence(config),
    )


def _longest_sequence(config: Config) -> int:
    answers = (config.modules.rollout.max_new_tokens, config.monitor.evaluation_max_new_tokens or 0)
    return config.data.max_prompt_tokens + max(answers)


def _describe_engines(config: Config, plan: EnginePlan) -> Iterator[str]:
    """Engines in processes of their own."""
    rollout = config.modules.rollout
    version = find_sglang(rollout.python).version or "not installed"
    threads = "" if rollout.engine_threads else f" of this machine's {len(os.sched_getaffinity(0))} cores"
    where = f" in {rollout.python}" if rollout.python else ""
    yield f"\nengines: {plan.num_engines} on a machine, tensor {plan.tensor}, sglang {version}{where}"
    yield f"  each rank of an engine: {_counted(plan.threads, 'thread')}{threads}, weights {_bytes(plan.weight_bytes)},"
    yield f"    keys and values {_bytes(plan.cache_bytes)}"
    yield (
        f"  each engine: {_counted(rollout.max_concurrent_rollouts, 'answer')} at once, room for at most "
        f"{plan.cache_tokens:,} tokens (longest prompt and answer {_longest_sequence(config)})"
    )
    yield (
        f"  silent for {rollout.engine_stall_seconds:g} s and no answer to a probe: it hangs;"
        f" {_counted(rollout.max_engine_restarts, 'restart')} in a run"
    )
    yield f"  a publish sends pieces of at most {_bytes(rollout.publish_bucket_bytes)}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _describe_phases(config: Config, stages: list[RankBytes], engines: EnginePlan | None) -> Iterator[str]:
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
    needs = PHASES if config.modules.rollout.engine == "megatron" else PHASES_WITH_ENGINE_WEIGHTS
    groups["engine_weights"] = None if engines is None else engines.weight_bytes
    groups["kv_cache"] = None if engines is None else engines.cache_bytes
    yield f"\nphases ({config.schedule_mode}; {_offload_in_words(config)})"
    for number, phase in enumerate(config.schedule.order, start=1):
        needed = [group for group in groups if group in needs[phase]]
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
