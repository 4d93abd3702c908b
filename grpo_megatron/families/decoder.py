"""The tensors that most dense decoders share: RMSNorm, fused attention projections, gated MLP."""

from collections.abc import Mapping

from grpo_megatron.families.base import ModelDescription, TensorRule


def decoder_rules(description: ModelDescription) -> tuple[TensorRule, ...]:
    """Embedding, layers in ascending order, final norm, head; HF names are those of `LlamaForCausalLM`."""
    vocabulary_shape = ((description.vocab_size, description.hidden_size),)
    embedding_name = ("model.embed_tokens.weight",)
    tied = description.tie_embeddings
    return (
        TensorRule(
            "embedding.word_embeddings.weight",
            embedding_name,
            vocabulary_shape,
            stage="embedding",
            shard_axis=0,
            is_vocabulary=True,
        ),
        *(rule for layer in range(description.num_layers) for rule in _layer_rules(description, layer)),
        TensorRule(
            "decoder.final_layernorm.weight", ("model.norm.weight",), ((description.hidden_size,),), stage="head"
        ),
        TensorRule(
            "output_layer.weight",
            embedding_name if tied else ("lm_head.weight",),
            vocabulary_shape,
            stage="head",
            shard_axis=0,
            is_vocabulary=True,
            is_copy=tied,
        ),
    )


def _layer_rules(description: ModelDescription, layer: int) -> list[TensorRule]:
    hidden, ffn = description.hidden_size, description.ffn_hidden_size
    query, key_value = description.query_size, description.key_value_size
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    attention = [f"{theirs}self_attn.{letter}_proj" for letter in "qkv"]

    def rule(name: str, tensors: Mapping[str, tuple[int, ...]], **how: object) -> TensorRule:
        return TensorRule(ours + name, tuple(tensors), tuple(tensors.values()), stage="layer", layer=layer, **how)  # type: ignore[arg-type]

    sizes = (query, key_value, key_value)
    rules = [
        rule("input_layernorm.weight", {f"{theirs}input_layernorm.weight": (hidden,)}),
        rule(
            "self_attention.linear_qkv.weight",
            {f"{name}.weight": (size, hidden) for name, size in zip(attention, sizes, strict=True)},
            combine="qkv",
            shard_axis=0,
        ),
    ]
    if description.attention_bias:
        biases = {f"{name}.bias": (size,) for name, size in zip(attention, sizes, strict=True)}
        rules.append(rule("self_attention.linear_qkv.bias", biases, combine="qkv", shard_axis=0))
    return rules + [
        rule("self_attention.linear_proj.weight", {f"{theirs}self_attn.o_proj.weight": (hidden, query)}, shard_axis=1),
        rule("pre_mlp_layernorm.weight", {f"{theirs}post_attention_layernorm.weight": (hidden,)}),
        rule(
            "mlp.linear_fc1.weight",
            {f"{theirs}mlp.gate_proj.weight": (ffn, hidden), f"{theirs}mlp.up_proj.weight": (ffn, hidden)},
            combine="gate_up",
            shard_axis=0,
        ),
        rule("mlp.linear_fc2.weight", {f"{theirs}mlp.down_proj.weight": (hidden, ffn)}, shard_axis=1),
    ]
