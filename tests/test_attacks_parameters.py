"""Parameters stay the user's: written to, replaced, retyped, loaded and read under their own names."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

import te_transform
from tests.attacks import Attends, Block, Pair, X, call, named, with_input_gradient
from tests.models.tiny import WIDTH, Tiny
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

Q, K, FC1, NORM, HEAD = (
    "blocks.0.attention.q_proj",
    "blocks.0.attention.k_proj",
    "blocks.0.mlp.fc1",
    "blocks.0.norm1",
    "head",
)
JOINED = "merge_siblings layernorm_mlp"


def tiny() -> Pair:
    return Pair.of(Tiny, rules=JOINED)


def parts(*paths: str) -> Callable[[nn.Module], list[nn.Module]]:
    return lambda model: [model.get_submodule(path) for path in paths]


# The objects


@pytest.mark.parametrize("verify", [True, False])
def test_converting_in_place_keeps_every_parameter_object_and_name(verify: bool) -> None:
    model = seeded(Tiny)
    before, values = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    te_transform.convert(model, X, inplace=True, verify=verify)
    te_transform.report(model).expect(merge_siblings=1)
    after = dict(model.named_parameters())
    assert [*after] == [*before]
    assert all(after[name] is before[name] and type(after[name]) is nn.Parameter for name in before)
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())


def test_each_parameter_has_a_storage_of_its_own() -> None:
    """Savers take tensors of one storage for shared ones, and write all of it."""
    model = tiny().converted
    storages = [p.untyped_storage() for p in model.parameters()]
    assert [s.nbytes() for s in storages] == [p.nbytes for p in model.parameters()]
    assert len({s.data_ptr() for s in storages}) == len(storages)
    assert all(p.is_contiguous() and p.is_leaf for p in model.parameters())


def test_modules_are_read_as_ever() -> None:
    pair = tiny()
    for (path, module), (other_path, other) in zip(
        pair.original.named_modules(), pair.converted.named_modules(), strict=True
    ):
        assert path == other_path
        assert isinstance(other, type(module))
        assert type(other).__name__ == type(module).__name__
        assert str(other) == str(module)
        for name in ("in_features", "out_features", "normalized_shape", "eps", "training"):
            assert getattr(other, name, None) == getattr(module, name, None)


# Written to: all at once, of one joined, of several


def doubled_data(module: nn.Module) -> None:
    module.weight.data = 2 * module.weight.detach()


def reset(module: nn.Module) -> None:
    torch.manual_seed(0)
    module.reset_parameters()


def no_grad(write: Callable[[nn.Parameter], Any]) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        with torch.no_grad():
            write(module.weight)

    return change


def new_parameter(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.full_like(module.weight, 0.5))


def as_subclass(module: nn.Module) -> None:
    """Replace weights by tensors that dequantize themselves, as torchao does."""
    module.weight = nn.Parameter(Halved(module.weight.detach()), requires_grad=False)


class Halved(Tensor):
    """A tensor that stands for half of what it holds."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held: Tensor):
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Tensor:
        return cls(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.held / 2, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(
        2 * nn.utils.parameters_to_vector(m.parameters()), m.parameters()
    ),
    "mul_": no_grad(lambda p: p.mul_(2)),
    "a slice": no_grad(lambda p: p[..., :3].zero_()),
    "data.mul_": lambda m: m.weight.data.mul_(2),
    "a slice of data": lambda m: m.weight.data[1:].fill_(0.1),
    "data = t": doubled_data,
    "data = t, transposed": lambda m: setattr(m.weight, "data", 2 * m.weight.data.t().contiguous().t()),
    "reset_parameters": reset,
    "a new parameter": new_parameter,
    "set_": no_grad(lambda p: p.set_(2 * p.detach())),
    "a tensor subclass": as_subclass,
}


def test_weights_are_written_to() -> None:
    """One after the other: what some leave apart, the next call may lay together again."""
    pair = tiny()
    for name, write in WRITES.items():
        paths = (Q, K, FC1, HEAD) if "transposed" in name or "subclass" in name else (K, FC1, NORM)
        with named(name):
            pair.attack(lambda model, write=write, paths=paths: [*map(write, parts(*paths)(model))])
            pair.agree()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a child replaced": lambda m: setattr(m.blocks[0].attention, "k_proj", nn.Identity()),
    "two children exchanged": lambda m: exchange(m.blocks[0].attention, "q_proj", "v_proj"),
    "a wider child": lambda m: widen(m.blocks[0].mlp),
    "a tie": lambda m: setattr(m.head, "weight", m.blocks[0].attention.out_proj.weight),
    "a tie within q, k, v": lambda m: setattr(
        m.blocks[0].attention.k_proj, "weight", m.blocks[0].attention.q_proj.weight
    ),
    "a parametrization": lambda m: parametrize.register_parametrization(
        m.blocks[0].attention.k_proj, "weight", Symmetric()
    ),
    "prune": lambda m: prune.l1_unstructured(m.blocks[0].attention.k_proj, "weight", 0.5),
    "weight_norm": lambda m: parametrizations.weight_norm(
        m.blocks[0].attention.k_proj
    ).register_forward_pre_hook(dubbed),
    "spectral_norm": lambda m: torch.manual_seed(0) and parametrizations.spectral_norm(m.blocks[0].mlp.fc1),
    "another block": lambda m: m.blocks.append(seeded(Tiny).blocks[0]),
    "apply": lambda m: m.apply(initialize),
}


def dubbed(module: nn.Module, args: tuple) -> tuple:
    return (2 * args[0],)


def exchange(module: nn.Module, one: str, other: str) -> None:
    first, second = getattr(module, one), getattr(module, other)
    setattr(module, one, second), setattr(module, other, first)


def widen(mlp: nn.Module) -> None:
    mlp.fc1, mlp.fc2 = seeded(nn.Linear, WIDTH, 48), seeded(nn.Linear, 48, WIDTH)


def initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            nn.init.eye_(module.weight), nn.init.zeros_(module.bias)
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@pytest.mark.parametrize("name", CHANGES)
def test_modules_and_parameters_are_replaced(name: str) -> None:
    tiny().attack(CHANGES[name])


def test_permanent_pruning_and_parametrization_may_follow() -> None:
    pair = tiny()
    for model in pair.models:
        k, fc1 = parts(K, FC1)(model)
        prune.l1_unstructured(k, "weight", 0.5), prune.remove(k, "weight")
        parametrize.register_parametrization(fc1, "bias", nn.Tanh())
        parametrize.remove_parametrizations(fc1, "bias")
    assert [*pair.original.state_dict()] == [*pair.converted.state_dict()]
    pair.agree(with_input_gradient)


def test_swapped_tensors_are_right_or_refused() -> None:
    """Dynamo holds weak references to what it captured, which torch.utils.swap_tensors refuses to swap."""
    pair, refused = tiny(), 0
    for model in pair.models:
        try:
            torch.utils.swap_tensors(model.head.weight, nn.Parameter(2 * model.head.weight.detach()))
        except RuntimeError:
            assert model is pair.converted
            refused += 1
            model.head.weight.data.mul_(2)
    assert refused <= 1
    pair.agree()


def test_weights_that_are_tensor_subclasses_may_be_moved() -> None:
    """Module.to() swaps torchao's quantized tensors, if no object refers to them."""
    model = seeded(lambda: nn.Sequential(*(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) * 2))
    for linear in model[1::2]:
        pair = (linear.weight.detach().clone() for _ in range(2))
        linear.weight = nn.Parameter(TwoTensor(*pair), requires_grad=False)
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():  # a graph for the backward would hold them
        expected, wide = model(x).a, model.double()(x.double()).a
        converted = te_transform.convert(model.float(), x, inplace=True)
        torch.testing.assert_close(converted(x).a, expected)
        torch.testing.assert_close(converted.double()(x.double()).a, wide)
        torch.testing.assert_close(converted.float()(x).a, expected)


# By name


def test_functional_call_with_the_original_names() -> None:
    def by_name(model: nn.Module, x: Tensor) -> Any:
        return functional_call(model, {name: 2 * p for name, p in model.named_parameters()}, (x,))

    def some(model: nn.Module, x: Tensor) -> Any:
        return functional_call(model, {f"{K}.weight": torch.ones(WIDTH, WIDTH)}, (x,))

    pair = Pair.shared(Tiny, JOINED)
    pair.attack_call(by_name)
    pair.attack_call(some)
    pair.agree()


PATHS = ["", NORM, HEAD, "blocks.0", "blocks.0.mlp", FC1, "blocks.0.mlp.act", "blocks.0.attention", K]


@pytest.mark.parametrize("assign", [True, False])
def test_state_dicts_of_parts(assign: bool) -> None:
    pair = tiny()
    for path in PATHS:
        state = pair.original.get_submodule(path).state_dict()
        found = pair.converted.get_submodule(path).state_dict()
        assert [*found] == [*state]
        assert all(torch.equal(found[name], state[name]) for name in state)
        larger = {name: 1.5 * tensor for name, tensor in state.items()}
        for model in pair.models:
            own = copy.deepcopy(larger)
            assert not any(model.get_submodule(path).load_state_dict(own, assign=assign))
    pair.agree(with_input_gradient)


def test_assigning_a_state_dict_of_another_dtype() -> None:
    pair = tiny()
    state = {name: tensor.double() for name, tensor in pair.original.state_dict().items()}
    for model in pair.models:
        model.load_state_dict(copy.deepcopy(state), assign=True)
    pair.agree(lambda model, x: model(x.double()), atol=1e-12)


def test_load_state_dict_says_what_is_missing_and_unexpected() -> None:
    pair = tiny()
    state = {name: 2 * tensor for name, tensor in pair.original.state_dict().items()}
    del state[f"{K}.weight"], state["norm.bias"]
    state["more"] = torch.zeros(1)
    messages = []
    for model in pair.models:
        with pytest.raises(RuntimeError) as raised:
            model.load_state_dict(state)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    results = [model.load_state_dict(state, strict=False) for model in pair.models]
    assert results[0] == results[1]
    pair.agree()
    state["head.weight"] = torch.zeros(3)
    for model in pair.models:
        with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
            model.load_state_dict(state, strict=False)
    pair.agree()


# Dtypes and devices


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_dtype(dtype: torch.dtype) -> None:
    pair = tiny()
    for model in pair.models:
        assert model.to(dtype) is model
        assert {tensor.dtype for tensor in model.state_dict().values()} == {dtype}
    atol = 1e-12 if dtype is torch.float64 else 5e-2
    pair.agree(lambda model, x: model(x.to(dtype)), atol=atol)
    for model in pair.models:
        model.float()
    pair.agree(with_input_gradient)


def test_one_weight_of_another_dtype() -> None:
    pair = tiny()
    for model in pair.models:
        model.get_submodule(K).double()
    assert "error" in pair.agree()


def test_to_meta_and_back() -> None:
    pair = tiny()
    state = copy.deepcopy(pair.converted.state_dict())
    for model in pair.models:
        model.to("meta")
        assert all(tensor.is_meta for tensor in model.state_dict().values())
        assert model(X.to("meta")).shape == X.shape
        model.to_empty(device="cpu").load_state_dict(state)
    pair.agree(with_input_gradient)


def test_share_memory() -> None:
    pair = tiny()
    pair.converted.share_memory()
    assert all(parameter.is_shared() for parameter in pair.converted.parameters())
    pair.agree(with_input_gradient)
    for model in pair.models:
        model.get_submodule(K).weight.data.mul_(2)
    pair.agree()


class Owner(Block):
    """A block with a parameter of its own, beside those of its linears."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def test_an_owner_keeps_parameters_of_its_own() -> None:
    pair = Pair.of(Owner)
    for model in pair.models:
        model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})
        model.shift = nn.Parameter(torch.ones(1))
        model.mlp.fc1.shift = nn.Parameter(torch.ones(1))
    assert [*pair.converted.state_dict()] == [*pair.original.state_dict()]
    pair.agree(call)
    assert [*te_transform.revert(pair.converted).state_dict()] == [*pair.original.state_dict()]


# Memory that something else holds


HOLD: dict[str, Callable[[nn.Module], Any]] = {
    "its storage": lambda layer: layer.weight.untyped_storage(),
    "a typed storage": lambda layer: torch.TypedStorage(
        wrap_storage=layer.weight.untyped_storage(), dtype=torch.float32, _internal=True
    ),
    "a tensor of its data": lambda layer: layer.weight.data,
    "a view": lambda layer: layer.weight.view(-1),
    "the memory of an array": lambda layer: memoryview(layer.weight.detach().numpy()),
    "an export": lambda layer: torch.utils.dlpack.to_dlpack(layer.weight),
    "a state dict": lambda layer: layer.state_dict(),
    "another module": lambda layer: nn.Parameter(layer.weight.data),
}


def flat_buffer(layer: nn.Module) -> Tensor:
    flat = layer.weight.detach().flatten()
    layer.weight.data = flat.view_as(layer.weight)
    return flat


def imported(layer: nn.Module) -> Any:
    array = layer.weight.detach().clone().numpy()
    layer.weight.data = torch.from_numpy(array)
    return array


def result_of_pytorch(value: Any) -> Any:
    future = torch.futures.Future()
    future.set_result(value)
    return future


def array_of_the_parameter(layer: nn.Module) -> Any:
    weight = layer.weight
    return weight.detach().numpy() if weight.requires_grad else weight.numpy()


def weak_reference(layer: nn.Module) -> Any:
    return weakref.ref(layer.weight.untyped_storage())


def with_an_attribute(layer: nn.Module) -> Any:
    layer.weight.untyped_storage().tag = "quantized"
    return layer


HOLD |= {
    "a weak reference to its storage": weak_reference,
    "a storage with an attribute": with_an_attribute,
    "a part of its storage": lambda layer: layer.weight.untyped_storage()[8:64],
    "a result": lambda layer: result_of_pytorch(layer.weight.detach()),
    "a traced module": lambda layer: torch.jit.trace(layer, torch.ones(1, WIDTH)),
    "what a graph saved": lambda layer: layer.weight.exp() * layer(X.clone().requires_grad_()).sum(),
    "shared memory": lambda layer: layer.weight.share_memory_(),
    "an array": array_of_the_parameter,
    "a flat buffer": flat_buffer,
    "an array that it came from": imported,
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", HOLD)
def test_memory_that_something_else_holds_is_not_left(name: str, frozen: bool) -> None:
    model = seeded(Attends).requires_grad_(not frozen)
    projections = model.attention.q_proj, model.attention.k_proj, model.attention.v_proj
    held = HOLD[name](projections[0])
    places = [layer.weight.data_ptr() for layer in projections]
    expected = model(X).detach()
    te_transform.convert(model, X, inplace=True)
    assert [layer.weight.data_ptr() for layer in projections] == places
    torch.testing.assert_close(model(X), expected)
    assert [layer.weight.data_ptr() for layer in projections] == places
    assert held is not None
    (note,) = (note for note in te_transform.report(model).notes if "memory of their own" in note)
    assert "got attention.q_proj.weight" in note


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "name", ["an array", "a view", "its storage", "an export", "a weak reference to its storage"]
)
def test_adjacent_memory_that_something_else_holds_is_not_left(name: str, frozen: bool) -> None:
    """A sibling gets other memory, so the group would be made adjacent anew."""
    model = te_transform.convert(seeded(Attends).requires_grad_(not frozen), X, verify=False)
    q, v = model.attention.q_proj, model.attention.v_proj
    assert v.weight.data_ptr() - q.weight.data_ptr() == 2 * q.weight.nbytes
    held, place = HOLD[name](q), q.weight.data_ptr()
    v.weight = nn.Parameter(v.weight.detach().clone(), requires_grad=not frozen)
    expected = te_transform.revert(copy.deepcopy(model))(X)
    for _ in range(2):
        torch.testing.assert_close(model(X), expected)
        assert q.weight.data_ptr() == place
    assert held is not None


def test_parameters_that_optimizers_hold_may_be_moved() -> None:
    model = seeded(Attends)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    model.attention.q_proj.weight.untyped_storage(), model.state_dict(), model.attention.q_proj.weight.data
    te_transform.convert(model, X, inplace=True)
    places = [getattr(model.attention, f"{name}_proj").weight.data_ptr() for name in "qkv"]
    assert places[2] - places[1] == places[1] - places[0] == 4 * WIDTH * WIDTH
    assert not any("memory of their own" in note for note in te_transform.report(model).notes)
    before = model(X)
    optimizer.step()
    assert not torch.equal(model(X), before)
