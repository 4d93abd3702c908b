"""What the publish tests need of SGLang without SGLang: a model that loads like its models, a server that answers."""

import base64
import pickle
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from grpo_megatron.rollout.sglang.control import EngineFailure
from grpo_megatron.rollout.sglang.receiver import Receiver

VOCABULARY, HIDDEN, HEADS = 11, 8, 4


class FusedModel(torch.nn.Module):
    """One tensor-parallel rank of a model with a fused projection; ignores names that it does not know, silently."""

    def __init__(self, *, rank: int = 0, size: int = 1, has_extra: bool = False) -> None:
        super().__init__()
        self._rank, self._size = rank, size
        rows = -(-VOCABULARY // size)
        self.embed = torch.nn.Parameter(torch.zeros(rows, HIDDEN), requires_grad=False)
        self.qkv_proj = torch.nn.Parameter(torch.zeros(3 * HIDDEN // size, HIDDEN), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.ones(HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.cache_scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        if has_extra:
            self.drafter_head = torch.nn.Parameter(torch.zeros(HIDDEN, HIDDEN), requires_grad=False)
        self.skip = ""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self.skip:
                continue
            self._load_one(name, tensor)

    def _load_one(self, name: str, tensor: torch.Tensor) -> None:
        rows = HIDDEN // self._size
        if name == "bad":
            raise RuntimeError("start (0) + length (9) exceeds dimension size (8)")
        if name == "embed":
            own = tensor[self._rank * len(self.embed) : (self._rank + 1) * len(self.embed)]
            self.embed[: len(own)].data.copy_(own)
            self.embed[len(own) :].data.fill_(0)
        elif name in ("q", "k", "v"):
            place = ("q", "k", "v").index(name) * rows
            self.qkv_proj.data.narrow(0, place, rows).copy_(tensor.narrow(0, self._rank * rows, rows))
        elif name == "norm":
            self.norm.data.copy_(tensor)


class GreedyListModel(FusedModel):
    """Reads all names before it writes anything, as some of SGLang's models do."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(sorted(weights, key=lambda pair: pair[0]))


class PretendedServer:
    """Control calls answered as SGLang's server does; `ranks` has the models of each tensor-parallel rank.

    Its schedulers are threads, each with a receiver of its own.
    """

    def __init__(self, ranks: list[list[torch.nn.Module]]) -> None:
        self.ranks = ranks
        self.receivers = [Receiver() for _ in ranks]
        self.calls: list[str] = []
        self.weight_version = "default"
        self.in_session = False
        self.refuse = ""

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/model_info"
        return {"weight_version": self.weight_version}

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, deadline_seconds: float | None = None
    ) -> dict[str, Any]:
        self.calls.append(path)
        if path == self.refuse:
            self._fail(f"{path} is refused")
        match path:
            case "/begin_weight_update":
                if self.in_session:
                    self._fail("a weight-update session is already open")
                self.in_session = True
            case "/end_weight_update":
                if not self.in_session:
                    self._fail("no weight-update session is open")
                self.in_session = False
            case "/update_weights_from_tensor":
                assert body is not None
                if not self.in_session:
                    self._fail("update_weights_from_tensor must run between begin and end")
                self._update(body["serialized_named_tensors"])
            case "/update_weight_version":
                assert body is not None and body["abort_all_requests"] is False
                self.weight_version = body["new_version"]
        return {}

    def _update(self, messages: list[str]) -> None:
        assert len(messages) == len(self.ranks)
        threads = [
            threading.Thread(target=self._load, args=(rank, pickle.loads(base64.b64decode(message))))  # noqa: S301
            for rank, message in enumerate(messages)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _load(self, rank: int, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        for model in self.ranks[rank]:
            self.receivers[rank].load(model, named_tensors)

    def _fail(self, text: str) -> None:
        raise EngineFailure(text)
