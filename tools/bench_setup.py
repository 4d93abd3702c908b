"""What the benchmarks start: a random model, one trainer rank with it, an SGLang server. Import it after the shim."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_megatron.config.schema import Config, ModelSection, ModulesSection, RolloutSection
from grpo_megatron.families.base import ModelDescription
from grpo_megatron.families.describe import describe
from grpo_megatron.models.build import BuildSettings, build_policy
from grpo_megatron.parallel.grid import RankGrid
from grpo_megatron.parallel.groups import Groups, build_groups
from grpo_megatron.platform.device import current_platform
from grpo_megatron.platform.kernels import choose_kernels
from grpo_megatron.rollout.sglang.build import EngineGroup, build_sglang_engine
from grpo_megatron.rollout.sglang.engine import SglangEngine
from grpo_megatron.weights.load import load_hf

SMOLLM2_SIZES = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048, "rope_theta": 100000.0,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Trainer:
    """One rank with the model."""

    chunks: list[Any]
    description: ModelDescription
    groups: Groups


def make_random_llama(folder: Path) -> None:
    """135M parameters in bfloat16, SmolLM2's dimensions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMOLLM2_SIZES)).to(torch.bfloat16).save_pretrained(folder)


def build_trainer(folder: Path, *, dtype: Any, head_dtype: Any = "float32") -> Trainer:
    """Load the HF folder on one rank."""
    groups = build_groups(RankGrid(1), backend="gloo", timeout_seconds=600, store=dist.HashStore())
    description = describe(folder)
    built = BuildSettings(dtype, head_dtype)
    chunks = build_policy(description, built, groups, current_platform(), choose_kernels())
    load_hf(chunks, description, folder, groups=groups)
    return Trainer(chunks, description, groups)


def start_server(
    folder: Path,
    logs: Path,
    *,
    dtype: Any,
    rollout: RolloutSection,
    max_sequence_tokens: int,
    head_dtype: Any = "float32",
) -> SglangEngine:
    """A server of one rank with the folder's weights."""
    model = ModelSection(policy=str(folder), dtype=dtype, output_head_dtype=head_dtype)
    return build_sglang_engine(
        Config(model=model, modules=ModulesSection(rollout=rollout)),
        EngineGroup(rank=0, local_rank=0, local_world_size=1, world_size=1, tensor=1),
        current_platform(),
        describe(folder),
        decode=lambda ids: "",
        max_sequence_tokens=max_sequence_tokens,
        logs=logs,
        say=lambda text: print(text, file=sys.stderr),
    )
