"""A model is bitwise what it was after whatever its forward does to what it holds."""

import argparse
import contextlib
import random
from collections import ChainMap, Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import Tensor, nn

from te_transform.graph.preserve import preserved, same_bits


class Counts:
    """A user's own object that the forward counts in."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, []
        self.inner = {"deep": [SimpleNamespace(calls=0)]}


class Writes(nn.Module):
    """Its forward writes into everything that a module can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.counts, self.total = nn.Linear(4, 4), Counts(), 0
        self.nested = {"list": [1, {2}], "tuple": ([3],), "ordered": OrderedDict(a=1)}
        self.queue, self.counter, self.options = deque([1]), Counter(a=1), argparse.Namespace(n=1)
        self.array, self.cache = numpy.zeros(3), torch.zeros(3)
        self.held = [nn.BatchNorm1d(4)]  # not one of its modules
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.total += 1
        self.counts.calls += 1
        self.counts.seen.append(x)
        self.counts.inner["deep"][0].calls += 1
        self.nested["list"][1].add(5)
        self.nested["tuple"][0].append(4)
        self.nested["ordered"]["b"] = 2
        self.nested["new"] = x
        self.queue.append(2)
        self.counter["a"] += 1
        self.options.n += 1
        self.array += 1
        self.cache += 1
        self.steps += 1
        self.sparse.mul_(2)
        self.none = x
        self.added = x
        del self.linear._buffers
        torch.rand(3), random.random(), numpy.random.rand()
        return self.held[0](x)


def state(model: nn.Module) -> object:
    """All of it, in a form that compares equal only if nothing has changed."""
    held = model.held[0]
    tensors = (model.cache, model.steps, model.sparse.to_dense(), held.running_mean, held.num_batches_tracked)
    inner = model.counts.inner["deep"][0].calls
    values = (model.total, model.counts.calls, list(model.counts.seen), inner, repr(model.nested))
    rest = (list(model.queue), dict(model.counter), model.options.n, list(model.array), sorted(vars(model)))
    randoms = (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist())
    return values, rest, randoms, [tensor.tolist() for tensor in tensors], model.none


def test_everything_that_a_forward_changes_is_put_back() -> None:
    model = Writes()
    before, ids = state(model), [id(model.nested), id(model.counts), id(model.nested["list"][1])]
    with preserved(model):
        model(torch.randn(2, 4))
        assert model.total == 1
    assert state(model) == before
    assert [id(model.nested), id(model.counts), id(model.nested["list"][1])] == ids
    model.linear.register_buffer("b", torch.zeros(1))  # the dictionary is there again


def test_it_is_put_back_where_the_forward_raises() -> None:
    model = Writes()
    before = state(model)
    with contextlib.suppress(RuntimeError), preserved(model):
        model(torch.randn(2, 5))
    assert model.total == 0
    assert state(model) == before


@pytest.mark.parametrize(
    "write",
    [
        lambda cache: cache.resize_(3).fill_(2),
        lambda cache: setattr(cache, "data", torch.zeros(5)),
        lambda cache: cache.squeeze_(),
    ],
    ids=["resized", "of other memory", "of fewer dimensions"],
)
def test_a_tensor_of_another_shape_gets_its_own_back(write: Callable[[Tensor], object]) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("cache", torch.ones(1))
    model.cache, cache = model.cache.view(1, 1), model.cache
    model.held = [cache, model.cache]
    with preserved(model):
        for tensor in model.held:
            write(tensor)
    assert [tensor.tolist() for tensor in model.held] == [[1.0], [[1.0]]]
    assert model.held[1] is model.cache


def test_what_collections_hold_is_put_back() -> None:
    model = nn.Linear(4, 4)
    model.seen, model.above = UserDict(n=0), ChainMap({"n": 0})
    with preserved(model):
        model.seen["n"] = model.above["n"] = 1
    assert (model.seen["n"], model.above["n"]) == (0, 0)


def test_what_does_not_change_is_not_written_to() -> None:
    model = nn.BatchNorm1d(4).eval()
    model.running_mean.fill_(float("nan"))  # which equals nothing
    versions = [buffer._version for buffer in model.buffers()]
    with preserved(model):
        model(torch.randn(2, 4))
    assert [buffer._version for buffer in model.buffers()] == versions


def test_tensors_made_in_inference_mode_are_put_back() -> None:
    with torch.inference_mode():
        model = nn.BatchNorm1d(4)
    with preserved(model), torch.inference_mode():
        model(torch.randn(2, 4))
    assert model.num_batches_tracked == 0


def test_what_goes_in_circles_is_passed_once() -> None:
    model = nn.Linear(2, 2)
    model.counts = Counts()
    model.counts.model, model.counts.itself = [model], model.counts
    with preserved(model):
        model.counts.calls += 1
    assert model.counts.calls == 0


@pytest.mark.parametrize(
    "write", [lambda weight: weight.mul_(1), lambda weight: weight.set_(weight)], ids=["written", "set"]
)
def test_a_forward_that_writes_into_its_parameters_is_refused(write: Callable[[Tensor], Tensor]) -> None:
    model = nn.Linear(2, 2)
    message = r"writes into its own parameters \['weight'\] or sets them anew"
    with torch.no_grad(), pytest.raises(RuntimeError, match=message), preserved(model):
        write(model.weight)


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_are_compared_by_what_they_hold(layout: str) -> None:
    one, other = torch.eye(4), torch.eye(4)
    other[0, 1] = 1
    one, again, other = (getattr(tensor, layout)() for tensor in (one, one.clone(), other))
    assert same_bits(one, again)
    assert not same_bits(one, other)
    assert not same_bits(one, 2 * again)
    assert not same_bits(one, one.to_dense())
    assert not same_bits(one, one.double())


def test_bits_are_compared_and_not_numbers() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.randn(3, 4).t(), torch.randn(0)) is False
    assert same_bits(torch.ones(3, 4).t(), torch.ones(4, 3))
    turns = torch.randn(2, dtype=torch.complex64)
    assert same_bits(turns, turns.clone())
    assert same_bits(turns.conj(), turns.conj().resolve_conj())  # of which one is a view
    assert same_bits(turns.conj().imag, -turns.imag)
    assert not same_bits(turns.conj(), turns)
