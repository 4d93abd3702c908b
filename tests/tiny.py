"""Tiny HF Llama folders with random weights and a one-character-per-token tokenizer, for every ring."""

import json
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tiny_llama(
    folder: Path,
    *,
    vocab_size: int = 151,
    num_layers: int = 4,
    hidden_size: int = 64,
    num_attention_heads: int = 8,
    num_key_value_heads: int = 4,
    ffn_hidden_size: int = 96,
    tie_embeddings: bool = True,
    seed: int = 0,
    scale: float = 0.08,
) -> Path:
    """Write config.json, model.safetensors (float32), generation_config.json and a tokenizer; returns the folder.

    Token 0 pads, 1 begins, 2 ends; printable ASCII characters follow, one token each.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=ffn_hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=512,
        tie_word_embeddings=tie_embeddings,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=scale,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_tokenizer(folder, vocab_size)
    return folder


def make_tiny_qwen2(folder: Path, *, vocab_size: int = 151) -> Path:
    """The same for Qwen2, untied: grouped queries, and biases on query, key and value that are not zero."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(4)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_theta=1e6,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.08)
    model.save_pretrained(folder)
    write_tokenizer(folder, vocab_size)
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import Fuse

    words = ["<pad>", "<s>", "</s>", "\n"] + [chr(code) for code in range(32, 127)]
    words += [f"<extra_{i}>" for i in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words[:vocab_size])}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "pad_token": "<pad>",
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
            }
        )
    )
