"""The policy's log-probs against HF transformers, in float32, on one rank."""

import pytest
import torch

from tests.building import ADVANTAGES, ANSWERS, PROMPT, answers_after, build_tiny_policy, pack_by_hand
from tests.tiny import make_tiny_llama

pytestmark = pytest.mark.numerics


def _read(chunks, batch, *, temperature=1.0, chunk_targets=None):  # noqa: ANN001, ANN202
    from grpo_megatron.models import forward

    model = chunks[0]
    inputs = forward.packed_inputs(batch, torch.device("cpu"))
    hidden = forward.hidden_states(model, inputs)
    if chunk_targets is None:
        return forward.read_targets(model, hidden, inputs, temperature=temperature)
    head = model.output_layer
    settings = forward.HeadSettings(head.vocab_size, head.head_dtype, head.tp_group, chunk_targets)
    chosen = hidden[:, 0].index_select(0, inputs.target_sources)
    return forward.target_logprobs(
        chosen,
        model.shared_embedding_or_output_weight(),
        inputs.target_ids,
        temperature=temperature,
        settings=settings,
    )


@pytest.fixture(scope="module")
def hf_model(tiny_llama):  # noqa: ANN001, ANN201
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)


@pytest.fixture(scope="module")
def chunks(tiny_llama, single_rank_groups):  # noqa: ANN001, ANN201
    return build_tiny_policy(tiny_llama, single_rank_groups)


@pytest.mark.parametrize("share_prefix", [True, False])
def test_logprobs_equal_those_of_hf(chunks, hf_model, share_prefix) -> None:  # noqa: ANN001
    expected = answers_after(hf_model, PROMPT, ANSWERS)
    read = _read(chunks, pack_by_hand(PROMPT, ANSWERS, advantages=ADVANTAGES, share_prefix=share_prefix))
    assert (read.logprobs - expected).abs().max() < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_the_generation_path_equal_those_of_hf(tmp_path, single_rank_groups, tied) -> None:  # noqa: ANN001
    from transformers import AutoModelForCausalLM

    folder = make_tiny_llama(tmp_path / "model", tie_embeddings=tied, seed=3)
    model = build_tiny_policy(folder, single_rank_groups)[0].eval()
    tokens = torch.tensor([[5, 9, 33, 71, 10, 11]])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        logits = model(tokens, torch.arange(6)[None], None, runtime_gather_output=True)
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_temperature_divides_the_logits_before_the_softmax(chunks, hf_model, temperature) -> None:  # noqa: ANN001
    """Case L1."""
    answer = ANSWERS[2]
    with torch.no_grad():
        logits = hf_model(torch.tensor([[*PROMPT, *answer]])).logits[0, len(PROMPT) - 1 : -1]
    expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    read = _read(chunks, pack_by_hand(PROMPT, [answer], advantages=[1.0]), temperature=temperature)
    assert (read.logprobs - expected).abs().max() < 1e-5


def test_entropy_is_that_of_the_whole_distribution(chunks, hf_model) -> None:  # noqa: ANN001
    answer = ANSWERS[2]
    with torch.no_grad():
        logprobs = hf_model(torch.tensor([[*PROMPT, *answer]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    read = _read(chunks, pack_by_hand(PROMPT, [answer], advantages=[1.0]))
    assert (read.entropy + (logprobs.exp() * logprobs).sum(-1)).abs().max() < 1e-5


def test_chunks_of_targets_change_neither_values_nor_gradients(chunks) -> None:  # noqa: ANN001
    batch = pack_by_hand(PROMPT, ANSWERS, advantages=ADVANTAGES)
    results = []
    for size in (1, 4, 1024):
        chunks[0].zero_grad(set_to_none=True)
        read = _read(chunks, batch, temperature=0.9, chunk_targets=size)
        (read.logprobs * torch.arange(1.0, 16.0)).sum().backward()
        weight = chunks[0].embedding.word_embeddings.weight
        results.append((read.logprobs.detach(), weight.grad.clone()))
    for logprobs, gradient in results[:-1]:
        assert torch.allclose(logprobs, results[-1][0], atol=1e-6)
        assert (gradient - results[-1][1]).abs().max() < 1e-5 * results[-1][1].abs().max()


def test_padded_rows_of_the_vocabulary_are_outside_the_softmax() -> None:
    """Case W7: weights of the padding must not matter, be they huge."""
    import torch.distributed as dist

    from grpo_megatron.models.logprobs import HeadSettings, target_logprobs

    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 8, generator=generator), torch.randn(12, 8, generator=generator)
    targets = torch.tensor([0, 3, 9, 9, 4])
    expected = (hidden @ weight[:10].t()).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    weight[10:] = 1000.0
    settings = HeadSettings(vocab_size=10, head_dtype="float32", group=dist.group.WORLD)
    read = target_logprobs(hidden, weight, targets, temperature=1.0, settings=settings)
    assert (read.logprobs - expected).abs().max() < 1e-6
    assert torch.isfinite(read.entropy).all()


def test_without_targets_there_is_a_gradient_of_zero(chunks) -> None:  # noqa: ANN001
    """Case L6: a rank without any response token takes part in the backward pass."""
    from tests.building import empty_micro_batch

    chunks[0].zero_grad(set_to_none=True)
    read = _read(chunks, empty_micro_batch())
    read.logprobs.sum().backward()
    assert all(parameter.grad.abs().max() == 0 for parameter in chunks[0].parameters())


def test_float32_head_of_a_bfloat16_model_is_exact_up_to_the_sum() -> None:
    from grpo_megatron.models.head import head_logits

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 576, generator=generator).bfloat16()
    weight = torch.randn(2500, 576, generator=generator).bfloat16()
    with torch.no_grad():
        logits = head_logits(hidden, weight, "float32")
    exact = hidden.double() @ weight.double().t()
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-4
    rounded = head_logits(hidden, weight, "model")
    assert (rounded.double() - exact).abs().max() > 1e-2  # what the float32 head is for
