"""Export on one rank: identical bytes, several files with an index, readable by HF; and what happens when it fails."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.families.describe import describe
from grpo_megatron.parallel.errors import RankFailure
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.weights import export
from grpo_megatron.weights.export import export_hf
from tests.building import build_tiny_policy
from tests.tiny import make_tiny_llama

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("untied"), num_layers=2, tie_embeddings=False)


def _export(source: Path, target: Path, groups: Groups, *, dtype: str = "float32", max_file_bytes: int = 2**30):  # noqa: ANN202
    chunks = build_tiny_policy(source, groups, dtype=dtype)
    return export_hf(
        chunks, describe(source), target, source_folder=source, groups=groups, max_file_bytes=max_file_bytes
    )


def test_one_file_has_the_bytes_of_the_source(untied: Path, tmp_path: Path, single_rank_groups: Groups) -> None:
    (untied / "README.md").write_text("how it was before training")
    report = _export(untied, tmp_path / "out", single_rank_groups)
    before, after = load_file(untied / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert (report.num_tensors, report.num_files) == (len(before), 1)
    assert report.num_bytes == sum(tensor.nbytes for tensor in before.values())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (untied / name).read_bytes()
    assert not (tmp_path / "out" / "README.md").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_several_files_with_an_index_load_in_transformers(
    untied: Path, tmp_path: Path, single_rank_groups: Groups
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = _export(untied, tmp_path / "out", single_rank_groups, max_file_bytes=60_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert report.num_files == len(files) == len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert index["metadata"]["total_size"] == report.num_bytes
    # Only a tensor that is larger than the limit makes a larger file.
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "out" / file).values()) for file in files]
    assert all(size <= 60_000 for size in sizes)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert all(torch.equal(model[name], value) for name, value in load_file(untied / "model.safetensors").items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([65]) == AutoTokenizer.from_pretrained(untied).decode(
        [65]
    )


def test_a_bfloat16_policy_is_exported_as_bfloat16_and_its_config_says_so(
    untied: Path, tmp_path: Path, single_rank_groups: Groups
) -> None:
    _export(untied, tmp_path / "out", single_rank_groups, dtype="bfloat16")
    before, after = load_file(untied / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {config.get("dtype", "bfloat16"), config.get("torch_dtype", "bfloat16")} == {"bfloat16"}
    assert describe(tmp_path / "out") == describe(untied)


def test_an_existing_folder_is_left_as_it_is(untied: Path, tmp_path: Path, single_rank_groups: Groups) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(RankFailure, match="exists already; remove it or choose another"):
        _export(untied, tmp_path / "out", single_rank_groups)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_full_disk_leaves_nothing_behind_and_the_next_export_works(
    untied: Path, tmp_path: Path, single_rank_groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail_at_the_second_file(tensors, path, **options) -> None:  # noqa: ANN001, ANN003
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        Path(path).write_bytes(b"first")

    with monkeypatch.context() as patch:
        patch.setattr(export, "save_file", fail_at_the_second_file)
        with pytest.raises(RankFailure, match="No space left on device"):
            _export(untied, tmp_path / "out", single_rank_groups, max_file_bytes=60_000)
    assert list(tmp_path.iterdir()) == []
    _export(untied, tmp_path / "out", single_rank_groups)
