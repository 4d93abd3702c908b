"""Records that describe a model: its sizes, and the table that relates HF tensors to megatron-core's. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Combine = Literal["copy", "qkv", "gate_up"]
Stage = Literal["embedding", "layer", "head"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length that the model was first trained on."""

    kind: Literal["llama3"]
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelDescription:
    """Everything about a model that is needed to build it, count it and move its weights.

    Example:
        >>> tiny = ModelDescription("llama", num_layers=4, hidden_size=64, ffn_hidden_size=128,
        ...     num_attention_heads=8, num_key_value_heads=2, head_size=8, vocab_size=151, max_positions=128)
        >>> tiny.query_size, tiny.key_value_size
        (64, 16)
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    vocab_size: int
    """Real tokens, without the rows that pad it to the tensor-parallel size."""
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    """Biases on the query, key and value projections (not on the output projection)."""
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head_size

    @property
    def key_value_size(self) -> int:
        return self.num_key_value_heads * self.head_size

    def padded_vocab_size(self, tensor: int) -> int:
        """The vocabulary rounded up to a multiple of the tensor-parallel size."""
        return -(-self.vocab_size // tensor) * tensor


@dataclass(frozen=True)
class TensorRule:
    """One megatron-core parameter and the HF tensors that it is made of.

    Example:
        >>> TensorRule("decoder.final_layernorm.weight", ("model.norm.weight",), ((64,),), stage="head").combine
        'copy'
    """

    megatron_name: str
    """As in GPTModel with the local layer spec, with the layer's number in the whole model (from 0)."""
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    stage: Stage
    """Where the parameter lives: `layer` on the stage that has `layer`, the others on the first and last stage."""
    layer: int | None = None
    combine: Combine = "copy"
    """`qkv`: per key-value head its query heads, then key, then value; `gate_up`: each shard's gate, then its up."""
    shard_axis: int | None = None
    """Dimension that is split over tensor-parallel ranks; None: every rank has the whole tensor."""
    is_vocabulary: bool = False
    """Rows are tokens: they are padded to a multiple of the tensor-parallel size."""
    is_copy: bool = False
    """A second copy of tensors of another rule (tied head on the last stage): loaded, not exported or published."""


class ModelFamily(Protocol):
    """What the file of one family holds, as plain functions."""

    def describe(self, config: Mapping[str, Any]) -> ModelDescription:
        """Read the fields of an HF config.json; ValueError names every field that is missing or not supported."""

    def tensor_rules(self, description: ModelDescription) -> tuple[TensorRule, ...]:
        """The table, in the order in which all ranks walk it."""
