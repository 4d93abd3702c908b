"""Every key of the configuration file, with its type, default and meaning. Imports no torch.

One section is one dataclass; the docstring under a field is the manual. `loader.py` reads files into
these, `availability.py` says what is configured but not there yet.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

EngineName = Literal["megatron", "sglang", "vllm"]
PhaseName = Literal["rollout", "score", "update", "publish"]
REWARD_NAMES = ("math", "exact", "number", "reasoning_gym")
"""What `modules.rewards.default` and a prompt's `reward` may name, besides `module:function`."""
PositiveInt = Annotated[int, Ge(1)]
CountInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Seconds = PositiveFloat


@dataclass(frozen=True)
class RunSection:
    name: str | None = None
    """Folder of the run below `run.folder`; default: the configuration file's name without its ending."""
    folder: str = "runs"
    steps: PositiveInt = 100
    """Policy versions to make: rollout, score, update, publish is one."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    deterministic: bool = False
    """Bit-equal when resumed or repeated: prompts are assigned statically, torch's deterministic algorithms are on."""
    resume: Literal["auto", "never"] | CountInt = "auto"
    """`auto`: go on from the newest valid checkpoint of this name; `never`: refuse if there is one; or a version."""
    start_deadline_seconds: Seconds = 600.0
    """Until every rank has built its parts."""
    phase_deadline_seconds: Seconds = 3600.0
    """Until every rank has finished one phase."""


@dataclass(frozen=True)
class ModelSection:
    policy: str | None = None
    """HF folder (config.json, safetensors, tokenizer)."""
    reference: str | None = None
    """HF folder; default: the policy as it was at the start."""
    reward_model: str | None = None
    drafter: str | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights and activations; fp32 masters are kept by the optimizer."""
    output_head_dtype: Literal["float32", "model"] = "float32"
    """`float32`: logits are not rounded to bfloat16, in trainer and engine."""


@dataclass(frozen=True)
class ParallelSection:
    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    sequence_parallel: bool = False
    """Split norms and dropout over the tensor-parallel ranks along the sequence."""


@dataclass(frozen=True)
class DataSection:
    prompts: tuple[str, ...] = ()
    """JSONL files with prompts to train on; a single path may be given as a string."""
    evaluation: tuple[str, ...] = ()
    """JSONL files with held-out prompts; never trained on."""
    shuffle: bool = True
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are left out and counted."""
    system_message: str | None = None
    """Put before `prompt` or `messages` when the chat template is applied."""
    apply_chat_template: bool = True
    """False: `prompt` goes to the model as it is."""


@dataclass(frozen=True)
class RolloutSection:
    engine: EngineName = "sglang"
    """`sglang` runs in processes of its own and is given the weights after every update; `megatron` is embedded: it
    generates on the training modules themselves. `megatron_engine`, `sglang_engine` and `vllm_engine` mean the same."""
    mtp_enabled: bool = False
    """Multi-token-prediction self-speculative decoding."""
    batch_size: PositiveInt = 16
    """Prompts per step."""
    group_size: Annotated[int, Ge(2)] = 16
    """Answers per prompt; a group of one has no advantage (it is its own mean)."""
    temperature: PositiveFloat = 1.0
    """0 is refused: greedy answers of a group are all the same."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: CountInt = 0
    """0: all tokens."""
    max_new_tokens: PositiveInt = 512
    stop_token_ids: tuple[CountInt, ...] = ()
    """Besides the end tokens that the model's generation_config.json names."""
    python: str | None = None
    """Interpreter for an engine in a process of its own; default: the trainer's."""
    tensor: PositiveInt | None = None
    """Tensor-parallel size of the engine; default: `parallel.tensor`. The embedded engine has the trainer's; any other
    may have what divides the ranks of a machine, whatever the trainer's layout is."""
    engine_threads: PositiveInt | None = None
    """CPU threads of each tensor-parallel rank of an engine in a process of its own; default: the machine's cores
    divided by its ranks."""
    engine_stall_seconds: Seconds = 60.0
    """An engine in a process of its own that gives no token for so long, and does not answer when it is asked for one,
    hangs: it is killed and started again."""
    max_engine_restarts: CountInt = 3
    """How often one engine is started again in a run after it died or hung; after that the run ends."""
    publish_bucket_bytes: PositiveInt = 256 * 1024**2
    """Weights go to an engine in a process of its own in pieces of at most so many bytes; a device holds one of them,
    and a tensor that is larger is a piece by itself."""
    max_concurrent_rollouts: PositiveInt = 64
    """Answers that one engine works on at the same time."""
    share_prompt_prefix: bool = True
    """A prompt's keys and values are computed once for its group."""


@dataclass(frozen=True)
class InferenceSection:
    models: tuple[Literal["reference_model", "reward_model"], ...] = ()
    """Models that run forward in the score phase, over the micro-batches of the update."""


@dataclass(frozen=True)
class RewardsSection:
    default: str = "math"
    """Scorer of prompts that name none: `math`, `exact`, `number`, `reasoning_gym` or `module:function`."""
    workers: PositiveInt = 1
    """Processes per engine leader."""
    timeout_seconds: Seconds = 10.0
    """Per rollout; a worker that takes longer is killed and replaced."""
    on_error: Literal["zero", "drop", "fail"] = "zero"
    """`zero`: score 0; `drop`: the rollout is not trained; `fail`: the run ends. All are counted."""
    max_error_share: Share = 0.5
    """Above this share of failed scores in a step an alert is raised."""


@dataclass(frozen=True)
class ClipSection:
    low: Annotated[float, Gt(0), Lt(1)] = 0.2
    high: PositiveFloat = 0.2
    """Ratio is clipped to [1 - low, 1 + high]; DAPO uses a larger high."""


@dataclass(frozen=True)
class KlSection:
    coefficient: NonNegativeFloat = 0.0
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """http://joschu.net/blog/kl-approx.html"""


@dataclass(frozen=True)
class MismatchSection:
    correction: Literal["none", "truncate"] = "none"
    """`truncate`: multiply by min(policy / engine, cap) per token (truncated importance sampling)."""
    cap: PositiveFloat = 2.0


@dataclass(frozen=True)
class TrainingSection:
    update_strategy: Literal["grpo"] = "grpo"
    learning_rate: NonNegativeFloat = 1e-6
    minimum_learning_rate: NonNegativeFloat = 0.0
    warmup_steps: CountInt = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Over `run.steps`, after the warm-up, down to `minimum_learning_rate`."""
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    adam_beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    adam_epsilon: PositiveFloat = 1e-8
    clip_gradient_norm: PositiveFloat = 1.0
    clip: ClipSection = field(default_factory=ClipSection)
    kl: KlSection = field(default_factory=KlSection)
    mismatch: MismatchSection = field(default_factory=MismatchSection)
    ratio_reference: Literal["proximal", "bypass"] = "proximal"
    """Denominator of the ratio: the policy's own log-probs at the start of the step, or the engine's."""
    loss_mean: Literal["token", "sequence"] = "token"
    """`token`: over all trained tokens of the mini-batch; `sequence`: mean of the rollouts' means."""
    advantage_scale: Literal["standard_deviation", "none"] = "standard_deviation"
    num_mini_batches: PositiveInt = 1
    """Optimizer steps per rollout phase."""
    micro_batch_tokens: PositiveInt = 4096
    """Packed tokens per micro-batch and data-parallel rank; a longer rollout has one to itself."""
    share_prompt_prefix: Literal["auto", "never"] = "auto"
    """`auto`: a prompt is computed once for the group where the attention can do it exactly."""
    mask_truncated: bool = False
    """Answers that hit `max_new_tokens` are not trained and not in any denominator."""
    reduce_gradients_in_float32: bool = True
    recompute_activations: bool = False


@dataclass(frozen=True)
class ModulesSection:
    rollout: RolloutSection = field(default_factory=RolloutSection)
    inference: InferenceSection = field(default_factory=InferenceSection)
    rewards: RewardsSection = field(default_factory=RewardsSection)
    training: TrainingSection = field(default_factory=TrainingSection)


@dataclass(frozen=True)
class MemorySection:
    dynamic_offload: bool = False
    """False moves nothing."""
    offload_trigger_threshold: Share = 0.85
    """Share of the device's memory above which groups move off it; 0 moves everything that a phase does not need."""
    far_folder: str | None = None
    """Folder of the far tier on a CPU machine; default: `offload/` in the run's folder."""


@dataclass(frozen=True)
class ScheduleSection:
    order: tuple[PhaseName, ...] = ("rollout", "score", "update", "publish")
    overlap: tuple[Literal["rewards"], ...] = ("rewards",)
    """What runs beside the rollout."""


@dataclass(frozen=True)
class CheckpointSection:
    every_steps: CountInt = 50
    """0: never. The last step is always saved."""
    keep: PositiveInt = 2
    """Newest valid versions that stay."""
    on_failure: Literal["stop", "continue"] = "stop"
    """What a save that failed (disk full) does to the run."""
    export_at_end: bool = True
    """Write the final policy as an HF folder to `exports/`."""


@dataclass(frozen=True)
class MonitorSection:
    tensorboard: bool = True
    wandb: bool = False
    evaluate_every_steps: CountInt = 0
    """0: only where the program that starts the run asks for it."""
    evaluate_at_start: bool = False
    evaluate_at_end: bool = False
    evaluation_max_new_tokens: PositiveInt | None = None
    """Default: `modules.rollout.max_new_tokens`."""
    save_rollouts_every_steps: CountInt = 10
    gap_warn: PositiveFloat = 0.005
    """Mean |train - rollout probability| that warns."""
    gap_alert: PositiveFloat = 0.01
    """... and that alerts."""


@dataclass(frozen=True)
class Config:
    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    data: DataSection = field(default_factory=DataSection)
    modules: ModulesSection = field(default_factory=ModulesSection)
    memory_management: MemorySection = field(default_factory=MemorySection)
    schedule_mode: Literal["sync", "async"] = "sync"
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    monitor: MonitorSection = field(default_factory=MonitorSection)
    megatron: dict[str, Any] = field(default_factory=dict)
    """Fields of megatron-core's TransformerConfig, passed through; those that we own are refused."""
    sglang: dict[str, Any] = field(default_factory=dict)
    vllm: dict[str, Any] = field(default_factory=dict)

    @property
    def engine_tensor(self) -> int:
        """Tensor-parallel size of a rollout engine."""
        return self.modules.rollout.tensor or self.parallel.tensor
