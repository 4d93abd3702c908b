"""A configuration file and `key.path=value` overrides -> the checked `Config`, or all problems at once.

Order: defaults < file < overrides. What is right but not there yet is `availability.py`'s business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_megatron.config.layers import merge_layers
from grpo_megatron.config.lookalikes import repair
from grpo_megatron.config.options import find_options
from grpo_megatron.config.problems import ConfigError, Origin, Problem
from grpo_megatron.config.rules import check_rules
from grpo_megatron.config.schema import Config
from grpo_megatron.config.validation import validate
from grpo_megatron.config.yaml_tree import YamlTree, parse_yaml

_LARGEST_FILE_BYTES = 1_000_000


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration that is right in itself.

    Example:
        >>> loaded = load_config(Path("examples/seed.yaml"), ["run.steps=3"])      # doctest: +SKIP
        >>> loaded.config.run.name, loaded.config.run.steps, str(loaded.origins["run.steps"])     # doctest: +SKIP
        ('seed', 3, 'command line')
    """

    config: Config
    """`run.name` is filled in from the file's name."""
    origins: Mapping[str, Origin]
    """Of every key, and of every section and list entry that was given; `str()` of one is what a report shows."""
    file: Path


def load_config(file: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, merge and check.

    Raises:
        ConfigError: with every problem that can be found; its text is meant for the user.
    """
    name = str(file)
    repaired = repair(_read_text(Path(file)), file=name)
    tree = parse_yaml(repaired.text, file=name)
    if repaired.problems and tree.problems and tree.value is None:
        tree = YamlTree()  # the repair was a guess: its syntax errors may not be the user's
    elif tree.value is None and not tree.problems:
        tree.problems.append(Problem(name, None, "", "the file is empty", "start with  model:  and  policy:  below it"))
    layers = merge_layers(tree, overrides, file=name)
    problems = [_with_full_key(problem, tree) for problem in repaired.problems] + layers.problems
    validated = validate(layers, file=name)
    problems += validated.problems
    if isinstance(tree.value, dict):
        doubtful = validated.wrong_keys | layers.doubtful
        problems += check_rules(validated.config, layers.origins, doubtful=doubtful, file=name)
    if problems:
        raise ConfigError(problems)
    run = validated.config.run
    config = replace(validated.config, run=replace(run, name=run.name or Path(file).stem))
    origins = dict.fromkeys(find_options(), Origin(name, is_default=True)) | layers.origins
    return LoadedConfig(config, origins, Path(file))


def _read_text(file: Path) -> str:
    trouble, fix = "", "is the path right? it is looked up from " + str(Path.cwd())
    try:
        if file.is_dir():
            trouble, fix = "is a folder, not a configuration file", "name the .yaml file in it"
        elif not file.exists():
            trouble = "there is no such file"
        elif file.stat().st_size > _LARGEST_FILE_BYTES:
            trouble, fix = "is too large for a configuration file", "is this the right file?"
        else:
            return file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problem = Problem(str(file), line, "", "the file is not UTF-8 text", "save it as UTF-8")
        raise ConfigError([problem]) from None
    except OSError as error:
        trouble, fix = f"cannot be read ({error.strerror})", "check the path and its permissions"
    raise ConfigError([Problem(str(file), None, "", trouble, fix)])


def _with_full_key(problem: Problem, tree: YamlTree) -> Problem:
    """The whole dotted key of a problem that was found in the raw text, when the file could be read."""
    for path, line in tree.lines.items():
        if line == problem.line and path[-1] == problem.key:
            return replace(problem, key=".".join(path))
    return problem
