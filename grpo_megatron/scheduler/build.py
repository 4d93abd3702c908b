"""Builds a run part by part, in named and timed stages, one `build_*` per folder."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version as library_version
from logging import Logger
from pathlib import Path
from typing import Any

from megatron.core.models.gpt import GPTModel

from grpo_megatron.checkpoint.checkpointer import Checkpointer, RunState
from grpo_megatron.checkpoint.coordination import WorldCoordination
from grpo_megatron.checkpoint.manifest import Description
from grpo_megatron.checkpoint.model_state import ModelState
from grpo_megatron.checkpoint.random_state import RandomState
from grpo_megatron.checkpoint.store import CheckpointStore
from grpo_megatron.config.loader import LoadedConfig
from grpo_megatron.config.resolved import fingerprint, to_yaml
from grpo_megatron.config.schema import Config
from grpo_megatron.data.packing import PackingSettings
from grpo_megatron.data.prompts import PromptSet, check_held_out, load_prompts
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.data.tokenizer import HfTokenizer
from grpo_megatron.families.base import ModelDescription
from grpo_megatron.families.describe import describe
from grpo_megatron.forward.logprobs import LogprobScorer
from grpo_megatron.memory.manager import MemoryManager
from grpo_megatron.memory.owners import frozen_group, policy_groups
from grpo_megatron.memory.planner import make_planner
from grpo_megatron.models.build import BuildSettings, build_policy
from grpo_megatron.models.forward import shares_prompt_prefix
from grpo_megatron.monitor.alerts import AlertRules
from grpo_megatron.monitor.progress import Progress, open_progress
from grpo_megatron.monitor.sinks import ConsoleSink, JsonlSink, RolloutSink, Sink, SinkSet, TensorboardSink
from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.parallel.store import SharedStore
from grpo_megatron.platform.device import Platform
from grpo_megatron.platform.kernels import choose_kernels
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.base import RolloutEngine, SamplingSettings
from grpo_megatron.rollout.megatron.build import build_megatron_engine
from grpo_megatron.scheduler.batches import Batches, ForwardPasses
from grpo_megatron.scheduler.engine_memory import CacheGroup
from grpo_megatron.scheduler.ending import finish_run
from grpo_megatron.scheduler.evaluation import Evaluation
from grpo_megatron.scheduler.generation import Generation
from grpo_megatron.scheduler.ledger import Ledger
from grpo_megatron.scheduler.phases import PHASES
from grpo_megatron.scheduler.publishing import PolicyWeights
from grpo_megatron.scheduler.recovery import Recovery, RunProgress
from grpo_megatron.scheduler.reporting import Reporter
from grpo_megatron.scheduler.rollouts import SyncRollouts
from grpo_megatron.scheduler.run import Run
from grpo_megatron.scheduler.scores import Scores
from grpo_megatron.scheduler.signals import StopRequest
from grpo_megatron.scheduler.startup import Startup
from grpo_megatron.scheduler.updates import Updates
from grpo_megatron.trainer.policy import PolicyTrainer
from grpo_megatron.utils.spans import PhaseTimer
from grpo_megatron.weights.load import load_hf


@dataclass(frozen=True)
class Session:
    """What is there before the parts: the ranks, the machine, where to write."""

    loaded: LoadedConfig
    folder: Path
    platform: Platform
    groups: Groups
    store: SharedStore
    logger: Logger
    stop_request: StopRequest
    startup: Startup

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def is_first_rank(self) -> bool:
        return self.groups.rank == 0

    def open_progress(self, description: str, total: int, unit: str = "answers") -> Progress:
        """A bar or lines on rank 0, nothing elsewhere."""
        kind = "auto" if self.is_first_rank else "silent"
        return open_progress(description, total=total, unit=unit, kind=kind, say=self.logger.info)


@dataclass(frozen=True)
class Data:
    tokenizer: HfTokenizer
    training: PromptSet
    evaluation: PromptSet | None
    stop_token_ids: tuple[int, ...]

    @property
    def longest_prompt(self) -> int:
        sets = [self.training, *([self.evaluation] if self.evaluation else [])]
        return max(len(prompt.token_ids) for each in sets for prompt in each)

    @property
    def reward_names(self) -> tuple[str, ...]:
        extra = self.evaluation.reward_names if self.evaluation else ()
        return tuple(sorted({*self.training.reward_names, *extra}))


@dataclass(frozen=True)
class Models:
    description: ModelDescription
    chunks: list[GPTModel]
    trainer: PolicyTrainer
    reference: list[GPTModel] | None


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


def build_data(config: Config) -> Data:
    """Tokenizer and prompts, checked against each other."""
    assert config.model.policy is not None
    tokenizer = HfTokenizer(config.model.policy)
    default = config.modules.rewards.default
    training = load_prompts(config.data, tokenizer, default_reward=default, part="prompts")
    evaluation = None
    if config.data.evaluation:
        evaluation = load_prompts(config.data, tokenizer, default_reward=default, part="evaluation")
        check_held_out(training, evaluation)
    stops = tuple(dict.fromkeys((*tokenizer.stop_token_ids, *config.modules.rollout.stop_token_ids)))
    return Data(tokenizer, training, evaluation, stops)


def build_reward_pool(config: Config, data: Data, groups: Groups) -> RewardPool | None:
    """Workers on the leader of each replica; None elsewhere."""
    if not groups.is_model_leader:
        return None
    return RewardPool(
        config.modules.rewards, names=data.reward_names, start_deadline_seconds=config.run.start_deadline_seconds
    )


def build_models(session: Session, data: Data) -> Models:
    """The policy with its optimizer, and the reference if it is asked for. Collective over the world."""
    config, groups = session.config, session.groups
    policy_folder = Path(config.model.policy or "")
    description = describe(policy_folder)
    training = config.modules.training
    settings = BuildSettings(
        dtype=config.model.dtype,
        head_dtype=config.model.output_head_dtype,
        sequence_parallel=config.parallel.sequence_parallel,
        recompute_activations=training.recompute_activations,
        max_sequence_tokens=_max_sequence_tokens(config, data),
        megatron=config.megatron,
    )

    def load(folder: Path, what: str) -> list[GPTModel]:
        chunks = build_policy(description, settings, groups, session.platform, choose_kernels())
        num_parameters = sum(1 for chunk in chunks for _ in chunk.parameters())
        with session.open_progress(f"loading the {what}", num_parameters, "tensors") as progress:
            load_hf(chunks, description, folder, groups=groups, on_tensor=lambda _: progress.advance())
        return chunks

    chunks = load(policy_folder, "policy")
    reference = None
    if "reference_model" in config.modules.inference.models:
        reference = load(Path(config.model.reference or policy_folder), "reference")
        for chunk in reference:
            chunk.requires_grad_(False).eval()
    trainer = PolicyTrainer(chunks, training, temperature=config.modules.rollout.temperature, platform=session.platform)
    return Models(description, chunks, trainer, reference)


def build_reference(session: Session, models: Models) -> LogprobScorer | None:
    if models.reference is None:
        return None
    temperature = session.config.modules.rollout.temperature
    return LogprobScorer(models.reference, temperature=temperature, platform=session.platform)


def build_engine(session: Session, data: Data, models: Models) -> RolloutEngine:
    """The engine of the configuration. Collective over the model-parallel group."""
    config = session.config
    match config.modules.rollout.engine:
        case "megatron":
            return build_megatron_engine(
                models.chunks,
                models.description,
                config.modules.rollout,
                session.groups,
                session.platform,
                data.tokenizer.decode,
                _max_sequence_tokens(config, data),
            )
        case other:
            raise ValueError(f"modules.rollout.engine: {other} is not there yet; set it to megatron")


def build_memory(session: Session, models: Models, engine: Any) -> MemoryManager:
    """All groups of this rank and the policy that moves them."""
    section = session.config.memory_management
    platform = session.platform
    far_folder = Path(section.far_folder or session.folder / "offload") / f"rank-{session.groups.rank}"
    trainer = models.trainer
    groups: list[Any] = list(
        policy_groups(trainer.wrapped, trainer.optimizer, platform=platform, far_folder=far_folder)
    )
    if models.reference is not None:
        groups.append(frozen_group("reference_parameters", models.reference, platform=platform, far_folder=far_folder))
    groups.append(CacheGroup(engine, num_bytes=engine.cache_bytes))
    planner = make_planner("always" if section.dynamic_offload else "never")
    return MemoryManager(groups, planner=planner, needs=PHASES)


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


def packing_settings(config: Config, models: Models, groups: Groups) -> PackingSettings:
    """How rollouts are cut, as far as the model and the layout decide."""
    training = config.modules.training
    return PackingSettings(
        num_replicas=groups.num_replicas,
        num_mini_batches=training.num_mini_batches,
        micro_batch_tokens=training.micro_batch_tokens,
        share_prefix=training.share_prompt_prefix == "auto" and shares_prompt_prefix(models.chunks[0]),
        pad_to_multiple=groups.grid.tensor if config.parallel.sequence_parallel else 1,
    )


def _max_sequence_tokens(config: Config, data: Data) -> int:
    longest_answer = max(config.modules.rollout.max_new_tokens, config.monitor.evaluation_max_new_tokens or 0)
    return data.longest_prompt + longest_answer


def check_ranks_agree(session: Session) -> None:
    """Every rank must have been started with the same configuration. Collective over the world."""
    own = fingerprint(session.config)
    different = [rank for rank, theirs in enumerate(gather_objects(own, session.groups.world)) if theirs != own]
    if different:
        raise ValueError(f"ranks {different} were started with another configuration than rank {session.groups.rank}")
