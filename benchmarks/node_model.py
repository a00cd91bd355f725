"""Build the model of node.py: its config, batches that it can learn, and the FLOPs of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    },
    "llama3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}
PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}  # dense FLOP/s in bf16, data sheets
STATES, CHOICES = 256, 4  # of the Markov chain

logging.set_verbosity_error()  # transformers warns of changed shapes


def config_of(name: str, layers: int | None, changes: dict[str, Any]) -> Any:
    """Return the config of a shape above, a JSON file, a folder, a model type or a model of the hub.

    Dropout and the cache are off: contenders must compute the same numbers.
    """
    told = _told(name)
    kind = told.pop("model_type")
    names = CONFIG_MAPPING[kind].attribute_map
    if layers is not None:
        changes = {"num_hidden_layers": layers, **changes}
        if told.get("layer_types"):
            changes["layer_types"] = told["layer_types"][:layers]
    told |= {names.get(key, key): value for key, value in changes.items()}
    config = AutoConfig.for_model(kind, **told)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    config.use_cache = False
    return config


def _told(name: str) -> dict[str, Any]:
    if name in SHAPES:
        return dict(SHAPES[name])
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    if name in CONFIG_MAPPING:
        return {"model_type": name}
    return AutoConfig.from_pretrained(name).to_dict()


def built(config: Any, device: torch.device) -> nn.Module:
    """Return the model in bf16 on a device, with the same random weights on each rank."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.train()


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the layers: the module list with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda each: sum(parameter.numel() for parameter in each.parameters()))


def batches(vocabulary: int, rows: int, length: int, steps: int, rank: int) -> Tensor:
    """Return token ids, int64 [steps, rows, length], of a fixed Markov chain.

    A model learns the 256 tokens of the chain first, then their four successors each. Each rank and step gets
    sequences of its own; they are the same on all machines.
    """
    states = min(STATES, vocabulary)
    chain = torch.Generator().manual_seed(0)
    successors = torch.randint(states, (states, CHOICES), generator=chain)
    draws = torch.Generator().manual_seed(1 + rank)
    choices = torch.randint(CHOICES, (length, steps * rows), generator=draws)
    tokens = [torch.randint(states, (steps * rows,), generator=draws)]
    for choice in choices[1:]:
        tokens.append(successors[tokens[-1], choice])
    return torch.stack(tokens, dim=1).view(steps, rows, length)


def flops_per_token(model: nn.Module, length: int) -> float | None:
    """Return the FLOPs of a training step for each token, or None if they are not known.

    6 for each parameter of a matrix product: embeddings count only if they are tied to the head. Attention
    adds 12 * width * n for each layer, for scores and weighted values, forward and backward, where n is the
    mean number of tokens that a token attends to: half of the length for a causal mask, less in a window.
    Operations that checkpoints repeat do not count. None for experts, of which a token visits some only, and
    for layers without attention. Source: Narayanan et al., https://arxiv.org/abs/2104.04473.
    """
    config = model.config.get_text_config()
    spans = _spans(config, length)
    if spans is None or any("expert" in key for key in config.to_dict()):
        return None
    head = model.get_output_embeddings()
    kept = () if head is None else {id(parameter) for parameter in head.parameters()}
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    left_out = {id(p) for module in embeddings for p in module.parameters() if id(p) not in kept}
    products = sum(p.numel() for p in model.parameters() if id(p) not in left_out)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 6 * products + 12 * width * sum(spans)


def _spans(config: Any, length: int) -> list[float] | None:
    """Return the mean number of tokens that a token of each layer attends to, or None if unknown."""
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    reach = {"full_attention": length, "sliding_attention": min(length, window or length)}
    if not {*kinds} <= {*reach}:
        return None
    return [reach[kind] - reach[kind] ** 2 / (2 * length) for kind in kinds]
