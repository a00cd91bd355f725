"""The registries of what belongs to a tensor: no attributes on tensors, and nothing outlives its tensor."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import te_transform
from te_transform.backends import joined
from te_transform.backends.fp8.fp8_only import exact
from te_transform.backends.fp8.registry import PARAMETERS, Source, share_state, state_of
from te_transform.backends.tensor_registry import TensorRegistry
from te_transform.fp8_only.weights import quantize_together
from tests.ranks import WIDTH, Block

pytestmark = pytest.mark.usefixtures("at_any_size")

REGISTRIES = (PARAMETERS, joined._MEMORY_LAYOUTS, joined._ORIGINS)


def test_a_record_ends_with_its_tensor() -> None:
    registry: TensorRegistry[str] = TensorRegistry()
    tensors = [torch.zeros(2) for _ in range(3)]
    for number, tensor in enumerate(tensors):
        assert registry.set(tensor, str(number)) == str(number)
    assert [registry.get(tensor) for tensor in tensors] == ["0", "1", "2"]
    del tensors[1], tensor
    assert len(registry) == 2
    assert [registry.get(tensor) for tensor in tensors] == ["0", "2"]
    assert all(registry.get(torch.zeros(2)) is None for _ in range(9))


def test_a_record_survives_while_only_autograd_holds_the_tensor() -> None:
    """PyTorch then returns the same Python object again."""
    registry: TensorRegistry[str] = TensorRegistry()
    tensor = torch.randn(4, 4, requires_grad=True) * 1.0
    registry.set(tensor, "record")
    view = tensor[0]
    del tensor
    gc.collect()
    assert registry.get(view._base) == "record"


def test_parameters_without_state_can_be_swapped() -> None:
    """A conversion that keeps nothing for a parameter adds no weak reference to it."""
    model, x = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), torch.randn(2, WIDTH)
    converted = te_transform.convert(model, x, backend="torch", verify=False)
    converted(x).sum().backward()
    expected = model.double()(x.double())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        converted.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    torch.testing.assert_close(converted(x.double()), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_of_a_parameter_have_states_of_their_own(copied: Callable[[Tensor], Tensor]) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    state = state_of(parameter)
    assert state_of(parameter) is state
    assert state_of(copied(parameter)) is not state
    assert not vars(parameter)


def test_a_state_may_be_shared() -> None:
    parameter, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    share_state(parameter, other)
    assert state_of(other) is state_of(parameter)
    state = weakref.ref(state_of(parameter))
    del parameter
    assert state_of(other) is state()


def test_wrappers_have_no_weak_references() -> None:
    """nn.Module.to() swaps them, which torch.utils.swap_tensors() refuses with weak references."""
    pair = (torch.randn(WIDTH, WIDTH) for _ in range(2))
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    module.weight = nn.Parameter(TwoTensor(*pair), requires_grad=False)
    state = state_of(module.weight)
    assert state_of(module.weight) is state
    assert not weakref.getweakrefs(module.weight)
    assert module.double().weight.dtype is torch.float64


def test_weights_that_are_only_in_fp8_have_no_weak_references() -> None:
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    (module.weight,) = quantize_together([module.weight])
    assert Source.of(module.weight).state() is state_of(module.weight)
    before = exact(module.weight)
    assert module.to(torch.float64).weight.dtype is torch.float64
    assert torch.equal(exact(module.weight).float(), before)


@pytest.mark.parametrize("recipe", [None, "fp8-current", "fp8-delayed"])
def test_a_model_leaves_nothing_behind(te: ModuleType, recipe: str | None) -> None:
    gc.collect()
    before = [len(registry) for registry in REGISTRIES]
    model, x = nn.Sequential(Block(), Block()).bfloat16(), torch.randn(2, 32, WIDTH, dtype=torch.bfloat16)
    fused = te_transform.convert(model, x, backend="te", recipe=recipe, verify=False)
    for _ in range(3):
        fused(x).sum().backward()
    with torch.no_grad():
        fused.eval()(x)
    assert not any(name.startswith("_te") for parameter in fused.parameters() for name in vars(parameter))
    ends = [weakref.ref(parameter) for parameter in fused.parameters()]
    torch._dynamo.reset()
    del fused, model
    gc.collect()
    assert all(end() is None for end in ends)
    assert [len(registry) for registry in REGISTRIES] == before
