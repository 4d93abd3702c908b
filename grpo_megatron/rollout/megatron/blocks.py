"""Which block of the key-value cache belongs to whom. Whole numbers only; the tensors are in `cache.py`."""


class BlockPool:
    """Blocks of equal size, handed out one by one, shared by counting references.

    Example:
        >>> pool = BlockPool(3)
        >>> mine = pool.take(2); pool.share(mine[:1]); pool.release(mine); pool.num_free
        2
        >>> pool.release(mine[:1]); pool.num_free
        3
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: blocks used last are still in the processor's cache

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks with one reference each."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} are free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more reference to each."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free and cannot be shared"
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One reference less to each; blocks without any are free."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} was released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
