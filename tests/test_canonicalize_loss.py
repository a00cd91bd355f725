"""Canonical graphs: the loss, and activations with a backward of their own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform.graph import ops
from te_transform.graph.nodes import shape_of
from tests.captures import BOUND, canonical, op_counts, targets, the

VOCABULARY, WIDTH = 11, 32
LOGITS = torch.randn(2, 5, VOCABULARY, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0)).index_fill(
    1, torch.tensor([1]), -100
)


def _hugging_face(m, logits, labels):
    logits = logits.float()
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(logits.view(-1, VOCABULARY), shifted.view(-1).to(logits.device), reduction="sum")
    return loss / 7


CROSS_ENTROPIES = {
    "flattened": lambda m, x, t: F.cross_entropy(x.view(-1, x.size(-1)), t.view(-1)),
    "hugging face": _hugging_face,
    "classes second": lambda m, x, t: F.cross_entropy(x.transpose(1, 2), t),
    "cast": lambda m, x, t: F.cross_entropy(x.flatten(0, 1).float(), t.flatten(), ignore_index=-100),
    "rows": lambda m, x, t: F.cross_entropy(x[0], t[0], reduction="none"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CROSS_ENTROPIES)
def test_cross_entropy(name: str, dtype: torch.dtype) -> None:
    bound = BOUND if dtype is torch.float32 else 0.02
    graph = canonical(CROSS_ENTROPIES[name], LOGITS.to(dtype), LABELS, bound=bound)
    assert op_counts(graph) == {"cross_entropy": 1}
    assert F.cross_entropy not in targets(graph)
    logits, labels, ignored, reduction, computed = the(graph, ops.cross_entropy)
    assert logits.op == "placeholder" or name == "rows"
    assert shape_of(logits)[:-1] == shape_of(labels)
    assert computed is (torch.float32 if name in ("hugging face", "cast") else dtype)
    assert (ignored, reduction) == (-100, {"hugging face": "sum", "rows": "none"}.get(name, "mean"))


NOT_CROSS_ENTROPIES = {
    "smoothed": lambda m, x, t: F.cross_entropy(x.view(-1, VOCABULARY), t.view(-1), label_smoothing=0.1),
    "weighted": lambda m, x, t: F.cross_entropy(x.view(-1, VOCABULARY), t.view(-1), m.w.detach()),
    "probabilities": lambda m, x, t: F.cross_entropy(x[0], x[1].softmax(-1)),
    "an image": lambda m, x, t: F.cross_entropy(x[:, :, None], t[:, None, :1].expand(2, 1, VOCABULARY) % 5),
}


@pytest.mark.parametrize("spelling", NOT_CROSS_ENTROPIES.values(), ids=NOT_CROSS_ENTROPIES)
def test_not_a_cross_entropy(spelling) -> None:
    graph = canonical(spelling, LOGITS, LABELS, w=torch.rand(VOCABULARY))
    assert ops.cross_entropy not in targets(graph)


# Custom functions


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        tanh = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        slope = 0.5 * x * ((1 - tanh * tanh) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + tanh)
        return slope * gradient


class _Straight(_Gelu):
    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_custom_function_is_an_activation_if_its_gradient_is_one() -> None:
    x = torch.randn(2, 5, WIDTH)
    for function, found in ((_Gelu, {"gelu_tanh": 1}), (_Straight, {})):
        graph = canonical(lambda m, x, f=function: f.apply(x * m.w), x, w=torch.randn(WIDTH))
        assert op_counts(graph) == found


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return x + self.down(_Gelu.apply(self.up(x)))


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(), _Block()])

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return x


def test_a_custom_function_is_recognized_within_a_checkpoint() -> None:
    """The checkpoint does not count the tensors that the comparison of gradients saves."""
    x, model = torch.randn(2, 5, WIDTH), _Blocks()
    converted = te_transform.convert(model.eval(), x, verify=False)
    for each in (model, converted):
        each.train()(x).square().sum().backward()
    assert not [note for note in te_transform.report(converted).notes if "CheckpointError" in note]
    for own, other in zip(model.parameters(), converted.parameters(), strict=True):
        torch.testing.assert_close(other.grad, own.grad)
