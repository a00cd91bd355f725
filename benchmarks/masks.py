"""Compare attention with masks in converted models and in their originals, in bf16, on a GPU.

    python benchmarks/masks.py [NAME ...] [--compile] [--json PATH]

Batches are padded or packed as in fine-tuning. Some models have sliding windows. The calls are a training
step without an optimizer, and a forward without gradients. The two models take turns in one process. Each
line also has the time of the kernels of a call. With --compile, both models are compiled, the original by
torch.compile. Nothing is asserted.
"""

from __future__ import annotations

from typing import Any

import torch
from compared import TOKENS, VOCABULARY, built, in_one_way
from torch import Tensor, nn

LLAMA = TOKENS | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
GEMMA = LLAMA | {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8}
GEMMA |= {"num_key_value_heads": 4, "head_dim": 256, "num_hidden_layers": 6, "sliding_window": 1024}
BERT = TOKENS | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
BERT |= {"num_attention_heads": 16, "max_position_embeddings": 4096}
DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
# the model's class, the config's class and its arguments; sequences, tokens, and the padded side of every
# second sequence, or "documents" for packed documents
MODELS: dict[str, tuple[str, str, dict[str, Any], int, int, str]] = {
    "Llama, padded": ("LlamaForCausalLM", "LlamaConfig", LLAMA, 2, 4096, "right"),
    "Llama, padded, any length": ("LlamaForCausalLM", "LlamaConfig", LLAMA, 8, 997, "right"),
    "Llama, padded at the left": ("LlamaForCausalLM", "LlamaConfig", LLAMA, 2, 4096, "left"),
    "Llama, packed documents": ("LlamaForCausalLM", "LlamaConfig", LLAMA, 2, 4096, "documents"),
    "Mistral, window of 1024": (
        "MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": 1024}, 2, 4096, "none"
    ),
    "Gemma 3, windows of 1024": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA, 2, 4096, "none"),
    "BERT, padded": ("BertForMaskedLM", "BertConfig", BERT | DROPOUT, 32, 512, "right"),
    "BERT, padded, dropout": ("BertForMaskedLM", "BertConfig", BERT, 32, 512, "right"),
    "ModernBERT, windows of 128": (
        "ModernBertForMaskedLM", "ModernBertConfig",
        BERT | {"intermediate_size": 2624, "local_attention": 128, "cls_token_id": 1, "sep_token_id": 2},
        4, 4096, "right",
    ),
}  # fmt: skip


def _model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    *kind, sequences, tokens, padding = MODELS[name]
    ids = torch.randint(3, VOCABULARY, (sequences, tokens), device="cuda")
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padding == "documents":  # documents of 256 to 1,536 tokens; transformers finds them by their positions
        lengths = torch.tensor([1024, 512, 1536, 256, 768])
        batch["position_ids"] = torch.cat([torch.arange(n, device="cuda") for n in lengths]).expand_as(ids)
        batch["use_cache"] = False
    elif padding != "none":
        mask = torch.ones_like(ids)
        mask[::2, : tokens // 4] = 0
        batch["attention_mask"] = mask if padding == "left" else mask.flip(1)
    return built(*kind).train(), batch


if __name__ == "__main__":
    in_one_way(__doc__, MODELS, _model)
