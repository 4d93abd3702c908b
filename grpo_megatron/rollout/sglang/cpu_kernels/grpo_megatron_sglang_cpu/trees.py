"""Draft trees of speculative decoding: build one, read it back from a mask, verify it greedily or by sampling.

A tree of a request has `num` nodes, node 0 is the last sampled token. Links are node numbers, -1 is none. Names of
arguments are those of SGLang's kernels, which call some of them by name.
"""

import torch

_FULL_MASK, _TREE_ONLY = 0, 1  # sglang TreeMaskMode


def build_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill links, positions and attention mask of every request's tree; the links start as -1."""
    num, mode = draft_token_num, int(tree_mask_mode)
    if mode not in (_FULL_MASK, _TREE_ONLY):
        raise ValueError(f"tree mask mode {mode} is not supported without a GPU")
    mask, before = tree_mask.view(-1), 0
    parents_of_candidates, chosen = parent_list.tolist(), selected_index.tolist()
    for request, length in enumerate(verified_seq_len.tolist()):
        parents = _parents(chosen[request], parents_of_candidates[request], topk, num)
        next_token, next_sibling = _links(parents)
        retrieve_index[request] = torch.arange(request * num, (request + 1) * num)
        retrieve_next_token[request] = torch.tensor(next_token)
        retrieve_next_sibling[request] = torch.tensor(next_sibling)
        for node in range(num):
            path = _path(node, parents, depth)
            visible = torch.zeros(num, dtype=torch.bool)
            visible[[0, *path]] = True
            if mode == _FULL_MASK:  # rows of tokens and tree, one request after the other
                start = num * num * request + before * num + (length + num) * node + length
            else:
                start = num * num * request + num * node
            mask[start : start + num] = visible.to(mask.dtype)
            positions[request * num + node] = length + len(path)
        before += length


def _parents(chosen: list[int], parents_of_candidates: list[int], topk: int, num: int) -> list[int]:
    """Parent of every node, -1 for the root and for a node whose parent was not chosen."""
    parents = [-1]
    for candidate in chosen[: num - 1]:
        branch = candidate // topk
        if branch == 0:
            parents.append(0)
        else:
            parent = parents_of_candidates[branch]
            parents.append(chosen.index(parent) + 1 if parent in chosen[: num - 1] else -1)
    return parents


def _links(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node, in ascending order."""
    first_child, next_sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        if parent >= 0:
            next_sibling[node] = first_child[parent]
            first_child[parent] = node
    return first_child, next_sibling


def _path(node: int, parents: list[int], depth: int) -> list[int]:
    """The nodes from this one up to the root, without the root."""
    path: list[int] = []
    while node > 0 and len(path) < depth:
        path.append(node)
        node = parents[node]
    return path


def read_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Links and positions from masks [batch, num, num] in which a node sees itself and its ancestors."""
    num = draft_token_num
    masks = tree_mask.view(-1)[: batch_size * num * num].view(batch_size, num, num).bool().tolist()
    tables: tuple[list[int], ...] = ([], [], [], [])
    for request, length in enumerate(verified_seq_len.tolist()):
        ancestors = [[above for above in range(node) if masks[request][node][above]] for node in range(num)]
        parents = [max(above, default=-1) for above in ancestors]
        next_token, next_sibling = _links(parents)
        tables[0].extend(length + len(above) for above in ancestors)
        tables[1].extend(range(request * num, (request + 1) * num))
        tables[2].extend(next_token)
        tables[3].extend(next_sibling)
    targets = (positions, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    for target, values in zip(targets, tables, strict=True):
        target.view(-1)[: len(values)] = torch.tensor(values, dtype=target.dtype)


def verify_greedily(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow the branch on which every draft is the target's own choice; the target's next token comes after it."""
    tokens, places, children, siblings = (
        table.tolist() for table in (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    )
    wanted = target_predict.reshape(-1).tolist()
    for request in range(len(tokens)):
        last, node, accepted = places[request][0], 0, 0
        accept_index[request, 0] = last
        for _ in range(1, accept_index.size(1)):
            node = children[request][node]
            while node != -1 and tokens[request][node] != wanted[last]:
                node = siblings[request][node]
            if node == -1:
                break
            predicts[last] = wanted[last]
            accepted += 1
            last = places[request][node]
            accept_index[request, accepted] = last
        accept_token_num[request] = accepted
        predicts[last] = wanted[last]


def verify_by_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept drafts so that every token has the target's distribution; `target_probs` is [batch, num, vocabulary].

    Siblings are taken in turn while one uniform number is below the sum of their probabilities. If none is taken, the
    next token comes from what is left of the distribution.
    """
    tables = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    for request, (tokens, places, children, siblings) in enumerate(zip(*(t.tolist() for t in tables), strict=True)):
        coins, probabilities = uniform_samples[request].tolist(), target_probs[request]
        node, accepted, last = 0, 0, places[0]
        rejected: list[int] = []
        accept_index[request, 0] = last
        while accepted < accept_index.size(1) - 1:
            coin, reached, rejected = coins[node], 0.0, []
            child = children[node]
            while child != -1:
                probability = float(probabilities[node, tokens[child]])
                reached += probability
                if coin < reached / threshold_acc or probability >= threshold_single:
                    break
                rejected.append(tokens[child])
                child = siblings[child]
            if child == -1:
                break
            predicts[last] = tokens[child]
            accepted, node, last, rejected = accepted + 1, child, places[child], []
            accept_index[request, accepted] = last
        accept_token_num[request] = accepted
        rest = probabilities[node].to(torch.float64, copy=True)
        rest[rejected] = 0
        predicts[last] = _choose(rest, probabilities[node], float(uniform_samples_for_final_sampling[request]))


def _choose(rest: torch.Tensor, probabilities: torch.Tensor, uniform: float) -> int:
    cumulative = rest.cumsum(0)
    if float(cumulative[-1]) <= 0:  # rounding left nothing
        return int(probabilities.argmax())
    return int((cumulative > uniform * cumulative[-1]).nonzero()[0, 0])
