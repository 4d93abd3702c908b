"""Builds a run part by part, in named and timed stages, and restores the newest checkpoint."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from grpo_megatron.checkpoint.base import Stateful
from grpo_megatron.checkpoint.checkpointer import RunState, open_checkpointer
from grpo_megatron.checkpoint.coordination import WorldCoordination
from grpo_megatron.checkpoint.manifest import Description, installed_libraries
from grpo_megatron.checkpoint.model_state import ModelState
from grpo_megatron.checkpoint.random_state import RandomState
from grpo_megatron.config.resolved import fingerprint, to_yaml
from grpo_megatron.config.schema import Config
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.forward.logprobs import LogprobScorer
from grpo_megatron.monitor.alerts import AlertRules
from grpo_megatron.monitor.sinks import ConsoleSink, JsonlSink, RolloutSink, Sink, SinkSet, TensorboardSink
from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.rollout.base import SamplingSettings
from grpo_megatron.scheduler.batches import Batches, ForwardPasses
from grpo_megatron.scheduler.context import Session
from grpo_megatron.scheduler.ending import finish_run
from grpo_megatron.scheduler.evaluation import Evaluation
from grpo_megatron.scheduler.generation import Generation
from grpo_megatron.scheduler.ledger import Ledger
from grpo_megatron.scheduler.parts import Parts, build_parts
from grpo_megatron.scheduler.recovery import Recovery, RunProgress
from grpo_megatron.scheduler.reporting import Reporter
from grpo_megatron.scheduler.rollouts import SyncRollouts
from grpo_megatron.scheduler.run import Run
from grpo_megatron.scheduler.scores import Scores
from grpo_megatron.scheduler.updates import Updates
from grpo_megatron.utils.spans import PhaseTimer


def build_run(session: Session) -> Run:
    """Build everything, restore the newest checkpoint if there is one. Collective over the world.

    Raises:
        StartError: on every rank; names the stage and the cause.
        CheckpointError: on every rank; the checkpoint that `run.resume` asks for cannot be had.
    """
    resources = ExitStack()
    try:
        return _assemble(session, build_parts(session, resources), resources)
    except BaseException:
        resources.close()
        raise


def check_ranks_agree(session: Session) -> None:
    """Every rank must have been started with the same configuration. Collective over the world."""
    own = fingerprint(session.config)
    different = [rank for rank, theirs in enumerate(gather_objects(own, session.groups.world)) if theirs != own]
    if different:
        raise ValueError(f"ranks {different} were started with another configuration than rank {session.groups.rank}")


def _assemble(session: Session, parts: Parts, resources: ExitStack) -> Run:
    """Connect the parts; in between, the run's state is restored."""
    config, groups, models = session.config, session.groups, parts.models
    training = config.modules.training
    progress = RunProgress()
    timer = PhaseTimer(synchronize=session.platform.synchronize)
    rules = AlertRules(config.monitor, max_error_share=config.modules.rewards.max_error_share)
    sampler = PromptSampler(parts.data.training, seed=config.run.seed, shuffle=config.data.shuffle)
    generation = _build_generation(session, parts)
    evaluation = _build_evaluation(session, parts, generation)
    state: dict[str, Stateful] = {"progress": progress, "sampler": sampler, "alerts": rules}
    if evaluation is not None:
        state["evaluation"] = evaluation
    recovery = _restore(session, parts, resources, progress, state)
    with session.startup.stage("publish"):
        parts.memory.enter("publish")
        parts.weights.publish(progress.next_step)
    with session.startup.stage("records"):
        sinks = _open_sinks(session, progress.next_step)
        resources.callback(sinks.close)
        reporter = _build_reporter(session, timer, sinks, rules, resume_step=progress.next_step)
    if evaluation is not None:
        evaluation.on_result = reporter.evaluation
    return Run(
        num_steps=config.run.steps,
        progress=progress,
        timer=timer,
        memory=parts.memory,
        rollouts=SyncRollouts(
            sampler,
            generation,
            parts.pool,
            section=config.modules.rollout,
            sampling=_sampling(config, parts),
            seed=config.run.seed,
        ),
        scores=Scores(parts.pool, groups, deadline_seconds=config.run.phase_deadline_seconds),
        batches=Batches(training, parts.packing, groups),
        forward=_build_forward_passes(session, parts),
        updates=Updates(
            models.trainer,
            training,
            groups,
            num_steps=config.run.steps,
            open_progress=partial(session.open_progress, unit="micro-batches"),
        ),
        weights=parts.weights,
        reporter=reporter,
        evaluation=evaluation,
        recovery=recovery,
        finish=_build_finish(session, parts, progress, sinks),
        resources=resources,
    )


def _sampling(config: Config, parts: Parts) -> SamplingSettings:
    section = config.modules.rollout
    return SamplingSettings(
        section.max_new_tokens, section.temperature, section.top_p, section.top_k, parts.data.stop_token_ids
    )


def _build_generation(session: Session, parts: Parts) -> Generation:
    config = session.config

    def restore_weights() -> None:
        parts.memory.enter("publish")
        parts.weights.restore()
        parts.memory.enter("rollout")

    return Generation(
        parts.engine,
        session.store,
        assignment="static" if config.run.deterministic else "shared",
        deadline_seconds=config.run.phase_deadline_seconds,
        open_progress=session.open_progress,
        restore_weights=restore_weights,
    )


def _build_evaluation(session: Session, parts: Parts, generation: Generation) -> Evaluation | None:
    """None without held-out prompts."""
    config = session.config
    if parts.data.evaluation is None:
        return None
    return Evaluation(
        parts.data.evaluation.prompts,
        generation,
        parts.pool,
        session.groups,
        rollout=config.modules.rollout,
        monitor=config.monitor,
        sampling=_sampling(config, parts),
        decode=parts.data.tokenizer.decode,
        deadline_seconds=config.run.phase_deadline_seconds,
    )


def _build_forward_passes(session: Session, parts: Parts) -> ForwardPasses:
    config = session.config
    make_scorer = partial(LogprobScorer, temperature=config.modules.rollout.temperature, platform=session.platform)
    reference = parts.models.reference
    return ForwardPasses(
        config.modules.training,
        policy=make_scorer(parts.models.chunks),
        reference=None if reference is None else make_scorer(reference),
    )


def _restore(
    session: Session, parts: Parts, resources: ExitStack, progress: RunProgress, state: Mapping[str, Stateful]
) -> Recovery:
    """Open the run's checkpoints and load what `run.resume` asks for. Collective over the world."""
    config, groups, models = session.config, session.groups, parts.models
    with session.startup.stage("checkpoints"):
        folder = session.folder / "checkpoints"
        checkpointer = open_checkpointer(folder, keep=config.checkpoint.keep, coordination=WorldCoordination(groups))
        resources.callback(checkpointer.close)
        recovery = Recovery(
            checkpointer,
            ModelState(models.trainer.wrapped, models.trainer.optimizer),
            RunState(shared=state, per_rank={"random": RandomState()}),
            progress,
            folder=folder,
            describe=lambda version: _describe_checkpoint(config, groups, version),
            section=config.checkpoint,
            num_steps=config.run.steps,
            memory=parts.memory,
            groups=groups,
            stop_request=session.stop_request,
            open_progress=partial(session.open_progress, unit="MB"),
            say=session.logger.info,
            warn=session.logger.warning,
        )
        recovery.resume(config.run)
    return recovery


def _describe_checkpoint(config: Config, groups: Groups, version: int) -> Description:
    """What the manifest says about the run."""
    grid = groups.grid
    return Description(
        policy_version=version,
        fingerprint=fingerprint(config),
        configuration=to_yaml(config),
        libraries=installed_libraries("torch", "megatron-core", "transformers", "numpy"),
        layout={"world_size": grid.world_size, "tensor": grid.tensor, "pipeline": grid.pipeline, "data": grid.data},
    )


def _open_sinks(session: Session, resume_step: int) -> SinkSet:
    """Console, JSONL, rollouts and TensorBoard, on rank 0 only."""
    monitor, logger, folder = session.config.monitor, session.logger, session.folder
    makers: dict[str, Callable[[], Sink]] = {}
    if session.is_first_rank:
        makers["console"] = lambda: ConsoleSink(say=logger.info, warn=logger.warning)
        makers["metrics.jsonl"] = lambda: JsonlSink(folder, resume_step=resume_step)
        makers["rollouts"] = lambda: RolloutSink(folder / "rollouts", every_steps=monitor.save_rollouts_every_steps)
        if monitor.tensorboard:
            makers["tensorboard"] = lambda: TensorboardSink(folder / "tensorboard", resume_step=resume_step)
    return SinkSet.opened(makers, warn=logger.warning)


def _build_reporter(
    session: Session, timer: PhaseTimer, sinks: SinkSet, rules: AlertRules, *, resume_step: int
) -> Reporter:
    ledger = Ledger(session.folder / "ledger", resume_step=resume_step) if session.is_first_rank else None
    warn = session.logger.warning if session.is_first_rank else (lambda text: None)
    return Reporter(timer, sinks, rules, ledger, num_steps=session.config.run.steps, warn=warn)


def _build_finish(session: Session, parts: Parts, progress: RunProgress, sinks: SinkSet) -> Callable[[], None]:
    config = session.config
    first_step = progress.next_step

    def finish() -> None:
        finish_run(
            session.folder,
            parts.models.chunks,
            parts.models.description,
            source_folder=Path(config.model.policy or ""),
            version=progress.next_step,
            has_trained=progress.next_step > first_step,
            export=config.checkpoint.export_at_end,
            train_seconds=progress.train_seconds,
            groups=session.groups,
            memory=parts.memory,
            sinks=sinks,
            say=session.logger.info,
        )

    return finish
