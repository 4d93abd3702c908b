"""Two keys that do not go together, settings that would be ignored, and the pass-through section of megatron-core."""

from pathlib import Path

import pytest

from grpo_megatron.config import megatron_fields
from grpo_megatron.config.options import find_options
from grpo_megatron.config.rules import RULES
from grpo_megatron.config.schema import REWARD_NAMES
from grpo_megatron.rewards.build import REWARD_NAMES as REWARDS_THAT_ARE_BUILT
from tests.config.writing import load_text, only_problem

pytestmark = pytest.mark.unit

BROKEN = [
    # overrides, key, part of the message, part of the fix
    (["run.name=''"], "run.name", "no name for a folder", "write a name"),
    (["run.name=a/b"], "run.name", "'a/b' is a path", "run.folder"),
    (["modules.rewards.timeout_seconds=4000"], "modules.rewards.timeout_seconds", "4000.0 s are not", "more time"),
    (["model.reference=/r"], "model.reference", "would be ignored", "reference_model"),
    (["model.reward_model=/r"], "model.reward_model", "would be ignored", "reward_model"),
    (["parallel.virtual_pipeline=2"], "parallel.virtual_pipeline", "parallel.pipeline is 1", "virtual_pipeline: 1"),
    (["parallel.sequence_parallel=true"], "parallel.sequence_parallel", "parallel.tensor is 1", "2 or more"),
    (["data.prompts=[a, b]", "data.evaluation=[b]"], "data.evaluation", "tested on what it was", "different"),
    (["data.prompts=[a, a]"], "data.prompts", "'a' is there twice", "keep one"),
    (["data.apply_chat_template=false", "data.system_message=x"], "data.system_message", "would be ignored", "remove"),
    (["modules.rollout.python=/usr/bin/python3"], "modules.rollout.python", "would be ignored", "remove"),
    (["modules.rollout.engine_threads=2"], "modules.rollout.engine_threads", "would be ignored", "remove"),
    (["modules.rollout.max_engine_restarts=0"], "modules.rollout.max_engine_restarts", "would be ignored", "remove"),
    (["modules.rollout.engine_stall_seconds=5"], "modules.rollout.engine_stall_seconds", "would be ignored", "remove"),
    (["modules.rollout.publish_bucket_bytes=1000"], "modules.rollout.publish_bucket_bytes", "would be ignored",
     "remove"),
    (["modules.rollout.engine=sglang", "run.phase_deadline_seconds=60"], "modules.rollout.engine_stall_seconds",
     "60.0 s are not below run.phase_deadline_seconds (60.0 s)", "more time"),
    (["modules.rollout.tensor=2"], "modules.rollout.tensor", "the trainer's parallel.tensor (1)", "remove"),
    (["modules.training.minimum_learning_rate=1e-3", "modules.training.decay=linear"],
     "modules.training.minimum_learning_rate", "0.001 is above learning_rate (1e-06)", "raise learning_rate"),
    (["modules.training.minimum_learning_rate=1e-7"], "modules.training.minimum_learning_rate", "does not decay",
     "decay: linear"),
    (["schedule.overlap=[]"], "schedule.overlap", "always computed beside the rollout", "overlap: [rewards]"),
    (["modules.training.num_mini_batches=300"], "modules.training.num_mini_batches", "a step has 16 groups",
     "16 or less"),
    (["modules.training.kl.coefficient=0.1"], "modules.training.kl.coefficient", "0.1 needs the reference model's",
     "reference_model"),
    (["modules.training.kl.estimator=k1"], "modules.training.kl.estimator", "would be ignored", "reference_model"),
    (["modules.training.mismatch.cap=3"], "modules.training.mismatch.cap", "would be ignored", "truncate"),
    (["modules.training.mismatch.correction=truncate", "modules.training.ratio_reference=bypass"],
     "modules.training.mismatch.correction", "nothing to correct", "proximal"),
    (["memory_management.offload_trigger_threshold=0.5"], "memory_management.offload_trigger_threshold",
     "would be ignored", "dynamic_offload: true"),
    (["memory_management.far_folder=/tmp"], "memory_management.far_folder", "would be ignored", "dynamic_offload"),
    (["monitor.gap_warn=0.02"], "monitor.gap_warn", "0.02 is above gap_alert (0.01)", "raise gap_alert"),
    (["monitor.evaluate_every_steps=5"], "monitor.evaluate_every_steps", "nothing to evaluate on", "data.evaluation"),
    (["monitor.evaluate_at_end=true"], "monitor.evaluate_at_end", "nothing to evaluate on", "data.evaluation"),
    (["monitor.evaluation_max_new_tokens=5"], "monitor.evaluation_max_new_tokens", "nothing to evaluate on", "data"),
    (["sglang.chunked_prefill_size=512"], "sglang", "modules.rollout.engine is megatron", "remove the section"),
    (["vllm.block_size=16"], "vllm", "modules.rollout.engine is megatron", "engine: vllm"),
    (["schedule.order=[rollout, update, publish]"], "schedule.order", "score is missing", "[rollout, score, update"),
    (["schedule.order=[rollout, rollout, score, update, publish]"], "schedule.order", "rollout is there twice", "["),
    (["schedule.order=[rollout, update, score, publish]"], "schedule.order", "update stands before score", "["),
    (["schedule.overlap=[rewards, rewards]"], "schedule.overlap", "twice", "keep one"),
    (["modules.rewards.default=maths"], "modules.rewards.default", "'maths' is no reward", "did you mean math?"),
    (["modules.rewards.default=my_rewards"], "modules.rewards.default", "known: math, exact", "module:function"),
    (["megatron.moe_router_topkk=1"], "megatron.moe_router_topkk", "no such field", "did you mean moe_router_topk?"),
    (["megatron.hidden_size=1"], "megatron.hidden_size", "not passed through", "config.json"),
    (["megatron.tensor_model_parallel_size=2"], "megatron.tensor_model_parallel_size", "not passed", "parallel.tensor"),
    (["megatron.qk_clip=1"], "megatron.qk_clip", "expected bool, got 1", ""),
    (["megatron.moe_router_topk=two"], "megatron.moe_router_topk", "expected int, got 'two'", ""),
    (["megatron.moe_router_dtype=fp16"], "megatron.moe_router_dtype", "expected 'fp32' or 'fp64' or null", ""),
    (["megatron.grad_scale_func=f"], "megatron.grad_scale_func", "not passed through", "remove the line"),
    (["megatron.quant_recipe=x"], "megatron.quant_recipe", "expected RecipeConfig or null, got 'x'", ""),
]  # fmt: skip

ALLOWED = [
    ["modules.training.kl.coefficient=0.1", "modules.inference.models=[reference_model]"],
    ["model.reference=/r", "modules.inference.models=reference_model"],
    ["memory_management.offload_trigger_threshold=0.85"],
    ["memory_management.dynamic_offload=true", "memory_management.offload_trigger_threshold=0"],
    ["modules.rollout.engine=megatron", "modules.rollout.tensor=2", "parallel.tensor=2"],
    [
        "modules.rollout.engine=sglang",
        "sglang.chunked_prefill_size=512",
        "modules.rollout.engine_threads=2",
        "modules.rollout.max_engine_restarts=0",
        "modules.rollout.engine_stall_seconds=5",
        "modules.rollout.tensor=4",
        "modules.rollout.publish_bucket_bytes=1000",
    ],
    ["modules.rollout.engine=sglang", "modules.rollout.python=/usr/bin/python3"],
    [
        "modules.rollout.engine=megatron",
        "modules.rollout.max_engine_restarts=3",
        "modules.rollout.publish_bucket_bytes=268435456",
    ],
    ["modules.rewards.default=my.rewards:score"],
    ["modules.training.learning_rate=0"],
    ["megatron.qk_clip_threshold=50", "megatron.moe_router_dtype=fp64", "megatron.recompute_modules=[mlp]"],
    ["megatron.softmax_scale=null"],
]


@pytest.mark.parametrize(("overrides", "key", "message", "fix"), BROKEN)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, overrides: list[str], key: str, message: str, fix: str
) -> None:
    embedded = [] if any("engine=" in override for override in overrides) else ["modules.rollout.engine=megatron"]
    problem = only_problem(tmp_path, "run: {seed: 0}", *embedded, *overrides)
    assert problem.key == key
    assert message in problem.message
    assert fix in problem.fix


@pytest.mark.parametrize("overrides", ALLOWED)
def test_what_goes_together_is_not_refused(tmp_path: Path, overrides: list[str]) -> None:
    load_text(tmp_path, "run: {seed: 0}", *overrides)


def test_a_broken_rule_is_shown_where_one_of_its_keys_was_written(tmp_path: Path) -> None:
    problem = only_problem(tmp_path, "run:\n  seed: 0\nmonitor:\n  gap_alert: 0.001\n")
    assert (problem.line, problem.key) == (4, "monitor.gap_warn")


def test_rules_name_keys_that_exist() -> None:
    named = {key for rule in RULES for key in (rule.key, *rule.others)}
    assert named <= set(find_options())


def test_every_rule_is_tested() -> None:
    tested = {key for _, key, _, _ in BROKEN}
    assert {rule.key for rule in RULES} - {"monitor.evaluate_at_start"} <= tested


def test_the_fields_read_from_the_source_are_those_of_megatron_core() -> None:
    from dataclasses import fields

    from megatron.core.transformer.transformer_config import TransformerConfig

    read = megatron_fields.read_megatron_fields()
    assert read is not None
    assert set(read) == {field.name for field in fields(TransformerConfig)}
    assert set(megatron_fields.OWNED_FIELDS) <= set(read)


def test_without_megatron_core_its_section_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_fields, "read_megatron_fields", lambda: None)
    problem = only_problem(tmp_path, "megatron:\n  qk_clip: true\n")
    assert (problem.line, problem.key) == (1, "megatron")
    assert "megatron-core is not installed" in problem.message


def test_the_known_rewards_are_those_that_are_built() -> None:
    assert set(REWARD_NAMES) == set(REWARDS_THAT_ARE_BUILT)
