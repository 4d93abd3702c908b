"""Bytes per second of publishing a model to a real SGLang server of this machine, beside a plain copy of the bytes.

    python tools/bench_publish.py [MODEL] [--bucket-megabytes 64] [--repeats 10] [--profile]

MODEL is an HF folder; without it a random Llama of 135M parameters is made (SmolLM2's dimensions). One trainer rank,
one server with one rank. A publish is everything: opening, buckets, comparison of the sample, cache flush, version. The
copy goes from the parameters to memory of this process that was written before. They take turns, and the best of
each counts. Two copies cannot be avoided (into the shared buffer, and out of it), so half the speed of a copy is the
limit for buckets that do not stay in the processor's cache. The last line is one JSON object.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grpo_megatron.platform.megatron_on_cpu import install

install()

import torch  # noqa: E402

from grpo_megatron.config.schema import RolloutSection  # noqa: E402
from grpo_megatron.families.base import ModelDescription  # noqa: E402
from grpo_megatron.parallel.groups import Groups  # noqa: E402
from grpo_megatron.rollout.sglang.engine import SglangEngine  # noqa: E402
from grpo_megatron.rollout.sglang.sink import SglangSink  # noqa: E402
from grpo_megatron.weights.gather import WeightWalk  # noqa: E402
from grpo_megatron.weights.publish import Publisher  # noqa: E402
from tools.bench_setup import build_trainer, make_random_llama, start_server  # noqa: E402

DEFAULT_BUCKET_MEGABYTES = 64


@dataclass(frozen=True)
class PublishSpeed:
    """Best of all repeats.

    Example:
        >>> PublishSpeed(num_bytes=200, seconds=0.4, median_seconds=0.5, memcpy_seconds=0.1, peak_extra_bytes=64).ratio
        0.25
    """

    num_bytes: int
    seconds: float
    median_seconds: float
    memcpy_seconds: float
    peak_extra_bytes: int

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.seconds

    @property
    def ratio(self) -> float:
        """1.0: as fast as a plain copy."""
        return self.memcpy_seconds / self.seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "bytes_per_second": round(self.bytes_per_second),
            "ratio_to_memcpy": round(self.ratio, 3),
            "peak_extra_bytes": self.peak_extra_bytes,
        }


def measure_publish(
    chunks: Sequence[torch.nn.Module],
    description: ModelDescription,
    groups: Groups,
    engine: SglangEngine,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_MEGABYTES * 1024**2,
    repeats: int = 10,
    around: Callable[[Callable[[], Any]], Any] = lambda publish: publish(),
) -> PublishSpeed:
    """Publish again and again to this server, and copy the same parameters in between.

    Args:
        around: is given each publish to call, for a profiler.
    """
    assert engine.life is not None
    life = engine.life
    sink = SglangSink(lambda: life.control, tensor_parallel=1)
    publisher = Publisher(WeightWalk(chunks, description, groups), sink, groups, bucket_bytes=bucket_bytes)
    sources = [parameter.detach() for chunk in chunks for parameter in chunk.parameters()]
    targets = [torch.zeros_like(source) for source in sources]
    try:
        report = publisher.publish(0)  # looks for parameters that it does not reach, which takes its time
        seconds, copying = [], []
        for version in range(1, repeats + 1):
            start = time.perf_counter()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            copying.append((time.perf_counter() - start) * report.num_bytes / sum(source.nbytes for source in sources))
            start = time.perf_counter()
            report = around(lambda number=version: publisher.publish(number))
            seconds.append(time.perf_counter() - start)
    finally:
        sink.close()
    life.version = report.version
    return PublishSpeed(
        report.num_bytes, min(seconds), statistics.median(seconds), min(copying), report.peak_extra_bytes
    )


def parse(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="HF folder; default: a random Llama of 135M parameters")
    parser.add_argument(
        "--bucket-megabytes", default=str(DEFAULT_BUCKET_MEGABYTES), help="one size or several: 16,64,256"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--profile", action="store_true", help="where this process spends its time")
    return parser.parse_args(command_line)


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    speed = None
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.model or Path(temporary) / "random-llama-135m"
        if arguments.model is None:
            make_random_llama(folder)
        trainer = build_trainer(folder, dtype=arguments.dtype)
        engine = start_server(
            folder,
            Path(temporary) / "logs",
            dtype=arguments.dtype,
            # Little room for answers: it only receives.
            rollout=RolloutSection(engine="sglang", max_concurrent_rollouts=1, engine_stall_seconds=120.0),
            max_sequence_tokens=128,
        )
        try:
            for size in map(int, arguments.bucket_megabytes.split(",")):
                around = _profiled if arguments.profile else (lambda publish: publish())
                speed = measure_publish(
                    trainer.chunks,
                    trainer.description,
                    trainer.groups,
                    engine,
                    bucket_bytes=size * 1024**2,
                    repeats=arguments.repeats,
                    around=around,
                )
                print(
                    f"buckets of {size} MiB: {speed.num_bytes / 1e6:.0f} MB in {speed.seconds * 1e3:.1f} ms "
                    f"(median {speed.median_seconds * 1e3:.1f}), copied in {speed.memcpy_seconds * 1e3:.1f} ms: "
                    f"{speed.bytes_per_second / 1e9:.2f} GB/s, {speed.ratio:.2f} of a copy; "
                    f"{speed.peak_extra_bytes / 1e6:.0f} MB beside the parameters",
                    flush=True,
                )
        finally:
            engine.close()
    assert speed is not None
    print(json.dumps({"publish": speed.as_json()}))


def _profiled(publish: Callable[[], Any]) -> Any:
    import cProfile
    import pstats

    profile = cProfile.Profile()
    result = profile.runcall(publish)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(12)
    return result


if __name__ == "__main__":
    main()
