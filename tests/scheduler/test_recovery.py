"""What a resumed run says about settings that are not those of its checkpoint."""

import pytest

from grpo_megatron.checkpoint.manifest import Description
from grpo_megatron.config.resolved import to_yaml
from grpo_megatron.config.schema import Config, ModelSection, RunSection
from grpo_megatron.scheduler.recovery import changed_settings

pytestmark = pytest.mark.unit


def _described(config: Config) -> Description:
    return Description(policy_version=3, fingerprint="", configuration=to_yaml(config))


def test_every_key_that_differs_is_named_with_both_values() -> None:
    saved = _described(Config(run=RunSection(steps=2), model=ModelSection(policy="one")))
    now = _described(Config(run=RunSection(steps=5), model=ModelSection(policy="two")))
    model, steps = changed_settings(saved, now)
    assert "model.policy: the checkpoint was made with 'one', now 'two'; the weights are the checkpoint's" in model
    assert "run.steps: the checkpoint was made with 2, now 5" in steps


def test_the_same_settings_need_no_word() -> None:
    assert changed_settings(_described(Config()), _described(Config())) == []
