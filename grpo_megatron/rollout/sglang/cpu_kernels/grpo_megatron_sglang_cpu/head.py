"""Logits in float32 from bfloat16 weights, without a float32 copy of the whole head."""

import torch

_PIECE_ROWS = 1024
_MANY_TOKENS = 32
"""From here on the product counts more than reading the weights, and oneDNN's bfloat16 kernels win."""


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden] x [rows, hidden] -> float32 [tokens, rows], nothing rounded to bfloat16 on the way.

    The weight is converted piece by piece into a buffer that stays in the processor's cache: a float32 copy of the
    whole would cost more in page faults than the product. A product of two bfloat16 numbers is exact in float32, so
    oneDNN may turn the float32 numbers back into bfloat16 and add up in float32: same result, twice as fast.
    """
    if weight.dtype == torch.float32 or not torch.backends.mkldnn.is_available() or not hidden.size(0):
        return torch.nn.functional.linear(hidden.float(), weight.float())
    inputs = hidden.float()
    logits = inputs.new_empty(inputs.size(0), weight.size(0))
    piece = inputs.new_empty(min(_PIECE_ROWS, weight.size(0)), weight.size(1))
    exact = weight.dtype == hidden.dtype == torch.bfloat16
    with _Float32Products("bf16" if exact and hidden.size(0) >= _MANY_TOKENS else "ieee"):
        for start in range(0, weight.size(0), _PIECE_ROWS):
            rows = weight[start : start + _PIECE_ROWS]
            part = piece[: rows.size(0)].copy_(rows)
            product = torch.ops.mkldnn._linear_pointwise(inputs, part, None, "none", [], "")
            logits[:, start : start + rows.size(0)] = product
    return logits


class _Float32Products:
    """How oneDNN may multiply float32 numbers inside; afterwards as before."""

    def __init__(self, precision: str) -> None:
        self._precision = precision

    def __enter__(self) -> None:
        self._before = torch.backends.mkldnn.matmul.fp32_precision
        torch.backends.mkldnn.matmul.fp32_precision = self._precision

    def __exit__(self, *exception: object) -> None:
        torch.backends.mkldnn.matmul.fp32_precision = self._before
