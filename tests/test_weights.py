"""Weights move bitwise both ways, on their own and composed."""

import pytest
import torch

from te_transform.layout import QKV
from te_transform.weights import Layout, LedgerError, Piece, backward, forward


def tensors(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


LEDGERS = {
    "same": {"fused.w": Layout((Piece("a", 6),))},
    "concat": {"fused.w": Layout((Piece("a", 6), Piece("b", 2), Piece("c", 2)))},
    "transpose": {"fused.w": Layout((Piece("t", 6, transposed=True),))},
    "concat of transposes": {"fused.w": Layout((Piece("t", 6, transposed=True), Piece("b", 2)))},
    "permutation": {"fused.w": Layout((Piece("a", 6),), order=(5, 0, 4, 1, 3, 2))},
    "permutation of a concat": {"fused.w": Layout((Piece("b", 2), Piece("c", 2)), order=(2, 0, 3, 1))},
    "several": {
        "fused.w": Layout((Piece("b", 2), Piece("c", 2))),
        "fused.bias": Layout((Piece("x", 2), Piece("y", 2))),
    },
}


@pytest.mark.parametrize("ledger", LEDGERS.values(), ids=LEDGERS)
def test_a_ledger_is_bitwise_both_ways(ledger: dict[str, Layout]) -> None:
    originals = tensors(a=(6, 4), b=(2, 4), c=(2, 4), t=(4, 6), x=(2,), y=(2,), untouched=(3,))
    fused = forward(ledger, originals)
    assert fused.keys() == ledger.keys() | (
        originals.keys() - {p.name for m in ledger.values() for p in m.pieces}
    )
    back = backward(ledger, fused)
    assert back.keys() == originals.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in originals.items())
    again = forward(ledger, back)
    assert all(torch.equal(again[name], tensor) for name, tensor in fused.items())


def test_same_is_the_very_tensor() -> None:
    originals = tensors(a=(6, 4))
    assert forward(LEDGERS["same"], originals)["fused.w"] is originals["a"]


def test_parts_are_views_unless_permuted() -> None:
    fused = torch.randn(10, 4)
    part = LEDGERS["concat"]["fused.w"].part(fused, "b")
    assert part.data_ptr() == fused[6:].data_ptr()
    assert LEDGERS["concat of transposes"]["fused.w"].part(fused[:8], "t").shape == (4, 6)


def test_a_checkpoint_that_lacks_a_piece_is_refused_by_name() -> None:
    with pytest.raises(LedgerError, match=r"the checkpoint lacks \['b', 'c'\]"):
        forward(LEDGERS["concat"], tensors(a=(6, 4)))


def test_swapped_halves_reorder_pieces_where_they_split_there() -> None:
    up_first = Layout((Piece("up", 3), Piece("gate", 3)))
    assert up_first.halves_swapped() == Layout((Piece("gate", 3), Piece("up", 3)))
    packed = Layout((Piece("gate_up", 6),)).halves_swapped()
    assert packed.order == (3, 4, 5, 0, 1, 2)
    assert packed.halves_swapped().order == tuple(range(6))


def test_a_qkv_permutation_sorts_interleaved_rows() -> None:
    rows = torch.arange(24).reshape(2, 3, 4)  # [head][q, k, v][width]
    layout = QKV(None, rows[:, 0], rows[:, 1], rows[:, 2])
    assert layout.name == "interleaved"
    weight = torch.randn(24, 5)
    ledger = {"fused.w": Layout((Piece("qkv", 24),), order=layout.order)}
    query, key, value = forward(ledger, {"qkv": weight})["fused.w"].chunk(3)
    heads = weight.reshape(2, 3, 4, 5)
    assert torch.equal(query, heads[:, 0].reshape(8, 5))
    assert torch.equal(key, heads[:, 1].reshape(8, 5))
    assert torch.equal(value, heads[:, 2].reshape(8, 5))
    assert torch.equal(backward(ledger, forward(ledger, {"qkv": weight}))["qkv"], weight)
