"""SGLang's sampler for a CPU: every draw is a function of the request's seed and the token's position."""

from typing import Any

import torch
from sglang.srt.layers import sampler as upstream
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from . import sampling


class SeededSampler(upstream.Sampler):
    """One uniform number per row and one softmax, which gives the log-prob of the drawn token too.

    Upstream hashes (seed, position, column) for every column of the vocabulary instead, only under deterministic
    inference, and refuses seeds beside min-p. Log-probs are those before top-k, top-p and min-p, as upstream's.
    """

    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[Any],
        positions: torch.Tensor,
        *,
        logprob_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """int32 [rows]; overwrites the logits and writes log-probs into `logits_output`."""
        special = (
            logprob_logits is not None
            or sampling_info.sampling_mask_batch_indices is not None
            or upstream.SGLANG_RETURN_ORIGINAL_LOGPROB
            or (return_logprob and (any(top_logprobs_nums) or any(ids is not None for ids in token_ids_logprobs)))
        )
        if sampling_info.is_all_greedy or special:
            return super().forward(
                logits_output,
                sampling_info,
                return_logprob,
                top_logprobs_nums,
                token_ids_logprobs,
                positions,
                logprob_logits=logprob_logits,
            )
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info).float()
        if (sampling_info.temperatures != 1).any():
            logits.div_(sampling_info.temperatures)
        probabilities = torch.softmax(logits, dim=-1)
        if not return_logprob:
            token_ids = self._draw(probabilities, logits, sampling_info, positions)
        else:
            total = sampling.sum_of_rows(probabilities).log()
            token_ids = self._draw(probabilities, logits, sampling_info, positions)
            chosen = probabilities.gather(1, token_ids[:, None])[:, 0]
            logits_output.next_token_logprobs = (chosen.double().log() - total).float()
        token_ids = token_ids.to(torch.int32)
        self._sync_token_ids_across_tp(token_ids, sampling_info)
        return token_ids

    def _draw(
        self,
        probabilities: torch.Tensor,
        logits: torch.Tensor,
        sampling_info: SamplingBatchInfo,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """int64 [rows]; may set to zero what must not be drawn."""
        limits = (
            sampling_info.need_top_k_sampling,
            sampling_info.need_top_p_sampling,
            sampling_info.need_min_p_sampling,
        )
        greedy = sampling_info.top_ks <= 1
        if any(limits):
            sampling.truncate_(
                probabilities,
                top_ks=torch.where(greedy, TOP_K_ALL, sampling_info.top_ks),
                top_ps=torch.where(greedy, 1.0, sampling_info.top_ps),
                min_ps=torch.where(greedy, 0.0, sampling_info.min_ps),
            )
        uniforms = sampling.uniform_numbers(sampling_info.sampling_seed, positions)
        token_ids = sampling.draw(probabilities, uniforms)
        if sampling_info.is_any_greedy:  # from the logits: softmax can make two of them equal
            token_ids[greedy] = logits[greedy].argmax(dim=-1)
        return token_ids

    def _sample_from_probs(
        self,
        probs: torch.Tensor,
        sampling_info: SamplingBatchInfo,
        positions: torch.Tensor,
        simple_sampling_case: bool,
    ) -> tuple[torch.Tensor, Any]:
        """Upstream's forward asks here in the special cases."""
        if sampling_info.sampling_mask_batch_indices is not None:
            return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        return self._draw(probs.clone(), probs, sampling_info, positions).to(torch.int32), None
