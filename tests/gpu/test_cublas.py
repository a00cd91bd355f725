"""FP8 products by the fastest algorithm of cuBLAS."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from te_transform.backends import cublas
from te_transform.backends.fp8.ops import multiply as by_pytorch
from te_transform.backends.limits import alike_on_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(8192, 4096, 1024), (4096, 6144, 2048), (2048, 512, 8192), (16, 256, 512), (272, 48, 1040)]
BOUND = {True: 6e-3, False: 3e-3}  # of fast accumulation, and of bf16's rounding


@pytest.fixture(autouse=True)
def nothing_is_chosen_yet() -> Iterator[None]:
    yield
    cublas._known_product.cache_clear()


def operands(rows: int, columns: int, inner: int, a: torch.dtype = E4M3) -> list[Tensor]:
    """Return a, b and the inverses of their scales."""
    torch.manual_seed(0)
    x = torch.randn(rows, inner, device="cuda").to(a)
    y = torch.randn(columns, inner, device="cuda").to(E4M3)
    return [x, y, torch.full((1,), 0.5, device="cuda"), torch.full((1,), 4.0, device="cuda")]


def error(found: Tensor, given: list[Tensor]) -> float:
    a, b, a_inverse, b_inverse = (x.double() for x in given)
    exact = a * a_inverse @ (b * b_inverse).T
    return ((found.double() - exact).norm() / exact.norm()).item()


def product_of(given: list[Tensor], fast: bool = True) -> cublas.TimedProduct | None:
    a, b = given[:2]
    return cublas._known_product(cublas.Sizes(len(a), *b.shape, a.dtype, b.dtype, torch.bfloat16, fast, 0))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("a", [E4M3, E5M2])
@pytest.mark.parametrize("sizes", SIZES)
def test_all_proposals_are_exact(sizes: tuple[int, int, int], a: torch.dtype, fast: bool) -> None:
    given = operands(*sizes, a)
    product = product_of(given, fast)
    assert product is not None
    for proposal in product.proposals:
        product.fastest = proposal
        assert error(product.run(*given), given) <= BOUND[fast], product.proposals.index(proposal)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_fastest_is_kept(sizes: tuple[int, int, int]) -> None:
    given = operands(*sizes)
    found = cublas.fastest_product(*given, None, torch.bfloat16, True)
    assert error(found, given) <= BOUND[True]
    assert product_of(given).fastest in product_of(given).proposals
    assert torch.equal(cublas.fastest_product(*given, None, torch.bfloat16, True), found)


def test_pytorchs_choice_stays() -> None:
    given, bias = operands(*SIZES[0]), torch.ones(SIZES[0][1], device="cuda", dtype=torch.bfloat16)

    def agrees(bias: Tensor | None = None, given: list[Tensor] = given) -> bool:
        arguments = *given, bias, torch.bfloat16, True
        return torch.equal(cublas.fastest_product(*arguments), by_pytorch(*arguments))

    assert agrees(bias)
    with alike_on_ranks:
        assert agrees()
    torch.use_deterministic_algorithms(True)
    try:
        assert agrees()
    finally:
        torch.use_deterministic_algorithms(False)
    a, *others = given
    assert agrees(given=[a[:4096].view(torch.uint8).flatten()[64:-960].view(E4M3).view(-1, 1024), *others])
    assert product_of(given).fastest is None


def test_in_cuda_graphs() -> None:
    given, other, graph = operands(*SIZES[0]), operands(*SIZES[1]), torch.cuda.CUDAGraph()
    chosen = cublas.fastest_product(*given, None, torch.bfloat16, True)
    by_pytorch(*given, None, torch.bfloat16, True)  # PyTorch cannot load cuBLAS during a capture
    with torch.cuda.graph(graph):
        found = [cublas.fastest_product(*each, None, torch.bfloat16, True) for each in (given, other)]
    graph.replay()
    assert torch.equal(found[0], chosen)
    assert error(found[1], other) <= BOUND[True]
    assert product_of(other).fastest is None
