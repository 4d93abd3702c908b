"""SGLang's kernels in torch, each against hand-computed numbers or an implementation of its own."""

import itertools
import math
import struct

import pytest
import torch

from grpo_megatron.rollout.sglang.cpu_kernels.grpo_megatron_sglang_cpu import head, sampling, slots, trees

pytestmark = pytest.mark.unit


def test_slots_are_read_and_written_along_each_requests_row() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    rows, starts, ends = torch.tensor([2, 0, 1]), torch.tensor([3, 5, 0]), torch.tensor([5, 5, 1])
    found = torch.zeros(3, dtype=torch.int64)
    slots.assign_extend_cache_locs(rows, table, starts, ends, found, 10)
    assert found.tolist() == [23, 24, 10]
    slots.assign_req_to_token_pool(rows, table, starts, ends, torch.tensor([7, 8, 9]), 10)
    assert (table[2, 3:5].tolist(), table[1, 0].item(), table[0, 5].item()) == ([7, 8], 9, 5)
    drafts = torch.zeros(8, dtype=torch.int64)
    slots.assign_draft_cache_locs_contiguous(torch.tensor([3, 1]), table, torch.tensor([4, 6]), drafts, 10, 2, 2)
    assert drafts.tolist() == [34, 35, 36, 37, 16, 17, 18, 19]
    made = slots.build_draft_decode_metadata(table, torch.tensor([3, 1]), torch.tensor([1, 2]), 2, 2, 10)
    assert made.tolist() == [[30, 31, 32, 0], [30, 33, 34, 0], [9, 11, 12, 13], [9, 11, 14, 15]]


def test_accepted_tokens_are_packed_and_rotated() -> None:
    bonus, packed = torch.zeros(2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    slots.fill_bonus_tokens(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([3, 1]), bonus, 3)
    assert bonus.tolist() == [3, 4]
    slots.fill_accept_out_cache_loc(torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.arange(10, 16), packed)
    assert packed.tolist() == [10, 12, 13, 0]
    tokens = torch.tensor([1, 2, 3, 4, 5])
    slots.rotate_input_ids(tokens, torch.tensor([0, 3, 5]), torch.tensor([3, 2, 0]), torch.tensor([8, 9, 7]))
    assert tokens.tolist() == [2, 3, 8, 5, 9]
    slots.rotate_input_ids(tokens, torch.tensor([0]), torch.tensor([3]), torch.tensor([6]), torch.tensor([1]))
    assert tokens.tolist() == [3, 6, 8, 5, 9]


def test_slots_move_in_every_layer_even_onto_each_other() -> None:
    layers = [torch.arange(12.0).view(4, 3), torch.arange(100.0, 108.0).view(4, 2)]
    before = [layer.clone() for layer in layers]
    addresses = torch.tensor([layer.data_ptr() for layer in layers])
    slots.copy_all_layer_kv_cache(addresses, torch.tensor([12, 8]), torch.tensor([1, 2]), torch.tensor([0, 1]))
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer, old[[0, 0, 1, 3]])


class Tree:
    """Two branches per node: 0 -> 1, 0 -> 2, 1 -> 3 for a request of 4 tokens; a chain for one of 7."""

    num, depth = 4, 3
    # Candidates are numbered level by level: 0, 1 below the root, then 2, 3 below candidate 0, 4, 5 below candidate 1.
    chosen = torch.tensor([[0, 1, 2], [1, 4, 8]])
    parents = torch.tensor([[-1, 0, 1, 2, 3], [-1, 0, 1, 3, 4]])

    def __init__(self) -> None:
        self.mask = torch.zeros(2 * 16, dtype=torch.bool)
        self.positions = torch.zeros(8, dtype=torch.int64)
        self.links = [torch.full((2, 4), -1) for _ in range(3)]


def test_a_draft_tree_is_built_as_drawn_and_read_back_from_its_mask() -> None:
    tree = Tree()
    lengths = torch.tensor([4, 7])
    trees.build_tree(tree.parents, tree.chosen, lengths, tree.mask, tree.positions, *tree.links, 2, tree.depth, 4, 1)
    index, child, sibling = (link.tolist() for link in tree.links)
    assert index == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert child == [[1, 3, -1, -1], [1, 2, 3, -1]]
    assert sibling == [[-1, 2, -1, -1], [-1, -1, -1, -1]]
    assert tree.positions.tolist() == [4, 5, 5, 6, 7, 8, 9, 10]
    first = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    second = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert tree.mask.view(2, 4, 4).int().tolist() == [first, second]
    again = Tree()
    trees.read_tree_mask(tree.mask, lengths, again.positions, *again.links, 2, 4)
    assert torch.equal(again.positions, tree.positions)
    assert all(torch.equal(one, other) for one, other in zip(again.links, tree.links, strict=True))
    full = torch.ones(4 * 4 + 7 * 4 + 2 * 16, dtype=torch.bool)
    trees.build_tree(tree.parents, tree.chosen, lengths, full, again.positions, *again.links, 2, tree.depth, 4, 0)
    assert full[: 4 * 8].view(4, 8).int().tolist() == [[1] * 4 + row for row in first]
    assert full[4 * 8 :].view(4, 11).int().tolist() == [[1] * 7 + row for row in second]


def test_greedy_verification_follows_the_targets_own_choices() -> None:
    tree = Tree()
    trees.build_tree(
        tree.parents, tree.chosen, torch.tensor([4, 7]), tree.mask, tree.positions, *tree.links, 2, 3, 4, 1
    )
    drafts = torch.tensor([[50, 60, 61, 62], [50, 70, 71, 72]])
    wanted = torch.tensor([[61, 0, 99, 0], [70, 71, 5, 6]])  # the fork's second branch; a chain up to 71
    predicts, accepted, count = torch.zeros(8), torch.full((2, 4), -1), torch.zeros(2)
    trees.verify_greedily(predicts, accepted, count, drafts, *tree.links, wanted)
    assert count.tolist() == [1, 2]
    assert accepted.tolist() == [[0, 2, -1, -1], [4, 5, 6, -1]]
    assert predicts[[0, 2, 4, 5, 6]].tolist() == [61, 99, 70, 71, 5]


def test_sampled_verification_gives_every_token_the_targets_probability() -> None:
    """All uniform numbers on a grid: the first two tokens have the target's joint distribution up to the grid."""
    tree, num_tokens = Tree(), 5
    trees.build_tree(
        tree.parents, tree.chosen, torch.tensor([4, 7]), tree.mask, tree.positions, *tree.links, 2, 3, 4, 1
    )
    links = [link[:1] for link in tree.links]
    drafts = torch.tensor([[0, 1, 2, 3]])  # node 1 is token 1, node 2 token 2, node 3 (below node 1) token 3
    target = torch.tensor([[1, 4, 3, 2, 2], [3, 1, 1, 5, 2], [2, 2, 2, 3, 3], [1, 1, 1, 1, 8]]) / 12.0
    target[0] /= target[0].sum()
    first, pairs = torch.zeros(num_tokens), torch.zeros(num_tokens, num_tokens)
    grid = [[(step + 0.5) / steps for step in range(steps)] for steps in (24, 8, 16)]
    for coin, below, last in itertools.product(*grid):
        predicts, accepted, count = torch.zeros(4, dtype=torch.int64), torch.full((1, 3), -1), torch.zeros(1)
        coins = torch.tensor([[coin, below, 0.5, 0.5]])
        trees.verify_by_sampling(
            predicts, accepted, count, drafts, *links, coins, torch.tensor([last]), target[None], None
        )
        token = int(predicts[0])
        first[token] += 1
        if count[0] >= 1:
            pairs[token, int(predicts[accepted[0, 1]])] += 1
    torch.testing.assert_close(first / first.sum(), target[0], atol=1 / 24, rtol=0)
    for node, token in ((1, 1), (2, 2)):  # given that the draft was taken
        torch.testing.assert_close(pairs[token] / pairs[token].sum(), target[node], atol=1 / 8, rtol=0)


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 of whole words with seed 0, from its published definition."""

    def rotate(word: int, bits: int) -> int:
        return (word << bits | word >> (32 - bits)) & 0xFFFFFFFF

    state = 0
    for (word,) in struct.iter_unpack("<I", data):
        state ^= rotate(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        state = rotate(state, 13) * 5 + 0xE6546B64 & 0xFFFFFFFF
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & 0xFFFFFFFF
    return state ^ state >> 16


def test_the_hash_is_murmur3_of_seed_position_and_column() -> None:
    assert murmur3(b"test") == 0xBA6BD213  # a published test vector
    seeds, positions, columns = [0, 7, 2**40 + 3, -5], [0, 12, 99, 3], [0, 1, 49151]
    found = sampling.murmur_hash(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    expected = [
        [murmur3(struct.pack("<QII", seed % 2**64, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert found.tolist() == expected


def splitmix64(state: int, count: int) -> list[int]:
    numbers, mask = [], 2**64 - 1
    for _ in range(count):
        state = state + 0x9E3779B97F4A7C15 & mask
        mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        numbers.append(mixed ^ mixed >> 31)
    return numbers


def test_uniform_numbers_are_the_splitmix_sequence_of_the_hashed_seed() -> None:
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # a published test vector
    seeds, positions = [3, -1, 2**62, 3], [0, 5, 1000, 1]
    found = sampling.uniform_numbers(torch.tensor(seeds), torch.tensor(positions)).tolist()
    for number, seed, position in zip(found, seeds, positions, strict=True):
        start = splitmix64(seed % 2**64, 1)[0]
        assert number == (splitmix64(start, position + 1)[-1] >> 11) / 2**53


def test_uniform_numbers_of_neighbouring_seeds_and_positions_are_independent() -> None:
    seeds, positions = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
    table = sampling.uniform_numbers(seeds.flatten(), positions.flatten()).view(200, 200)
    assert table.min() >= 0 and table.max() < 1 and table.unique().numel() == 200 * 200
    counts = torch.histc(table, bins=50, min=0, max=1)
    assert ((counts - 800) ** 2 / 800).sum() < 49 + 5 * math.sqrt(2 * 49)
    for one, other in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1])):
        correlation = ((one - 0.5) * (other - 0.5)).mean() * 12
        assert abs(correlation) < 5 / 200


def test_a_request_without_a_seed_gets_one_from_its_name() -> None:
    made = sampling.seeds_of([None, 7, None, None, 2**64 - 1, -1], ["a", "a", "b", "a", "c", "d"]).tolist()
    assert made[1] == 7 and made[0] == made[3] and len({made[0], made[2], 7}) == 3
    assert made[4] == made[5] == -1  # modulo 2^64


@pytest.mark.parametrize("columns", [5, 256, 1000])
def test_evenly_spread_numbers_draw_every_token_as_often_as_its_weight_says(columns: int) -> None:
    torch.manual_seed(columns)
    weights = torch.rand(columns) ** 4
    weights[:: max(2, columns // 7)] = 0
    num = 20_000
    uniforms = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    drawn = torch.cat([sampling.draw(weights.expand(len(part), -1), part) for part in uniforms.split(1000)])
    expected = weights.double() / weights.double().sum() * num
    counts = torch.bincount(drawn, minlength=columns)
    assert (counts - expected).abs().max() <= 1.01
    assert counts[weights == 0].sum() == 0


def test_the_ends_of_the_unit_interval_draw_no_token_of_weight_zero() -> None:
    weights = torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.7, 0.0]]).expand(3, -1)
    assert sampling.draw(weights, torch.tensor([0.0, 0.2999, 1 - 2**-53], dtype=torch.float64)).tolist() == [2, 2, 4]


def test_draws_over_a_large_vocabulary_are_exact_to_a_millionth() -> None:
    torch.manual_seed(0)
    weights = (torch.randn(1, 49152) * 4).softmax(-1).expand(2000, -1)
    uniforms = torch.rand(2000, dtype=torch.float64)
    drawn = sampling.draw(weights, uniforms)
    cumulative = weights[0].double().cumsum(0) / weights[0].double().sum()
    upper = cumulative[drawn]
    lower = upper - weights[0].double()[drawn] / weights[0].double().sum()
    assert ((uniforms > lower - 1e-7) & (uniforms < upper + 1e-7)).all()
    assert abs(float(sampling.sum_of_rows(weights[:1])) - float(weights[0].double().sum())) < 2e-8


def test_top_k_top_p_and_min_p_leave_what_they_should() -> None:
    row = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1])
    limits = [  # top_k, top_p, min_p, what is left
        (2**30, 1.0, 0.0, [0, 1, 2, 3, 4]),
        (2, 1.0, 0.0, [1, 2]),  # of equal ones the first
        (2**30, 0.61, 0.0, [1, 2, 3]),
        (2**30, 0.59, 0.0, [1, 2]),
        (2**30, 1.0, 0.45, [1, 2, 3]),
        (3, 0.3, 0.1, [1]),
        (0, 0.0, 1.0, [1]),  # never nothing
    ]
    top_ks, top_ps, min_ps, left = zip(*limits, strict=True)
    kept = sampling.truncate_(
        row.repeat(len(limits), 1),
        top_ks=torch.tensor(top_ks),
        top_ps=torch.tensor(top_ps),
        min_ps=torch.tensor(min_ps),
    )
    for result, columns in zip(kept, left, strict=True):
        assert result.nonzero()[:, 0].tolist() == columns
        assert torch.equal(result[columns], row[columns])


def test_renormalized_probabilities_are_those_worked_out_by_hand() -> None:
    rows = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]])
    top_k = sampling.renormalize_top_k(rows, torch.tensor([2, 1]))
    torch.testing.assert_close(top_k, torch.tensor([[0, 4 / 7, 0, 3 / 7], [0.25] * 4]))  # ties stay
    top_p = sampling.renormalize_top_p(rows, torch.tensor([0.69, 0.5]))
    torch.testing.assert_close(top_p, torch.tensor([[0, 4 / 7, 0, 3 / 7], [0.5, 0.5, 0, 0]]))


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
def test_logits_of_bfloat16_weights_are_not_rounded(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    hidden, weight = torch.randn(num_tokens, 96).bfloat16(), torch.randn(2500, 96).bfloat16()
    before = torch.backends.mkldnn.matmul.fp32_precision
    logits = head.float32_logits(hidden, weight)
    assert logits.dtype == torch.float32 and logits.shape == (num_tokens, 2500)
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().T, atol=2e-5, rtol=0)
    assert torch.backends.mkldnn.matmul.fp32_precision == before
