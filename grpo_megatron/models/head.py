"""The output head: logits that are not rounded to bfloat16, and padding rows that nobody can choose."""

from typing import Literal

import torch
from megatron.core import tensor_parallel

HeadDtype = Literal["float32", "model"]
_PIECE_ROWS = 1024


def head_logits(hidden: torch.Tensor, weight: torch.Tensor, head_dtype: HeadDtype) -> torch.Tensor:
    """[..., hidden] x [rows, hidden] -> [..., rows]; in float32 unless `head_dtype` is `model`.

    A product of two bfloat16 numbers is exact in float32, so only the sum's order separates this from float64.
    """
    if head_dtype == "model" or hidden.dtype == torch.float32:
        return torch.matmul(hidden, weight.t())
    if hidden.is_cuda:
        flat = torch.mm(hidden.reshape(-1, hidden.size(-1)), weight.t(), out_dtype=torch.float32)
        return flat.view(*hidden.shape[:-1], weight.size(0))
    return _float32_logits_on_cpu(hidden, weight)


def _float32_logits_on_cpu(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., hidden] x [rows, hidden] -> float32 [..., rows]; no gradient goes through it.

    The weight is converted piece by piece into a buffer that stays in the processor's cache: a float32 copy of the
    whole costs more in page faults than the product. oneDNN is twice as fast here as what torch takes for float32.
    """
    inputs = hidden.reshape(-1, hidden.size(-1)).float()
    logits = inputs.new_empty(inputs.size(0), weight.size(0))
    piece = inputs.new_empty(min(_PIECE_ROWS, weight.size(0)), weight.size(1))
    for start in range(0, weight.size(0), _PIECE_ROWS):
        rows = weight[start : start + _PIECE_ROWS]
        part = piece[: rows.size(0)].copy_(rows)
        if torch.backends.mkldnn.is_available() and inputs.size(0):
            product = torch.ops.mkldnn._linear_pointwise(inputs, part, None, "none", [], "")
        else:
            product = torch.nn.functional.linear(inputs, part)
        logits[:, start : start + rows.size(0)] = product
    return logits.view(*hidden.shape[:-1], weight.size(0))


def mask_padding_(logits: torch.Tensor, *, first_row: int, vocab_size: int) -> torch.Tensor:
    """Rows of the vocabulary beyond the real one exist only to divide by the tensor-parallel size: -inf in place."""
    num_real = vocab_size - first_row
    if num_real < logits.size(-1):
        logits[..., max(num_real, 0) :] = float("-inf")
    return logits


class OutputHead(tensor_parallel.ColumnParallelLinear):
    """What `GPTModel.forward` calls in generation. Training reads log-probs with `logprobs.py` instead."""

    head_dtype: HeadDtype
    vocab_size: int

    @classmethod
    def adopt(cls, linear: tensor_parallel.ColumnParallelLinear, *, head_dtype: HeadDtype, vocab_size: int) -> None:
        """Turn the head that GPTModel built into this one, parameters and their attributes untouched."""
        linear.__class__ = cls
        linear.head_dtype, linear.vocab_size = head_dtype, vocab_size

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Logits [tokens, rows, vocab or this rank's part of it], never trained through."""
        weight = self.weight if weight is None else weight
        if self.sequence_parallel:
            input_ = tensor_parallel.gather_from_sequence_parallel_region(input_, group=self.tp_group)
        logits = head_logits(input_, weight, self.head_dtype)
        mask_padding_(logits, first_row=self.tp_group.rank() * weight.size(0), vocab_size=self.vocab_size)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits, group=self.tp_group)
        return logits, None
