"""A small Llama on a GPU, trained in FP8."""

from typing import Any

import torch
from torch import Tensor, nn

import te_transform
from tests.zoo import seeded

VOCAB, HIDDEN = 512, 256


def llama(width: int = HIDDEN, layers: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def batch(seed: int = 0, rows: int = 2, length: int = 64) -> dict[str, Tensor]:
    ids = torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()
    return {"input_ids": ids, "labels": ids}


def converted(recipe: str | None, model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = seeded(llama) if model is None else model
    return te_transform.convert(model, batch(), backend="te", recipe=recipe, **options).train()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step(model: nn.Module, inputs: dict[str, Tensor], scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss * scale
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return loss.detach(), found


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the distance of two sets of gradients, relative to the norm of the second."""
    assert one.keys() == other.keys()
    pairs = [(one[name].double(), other[name].double()) for name in one]
    return (sum((a - b).norm() ** 2 for a, b in pairs) / sum(b.norm() ** 2 for _, b in pairs)).sqrt().item()
