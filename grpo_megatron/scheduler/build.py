"""Builds a run part by part, in named and timed stages, one `build_*` per folder."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version as library_version
from pathlib import Path

from grpo_megatron.checkpoint.checkpointer import Checkpointer, RunState
from grpo_megatron.checkpoint.coordination import WorldCoordination
from grpo_megatron.checkpoint.manifest import Description
from grpo_megatron.checkpoint.model_state import ModelState
from grpo_megatron.checkpoint.random_state import RandomState
from grpo_megatron.checkpoint.store import CheckpointStore
from grpo_megatron.config.resolved import fingerprint, to_yaml
from grpo_megatron.config.schema import Config
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.forward.logprobs import LogprobScorer
from grpo_megatron.memory.manager import MemoryManager
from grpo_megatron.monitor.alerts import AlertRules
from grpo_megatron.monitor.sinks import ConsoleSink, JsonlSink, RolloutSink, Sink, SinkSet, TensorboardSink
from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.base import RolloutEngine, SamplingSettings
from grpo_megatron.scheduler.batches import Batches, ForwardPasses
from grpo_megatron.scheduler.context import Session
from grpo_megatron.scheduler.ending import finish_run
from grpo_megatron.scheduler.evaluation import Evaluation
from grpo_megatron.scheduler.generation import Generation
from grpo_megatron.scheduler.ledger import Ledger
from grpo_megatron.scheduler.parts import (
    Data,
    Models,
    build_data,
    build_engine,
    build_memory,
    build_models,
    build_reference,
    build_reward_pool,
    packing_settings,
)
from grpo_megatron.scheduler.publishing import PolicyWeights
from grpo_megatron.scheduler.recovery import Recovery, RunProgress
from grpo_megatron.scheduler.reporting import Reporter
from grpo_megatron.scheduler.rollouts import SyncRollouts
from grpo_megatron.scheduler.run import Run
from grpo_megatron.scheduler.scores import Scores
from grpo_megatron.scheduler.updates import Updates
from grpo_megatron.utils.spans import PhaseTimer


def build_run(session: Session) -> Run:
    """Build everything, restore the newest checkpoint if there is one. Collective over the world."""
    resources = ExitStack()
    try:
        return _build(session, resources)
    except BaseException:
        resources.close()
        raise


def _build(session: Session, resources: ExitStack) -> Run:
    config, groups, startup = session.config, session.groups, session.startup
    with startup.stage("data"):
        data = build_data(config)
    with startup.stage("reward workers"):
        pool = build_reward_pool(config, data, groups)
        if pool is not None:
            resources.callback(pool.close)
    with startup.stage("policy"):
        models = build_models(session, data)
    with startup.stage("rollout engine"):
        engine = build_engine(session, data, models)
        resources.callback(engine.close)
        health = engine.health()
        if not health.ok:
            raise RuntimeError(f"the rollout engine is not healthy: {health.detail}")
    with startup.stage("memory groups"):
        memory = build_memory(session, models, engine)
        resources.callback(memory.close)
    return _assemble(session, resources, data, pool, models, engine, memory)


def _assemble(
    session: Session,
    resources: ExitStack,
    data: Data,
    pool: RewardPool | None,
    models: Models,
    engine: RolloutEngine,
    memory: MemoryManager,
) -> Run:
    config, groups = session.config, session.groups
    section, training = config.modules.rollout, config.modules.training
    progress = RunProgress()
    timer = PhaseTimer(synchronize=session.platform.synchronize)
    rules = AlertRules(config.monitor, max_error_share=config.modules.rewards.max_error_share)
    sampler = PromptSampler(data.training, seed=config.run.seed, shuffle=config.data.shuffle)
    sampling = SamplingSettings(
        section.max_new_tokens, section.temperature, section.top_p, section.top_k, data.stop_token_ids
    )
    generation = Generation(
        engine,
        groups,
        session.store,
        assignment="static" if config.run.deterministic else "shared",
        deadline_seconds=config.run.phase_deadline_seconds,
        open_progress=session.open_progress,
    )
    evaluation = build_evaluation(session, data, pool, generation, sampling)
    shared = {"progress": progress, "sampler": sampler, "alerts": rules}
    if evaluation is not None:
        shared["evaluation"] = evaluation
    with session.startup.stage("checkpoints"):
        recovery = build_recovery(
            session, resources, models, memory, progress, RunState(shared, {"random": RandomState()})
        )
        recovery.resume(config.run)
    engine.set_version(progress.next_step)
    sinks = SinkSet(build_sinks(session, progress.next_step), warn=session.logger.warning)
    resources.callback(sinks.close)
    ledger = Ledger(session.folder / "ledger", resume_step=progress.next_step) if session.is_first_rank else None
    reporter = Reporter(timer, sinks, rules, ledger, num_steps=config.run.steps)
    if evaluation is not None:
        evaluation.on_result = reporter.evaluation
    policy_scorer = LogprobScorer(models.chunks, temperature=section.temperature, platform=session.platform)
    return Run(
        folder=session.folder,
        num_steps=config.run.steps,
        progress=progress,
        timer=timer,
        memory=memory,
        rollouts=SyncRollouts(sampler, generation, pool, section=section, sampling=sampling, seed=config.run.seed),
        scores=Scores(pool, groups, deadline_seconds=config.run.phase_deadline_seconds),
        batches=Batches(training, packing_settings(config, models, groups), groups),
        forward=ForwardPasses(training, policy=policy_scorer, reference=build_reference(session, models)),
        updates=Updates(
            models.trainer,
            training,
            groups,
            num_steps=config.run.steps,
            open_progress=lambda what, total: session.open_progress(what, total, "micro-batches"),
        ),
        weights=PolicyWeights(engine, publisher=None),
        reporter=reporter,
        evaluation=evaluation,
        recovery=recovery,
        finish=lambda: finish_run(
            session.folder,
            models.chunks,
            models.description,
            source_folder=Path(config.model.policy or ""),
            version=progress.next_step,
            export=config.checkpoint.export_at_end,
            train_seconds=progress.train_seconds,
            groups=groups,
            memory=memory,
            sinks=sinks,
            say=session.logger.info,
        ),
        resources=resources,
    )


def build_evaluation(
    session: Session, data: Data, pool: RewardPool | None, generation: Generation, sampling: SamplingSettings
) -> Evaluation | None:
    if data.evaluation is None:
        return None
    config = session.config
    return Evaluation(
        data.evaluation.prompts,
        generation,
        pool,
        session.groups,
        rollout=config.modules.rollout,
        monitor=config.monitor,
        sampling=sampling,
        decode=data.tokenizer.decode,
        deadline_seconds=config.run.phase_deadline_seconds,
    )


def build_recovery(
    session: Session,
    resources: ExitStack,
    models: Models,
    memory: MemoryManager,
    progress: RunProgress,
    state: RunState,
) -> Recovery:
    """Checkpoints below the run's folder; rank 0 holds the folder's lock."""
    config, groups = session.config, session.groups
    store, error = None, None
    if session.is_first_rank:
        try:
            store = CheckpointStore(session.folder / "checkpoints", keep=config.checkpoint.keep)
        except RuntimeError as failure:
            error = str(failure)
    coordination = WorldCoordination(groups)
    coordination.agree(error, "opening the checkpoints")
    checkpointer = Checkpointer(store, coordination)
    resources.callback(checkpointer.close)
    model = ModelState(models.trainer.wrapped, models.trainer.optimizer, groups.data)
    return Recovery(
        checkpointer,
        model,
        state,
        progress,
        describe=lambda version: describe_checkpoint(config, groups, version),
        section=config.checkpoint,
        num_steps=config.run.steps,
        memory=memory,
        groups=groups,
        stop_request=session.stop_request,
        say=session.logger.info,
        warn=session.logger.warning,
    )


def describe_checkpoint(config: Config, groups: Groups, version: int) -> Description:
    """What the manifest says about the run."""
    grid = groups.grid
    return Description(
        policy_version=version,
        fingerprint=fingerprint(config),
        configuration=to_yaml(config),
        libraries={name: library_version(name) for name in ("torch", "megatron-core", "transformers", "numpy")},
        layout={"world_size": grid.world_size, "tensor": grid.tensor, "pipeline": grid.pipeline, "data": grid.data},
    )


def build_sinks(session: Session, resume_step: int) -> Sequence[Sink]:
    """Console, JSONL, TensorBoard and rollouts, on rank 0 only."""
    if not session.is_first_rank:
        return ()
    monitor = session.config.monitor
    warn = session.logger.warning
    makers: list[Callable[[], Sink]] = [
        lambda: ConsoleSink(say=session.logger.info, warn=warn),
        lambda: JsonlSink(session.folder, resume_step=resume_step),
        lambda: RolloutSink(session.folder / "rollouts", every_steps=monitor.save_rollouts_every_steps),
    ]
    if monitor.tensorboard:
        makers.append(lambda: TensorboardSink(session.folder / "tensorboard", resume_step=resume_step))
    return [make() for make in makers]


def check_ranks_agree(session: Session) -> None:
    """Every rank must have been started with the same configuration. Collective over the world."""
    own = fingerprint(session.config)
    different = [rank for rank, theirs in enumerate(gather_objects(own, session.groups.world)) if theirs != own]
    if different:
        raise ValueError(f"ranks {different} were started with another configuration than rank {session.groups.rank}")
