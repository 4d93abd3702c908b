"""SGLang plug-in (entry point group `sglang.srt.plugins`, loaded in every process of the engine): what a CPU without AMX lacks.

1. `--attention-backend torch_native` is served by SGLang's IntelAMXAttnBackend on the torch operators of our `sgl_kernel`
   (the upstream torch_native backend is slower and has no draft workers);
2. so are the draft workers of speculative decoding;
3. EAGLE/MTP and NGRAM verify by sampling: upstream takes the argmax on a CPU whatever the temperature, which is not lossless.
4. top-k/top-p renormalisation in that path, which upstream leaves `None` on a CPU (a call would end the scheduler);
5. DeepSeek without YaRN: upstream's CPU rotary embedding asserts that there is a scaling;
6. DeepSeek and GLM draft workers call `torch.cuda.synchronize()` whatever the device;
7. only with SGL_CPU_PLUGIN_SEEDS=1: `sampling_seed` is honoured.  Upstream ignores it, silently, unless deterministic inference
   is on, which no CPU attention backend has.  A request without a seed gets one from its id.  Slower on a large vocabulary.

Off switches for experiments: SGL_CPU_PLUGIN_ATTENTION=0, SGL_CPU_PLUGIN_SAMPLED_VERIFY=0."""

import os
import zlib

import torch


def activate():
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    if os.environ.get("SGL_CPU_PLUGIN_ATTENTION", "1") == "1":
        _attention()
    if os.environ.get("SGL_CPU_PLUGIN_SAMPLED_VERIFY", "1") == "1":
        _sampled_verify()
    if os.environ.get("SGL_CPU_PLUGIN_SEEDS", "1") == "1":
        _seeds()
    _plain_rope()
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None


def _attention():
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    @attention_registry.register_attention_backend("torch_native")
    def _(runner):
        from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend

        return IntelAMXAttnBackend(runner)

    def serve_drafts(original, self, field, backend_map, *args, **kwargs):
        if "intel_amx" in backend_map:
            backend_map.setdefault("torch_native", backend_map["intel_amx"])
        return original(self, field, backend_map, *args, **kwargs)

    HookRegistry.register(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend", serve_drafts, HookType.AROUND
    )


def _sampled_verify():
    import sglang.srt.speculative.eagle_utils as eagle_utils
    from sgl_kernel import sampling, tree

    eagle_utils.tree_speculative_sampling_target_only = tree.tree_speculative_sampling_target_only
    eagle_utils.top_k_renorm_prob = sampling.top_k_renorm_prob
    eagle_utils.top_p_renorm_prob = sampling.top_p_renorm_prob
    eagle_utils._verify_uses_greedy = lambda *, is_all_greedy, **_: is_all_greedy


def _seeds():
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    original = SamplingBatchInfo.from_schedule_batch.__func__

    def from_schedule_batch(cls, batch, vocab_size):
        info = original(cls, batch, vocab_size)
        seeds = [r.sampling_params.sampling_seed for r in batch.reqs]
        seeds = [zlib.crc32(r.rid.encode()) if seed is None else seed for seed, r in zip(seeds, batch.reqs)]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)


def _plain_rope():
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def rope(original, head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial, device):
        if rope_scaling is None or rope_scaling.get("rope_type", "default") == "default":
            return factory.get_rope(
                head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial
            )
        return original(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial, device)

    HookRegistry.register("sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", rope, HookType.AROUND)
