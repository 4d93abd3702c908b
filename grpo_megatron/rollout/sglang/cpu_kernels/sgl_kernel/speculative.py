"""Import path that SGLang uses for the tree operators."""

from sgl_kernel.tree import reconstruct_indices_from_tree_mask, tree_speculative_sampling_target_only  # noqa: F401
