"""Fused layouts, stages and counts against hand-computed numbers."""

import pytest

from grpo_megatron.families.base import ModelDescription
from grpo_megatron.families.counting import (
    check_divides,
    count_parameters,
    count_rank_bytes,
    count_rank_parameters,
)
from grpo_megatron.families.describe import tensor_rules
from grpo_megatron.families.layout import Segment, shard_layout
from grpo_megatron.families.stages import stage_layers

pytestmark = pytest.mark.unit

TINY = ModelDescription(
    family="llama",
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_size=8,
    vocab_size=151,
    max_positions=128,
    tie_embeddings=True,
)
SMOLLM2 = ModelDescription(
    family="llama",
    num_layers=30,
    hidden_size=576,
    ffn_hidden_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_size=64,
    vocab_size=49152,
    max_positions=8192,
    tie_embeddings=True,
)


def _rule(ending: str, description: ModelDescription = TINY):  # noqa: ANN202
    return next(rule for rule in tensor_rules(description) if rule.megatron_name.endswith(ending))


def test_query_key_value_are_fused_per_key_value_head() -> None:
    """2 groups of 4 query heads of 8 rows: 32 query rows, 8 key rows, 8 value rows, and the same again."""
    layout = shard_layout(_rule("linear_qkv.weight"), TINY, rank=0, size=1)
    assert layout.shape == (96, 64)
    assert layout.segments == (
        Segment(0, 0, 32),
        Segment(1, 0, 8),
        Segment(2, 0, 8),
        Segment(0, 32, 64),
        Segment(1, 8, 16),
        Segment(2, 8, 16),
    )


def test_more_ranks_than_key_value_heads_cut_the_fused_rows_evenly() -> None:
    """Case W6: 96 fused rows over 4 ranks are 24 each; a group's key and value lie on its second rank."""
    shards = [shard_layout(_rule("linear_qkv.weight"), TINY, rank=rank, size=4) for rank in range(4)]
    assert [shard.shape for shard in shards] == [(24, 64)] * 4
    assert [shard.segments for shard in shards] == [
        (Segment(0, 0, 24),),
        (Segment(0, 24, 32), Segment(1, 0, 8), Segment(2, 0, 8)),
        (Segment(0, 32, 56),),
        (Segment(0, 56, 64), Segment(1, 8, 16), Segment(2, 8, 16)),
    ]


def test_each_shard_of_the_gated_projection_is_its_gate_then_its_up() -> None:
    layout = shard_layout(_rule("linear_fc1.weight"), TINY, rank=1, size=2)
    assert layout.shape == (96, 64)
    assert layout.segments == (Segment(0, 48, 96), Segment(1, 48, 96))


def test_the_vocabulary_is_padded_to_a_multiple_of_the_tensor_parallel_size() -> None:
    """Case W7: 151 over 4 ranks is 38 each, the last has 37 real rows."""
    shards = [shard_layout(_rule("word_embeddings.weight"), TINY, rank=rank, size=4) for rank in range(4)]
    assert [shard.segments for shard in shards] == [
        (Segment(0, start, stop),) for start, stop in ((0, 38), (38, 76), (76, 114), (114, 151))
    ]
    assert [shard.num_padding for shard in shards] == [0, 0, 0, 1]
    assert TINY.padded_vocab_size(4) == 152


def test_a_vocabulary_smaller_than_the_padding_leaves_a_rank_with_nothing_real() -> None:
    from dataclasses import replace

    small = replace(TINY, vocab_size=5)
    last = shard_layout(_rule("word_embeddings.weight", small), small, rank=3, size=4)
    assert (last.shape, last.segments, last.num_padding) == ((2, 64), (), 2)


def test_row_parallel_projections_are_cut_by_columns() -> None:
    layout = shard_layout(_rule("linear_fc2.weight"), TINY, rank=1, size=2)
    assert (layout.shape, layout.segments) == ((64, 48), (Segment(0, 48, 96),))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_all_shards_together_cover_every_row_exactly_once(size: int) -> None:
    for rule in tensor_rules(TINY):
        if rule.shard_axis is None:
            continue
        rows = sorted(
            (segment.source, row)
            for rank in range(size)
            for segment in shard_layout(rule, TINY, rank=rank, size=size).segments
            for row in range(segment.start, segment.stop)
        )
        assert rows == [(i, row) for i, shape in enumerate(rule.hf_shapes) for row in range(shape[rule.shard_axis])]


def test_smollm2_has_the_number_of_parameters_on_its_model_card() -> None:
    """134,515,008; the embedding is 49152 x 576 of it."""
    assert count_parameters(SMOLLM2) == 134_515_008


def test_a_tied_head_is_counted_where_it_has_memory_of_its_own() -> None:
    """Embedding 49152 x 576 = 28,311,552; 30 layers of 3,540,096; final norm 576."""
    assert count_rank_parameters(SMOLLM2, tensor=1, pipeline=1, stage=0) == 134_515_008
    assert count_rank_parameters(SMOLLM2, tensor=1, pipeline=2, stage=0) == 28_311_552 + 15 * 3_540_096
    assert count_rank_parameters(SMOLLM2, tensor=1, pipeline=2, stage=1) == 28_311_552 + 15 * 3_540_096 + 576


def test_bytes_per_rank_by_hand() -> None:
    """bfloat16 with fp32 gradients over two optimizer ranks: 2 + 4 + (4 + 8) / 2 = 12 bytes a parameter."""
    counted = count_rank_bytes(
        SMOLLM2, tensor=1, pipeline=1, stage=0, optimizer_ranks=2, dtype="bfloat16", gradient_dtype="float32"
    )
    assert counted.total == 134_515_008 * 12
    full = count_rank_bytes(SMOLLM2, tensor=1, pipeline=1, stage=0, optimizer_ranks=1, dtype="float32")
    assert (full.masters, full.total) == (0, 134_515_008 * 16)


def test_stages_split_the_layers_in_the_order_of_virtual_pipelining() -> None:
    assert [stage_layers(8, 2, stage) for stage in (0, 1)] == [range(0, 4), range(4, 8)]
    chunks = [stage_layers(8, 2, s, virtual_pipeline=2, chunk=c) for s, c in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert chunks == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]


def test_layers_and_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 layers do not divide into 3 stages"):
        stage_layers(4, 3, 0)
    with pytest.raises(ValueError, match="9 attention heads are no multiple"):
        check_divides(SMOLLM2, tensor=2)
    with pytest.raises(ValueError, match="ffn_hidden_size 96"):
        check_divides(TINY, tensor=64)
    check_divides(TINY, tensor=4)
