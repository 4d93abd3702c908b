"""grpo_megatron: GRPO on megatron-core in one torchrun job that time-shares its devices."""

__version__ = "0.1.0"
