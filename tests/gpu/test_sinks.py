"""Attention beside sinks on a GPU, against fp64."""

import pytest
import torch
from torch import Tensor

from te_transform.backends import plain
from te_transform.backends.bands import Band, banded
from tests.gpu.attended import ends_of, poison, random, recorded
from tests.reference_kernels import within_band

# queries and keys, and how far a query sees
REACHES = {
    "causal": (1024, 1024, None, 0),
    "causal, odd": (1001, 1001, None, 0),
    "short": (100, 100, None, 0),
    "window": (1024, 1024, 127, 0),
    "window, odd": (999, 999, 127, 0),
    "other keys": (512, 1024, None, None),
}


def in_operations(parts: list[Tensor], mask: Tensor, cotangent: Tensor) -> tuple[Tensor, ...]:
    """Compute attention with sinks as models write it, in the dtype of the parts."""
    own = [part.detach().requires_grad_() for part in parts]
    out = plain.DotProductAttention()(*own[:3], mask, 0.0, False, None, True, own[3])
    return out, *torch.autograd.grad(out, own, cotangent)


def close(found: tuple[Tensor, ...], parts: list[Tensor], mask: Tensor, cotangent: Tensor) -> None:
    """As exact as the operations are in bf16; a sum over all queries, as the sinks' gradient is, rounds as it
    happens to."""
    exact = in_operations([part.double() for part in parts], mask, cotangent.double())
    rounded = in_operations(parts, mask, cotangent)
    for got, wanted, ours in zip(found, exact, rounded, strict=True):
        own = (ours.double() - wanted).norm() * (1.2 if ours.dim() > 1 else 3)
        allowed = max(own, 2**-8 * wanted.norm())
        assert (got.double() - wanted).norm() <= allowed


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("width", [64, 128, 192])
@pytest.mark.parametrize("name", REACHES)
def test_is_as_exact_as_attention(name: str, width: int, padded: bool) -> None:
    from te_transform.backends import te

    queries, keys, before, after = REACHES[name]
    core = te.DotProductAttention()
    torch.manual_seed(0)
    # of the last sequence most queries see nothing in a window
    ends = ends_of([keys, keys // 2 + 5, 1]) if padded else None
    band = Band(before, after, padded, blind=padded)
    mask = within_band(band, ends, queries, keys, torch.device("cuda")).expand(3, 1, queries, keys)
    parts = [random(3, 4, queries, width), *(random(3, 2, keys, width) for _ in range(2))]
    parts.append(torch.linspace(-2, 8, 4, device="cuda").bfloat16().requires_grad_())
    cotangent = torch.randn_like(parts[0])
    known, causal = (banded(mask, band), False) if padded or before else (None, after == 0)
    poison()
    out = core(*parts[:3], known, 0.0, causal, None, True, parts[3])
    poison()
    found = out, *torch.autograd.grad(out, parts, cotangent)
    assert not core.plain_calls
    close(found, parts, mask, cotangent)
    with torch.no_grad():
        torch.testing.assert_close(core(*parts[:3], known, 0.0, causal, None, True, parts[3]), out)


@pytest.mark.parametrize("length", [100, 1000, 1024])
def test_in_a_cuda_graph(length: int) -> None:
    from te_transform.backends import te

    core = te.DotProductAttention()
    torch.manual_seed(0)
    parts = [random(2, 4, length, 64) for _ in range(3)]
    parts.append(torch.randn(4, device="cuda").bfloat16().requires_grad_())
    ends, band = ends_of([length, length // 2]), Band(127, 0, True, True)
    mask = within_band(band, ends, length, length, torch.device("cuda"))
    cotangent, known = torch.randn_like(parts[0]), banded(mask, band)

    def run() -> tuple[Tensor, ...]:
        out = core(*parts[:3], known, 0.0, False, None, True, parts[3])
        return out, *torch.autograd.grad(out, parts, cotangent)

    graph, found = recorded(run)
    for _ in range(3):
        poison()
        with torch.no_grad():
            for x in (*parts, cotangent):
                x.copy_(torch.randn_like(x))
        graph.replay()
        close(found, parts, mask, cotangent)
