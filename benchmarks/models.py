"""Build the measured models: real shapes, with weights that take almost no time to make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tests.models.llama import shape_of_8b
from tests.models.nanogpt import CausalSelfAttention, GPTConfig

VOCAB = 1024


@dataclass(frozen=True)
class Subject:
    """A model to compare with its conversion."""

    name: str
    build: Callable[[], tuple[nn.Module, dict[str, Any]]]  # the model and its keyword arguments
    calls: int  # in one sample, so that a sample takes tens of milliseconds
    threads: int | None = None  # None: all cores


def llama(layers: int) -> LlamaForCausalLM:
    """Return an 8B-shaped stack in bf16 on a small vocabulary: a layer has 218 M parameters, 0.44 GB."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(shape_of_8b(layers, VOCAB, length=2048))
    finally:
        torch.set_default_dtype(before)
    model.to_empty(device="cpu")
    _fill(model)
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    return model


def llama_block() -> tuple[nn.Module, dict[str, Any]]:
    """Return one such layer, and 1x128 tokens for it."""
    config = shape_of_8b(1, VOCAB, length=2048)
    with torch.device("meta"):
        block = LlamaDecoderLayer(config, layer_idx=0).to(torch.bfloat16)
    _fill(block.to_empty(device="cpu"))
    x = torch.randn(1, 128, config.hidden_size, dtype=torch.bfloat16)
    rotary = LlamaRotaryEmbedding(config)(x, torch.arange(128)[None])
    return block, {"hidden_states": x, "position_embeddings": rotary}


def tiny_gpt2() -> tuple[nn.Module, dict[str, Any]]:
    """Return a GPT-2 so small that Python and launches take most of the time; no dropout."""
    sizes = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **none, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(VOCAB, (1, 16)), "use_cache": False}


def written_attention() -> tuple[nn.Module, dict[str, Any]]:
    """Return nanoGPT's written-out attention with its norm: 4x512 tokens, width 384, 6 heads, no dropout."""
    config = GPTConfig(block_size=512, n_head=6, n_embd=384, dropout=0.0, flash=False)
    model = nn.Sequential(nn.LayerNorm(config.n_embd), CausalSelfAttention(config))
    return model, {"input": torch.randn(4, 512, config.n_embd)}


SUBJECTS = (
    Subject("tiny GPT-2, 1x16 tokens, fp32", tiny_gpt2, calls=20, threads=1),
    Subject("Llama block, 1x128 tokens, bf16", llama_block, calls=1),
    Subject("written attention, 4x512 tokens, fp32", written_attention, calls=2),
)


def loss(output: Any) -> Tensor:
    """Return a number to compute gradients of."""
    if isinstance(output, dict):
        output = output["logits"]
    return (output[0] if isinstance(output, tuple) else output).float().sum()


def _fill(model: nn.Module) -> None:
    """Fill a tensor with small random numbers, repeated, at the speed of memory."""
    pattern = torch.randn(1 << 20) * 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            flat = parameter.view(-1)
            small = pattern.to(parameter.dtype)
            for chunk in flat.split(len(small)):
                chunk.copy_(small[: len(chunk)])
