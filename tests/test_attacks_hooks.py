"""Hooks of all kinds, before the conversion and after it, see and change what they would of the original."""

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import te_transform
from tests import attacks
from tests.attacks import Act, Attends, Pair, X, call, named, with_input_gradient
from tests.models.tiny import Tiny
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

PATHS = [
    "norm",
    "blocks.0",
    "blocks.0.norm2",
    "blocks.0.mlp.fc1",
    "blocks.0.mlp.act",
    "blocks.0.attention.k_proj",
]


def watched(paths: list[str]) -> Act:
    """The outputs, and what hooks on all these modules see, forward and backward."""

    def act(model: nn.Module, x: Tensor) -> list[Any]:
        seen: list[Any] = []
        handles = []
        for path in paths:
            module = model.get_submodule(path)
            handles += [
                module.register_forward_pre_hook(lambda _, args: seen.append(args[0] * 1)),
                module.register_forward_hook(lambda _, args, out: seen.append(out * 1)),
            ]
        out = model(x)
        for handle in handles:
            handle.remove()
        assert len(seen) == 2 * len(paths)
        return [out, *seen]

    return act


@pytest.mark.parametrize("paths", [*([path] for path in PATHS), PATHS], ids=[*PATHS, "all"])
def test_hooks_added_later_see_the_true_values(paths: list[str]) -> None:
    Pair.shared(Tiny).agree(watched(paths))


WRITES: dict[str, Callable[[nn.Module, OrderedDict], None]] = {
    "into the dict of hooks": lambda module, hooks: module._forward_hooks.update(hooks),
    "another dict of hooks": lambda module, hooks: setattr(module, "_forward_hooks", hooks),
    "another dict of attributes": lambda module, hooks: setattr(
        module, "__dict__", {**module.__dict__, "_forward_hooks": hooks}
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_hooks_that_are_not_registered_have_their_effect(name: str) -> None:
    def act(model: nn.Module, x: Tensor) -> Any:
        WRITES[name](model.get_submodule("blocks.0.norm1"), OrderedDict({0: lambda _, args, out: out * 2}))
        return model(x)

    Pair.of(Tiny).agree(act)


def changed(path: str, of: Callable[[nn.Module], Any]) -> Act:
    def act(model: nn.Module, x: Tensor) -> Any:
        handle = of(model.get_submodule(path))
        try:
            return model(x)
        finally:
            handle.remove()

    return act


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda _, args, out: out * 2),
    "forward, in place": lambda m: m.register_forward_hook(lambda _, args, out: out.mul_(2) and None),
    "pre": lambda m: m.register_forward_pre_hook(lambda _, args: (args[0].clone().fill_(1),)),
    "backward": lambda m: m.register_full_backward_hook(lambda _, given, out: tuple(2 * g for g in given)),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda _, out: (out[0] * 2,)),
}


def raising(*_: Any) -> None:
    raise ZeroDivisionError


@attacks.each(HOOKS, "forward, in place")
def test_hooks_may_change_what_passes(name: str) -> None:
    pair = Pair.shared(Tiny)
    for path in ("blocks.0.mlp.fc1", "blocks.0.attention.k_proj"):
        with named(path):
            pair.attack_call(changed(path, HOOKS[name]))
    pair.agree()


@pytest.mark.parametrize("path", ["", "blocks.0"])
def test_hooks_on_the_model_and_its_blocks_may_change_what_passes(path: str) -> None:
    for name in ("forward", "backward"):
        if name != "backward" or path:
            Pair.shared(Tiny).attack_call(changed(path, HOOKS[name]))


@pytest.mark.parametrize("path", ["head", "blocks.0.norm1", "blocks.0.mlp.fc2", "blocks.0.attention.k_proj"])
def test_backward_hooks_see_the_true_gradients(path: str) -> None:
    def act(model: nn.Module, x: Tensor) -> list[Tensor]:
        seen: list[Tensor] = []
        handle = model.get_submodule(path).register_full_backward_hook(
            lambda _, given, out: seen.extend((*given, *out))
        )
        model(x.requires_grad_()).square().sum().backward()
        handle.remove()
        assert len(seen) == 2
        return [gradient.detach() for gradient in seen]

    Pair.shared(Tiny).agree(act, atol=1e-4)


@pytest.mark.parametrize("path", ["", "blocks.0.norm1", "blocks.0.mlp.fc1", "blocks.0.attention.k_proj"])
def test_a_hook_from_before_the_conversion_goes_on_and_may_be_removed(path: str) -> None:
    model = seeded(Tiny)
    handle = model.get_submodule(path).register_forward_hook(lambda _, args, out: out * 2)
    pair = Pair.of(model)
    pair.agree(with_input_gradient)
    removed = copy.deepcopy(pair.original)
    for each in (*pair.models, removed):
        hooks = each.get_submodule(path)._forward_hooks
        hooks.clear()
    pair.agree(with_input_gradient)
    handle.remove()


@contextmanager
def everywhere(kind: str) -> Iterator[None]:
    doubling = {
        "forward": lambda m, args, out: out * 2 if isinstance(m, nn.Linear) else None,
        "forward_pre": lambda m, args: (args[0] * 2,) if isinstance(m, nn.Linear) else None,
        "full_backward": lambda m, given, out: (
            tuple(g if g is None else 2 * g for g in given) if isinstance(m, nn.Linear) else None
        ),
    }
    handle = getattr(global_hooks, f"register_module_{kind}_hook")(doubling[kind])
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_hook_on_all_modules_of_the_process(kind: str) -> None:
    def act(model: nn.Module, x: Tensor) -> Any:
        with everywhere(kind):
            return model(x)

    pair = Pair.shared(Tiny)
    pair.agree()
    pair.attack_call(act)
    pair.agree()


def test_a_hook_on_all_modules_while_converting() -> None:
    with everywhere("forward"):
        model = seeded(Attends)
        pair = Pair(model, te_transform.convert(model, X, verify=False), X)
        pair.agree()
    pair.agree()


# What else can stand around a call


class Counting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


class Doubling(TorchDispatchMode):
    """Doubles what every matrix product gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default) else out


class DoublingFunctions(TorchFunctionMode):
    """Doubles what torch.nn.functional.gelu gives."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.nn.functional.gelu else out


def doubling_saved() -> Any:
    """Doubles what is kept for the backward."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda t: t * 2 if t.is_floating_point() else t, lambda t: t
    )


@contextmanager
def doubling_around_a_device() -> Iterator[None]:
    with DoublingFunctions(), torch.device("cpu"):
        yield


AROUND: dict[str, Callable[[], Any]] = {
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "a mode of functions": Counting,
    "a mode of functions that changes": DoublingFunctions,
    "a mode of functions around a device": doubling_around_a_device,
    "a mode of ops that changes": Doubling,
    "SDPA's kernels": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "versions allowed to change": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


@pytest.mark.parametrize("name", AROUND)
def test_contexts_around_a_call_have_their_effect(name: str) -> None:
    def act(model: nn.Module, x: Tensor) -> None:
        with AROUND[name]():
            out = model(x.requires_grad_())
            out.square().sum().backward()

    Pair.shared(Tiny).agree(act, atol=1e-4)


def test_tensors_packed_for_the_backward_may_be_changed() -> None:
    """A compressor of activations sees every tensor that any op saves."""
    seen: list[int] = []

    def pack(t: Tensor) -> Tensor:
        seen.append(t.numel())
        return t.half()

    def act(model: nn.Module, x: Tensor) -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.float()):
            out = model(x.requires_grad_())
        out.square().sum().backward()

    Pair.shared(Attends).agree(act, atol=1e-2)
    assert seen


def test_a_forward_that_is_set_before_the_conversion_is_named() -> None:
    model = seeded(Tiny)
    model.forward = lambda x: 2 * Tiny.forward(model, x)
    converted = te_transform.convert(model, X, inplace=True)
    (said,) = te_transform.report(converted).breaks
    assert "a forward is set on the model itself, as accelerate's prepare() sets one" in said
    assert torch.equal(converted(X), 2 * seeded(Tiny)(X))


class Headed(nn.Module):
    """A backbone, which is a part that is captured where it is called by itself, and a head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(blocks), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class Backbone(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tiny() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_forward_that_is_set_is_named_where_parts_are_captured() -> None:
    said = "a forward is set on the model itself, as accelerate's prepare() sets one"

    def notes(forward: Callable[..., Tensor]) -> list[list[str]]:
        model = seeded(Headed, 2)
        model.forward = functools.partial(forward, model)
        planned = te_transform.inspect(model, X)
        made = te_transform.report(te_transform.convert(model, X, inplace=True, verify=False))
        assert planned.counts["layernorm_mlp"] == made.counts["layernorm_mlp"] > 0
        return [[note for note in report.all_notes() if said in note] for report in (planned, made)]

    for found in notes(Headed.forward):
        assert len(found) == 1
    assert notes(lambda model, x: 2 * type(model).forward(model, x)) == [[], []]


def test_a_forward_set_on_an_instance() -> None:
    """accelerate sets such a forward on children and on the model."""

    def doubled(module: nn.Module) -> None:
        own = module.forward
        module.forward = lambda *args, **kwargs: own(*args, **kwargs) * 2

    for path in ("blocks.0.attention", ""):
        pair = Pair.of(Tiny)
        pair.attack(lambda model, path=path: doubled(model.get_submodule(path)))
        for model in pair.models:
            del model.get_submodule(path).forward
        pair.agree(call)
