"""The ops that quantize to FP8, in compiled graphs."""

from functools import partial

import pytest
import torch

from te_transform.backends import plain
from te_transform.backends.library import registered_ops


@pytest.mark.parametrize(
    ("dtype", "turned"),
    [
        (torch.float8_e4m3fn, True),  # as activations and weights are quantized
        pytest.param(torch.float8_e4m3fn, False, marks=pytest.mark.integration),
        pytest.param(torch.float8_e5m2, True, marks=pytest.mark.integration),
        pytest.param(torch.float8_e5m2, False, marks=pytest.mark.integration),
    ],
)
def test_ops_pass_opcheck(dtype: torch.dtype, turned: bool) -> None:
    x, scales_of, history = torch.randn(16, 32), torch.tensor([2.0, 30.0]), torch.zeros(3, 2)
    rest = (scales_of, history, 1, dtype, turned)
    for op, arguments in (
        (registered_ops.quantize, (x, *rest)),
        (registered_ops.quantize, (x, scales_of, None, *rest[2:])),
        (registered_ops.activate, (x, "swiglu", *rest)),
        (registered_ops.activate, (x, "gelu", *rest)),
        (registered_ops.activate_backward, (torch.randn(16, 16), x, "swiglu", False, *rest)),
        (registered_ops.activate_backward, (torch.randn(16, 32), x, "gelu", True, *rest)),
        (registered_ops.cat, ([x, x[:, :5]],)),
    ):
        torch.library.opcheck(op, arguments)


def test_multiply_has_a_meta_version_and_applies_scales() -> None:
    a, b = (torch.randn(rows, 32).to(torch.float8_e4m3fn) for rows in (16, 48))
    arguments = a, b, torch.tensor([0.5]), torch.tensor([4.0]), None, torch.float32, True
    torch.library.opcheck(registered_ops.multiply, arguments, test_utils="test_faketensor")
    assert torch.allclose(registered_ops.multiply(*arguments), 2 * a.float() @ b.float().T, atol=1e-4)


def test_quantize_saturates_and_notes_amax() -> None:
    x, history = torch.tensor([[1.0, -3.0], [1000.0, 0.5]]), torch.zeros(2, 3)
    arguments = (torch.tensor([1.0, 2.0, 1.0]), history, 1, torch.float8_e4m3fn, True)
    held, transposed, inverse = registered_ops.quantize(x, *arguments)
    assert held.float().tolist() == [[2.0, -6.0], [448.0, 1.0]]
    assert torch.equal(transposed.float(), held.float().t())
    assert inverse.tolist() == [0.5]
    assert history.tolist() == [[0.0, 1000.0, 0.0], [0.0, 0.0, 0.0]]
    registered_ops.quantize(x / 2, *arguments)
    assert history[0, 1] == 1000.0


@pytest.mark.parametrize(
    "activation",
    [
        *(each for each in plain.ACTIVATIONS.values() if each != plain.EXACT_GELU),
        *plain.GATED_ACTIVATIONS.values(),
        plain.clamped("silu", 0.5, 0),
        plain.clamped("quick_gelu", 0.5, 1),
    ],
)
def test_activate_quantizes_an_activation_and_its_gradient(activation: str) -> None:
    x = torch.randn(8, 12, requires_grad=True)
    out = plain.activated(activation, x)
    grad = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, x, grad)
    rest = (torch.float8_e4m3fn, False)
    *_, total = registered_ops.activate_backward(
        grad, x.detach(), activation, True, torch.ones(1), torch.zeros(1, 1), 0, *rest
    )
    torch.testing.assert_close(total, expected.sum(0))
    for computed, wide in (
        (partial(registered_ops.activate, x.detach(), activation), out),
        (partial(registered_ops.activate_backward, grad, x.detach(), activation, False), expected),
    ):
        history = torch.zeros(1, 1)
        held, *_ = computed(torch.ones(1), history, 0, *rest)
        assert torch.equal(held.float(), wide.detach().to(torch.float8_e4m3fn).float())
        torch.testing.assert_close(history[0, 0], wide.abs().amax())
