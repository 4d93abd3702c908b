"""Streams an HF folder's weights into the model chunks of this rank. Each rank reads only what it needs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_megatron.families.base import ModelDescription, TensorRule
from grpo_megatron.families.describe import describe, tensor_rules
from grpo_megatron.families.layout import shard_layout
from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.weights.agreement import description_differences, model_differences
from grpo_megatron.weights.hf_files import HfCheckpoint
from grpo_megatron.weights.naming import parameters_by_name, short_list

_HARMLESS_ENDINGS = (".rotary_emb.inv_freq",)
_COMPARE_ROWS = 4096


@dataclass(frozen=True)
class LoadReport:
    """What this rank read.

    Example:
        >>> LoadReport(num_parameters=38, num_bytes=1000, seconds=0.1).num_bytes
        1000
    """

    num_parameters: int
    num_bytes: int
    seconds: float


def load_hf(
    chunks: Sequence[torch.nn.Module],
    description: ModelDescription,
    folder: Path,
    *,
    groups: Groups,
    on_tensor: Callable[[int], None] | None = None,
) -> LoadReport:
    """Fill every parameter of the chunks from the folder. Collective over the world.

    Args:
        on_tensor: called with the bytes read for each parameter (progress).

    Raises:
        ValueError: on every rank, if any rank found missing, unexpected, wrong-shaped or damaged tensors, or a
            configuration that disagrees with the checkpoint's. No parameter is touched if a check fails.
    """
    start = time.monotonic()
    folder = Path(folder)
    parameters = parameters_by_name(chunks)
    rules = tensor_rules(description)
    everywhere = set().union(*gather_objects(set(parameters), groups.pipeline))
    _check_rules_cover_model(rules, parameters, everywhere)
    error, num_bytes = None, 0
    try:
        _raise_if(folder, "the configuration disagrees", _configuration_problems(chunks, description, folder))
        with HfCheckpoint(folder) as checkpoint:
            _raise_if(folder, "the tensors do not fit", _tensor_problems(checkpoint, rules, description))
            loader = _Loader(checkpoint, description, groups)
            for rule in rules:
                if rule.megatron_name in parameters:
                    read = loader.load(rule, parameters[rule.megatron_name])
                    num_bytes += read
                    if on_tensor is not None:
                        on_tensor(read)
            loader.check_unused_head(parameters)
    except (ValueError, OSError) as problem:
        error = str(problem)
    errors = dict.fromkeys(text for text in gather_objects(error, groups.world) if text is not None)
    if errors:
        raise ValueError("\n".join(errors))
    return LoadReport(len(parameters), num_bytes, time.monotonic() - start)


class _Loader:
    """Reads the segments of one shard after the other."""

    def __init__(self, checkpoint: HfCheckpoint, description: ModelDescription, groups: Groups) -> None:
        self._checkpoint = checkpoint
        self._description = description
        self._rank, self._size = groups.tensor_rank, groups.grid.tensor

    @torch.no_grad()
    def load(self, rule: TensorRule, parameter: torch.nn.Parameter) -> int:
        """Fill one parameter; returns the bytes read."""
        layout = shard_layout(rule, self._description, rank=self._rank, size=self._size)
        assert tuple(parameter.shape) == layout.shape, f"{rule.megatron_name}: {tuple(parameter.shape)}, {layout.shape}"
        axis = rule.shard_axis or 0
        offset = num_bytes = 0
        for segment in layout.segments:
            piece = self._checkpoint.read(
                rule.hf_names[segment.source], axis=axis, start=segment.start, stop=segment.stop
            )
            parameter.data.narrow(axis, offset, segment.size).copy_(piece)
            offset += segment.size
            num_bytes += piece.nbytes
        parameter.data.narrow(axis, offset, layout.num_padding).zero_()
        return num_bytes

    def check_unused_head(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """A tied model's files may hold a head as well; it must be the embedding, or one of both would be lost."""
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        name = "embedding.word_embeddings.weight"
        if not self._description.tie_embeddings or head not in self._checkpoint.tensors or name not in parameters:
            return
        rows = parameters[name].shape[0]
        last = min((self._rank + 1) * rows, self._description.vocab_size)
        for start in range(self._rank * rows, last, _COMPARE_ROWS):
            stop = min(start + _COMPARE_ROWS, last)
            first, second = (self._checkpoint.read(n, axis=0, start=start, stop=stop) for n in (embedding, head))
            if not torch.equal(first, second):
                raise ValueError(
                    f"{self._checkpoint.folder}: tie_word_embeddings is true, but {head} is there and differs from "
                    f"{embedding}; set tie_word_embeddings to false, or remove {head}"
                )


def _configuration_problems(
    chunks: Sequence[torch.nn.Module], description: ModelDescription, folder: Path
) -> list[str]:
    return description_differences(description, describe(folder)) + model_differences(chunks, description)


def _tensor_problems(checkpoint: HfCheckpoint, rules: Sequence[TensorRule], description: ModelDescription) -> list[str]:
    """Missing, unexpected and wrong-shaped tensors of the whole model."""
    expected = {name: shape for rule in rules for name, shape in zip(rule.hf_names, rule.hf_shapes, strict=True)}
    stored = checkpoint.tensors
    problems = []
    if missing := [name for name in expected if name not in stored]:
        hint = ""
        if "lm_head.weight" in missing and not description.tie_embeddings:
            hint = " (without lm_head.weight the model has tied embeddings: tie_word_embeddings must be true)"
        listed = " (the index lists them, the files do not hold them)" if checkpoint.absent & set(missing) else ""
        problems.append(f"{len(missing)} missing: {short_list(missing)}{hint}{listed}")
    harmless = {"lm_head.weight"} if description.tie_embeddings else set()
    unexpected = [
        name
        for name in stored
        if name not in expected and name not in harmless and not name.endswith(_HARMLESS_ENDINGS)
    ]
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {short_list(unexpected)}")
    wrong = [
        f"{name} is {list(stored[name].shape)}, config.json says {list(shape)}"
        for name, shape in {**expected, **{name: expected["model.embed_tokens.weight"] for name in harmless}}.items()
        if name in stored and stored[name].shape != shape
    ]
    if wrong:
        problems.append(f"{len(wrong)} of another shape: {short_list(wrong)}")
    return problems


def _check_rules_cover_model(
    rules: Sequence[TensorRule], parameters: dict[str, torch.nn.Parameter], everywhere: set[str]
) -> None:
    """The table and the built model know the same parameters; anything else is a bug of ours."""
    names = {rule.megatron_name for rule in rules}
    unknown = sorted(set(parameters) - names)
    assert not unknown, f"no rule of the family fills {unknown}"
    unfilled = [rule.megatron_name for rule in rules if not rule.is_copy and rule.megatron_name not in everywhere]
    assert not unfilled, f"no stage of the built model has {unfilled}"


def _raise_if(folder: Path, what: str, problems: list[str]) -> None:
    if problems:
        raise ValueError("\n".join(f"{folder}: {what}: {problem}" for problem in problems))
