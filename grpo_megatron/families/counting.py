"""Parameters and bytes per rank of a policy in training, from the same table that loads the weights."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from grpo_megatron.families.base import ModelDescription, TensorRule
from grpo_megatron.families.describe import tensor_rules
from grpo_megatron.families.layout import shard_layout
from grpo_megatron.families.stages import stage_layers

Dtype = Literal["bfloat16", "float32"]
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds of the policy while it trains; activations and caches are not in it.

    Example:
        >>> RankBytes(10, parameters=20, gradients=40, masters=40, moments=80).total
        180
    """

    num_parameters: int
    parameters: int
    gradients: int
    """The gradient buffer, one number per parameter."""
    masters: int
    """fp32 copies of the parameters that the optimizer updates; 0 where the parameters are fp32 themselves."""
    moments: int
    """Both moments of Adam, fp32."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.masters + self.moments


def count_parameters(description: ModelDescription) -> int:
    """Parameters of the model as HF counts them: no padding, a tied head counted once."""
    rules = [rule for rule in tensor_rules(description) if not rule.is_copy]
    return sum(prod(shape) for rule in rules for shape in rule.hf_shapes)


def count_rank_parameters(
    description: ModelDescription, *, tensor: int, pipeline: int, stage: int, virtual_pipeline: int = 1
) -> int:
    """Numbers that megatron-core allocates on every tensor-parallel rank of this stage, vocabulary padding included.

    Raises:
        ValueError: layers or heads do not divide.
    """
    check_divides(description, tensor=tensor)
    layers = {
        layer
        for chunk in range(virtual_pipeline)
        for layer in stage_layers(
            description.num_layers, pipeline, stage, virtual_pipeline=virtual_pipeline, chunk=chunk
        )
    }
    rules = [rule for rule in tensor_rules(description) if _is_on_stage(rule, pipeline, stage, layers)]
    return sum(prod(shard_layout(rule, description, rank=0, size=tensor).shape) for rule in rules)


def count_rank_bytes(
    description: ModelDescription,
    *,
    tensor: int,
    pipeline: int,
    stage: int,
    optimizer_ranks: int,
    dtype: Dtype,
    gradient_dtype: Dtype = "float32",
    virtual_pipeline: int = 1,
) -> RankBytes:
    """Bytes on one rank of a stage; optimizer state is sharded over `optimizer_ranks` (data x context parallel).

    megatron-core aligns parameters inside its buffers (some hundred numbers each); that padding is not counted.
    """
    count = count_rank_parameters(
        description, tensor=tensor, pipeline=pipeline, stage=stage, virtual_pipeline=virtual_pipeline
    )
    share = -(-count // optimizer_ranks)
    return RankBytes(
        num_parameters=count,
        parameters=count * _DTYPE_BYTES[dtype],
        gradients=count * _DTYPE_BYTES[gradient_dtype],
        masters=0 if dtype == "float32" else share * _FLOAT32_BYTES,
        moments=2 * share * _FLOAT32_BYTES,
    )


def check_divides(description: ModelDescription, *, tensor: int) -> None:
    """What megatron-core asks of the tensor-parallel size.

    Raises:
        ValueError: naming every size that does not divide, with the key to change.
    """
    problems = []
    if description.num_attention_heads % tensor:
        problems.append(f"{description.num_attention_heads} attention heads are no multiple of it")
    groups = description.num_key_value_heads
    if groups % tensor and tensor % groups:
        problems.append(f"it is neither divisor nor multiple of the {groups} key-value heads")
    if description.ffn_hidden_size % tensor:
        problems.append(f"ffn_hidden_size {description.ffn_hidden_size} is no multiple of it")
    fused = description.query_size + 2 * description.key_value_size
    if fused % tensor:
        problems.append(f"the {fused} rows of query, key and value together are no multiple of it")
    if problems:
        raise ValueError(f"parallel.tensor: {tensor} does not fit this model: {'; '.join(problems)}")


def _is_on_stage(rule: TensorRule, pipeline: int, stage: int, layers: set[int]) -> bool:
    match rule.stage:
        case "embedding":
            return stage == 0
        case "layer":
            return rule.layer in layers
        case "head":
            # One stage: a tied head uses the embedding itself and has no parameter of its own.
            return stage == pipeline - 1 and not (rule.is_copy and pipeline == 1)
