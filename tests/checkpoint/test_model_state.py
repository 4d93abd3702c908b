"""What is saved is what comes back, and training goes on as if nothing had happened.

Not tested here: other layouts (see tests/distributed/cases_checkpoint.py) and the fused Adam of Transformer Engine.
"""

from pathlib import Path

import psutil
import pytest
import torch

from grpo_megatron.checkpoint.base import CheckpointError, OneProcess
from grpo_megatron.checkpoint.model_state import ModelState
from grpo_megatron.trainer.optimizer import inner_optimizers
from tests.checkpoint.policies import TinyPolicy, assert_same_bits
from tests.tiny import make_tiny_llama

pytestmark = pytest.mark.numerics


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shapes as `tiny_llama` with other weights."""
    return make_tiny_llama(tmp_path_factory.mktemp("other"), seed=7)


def save(policy: TinyPolicy, folder: Path) -> Path:
    folder.mkdir()
    policy.state.save(folder, OneProcess())
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_bit_by_bit_after_a_load(dtype, tiny_llama, other_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    policy = TinyPolicy(tiny_llama, single_rank_groups, dtype=dtype)
    policy.train(range(2))
    saved = policy.tensors()
    folder = save(policy, tmp_path / "model")
    undisturbed = policy.train(range(2, 4))

    resumed = TinyPolicy(other_llama, single_rank_groups, dtype=dtype)
    resumed.train(range(5))  # states exist already, with another step count
    resumed.state.load(folder)
    assert_same_bits(resumed.tensors(), saved)
    assert resumed.train(range(2, 4)) == undisturbed
    assert_same_bits(resumed.tensors(), policy.tensors())


def test_a_policy_that_never_stepped_can_be_saved_and_loaded(
    tiny_llama, other_llama, single_rank_groups, tmp_path
) -> None:  # noqa: ANN001
    policy = TinyPolicy(tiny_llama, single_rank_groups)
    folder = save(policy, tmp_path / "model")
    resumed = TinyPolicy(other_llama, single_rank_groups)
    resumed.state.load(folder)
    assert resumed.train(range(3)) == policy.train(range(3))
    assert_same_bits(resumed.tensors(), policy.tensors())


def test_after_a_load_every_parameter_counts_its_own_steps(tiny_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    policy = TinyPolicy(tiny_llama, single_rank_groups)
    policy.train(range(3))
    policy.state.load(save(policy, tmp_path / "model"))
    (optimizer,) = inner_optimizers(policy.trainer.optimizer)
    steps = [state["step"] for state in optimizer.state.values()]
    assert len(steps) == 4 * 6 + 2  # layers x (2 norms, qkv, projection, fc1, fc2), embedding, final norm
    assert len({step.data_ptr() for step in steps}) == len(steps)
    policy.train(range(3, 4))
    assert {float(step) for step in steps} == {4.0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_with_learning_rate_zero_leaves_loaded_weights_alone(
    dtype, tiny_llama, other_llama, single_rank_groups, tmp_path
) -> None:  # noqa: ANN001
    """Case M6. Weights from elsewhere count only once the masters were refreshed from them."""
    source = TinyPolicy(other_llama, single_rank_groups, dtype=dtype)
    wanted = {name: p.detach().clone() for name, p in source.chunks[0].named_parameters()}
    policy = TinyPolicy(tiny_llama, single_rank_groups, dtype=dtype)
    weights_only = ModelState(source.chunks, None)
    folder = tmp_path / "model"
    folder.mkdir()
    weights_only.save(folder, OneProcess())
    ModelState(policy.trainer.wrapped, None).load(folder)
    policy.state.refresh_masters()
    policy.train(range(1), learning_rate=0.0)
    for name, parameter in policy.chunks[0].named_parameters():
        assert torch.equal(parameter, wanted[name]), name


def test_without_fresh_masters_a_bfloat16_step_brings_the_old_weights_back(
    tiny_llama, other_llama, single_rank_groups
) -> None:  # noqa: ANN001
    """What `refresh_masters` is for."""
    policy = TinyPolicy(tiny_llama, single_rank_groups, dtype="bfloat16")
    before = policy.tensors()
    for parameter in policy.chunks[0].parameters():
        parameter.data.zero_()
    policy.train(range(1), learning_rate=0.0)
    name = "embedding.word_embeddings.weight"
    assert torch.equal(policy.tensors()[name], before[name])


def test_the_learning_rate_and_decay_of_the_configuration_count_after_a_load(
    tiny_llama, single_rank_groups, tmp_path
) -> None:  # noqa: ANN001
    """Case C5: the schedule is a function of the step; what the checkpoint remembers of it must not come back."""
    policy = TinyPolicy(tiny_llama, single_rank_groups, learning_rate=1e-3, weight_decay=0.5, adam_beta2=0.5)
    policy.train(range(1))
    folder = save(policy, tmp_path / "model")
    resumed = TinyPolicy(tiny_llama, single_rank_groups, learning_rate=2e-4, weight_decay=0.0, adam_beta2=0.95)
    resumed.state.load(folder)
    for group in resumed.trainer.optimizer.param_groups:
        assert group["lr"] == 2e-4 and group["weight_decay"] == 0.0 and group["betas"] == (0.9, 0.95)


def test_saving_starts_no_process(tiny_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    """megatron-core's own writer forks two and spawns a manager; those hang, or outlive a killed rank."""
    policy = TinyPolicy(tiny_llama, single_rank_groups)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    save(policy, tmp_path / "model")
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_the_estimate_of_needed_space_is_near_the_truth(tiny_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    policy = TinyPolicy(tiny_llama, single_rank_groups, dtype="bfloat16")
    folder = save(policy, tmp_path / "model")
    written = sum(path.stat().st_size for path in folder.iterdir())
    numbers = sum(p.numel() for p in policy.chunks[0].parameters())
    assert policy.state.num_bytes() == 14 * numbers  # 2 bytes of bfloat16, 4 each of master and two moments
    assert policy.state.num_bytes() < written < policy.state.num_bytes() + (1 << 20)


def test_a_checkpoint_of_another_model_is_refused_by_name(
    tiny_llama, single_rank_groups, tmp_path, tmp_path_factory
) -> None:  # noqa: ANN001
    policy = TinyPolicy(tiny_llama, single_rank_groups)
    folder = save(policy, tmp_path / "model")
    wider = make_tiny_llama(tmp_path_factory.mktemp("wider"), ffn_hidden_size=128)
    with pytest.raises(CheckpointError, match=r"does not fit this model: .*mlp.linear_fc"):
        TinyPolicy(wider, single_rank_groups).state.load(folder)
    deeper = make_tiny_llama(tmp_path_factory.mktemp("deeper"), num_layers=5)
    with pytest.raises(CheckpointError, match=r"does not fit this model: .*layers"):
        TinyPolicy(deeper, single_rank_groups).state.load(folder)


def test_weights_without_optimizer_are_refused_for_training(tiny_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    policy = TinyPolicy(tiny_llama, single_rank_groups)
    folder = tmp_path / "model"
    folder.mkdir()
    ModelState(policy.chunks, None).save(folder, OneProcess())
    with pytest.raises(CheckpointError, match="weights but no optimizer"):
        policy.state.load(folder)


def test_saving_what_is_off_the_device_is_an_error_and_not_a_crash(tiny_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    policy = TinyPolicy(tiny_llama, single_rank_groups)
    policy.train(range(1))
    moments = next(iter(inner_optimizers(policy.trainer.optimizer)[0].state.values()))["exp_avg"]
    moments.untyped_storage().resize_(0)
    with pytest.raises(AssertionError, match="optimizer exp_avg is off the device"):
        save(policy, tmp_path / "model")
