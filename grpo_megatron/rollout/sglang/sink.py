"""Hands published buckets to an SGLang server, through memory that both see.

The other side is `receiver.py`, inside SGLang's schedulers. On a CPU the memory is one shared buffer of the leader; on
a GPU each rank of the engine's group has a bucket on its own device, and exports it once to the scheduler there.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.rollout.base import NO_VERSION
from grpo_megatron.rollout.sglang.control import EngineFailure
from grpo_megatron.rollout.sglang.weight_session import EngineControl, Memory, Outcome, WeightSession, name_model
from grpo_megatron.weights.checksum import checksum
from grpo_megatron.weights.device_memory import allocate_shareable, export_handle, pin
from grpo_megatron.weights.naming import short_list
from grpo_megatron.weights.shared_buffer import SharedBuffer
from grpo_megatron.weights.sink import Bucket, BucketEntry

_FLUSH_SECONDS = 10
"""How long the last answer may take to leave the scheduler before the cache is emptied."""


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
        serves: told which version the engine serves from now on, NO_VERSION included.
        deadline_seconds: for every single answer of a scheduler.
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
        serves: Callable[[int], None] = lambda version: None,
        deadline_seconds: float = 120.0,
    ) -> None:
        assert group is None or dist.get_world_size(group) == tensor_parallel
        self._control, self._group = control, group
        self._tensor_parallel, self._has_drafter = tensor_parallel, has_drafter
        self._unused, self._asleep, self._serves = frozenset(unused), asleep, serves
        self._deadline_seconds = deadline_seconds
        self._memories: Sequence[Memory] = ()
        self._shared: SharedBuffer | None = None
        self._buffer: torch.Tensor | None = None
        self._known: EngineControl | None = None
        self._is_checked = False
        self._session: WeightSession | None = None
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
        try:
            pin(buffer)
        except RuntimeError as error:
            self.transport, self.reason = "shared memory", f"{problem}; {error}"
        return buffer

    def close(self) -> None:
        """Let go of the memory."""
        if self._session is not None:
            self.abort()
        if self._shared is not None:
            self._shared.close()

    def _allocate_shared(self, num_bytes: int) -> torch.Tensor:
        self._shared = SharedBuffer.create(num_bytes)
        self._memories = [{"path": self._shared.path, "num_bytes": num_bytes}] * self._tensor_parallel
        return self._shared.tensor

    def _try_device_memory(self, num_bytes: int, device: torch.device) -> str | None:
        """Why device memory cannot be handed over, or None; the same on every rank. Collective over the group."""
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
        assert self._buffer is not None
        entry = BucketEntry("probe", torch.uint8, (self._buffer.nbytes,), 0)
        outcomes = self._ask_once("probe", Bucket(0, (entry,), self._buffer))
        wrong = {one["rank"] for one in outcomes if one["checksums"]["probe"] != expected[one["rank"]]}
        if wrong:
            raise EngineFailure(f"the engine reads other bytes than were written, on its ranks {sorted(wrong)}")

    # One publish.

    def begin(self, version: int) -> None:
        """See `WeightSink`. Collective over the group."""
        self._next, self._is_whole = version, False
        self._lead(self._begin)

    def put(self, bucket: Bucket) -> None:
        """See `WeightSink`. Collective over the group."""
        self._lead(lambda: self._open_session().send("load", bucket))

    def settle(self) -> None:
        """See `WeightSink`."""
        if self._control is not None:
            self._open_session().receive()

    def compare(self, bucket: Bucket) -> dict[str, int] | None:
        """See `WeightSink`. Outside of a publish as well. Collective over the group."""
        return self._lead(lambda: self._compare(bucket))

    def commit(self) -> None:
        """See `WeightSink`. Collective over the group."""
        self._lead(self._commit)
        self._is_whole = True

    def abort(self) -> None:
        self._is_whole = False
        if self._control is not None:
            session, self._session = self._session, None
            if session is not None:
                session.abandon()
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
        if "weights" in self._asleep():
            raise EngineFailure("the engine's weights are asleep: wake them before the publish")
        self._session = self._new_session()
        if (self._session.num_models > 1) != self._has_drafter:
            there = f"{self._session.num_models - 1} drafters" if self._session.num_models > 1 else "no drafter"
            raise EngineFailure(f"the engine has {there}, which is not what it was built with")
        if not self._is_checked:
            self._session.ask("poison")

    def _compare(self, bucket: Bucket) -> dict[str, int]:
        outcomes = self._session.ask("compare", bucket) if self._session else self._ask_once("compare", bucket)
        changed = sorted({name for one in outcomes for name in one["changed"]})
        if changed:
            raise EngineFailure(f"the engine used other values than were published for {short_list(changed)}")
        taken = {name for one in outcomes for name in one["taken"]} | self._unused
        if ignored := [entry.name for entry in bucket.entries if entry.name not in taken]:
            raise EngineFailure(f"the engine has no place for {short_list(ignored)}")
        if any(one["checksums"] != outcomes[0]["checksums"] for one in outcomes):
            raise EngineFailure("the ranks of the engine received different bytes")
        return dict(outcomes[0]["checksums"])

    def _commit(self) -> None:
        session = self._open_session()
        if not self._is_checked:
            _check_complete(session.ask("complete"))
        session.close()
        self._session = None
        assert self._known is not None
        try:
            self._known.post("/flush_cache")  # works beside answers that are paused; waiting for idleness does not
        except EngineFailure:
            self._known.post(f"/flush_cache?timeout={_FLUSH_SECONDS}")
        self._set_version(self._next)
        self._is_checked = True

    def _ask_once(self, action: str, bucket: Bucket) -> list[Outcome]:
        """In a session of its own."""
        session = self._new_session()
        try:
            outcomes = session.ask(action, bucket)
        except BaseException:
            session.abandon()
            raise
        session.close()
        return outcomes

    def _new_session(self) -> WeightSession:
        assert self._control is not None and self._session is None
        control = self._control()
        if is_first := control is not self._known:
            self._is_checked = False
        session = WeightSession(control, self._memories, is_first=is_first, deadline_seconds=self._deadline_seconds)
        self._known = control
        return session

    def _open_session(self) -> WeightSession:
        assert self._session is not None, "nothing was begun"
        return self._session

    def _set_version(self, version: int) -> None:
        assert self._control is not None
        self._serves(NO_VERSION)  # also where the call fails
        self._control().post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self._serves(version)

    # Over the ranks of the engine.

    def _lead(self, action: Callable[[], Any]) -> Any:
        """Do this on the leader once all ranks are here; every rank raises if it fails. Collective over the group."""
        error: Exception | None = None
        result = None
        try:
            self._wait_for_device()
        except Exception as problem:  # noqa: BLE001 the other ranks wait to hear of it
            error = problem
        self._raise_together(error)
        if self._control is not None:
            try:
                result = action()
            except Exception as problem:  # noqa: BLE001 as above
                error = problem
        self._raise_together(error)
        return result

    def _raise_together(self, error: Exception | None) -> None:
        failed = [text for text in self._gather(None if error is None else str(error)) if text is not None]
        if error is not None:
            raise error
        if failed:
            raise EngineFailure(failed[0])

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self._group is None else gather_objects(value, self._group)

    def _wait_for_device(self) -> None:
        """What was copied into the bucket is there before another process looks."""
        if self.transport in ("device memory", "pinned shared memory"):
            torch.cuda.synchronize()


def _check_complete(outcomes: Sequence[Outcome]) -> None:
    found = sorted({f"{name} of {name_model(one['rank'], one['model'])}" for one in outcomes for name in one["nan"]})
    if found:
        raise EngineFailure(f"NaN in {short_list(found)}: the publish does not reach them, or they are NaN in training")
