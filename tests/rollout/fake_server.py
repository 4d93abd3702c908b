"""A small server that speaks SGLang's interface and misbehaves on demand: for faults that the real one has seldom."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Behaviour:
    """What the server does; a test changes it while the server runs."""

    pieces: Callable[[dict[str, Any]], list[dict[str, Any]]]
    """Request -> the streamed pieces."""
    is_healthy: bool = True
    silent: Callable[[dict[str, Any]], bool] = lambda request: False
    """Requests that are accepted and never answered."""
    cut: Callable[[dict[str, Any]], bool] = lambda request: False
    """Requests whose connection is closed in the middle."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    authorizations: set[str] = field(default_factory=set)


def answer_pieces(request: dict[str, Any], *, size: int = 2, version: str = "0") -> list[dict[str, Any]]:
    """A right answer: as many tokens as asked for, `size` in a piece."""
    wanted = request["sampling_params"]["max_new_tokens"]
    pieces = []
    for start in range(0, wanted, size):
        ids = [3 + (place + request["sampling_params"]["sampling_seed"]) % 100 for place in range(wanted)]
        ids = ids[start : start + size]
        is_last = start + size >= wanted
        pieces.append(
            {
                "output_ids": ids,
                "meta_info": {
                    "finish_reason": {"type": "length", "length": wanted} if is_last else None,
                    "output_token_logprobs": [[-0.5, token, None] for token in ids],
                    "cached_tokens": 0,
                    "weight_version": version,
                },
            }
        )
    return pieces


class FakeServer:
    """Runs in a thread of its own; `address` is where."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _serve(self, ready: threading.Event) -> None:
        self._loop.run_until_complete(self._run(ready))

    async def _run(self, ready: threading.Event) -> None:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health_generate", self._health)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body, behaviour = await request.json(), self.behaviour
        behaviour.requests.append(body)
        behaviour.authorizations.add(request.headers.get("Authorization", ""))
        pieces = behaviour.pieces(body)
        if behaviour.silent(body):
            for _ in range(600):
                await asyncio.sleep(0.1)
                if body["rid"] in behaviour.aborted:
                    break
            pieces = [{"text": "", "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "0"}}]
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
            if behaviour.cut(body):
                request.transport.abort()  # type: ignore[union-attr]
                return response
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _abort(self, request: web.Request) -> web.Response:
        self.behaviour.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.behaviour.is_healthy else 503)
