"""Control calls to an SGLang server: one at a time, each with a deadline, each answer checked."""

import http.client
import json
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

_TEXT_SHOWN = 500


class EngineFailure(RuntimeError):
    """The server is gone, hangs, or did not do what it was asked; the message says which call."""


class Control:
    """HTTP on loopback; never through a proxy.

    Args:
        deadline_seconds: of a call, unless it has its own.
        is_running: whether the server's process lives, to name the cause of a lost connection.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        deadline_seconds: float,
        is_running: Callable[[], bool] = lambda: True,
    ) -> None:
        self._place = urlsplit(address).netloc
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._deadline_seconds = deadline_seconds
        self._is_running = is_running

    def get(self, path: str, *, deadline_seconds: float | None = None) -> dict[str, Any]:
        """Raises EngineFailure."""
        return self._call("GET", path, None, deadline_seconds)

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, deadline_seconds: float | None = None
    ) -> dict[str, Any]:
        """Send `body` as JSON; returns the answer, {} if it is not JSON.

        Raises:
            EngineFailure: no connection, no answer in time, a status other than 200, or `success: false` in the answer.
        """
        return self._call("POST", path, json.dumps(body or {}), deadline_seconds)

    def _call(self, method: str, path: str, body: str | None, deadline_seconds: float | None) -> dict[str, Any]:
        seconds = deadline_seconds or self._deadline_seconds
        connection = http.client.HTTPConnection(self._place, timeout=seconds)
        begin = time.monotonic()
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            status, text = response.status, response.read().decode(errors="replace")
        except TimeoutError as error:
            raise EngineFailure(f"{path}: the engine did not answer within {seconds:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            gone = "" if self._is_running() else ": its process has ended"
            raise EngineFailure(
                f"{path}: the engine closed the connection after {time.monotonic() - begin:.1f} s{gone}"
            ) from error
        finally:
            connection.close()
        answer = _parse(text)
        if status != http.client.OK or answer.get("success") is False:
            said = answer.get("message") or text[:_TEXT_SHOWN] or "nothing"
            raise EngineFailure(f"{path}: the engine answered with status {status}: {said}")
        return answer


def _parse(text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
