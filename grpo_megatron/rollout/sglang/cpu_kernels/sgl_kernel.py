"""The compiled kernels that SGLang 0.5.23 asks for on a CPU, in torch.

Some are imported from here, some looked up as `torch.ops.sgl_kernel.<name>`. What is missing is missing on purpose:
SGLang asks `hasattr(torch.ops.sgl_kernel, ...)` and takes a path of its own, and an import ends with this message.
"""

from typing import Any

import torch
from grpo_megatron_sglang_cpu import attention, sampling, slots, trees

__version__ = "0.0.0+grpo.megatron.cpu"

assign_draft_cache_locs_contiguous_cpu = slots.assign_draft_cache_locs_contiguous
assign_extend_cache_locs_cpu = slots.assign_extend_cache_locs
assign_req_to_token_pool_cpu = slots.assign_req_to_token_pool
build_draft_decode_metadata_cpu = slots.build_draft_decode_metadata
copy_all_layer_kv_cache_cpu = slots.copy_all_layer_kv_cache
fill_accept_out_cache_loc_cpu = slots.fill_accept_out_cache_loc
fill_bonus_tokens_cpu = slots.fill_bonus_tokens
rotate_input_ids_cpu = slots.rotate_input_ids
build_tree_kernel_efficient_cpu = trees.build_tree
verify_tree_greedy_cpu = trees.verify_greedily

_OPERATORS = {
    "decode_attention_cpu": attention.decode_attention,
    "extend_attention_cpu": attention.extend_attention,
    "murmur_hash32_cpu": sampling.murmur_hash,
    "reconstruct_indices_from_tree_mask_cpu": trees.read_tree_mask,
}


def _register() -> None:
    for name, function in _OPERATORS.items():
        function.default = function  # type: ignore[attr-defined]  # some callers ask for the overload by name
        setattr(torch.ops.sgl_kernel, name, function)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"sgl_kernel.{name} does not exist without a GPU; install SGLang's own sgl_kernel for it")


_register()
