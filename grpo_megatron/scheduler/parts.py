"""The parts of a run that stand on their own: data, reward workers, models, engine, memory groups."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.models.gpt import GPTModel

from grpo_megatron.config.schema import Config
from grpo_megatron.data.packing import PackingSettings
from grpo_megatron.data.prompts import PromptSet, check_held_out, load_prompts
from grpo_megatron.data.tokenizer import HfTokenizer
from grpo_megatron.families.base import ModelDescription
from grpo_megatron.families.describe import describe
from grpo_megatron.memory.manager import MemoryManager
from grpo_megatron.memory.owners import frozen_group, policy_groups
from grpo_megatron.memory.planner import make_planner
from grpo_megatron.models.build import BuildSettings, build_policy
from grpo_megatron.models.forward import shares_prompt_prefix
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.platform.kernels import choose_kernels
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.base import EnginePlace, RolloutEngine
from grpo_megatron.scheduler.context import Session
from grpo_megatron.scheduler.engine_memory import engine_groups
from grpo_megatron.scheduler.engines import (
    build_embedded_engine,
    build_policy_weights,
    find_place,
    start_foreign_engine,
)
from grpo_megatron.scheduler.phases import PHASES, PHASES_WITH_ENGINE_WEIGHTS
from grpo_megatron.scheduler.publishing import PolicyWeights
from grpo_megatron.trainer.policy import PolicyTrainer
from grpo_megatron.weights.load import load_hf


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


@dataclass(frozen=True)
class Parts:
    """All parts of a run on this rank."""

    data: Data
    pool: RewardPool | None
    """Reward workers, on the leader of each engine."""
    models: Models
    engine: RolloutEngine
    memory: MemoryManager
    packing: PackingSettings
    weights: PolicyWeights


def build_parts(session: Session, resources: ExitStack) -> Parts:
    """Build the parts in order; what must be closed is pushed on `resources`. Collective over the world."""
    config, startup = session.config, session.startup
    with startup.stage("data"):
        data = build_data(config)
    _say_what_is_left_out(session, data)
    max_sequence_tokens = _max_sequence_tokens(config, data)
    with startup.stage("reward workers"):
        pool = build_reward_pool(config, data, find_place(session))
        if pool is not None:
            resources.callback(pool.close)
    foreign = None
    if config.modules.rollout.engine != "megatron":
        with startup.stage("rollout engine"):
            foreign = start_foreign_engine(session, data.tokenizer.decode, max_sequence_tokens)
            resources.callback(foreign.close)
    with startup.stage("policy"):
        models = build_models(session, max_sequence_tokens)
        packing = packing_settings(config, models, session.groups)
    with startup.stage("rollout engine's health"):
        engine: RolloutEngine
        if foreign is not None:
            engine = foreign
        else:
            engine = build_embedded_engine(session, models, data.tokenizer.decode, max_sequence_tokens)
            resources.callback(engine.close)
        health = engine.health()
        if not health.ok:
            raise RuntimeError(f"the rollout engine is not healthy: {health.detail}")
    with startup.stage("memory groups"):
        memory = build_memory(session, models, engine)
        resources.callback(memory.close)
        weights = build_policy_weights(session, models, engine, resources)
    return Parts(data, pool, models, engine, memory, packing, weights)


def _say_what_is_left_out(session: Session, data: Data) -> None:
    for part, prompts in (("prompts", data.training), ("evaluation", data.evaluation)):
        if prompts is not None and prompts.num_too_long and session.is_first_rank:
            session.logger.warning(
                "data.%s: %d prompts are longer than data.max_prompt_tokens and are left out, %d stay",
                *(part, prompts.num_too_long, len(prompts)),
            )


def build_data(config: Config) -> Data:
    """Tokenizer and prompts, checked against each other."""
    assert config.model.policy is not None
    tokenizer = HfTokenizer(config.model.policy)
    default = config.modules.rewards.default
    training = load_prompts(config.data, tokenizer, default_reward=default, part="prompts")
    batch_size = config.modules.rollout.batch_size
    if batch_size > len(training):
        raise ValueError(
            f"modules.rollout.batch_size: {batch_size} different prompts a step, and data.prompts has {len(training)}; "
            f"set it to {len(training)} or less, or add prompts"
        )
    evaluation = None
    if config.data.evaluation:
        evaluation = load_prompts(config.data, tokenizer, default_reward=default, part="evaluation")
        check_held_out(training, evaluation)
    stops = tuple(dict.fromkeys((*tokenizer.stop_token_ids, *config.modules.rollout.stop_token_ids)))
    return Data(tokenizer, training, evaluation, stops)


def build_reward_pool(config: Config, data: Data, place: EnginePlace) -> RewardPool | None:
    """Workers on the leader of each engine, where rollouts end; None elsewhere."""
    if not place.is_leader:
        return None
    return RewardPool(
        config.modules.rewards, names=data.reward_names, start_deadline_seconds=config.run.start_deadline_seconds
    )


def build_models(session: Session, max_sequence_tokens: int) -> Models:
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
        max_sequence_tokens=max_sequence_tokens,
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
    groups += engine_groups(engine)
    planner = make_planner("always" if section.dynamic_offload else "never")
    needs = PHASES if engine.capabilities.shares_training_modules else PHASES_WITH_ENGINE_WEIGHTS
    return MemoryManager(groups, planner=planner, needs=needs)


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
