"""From config.json to a description: both spellings of rotary settings, and everything that is refused, by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_megatron.families.base import ModelDescription, RopeScaling
from grpo_megatron.families.describe import describe
from grpo_megatron.families.rotary import inverse_frequencies

pytestmark = pytest.mark.unit

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _describe(folder: Path, config: dict, generation: dict | None = None) -> ModelDescription:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return describe(folder)


def test_smollm2_is_described_field_by_field(tmp_path: Path) -> None:
    assert _describe(tmp_path, SMOLLM2) == ModelDescription(
        family="llama",
        num_layers=30,
        hidden_size=576,
        ffn_hidden_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_size=64,
        vocab_size=49152,
        max_positions=8192,
        rope_theta=100000.0,
        norm_epsilon=1e-5,
        tie_embeddings=True,
        eos_token_ids=(2,),
    )


def test_rotary_settings_of_transformers_4_and_5_mean_the_same(tmp_path: Path) -> None:
    old = _describe(tmp_path / "old", SMOLLM2 | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING})
    merged = {key: value for key, value in SMOLLM2.items() if key != "rope_theta"}
    new = _describe(tmp_path / "new", merged | {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 500000.0}})
    assert old == new
    assert new.rope_theta == 500000.0
    assert new.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


def test_end_tokens_of_the_generation_config_win(tmp_path: Path) -> None:
    assert _describe(tmp_path, SMOLLM2, {"eos_token_id": [128001, 128009]}).eos_token_ids == (128001, 128009)


def test_an_explicit_head_size_is_kept_and_a_missing_one_derived(tmp_path: Path) -> None:
    assert _describe(tmp_path, SMOLLM2 | {"head_dim": 32}).head_size == 32
    assert _describe(tmp_path, SMOLLM2 | {"head_dim": None}).head_size == 64


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type is 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling: low_freq_factor is missing"),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, "rope_theta is 100000 but rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "expected one set of values"),
        ({"rope_parameters": {"rope_theta": 100000, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"num_key_value_heads": 2}, "num_attention_heads 9 is no multiple of num_key_value_heads 2"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not known here; known: llama, qwen2"),
        ({"model_type": None}, "model_type is missing"),
    ],
)
def test_what_is_not_built_here_is_refused_by_name(tmp_path: Path, change: dict, named: str) -> None:
    with pytest.raises(ValueError) as refusal:
        _describe(tmp_path, SMOLLM2 | change)
    assert named in str(refusal.value)
    assert str(tmp_path / "config.json") in str(refusal.value)


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refusal:
        _describe(tmp_path, SMOLLM2 | {"mlp_bias": True, "hidden_act": "gelu", "vocab_size": -1})
    assert [part in str(refusal.value) for part in ("mlp_bias", "hidden_act", "vocab_size")] == [True] * 3
    assert len(str(refusal.value).splitlines()) == 3


@pytest.mark.parametrize("content", [None, "{not json", "[1, 2]"])
def test_a_folder_without_a_readable_config_is_refused_with_its_path(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        describe(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        describe(tmp_path / "nowhere")


def test_qwen2_is_llama_with_biases_on_query_key_and_value(tmp_path: Path) -> None:
    qwen = SMOLLM2 | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    description = _describe(tmp_path, qwen)
    assert (description.family, description.attention_bias) == ("qwen2", True)
    with pytest.raises(ValueError, match="sliding_window is 4096"):
        _describe(tmp_path, qwen | {"use_sliding_window": True})


def test_what_transformers_saves_is_read_as_transformers_means_it(tmp_path: Path) -> None:
    """An independent oracle: the fields of the LlamaConfig that wrote the file, and its rotary frequencies."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    written = LlamaConfig(
        vocab_size=151,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        rms_norm_eps=3e-6,
        rope_parameters=LLAMA3_SCALING | {"rope_theta": 10000.0, "original_max_position_embeddings": 64},
    )
    written.save_pretrained(tmp_path)
    description = describe(tmp_path)
    assert (description.head_size, description.norm_epsilon, description.tie_embeddings) == (16, 3e-6, False)
    frequencies = LlamaRotaryEmbedding(written).inv_freq.tolist()
    assert inverse_frequencies(description) == pytest.approx(frequencies, rel=1e-6)
    assert len({ours / plain for ours, plain in zip(frequencies, _plain(16), strict=True)}) > 2  # scaling did something


def _plain(head_size: int) -> list[float]:
    return [10000.0 ** (-i / head_size) for i in range(0, head_size, 2)]


def test_describing_and_counting_import_no_torch() -> None:
    code = (
        "import sys, grpo_megatron.families.counting, grpo_megatron.families.rotary;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
