"""Continuous batching: which answers run, which wait, and what the next step computes.

Plain bookkeeping without tensors or ranks. Every rank of a model-parallel group runs it on the same input and so
comes to the same plan.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grpo_megatron.rollout.base import RolloutRequest
from grpo_megatron.rollout.megatron.blocks import BlockPool
from grpo_megatron.rollout.megatron.draws import uniform_stream
from grpo_megatron.rollout.megatron.rows import BlockCopies, PromptPlan, Row, StepPlan


@dataclass(frozen=True)
class Limits:
    max_rows: int
    """Answers that run at the same time."""
    max_sequence_tokens: int
    """Prompt and answer together."""
    block_tokens: int
    num_blocks: int
    prompt_tokens_per_step: int
    """Prompts of one step together; a longer one has a step to itself."""
    share_prompt_prefix: bool

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)


@dataclass
class _Waiting:
    request: RolloutRequest
    indices: deque[int]


class Admission:
    """Rows in the order in which they started, and the requests behind them, first come first served.

    An answer starts only when blocks for its whole length are there, so none is ever paused or thrown out later.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.running: list[Row] = []
        self._waiting: deque[_Waiting] = deque()

    @property
    def is_idle(self) -> bool:
        return not self.running and not self._waiting

    @property
    def num_free_rows(self) -> int:
        """Answers that could start now if the blocks suffice; 0 while earlier requests wait."""
        return 0 if self._waiting else self.limits.max_rows - len(self.running)

    def check(self, request: RolloutRequest) -> None:
        """Refuse what could never run.

        Raises:
            ValueError: naming the prompt and the setting to change.
        """
        prompt, sampling, limits = request.prompt, request.sampling, self.limits
        if not prompt.token_ids:
            raise ValueError(f"data.prompts: prompt {prompt.id} has no tokens")
        total = len(prompt.token_ids) + sampling.max_new_tokens
        if total > limits.max_sequence_tokens:
            raise ValueError(
                f"prompt {prompt.id}: {len(prompt.token_ids)} prompt tokens and modules.rollout.max_new_tokens "
                f"{sampling.max_new_tokens} are {total}, the engine was built for {limits.max_sequence_tokens}; lower "
                "modules.rollout.max_new_tokens or data.max_prompt_tokens"
            )
        blocks = limits.blocks_for(total)
        if blocks > limits.num_blocks:
            raise ValueError(
                f"prompt {prompt.id}: its {total} tokens need {blocks} blocks of {limits.block_tokens} tokens, the "
                f"key-value cache has {limits.num_blocks}; raise modules.rollout.max_concurrent_rollouts, which sizes "
                "the cache, or lower modules.rollout.max_new_tokens"
            )

    def enqueue(self, requests: Iterable[RolloutRequest]) -> None:
        known = {row.request.id for row in self.running} | {waiting.request.id for waiting in self._waiting}
        for request in requests:
            assert request.id not in known, f"request {request.id} is here already"
            known.add(request.id)
            self._waiting.append(_Waiting(request, deque(range(request.num_rollouts))))

    def plan(self) -> StepPlan | None:
        """The next step, with as many new rows as fit; None if there is nothing to compute."""
        decode, prompts = list(self.running), []
        before: list[tuple[int, int]] = []
        prompt_tokens = 0
        while self._waiting and len(self.running) < self.limits.max_rows:
            waiting = self._waiting[0]
            joined = self._join(waiting, before)
            if joined:
                decode += joined
            else:
                length = len(waiting.request.prompt.token_ids)
                if prompt_tokens and prompt_tokens + length > self.limits.prompt_tokens_per_step:
                    break
                started = self._start(waiting)
                if started is None:
                    break
                prompts.append(started)
                prompt_tokens += length
            if not waiting.indices:
                self._waiting.popleft()
        if not decode and not prompts:
            return None
        prompts.sort(key=lambda prompt: len(prompt.token_ids))  # equal lengths are computed together
        return StepPlan(tuple(decode), tuple(prompts), _copies(before), _copies(self._tails(prompts)))

    def advance(self, plan: StepPlan) -> None:
        """Note that the plan's keys and values are in the cache."""
        for row in plan.decode:
            row.num_cached += 1
        for prompt in plan.prompts:
            for row in prompt.rows:
                row.num_cached = len(row.prompt)

    def finish(self, rows: Sequence[Row]) -> None:
        """Take rows out and give their blocks back."""
        gone = set(map(id, rows))
        self.running = [row for row in self.running if id(row) not in gone]
        for row in rows:
            self.pool.release(row.blocks)
            row.blocks = []

    def abort(self, request_ids: Iterable[str]) -> list[Row]:
        """Take these requests out; returns their rows as they are, those that never started without tokens."""
        wanted = set(request_ids)
        stopped = [row for row in self.running if row.request.id in wanted]
        self.finish(stopped)
        for waiting in self._waiting:
            if waiting.request.id in wanted:
                stopped += [_new_row(waiting.request, index) for index in waiting.indices]
        self._waiting = deque(waiting for waiting in self._waiting if waiting.request.id not in wanted)
        return stopped

    def abort_all(self) -> list[Row]:
        return self.abort([row.request.id for row in self.running] + [waiting.request.id for waiting in self._waiting])

    def _join(self, waiting: _Waiting, copies: list[tuple[int, int]]) -> list[Row]:
        """Start members of a group whose prompt a running member has in the cache.

        They compute the prompt's last token once more, for its logits, into blocks of their own.
        """
        request, length = waiting.request, len(waiting.request.prompt.token_ids)
        sibling = next((row for row in self.running if row.request is request and row.num_cached >= length), None)
        if sibling is None or not self.limits.share_prompt_prefix:
            return []
        joined = []
        while waiting.indices and len(self.running) < self.limits.max_rows:
            row = self._make_row(waiting, shared=self._full_blocks(sibling))
            if row is None:
                break
            row.num_cached = length - 1
            last = (length - 1) // self.limits.block_tokens
            if (length - 1) % self.limits.block_tokens:
                copies.append((sibling.blocks[last], row.blocks[last]))
            joined.append(row)
        return joined

    def _start(self, waiting: _Waiting) -> PromptPlan | None:
        """Start as many members as fit from a prompt that this step computes."""
        first = self._make_row(waiting, shared=[])
        if first is None:
            return None
        rows = [first]
        while self.limits.share_prompt_prefix and waiting.indices and len(self.running) < self.limits.max_rows:
            row = self._make_row(waiting, shared=self._full_blocks(first))
            if row is None:
                break
            rows.append(row)
        return PromptPlan(tuple(rows))

    def _full_blocks(self, row: Row) -> list[int]:
        """The prompt's blocks before the one that holds its last token: nobody writes to them again."""
        return row.blocks[: (len(row.prompt) - 1) // self.limits.block_tokens]

    def _make_row(self, waiting: _Waiting, *, shared: list[int]) -> Row | None:
        """The next member with all its blocks, running; None if there are not enough blocks."""
        request = waiting.request
        # The last token's keys and values are never needed.
        total = len(request.prompt.token_ids) + max(request.sampling.max_new_tokens - 1, 0)
        missing = self.limits.blocks_for(total) - len(shared)
        if missing > self.pool.num_free:
            return None
        self.pool.share(shared)
        row = _new_row(request, waiting.indices.popleft())
        row.blocks = shared + self.pool.take(missing)
        self.running.append(row)
        return row

    def _tails(self, prompts: Sequence[PromptPlan]) -> list[tuple[int, int]]:
        """From the first member's block with the prompt's last token to the others'."""
        pairs = []
        for prompt in prompts:
            last = (len(prompt.token_ids) - 1) // self.limits.block_tokens
            pairs += [(prompt.rows[0].blocks[last], row.blocks[last]) for row in prompt.rows[1:]]
        return pairs


def _new_row(request: RolloutRequest, index: int) -> Row:
    count = request.sampling.max_new_tokens
    return Row(request, index, uniform_stream(seed=request.seed, prompt_id=request.prompt.id, index=index, count=count))


def _copies(pairs: Sequence[tuple[int, int]]) -> BlockCopies:
    return BlockCopies(tuple(source for source, _ in pairs), tuple(destination for _, destination in pairs))
