"""Publishing to real SGLang servers from every layout of the trainer, and what one rank's failure does to all.

The servers are started once: one with a single rank, led by rank 0, and one with two tensor-parallel ranks, led by the
last rank. Every layout of the four trainer ranks publishes to both at the same time.
"""

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_megatron.families.describe import describe
from grpo_megatron.parallel.collectives import agree
from grpo_megatron.parallel.errors import RankFailure
from grpo_megatron.rollout.sglang.control import EngineFailure
from grpo_megatron.rollout.sglang.engine import SglangEngine
from grpo_megatron.rollout.sglang.sink import SglangSink
from grpo_megatron.weights.export import export_hf
from grpo_megatron.weights.gather import WeightWalk
from grpo_megatron.weights.publish import Publisher
from grpo_megatron.weights.sink import Bucket
from tests.building import build_tiny_policy
from tests.distributed.harness import CaseContext, case
from tests.rollout.oracle import largest_difference
from tests.rollout.requests import make_request, random_prompts, run
from tests.tiny import make_tiny_llama

LAST_RANK = 3
BUCKET_BYTES = 30_000  # the embedding is larger, one layer's largest parameter as well, most of it smaller


@dataclass
class Trainer:
    """One layout: this rank's share of the model, and what publishes it."""

    context: CaseContext
    chunks: list[torch.nn.Module]
    source: Path
    groups: object
    sink: SglangSink | None
    publisher: Publisher

    def publish(self, version: int, **options) -> None:  # noqa: ANN003
        report = self.publisher.publish(version, **options)
        assert report.num_buckets > 3 and report.num_compared >= 8

    def change(self, seed: int) -> None:
        """The same new values whatever the layout: each parameter times a number."""
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                parameter.data.mul_(1.0 + 0.05 * seed)

    def check(self, version: int, name: str) -> None:
        """What the engines of this rank generate has the log-probs that HF computes from the exported weights."""
        exported = self.context.folder / name
        export_hf(self.chunks, describe(self.source), exported, source_folder=self.source, groups=self.groups)
        engine = _engine(self.context.rank, self.source)
        if engine is not None and self.sink is not None:
            assert engine.life is not None and self.sink.version() == engine.life.read_version() == version
            engine.life.version = version
            prompts = random_prompts((2, 17), seed=version)
            rollouts = run(engine, [make_request(p, 2, max_new_tokens=12) for p in prompts])
            assert {span.version for rollout in rollouts for span in rollout.versions} == {version}
            difference = largest_difference(exported, {p.id: p for p in prompts}, rollouts, 1.0)
            assert difference < 1e-4, (name, difference)
        dist.barrier()


@cache
def _engine(rank: int, source: Path) -> SglangEngine | None:
    """The server that this rank leads, if any; ends with the rank."""
    if rank not in (0, LAST_RANK):
        return None
    from tests.rollout.sglang_server import start_sglang

    start = source.parent / "sglang-start"  # the first values of the servers are others than the trainer's
    logs = source.parent / f"sglang-logs-{rank}"
    return start_sglang(start, logs, tensor=1 if rank == 0 else 2, engine_stall_seconds=60.0)


@cache
def _source(shared_folder: Path) -> Path:
    folder = shared_folder / "sglang-trainer"
    if dist.get_rank() == 0:
        make_tiny_llama(folder, tie_embeddings=False, seed=6)
        make_tiny_llama(shared_folder / "sglang-start", tie_embeddings=False, seed=5)
    dist.barrier()
    return folder


def _trainer(context: CaseContext, *, tensor: int = 1, pipeline: int = 1) -> Trainer:
    source = _source(context.shared_folder)
    engine, error = None, None
    try:
        engine = _engine(context.rank, source)
    except EngineFailure as failure:
        error = str(failure)
    agree(error, dist.group.WORLD, "start of the servers")
    groups = context.groups(tensor=tensor, pipeline=pipeline)
    chunks = build_tiny_policy(source, groups)
    sink = None
    if engine is not None:
        life = engine.life
        assert life is not None
        sink = SglangSink(lambda: life.control, tensor_parallel=1 if context.rank == 0 else 2)
    publisher = Publisher(WeightWalk(chunks, describe(source), groups), sink, groups, bucket_bytes=BUCKET_BYTES)
    return Trainer(context, chunks, source, groups, sink, publisher)


def _close(trainer: Trainer) -> None:
    if trainer.sink is not None:
        trainer.sink.close()
    dist.barrier()


def _installed() -> bool:
    import importlib.util

    return importlib.util.find_spec("sglang") is not None


@case(world_size=4, with_engines=True)
def publish_to_sglang_from_every_layout(context: CaseContext) -> None:
    """Data parallel alone, TP 2, PP 2, and TP 2 x PP 2, to servers with TP 1 and TP 2: HF's log-probs, all compared."""
    if not _installed():
        return
    for version, (tensor, pipeline) in enumerate([(1, 1), (2, 1), (1, 2), (2, 2)], start=1):
        trainer = _trainer(context, tensor=tensor, pipeline=pipeline)
        trainer.change(version)
        trainer.publish(version)
        assert trainer.publisher.compare_all(version) == len(describe_names(trainer))
        trainer.check(version, f"tensor-{tensor}-pipeline-{pipeline}")
        _close(trainer)


def describe_names(trainer: Trainer) -> list[str]:
    from safetensors.torch import load_file

    return list(load_file(trainer.source / "model.safetensors"))


@case(world_size=4, with_engines=True)
def a_failure_of_one_server_aborts_on_all_ranks_and_the_next_publish_works(context: CaseContext) -> None:
    """Case W4: the last rank's server refuses, then gets wrong bytes; both servers serve nothing until the next one."""
    if not _installed():
        return
    trainer = _trainer(context, tensor=2, pipeline=2)
    trainer.publish(10)
    for version, breaks, said in ((11, _refuse, "the engine of this rank said no"), (12, _spoil, "other values than")):
        trainer.change(1)
        undo = breaks(trainer.sink) if context.rank == LAST_RANK else None
        try:
            trainer.publish(version, compare="all")
        except RankFailure as failure:
            assert f"rank {LAST_RANK}: EngineFailure" in str(failure) and said in str(failure), failure
        else:
            raise AssertionError(f"published although {said}")
        if undo is not None:
            undo()
        if trainer.sink is not None:
            assert trainer.sink.version() == -1
    trainer.publish(13)
    trainer.check(13, "after-failures")
    _close(trainer)


def _refuse(sink: SglangSink):  # noqa: ANN202
    plain = sink.put

    def put(bucket: Bucket) -> None:
        if bucket.index == 2:
            raise EngineFailure("the engine of this rank said no")
        plain(bucket)

    sink.put = put  # type: ignore[method-assign]
    return lambda: setattr(sink, "put", plain)


def _spoil(sink: SglangSink):  # noqa: ANN202
    plain = sink.put

    def put(bucket: Bucket) -> None:
        if bucket.index == 1:
            assert bucket.buffer is not None
            bucket.buffer[:64] = 0
        plain(bucket)

    sink.put = put  # type: ignore[method-assign]
    return lambda: setattr(sink, "put", plain)


@case(world_size=4, with_engines=True)
def a_server_that_lost_its_weights_gets_them_while_the_other_keeps_its_own(context: CaseContext) -> None:
    """Rank 0's server is told nothing: it goes on with version 20 while the last rank's gets 21, of other weights."""
    if not _installed():
        return
    trainer = _trainer(context, tensor=2)
    trainer.publish(20)
    trainer.change(2)
    trainer.publish(21, here=context.rank == LAST_RANK)
    if trainer.sink is not None:
        assert trainer.sink.version() == (21 if context.rank == LAST_RANK else 20)
    trainer.publish(22, here=context.rank == 0)
    trainer.publish(22, here=context.rank == LAST_RANK)
    trainer.check(22, "after-both")
    _close(trainer)
    shutil.rmtree(context.folder / "after-both", ignore_errors=True)
    engine = _engine(context.rank, trainer.source)
    if engine is not None:
        engine.close()
