"""Compare converted mixture-of-experts models with their originals, in bf16, on a GPU.

    python benchmarks/mixtures.py [NAME ...] [--recipe fp8-delayed] [--json PATH]

The layers are from Mixtral 8x7B, Qwen3 30B-A3B, DeepSeek V2 Lite and GPT-OSS 20B. Inputs are 2 sequences of
4,096 tokens. The calls are a training step without an optimizer, and a forward without gradients. The models
take turns in one process. Each line also has the time of the kernels of a call, and its peak memory beside
the model. In compiled lines, torch.compile compiles the original. Nothing is asserted.
"""

from __future__ import annotations

from typing import Any

import torch
from command_line import on_gpu
from compared import TOKENS, VOCABULARY, built, parser, rows, show
from torch import Tensor, nn

BATCH, LENGTH = 2, 4096
# the model's class, the config's class, and the arguments of the config
MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mixtral": (
        "MixtralForCausalLM", "MixtralConfig",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        },
    ),
    "Qwen3": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {
            "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 4,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 8,
        },
    ),
    "DeepSeek": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {
            "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 16,
            "num_key_value_heads": 16, "n_routed_experts": 64, "num_experts_per_tok": 6,
            "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 512,
        },
    ),
    "GPT-OSS": (
        "GptOssForCausalLM", "GptOssConfig",
        {
            "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 2, "head_dim": 64,
            "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128,
            "num_local_experts": 32, "num_experts_per_tok": 4,
        },
    ),
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    options = parser(__doc__, MIXTURES)
    options.add_argument("--recipe", default=None, help="also measure this recipe")
    asked = on_gpu(options, "transformer_engine")
    ways = {"as it is": {}, "compiled": {"compile": True}}
    if asked.recipe is not None:
        ways[asked.recipe] = {"recipe": asked.recipe}
    show(rows(asked.names or MIXTURES, _mixture, ways, asked.seconds), asked.json)


def _mixture(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    kind, config, told = MIXTURES[name]
    model = built(kind, config, TOKENS | told)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), device="cuda")
    return model.train(), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


if __name__ == "__main__":
    main()
