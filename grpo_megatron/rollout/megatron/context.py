"""What megatron-core's attention sees of the cache during one step: its inference context for dynamic batching."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

from grpo_megatron.platform.paged_attention import PagedStep, PromptRun
from grpo_megatron.rollout.megatron.cache import KeyValueCache
from grpo_megatron.rollout.megatron.rows import PromptPlan, StepPlan


@dataclass(frozen=True)
class StepInputs:
    """A step's tokens as `GPTModel.forward` takes them, padding behind."""

    token_ids: torch.Tensor  # int64 [1, tokens]
    position_ids: torch.Tensor  # int64 [1, tokens]


@dataclass(frozen=True)
class _FlashStep:
    """The step as flash-attn's paged kernels take it."""

    block_table: torch.Tensor  # int32 [sequences, blocks]
    query_bounds: torch.Tensor  # int32 [sequences + 1]
    key_bounds: torch.Tensor  # int32 [sequences + 1]
    key_lengths: torch.Tensor  # int32 [sequences]
    max_query: int
    max_key: int


class StepContext(BaseInferenceContext):
    """Implements the calls that GPTModel's layers make while they generate, for one `StepPlan` at a time.

    megatron-core's own DynamicInferenceContext answers the same calls; why not it: README.md.
    """

    use_flashinfer_fused_rope = False

    def __init__(
        self, cache: KeyValueCache, *, max_sequence_tokens: int, token_multiple: int, device: torch.device
    ) -> None:
        """Args: token_multiple: steps are padded to it, for sequence parallelism."""
        super().__init__(materialize_only_last_token_logits=True)
        self.max_sequence_length = max_sequence_tokens  # the size of the rotary table
        self._cache = cache
        self._token_multiple = token_multiple
        self._device = device
        self._is_flash = cache.shape.layout == "token_major"
        self._rotary: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin_step(self, plan: StepPlan) -> StepInputs:
        """Lay out the plan's tokens, where they go in the cache, and what attention has to read."""
        lengths = [1] * len(plan.decode) + [len(prompt.token_ids) for prompt in plan.prompts]
        self._num_tokens = sum(lengths)
        padding = -self._num_tokens % self._token_multiple
        token_ids = np.zeros(self._num_tokens + padding, np.int64)
        positions = np.zeros_like(token_ids)
        blocks = np.full_like(token_ids, self._cache.shape.padding_block)
        block_tokens = self._cache.shape.block_tokens
        for place, row in enumerate(plan.decode):
            token_ids[place], positions[place] = row.next_token, row.num_cached
            blocks[place] = row.blocks[row.num_cached // block_tokens]
        start = len(plan.decode)
        for prompt in plan.prompts:
            end = start + len(prompt.token_ids)
            token_ids[start:end] = prompt.token_ids
            positions[start:end] = np.arange(end - start)
            blocks[start:end] = np.array(prompt.rows[0].blocks)[positions[start:end] // block_tokens]
            start = end
        self._positions = self._to_device(positions)
        self._write_rows = self._to_device(self._cache.write_rows(blocks, positions % block_tokens))
        self._last_tokens = self._to_device(np.cumsum(np.array(lengths)) - 1)
        self._rotary.clear()
        self._is_decode = not plan.prompts
        self._step = self._flash_step(plan, lengths, padding) if self._is_flash else self._torch_step(plan)
        return StepInputs(self._to_device(token_ids)[None], self._positions[None])

    # What the layers ask for.

    def is_static_batching(self) -> bool:
        return False

    def is_decode_only(self) -> bool:
        """Whether attention may take the kernel for one query per sequence; torch attention is one kernel for all."""
        return self._is_decode and self._is_flash

    def using_cuda_graph_this_step(self) -> bool:
        return False

    @property
    def padding_slice(self) -> slice:
        return slice(self._num_tokens, None)

    def append_key_value_cache(self, layer_number: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._cache.write(layer_number - 1, self._write_rows, key, value)

    def key_value_cache(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Keys, values and, as the block table, what the kernel in use needs."""
        assert self._cache.keys is not None and self._cache.values is not None, "the cache is asleep"
        step = self._step
        table = step.block_table if isinstance(step, _FlashStep) else step
        return self._cache.keys[layer_number - 1], self._cache.values[layer_number - 1], table

    def cu_query_lengths(self) -> tuple[torch.Tensor | None, int]:
        step = self._step
        return (step.query_bounds, step.max_query) if isinstance(step, _FlashStep) else (None, 0)

    def cu_kv_lengths(self) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
        step = self._step
        return (step.key_bounds, step.key_lengths, step.max_key) if isinstance(step, _FlashStep) else (None, None, 0)

    def last_token_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[sequences, hidden] of each sequence's last token, from [1, tokens, hidden]: the head computes no others."""
        return hidden[0].index_select(0, self._last_tokens)

    def apply_rotary_emb_query(
        self, query: torch.Tensor, angles: torch.Tensor, config: Any, bounds: Any, cp_group: Any, mscale: float = 1.0
    ) -> torch.Tensor:
        return self._rotate(query, angles, config, cp_group, mscale)

    def apply_rotary_emb_key(
        self, key: torch.Tensor, angles: torch.Tensor, config: Any, cp_group: Any, mscale: float = 1.0
    ) -> torch.Tensor:
        return self._rotate(key, angles, config, cp_group, mscale)

    # How it is done.

    def _rotate(self, x: torch.Tensor, angles: torch.Tensor, config: Any, cp_group: Any, mscale: float) -> torch.Tensor:
        """Rotate [tokens, 1, heads, channels] by position, bit for bit as in training.

        Cosine and sine are taken once per step and not once per layer; the sign of the rotated half is in the sine.
        """
        if config.rotary_interleaved or angles.size(-1) != x.size(-1):
            chosen = angles.index_select(0, self._positions)
            return apply_rotary_pos_emb(x, chosen, config=config, mscale=mscale, cp_group=cp_group)
        if x.dtype not in self._rotary:
            chosen = angles.index_select(0, self._positions)
            sine = torch.sin(chosen) * mscale
            sine[..., : sine.size(-1) // 2].neg_()
            self._rotary[x.dtype] = ((torch.cos(chosen) * mscale).to(x.dtype), sine.to(x.dtype))
        cosine, signed_sine = self._rotary[x.dtype]
        first, second = x.chunk(2, dim=-1)
        return (x * cosine).add_(torch.cat((second, first), dim=-1).mul_(signed_sine))

    def _torch_step(self, plan: StepPlan) -> PagedStep:
        decode = plan.decode
        lengths = np.array([row.num_cached + 1 for row in decode], np.int64)
        tables = self._tables([row.blocks for row in decode], lengths)
        num_positions = tables.shape[1] * self._cache.shape.block_tokens
        bias = np.where(np.arange(num_positions) < lengths[:, None], np.float32(0), np.float32("-inf"))
        runs, start = [], len(decode)
        for length, group in groupby(plan.prompts, key=lambda prompt: len(prompt.token_ids)):
            runs.append(self._prompt_run(list(group), start, length))
            start += runs[-1].count * length
        return PagedStep(
            num_decode=len(decode),
            decode_gather=self._to_device(self._cache.gather_rows(tables)),
            decode_bias=self._to_device(bias)[:, None, None, :],
            prompts=tuple(runs),
        )

    def _prompt_run(self, prompts: list[PromptPlan], start: int, length: int) -> PromptRun:
        tables = self._tables([prompt.rows[0].blocks for prompt in prompts], np.full(len(prompts), length))
        return PromptRun(start, len(prompts), length, self._to_device(self._cache.gather_rows(tables)))

    def _flash_step(self, plan: StepPlan, lengths: list[int], padding: int) -> _FlashStep:
        sequences = [row.blocks for row in plan.decode] + [prompt.rows[0].blocks for prompt in plan.prompts]
        key_lengths = [row.num_cached + 1 for row in plan.decode] + [len(prompt.token_ids) for prompt in plan.prompts]
        if self._is_decode:  # this kernel takes one sequence per query row, padding included
            sequences += [[self._cache.shape.padding_block]] * padding
            key_lengths += [1] * padding
            lengths = lengths + [1] * padding
        keys = np.array(key_lengths)
        return _FlashStep(
            block_table=self._to_device(self._tables(sequences, keys).astype(np.int32)),
            query_bounds=self._to_device(_bounds(np.array(lengths))),
            key_bounds=self._to_device(_bounds(keys)),
            key_lengths=self._to_device(keys.astype(np.int32)),
            max_query=max(lengths),
            max_key=int(keys.max()),
        )

    def _tables(self, blocks_of: list[list[int]], lengths: np.ndarray) -> np.ndarray:
        """int64 [sequences, blocks of the longest]; the padding block fills up."""
        shape = self._cache.shape
        width = -(-int(lengths.max(initial=0)) // shape.block_tokens)
        tables = np.full((len(blocks_of), width), shape.padding_block, np.int64)
        for table, blocks, length in zip(tables, blocks_of, lengths, strict=True):
            used = -(-int(length) // shape.block_tokens)
            table[:used] = blocks[:used]
        return tables

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _bounds(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
