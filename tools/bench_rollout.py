"""Speed of the rollout engines beside HF generate, per second and per CPU second, on one rank.

    python tools/bench_rollout.py [MODEL] [--batches 1,4,16,64] [--scenarios plain,groups,mixed] [--new-tokens 24]

MODEL is an HF folder; without it a random Llama of 135M parameters is made (SmolLM2's dimensions). All sample at
temperature 1. `megatron` and `sglang` give log-probs and have float32 logits (`--head-dtype`); `hf` (transformers'
generate) gives none and has the model's. Scenarios: `plain`: every prompt is another; `groups`: groups of 8 share their
prompt (HF cannot); `mixed`: prompts and answers of different lengths, and only asked-for tokens count. The engines take
turns and the best of `--repeats` counts. CPU seconds are those of all processes of an engine: on a machine with other
work they say more than seconds. Then weights are published to SGLang as `tools/bench_publish.py` does it. The last line
is one JSON object.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grpo_megatron.platform.megatron_on_cpu import install

install()

import psutil  # noqa: E402
import torch  # noqa: E402

from grpo_megatron.batch import Prompt, RewardSpec  # noqa: E402
from grpo_megatron.config.schema import RolloutSection  # noqa: E402
from grpo_megatron.platform.device import current_platform  # noqa: E402
from grpo_megatron.rollout.base import RolloutEngine, RolloutRequest, SamplingSettings  # noqa: E402
from grpo_megatron.rollout.dispatch import StaticTickets  # noqa: E402
from grpo_megatron.rollout.megatron.build import build_megatron_engine  # noqa: E402
from grpo_megatron.rollout.sglang.engine import SglangEngine  # noqa: E402
from tools.bench_publish import measure_publish  # noqa: E402
from tools.bench_setup import Trainer, build_trainer, make_random_llama, start_server  # noqa: E402

GROUP_SIZE = 8


@dataclass(frozen=True)
class Work:
    """Prompts with the number of tokens wanted after each; equal neighbours are a group."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.new_tokens)


@dataclass(frozen=True)
class Speed:
    tokens_per_second: float
    tokens_per_cpu_second: float


def make_work(scenario: str, batch: int, prompt_tokens: int, new_tokens: int, seed: int) -> Work:
    random_numbers = random.Random(seed)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(random_numbers.randrange(100, 40000) for _ in range(length))

    if scenario == "groups":
        groups = [prompt(prompt_tokens) for _ in range(-(-batch // GROUP_SIZE))]
        members = [one for one in groups for _ in range(GROUP_SIZE)]
        return Work(tuple(members[:batch]), (new_tokens,) * batch)
    if scenario == "mixed":
        lengths = [random_numbers.randint(prompt_tokens // 4, prompt_tokens) for _ in range(batch)]
        wanted = tuple(random_numbers.randint(new_tokens // 4, new_tokens) for _ in range(batch))
        return Work(tuple(prompt(length) for length in lengths), wanted)
    return Work(tuple(prompt(prompt_tokens) for _ in range(batch)), (new_tokens,) * batch)


@dataclass(frozen=True)
class Runner:
    """One engine."""

    run: Callable[[Work], int]
    """Answers the work; returns the number of tokens."""
    cpu_seconds: Callable[[], float] = time.process_time
    """Of all its processes so far."""


def megatron_runner(trainer: Trainer, arguments: argparse.Namespace, batch: int) -> Runner:
    section = RolloutSection(engine="megatron", max_concurrent_rollouts=batch)
    longest = arguments.prompt_tokens + arguments.new_tokens
    engine = build_megatron_engine(
        trainer.chunks, trainer.description, section, trainer.groups, current_platform(), lambda ids: "", longest
    )

    def run(work: Work) -> int:
        return drain(engine, work)

    return Runner(run)


def sglang_runner(engine: SglangEngine) -> Runner:
    assert engine.life is not None
    life, server = engine.life, psutil.Process(engine.life.process.process_id)

    def run(work: Work) -> int:
        life.control.post("/flush_cache")  # prompts of an earlier turn must not count as a shared prefix
        return drain(engine, work)

    def cpu_seconds() -> float:
        processes = [server, *server.children(recursive=True)]
        return time.process_time() + sum(sum(each.cpu_times()[:2]) for each in processes)

    return Runner(run, cpu_seconds)


def drain(engine: RolloutEngine, work: Work) -> int:
    """Answer everything; returns the number of sampled tokens."""
    tickets = StaticTickets(_requests(work), engine=0, num_engines=1)

    async def count() -> int:
        return sum([rollout.num_tokens async for rollout in engine.generate(tickets)])

    return asyncio.run(count())


def _requests(work: Work) -> list[RolloutRequest]:
    requests, place = [], 0
    while place < len(work.prompts):
        size = 1
        while place + size < len(work.prompts) and work.prompts[place + size] == work.prompts[place]:
            size += 1
        prompt = Prompt(f"prompt-{place}", work.prompts[place], "", RewardSpec("none"))
        sampling = SamplingSettings(max_new_tokens=work.new_tokens[place])
        requests.append(RolloutRequest(prompt.id, prompt, size, sampling, seed=0))
        place += size
    return requests


def hf_runner(folder: Path, arguments: argparse.Namespace) -> Runner:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments.dtype)).eval()

    def run(work: Work) -> int:
        longest, wanted = max(map(len, work.prompts)), max(work.new_tokens)
        token_ids = torch.zeros(len(work.prompts), longest, dtype=torch.long)
        attention_mask = torch.zeros_like(token_ids)
        for row, prompt in enumerate(work.prompts):  # padded on the left, as generate wants it
            token_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, longest - len(prompt) :] = 1
        settings = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=wanted,
            eos_token_id=None,
            pad_token_id=0,
        )
        model.generation_config = settings
        with torch.no_grad():
            made = model.generate(input_ids=token_ids, attention_mask=attention_mask, generation_config=settings)
        assert made.size(1) - longest == wanted
        return work.num_tokens

    return Runner(run)


def measure(runners: dict[str, Runner], work: Work, repeats: int) -> dict[str, Speed]:
    """The engines take turns, so that a busy minute of the machine meets all of them."""
    best: dict[str, Speed] = {}
    for _ in range(repeats):
        for name, runner in runners.items():
            wall, cpu = time.perf_counter(), runner.cpu_seconds()
            num_tokens = runner.run(work)
            speed = Speed(num_tokens / (time.perf_counter() - wall), num_tokens / (runner.cpu_seconds() - cpu))
            before = best.get(name, Speed(0.0, 0.0))
            best[name] = Speed(
                max(before.tokens_per_second, speed.tokens_per_second),
                max(before.tokens_per_cpu_second, speed.tokens_per_cpu_second),
            )
    return best


def report(arguments: argparse.Namespace, results: dict[tuple[str, int], dict[str, Speed]]) -> dict[str, Any]:
    """The JSON object: tables by engine and batch, `plain` under the plain name; each engine / hf per CPU second."""

    def table(scenario: str, figure: str) -> dict[str, dict[str, float]]:
        rows: dict[str, dict[str, float]] = {}
        for (name, batch), speeds in results.items():
            for engine, speed in speeds.items():
                if name == scenario:
                    rows.setdefault(engine, {})[str(batch)] = round(getattr(speed, figure), 1)
        return rows

    scenarios = list(dict.fromkeys(name for name, _ in results))
    found: dict[str, Any] = {}
    for figure in ("tokens_per_second", "tokens_per_cpu_second"):
        for scenario in scenarios:
            found[figure if scenario == "plain" else f"{figure}_{scenario}"] = table(scenario, figure)
    for ours in ("megatron", "sglang"):
        found[f"{ours}_over_hf_per_cpu_second"] = {
            f"{name} {batch}": round(speeds[ours].tokens_per_cpu_second / speeds["hf"].tokens_per_cpu_second, 2)
            for (name, batch), speeds in results.items()
            if {ours, "hf"} <= speeds.keys()
        }
    return found | {
        "dtype": arguments.dtype,
        "head_dtype": {"megatron": arguments.head_dtype, "sglang": arguments.head_dtype, "hf": "model"},
        "threads": arguments.threads,
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
    }


def parse(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="HF folder; default: a random Llama of 135M parameters")
    parser.add_argument("--batches", default="1,4,16,64", help="answers at the same time (default 1,4,16,64)")
    parser.add_argument("--scenarios", default="plain,groups,mixed")
    parser.add_argument("--engines", default="megatron,sglang,hf")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--head-dtype", choices=("float32", "model"), default="float32")
    return parser.parse_args(command_line)


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    batches = [int(batch) for batch in arguments.batches.split(",")]
    results: dict[tuple[str, int], dict[str, Speed]] = {}
    with ExitStack() as resources:
        temporary = resources.enter_context(tempfile.TemporaryDirectory())
        folder = arguments.model or Path(temporary) / "random-llama-135m"
        if arguments.model is None:
            make_random_llama(folder)
        engines = arguments.engines.split(",")
        runners: dict[str, Runner] = {}
        trainer, server = None, None
        if {"megatron", "sglang"} & set(engines):
            trainer = build_trainer(folder, dtype=arguments.dtype, head_dtype=arguments.head_dtype)
        if "megatron" in engines:
            assert trainer is not None
            runners["megatron"] = megatron_runner(trainer, arguments, max(batches))
        if "sglang" in engines:
            section = RolloutSection(
                engine="sglang", max_concurrent_rollouts=max(batches), engine_threads=arguments.threads
            )
            server = start_server(
                folder,
                Path(temporary) / "logs",
                dtype=arguments.dtype,
                head_dtype=arguments.head_dtype,
                rollout=section,
                max_sequence_tokens=arguments.prompt_tokens + arguments.new_tokens,
            )
            resources.callback(server.close)
            server.set_version(0)
            runners["sglang"] = sglang_runner(server)
        if "hf" in engines:
            runners["hf"] = hf_runner(folder, arguments)
        for batch in batches:
            for scenario in arguments.scenarios.split(","):
                work = make_work(scenario, batch, arguments.prompt_tokens, arguments.new_tokens, seed=batch)
                results[scenario, batch] = measure(runners, work, arguments.repeats)
                for engine, speed in results[scenario, batch].items():
                    print(
                        f"{scenario:7} batch {batch:3} {engine:9} {speed.tokens_per_second:7.1f} tokens/s "
                        f"{speed.tokens_per_cpu_second:7.1f} tokens/CPU-s",
                        flush=True,
                    )
        found = report(arguments, results)
        if server is not None and trainer is not None:
            speed = measure_publish(trainer.chunks, trainer.description, trainer.groups, server)
            found["publish"] = speed.as_json()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
