"""What two keys together make wrong, and settings that would be ignored: both are refused, never passed over.

One rule is one row. Texts may name values as `{training.learning_rate}`; the names are those of `_names`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from grpo_megatron.config.megatron_fields import check_megatron_section
from grpo_megatron.config.options import find_options, nearest, value_at
from grpo_megatron.config.problems import Origin, Problem, shown
from grpo_megatron.config.schema import REWARD_NAMES, Config
from grpo_megatron.config.sglang_fields import check_sglang_section

_STEP_ORDER = ("rollout", "score", "update", "publish")
_PHASE_NEEDS = {"score": "the rollouts", "update": "the scores", "publish": "the updated weights"}
_LISTS_WITHOUT_REPEATS = (
    "data.prompts",
    "data.evaluation",
    "modules.inference.models",
    "modules.rollout.stop_token_ids",
    "schedule.overlap",
)


@dataclass(frozen=True)
class Rule:
    """A relation between keys that must not hold."""

    key: str
    """The key that the problem is shown at."""
    others: tuple[str, ...]
    """The other keys that the rule looks at; it is skipped while one of them is wrong in itself."""
    broken: Callable[[Config], bool]
    message: str
    fix: str


def _changed(config: Config, key: str) -> bool:
    """Is the value another than the default? A default that is written out is no setting that gets lost."""
    return bool(value_at(config, key) != find_options()[key].default)


RULES = (
    Rule(
        "run.name",
        (),
        lambda config: config.run.name is not None and config.run.name in ("", ".", ".."),
        "'{run.name}' is no name for a folder",
        "write a name, or remove the line to use the configuration file's name",
    ),
    Rule(
        "run.name",
        (),
        lambda config: config.run.name is not None and any(mark in config.run.name for mark in "/\\\n\0"),
        "'{run.name}' is a path, not a name",
        "put the folder into run.folder and only the name here",
    ),
    Rule(
        "modules.rewards.timeout_seconds",
        ("run.phase_deadline_seconds",),
        lambda config: config.modules.rewards.timeout_seconds >= config.run.phase_deadline_seconds,
        "{rewards.timeout_seconds} s are not below run.phase_deadline_seconds ({run.phase_deadline_seconds} s)",
        "give the phase more time than one score",
    ),
    Rule(
        "model.reference",
        ("modules.inference.models",),
        lambda config: config.model.reference is not None and "reference_model" not in config.modules.inference.models,
        "would be ignored, because no reference model runs",
        'add "reference_model" to modules.inference.models, or remove the line',
    ),
    Rule(
        "model.reward_model",
        ("modules.inference.models",),
        lambda config: config.model.reward_model is not None and "reward_model" not in config.modules.inference.models,
        "would be ignored, because no reward model runs",
        'add "reward_model" to modules.inference.models, or remove the line',
    ),
    Rule(
        "parallel.virtual_pipeline",
        ("parallel.pipeline",),
        lambda config: config.parallel.virtual_pipeline > 1 and config.parallel.pipeline == 1,
        "{parallel.virtual_pipeline} needs pipeline stages, and parallel.pipeline is 1",
        "set parallel.pipeline to 2 or more, or virtual_pipeline: 1",
    ),
    Rule(
        "parallel.sequence_parallel",
        ("parallel.tensor",),
        lambda config: config.parallel.sequence_parallel and config.parallel.tensor == 1,
        "has nothing to split over, because parallel.tensor is 1",
        "set parallel.tensor to 2 or more, or sequence_parallel: false",
    ),
    Rule(
        "data.evaluation",
        ("data.prompts",),
        lambda config: bool(set(config.data.evaluation) & set(config.data.prompts)),
        "a file is in data.prompts too, so the model would be tested on what it was trained on",
        "give different files to the two",
    ),
    Rule(
        "data.system_message",
        ("data.apply_chat_template",),
        lambda config: config.data.system_message is not None and not config.data.apply_chat_template,
        "would be ignored, because data.apply_chat_template is false",
        "remove the line, or set apply_chat_template: true",
    ),
    *(
        Rule(
            f"modules.rollout.{name}",
            ("modules.rollout.engine",),
            lambda config, key=f"modules.rollout.{name}": (  # type: ignore[misc]
                _changed(config, key) and config.modules.rollout.engine == "megatron"
            ),
            "would be ignored, because the megatron engine runs in the trainer's own process",
            "remove the line",
        )
        for name in ("python", "engine_threads", "engine_stall_seconds", "max_engine_restarts", "publish_bucket_bytes")
    ),
    Rule(
        "modules.rollout.engine_stall_seconds",
        ("run.phase_deadline_seconds",),
        lambda config: (
            config.modules.rollout.engine != "megatron"
            and config.modules.rollout.engine_stall_seconds >= config.run.phase_deadline_seconds
        ),
        "{rollout.engine_stall_seconds} s are not below run.phase_deadline_seconds ({run.phase_deadline_seconds} s), "
        "so an engine that hangs would end the run",
        "lower it, or give the phase more time",
    ),
    Rule(
        "modules.rollout.tensor",
        ("modules.rollout.engine", "parallel.tensor"),
        lambda config: (
            config.modules.rollout.engine == "megatron"
            and config.modules.rollout.tensor not in (None, config.parallel.tensor)
        ),
        "{rollout.tensor} cannot be: the megatron engine has the trainer's parallel.tensor ({parallel.tensor})",
        "remove the line",
    ),
    Rule(
        "modules.training.minimum_learning_rate",
        ("modules.training.learning_rate",),
        lambda config: config.modules.training.minimum_learning_rate > config.modules.training.learning_rate,
        "{training.minimum_learning_rate} is above learning_rate ({training.learning_rate})",
        "lower it, or raise learning_rate",
    ),
    Rule(
        "modules.training.minimum_learning_rate",
        ("modules.training.decay",),
        lambda config: (
            config.modules.training.minimum_learning_rate > 0 and config.modules.training.decay == "constant"
        ),
        "would be ignored, because the learning rate does not decay (decay: constant)",
        "set decay: linear or decay: cosine, or remove the line",
    ),
    Rule(
        "modules.training.num_mini_batches",
        ("modules.rollout.batch_size",),
        lambda config: config.modules.training.num_mini_batches > config.modules.rollout.batch_size,
        "{training.num_mini_batches} mini-batches, and a step has {rollout.batch_size} groups, which are not cut",
        "lower it to {rollout.batch_size} or less",
    ),
    Rule(
        "schedule.overlap",
        (),
        lambda config: "rewards" not in config.schedule.overlap,
        "rewards are always computed beside the rollout",
        "remove the key, or write  overlap: [rewards]",
    ),
    Rule(
        "modules.training.kl.coefficient",
        ("modules.inference.models",),
        lambda config: (
            config.modules.training.kl.coefficient > 0 and "reference_model" not in config.modules.inference.models
        ),
        "{training.kl.coefficient} needs the reference model's log-probs, and no reference model runs",
        'add "reference_model" to modules.inference.models, or set coefficient: 0',
    ),
    Rule(
        "modules.training.kl.estimator",
        ("modules.training.kl.coefficient", "modules.inference.models"),
        lambda config: (
            _changed(config, "modules.training.kl.estimator")
            and config.modules.training.kl.coefficient == 0
            and "reference_model" not in config.modules.inference.models
        ),
        "would be ignored, because no reference model runs",
        'add "reference_model" to modules.inference.models, or remove the line',
    ),
    Rule(
        "modules.training.mismatch.cap",
        ("modules.training.mismatch.correction",),
        lambda config: (
            _changed(config, "modules.training.mismatch.cap") and config.modules.training.mismatch.correction == "none"
        ),
        "would be ignored, because mismatch.correction is none",
        "set correction: truncate, or remove the line",
    ),
    Rule(
        "modules.training.mismatch.correction",
        ("modules.training.ratio_reference",),
        lambda config: (
            config.modules.training.mismatch.correction != "none"
            and config.modules.training.ratio_reference == "bypass"
        ),
        "has nothing to correct: with ratio_reference: bypass the ratio is taken to the engine's log-probs already",
        "set ratio_reference: proximal, or correction: none",
    ),
    Rule(
        "memory_management.offload_trigger_threshold",
        ("memory_management.dynamic_offload",),
        lambda config: (
            _changed(config, "memory_management.offload_trigger_threshold")
            and not config.memory_management.dynamic_offload
        ),
        "would be ignored, because dynamic_offload is false",
        "set dynamic_offload: true, or remove the line",
    ),
    Rule(
        "memory_management.far_folder",
        ("memory_management.dynamic_offload",),
        lambda config: config.memory_management.far_folder is not None and not config.memory_management.dynamic_offload,
        "would be ignored, because dynamic_offload is false",
        "set dynamic_offload: true, or remove the line",
    ),
    Rule(
        "monitor.gap_warn",
        ("monitor.gap_alert",),
        lambda config: config.monitor.gap_warn > config.monitor.gap_alert,
        "{monitor.gap_warn} is above gap_alert ({monitor.gap_alert}), so the alert would come before the warning",
        "lower gap_warn, or raise gap_alert",
    ),
    *(
        Rule(
            f"monitor.{name}",
            ("data.evaluation",),
            lambda config, name=name: bool(getattr(config.monitor, name)) and not config.data.evaluation,  # type: ignore[misc]
            "there is nothing to evaluate on, because data.evaluation is empty",
            "set data.evaluation to JSONL files with held-out prompts, or remove the line",
        )
        for name in (
            "evaluate_every_steps",
            "evaluate_at_start",
            "evaluate_at_end",
            "evaluation_max_new_tokens",
        )
    ),
    *(
        Rule(
            name,
            ("modules.rollout.engine",),
            lambda config, name=name: bool(getattr(config, name)) and config.modules.rollout.engine != name,  # type: ignore[misc]
            "would be ignored, because modules.rollout.engine is {rollout.engine}",
            f"set modules.rollout.engine: {name}, or remove the section",
        )
        for name in ("sglang", "vllm")
    ),
)


def check_rules(config: Config, origins: Mapping[str, Origin], *, doubtful: Set[str], file: str) -> list[Problem]:
    """All broken rules; those that look at a `doubtful` key, or one in a doubtful section, wait until it is mended."""
    names = _names(config)
    problems = []
    for rule in RULES:
        keys = (rule.key, *rule.others)
        if not any(_is_in(key, doubtful) for key in keys) and rule.broken(config):
            origin = next((origins[key] for key in keys if key in origins), Origin(file))
            message, fix = rule.message.format(**names), rule.fix.format(**names)
            problems.append(Problem(origin.file, origin.line, rule.key, message, fix))
    for key, message, fix in _found_in_lists(config):
        if not _is_in(key, doubtful):
            origin = origins.get(key, Origin(file))
            problems.append(Problem(origin.file, origin.line, key, message, fix))
    return problems


def _is_in(key: str, doubtful: Set[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in doubtful)


def _names(config: Config) -> dict[str, Any]:
    rollout = config.modules.rollout
    return {
        "run": config.run,
        "parallel": config.parallel,
        "rollout": rollout,
        "rewards": config.modules.rewards,
        "training": config.modules.training,
        "monitor": config.monitor,
        "rollouts": rollout.batch_size * rollout.group_size,
    }


def _found_in_lists(config: Config) -> Iterator[tuple[str, str, str]]:
    for key in _LISTS_WITHOUT_REPEATS:
        repeated = [value for value, count in Counter(value_at(config, key)).items() if count > 1]
        if repeated:
            yield key, f"{', '.join(map(shown, repeated))} is there twice", "keep one"
    yield from _check_order(config.schedule.order)
    yield from _check_reward(config.modules.rewards.default)
    for name, message, fix in check_megatron_section(config.megatron):
        yield f"megatron.{name}" if name else "megatron", message, fix
    rollout = config.modules.rollout
    if rollout.engine == "sglang":
        for name, message, fix in check_sglang_section(config.sglang, rollout.python):
            yield f"sglang.{name}", message, fix


def _check_order(order: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    key, fix = "schedule.order", f"write  order: [{', '.join(_STEP_ORDER)}]"
    missing = [phase for phase in _STEP_ORDER if phase not in order]
    repeated = [phase for phase, count in Counter(order).items() if count > 1]
    if missing:
        yield key, f"{', '.join(missing)} is missing; a step has each phase once", fix
    elif repeated:
        yield key, f"{', '.join(repeated)} is there twice; a step has each phase once", fix
    else:
        for phase, before in zip(_STEP_ORDER[1:], _STEP_ORDER, strict=False):
            if order.index(phase) < order.index(before):
                yield key, f"{phase} stands before {before}, and needs {_PHASE_NEEDS[phase]} from it", fix


def _check_reward(name: str) -> Iterator[tuple[str, str, str]]:
    module, colon, function = name.partition(":")
    if name in REWARD_NAMES or (colon and all(map(str.isidentifier, [*module.split("."), *function.split(".")]))):
        return
    meant = nearest(name, REWARD_NAMES)
    fix = f"did you mean {meant}?" if meant else "write your own as  module:function"
    yield "modules.rewards.default", f"{shown(name)} is no reward; known: {', '.join(REWARD_NAMES)}", fix
