"""The list of keys is part of what users rely on: it changes only together with `options.txt`."""

from pathlib import Path

import pytest

from grpo_megatron.config.options import find_options, list_options, nearest, suggest_keys
from grpo_megatron.config.schema import Config

pytestmark = pytest.mark.unit

LISTING = Path(__file__).with_name("options.txt")


def test_keys_and_defaults_are_those_of_the_listing() -> None:
    advice = f"after an intended change write list_options() of grpo_megatron.config.options to {LISTING}"
    assert list_options() == LISTING.read_text(), advice


def test_every_default_is_the_one_of_the_configuration_without_keys() -> None:
    for option in find_options().values():
        value: object = Config()
        for name in option.key.split("."):
            value = getattr(value, name)
        assert value == option.default, option.key


def test_every_key_says_what_it_expects() -> None:
    expected = {key: option.expected for key, option in find_options().items()}
    assert expected["run.steps"] == "a whole number of at least 1"
    assert expected["run.resume"] == "one of: auto, never, or a whole number not below 0"
    assert expected["model.policy"] == "text"
    assert expected["modules.training.clip.low"] == "a number above 0 and below 1"
    assert expected["modules.rollout.stop_token_ids"] == "a list, each entry a whole number not below 0"
    assert expected["megatron"] == "a section (keys indented below it)"
    assert all(expected.values())


@pytest.mark.parametrize("key", sorted(find_options()))
def test_a_key_without_one_of_its_letters_is_recognised(key: str) -> None:
    section, _, name = key.rpartition(".")
    if len(name) < 6:
        return
    misspelt = f"{section}.{name[:2]}{name[3:]}".lstrip(".")
    assert key in suggest_keys(misspelt)


@pytest.mark.parametrize("key", sorted(find_options()))
def test_a_key_in_the_wrong_section_is_found_in_the_right_one(key: str) -> None:
    section, _, name = key.rpartition(".")
    elsewhere = "checkpoint" if section != "checkpoint" else "monitor"
    if name in ("tensor", "name") or f"{elsewhere}.{name}" in find_options():
        return
    assert key in suggest_keys(f"{elsewhere}.{name}")


def test_nonsense_has_no_suggestion() -> None:
    assert suggest_keys("zebra") == []
    assert nearest("zebra", ["math", "exact"]) is None
