"""Copies, pickles, files, threads, processes, wrappers: a converted model goes where its original goes."""

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import te_transform
from tests.attacks import OTHER, Attends, Block, Pair, X, assert_same, with_input_gradient
from tests.models.tiny import WIDTH, Tiny
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

K = "blocks.0.attention.k_proj"
JOINED = "merge_siblings layernorm_mlp"


def tiny() -> Pair:
    return Pair.of(Tiny, rules=JOINED)


def train(model: nn.Module, x: Tensor = X) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


# Copies and files


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "a copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_and_its_original_train_apart(name: str) -> None:
    pair = tiny()
    pair.agree()
    again = COPIES[name](pair.converted)
    for model in (pair.original, pair.converted):
        train(model)
    pair.agree(atol=1e-4)
    second = Pair(seeded(Tiny), again, X)
    second.agree(with_input_gradient)
    for model in second.models:
        train(model, OTHER)
    second.agree(atol=1e-4)
    pair.agree(atol=1e-4)
    assert te_transform.report(again).counts == te_transform.report(pair.converted).counts
    second.original.load_state_dict(again.state_dict())
    Pair(second.original, te_transform.revert(again), X).agree()


def made(width: dict[str, int]) -> nn.Module:
    return Reduces(width)


class Reduces(Block):
    """Pickled by what it was made of."""

    def __init__(self, *width: dict[str, int]):
        super().__init__()
        self.width = width

    def __reduce__(self) -> tuple:
        return (made if self.width else Reduces, self.width, self.__dict__.copy())


@pytest.mark.parametrize("arguments", [(), ({"width": WIDTH},)])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_made_as_the_class_says(name: str, arguments: tuple) -> None:
    pair = Pair.of(seeded(Reduces, *arguments))
    again = COPIES[name](pair.converted)
    assert isinstance(again, Reduces)
    assert again.width == arguments
    Pair(pair.original, again, X).agree(with_input_gradient)


def test_a_copied_part_is_a_part_alone() -> None:
    pair = tiny()
    parts = [copy.deepcopy(model.blocks[0]) for model in pair.models]
    train(pair.converted), train(pair.original)
    Pair(*parts, X).agree(with_input_gradient)
    pair.agree(atol=1e-4)


def test_state_dicts_go_across_by_files_for_weights_alone() -> None:
    pair = tiny()
    train(pair.converted)
    torch.save(pair.converted.state_dict(), file := io.BytesIO())
    pair.original.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    pair.agree()
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True, mmap=None)
    again = te_transform.convert(Tiny(), X, verify=False)
    again.load_state_dict(loaded, assign=True)
    Pair(pair.original, again, X).agree()


def test_a_state_dict_of_the_distributed_kind() -> None:
    pair = tiny()
    state = get_model_state_dict(pair.converted)
    assert [*state] == [*pair.original.state_dict()]
    larger = {name: 2 * tensor for name, tensor in state.items()}
    for model in pair.models:
        set_model_state_dict(model, {name: tensor.clone() for name, tensor in larger.items()})
    pair.agree(with_input_gradient)


# Back


def test_revert_gives_the_users_class_back_and_keeps_the_weights() -> None:
    pair = tiny()
    train(pair.original), train(pair.converted)
    parameters = dict(pair.converted.named_parameters())
    reverted = te_transform.revert(pair.converted)
    assert reverted is pair.converted
    assert type(reverted) is Tiny
    assert all(p is parameters[name] for name, p in reverted.named_parameters())
    for (path, one), (_, other) in zip(reverted.named_modules(), pair.original.named_modules(), strict=True):
        assert type(one) is type(other), path
        assert vars(one).keys() == vars(other).keys(), path
    pair.agree(atol=1e-4)
    train(pair.original), train(pair.converted)
    pair.agree(atol=1e-4)


def test_revert_where_nothing_was_fused() -> None:
    model = nn.Sequential(nn.PReLU(), nn.Flatten())
    converted = te_transform.convert(model, X, verify=False)
    assert not te_transform.report(converted).fused
    assert te_transform.revert(converted) is converted
    assert type(converted) is nn.Sequential
    assert_same("output", converted(X), model(X))


def test_converted_again_after_reverting() -> None:
    pair = tiny()
    again = te_transform.convert(te_transform.revert(pair.converted), X, verify=False)
    te_transform.report(again).expect(merge_siblings=1)
    Pair(pair.original, again, X).agree(with_input_gradient)


@pytest.mark.parametrize("copied", [False, True])
def test_training_may_follow_a_conversion_in_inference_mode(copied: bool) -> None:
    """Copies and adjacent parameters that are made in inference mode cannot be saved for a backward."""
    original = seeded(Tiny)
    with torch.inference_mode():
        converted = te_transform.convert(original, X)
    if copied:
        converted = copy.deepcopy(converted)
    with torch.inference_mode():
        for _ in range(3):
            converted(X)
    assert not any(tensor.is_inference() for tensor in converted.state_dict().values())
    for model in (original, converted):
        train(model)
    Pair(original, converted, X).agree(atol=1e-4)


def test_the_original_is_left_as_it_was() -> None:
    pair, built = tiny(), seeded(Tiny)
    train(pair.converted)
    for (path, one), (_, other) in zip(pair.original.named_modules(), built.named_modules(), strict=True):
        assert type(one) is type(other), path
        assert vars(one).keys() == vars(other).keys(), path
    Pair(built, pair.original, X).agree(with_input_gradient)


def test_two_conversions_of_one_model_and_models_of_one_class() -> None:
    first = tiny()
    second = Pair(first.original, te_transform.convert(first.original, X, verify=False), X)
    torch.manual_seed(0)
    third = Tiny()
    third = Pair(third, te_transform.convert(third, X, verify=False), X)
    for pair in (first, second, third, first):
        pair.agree(with_input_gradient)


# Threads, processes


def test_threads() -> None:
    """One input and several, all at once, with gradients."""
    pair = tiny()
    inputs = [X, X, OTHER, torch.cat([X, OTHER], 1)]
    expected = [gradient_of(pair.original, x) for x in inputs]
    found: dict[int, list] = {place: [] for place in range(len(inputs))}

    def run(place: int) -> None:
        for _ in range(10):
            found[place].append(gradient_of(pair.converted, inputs[place]))

    threads = [threading.Thread(target=run, args=(place,)) for place in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, results in found.items():
        assert len(results) == 10
        for result in results:
            assert_same(f"thread {place}", result, expected[place], 1e-4)


def gradient_of(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).square().sum(), x)[0]


def test_threads_with_modes_of_their_own() -> None:
    pair, found = tiny(), {}
    barrier = threading.Barrier(2)

    def run(grad: bool) -> None:
        barrier.wait()
        with torch.set_grad_enabled(grad):
            found[grad] = [pair.converted(X).requires_grad for _ in range(5)]

    threads = [threading.Thread(target=run, args=(grad,)) for grad in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {True: [True] * 5, False: [False] * 5}


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
def test_data_parallel_training(options: dict[str, Any], process_group: None) -> None:
    pair = tiny()
    for model in pair.models:
        wrapped = nn.parallel.DistributedDataParallel(model, **options)
        train(wrapped)
        with wrapped.no_sync():
            wrapped(X).sum().backward()
        train(wrapped)
    pair.agree(atol=1e-4)


def test_wrapped_by_other_modules() -> None:
    """DataParallel, a Sequential, a module of the user's: the converted one is a child like any other."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale + self.inner(2 * x)

    pair = tiny()
    for wrap in (nn.DataParallel, nn.Sequential, Outer):
        Pair(*map(wrap, pair.models), X).agree(with_input_gradient)


def test_its_parts_are_called_alone() -> None:
    pair = Pair.of(seeded(lambda: nn.Sequential(Tiny(), Attends(), Tiny())))
    for place in range(3):
        Pair(pair.original[place], pair.converted[place], X).agree(with_input_gradient)
    Pair(pair.original[1:], pair.converted[1:], X).agree(with_input_gradient)
