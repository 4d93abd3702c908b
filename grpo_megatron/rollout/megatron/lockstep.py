"""How the ranks of a model-parallel group stay together: two small broadcasts per engine step, nothing else."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron.parallel.collectives import broadcast_object
from grpo_megatron.parallel.grid import Coordinates
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.rollout.base import RolloutRequest
from grpo_megatron.rollout.megatron.sampling import Sampled


@dataclass(frozen=True)
class Commands:
    """What the leader decided before a step."""

    state: Literal["continue", "finished", "refused", "failed"] = "continue"
    """`finished`: no more requests will come; `refused` (a request) and `failed`: all ranks raise `error`."""
    requests: tuple[RolloutRequest, ...] = ()
    aborted: tuple[str, ...] = ()
    error: str = ""


_NOTHING = Commands()


class Lockstep:
    """Broadcasts inside one model-parallel group; alone in it, everything stays where it is."""

    def __init__(self, groups: Groups) -> None:
        self._group = groups.model
        self._is_alone = dist.get_world_size(groups.model) == 1
        self._leader = groups.model_leader
        here = groups.grid.coordinates(groups.rank)
        last_stage = Coordinates(tensor=0, context=here.context, data=here.data, pipeline=groups.grid.pipeline - 1)
        self._sampler = groups.grid.rank_at(last_stage)
        self.is_sampler = self._sampler == groups.rank
        """This rank draws the tokens of all: the first of the last stage."""

    def share_commands(self, commands: Commands | None) -> Commands:
        """The leader's commands on every rank; others pass None. Collective over the model-parallel group."""
        if self._is_alone:
            assert commands is not None
            return commands
        has_news = torch.zeros(1, dtype=torch.int64)
        if commands is not None and commands != _NOTHING:
            has_news[0] = 1
        dist.broadcast(has_news, src=self._leader, group=self._group)
        return broadcast_object(commands, self._leader, self._group) if has_news.item() else _NOTHING

    def share_sampled(self, sampled: Sampled | None, count: int) -> Sampled:
        """What the sampler drew, the same bits on every rank. Collective over the model-parallel group."""
        if self._is_alone:
            assert sampled is not None
            return sampled
        numbers = torch.empty(2, count, dtype=torch.float64)  # exact for token ids and for float32
        if sampled is not None:
            numbers[0] = torch.from_numpy(sampled.token_ids)
            numbers[1] = torch.from_numpy(sampled.logprobs)
        dist.broadcast(numbers, src=self._sampler, group=self._group)
        return Sampled(numbers[0].numpy().astype(np.int64), numbers[1].numpy().astype(np.float32))
