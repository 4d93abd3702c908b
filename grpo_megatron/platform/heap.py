"""Giving freed heap memory back to the operating system."""

import ctypes
from collections.abc import Callable
from functools import cache


def return_free_memory() -> None:
    """glibc keeps freed blocks below its mapping threshold (up to 32 MB) for itself; elsewhere this does nothing."""
    trim = _find_trim()
    if trim is not None:
        trim(0)


@cache
def _find_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
