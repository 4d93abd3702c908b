"""What every layer of one forward would compute again."""

from collections.abc import Callable
from typing import Any

import torch


class OncePerForward:
    """Remembers the last value of a function of tensors.

    The tensors are kept, so that no other can take their identity, and their version counters compared, so that a
    write in place is noticed. Inference tensors have no counter and are computed anew.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._key: list[Any] = []
        self._arguments: tuple[Any, ...] = ()
        self._value: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if any(isinstance(one, torch.Tensor) and one.is_inference() for one in arguments):
            return self._function(*arguments)
        key = [(id(one), one._version) if isinstance(one, torch.Tensor) else one for one in arguments]
        if key != self._key:
            self._value = self._function(*arguments)
            self._key, self._arguments = key, arguments
        return self._value
