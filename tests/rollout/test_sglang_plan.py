"""Engines per machine, their threads and their bytes, against hand-computed numbers."""

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_megatron.config.schema import Config, ModelSection, ModulesSection, RolloutSection
from grpo_megatron.families.describe import describe
from grpo_megatron.rollout.sglang.build import EngineGroup
from grpo_megatron.rollout.sglang.plan import EnginePlan, plan_engines

pytestmark = pytest.mark.unit


def test_neighbours_share_an_engine_and_the_first_of_them_leads_it() -> None:
    places = []
    for rank in range(8):
        group = EngineGroup(rank, local_rank=rank % 4, local_world_size=4, world_size=8, tensor=2)
        places.append((group.place.index, group.place.is_leader, group.ranks))
        assert group.place.num_engines == 4
    assert places[:4] == [(0, True, (0, 1)), (0, False, (0, 1)), (1, True, (2, 3)), (1, False, (2, 3))]
    assert places[7] == (3, False, (6, 7))


def test_a_machine_with_four_ranks_and_nine_cores(tiny_llama: Path) -> None:
    model = describe(tiny_llama)
    config = Config(
        model=ModelSection(dtype="float32"),
        modules=ModulesSection(rollout=RolloutSection(max_concurrent_rollouts=10)),
    )
    sizes = {"ranks_per_machine": 4, "cores": 9, "max_sequence_tokens": 100}
    plan = plan_engines(config, model, tensor=2, **sizes)
    # A key and a value of each of the layers' key-value heads, shared by two ranks, in four bytes.
    token_bytes = 2 * model.num_layers * (model.num_key_value_heads // 2) * model.head_size * 4
    assert model.num_key_value_heads % 2 == 0
    assert replace(plan, weight_bytes=0) == EnginePlan(2, 2, 2, 10 * 100 + 64, 0, (10 * 100 + 64) * token_bytes)
    half = plan_engines(replace(config, model=ModelSection(dtype="bfloat16")), model, tensor=2, **sizes)
    assert (half.weight_bytes * 2, half.cache_bytes * 2) == (plan.weight_bytes, plan.cache_bytes)


def test_more_engine_ranks_than_key_value_heads_have_one_head_each(tiny_llama: Path) -> None:
    model = describe(tiny_llama)
    sizes = {"ranks_per_machine": 8, "cores": 2, "max_sequence_tokens": 10}
    plan = plan_engines(Config(), model, tensor=8, **sizes)
    assert model.num_key_value_heads < 8
    assert plan.cache_bytes == plan.cache_tokens * 2 * model.num_layers * model.head_size * 2
    assert (plan.num_engines, plan.threads) == (1, 1)


def test_threads_that_are_configured_are_taken(tiny_llama: Path) -> None:
    config = Config(modules=ModulesSection(rollout=RolloutSection(engine_threads=5)))
    sizes = {"ranks_per_machine": 2, "cores": 2, "max_sequence_tokens": 1}
    assert plan_engines(config, describe(tiny_llama), tensor=1, **sizes).threads == 5
