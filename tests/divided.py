"""Models that are divided among ranks, and how far their gradients are off."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import te_transform
from tests.models.nanogpt import GPT, GPTConfig
from tests.ranks import mesh
from tests.zoo import (
    CASES,
    EXTRA,
    GPT2,
    LLAMA,
    Case,
    hf_case,
    seeded,
    tensors,
    zero_dropout,
)

# as LLAMA, with a head of keys for each of four ranks
LLAMA_4 = hf_case("llama_4", "LlamaForCausalLM", "LlamaConfig", LLAMA | {"num_key_value_heads": 4})
SMALL = Case(
    "small", partial(seeded, GPT, GPTConfig(n_layer=1)), CASES["nanogpt_flash"].inputs, causal_lm=True
)
ALL: dict[str, Case] = {**CASES, **EXTRA, "llama_4": LLAMA_4, "small": SMALL}

_LLAMA = LLAMA | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
FP8_CASES = {  # whose shards have sizes that FP8 takes
    "llama": hf_case("llama", "LlamaForCausalLM", "LlamaConfig", _LLAMA | {"num_key_value_heads": 4}),
    "gpt2": hf_case("gpt2", "GPT2LMHeadModel", "GPT2Config", GPT2 | {"n_layer": 1, "n_embd": 64}),
}


def original_for_fp8(name: str, **sizes: int) -> nn.Module:
    return zero_dropout(FP8_CASES[name].build(**sizes)).to(torch.bfloat16).train()


def sample_of(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    sample = case.sample(batch=2, seq=12)
    if case.causal_lm and case.hf:
        sample |= {"labels": sample["input_ids"], "use_cache": False}
    return {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in sample.items()
    }


def loss_of(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    return loss if loss is not None else sum(t.square().mean() for t in tensors(output))


def gradients(model: nn.Module, sample: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the loss, and the whole gradient of each parameter, by name."""
    loss = loss_of(model(**sample))
    loss.backward()
    found = {"the loss": loss.detach()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = torch.zeros(parameter.shape) if grad is None else whole(grad)
    return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the error of the loss relative to the loss, of gradients to the largest norm of a gradient."""
    scale = max(grad.norm().item() for name, grad in exact.items() if name != "the loss")
    return {
        name: (
            (found[name].double() - exact[name]).norm() / (abs(exact[name]) if grad.dim() == 0 else scale)
        ).item()
        for name, grad in exact.items()
    }


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


class Dropped(nn.Module):
    """Shows its dropouts: of a vector that is divided by columns, and of the sum behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.dropout(torch.relu(self.up(x)))
        out = self.down(hidden)
        return out, self.dropout(out * 0 + 1)


def dropouts(sequence_parallel: bool, device: str = "cpu") -> dict[str, Any]:
    """Columns that the first half of the hidden dropout kept, those of the second, and the dropout of what
    is common; from one seed again, in the call after that, and the gradient of a call and of a checkpointed
    one."""
    model, x = Dropped().to(device), torch.zeros(2, 8, 16, device=device)
    with torch.no_grad():
        model.up.bias.fill_(1.0)
        model.down.weight.zero_()
        for half in (0, 1):  # each half of the hidden columns is shown by a half of the output's
            for column in range(8):
                model.down.weight[8 * half + column, 32 * half + column] = 1.0
    converted = te_transform.convert(model.train(), x, verify=False)
    te_transform.parallelize(converted, mesh(device), x, sequence_parallel=sequence_parallel)

    def shown(seed: int | None, call: Callable[[Tensor], tuple[Tensor, Tensor]] = converted) -> list[Tensor]:
        if seed is not None:
            torch.manual_seed(seed)
        converted.zero_grad()
        hidden, common = call(x)
        hidden.sum().backward()
        return [hidden.detach(), common.detach(), whole(converted.up.bias.grad)]

    found = {"first": shown(1), "next": shown(None), "again": shown(1)}
    found["checkpointed"] = shown(1, partial(checkpoint, converted, use_reentrant=False))
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    return {name: [tensor.cpu() for tensor in tensors] for name, tensors in found.items()} | {"state": state}


def check_dropouts(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Shards are dropped apart, what is common is dropped alike, and a seed says how."""
    for name in ("first", "next", "again", "checkpointed"):
        for mine, theirs in zip(one[name], other[name], strict=True):  # on both ranks
            assert torch.equal(mine, theirs), name
    assert torch.equal(one["state"], other["state"])
    for name in ("again", "checkpointed"):  # from one seed
        for mine, theirs in zip(one[name], one["first"], strict=True):
            assert torch.equal(mine, theirs), name
    for mine, theirs in zip(one["next"], one["first"], strict=True):
        assert not torch.equal(mine, theirs)
    hidden, common, gradient = one["first"]
    assert gradient.any()
    halves = hidden.view(-1, 2, 8)
    assert not torch.equal(halves[:, 0], halves[:, 1])
    assert 0.3 < (halves != 0).float().mean() < 0.7
    assert not torch.equal(*common.chunk(2, 1))
