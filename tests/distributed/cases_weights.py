"""Weights over ranks: loading, counting, exporting and publishing give the checkpoint's bytes on every layout."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from grpo_megatron.batch import MiniBatch
from grpo_megatron.families.counting import count_rank_parameters
from grpo_megatron.families.describe import describe
from grpo_megatron.forward.logprobs import LogprobScorer
from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.parallel.errors import RankFailure
from grpo_megatron.platform.device import current_platform
from grpo_megatron.weights.checksum import checksum
from grpo_megatron.weights.export import export_hf
from grpo_megatron.weights.gather import WeightWalk
from grpo_megatron.weights.load import load_hf
from grpo_megatron.weights.publish import Publisher
from grpo_megatron.weights.shared_memory import SharedMemorySink
from tests.building import ADVANTAGES, ANSWERS, PROMPT, answers_after, build_tiny_policy, pack_by_hand
from tests.distributed.harness import CaseContext, case
from tests.tiny import make_tiny_llama, make_tiny_qwen2
from tests.weights.receiving import DEADLINE_SECONDS, ReceiverProcess
from tools.convert_checkpoint import Conversion, hf_to_megatron, megatron_to_hf


def _llama(context: CaseContext, *, tie_embeddings: bool, num_key_value_heads: int = 4) -> Path:
    folder = context.shared_folder / f"weights-tied-{tie_embeddings}-groups-{num_key_value_heads}"
    if context.rank == 0 and not folder.exists():
        make_tiny_llama(folder, tie_embeddings=tie_embeddings, num_key_value_heads=num_key_value_heads)
    torch.distributed.barrier()
    return folder


def _qwen2(context: CaseContext) -> Path:
    """Two key-value heads and biases on query, key and value."""
    folder = context.shared_folder / "weights-qwen2"
    if context.rank == 0 and not folder.exists():
        make_tiny_qwen2(folder)
    torch.distributed.barrier()
    return folder


def _check_round_trip(context: CaseContext, source: Path, *, tensor: int = 1, pipeline: int = 1) -> None:
    """Load, count, export; the exported tensors are the source's to the last bit, and transformers reads them."""
    from transformers import AutoModelForCausalLM

    groups = context.groups(tensor=tensor, pipeline=pipeline)
    description = describe(source)
    chunks = build_tiny_policy(source, groups)
    allocated = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    counted = count_rank_parameters(description, tensor=tensor, pipeline=pipeline, stage=groups.stage)
    assert allocated == counted, (allocated, counted)
    target = context.folder / f"{source.name}-tensor-{tensor}-pipeline-{pipeline}"
    report = export_hf(chunks, description, target, source_folder=source, groups=groups, max_file_bytes=100_000)
    before = load_file(source / "model.safetensors")
    after = {name: t for path in target.glob("*.safetensors") for name, t in load_file(path).items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert after["model.embed_tokens.weight"].shape == (151, 64)
    assert report.num_bytes == sum(value.nbytes for value in before.values())
    if context.rank == 0:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).state_dict()
        assert all(torch.equal(model[name], value) for name, value in before.items())
    torch.distributed.barrier()


@case(world_size=2)
def round_trip_over_two_ranks(context: CaseContext) -> None:
    for tie_embeddings in (True, False):
        source = _llama(context, tie_embeddings=tie_embeddings)
        _check_round_trip(context, source, tensor=2)
        _check_round_trip(context, source, pipeline=2)
        _check_round_trip(context, source)


@case(world_size=4)
def round_trip_over_four_ranks(context: CaseContext) -> None:
    """Case W7: 151 tokens over 4 ranks come out as 151 rows; case W3: inner stages have neither embedding nor head."""
    for tie_embeddings in (True, False):
        source = _llama(context, tie_embeddings=tie_embeddings)
        _check_round_trip(context, source, tensor=4)
        _check_round_trip(context, source, tensor=2, pipeline=2)
        _check_round_trip(context, source, pipeline=4)


@case(world_size=4)
def fewer_key_value_heads_than_tensor_ranks(context: CaseContext) -> None:
    """Case W6: 8 query heads, 2 key-value heads, TP 4, with and without biases: exact round trip, HF's log-probs."""
    from transformers import AutoModelForCausalLM

    for source in (_llama(context, tie_embeddings=True, num_key_value_heads=2), _qwen2(context)):
        _check_round_trip(context, source, tensor=4)
        groups = context.groups(tensor=4)
        scorer = LogprobScorer(build_tiny_policy(source, groups), temperature=1.0, platform=current_platform())
        batch = MiniBatch((pack_by_hand(PROMPT, ANSWERS, advantages=ADVANTAGES),), 1, 1)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        with torch.no_grad():
            expected = answers_after(model, PROMPT, ANSWERS)
        difference = (scorer.logprobs(batch)[0] - expected).abs().max().item()
        assert difference < 1e-5, (source.name, difference)


@case(world_size=2)
def a_damaged_file_is_refused_on_all_ranks(context: CaseContext) -> None:
    """Only the second stage reads the head: the first hears of it all the same."""
    source = _llama(context, tie_embeddings=False)
    groups = context.groups(pipeline=2)
    chunks = build_tiny_policy(source, groups)
    folder = context.folder / "damaged"
    if context.rank == 0:
        shutil.copytree(source, folder)
    torch.distributed.barrier()
    if context.rank == 1:
        # This rank alone sees a configuration that differs, as with a file system that is not up to date.
        config = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 0.5}
        folder = context.folder / "other"
        shutil.copytree(source, folder)
        (folder / "config.json").write_text(json.dumps(config))
    try:
        load_hf(chunks, describe(source), folder, groups=groups)
    except ValueError as refusal:
        assert "norm_epsilon: the model has 1e-05, the checkpoint 0.5" in str(refusal)
    else:
        raise AssertionError("loaded")


class _Receiver(ReceiverProcess):
    """Counts how often its sink was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.num_aborts = 0
        abort = self.sink.abort

        def counted() -> None:
            self.num_aborts += 1
            abort()

        self.sink.abort = counted  # type: ignore[method-assign]


def _fail_once(sink: SharedMemorySink, name: str) -> None:
    plain = getattr(sink, name)

    def fail(*arguments: object) -> None:
        setattr(sink, name, plain)
        raise OSError("the engine of this rank said no")

    setattr(sink, name, fail)


def _check_publishing(context: CaseContext, source: Path, *, tensor: int, pipeline: int) -> None:
    groups = context.groups(tensor=tensor, pipeline=pipeline)
    chunks = build_tiny_policy(source, groups)
    receiver = _Receiver() if groups.is_model_leader else None
    sink = None if receiver is None else receiver.sink
    publisher = Publisher(
        WeightWalk(chunks, describe(source), groups),
        sink,
        groups,
        bucket_bytes=30_000,  # the embedding is larger, one layer's largest tensor smaller
    )
    stored = load_file(source / "model.safetensors")
    report = publisher.publish(1)
    assert (report.version, report.num_compared) == (1, 8)
    sharded = tensor * pipeline > 1
    assert (report.peak_extra_bytes > publisher.num_buffer_bytes) == sharded
    assert report.num_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert publisher.compare_all(1) == len(stored)
    if sink is not None:
        assert sink.checksums(list(stored)) == {name: checksum(value) for name, value in stored.items()}
    _check_failures(context, groups, publisher, receiver, report.num_buckets)
    # What the optimizer would do: other values are another version.
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.mul_(1.5)
    publisher.publish(9, compare="all")
    if receiver is not None and sink is not None:
        changed = {name: checksum(value * 1.5) for name, value in stored.items()}
        assert sink.checksums(list(stored)) == changed
        assert receiver.end() == 0
    torch.distributed.barrier()


def _check_failures(context: CaseContext, groups, publisher: Publisher, receiver, num_buckets: int) -> None:  # noqa: ANN001
    """Case W4: one sink of all fails; every rank hears why, every sink is aborted, the next publish works."""
    assert num_buckets > 2
    last_leader = max(gather_objects(context.rank if receiver else -1, groups.world))
    for version, name in enumerate(("begin", "put", "compare", "commit", "version"), start=2):
        if context.rank == last_leader:
            _fail_once(receiver.sink, name)
        try:
            publisher.publish(version)
        except RankFailure as failure:
            assert f"rank {last_leader}: OSError: the engine of this rank said no" in str(failure), failure
        else:
            raise AssertionError(f"published although {name} failed")
        if receiver is not None:
            assert receiver.num_aborts == version - 1
            assert receiver.sink.version() == -1
        torch.distributed.barrier()
    publisher.publish(7)
    if receiver is not None:
        assert receiver.sink.version() == 7
    # Only the last engine of all gets the next version; the others keep theirs.
    publisher.publish(8, here=context.rank == last_leader)
    if receiver is not None:
        assert receiver.sink.version() == (8 if context.rank == last_leader else 7)


@case(world_size=4)
def publish_from_tensor_and_pipeline_parallel_ranks_to_another_process(context: CaseContext) -> None:
    _check_publishing(context, _llama(context, tie_embeddings=True), tensor=2, pipeline=2)


@case(world_size=2)
def publish_from_two_replicas_to_two_processes(context: CaseContext) -> None:
    _check_publishing(context, _llama(context, tie_embeddings=False), tensor=1, pipeline=1)


@case(world_size=2)
def publish_through_a_sink_whose_receiver_was_killed(context: CaseContext) -> None:
    source = _llama(context, tie_embeddings=True)
    groups = context.groups(pipeline=2)
    receiver = _Receiver() if groups.is_model_leader else None
    sink = None if receiver is None else receiver.sink
    walk = WeightWalk(build_tiny_policy(source, groups), describe(source), groups)
    publisher = Publisher(walk, sink, groups)
    publisher.publish(1)
    if receiver is not None:
        receiver.process.kill()
        receiver.process.join(DEADLINE_SECONDS)
    try:
        publisher.publish(2)
    except RankFailure as failure:
        assert "the weight receiver is gone" in str(failure)
    else:
        raise AssertionError("published to nobody")


@case(world_size=2)
def conversion_to_megatron_core_and_back_in_another_layout(context: CaseContext) -> None:
    """Written with TP 2, read with PP 2: the same bytes; and a noted checksum that is no longer true is refused."""
    source = _llama(context, tie_embeddings=True)
    there, back = context.folder / "converted", context.folder / "back"
    forward = Conversion("hf-to-megatron", source, there, source, describe(source), "float32", tensor=2, pipeline=1)
    outcome = hf_to_megatron(forward, context.groups(tensor=2))
    stored = load_file(source / "model.safetensors")
    assert (outcome.num_tensors, outcome.num_bytes) == (len(stored), sum(value.nbytes for value in stored.values()))
    backward = Conversion("megatron-to-hf", there, back, there, describe(there), "float32", tensor=1, pipeline=2)
    megatron_to_hf(backward, context.groups(pipeline=2))
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert {path.name for path in back.iterdir()} == {path.name for path in source.iterdir()}
    torch.distributed.barrier()
    if context.rank == 0:
        note = json.loads((there / "conversion.json").read_text())
        note["checksums"]["model.norm.weight"] += 1
        (there / "conversion.json").write_text(json.dumps(note))
    torch.distributed.barrier()
    try:
        megatron_to_hf(replace(backward, target=context.folder / "again"), context.groups(pipeline=2))
    except RankFailure as failure:
        assert "1 tensors differ" in str(failure) and "model.norm.weight" in str(failure)
    else:
        raise AssertionError("a checkpoint that is not what was converted was exported")
    assert not (context.folder / "again").exists()
