"""A packed row through one model chunk: hidden states, and at the last stage the log-probs of its targets."""

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams

from grpo_megatron.batch import MicroBatch
from grpo_megatron.models.head import OutputHead
from grpo_megatron.models.logprobs import HeadSettings, TargetLogprobs, target_logprobs
from grpo_megatron.models.rotary import rotary_angles
from grpo_megatron.platform.attention import BlockAttention


@dataclass(frozen=True)
class PackedInputs:
    """`batch.MicroBatch` on the device, as far as the model needs it."""

    token_ids: torch.Tensor  # int64 [1, tokens]
    position_ids: torch.Tensor  # int64 [tokens]
    structure: torch.Tensor  # int32 [2, tokens], block ids and segment ids
    target_sources: torch.Tensor  # int64 [targets]
    target_ids: torch.Tensor  # int64 [targets]


def packed_inputs(batch: MicroBatch, device: torch.device) -> PackedInputs:
    """Copy to the device what the model reads of a packed micro-batch."""
    return PackedInputs(
        token_ids=torch.from_numpy(batch.token_ids).to(device, torch.int64)[None],
        position_ids=torch.from_numpy(batch.position_ids).to(device, torch.int64),
        structure=torch.from_numpy(np.stack([batch.block_ids, batch.segment_ids])).to(device, torch.int32),
        target_sources=torch.from_numpy(batch.target_sources).to(device, torch.int64),
        target_ids=torch.from_numpy(batch.target_ids).to(device, torch.int64),
    )


def shares_prompt_prefix(model: GPTModel) -> bool:
    """Whether this model's attention can compute a prompt once for several answers."""
    return isinstance(model.decoder.layers[0].self_attention.core_attention, BlockAttention)


def hidden_states(model: GPTModel, inputs: PackedInputs) -> torch.Tensor:
    """[tokens (this rank's part under sequence parallelism), 1, hidden] after this chunk's layers.

    A pipeline stage that is not the first reads its input from `model.set_input_tensor`. Collective over the
    tensor-parallel group.
    """
    embedded = None
    if model.pre_process:
        embedded = model.embedding(input_ids=inputs.token_ids, position_ids=inputs.position_ids[None])
    frequencies = model.rotary_pos_emb.inv_freq
    if shares_prompt_prefix(model):
        angles = rotary_angles(frequencies, inputs.position_ids)
        return model.decoder(hidden_states=embedded, attention_mask=inputs.structure, rotary_pos_emb=angles)
    packed = _packed_parameters(inputs.structure[0])
    # With cumulative lengths megatron-core rotates by the index inside each sequence, which is its position.
    angles = rotary_angles(frequencies, torch.arange(packed.max_seqlen_q, device=frequencies.device))
    return model.decoder(hidden_states=embedded, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=packed)


def _packed_parameters(block_ids: torch.Tensor) -> PackedSeqParams:
    """Cumulative lengths for the fused attention of Transformer Engine; every block is one plain sequence."""
    _, lengths = torch.unique_consecutive(block_ids, return_counts=True)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def read_targets(model: GPTModel, hidden: torch.Tensor, inputs: PackedInputs, *, temperature: float) -> TargetLogprobs:
    """Log-probs and entropy of the targets, at the last stage. Collective over the tensor-parallel group."""
    head = model.output_layer
    assert isinstance(head, OutputHead), "the head was not adopted by build_policy"
    if model.config.sequence_parallel:
        # Every rank goes on with all tokens and gets the whole gradient back: the head sums it over the ranks.
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=head.tp_group
        )
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else head.weight
    settings = HeadSettings(head.vocab_size, head.head_dtype, head.tp_group)
    chosen = hidden[:, 0].index_select(0, inputs.target_sources)
    return target_logprobs(chosen, weight, inputs.target_ids, temperature=temperature, settings=settings)
