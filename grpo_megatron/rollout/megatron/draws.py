"""Where the random numbers of an answer come from: a stream of its own, independent of what runs beside it."""

import hashlib

import numpy as np


def uniform_stream(*, seed: int, prompt_id: str, index: int, count: int) -> np.ndarray:
    """float64 [count] in [0, 1): the number for token position p is element p, however many are asked for.

    Philox is counter-based: the key is a hash of (seed, prompt id, index), the counter is the position. So a draw is
    the same in another batch, on another engine and after a resume, and members of a group differ.
    """
    name = f"{seed}/{index}/{prompt_id}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(count)
