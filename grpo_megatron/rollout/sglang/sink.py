"""Hands published buckets to an SGLang server: a message by HTTP, the bytes through memory that both see.

The other side is `receiver.py`, inside SGLang's schedulers. On a CPU the memory is one shared buffer of the leader; on
a GPU each rank of the engine's group has a bucket on its own device, and exports it once to the scheduler there.
"""

import base64
import contextlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.rollout.sglang.arguments import RECEIVER
from grpo_megatron.rollout.sglang.control import EngineFailure
from grpo_megatron.weights.checksum import checksum
from grpo_megatron.weights.device_memory import allocate_shareable, export_handle, pin
from grpo_megatron.weights.naming import short_list
from grpo_megatron.weights.shared_buffer import SharedBuffer
from grpo_megatron.weights.sink import Bucket

NO_VERSION = -1
_FLUSH_SECONDS = 10
"""How long the last answer may take to leave the scheduler before the cache is emptied."""
Memory = Mapping[str, Any]
"""Where a scheduler finds the bytes: `path` and `num_bytes`, or what `export_handle` gives."""


class EngineControl(Protocol):
    """Calls to the server that raise when the answer is not good (see `Control`)."""

    def get(self, path: str) -> dict[str, Any]: ...

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]: ...


class SglangSink:
    """A `WeightSink` to one SGLang server.

    On a CPU only the leader of the engine's group has one. On a GPU every rank of the group has: rank i's bucket goes
    to the server's tensor-parallel rank i, and calls that send something are collective over the group.

    Args:
        control: gives, on the leader, the calls to the server that runs now; None on the other ranks. Another object
            than before means another server, which has the weights of its checkpoint.
        tensor_parallel: of the engine.
        group: the ranks of the engine, where each of them has a sink.
        has_drafter: whether the engine has more models than the policy; each has to get weights.
        unused: published tensors for which the engine has no place.
        asleep: parts of the engine that are away now.
    """

    def __init__(
        self,
        control: Callable[[], EngineControl] | None,
        *,
        tensor_parallel: int,
        group: dist.ProcessGroup | None = None,
        has_drafter: bool = False,
        unused: Collection[str] = (),
        asleep: Callable[[], Collection[str]] = tuple,
    ) -> None:
        assert group is None or dist.get_world_size(group) == tensor_parallel
        self._control, self._group = control, group
        self._tensor_parallel, self._has_drafter = tensor_parallel, has_drafter
        self._unused, self._asleep = frozenset(unused), asleep
        self._folder = None if control is None else Path(tempfile.mkdtemp(prefix="grpo_megatron-reports-"))
        self._memories: Sequence[Memory] = ()
        self._shared: SharedBuffer | None = None
        self._buffer: torch.Tensor | None = None
        self._known: EngineControl | None = None
        self._is_checked = False
        self._session_may_be_open = False
        self._next = NO_VERSION
        self._is_whole = False
        self.transport: Literal["", "shared memory", "device memory", "pinned shared memory"] = ""
        """How the bytes go over; known after `allocate`."""
        self.reason = ""
        """Why it is not by device memory, where it could be."""

    # Memory: once, at the start.

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor | None:
        """See `WeightSink`. On a GPU: tries one round trip through device memory. Collective over the group."""
        if device.type == "cpu":
            self.transport = "shared memory"
            return self._allocate_shared(num_bytes)
        problem = self._try_device_memory(num_bytes, device)
        if problem is None:
            self.transport = "device memory"
            return self._buffer
        self.transport, self.reason = "pinned shared memory", problem
        self._buffer, self._memories = None, ()
        if self._control is None:
            return None
        buffer = self._allocate_shared(num_bytes)
        pin(buffer)
        return buffer

    def close(self) -> None:
        """Let go of the memory and of the folder for reports."""
        if self._shared is not None:
            self._shared.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _allocate_shared(self, num_bytes: int) -> torch.Tensor:
        self._shared = SharedBuffer.create(num_bytes)
        self._memories = [{"path": self._shared.path, "num_bytes": num_bytes}] * self._tensor_parallel
        return self._shared.tensor

    def _try_device_memory(self, num_bytes: int, device: torch.device) -> str | None:
        """Why device memory cannot be handed over, None if it can; the same on every rank. Collective over the group."""
        problem, memory, expected = None, None, 0
        try:
            self._buffer = allocate_shareable(num_bytes, device)
            self._buffer.random_(0, 256)
            expected = checksum(self._buffer)
            memory = export_handle(self._buffer)
            torch.cuda.synchronize(device)
        except Exception as error:  # noqa: BLE001 whatever it is, there is another way
            problem = f"{type(error).__name__}: {error}"
        gathered = self._gather((problem, memory, expected))
        problems = [f"rank {rank}: {one}" for rank, (one, _, _) in enumerate(gathered) if one is not None]
        if not problems and self._control is not None:
            self._memories = [memory for _, memory, _ in gathered if memory is not None]
            try:
                self._probe([expected for _, _, expected in gathered])
            except Exception as error:  # noqa: BLE001 as above
                problems = [f"{type(error).__name__}: {error}"]
        problems = [text for found in self._gather(problems) for text in found]
        return "; ".join(dict.fromkeys(problems)) or None

    def _probe(self, expected: Sequence[int]) -> None:
        self._open_session()
        try:
            reports = self._send("probe")
        finally:
            self._close_session()
        wrong = [report["rank"] for report in reports if report["checksum"] != expected[report["rank"]]]
        if wrong:
            raise EngineFailure(f"the engine reads other bytes than were written, on its ranks {wrong}")

    # One publish.

    def begin(self, version: int) -> None:
        """See `WeightSink`. Collective over the group."""
        self._next, self._is_whole = version, False
        self._lead(self._begin)

    def put(self, bucket: Bucket) -> None:
        """See `WeightSink`. Collective over the group."""
        self._wait_for_device()
        self._lead(lambda: self._send("load", bucket))

    def compare(self, bucket: Bucket) -> dict[str, int] | None:
        """See `WeightSink`. Outside of a publish as well. Collective over the group."""
        self._wait_for_device()
        return self._lead(lambda: self._compare(bucket))

    def commit(self) -> None:
        """See `WeightSink`. Collective over the group."""
        self._lead(self._commit)
        self._is_whole = True

    def abort(self) -> None:
        self._is_whole = False
        if self._control is None:
            return
        with contextlib.suppress(EngineFailure):
            self._close_session()
        self._set_version(NO_VERSION)

    def version(self) -> int:
        """See `WeightSink`; as the server says it, on the leader."""
        if self._control is None:
            return self._next if self._is_whole else NO_VERSION
        if not self._is_whole or self._control() is not self._known:
            return NO_VERSION
        return int(self._control().get("/model_info")["weight_version"])

    def forget(self) -> None:
        """The engine has lost its weights, by sleeping for example: the next publish is checked like its first."""
        self._is_checked = self._is_whole = False

    def _begin(self) -> None:
        assert self._control is not None
        if "weights" in self._asleep():
            raise EngineFailure("the engine's weights are asleep: wake them before the publish")
        control = self._control()
        if control is not self._known:
            self._known, self._is_checked, self._session_may_be_open = control, False, False
        self._open_session()
        if not self._is_checked:
            self._send("poison")

    def _compare(self, bucket: Bucket) -> dict[str, int]:
        if self._session_may_be_open:
            reports = self._send("compare", bucket)
        else:
            self._open_session()
            try:
                reports = self._send("compare", bucket)
            finally:
                self._close_session()
        names = [entry.name for entry in bucket.entries]
        changed = sorted({name for report in reports for name in report["changed"]})
        if changed:
            raise EngineFailure(f"the engine used other values than were published for {short_list(changed)}")
        taken = {name for report in reports for name in report["taken"]}
        if ignored := [name for name in names if name not in taken and name not in self._unused]:
            raise EngineFailure(f"the engine has no place for {short_list(ignored)}")
        if any(report["checksums"] != reports[0]["checksums"] for report in reports):
            raise EngineFailure("the ranks of the engine received different bytes")
        return dict(reports[0]["checksums"])

    def _commit(self) -> None:
        assert self._known is not None
        if not self._is_checked:
            self._check_complete()
        self._close_session()
        self._known.post(f"/flush_cache?timeout={_FLUSH_SECONDS}")
        self._set_version(self._next)
        self._is_checked = True

    def _check_complete(self) -> None:
        reports = self._send("complete")
        found = sorted({f"{name} of {_name_model(report)}" for report in reports for name in report["nan"]})
        if found:
            raise EngineFailure(
                f"NaN in {short_list(found)}: the publish does not reach them, or they are NaN in training"
            )

    # Messages.

    def _open_session(self) -> None:
        assert self._control is not None
        if self._session_may_be_open:
            with contextlib.suppress(EngineFailure):
                self._close_session()
        self._session_may_be_open = True
        self._control().post("/begin_weight_update", {"selector": "all"})

    def _close_session(self) -> None:
        assert self._control is not None
        self._control().post("/end_weight_update", {})
        self._session_may_be_open = False

    def _set_version(self, version: int) -> None:
        assert self._control is not None
        self._control().post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def _send(self, action: str, bucket: Bucket | None = None) -> list[dict[str, Any]]:
        """One message to every scheduler; returns the reports of all its models, the policy's of rank 0 first.

        Raises:
            EngineFailure: the server refused, or a report is missing or bad.
        """
        assert self._control is not None and self._folder is not None
        number = secrets.token_hex(8)
        entries = [] if bucket is None else bucket.entries
        message = {
            "action": action,
            "number": number,
            "report": str(self._folder),
            "entries": [(e.name, str(e.dtype).removeprefix("torch."), e.shape, e.offset_bytes) for e in entries],
        }
        messages = [message | {"rank": rank, "memory": memory} for rank, memory in enumerate(self._memories)]
        body = {
            "serialized_named_tensors": [_serialize(json.dumps(one)) for one in messages],
            "load_format": RECEIVER,
            "selector": "all",
            "flush_cache": False,  # once, at the end
        }
        self._control().post("/update_weights_from_tensor", body)
        return self._read_reports(action, number)

    def _read_reports(self, action: str, number: str) -> list[dict[str, Any]]:
        assert self._folder is not None
        paths = list(self._folder.glob(f"{number}-*.json"))
        reports = sorted((json.loads(path.read_text()) for path in paths), key=lambda one: (one["rank"], one["model"]))
        for path in paths:
            path.unlink()
        errors = [f"{_name_model(one)}: {one['error']}" for one in reports if one["error"] is not None]
        if errors:
            raise EngineFailure(f"the engine could not {action} weights: {'; '.join(errors)}")
        models = {report["model"] for report in reports}
        expected = self._tensor_parallel * max(1, len(models))
        if len(reports) != expected or (len(models) > 1) != self._has_drafter:
            found = ", ".join(_name_model(report) for report in reports) or "nobody"
            raise EngineFailure(
                f"{action}: of {self._tensor_parallel} ranks of the engine there are reports of {found}"
            )
        return reports

    # Over the ranks of the engine.

    def _lead(self, action: Callable[[], Any]) -> Any:
        """Do this on the leader once all ranks are here; every rank raises if it fails. Collective over the group."""
        self._gather(None)
        error, result = None, None
        if self._control is not None:
            try:
                result = action()
            except Exception as problem:  # noqa: BLE001 the other ranks wait to hear of it
                error = problem
        failed = [text for text in self._gather(None if error is None else str(error)) if text is not None]
        if error is not None:
            raise error
        if failed:
            raise EngineFailure(failed[0])
        return result

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self._group is None else gather_objects(value, self._group)

    def _wait_for_device(self) -> None:
        """What was copied into the bucket is there before another process looks."""
        if self.transport in ("device memory", "pinned shared memory"):
            torch.cuda.synchronize()


def _serialize(text: str) -> str:
    """A named tensor as SGLang's server takes it: the text is the name, and the tensor is empty."""
    return base64.b64encode(ForkingPickler.dumps([(text, torch.empty(0))])).decode()


def _name_model(report: Mapping[str, Any]) -> str:
    model = "the policy" if report["model"] == 0 else f"drafter {report['model']}"
    return f"{model} on rank {report['rank']}"
