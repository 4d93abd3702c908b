"""Dividing work: groups over mini-batches, blocks over replicas, a replica's blocks over micro-batches.

Deterministic and independent of the order of the input. Work is counted in tokens of the row.
"""

import hashlib
import heapq
from collections.abc import Sequence

from grpo_megatron.data.blocks import Block, TrainedAnswer

_WORTHWHILE_GAIN = 0.02
"""A block is cut, and its prompt computed twice, if that shortens the longest replica by more than this share."""


def split_into_mini_batches(groups: Sequence[Block], num_mini_batches: int) -> list[list[Block]]:
    """Whole groups, in numbers that differ by one at most, the larger ones first; some may be empty.

    By a hash of the prompt's id: ids of one kind of prompt often sort together, and a mini-batch should be a mixture.
    """
    order = sorted(groups, key=lambda group: hashlib.sha256(group.prompt.id.encode()).digest())
    size, num_larger = divmod(len(order), num_mini_batches)
    parts = []
    start = 0
    for index in range(num_mini_batches):
        end = start + size + (index < num_larger)
        parts.append(order[start:end])
        start = end
    return parts


def split_by_budget(group: Block, *, budget: int, share_prefix: bool) -> list[Block]:
    """Blocks of at most `budget` tokens, each with the prompt; an answer too long for it has a block to itself."""
    if not share_prefix:
        return [Block(group.prompt, (answer,)) for answer in group.answers]
    if group.num_tokens <= budget:
        return [group]
    room = budget - len(group.prompt.token_ids)
    answers = sorted(group.answers, key=lambda answer: (-answer.num_tokens, answer.scored.rollout.index))
    bins = first_fit([answer.num_tokens for answer in answers], room)
    return [_make_block(group, [answers[i] for i in members]) for members in bins]


def spread_over_replicas(blocks: Sequence[Block], num_replicas: int) -> list[list[Block]]:
    """Give every replica about the same number of tokens; large groups are halved where that helps."""
    current = list(blocks)
    replicas = _longest_first(current, num_replicas)
    while True:
        longest = max(replicas, key=_work)
        candidates = [block for block in longest if len(block.answers) > 1]
        if not candidates:
            return replicas
        victim = min(candidates, key=lambda block: block.sort_key)
        halved = [block for block in current if block is not victim] + _halve(victim)
        attempt = _longest_first(halved, num_replicas)
        if max(map(_work, attempt)) > (1 - _WORTHWHILE_GAIN) * _work(longest):
            return replicas
        current, replicas = halved, attempt


def fill_micro_batches(blocks: Sequence[Block], budget: int) -> list[list[Block]]:
    """First fit, longest first; a block above the budget has a micro-batch to itself."""
    order = sorted(blocks, key=lambda block: block.sort_key)
    return [[order[i] for i in members] for members in first_fit([block.num_tokens for block in order], budget)]


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices per bin: each item goes to the first bin with room for it, else to a new one.

    Example:
        >>> first_fit([5, 4, 3, 2, 9], 8)
        [[0, 2], [1, 3], [4]]
    """
    bins: list[list[int]] = []
    rooms: list[int] = []
    for index, size in enumerate(sizes):
        place = next((number for number, room in enumerate(rooms) if size <= room), None)
        if place is None:
            bins.append([index])
            rooms.append(capacity - size)
        else:
            bins[place].append(index)
            rooms[place] -= size
    return bins


def _longest_first(blocks: Sequence[Block], num_replicas: int) -> list[list[Block]]:
    """Longest processing time first: at most 4/3 of the best possible (Graham 1969)."""
    replicas: list[list[Block]] = [[] for _ in range(num_replicas)]
    heap = [(0, number) for number in range(num_replicas)]
    for block in sorted(blocks, key=lambda block: block.sort_key):
        work, number = heapq.heappop(heap)
        replicas[number].append(block)
        heapq.heappush(heap, (work + block.num_tokens, number))
    return replicas


def _halve(block: Block) -> list[Block]:
    halves: list[list[TrainedAnswer]] = [[], []]
    for answer in sorted(block.answers, key=lambda each: (-each.num_tokens, each.scored.rollout.index)):
        min(halves, key=lambda half: (sum(each.num_tokens for each in half), len(half))).append(answer)
    return [_make_block(block, half) for half in halves]


def _make_block(group: Block, answers: Sequence[TrainedAnswer]) -> Block:
    return Block(group.prompt, tuple(sorted(answers, key=lambda answer: answer.scored.rollout.index)))


def _work(blocks: Sequence[Block]) -> int:
    return sum(block.num_tokens for block in blocks)
