"""Products are recognized by their weights, however they are written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_transform.execution.products import Products

X = torch.randn(2, 3, 4)
BIAS = nn.Parameter(torch.randn(4))
# as it is stored: [out, in] or [in, out]; square, so that no shape tells
WRITTEN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool, bool]] = {
    "F.linear": (lambda x, w: F.linear(x, w), False, False),
    "F.linear with a bias": (lambda x, w: F.linear(x, w, BIAS), False, True),
    "F.linear by name": (lambda x, w: F.linear(input=x, weight=w, bias=BIAS), False, True),
    "F.linear of the transpose": (lambda x, w: F.linear(x, w.t()), True, False),
    "@ the transpose": (lambda x, w: x @ w.T, False, False),
    "@": (lambda x, w: x @ w, True, False),
    "matmul": (lambda x, w: torch.matmul(x, w), True, False),
    "mm": (lambda x, w: x.flatten(0, 1).mm(w), True, False),
    "addmm": (lambda x, w: torch.addmm(BIAS, x.flatten(0, 1), w), True, True),
    "addmm of the transpose": (lambda x, w: torch.addmm(BIAS, x.flatten(0, 1), w.t()), False, True),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_product_is_found_with_its_operands(name: str) -> None:
    write, stored_transposed, has_bias = WRITTEN[name]
    parameter, seen = nn.Parameter(torch.randn(4, 4)), []

    def note(*found: Any) -> Tensor:
        seen.append(found)
        return found[-1]()

    with Products([parameter], note):
        out = write(X, parameter)
    ((held, transposed, x, weight, bias, compute),) = seen
    assert held is parameter
    assert transposed is stored_transposed
    assert (bias is BIAS) == has_bias
    assert torch.equal(out, write(X, parameter))
    torch.testing.assert_close(F.linear(x, weight, bias).flatten(), out.flatten())
    assert torch.equal(compute(), out)


def test_results_of_the_callback_replace_the_products() -> None:
    layer = nn.Linear(4, 4)
    with Products([layer.weight], lambda parameter, transposed, x, weight, bias, compute: compute() * 2):
        out = layer(X)
    assert torch.equal(out, layer(X) * 2)


OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "another weight": lambda x, w: F.linear(x, torch.ones(4, 4)),
    "a cast": lambda x, w: F.linear(x.double(), w.double()),
    "a part of it": lambda x, w: F.linear(x, w[:2]),
    "a product from the left": lambda x, w: w @ x.mT,
    "a scaled sum": lambda x, w: torch.addmm(BIAS, x.flatten(0, 1), w, beta=2),
    "a sum with a matrix": lambda x, w: torch.addmm(X.flatten(0, 1), x.flatten(0, 1), w),
    "no product": lambda x, w: x + w[0],
}


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_runs_as_it_was_written(name: str) -> None:
    parameter = nn.Parameter(torch.randn(4, 4))
    with Products([parameter], lambda *_: pytest.fail("it is none")):
        out = OTHERS[name](X, parameter)
    assert torch.equal(out, OTHERS[name](X, parameter))
