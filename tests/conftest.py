"""What all tests need before anything of megatron is imported."""

from grpo_megatron.platform.megatron_on_cpu import install

install()
