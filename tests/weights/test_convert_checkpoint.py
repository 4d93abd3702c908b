"""What the conversion tool refuses before it builds anything; the conversion itself runs in the multi-rank cases."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.convert_checkpoint import main

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("hf-to-megatron", "{hf}", "{here}"), "exists already; remove it or choose another"),
        (("hf-to-megatron", "{here}/nowhere", "{here}/new"), "no such folder"),
        (("hf-to-megatron", "{hf}", "{here}/new", "--tensor", "3"), "8 attention heads are no multiple"),
        (("hf-to-megatron", "{hf}", "{here}/new", "--pipeline", "3"), "4 layers do not divide into 3 stages"),
        (("megatron-to-hf", "{hf}", "{here}/new"), "expected a converted model or a run's checkpoint"),
        (("megatron-to-hf", "{run}", "{here}/new"), "config.json: not there"),
        (("megatron-to-hf", "{run}", "{here}/new", "--companions", "{hf}"), "say --dtype bfloat16 or"),
        (("hf-to-megatron", "{mixed}", "{here}/new"), "holds BF16, F32: say --dtype"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_fix(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "mixed").mkdir()
    tensors = load_file(tiny_llama / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.bfloat16)
    save_file(tensors, tmp_path / "mixed" / "model.safetensors")
    (tmp_path / "mixed" / "config.json").write_text((tiny_llama / "config.json").read_text())
    places = {"hf": tiny_llama, "here": tmp_path, "run": tmp_path / "run", "mixed": tmp_path / "mixed"}
    assert main([argument.format(**places) for argument in arguments]) == 1
    output = capsys.readouterr()
    assert said in output.err and "Traceback" not in output.err
    assert not (tmp_path / "new").exists()


def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["sideways", "a", "b"], ["hf-to-megatron", "a", "b", "--tensor", "0"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2


def test_a_damaged_note_is_named(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    (tmp_path / "conversion.json").write_text(json.dumps({"dtype": "int4"}))
    assert main(["megatron-to-hf", str(tmp_path), str(tmp_path / "new")]) == 1
    assert "conversion.json: dtype is 'int4'" in capsys.readouterr().err
