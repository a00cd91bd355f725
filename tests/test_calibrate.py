"""The first scales of delayed scaling are made of what goes through a converted model's products."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform.backends.fp8.calibration import Amax
from te_transform.backends.fp8.registry import state_of
from te_transform.execution.calibrate import calibrate, loss_of
from te_transform.execution.products import Products
from te_transform.graph.inputs import Inputs
from tests import stand_in
from tests.bitwise import untouched

pytestmark = pytest.mark.usefixtures("at_any_size", "te")
WIDTH = 32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.norm2, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor, target: Tensor | None = None) -> dict[str, Tensor]:
        """Two linears that read a norm, and an MLP; a loss where there is a target."""
        y = self.norm(x)
        x = x + torch.cat([self.q(y), self.k(y)], -1)
        out = x + self.fc2(torch.relu(self.fc1(self.norm2(x))))
        if target is None:
            return {"out": self.drop(out)}
        return {"out": out, "loss": (out - target).float().square().mean()}


def net(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(torch.bfloat16)


def sample(seed: int = 0, scale: float = 1.0, target: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, wanted = (torch.randn(2, 16, WIDTH, generator=generator).to(torch.bfloat16) for _ in range(2))
    return {"x": x * scale, "target": wanted} if target else {"x": x * scale}


def converted(model: nn.Module | None = None) -> nn.Module:
    return te_transform.convert(
        net() if model is None else model, sample(), backend="te", recipe="fp8-delayed", verify=False
    )


def seen(model: nn.Module) -> dict[str, list[Amax]]:
    """Return the amaxes of each kernel, by the name of its first parameter."""
    names = {name: state_of(parameter).kernels.values() for name, parameter in model.named_parameters()}
    return {name: kernel.seen.products for name, kernels in names.items() for kernel in kernels}


def numbers(product: Amax) -> list[float]:
    return [x.item() for x in (product.input, product.weight, product.grad)]


def around(model: nn.Module, *samples: dict[str, Tensor]) -> dict[str, list[float]]:
    """The largest absolute values around each linear of the original."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[float]] = {}

    def note(
        parameter: Tensor, transposed: bool, x: Tensor, weight: Tensor, bias: Any, compute: Any
    ) -> Tensor:
        largest, out = found.setdefault(names[id(parameter)], [0.0] * 3), compute()
        largest[0], largest[1] = max(largest[0], x.abs().max().item()), weight.abs().max().item()
        out.register_hook(lambda grad: largest.__setitem__(2, max(largest[2], grad.abs().max().item())))
        return out

    with Products(model.parameters(), note):
        for one in samples:
            model.train()(**one)["loss"].backward()
    model.zero_grad()
    return found


def test_scales_are_those_of_the_original_modules() -> None:
    model, other = net(), sample(seed=1, scale=3)
    fused, samples = converted(model), (sample(), other)
    calibrate(fused, [Inputs((), one) for one in samples])
    found, wanted = seen(fused), around(model, *samples)
    joined = [max(pair) for pair in zip(wanted["q.weight"], wanted["k.weight"], strict=True)]
    assert numbers(found["q.weight"][0]) == pytest.approx(joined, rel=1e-2)
    for product, name in zip(found["fc1.weight"], ("fc1.weight", "fc2.weight"), strict=True):
        assert numbers(product) == pytest.approx(wanted[name], rel=2e-2)
    assert found.keys() == {"q.weight", "fc1.weight"}


def test_training_is_in_fp8_from_its_first_step_on(te: ModuleType) -> None:
    fused = converted()
    calibrate(fused, [Inputs((), sample())])
    before = stand_in.Base.quantized
    fused.train()(**sample())["loss"].backward()
    assert stand_in.Base.quantized > before
    for parameter in (fused.q.weight, fused.fc1.weight):
        (kernel,) = state_of(parameter).kernels.values()
        assert kernel.in_fp8


def test_gradients_are_seen_only_where_there_is_a_loss() -> None:
    fused = converted()
    calibrate(fused, [Inputs((), sample(target=False))])
    products = [product for held in seen(fused).values() for product in held]
    assert products
    assert all(product.input is not None and product.grad is None for product in products)


def test_a_frozen_model_needs_none() -> None:
    fused = converted(net().requires_grad_(False))
    calibrate(fused, [Inputs((), sample())])
    assert all(product.grad is None for held in seen(fused).values() for product in held)
    assert seen(fused)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_model_is_changed(training: bool) -> None:
    fused = converted().train(training)
    fused.norm.weight.grad = torch.ones_like(fused.norm.weight)
    with untouched(fused):
        calibrate(fused, [Inputs((), sample())])
    assert fused.training == training


def test_nothing_of_the_model_is_changed_where_it_fails() -> None:
    fused = converted()
    with untouched(fused), pytest.raises(TypeError, match="wrong"):
        calibrate(fused, [Inputs((), {"wrong": sample()["x"]})])


@pytest.mark.parametrize(
    "out",
    [(1.0, "loss"), {"logits": "matrix", "loss": "loss"}, ["matrix", "loss"], "loss", ("frozen", "loss")],
)
def test_the_loss_is_the_one_number_that_has_a_gradient(out: Any) -> None:
    kinds = {"loss": torch.ones((), requires_grad=True), "matrix": torch.ones(2, 2, requires_grad=True)}
    kinds["frozen"] = torch.ones(())
    made = torch.utils._pytree.tree_map(lambda leaf: kinds.get(leaf, leaf), out)
    assert loss_of(made) is kinds["loss"]
    assert loss_of({"logits": kinds["matrix"]}) is loss_of(kinds["frozen"]) is None
