"""Writes configuration files for these tests and collects what is said about them."""

from pathlib import Path

import pytest

from grpo_megatron.config.loader import LoadedConfig, load_config
from grpo_megatron.config.problems import ConfigError, Problem

NAME = "grpo.yaml"


def load_text(folder: Path, text: str, *overrides: str) -> LoadedConfig:
    """Write the text to `grpo.yaml` and load it."""
    file = folder / NAME
    file.write_text(text, encoding="utf-8")
    return load_config(file, overrides)


def problems_of(folder: Path, text: str, *overrides: str) -> list[Problem]:
    """The problems of a text that must not load."""
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text, *overrides)
    return caught.value.problems


def only_problem(folder: Path, text: str, *overrides: str) -> Problem:
    """The one problem of a text."""
    problems = problems_of(folder, text, *overrides)
    assert len(problems) == 1, problems
    return problems[0]
