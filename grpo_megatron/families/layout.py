"""Which part of which HF tensor a tensor-parallel shard consists of: the one place that knows fused layouts."""

from dataclasses import dataclass

from grpo_megatron.families.base import ModelDescription, TensorRule


@dataclass(frozen=True)
class Segment:
    """Rows (or columns, by the rule's `shard_axis`) [start, stop) of the rule's HF tensor number `source`.

    Example:
        >>> Segment(source=1, start=0, stop=8).size
        8
    """

    source: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ShardLayout:
    """A shard is its segments one after the other along `shard_axis`, then `num_padding` rows that mean nothing."""

    shape: tuple[int, ...]
    segments: tuple[Segment, ...]
    num_padding: int


def shard_layout(rule: TensorRule, description: ModelDescription, *, rank: int, size: int) -> ShardLayout:
    """The shard of one parameter on tensor-parallel rank `rank` of `size`.

    Raises:
        ValueError: the sizes do not divide.
    """
    shape = rule.hf_shapes[0]
    axis = rule.shard_axis
    if axis is None:
        return ShardLayout(shape, (Segment(0, 0, shape[0]),), 0)
    if rule.combine == "gate_up":
        length = _divide(shape[axis], size, rule, "ffn_hidden_size")
        segments = tuple(Segment(source, rank * length, (rank + 1) * length) for source in (0, 1))
        return ShardLayout((2 * length, *shape[1:]), segments, 0)
    whole = _fused_groups(rule, description) if rule.combine == "qkv" else [Segment(0, 0, shape[axis])]
    total = sum(segment.size for segment in whole)
    padded = -(-total // size) * size if rule.is_vocabulary else total
    length = _divide(padded, size, rule, f"dimension {axis}")
    segments = tuple(_cut(whole, rank * length, (rank + 1) * length))
    num_padding = length - sum(segment.size for segment in segments)
    return ShardLayout((*shape[:axis], length, *shape[axis + 1 :]), segments, num_padding)


def _fused_groups(rule: TensorRule, description: ModelDescription) -> list[Segment]:
    """megatron-core's order: for each key-value head its query heads, its key, its value.

    With more tensor-parallel ranks than key-value heads the fused rows are still cut evenly, through the heads;
    megatron-core gathers the activations and picks each rank's heads.
    """
    head, num_groups = description.head_size, description.num_key_value_heads
    queries = description.num_attention_heads // num_groups * head
    assert [shape[0] for shape in rule.hf_shapes] == [num_groups * queries, num_groups * head, num_groups * head], rule
    return [
        Segment(source, group * rows, (group + 1) * rows)
        for group in range(num_groups)
        for source, rows in ((0, queries), (1, head), (2, head))
    ]


def _cut(whole: list[Segment], start: int, stop: int) -> list[Segment]:
    """The part of a run of segments that lies in [start, stop)."""
    cut, position = [], 0
    for segment in whole:
        first, last = max(start - position, 0), min(stop - position, segment.size)
        if first < last:
            cut.append(Segment(segment.source, segment.start + first, segment.start + last))
        position += segment.size
    return cut


def _divide(total: int, size: int, rule: TensorRule, what: str) -> int:
    if total % size:
        raise ValueError(f"parallel.tensor: {size} does not divide {what} {total} of {rule.megatron_name}")
    return total // size
