"""Asynchronous client of a generation server, colocated or remote: token ids in, streamed token ids out.

Speaks the native HTTP interface of SGLang. One client belongs to one event loop.
"""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from grpo_megatron.batch import FinishReason, VersionSpan
from grpo_megatron.rollout.base import SamplingSettings

_CONNECT_SECONDS = 10.0
_LONGEST_LINE_BYTES = 2**24
_DATA = b"data:"
_DONE = b"[DONE]"


class ServerFault(RuntimeError):
    """The server lost a request: it is gone, cut the answer off, or gave one that cannot be true. Can be sent again."""


class RequestRefused(ValueError):
    """The server refuses this request; it would refuse it again."""


@dataclass(frozen=True)
class Answer:
    """One answer as the server gave it.

    Example:
        >>> Answer((8, 2), (-0.1, -0.2), "stop", (VersionSpan(0, 2, 4),)).token_ids
        (8, 2)
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    num_cached_prompt_tokens: int = 0


@dataclass
class _Stream:
    """What has come of one answer so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: Mapping[str, Any] = field(default_factory=dict)


class GenerationClient:
    """Requests to one server over many connections. Use as `async with`.

    Args:
        max_open: requests that are open at the same time; more wait here and not in the server.
        vocab_size: token ids beyond it are an answer that cannot be true.
    """

    def __init__(self, address: str, token: str, *, max_open: int, vocab_size: int) -> None:
        self._address = address
        self._headers = {"Authorization": f"Bearer {token}"}
        self._room = asyncio.Semaphore(max_open)
        self._vocab_size = vocab_size
        self._session: aiohttp.ClientSession | None = None
        self.heard_at = time.monotonic()
        """When the server last said anything about any answer."""
        self.num_pieces = 0

    async def __aenter__(self) -> "GenerationClient":
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)  # the caller watches for progress
        self._session = aiohttp.ClientSession(
            self._address,
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=timeout,
            trust_env=False,  # no proxy on the way to an own server
            read_bufsize=_LONGEST_LINE_BYTES,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def generate(
        self,
        name: str,
        prompt_ids: tuple[int, ...],
        sampling: SamplingSettings,
        *,
        seed: int,
        heard: Callable[[], None] = lambda: None,
    ) -> Answer:
        """One answer.

        Args:
            name: the server's name of the request, for `abort`; unlike all other names.
            heard: called with every piece that comes.

        Raises:
            ServerFault: the answer was cut off or makes no sense.
            RequestRefused: the server will never answer this.
        """
        body = {
            "rid": name,
            "input_ids": list(prompt_ids),
            "sampling_params": sampling_parameters(sampling, seed),
            "return_logprob": True,
            "stream": True,
        }
        async with self._room:
            try:
                stream = await self._stream(body, heard)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                raise ServerFault(f"{name}: the connection was lost: {type(error).__name__} {error}") from error
        return self._checked(name, stream, sampling)

    async def abort(self, name: str, *, deadline_seconds: float = 10.0) -> None:
        """Stop this request: it ends with what it has. A server that does not hear this is found by its silence."""
        assert self._session is not None
        try:
            async with asyncio.timeout(deadline_seconds):
                async with self._session.post("/abort_request", json={"rid": name}):
                    pass
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            pass

    async def is_healthy(self, *, deadline_seconds: float) -> bool:
        """Whether the server generates a token, or answers anything at all while it is busy."""
        assert self._session is not None
        try:
            async with asyncio.timeout(deadline_seconds):
                async with self._session.get("/health_generate") as response:
                    return response.status == 200
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return False

    async def _stream(self, body: Mapping[str, Any], heard: Callable[[], None]) -> _Stream:
        assert self._session is not None
        stream = _Stream()
        async with self._session.post("/generate", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                refused = 400 <= response.status < 500
                kind = RequestRefused if refused else ServerFault
                raise kind(f"{body['rid']}: status {response.status}: {text}")
            async for line in response.content:
                data = line.strip().removeprefix(_DATA).strip()
                if not data or data == _DONE:
                    continue
                piece = _parse(body["rid"], data)
                stream.token_ids += piece["output_ids"]
                stream.logprobs += [float(entry[0]) for entry in piece["meta_info"]["output_token_logprobs"]]
                stream.last = piece["meta_info"]
                self.heard_at = time.monotonic()
                self.num_pieces += 1
                heard()
        return stream

    def _checked(self, name: str, stream: _Stream, sampling: SamplingSettings) -> Answer:
        """An answer that could be true, or a fault."""
        ids, logprobs, last = stream.token_ids, stream.logprobs, stream.last
        reason = (last.get("finish_reason") or {}).get("type")
        problem = None
        if reason not in ("stop", "length", "abort"):
            problem = f"it ended without a reason ({reason})"
        elif len(ids) != len(logprobs):
            problem = f"{len(ids)} tokens with {len(logprobs)} log-probs"
        elif not ids and reason != "abort":
            problem = "it is empty"
        elif len(ids) > sampling.max_new_tokens:
            problem = f"{len(ids)} tokens where {sampling.max_new_tokens} were the limit"
        elif any(not 0 <= token < self._vocab_size for token in ids):
            problem = f"a token outside the vocabulary of {self._vocab_size}"
        elif not all(math.isfinite(value) and value <= 1e-3 for value in logprobs):
            problem = "a log-prob that is none"
        elif reason == "stop" and ids[-1] not in sampling.stop_token_ids:
            problem = f"it stopped at token {ids[-1]}, which the request does not name"
        if problem is not None:
            raise ServerFault(f"{name}: the server's answer makes no sense: {problem}")
        num_cached = int(last.get("cached_tokens") or 0)
        return Answer(tuple(ids), tuple(logprobs), reason, _spans(name, last, len(ids)), num_cached)


def sampling_parameters(sampling: SamplingSettings, seed: int) -> dict[str, Any]:
    """As SGLang names them."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,
        "sampling_seed": seed,
    }


def answer_seed(seed: int, prompt_id: str, index: int) -> int:
    """31 bits from all three: members of a group differ, and so do equal prompts with other ids."""
    digest = hashlib.blake2b(f"{seed}/{index}/{prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) & 0x7FFFFFFF


def _parse(name: str, data: bytes) -> dict[str, Any]:
    try:
        piece: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise ServerFault(f"{name}: the server's answer is no JSON: {data[:200]!r}") from error
    if "error" in piece:
        code = piece["error"].get("code")
        kind = ServerFault if isinstance(code, int) and code >= 500 else RequestRefused
        raise kind(f"{name}: {piece['error'].get('message', piece['error'])}")
    meta = piece.get("meta_info", {})
    if (meta.get("finish_reason") or {}).get("type") == "abort":  # of a request that had not begun: nothing is there
        piece.setdefault("output_ids", [])
        meta.setdefault("output_token_logprobs", [])
    if "output_ids" not in piece or "output_token_logprobs" not in piece.get("meta_info", {}):
        raise ServerFault(f"{name}: the server's answer lacks tokens or log-probs: {data[:200]!r}")
    return piece


def _spans(name: str, last: Mapping[str, Any], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Which version of the policy sampled which tokens."""
    given = last.get("weight_versions") or [{"version": last["weight_version"], "start": 0, "end": num_tokens}]
    try:
        return tuple(VersionSpan(int(span["start"]), int(span["end"]), int(span["version"])) for span in given)
    except ValueError as error:
        raise ServerFault(f"{name}: the server's answer makes no sense: versions {given}") from error
