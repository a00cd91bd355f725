"""The Llama that is measured, and whose memory is predicted: the shape of the 8B model, with fewer layers."""

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)


def shape_of_8b(layers: int, vocab_size: int, length: int) -> LlamaConfig:
    """Hidden 4096, ffn 14336, 32 heads, 8 groups; sequences of up to `length` tokens, no cache."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=length,
        use_cache=False,
        attn_implementation="sdpa",
    )


def llama_of_8b(layers: int = 1) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Layers of the 8B shape and 8192 tokens, in no memory."""
    config = shape_of_8b(layers, 32000, length=4096)
    with torch.device("meta"):
        ids = torch.zeros(2, 4096, dtype=torch.int64)
        return LlamaForCausalLM(config).to(torch.bfloat16), {"input_ids": ids, "labels": ids}
