"""The list of all keys, read off the dataclasses in `schema.py`: type in words, default, nearest name."""

import dataclasses
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from grpo_megatron.config.schema import Config

_FAMILIAR_NAMES = {
    "lr": "modules.training.learning_rate",
    "min_lr": "modules.training.minimum_learning_rate",
    "beta": "modules.training.kl.coefficient",
    "kl_coef": "modules.training.kl.coefficient",
    "eps": "modules.training.adam_epsilon",
    "clip_grad": "modules.training.clip_gradient_norm",
    "n": "modules.rollout.group_size",
    "num_generations": "modules.rollout.group_size",
    "num_samples": "modules.rollout.group_size",
    "prompts_per_step": "modules.rollout.batch_size",
    "train_batch_size": "modules.rollout.batch_size",
    "max_tokens": "modules.rollout.max_new_tokens",
    "max_response_length": "modules.rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "backend": "modules.rollout.engine",
    "tp": "parallel.tensor",
    "tensor_parallel_size": "parallel.tensor",
    "pp": "parallel.pipeline",
    "pipeline_parallel_size": "parallel.pipeline",
    "cp": "parallel.context",
    "ep": "parallel.expert",
    "vpp": "parallel.virtual_pipeline",
    "ref_model": "model.reference",
    "model_path": "model.policy",
    "train_files": "data.prompts",
    "val_files": "data.evaluation",
    "max_steps": "run.steps",
    "num_steps": "run.steps",
    "save_steps": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "output_dir": "run.folder",
}
"""Names for the same things in other programs of this kind: what a suggestion may start from, never accepted."""


@dataclass(frozen=True)
class Option:
    """One key that can be set.

    Example:
        >>> find_options()["run.steps"].default
        100
    """

    key: str
    annotation: Any
    default: Any

    @property
    def expected(self) -> str:
        """What may be written, in words."""
        return expected_in_words(self.annotation)


@lru_cache(maxsize=1)
def find_options() -> dict[str, Option]:
    """All keys in the order of the schema."""
    return {option.key: option for option in _walk(Config, "")}


@lru_cache(maxsize=1)
def find_sections() -> frozenset[str]:
    """Dotted names of everything that has keys below it; the empty name is the file itself."""
    parents = (key.split(".")[:-1] for key in find_options())
    return frozenset(".".join(parts[:length]) for parts in parents for length in range(len(parts) + 1))


def is_pass_through(key: str) -> bool:
    """Is this a section whose keys belong to another program?"""
    option = find_options().get(key)
    return option is not None and get_origin(option.annotation) is dict


def list_options() -> str:
    """Every key with its default, one to a line."""
    return "".join(f"{option.key} = {option.default!r}\n" for option in find_options().values())


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def suggest_keys(key: str) -> list[str]:
    """The keys or sections that were probably meant, nearest first; several when equally near.

    Example:
        >>> suggest_keys("modules.rollout.learning_rate"), suggest_keys("run.stepz"), suggest_keys("zebra")
        (['modules.training.learning_rate'], ['run.steps'], [])
    """
    parent, _, name = key.rpartition(".")
    if name in _FAMILIAR_NAMES:
        return [_FAMILIAR_NAMES[name]]
    scores: dict[str, float] = {}
    for candidate in [*find_options(), *sorted(find_sections() - {""})]:
        candidate_parent, _, candidate_name = candidate.rpartition(".")
        score = _similarity(name, candidate_name)
        if score >= (0.6 if candidate_parent == parent else 0.8):
            scores[candidate] = score + (0.1 if candidate_parent == parent else 0)
    best = max(scores.values(), default=0)
    return [candidate for candidate, score in scores.items() if score == best][:3]


def nearest(name: str, choices: Sequence[str]) -> str | None:
    """The choice that was probably meant."""
    longer = [choice for choice in choices if name.lower().startswith(choice.lower())]
    if longer:
        return longer[0]
    score, meant = max(((_similarity(name.lower(), choice.lower()), choice) for choice in choices), default=(0, None))
    return meant if score >= 0.6 else None


def choices_of(annotation: Any) -> list[str]:
    """The words that may be written for an option or for an entry of its list; empty if it is not a choice."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return [str(choice) for choice in arguments]
    if origin is tuple or origin in (Union, types.UnionType):
        return [choice for argument in arguments if argument is not ... for choice in choices_of(argument)]
    return []


def expected_in_words(annotation: Any) -> str:
    """A type the way a person would say it.

    Example:
        >>> expected_in_words(Annotated[float, Gt(0), Le(1)]), expected_in_words(tuple[str, ...])
        ('a number above 0 and at most 1', 'a list, each entry text')
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [_limit_in_words(limit) for limit in annotation.__metadata__]
        return f"{expected_in_words(arguments[0])} {' and '.join(limits)}"
    if origin is Literal:
        return f"one of: {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin is tuple:
        return f"a list, each entry {expected_in_words(arguments[0])}"
    if origin in (Union, types.UnionType):
        return ", or ".join(expected_in_words(argument) for argument in arguments if argument is not type(None))
    if origin is dict:
        return "a section (keys indented below it)"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[annotation]


def _limit_in_words(limit: Any) -> str:
    match limit:
        case Ge(bound):
            return f"of at least {bound}" if bound else "not below 0"
        case Gt(bound):
            return f"above {bound}"
        case Le(bound):
            return f"at most {bound}"
        case Lt(bound):
            return f"below {bound}"
    raise AssertionError(f"no words for the limit {limit}")


def _similarity(name: str, other: str) -> float:
    return SequenceMatcher(None, name, other).ratio()


def _walk(section: type, prefix: str) -> Iterable[Option]:
    hints = get_type_hints(section, include_extras=True)
    for field in dataclasses.fields(section):
        key, annotation = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
            yield from _walk(annotation, f"{key}.")
        elif field.default_factory is not dataclasses.MISSING:
            yield Option(key, annotation, field.default_factory())
        else:
            yield Option(key, annotation, field.default)
