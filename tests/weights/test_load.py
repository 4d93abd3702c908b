"""Loading on one rank: values against HF, and everything that is refused, all of it named, nothing touched."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.families.describe import describe
from grpo_megatron.models.build import BuildSettings, build_policy
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.platform.device import current_platform
from grpo_megatron.platform.kernels import choose_kernels
from grpo_megatron.weights.load import load_hf
from grpo_megatron.weights.naming import parameters_by_name
from tests.tiny import make_tiny_llama

pytestmark = pytest.mark.unit


def _build(folder: Path, groups: Groups, **settings):  # noqa: ANN003, ANN202
    built = BuildSettings("float32", "float32", **settings)
    description = describe(folder)
    chunks = build_policy(description, built, groups, current_platform(), choose_kernels())
    for parameter in parameters_by_name(chunks).values():
        parameter.data.fill_(7.0)
    return chunks, description


def _refusal(folder: Path, groups: Groups) -> str:
    """What loading says; and no parameter was touched."""
    chunks, description = _build(folder, groups)
    with pytest.raises(ValueError) as refusal:
        load_hf(chunks, description, folder, groups=groups)
    assert all(bool((value == 7.0).all()) for value in parameters_by_name(chunks).values())
    return str(refusal.value)


def _change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def _change_tensors(folder: Path, change) -> None:  # noqa: ANN001
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "model", num_layers=2)


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "untied", num_layers=2, tie_embeddings=False)


def test_fused_rows_lie_where_megatron_core_reads_them(folder: Path, single_rank_groups: Groups) -> None:
    """4 key-value heads of 8 rows with 2 query heads each: group 1 starts at fused row 32."""
    chunks, description = _build(folder, single_rank_groups)
    report = load_hf(chunks, description, folder, groups=single_rank_groups)
    tensors, ours = load_file(folder / "model.safetensors"), parameters_by_name(chunks)
    fused = ours["decoder.layers.1.self_attention.linear_qkv.weight"]
    query, key, value = (tensors[f"model.layers.1.self_attn.{letter}_proj.weight"] for letter in "qkv")
    assert torch.equal(fused[32:64], torch.cat([query[16:32], key[8:16], value[8:16]]))
    gate_up = [tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(ours["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat(gate_up))
    assert report.num_parameters == len(ours)
    assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_missing_unexpected_and_misshapen_tensors_are_named_together(folder: Path, single_rank_groups: Groups) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # old files have it: harmless
        tensors["model.norm.weight"] = torch.zeros(65)

    _change_tensors(folder, spoil)
    text = _refusal(folder, single_rank_groups)
    assert "1 missing: model.layers.0.mlp.up_proj.weight" in text
    assert "1 unexpected: model.layers.9.mlp.up_proj.weight" in text
    assert "model.norm.weight is [65], config.json says [64]" in text
    assert "inv_freq" not in text


def test_an_untied_model_without_a_head_is_refused_with_the_reason(untied: Path, single_rank_groups: Groups) -> None:
    _change_tensors(untied, lambda tensors: tensors.pop("lm_head.weight"))
    text = _refusal(untied, single_rank_groups)
    assert "lm_head.weight" in text and "tie_word_embeddings must be true" in text


def test_a_tied_model_loads_with_and_without_the_extra_head(folder: Path, single_rank_groups: Groups) -> None:
    """Case W5."""
    chunks, description = _build(folder, single_rank_groups)
    _change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_hf(chunks, description, folder, groups=single_rank_groups)
    expected = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(parameters_by_name(chunks)["embedding.word_embeddings.weight"], expected)


def test_an_index_that_lists_a_tied_head_which_no_file_holds_is_fine(folder: Path, single_rank_groups: Groups) -> None:
    names = [*load_file(folder / "model.safetensors"), "lm_head.weight"]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    chunks, description = _build(folder, single_rank_groups)
    load_hf(chunks, description, folder, groups=single_rank_groups)


def test_a_tied_model_whose_extra_head_differs_is_refused(folder: Path, single_rank_groups: Groups) -> None:
    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[150, 63] += 1
        tensors["lm_head.weight"] = head

    _change_tensors(folder, add_head)
    chunks, description = _build(folder, single_rank_groups)
    with pytest.raises(ValueError, match="tie_word_embeddings is true, but lm_head.weight is there and differs"):
        load_hf(chunks, description, folder, groups=single_rank_groups)


def test_every_difference_between_configuration_and_checkpoint_is_named(
    folder: Path, single_rank_groups: Groups
) -> None:
    """Case W12."""
    chunks, description = _build(folder, single_rank_groups)
    _change_config(folder, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, rms_norm_eps=1e-6)
    _change_config(folder, tie_word_embeddings=False)
    with pytest.raises(ValueError) as refusal:
        load_hf(chunks, description, folder, groups=single_rank_groups)
    text = str(refusal.value)
    assert "rope_theta: the model has 10000.0, the checkpoint 500000.0" in text
    assert "norm_epsilon: the model has 1e-05, the checkpoint 1e-06" in text
    assert "tie_embeddings: the model has True, the checkpoint False" in text


def test_an_override_that_changes_the_built_model_is_refused(folder: Path, single_rank_groups: Groups) -> None:
    chunks, description = _build(folder, single_rank_groups, megatron={"layernorm_epsilon": 1e-3})
    chunks[0].rotary_pos_emb.inv_freq = chunks[0].rotary_pos_emb.inv_freq * 0.5
    with pytest.raises(ValueError) as refusal:
        load_hf(chunks, description, folder, groups=single_rank_groups)
    assert "norm_epsilon: the built model has 0.001, its description 1e-05" in str(refusal.value)
    assert "rotary frequencies are not those of rope_theta" in str(refusal.value)


def test_end_tokens_may_differ(folder: Path, single_rank_groups: Groups) -> None:
    chunks, description = _build(folder, single_rank_groups)
    load_hf(chunks, replace(description, eos_token_ids=(5,)), folder, groups=single_rank_groups)


@pytest.mark.parametrize("num_bytes", [0, 5, 300, -1])
def test_a_cut_off_file_is_named(folder: Path, single_rank_groups: Groups, num_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    text = _refusal(folder, single_rank_groups)
    assert str(path) in text and "damaged or cut off" in text


def test_a_file_that_is_no_safetensors_is_named(folder: Path, single_rank_groups: Groups) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "damaged or cut off" in _refusal(folder, single_rank_groups)


def test_an_index_with_a_missing_file_is_named(folder: Path, single_rank_groups: Groups) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors: named in" in _refusal(folder, single_rank_groups)
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "no valid index" in _refusal(folder, single_rank_groups)


def test_a_folder_with_another_format_is_refused_with_the_fix(folder: Path, single_rank_groups: Groups) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is another format" in _refusal(folder, single_rank_groups)


def test_quantised_tensors_are_refused(folder: Path, single_rank_groups: Groups) -> None:
    _change_tensors(folder, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    assert "model.norm.weight has dtype I8" in _refusal(folder, single_rank_groups)
