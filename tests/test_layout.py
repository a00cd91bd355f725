"""The layout of a fused QKV projection is read off the graph's slicing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from te_transform import vocabulary
from te_transform.inputs import as_inputs
from te_transform.layout import qkv_layout
from te_transform.normalise import normalise
from te_transform.trace import record
from tests.zoo import CASES, EXTRA

B, S, H, D = 2, 5, 4, 8


def layouts(model: nn.Module, inputs) -> list:
    graph = normalise(record(model, as_inputs(model, inputs)[0])).graph
    return [qkv_layout(node) for node in graph.nodes if node.target is vocabulary.sdpa]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quickstart", "interleaved"),
        ("gpt_neox", "interleaved"),
        ("bloom", "interleaved"),
        ("nanogpt_manual", "[q|k|v]"),
        ("gpt2", "[q|k|v]"),
        ("phi3", "[q|k|v]"),
        ("falcon", "[q|k|v]"),
    ],
)
def test_layouts_of_real_models(name: str, expected: str) -> None:
    case = (CASES | EXTRA)[name]
    found = layouts(case.build(), case.sample(2, 12, 0, False))
    assert [layout.name for layout in found] == [expected] * len(found)
    assert found


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "torch_encoder_pre"])
def test_separate_projections_have_no_layout(name: str) -> None:
    case = CASES[name]
    assert set(layouts(case.build(), case.sample(2, 12, 0, False))) == {None}


class Sliced(nn.Module):
    """One projection, read in the way the test says."""

    def __init__(self, read) -> None:
        super().__init__()
        self.qkv, self.read = nn.Linear(H * D, 3 * H * D), read

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.read(self.qkv(x)))


def heads(part):
    return part.view(B, S, H, D).transpose(1, 2)


READINGS = {
    "chunk": (lambda y: [heads(p) for p in y.chunk(3, -1)], "[q|k|v]"),
    "reshape to (3, h, d)": (lambda y: y.reshape(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0), "[q|k|v]"),
    "reshape to (h, 3d)": (lambda y: y.view(B, S, H, 3 * D).transpose(1, 2).chunk(3, -1), "interleaved"),
    "reshape to (h, 3, d)": (lambda y: y.view(B, S, H, 3, D).permute(3, 0, 2, 1, 4).unbind(0), "interleaved"),
    "value first": (lambda y: [heads(p) for p in y.chunk(3, -1)][::-1], "permuted"),
    "width before heads": (
        lambda y: [p.reshape(B, S, D, H).permute(0, 3, 1, 2) for p in y.chunk(3, -1)],
        "permuted",
    ),
}


@pytest.mark.parametrize(("read", "expected"), READINGS.values(), ids=READINGS)
def test_every_way_to_slice_it(read, expected: str) -> None:
    (layout,) = layouts(Sliced(read), torch.randn(B, S, H * D))
    assert layout.name == expected
    assert sorted(layout.order) == list(range(3 * H * D))
