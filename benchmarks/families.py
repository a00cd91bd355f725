"""Compare converted models of many transformers families with their originals, in bf16, on a GPU.

    python benchmarks/families.py [NAME ...] [--compile] [--json PATH]

The families exclude Llama, GPT-2, BERT and ViT. Models have 4 layers of width 1024. Inputs are 8 sequences
of 512 tokens, and every second sequence is padded. The calls are a training step without an optimizer, and
a forward without gradients. The two models take turns in one process. Each line also has the time of the
kernels of a call. With --compile, both models are compiled, the original by torch.compile. Nothing is
asserted.
"""

from __future__ import annotations

from typing import Any

import torch
from compared import TOKENS, VOCABULARY, built, in_one_way
from torch import Tensor, nn

WIDTH, LAYERS, HEADS = 1024, 4, 16
BATCH, LENGTH, PADDING = 8, 512, 40
USUAL = {
    **TOKENS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
}  # fmt: skip
OFF = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
# the model's class, the config's class, and the arguments of the config
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BLOOM": ("BloomForCausalLM", "BloomConfig", USUAL | {"n_layer": LAYERS, "n_head": HEADS}),
    "MPT": (
        "MptForCausalLM", "MptConfig", TOKENS | {"d_model": WIDTH, "n_heads": HEADS, "n_layers": LAYERS}
    ),
    "Falcon, ALiBi": (
        "FalconForCausalLM", "FalconConfig", USUAL | {"alibi": True, "new_decoder_architecture": False}
    ),
    "GPT-Neo": (
        "GPTNeoForCausalLM", "GPTNeoConfig",
        TOKENS | {
            "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS,
            "attention_types": [[["global", "local"], LAYERS // 2]],
            "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0,
        },
    ),
    "GPT-J": (
        "GPTJForCausalLM", "GPTJConfig",
        TOKENS | {
            "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "rotary_dim": 64,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
    ),
    "Gemma 2": (
        "Gemma2ForCausalLM", "Gemma2Config", USUAL | {"num_key_value_heads": HEADS // 2, "head_dim": 64}
    ),
    "DeBERTa v2": (
        "DebertaV2ForMaskedLM", "DebertaV2Config",
        USUAL | OFF | {
            "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256,
            "share_att_key": True,
        },
    ),
    "OPT": (
        "OPTForCausalLM", "OPTConfig",
        USUAL | {"ffn_dim": 4 * WIDTH, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
    ),
    "T5": (
        "T5ForConditionalGeneration", "T5Config",
        TOKENS | {
            "d_model": WIDTH, "d_kv": 64, "d_ff": 4 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS,
            "dropout_rate": 0.0, "decoder_start_token_id": 0,
        },
    ),
    "BART": (
        "BartForConditionalGeneration", "BartConfig",
        TOKENS | {
            "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
            "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
            "encoder_ffn_dim": 4 * WIDTH, "decoder_ffn_dim": 4 * WIDTH, "dropout": 0.0,
        },
    ),
}  # fmt: skip


def _family(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model = built(*FAMILIES[name])
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), device="cuda")
    mask = torch.ones_like(ids)
    mask[::2, LENGTH - PADDING :] = 0
    return model.train(), {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


if __name__ == "__main__":
    in_one_way(__doc__, FAMILIES, _family)
