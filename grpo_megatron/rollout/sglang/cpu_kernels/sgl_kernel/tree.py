"""Draft trees of speculative decoding: build, read back from a mask, verify greedily, verify by sampling."""

import torch


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    D, mode = draft_token_num, int(tree_mask_mode)
    if mode == 2:
        raise NotImplementedError("QLEN_ONLY_BITPACKING")
    par, sel, lens = parent_list.tolist(), selected_index.tolist(), verified_seq_len.tolist()
    ri, nt, ns = (t.view(-1) for t in (retrieve_index, retrieve_next_token, retrieve_next_sibling))
    mask = tree_mask.view(-1)
    prefix = 0
    for b, L in enumerate(lens):
        s, p = sel[b], par[b]
        parent = [-1] * D  # parent position of node i (0 = root)
        for i in range(1, D):
            tb = s[i - 1] // topk
            parent[i] = 0 if tb == 0 else (s.index(p[tb]) + 1 if p[tb] in s[: D - 1] else -1)
        nxt, sib = [-1] * D, [-1] * D
        for i in range(D - 1, 0, -1):
            q = parent[i]
            if q >= 0:
                sib[i] = nxt[q] if nxt[q] != -1 else sib[i]
                nxt[q] = i
        o = b * D
        ri[o : o + D] = torch.arange(o, o + D, dtype=ri.dtype)
        for i in range(D):
            if nxt[i] != -1:
                nt[o + i] = nxt[i]
            if sib[i] != -1:
                ns[o + i] = sib[i]
        base = D * D * b + prefix * D
        for i in range(D):
            start = base + (L + D) * i + L if mode == 0 else D * D * b + D * i
            row = [False] * D
            row[0] = True
            pos, cur = 0, i
            while cur > 0 and pos < depth:
                row[cur] = True
                pos += 1
                cur = parent[cur]
            mask[start : start + D] = torch.tensor(row, dtype=torch.bool).to(mask.dtype)
            positions[o + i] = L + pos
        prefix += L


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    bs, D = candidates.shape
    S = accept_index.shape[1]
    cand, ri, nt, ns = (
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
    )
    tp = target_predict.reshape(-1).tolist()
    for b in range(bs):
        last, n, cur = ri[b][0], 0, 0
        accept_index[b, 0] = last
        for _ in range(1, S):
            cur = nt[b][cur]
            while cur != -1 and cand[b][cur] != tp[last]:
                cur = ns[b][cur]
            if cur == -1:
                break
            predicts[last] = tp[last]
            n += 1
            last = ri[b][cur]
            accept_index[b, n] = last
        accept_token_num[b] = n
        predicts[last] = tp[last]


def reconstruct_indices_from_tree_mask(tree_mask, verified_seq_len, positions, ri, nt, ns, bs, D):
    m = tree_mask.view(-1)[: bs * D * D].view(bs, D, D).bool().tolist()
    P, R, N, S = [], [], [], []
    for b, L in enumerate(verified_seq_len.tolist()):
        anc = [[j for j in range(i) if m[b][i][j]] for i in range(D)]
        par = [max(a) if a else -1 for a in anc]
        for t in range(D):
            P.append(len(anc[t]) + L)
            R.append(b * D + t)
            N.append(next((k for k in range(t + 1, D) if t in anc[k]), -1))
            S.append(next((k for k in range(t + 1, D) if par[k] == par[t]), -1) if par[t] >= 0 else -1)
    for t, x in ((positions, P), (ri, R), (nt, N), (ns, S)):
        t.view(-1)[: bs * D] = torch.tensor(x, dtype=t.dtype)


def tree_speculative_sampling_target_only(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    draft_probs,
    threshold_single=1.0,
    threshold_acc=1.0,
    deterministic=True,
):
    """Lossless tree verification that only uses the target distribution (a draft token is accepted with its target probability)."""
    bs, D = candidates.shape
    S = accept_index.shape[1]
    cand, ri, nt, ns = (
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
    )
    for b in range(bs):
        last, n, cur, row = ri[b][0], 0, 0, 0
        accept_index[b, 0] = last
        coin = float(uniform_samples[b, 0])
        rejected = []
        for _ in range(1, S):
            nxt, acc, rejected = nt[b][cur], 0.0, []
            hit = False
            while nxt != -1:
                p = float(target_probs[b, row, cand[b][nxt]])
                acc += p
                if coin <= acc / threshold_acc or p >= threshold_single:
                    hit = True
                    break
                rejected.append(cand[b][nxt])
                nxt = ns[b][nxt]
            if not hit:
                break
            predicts[last] = cand[b][nxt]
            n += 1
            cur = row = nxt
            last = ri[b][cur]
            accept_index[b, n] = last
            coin = float(uniform_samples[b, cur])
            rejected = []
        accept_token_num[b] = n
        p = target_probs[b, row].clone()
        if rejected and n < S - 1:
            p[rejected] = 0
        c = p.cumsum(0)
        u = float(uniform_samples_for_final_sampling[b]) * float(c[-1])
        predicts[last] = int((c > u).nonzero()[0, 0]) if float(c[-1]) > 0 else int(target_probs[b, row].argmax())
