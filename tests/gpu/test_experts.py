"""The experts of mixture models in kernels, against plain PyTorch in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import te_transform
from te_transform.backends import limits, plain
from te_transform.experts.fused import Experts
from te_transform.experts.kernels import KernelExperts

TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 96, 128, 64, 8, 3


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arguments(gated: bool, biased: bool = False) -> list[Tensor]:
    """Tokens, their experts, of which one gets no token, weights and biases, in bf16 and fp32."""
    scores = random(TOKENS, EXPERTS, seed=0)
    scores[:, 5] = -torch.inf
    weights, experts = scores.softmax(-1).topk(CHOICES)
    fc1 = random(EXPERTS, INNER * (1 + gated), HIDDEN, seed=1) / 8
    fc2 = random(EXPERTS, HIDDEN, INNER, seed=2) / 8
    x = random(TOKENS, HIDDEN, seed=3)
    given = [x.bfloat16(), experts, weights, fc1.bfloat16(), fc2.bfloat16()]
    if biased:
        given += [
            random(EXPERTS, fc1.shape[1], seed=5).bfloat16(),
            random(EXPERTS, HIDDEN, seed=6).bfloat16(),
        ]
    return [tensor.cuda() for tensor in given]


def run(op: Callable[..., Tensor], given: list[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The output and all gradients; the weights reach the op transposed, as models have them."""
    own = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in given]
    out = op(*own[:3], own[3].transpose(-2, -1), own[4].transpose(-2, -1), dtype, *own[5:])
    grad = random(*out.shape, seed=4).to(out)
    out.backward(grad)
    return {"out": out.detach(), **{str(i): each.grad for i, each in enumerate(own) if i != 1}}


def off(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def found_in_kernels(how: dict[str, Any], given: list[Tensor]) -> dict[str, Tensor]:
    """Return the results of the kernels, after a check that they are as exact as plain PyTorch."""
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in given]
    wanted = run(Experts(**how), wide, torch.float64)
    with limits.ignore_size_limits:
        op = KernelExperts(**how)
        found = run(op, given, torch.bfloat16)
    assert not op.plain_calls
    ours = run(Experts(**how), given, torch.bfloat16)
    for name, value in wanted.items():
        assert off(found[name], value) < max(1.2 * off(ours[name], value), 1e-3), name
    return found


@pytest.mark.parametrize(
    ("gated", "activation"),
    [
        *(("first half", name) for name in plain.GATED_ACTIVATIONS),
        ("first half", "gelu"),
        ("second half", "silu"),
        ("no", "squared_relu"),
    ],
)
def test_experts(gated: str, activation: str) -> None:
    found = found_in_kernels({"activation": activation, "gated": gated}, arguments(gated != "no"))
    for name, value in found.items():
        assert value.dtype is (torch.float32 if name == "2" else torch.bfloat16)


CLAMPED: dict[str, Any] = {"activation": "quick_gelu", "gated": "pairs", "limit": 0.7, "offset": 1}


@pytest.mark.parametrize(
    "how",
    [
        CLAMPED,
        {**CLAMPED, "gated": "first half"},
        {"activation": "silu", "gated": "first half", "limit": 0.7},
        {"activation": "silu", "gated": "first half"},
        {"activation": "squared_relu"},
    ],
    ids=str,
)
@pytest.mark.parametrize("biased", [False, True])
def test_experts_with_biases_and_limits(how: dict[str, Any], biased: bool) -> None:
    found = found_in_kernels(how, arguments("gated" in how, biased))
    for name in ("5", "6") if biased else ():
        assert not found[name][5].any()  # of the expert without tokens


def test_a_second_derivative_is_that_of_plain_pytorch() -> None:
    how: dict[str, Any] = {"activation": "silu", "gated": "first half"}
    found = []
    for op in (KernelExperts(**how), Experts(**how)):
        x, experts, weights, fc1, fc2 = arguments(True)
        x.requires_grad_()
        with limits.ignore_size_limits:
            out = op(x, experts, weights, fc1.transpose(-2, -1), fc2.transpose(-2, -1), torch.bfloat16)
        (grad,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.float().square().sum(), x)[0])
    assert off(*found) < 2e-2


# each token goes to all experts: among fewer, rounding decides which of two that are as good is taken
MIXTURES = {
    "Mixtral": {"intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 4},
    "Qwen3Moe": {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 8, "head_dim": 64},
    "GptOss": {
        "intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 64,
        "sliding_window": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("how", [{}, {"compile": True}, {"graphs": True}], ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_models(name: str, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
        use_cache=False, **MIXTURES[name],
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).to("cuda", torch.bfloat16)
    ids = torch.randint(512, (2, 64), device="cuda")
    converted = te_transform.convert(model, {"input_ids": ids, "labels": ids}, backend="te", **how)
    te_transform.report(converted).expect(experts=2)
    gradients = []
    for each in (model, converted):
        for _ in range(4):  # CUDA graphs are recorded in the third call of a kind
            each.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: weight.grad.clone() for name, weight in each.named_parameters()})
    assert te_transform.verify(model, converted, {"input_ids": ids, "labels": ids})
    for key, wanted in gradients[0].items():
        assert off(gradients[1][key], wanted) < 5e-2, key
