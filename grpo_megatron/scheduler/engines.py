"""Which rollout engine runs where, and what carries new weights to it."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from grpo_megatron.families.describe import describe
from grpo_megatron.parallel.groups import split_world
from grpo_megatron.rollout.base import EnginePlace, RolloutEngine
from grpo_megatron.rollout.megatron.build import build_megatron_engine, engine_place
from grpo_megatron.rollout.sglang.build import EngineGroup, build_sglang_engine
from grpo_megatron.rollout.sglang.engine import SglangEngine
from grpo_megatron.rollout.sglang.sink import SglangSink
from grpo_megatron.scheduler.context import Session
from grpo_megatron.scheduler.publishing import PolicyWeights
from grpo_megatron.weights.gather import WeightWalk
from grpo_megatron.weights.publish import Publisher


def find_place(session: Session) -> EnginePlace:
    """This rank's place among the engines, known before any engine is built."""
    if session.config.modules.rollout.engine == "megatron":
        return engine_place(session.groups)
    return engine_group(session).place


def engine_group(session: Session) -> EngineGroup:
    """The neighbours that share an engine of another process; its size need not be the trainer's."""
    launch, config = session.launch, session.config
    return EngineGroup(launch.rank, launch.local_rank, launch.local_world_size, launch.world_size, config.engine_tensor)


def start_foreign_engine(session: Session, decode: Any, max_sequence_tokens: int) -> SglangEngine | None:
    """Before the trainer's models take memory; None if the engine is the embedded one.

    Raises:
        EngineFailure: it did not start; with the end of its log.
    """
    config = session.config
    match config.modules.rollout.engine:
        case "megatron":
            return None
        case "sglang":
            group = engine_group(session)
            return build_sglang_engine(
                config,
                group,
                session.platform,
                describe(Path(config.model.policy or "")),
                decode=decode,
                max_sequence_tokens=max_sequence_tokens,
                logs=session.folder / "logs",
                say=partial(session.logger.info, "engine %d: %s", group.place.index),
                warn=partial(session.logger.warning, "engine %d: %s", group.place.index),
            )
        case other:
            raise ValueError(f"modules.rollout.engine: {other} is not there yet; set it to sglang or megatron")


def build_embedded_engine(session: Session, models: Any, decode: Any, max_sequence_tokens: int) -> RolloutEngine:
    """The engine on the trainer's own modules. Collective over the model-parallel group."""
    return build_megatron_engine(
        models.chunks,
        models.description,
        session.config.modules.rollout,
        session.groups,
        session.platform,
        decode,
        max_sequence_tokens,
    )


def build_policy_weights(session: Session, models: Any, engine: RolloutEngine, resources: ExitStack) -> PolicyWeights:
    """What publishes to this engine. Collective over the world."""
    if not isinstance(engine, SglangEngine):
        return PolicyWeights(engine, None, session.groups)
    sink = _build_sink(session, engine)
    if sink is not None:
        resources.callback(sink.close)
    publisher = Publisher(
        WeightWalk(models.chunks, models.description, session.groups),
        sink,
        session.groups,
        bucket_bytes=session.config.modules.rollout.publish_bucket_bytes,
    )
    if sink is not None and sink.reason:
        session.logger.warning("publish goes over %s: %s", sink.transport, sink.reason)

    def revive() -> None:
        if engine.life is not None:
            engine.life.revive()
        if sink is not None and engine.needs_weights:
            sink.forget()

    return PolicyWeights(engine, publisher, session.groups, revive=revive, warn=session.logger.warning)


def _build_sink(session: Session, engine: SglangEngine) -> SglangSink | None:
    """On a CPU one per engine, on its leader; on GPUs one on every rank, for each has a bucket. Collective there."""
    tensor = session.config.engine_tensor
    life = engine.life
    group = None
    if session.platform.kind == "cuda" and tensor > 1:
        group = split_world(tensor)
    elif life is None:
        return None
    seconds = session.config.modules.rollout.engine_stall_seconds
    if life is None:
        return SglangSink(None, tensor_parallel=tensor, group=group, deadline_seconds=seconds)
    return SglangSink(
        lambda: life.control,
        tensor_parallel=tensor,
        group=group,
        asleep=lambda: life.asleep,
        serves=life.serves,
        deadline_seconds=seconds,
    )
