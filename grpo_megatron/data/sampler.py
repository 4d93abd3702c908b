"""The order in which prompts are trained: seeded, the same for any number of ranks, and resumable at any point.

The order of an epoch depends on the seed, the epoch and the prompts' ids alone. A batch may span two epochs: nothing is
lost or repeated, and a prompt of the new epoch that is already in the batch comes first in the next one.
"""

import hashlib
from collections import deque
from collections.abc import Mapping
from typing import Any

from grpo_megatron.batch import Prompt
from grpo_megatron.data.prompts import PromptSet


class PromptSampler:
    """Hands out prompts batch by batch, epoch after epoch, without end."""

    def __init__(self, prompts: PromptSet, *, seed: int, shuffle: bool = True) -> None:
        self._prompts = prompts
        self._by_id = {prompt.id: prompt for prompt in prompts}
        assert len(self._by_id) == len(prompts), "two prompts with one id"
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._make_order(0)
        # Prompts that were passed over at the border of two epochs; they belong to the current one.
        self._deferred: deque[str] = deque()

    @property
    def epoch(self) -> int:
        """Epoch of the prompt that comes next."""
        return self._epoch + (self._position == len(self._order) and not self._deferred)

    def next(self, batch_size: int) -> list[Prompt]:
        """The next `batch_size` prompts, all different.

        Raises:
            ValueError: there are fewer prompts than that.
        """
        if batch_size > len(self._prompts):
            raise ValueError(
                f"modules.rollout.batch_size: {batch_size} different prompts a step, and data.prompts has "
                f"{len(self._prompts)}; set it to {len(self._prompts)} or less, or add prompts"
            )
        batch: dict[str, Prompt] = {}
        passed_over: list[str] = []
        while len(batch) < batch_size:
            name = self._draw()
            if name in batch:
                passed_over.append(name)
            else:
                batch[name] = self._by_id[name]
        self._deferred.extendleft(reversed(passed_over))
        return list(batch.values())

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs to go on with the very next prompt."""
        return {
            "fingerprint": self._prompts.fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "deferred": list(self._deferred),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: the prompts or the settings of the order are not those of the state.
        """
        if state["fingerprint"] != self._prompts.fingerprint:
            raise ValueError(
                "data.prompts: the prompts are not those of the checkpoint (another file, other lines, another "
                "tokenizer or chat template), so the order cannot go on; put back what was there, or start anew under "
                "another run.name, with model.policy set to the exported policy if it is to go on from there"
            )
        for name, key, value in (("seed", "run.seed", self._seed), ("shuffle", "data.shuffle", self._shuffle)):
            if state[name] != value:
                raise ValueError(
                    f"{key}: {value}, and the checkpoint was made with {state[name]}; set it back or "
                    "start anew under another run.name"
                )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._order = self._make_order(self._epoch)
        self._deferred = deque(state["deferred"])

    def _draw(self) -> str:
        if self._deferred:
            return self._deferred.popleft()
        if self._position == len(self._order):
            self._epoch += 1
            self._position = 0
            self._order = self._make_order(self._epoch)
        self._position += 1
        return self._order[self._position - 1]

    def _make_order(self, epoch: int) -> list[str]:
        """Sorted by a hash: no random generator whose stream could change with a version of a library."""
        names = [prompt.id for prompt in self._prompts]
        if not self._shuffle:
            return names
        return sorted(names, key=lambda name: hashlib.sha256(f"{self._seed}/{epoch}/{name}".encode()).digest())
