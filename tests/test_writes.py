"""Writes of a captured graph to memory that other graphs, or the code around them, read."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform.execution.calibrate import calibrate
from te_transform.execution.products import Products
from te_transform.execution.writes import Writes, unwritten
from te_transform.graph.inputs import Inputs
from tests.attacks import Block, Pair, call, with_input_gradient
from tests.models.tiny import WIDTH

pytestmark = pytest.mark.usefixtures("at_any_size")

X = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))
Write = Callable[[Tensor], None]


def by_mask(h: Tensor) -> None:
    h[h[..., 0] > 0] = 0.0


def by_index(h: Tensor) -> None:
    h.index_add_(1, torch.tensor([1, 1, 4]), torch.ones(2, 3, WIDTH))


def by_out(h: Tensor) -> None:
    torch.sin(h.detach(), out=h)


def in_a_view(h: Tensor) -> None:
    h[:, 2:4].transpose(1, 2).mul_(3.0)


def as_a_whole(h: Tensor) -> None:
    h.masked_fill_(h > 0.5, -1.0)


def by_scatter(h: Tensor) -> None:
    h.scatter_(-1, torch.zeros(2, 6, 1, dtype=torch.int64), 5.0)


class Helped(Block):
    """A helper ends the graph and writes in place to what the first graph made; the frame around reads it."""

    def __init__(self, write: Write = by_mask):
        super().__init__()
        self.write, self.seen = write, []

    def help(self, h: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        self.write(h)
        return h

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():  # torch.sin(out=) takes no tensor that needs a gradient
            h = x + 1.0
            self.help(h)
        record(h)
        return super().forward(h + x)


@functools.cache
def seen() -> list[Tensor]:
    """Return the values that the forward saw, in a cache: convert() restores the state that it can reach."""
    return []


@torch._dynamo.disable
def record(h: Tensor) -> None:
    seen().append(h.clone())


WRITES = (by_mask, by_index, by_out, in_a_view, as_a_whole, by_scatter)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_writes_of_a_graph_last_until_the_call_of_the_conversion_ends(write: Write) -> None:
    seen().clear()
    pair = Pair.of(Helped(write), X, "layernorm_mlp", verify=True)
    expected = X + 1.0
    write(expected)
    assert seen()
    assert all(torch.equal(h, expected) for h in seen())
    assert not any("other numbers" in note for note in te_transform.report(pair.converted).notes)
    pair.agree(with_input_gradient)


class Experts(Helped):
    """A loop over experts, each of which a helper adds to the output."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def put(self, out: Tensor, index: Tensor, values: Tensor) -> None:
        torch._dynamo.graph_break()
        out.index_add_(0, index, values)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        chosen, out = self.gate(tokens).argmax(-1), torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            index = torch.where(chosen == number)[0]
            self.put(out, index, expert(tokens[index]))
        return out


def test_experts_that_a_helper_adds_up_are_fused() -> None:
    Pair.of(Experts, X, "layernorm_mlp", verify=True).agree(with_input_gradient)


TABLE = torch.zeros(3, WIDTH)


class WritesToAGlobal(Block):
    """Counts in a tensor that neither the model nor its inputs hold, in two graphs and between them."""

    def forward(self, x: Tensor) -> Tensor:
        TABLE[1].add_(1.0)
        torch._dynamo.graph_break()
        TABLE[1:].add_(1.0)
        return super().forward(x + TABLE.sum(0))


def test_a_tensor_that_nobody_holds_is_put_back_after_the_conversion() -> None:
    TABLE.zero_()
    pair = Pair.of(WritesToAGlobal, X)
    assert not TABLE.any()
    found = call(pair.converted, X)
    TABLE.zero_()
    torch.testing.assert_close(found, call(pair.original, X))


def test_verify_sees_what_graphs_write() -> None:
    pair = Pair.of(Helped(by_mask), X)
    assert te_transform.verify(pair.original, pair.converted, X)


def test_a_calibration_sees_what_graphs_write() -> None:
    pair, found = Pair.of(Helped(as_a_whole), X), []

    def note(parameter: Tensor, transposed: bool, x: Tensor, *others: object) -> Tensor:
        found.append(x.clone())
        return others[-1]()

    def inputs(model: nn.Module) -> list[Tensor]:
        found.clear()
        with Products(pair.converted.parameters(), note), Products(pair.original.parameters(), note):
            calibrate(model, [Inputs((X,))])
        return list(found)

    for one, other in zip(inputs(pair.original), inputs(pair.converted), strict=True):
        torch.testing.assert_close(one, other)


# Tensors of inference, and tensors whose numbers share a place in memory


class WritesAfterANorm(Block):
    """Writes in place to what a norm returned, in the graph after it."""

    def __init__(self, expands: bool = False):
        super().__init__()
        self.expands = expands

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = h[:, :1].expand(-1, 6, -1) if self.expands else h
        torch._dynamo.graph_break()
        y = h.reshape(12, WIDTH)
        y.mul_(2.0)
        return super().forward(y + 1.0) + h.sum()


@contextmanager
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    ("converting", "calling", "expands"),
    [
        (inference, inference, False),
        (inference, torch.no_grad, True),
        (torch.no_grad, inference, True),
        (nullcontext, inference, False),
        (nullcontext, torch.no_grad, True),
    ],
)
def test_norms_that_are_written_to_convert_and_run_under_inference(
    converting: Callable, calling: Callable, expands: bool
) -> None:
    with converting():
        pair = Pair.of(WritesAfterANorm(expands).eval(), X, verify=True)
    with calling():
        torch.testing.assert_close(pair.converted.eval()(X), pair.original.eval()(X))
        torch.testing.assert_close(pair.converted.train()(X), pair.original.train()(X))


class WritesToWhatIsExpanded(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = mask.expand(2, 6, WIDTH)
        torch._dynamo.graph_break()
        h += 1.0
        return super().forward(x + h)


class WritesBeforeItExpands(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = mask.expand(2, 6, WIDTH)
        torch._dynamo.graph_break()
        mask += 1.0
        return super().forward(x + h)


@pytest.mark.parametrize("mode", [inference, torch.no_grad, nullcontext])
def test_writes_to_expanded_tensors_raise_as_the_models_do(mode: Callable) -> None:
    given = X, torch.ones(1, 6, 1)
    pair = Pair.of(WritesBeforeItExpands, given, verify=True)
    with mode():
        masks = given[1].clone(), given[1].clone()
        found, expected = pair.converted(X, masks[0]), pair.original(X, masks[1])
    torch.testing.assert_close(found, expected)
    assert torch.equal(*masks)
    with mode():
        model = WritesToWhatIsExpanded()
        with pytest.raises(RuntimeError, match="more than one element"):
            model(*given)
        with pytest.raises(te_transform.TraceError, match="more than one element"):
            te_transform.convert(model, given)


def test_memory_is_put_back_whatever_lies_in_it() -> None:
    with torch.inference_mode():
        secret = torch.ones(3)
    wide, overlapping = torch.ones(1, 3).expand(4, 3), torch.arange(6.0).as_strided((3, 3), (1, 1))
    conjugated, half = torch.ones(2, dtype=torch.complex64).conj(), torch.ones(3, dtype=torch.bfloat16)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    tensors = secret, wide, overlapping, conjugated, half, nested.values()
    before = [tensor.clone() for tensor in tensors]
    with unwritten() as writes:
        writes.note([*tensors[:-1], nested, torch.empty(2, device="meta"), torch.eye(2).to_sparse(), 3])
        with torch.inference_mode():
            for tensor in (secret, wide._base, overlapping[0], conjugated, half, nested.values()):
                tensor.mul_(0.0)
        version = half._version
    assert all(map(torch.equal, tensors, before))
    assert half._version == version


def test_memory_that_is_freed_is_let_go_of() -> None:
    writes, gone = Writes(), torch.ones(3)
    writes.note([gone])
    del gone
    kept = torch.ones(3)
    writes.note([kept])
    assert len(writes.storages) == 1
    writes.undo()
