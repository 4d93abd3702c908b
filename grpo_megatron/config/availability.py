"""What a right configuration lacks before it can run here: missing models and data, and parts not there yet.

`NOT_YET` is the one table of features that have keys and no code: when a feature lands, its row goes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.config.options import value_at
from grpo_megatron.config.problems import COMMAND_LINE, Origin, Problem, in_reading_order
from grpo_megatron.config.schema import Config
from grpo_megatron.config.sglang_package import find_sglang

Origins = Mapping[str, Origin]


@dataclass(frozen=True)
class NotYet:
    """A setting that is known and refused."""

    key: str
    asked_for: Callable[[Config], bool]
    what: str
    instead: str
    """The value that works, as YAML."""
    note: str = ""
    """What is there instead."""


NOT_YET = (
    NotYet("model.drafter", lambda config: config.model.drafter is not None, "a drafter", "null"),
    NotYet(
        "parallel.virtual_pipeline",
        lambda config: config.parallel.virtual_pipeline > 1,
        "virtual pipelining",
        "1",
    ),
    NotYet("parallel.context", lambda config: config.parallel.context > 1, "context parallelism", "1"),
    NotYet("parallel.expert", lambda config: config.parallel.expert > 1, "expert parallelism", "1"),
    NotYet(
        "modules.rollout.engine",
        lambda config: config.modules.rollout.engine == "vllm",
        "the engine vllm",
        "sglang",
        "megatron is there too: it generates on the training modules",
    ),
    NotYet(
        "modules.rollout.mtp_enabled",
        lambda config: config.modules.rollout.mtp_enabled,
        "multi-token prediction",
        "false",
    ),
    NotYet(
        "modules.inference.models",
        lambda config: "reward_model" in config.modules.inference.models,
        "the reward_model",
        "[{other_models}]",
        "answers are scored by rules: modules.rewards",
    ),
    NotYet(
        "schedule_mode",
        lambda config: config.schedule_mode == "async",
        "the schedule async",
        "sync",
        "in sync the rewards overlap the rollout already",
    ),
    NotYet(
        "memory_management.offload_trigger_threshold",
        lambda config: (
            config.memory_management.dynamic_offload and config.memory_management.offload_trigger_threshold > 0
        ),
        "offload by threshold",
        "0",
        "0 moves everything that a phase does not need; dynamic_offload: false moves nothing",
    ),
    NotYet("monitor.wandb", lambda config: config.monitor.wandb, "wandb", "false", "metrics.jsonl and tensorboard are"),
)


def find_refusals(
    config: Config, *, world_size: int | None, ranks_per_machine: int | None = None, origins: Origins | None = None
) -> list[Problem]:
    """Everything that keeps this configuration from running, each with the line to add or change.

    Args:
        world_size: number of ranks, or None when it is not known yet.
        ranks_per_machine: None: all of them are on one.
        origins: those of `LoadedConfig`, so that a refusal names file and line.
    """
    origins = origins or {}
    problems = [*_find_not_yet(config, origins)]
    problems += _check_model(config.model.policy, "model.policy", origins, is_required=True)
    problems += _check_model(config.model.reference, "model.reference", origins, is_required=False)
    problems += _check_prompts(config, origins)
    problems += _check_deterministic(config, origins, {problem.key for problem in problems})
    problems += _check_world_size(config, world_size, origins)
    problems += _check_engine_ranks(config, world_size, ranks_per_machine, origins)
    problems += _check_interpreter(config, origins)
    return in_reading_order(problems)


def _find_not_yet(config: Config, origins: Origins) -> Iterator[Problem]:
    others = [model for model in config.modules.inference.models if model != "reward_model"]
    for row in NOT_YET:
        if row.asked_for(config):
            value = row.instead.format(other_models=", ".join(others))
            fix = _how_to_set(row.key, value, origins) + (f"\n({row.note})" if row.note else "")
            yield _problem(row.key, f"{row.what} is not there yet", fix, origins)


def _check_model(folder: str | None, key: str, origins: Origins, *, is_required: bool) -> Iterator[Problem]:
    if folder is None:
        if is_required:
            what = "is missing: the folder of the model to train (config.json, *.safetensors, tokenizer)"
            yield _problem(key, what, _how_to_set(key, "/path/to/hf_folder", origins), origins)
        return
    path = Path(folder)
    fix = _fix_path(folder)
    if not folder.strip():
        yield _problem(key, "is empty", "name the folder of an HF model", origins)
    elif not path.exists():
        owner, slash, name = folder.partition("/")
        if slash and "/" not in name and owner not in ("", ".", "..", "~") and not Path(owner).exists():
            fix = f"nothing is downloaded here: fetch the model first and name its folder\n({fix})"
        yield _problem(key, f"{folder} is not there", fix, origins)
    elif not path.is_dir():
        yield _problem(key, f"{folder} is a file; expected a folder", f"name its folder: {path.parent}", origins)
    elif not any(path.iterdir()):
        yield _problem(
            key, f"the folder {folder} is empty", "put config.json, *.safetensors and tokenizer there", origins
        )
    elif not (path / "config.json").is_file():
        inner = next((inner for inner in sorted(path.iterdir()) if (inner / "config.json").is_file()), None)
        fix = f"did you mean {inner}?" if inner else "an HF folder has config.json, *.safetensors and a tokenizer"
        yield _problem(key, f"there is no config.json in {folder}", fix, origins)
    elif not any(path.glob("*.safetensors")):
        fix = "save the model as safetensors (transformers: save_pretrained)"
        yield _problem(key, f"there are no *.safetensors in {folder}", fix, origins)


def _check_prompts(config: Config, origins: Origins) -> Iterator[Problem]:
    if not config.data.prompts:
        what = "is missing: JSONL files with the prompts to train on"
        yield _problem("data.prompts", what, _how_to_set("data.prompts", "[/path/to/prompts.jsonl]", origins), origins)
    for key in ("data.prompts", "data.evaluation"):
        for index, file in enumerate(value_at(config, key)):
            for what, fix in _check_prompt_file(file):
                yield _problem(key, what, fix, origins, index=index)


def _check_prompt_file(file: str) -> Iterator[tuple[str, str]]:
    path = Path(file)
    if not file.strip():
        yield "an empty name in the list", "name a JSONL file"
    elif not path.exists():
        yield f"{file} is not there", _fix_path(file)
    elif path.is_dir():
        inside = next(iter(sorted(path.glob("*.jsonl"))), None)
        yield f"{file} is a folder; expected JSONL files", f"name the files, for instance {inside or path / 'x.jsonl'}"
    elif path.stat().st_size == 0:
        yield f"{file} is empty", 'write one JSON object a line, for instance {"prompt": "3 + 5 =", "answer": "8"}'


def _check_deterministic(config: Config, origins: Origins, refused_keys: set[str]) -> Iterator[Problem]:
    if not config.run.deterministic:
        return
    for key, needed in (("modules.rollout.engine", "megatron"), ("schedule_mode", "sync")):
        if value_at(config, key) != needed and key not in refused_keys:
            message = f"needs {key}: {needed}, it is {value_at(config, key)}"
            yield _problem("run.deterministic", message, _how_to_set(key, needed, origins), origins)


def _check_world_size(config: Config, world_size: int | None, origins: Origins) -> Iterator[Problem]:
    sizes = {name: getattr(config.parallel, name) for name in ("tensor", "pipeline", "context")}
    replica = sizes["tensor"] * sizes["pipeline"] * sizes["context"]
    if world_size is not None and world_size % replica:
        named = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        ranks = "1 rank is" if world_size == 1 else f"{world_size} ranks are"
        message = f"{ranks} no multiple of {replica} ({named})"
        key = next(f"parallel.{name}" for name, size in sizes.items() if size > 1)
        fix = f"start {replica * -(-world_size // replica)} ranks (torchrun --nproc-per-node), or lower a size"
        yield _problem(key, message, fix, origins)


def _check_engine_ranks(
    config: Config, world_size: int | None, ranks_per_machine: int | None, origins: Origins
) -> Iterator[Problem]:
    """An engine in processes of its own takes the devices of `tensor` neighbouring ranks of one machine."""
    rollout, key = config.modules.rollout, "modules.rollout.tensor"
    size = config.engine_tensor
    ranks = ranks_per_machine or world_size
    if rollout.engine == "megatron" or ranks is None or ranks % size == 0:
        return
    if rollout.tensor is None and world_size is not None and world_size % size:
        return  # the same is said of parallel.tensor
    fitting = [str(divisor) for divisor in range(1, ranks + 1) if ranks % divisor == 0]
    message = f"engines of {size} ranks cannot share the {ranks} rank{'s' if ranks > 1 else ''} of a machine"
    advice = f"possible here: {', '.join(fitting)}\n" + _how_to_set(key, fitting[-1], origins)
    yield _problem(key, message, advice, origins)


def _check_interpreter(config: Config, origins: Origins) -> Iterator[Problem]:
    """Is the engine's library there, in the interpreter that is to run it?"""
    rollout = config.modules.rollout
    if rollout.python is not None and not Path(rollout.python).is_file():
        yield _problem("modules.rollout.python", f"{rollout.python} is not there", "name an interpreter", origins)
    elif rollout.engine == "sglang":
        package = find_sglang(rollout.python)
        if package.folder is None:
            key, fix = "modules.rollout.python", package.fix
            if rollout.python is None:
                key = "modules.rollout.engine"
                fix += "\nor take the engine that needs no installation:\n" + _how_to_set(key, "megatron", origins)
            yield _problem(key, f"the engine sglang cannot start: {package.message}", fix, origins)


def _problem(key: str, message: str, fix: str, origins: Origins, *, index: int | None = None) -> Problem:
    origin = origins.get(f"{key}.{index}", origins.get(key, Origin("configuration")))
    return Problem(origin.file, origin.line, key, message, fix)


def _fix_path(path: str) -> str:
    if path.startswith("~"):
        return f"write the whole path: {Path(path).expanduser()}"
    existing = next(parent for parent in Path(path).absolute().parents if parent.exists())
    return f"looked for {Path(path).absolute()}; what exists of it is {existing}"


def _how_to_set(key: str, value: str, origins: Origins) -> str:
    """The line to write, for the place where the key stands now."""
    section, _, name = key.rpartition(".")
    origin = origins.get(key)
    command = f"'{key}={value}'" if set(value) & set(" [*?") else f"{key}={value}"
    if origin is not None and origin.file == COMMAND_LINE:
        return f"write  {command}"
    if origin is not None and origin.line is not None:
        return f"line {origin.line} becomes  {name}: {value}\nor add to the command  {command}"
    under, missing = _nearest_given_section(section, origins)
    lines = [*missing, f"{name}: {value}"]
    nested = "".join(
        "\n" + "  " * (depth + 1) + line + (":" if depth < len(lines) - 1 else "") for depth, line in enumerate(lines)
    )
    place = f"add below line {origins[under].line} ({under}:)" if under else "add to the file"
    return f"{place}{nested}\nor to the command  {command}"


def _nearest_given_section(section: str, origins: Origins) -> tuple[str, list[str]]:
    """The innermost section that the file has already, and the names still missing below it."""
    names = section.split(".") if section else []
    for length in range(len(names), 0, -1):
        given = ".".join(names[:length])
        if given in origins and origins[given].line is not None:
            return given, names[length:]
    return "", names
