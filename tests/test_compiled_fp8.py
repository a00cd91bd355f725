"""Compiled graphs with products in FP8, on the stand-in for Transformer Engine.

As in test_compiled.py, AOTAutograd traces what inductor would compile; the operations that quantize run in
plain PyTorch. tests/gpu holds TE's kernels and inductor to the same.
"""

import copy
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform.backends import plain
from te_transform.backends.fp8.products import Scaling
from te_transform.backends.fp8.registry import state_of
from te_transform.execution import partition
from tests import stand_in, test_compiled
from tests.attacks import Attends, Block
from tests.conversions import ALL, gradients, run
from tests.models.tiny import WIDTH
from tests.test_compiled import Compilations
from tests.zoo import Inputs, seeded, zero_dropout

te, compilations = stand_in.te, test_compiled.compilations  # fixtures
pytestmark = pytest.mark.usefixtures("compilations")

RECIPES = ("fp8-delayed", "fp8-current")
X = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()


class Converted:
    """A model in bf16, in fp64, and converted twice: as it runs uncompiled, and compiled."""

    def __init__(self, model: nn.Module, inputs: Inputs, recipe: object = "fp8-delayed"):
        self.inputs, self.exact = inputs, copy.deepcopy(model).double()
        options = {"backend": "te", "recipe": recipe, "verify": False}
        model = model.bfloat16()
        self.eager = te_transform.convert(model, inputs, **options)
        self.compiled = te_transform.convert(model, inputs, compile=True, **options)

    def hold(self, act: Callable[[nn.Module, Inputs], list[Tensor]]) -> None:
        """Compiled, the numbers are no further from the exact ones than uncompiled."""
        wide = {k: v.double() if v.is_floating_point() else v for k, v in self.inputs.items()}
        exact = act(self.exact, wide)
        own, found = (act(model, self.inputs) for model in (self.eager, self.compiled))
        assert distance(found, exact) <= 1.2 * distance(own, exact)

    @property
    def notes(self) -> list[str]:
        """What the report says of calls that run uncompiled."""
        return [note for note in te_transform.report(self.compiled).notes if "uncompiled" in note]


def distance(actual: list[Tensor], exact: list[Tensor]) -> float:
    return sum(((a.double() - e) ** 2).sum() for a, e in zip(actual, exact, strict=True)).sqrt().item()


def trained(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    return [grad for grad in gradients(model, inputs).values() if grad is not None]


def of_module(build: Callable[[], nn.Module], x: Tensor = X, recipe: object = "fp8-delayed") -> Converted:
    return Converted(seeded(build), {"x": x}, recipe)


@pytest.mark.parametrize(("name", "recipe"), [("llama", "fp8-delayed"), ("gpt2", "fp8-current")])
@pytest.mark.integration
def test_is_as_exact_as_uncompiled(
    te: ModuleType, name: str, recipe: str, compilations: Compilations
) -> None:
    case = ALL[name]
    pair = Converted(zero_dropout(case.build(num_hidden_layers=1)), case.sample(), recipe)
    for _ in range(2):
        pair.hold(trained)
    assert len(compilations) == 1  # the first call shows what runs in FP8, and gives the first scales
    for _ in range(2):
        pair.hold(run)
    assert len(compilations) == 2
    products = [node for node in compilations[0][0].graph.nodes if "state" in node.kwargs]
    plan = te_transform.report(pair.compiled).precision
    assert len(products) == sum(why is None for why in plan.sites.values())
    assert not pair.notes


def scales(model: nn.Module) -> list[Tensor]:
    """Of delayed scaling, forward and backward, of every product."""
    kernels = [kernel for parameter in model.parameters() for kernel in state_of(parameter).kernels.values()]
    metas = [kernel.module.fp8_meta for kernel in kernels if kernel.te.made is not None]
    return [meta[key].scale.clone() for meta in metas for key in ("scaling_fwd", "scaling_bwd")]


def test_scales_are_updated_once_a_step_as_tes_modules_do(te: ModuleType) -> None:
    pair = of_module(Attends)
    pair.hold(trained)  # which gives them the first ones
    before: list[Tensor] = []
    for _ in range(5):
        own, found = (trained(model, pair.inputs) and scales(model) for model in (pair.eager, pair.compiled))
        assert len(own) == len(found) == 4
        for a, b in zip(own, found, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0)
        assert not before or sum(map(torch.equal, before, found)) < 3  # some gradients stay as large
        before = found
        with torch.no_grad():
            for model in (pair.eager, pair.compiled):
                for parameter in model.parameters():
                    parameter.mul_(1.3)  # a history notices at once what is larger than all before


@pytest.mark.integration  # in bf16 they are in test_compiled.py
def test_equal_layers_are_compiled_once_with_scales_of_their_own(
    te: ModuleType, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "FEWEST", 2)
    case = ALL["llama"]
    pair = Converted(case.build(num_hidden_layers=2), case.sample(), "fp8-delayed")
    for _ in range(2):
        pair.hold(trained)
    assert len(compilations) == 3  # embeddings, a layer, and the loss
    assert not pair.notes


def test_two_forwards_before_a_backward(te: ModuleType) -> None:
    pair = of_module(Block)

    def twice(model: nn.Module, inputs: Inputs) -> list[Tensor]:
        first, second = model.train()(**inputs), model(inputs["x"] / 2)
        loss = first.square().sum() + second.square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    for _ in range(4):
        pair.hold(twice)
    assert not pair.notes


class Shared(nn.Module):
    """A block that is called twice: its products have one state."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


class PostNorm(Block):
    """A norm that the residual reads too, as BERT's."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return normed + self.mlp(normed)


class Repeated(nn.Module):
    """Layers that are captured one by one: they share a graph, and have states of their own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Differentiates(Block):
    """A forward that computes a gradient, beside one that does not."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), torch.func.grad(lambda z: self.mlp(self.norm(z)).sum())(x)


def test_products_within_a_transform_run_in_their_own_dtype(te: ModuleType) -> None:
    pair = of_module(Differentiates)
    for _ in range(4):
        pair.hold(trained)
    assert not pair.notes


@pytest.mark.parametrize(
    "build", [*(pytest.param(build, marks=pytest.mark.integration) for build in (Shared, Repeated)), PostNorm]
)
def test_products_that_share_a_state_or_a_graph(te: ModuleType, build: type[nn.Module]) -> None:
    pair = of_module(build)
    for _ in range(4):
        pair.hold(trained)
    for _ in range(3):
        pair.hold(run)
    assert not pair.notes


@pytest.mark.parametrize("recipe", [RECIPES[0], pytest.param(RECIPES[1], marks=pytest.mark.integration)])
def test_any_number_of_rows(te: ModuleType, recipe: str) -> None:
    pair = of_module(Attends, X[:, :5], recipe)
    for _ in range(3):
        pair.hold(trained)


@pytest.mark.integration  # test_attacks_training.py freezes parts
def test_gradients_of_some_parameters_alone(te: ModuleType) -> None:
    pair = of_module(Attends)
    for frozen in (("norm.weight", "norm.bias"), ("attention.q_proj.weight",), ()):
        for model in (pair.exact, pair.eager, pair.compiled):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in frozen)
        for _ in range(3):
            pair.hold(trained)


def test_the_gradient_of_an_input(te: ModuleType) -> None:
    pair = of_module(Attends)

    def of_input(model: nn.Module, inputs: Inputs) -> list[Tensor]:
        x = inputs["x"].clone().requires_grad_()
        return list(torch.autograd.grad(model.train()(x).double().square().sum(), x))

    for _ in range(3):
        pair.hold(of_input)


def test_weights_are_quantized_once_in_evaluation(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = of_module(Block)
    quantized: list[int] = []
    whole = Scaling.quantized
    monkeypatch.setattr(
        Scaling, "quantized", lambda self, *args: quantized.append(args[3]) or whole(self, *args)
    )
    pair.hold(trained)
    for _ in range(3):
        pair.hold(run)
    quantized.clear()

    def served(model: nn.Module, inputs: Inputs) -> list[Tensor]:
        with torch.no_grad():
            return [model(**inputs)]

    pair.hold(served)
    assert not quantized  # and the graph, which is compiled, quantizes none
    for model in (pair.exact, pair.eager, pair.compiled):
        with torch.no_grad():
            model.mlp.fc1.weight.mul_(2)
    pair.hold(served)
    assert quantized == [1, 4]
    with torch.inference_mode():
        pair.hold(served)


def test_training_goes_on_where_inference_mode_began(te: ModuleType) -> None:
    pair = of_module(Block)
    for _ in range(3):
        with torch.inference_mode():
            pair.hold(run)
    for _ in range(3):
        pair.hold(trained)
    assert not pair.notes


def test_what_tes_modules_keep_more_for_runs_uncompiled(te: ModuleType, compilations: Compilations) -> None:
    pair = of_module(Block)

    def accumulated(model: nn.Module, inputs: Inputs) -> list[Tensor]:
        if model is pair.exact:
            return trained(model, inputs)
        model.zero_grad()
        with te_transform.accumulate(model, steps=1):
            model.train()(**inputs).double().square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    def checkpointed(model: nn.Module, inputs: Inputs) -> list[Tensor]:
        x = inputs["x"].clone().requires_grad_()
        out = torch.utils.checkpoint.checkpoint(model.train(), x, use_reentrant=False)
        return list(torch.autograd.grad(out.double().square().sum(), list(model.parameters())))

    for act in (accumulated, checkpointed):
        for _ in range(3):
            act(pair.eager, pair.inputs)
            act(pair.compiled, pair.inputs)
    assert not compilations
    for _ in range(2):
        pair.hold(checkpointed)
    pair.hold(trained)
    assert compilations


def test_what_a_reentrant_checkpoint_repeats_of_a_compiled_forward_is_in_fp8(te: ModuleType) -> None:
    options = {"backend": "te", "recipe": "fp8-delayed", "compile": True, "verify": False}
    model = te_transform.convert(seeded(Block).bfloat16(), {"x": X}, **options).train()
    for _ in range(3):
        x = X.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).double().square().sum().backward()
    assert not any((of_gradients[::2] == 1).any() for of_gradients in scales(model)[1::2])


def test_weights_that_are_held_in_fp8_alone_run_uncompiled(
    te: ModuleType, compilations: Compilations
) -> None:
    pair = of_module(Block)
    for _ in range(2):
        pair.hold(run)
    te_transform.quantize_weights(pair.compiled)
    compilations.clear()
    for _ in range(2):
        pair.hold(run)
    assert not compilations


def test_a_recipe_that_only_tes_modules_have_is_named(te: ModuleType, compilations: Compilations) -> None:
    pair = of_module(Block, recipe="fp8-block")
    for _ in range(2):
        pair.hold(trained)
    assert not compilations
    assert pair.notes == ["graphs run uncompiled, Float8BlockScaling runs only in TE's modules"]


def test_a_precision_plan_holds(te: ModuleType, compilations: Compilations) -> None:
    plan = te_transform.PrecisionPlan("fp8-delayed", {"mlp": "as asked"})
    pair = of_module(Block, recipe=plan)
    for _ in range(2):
        pair.hold(trained)
    assert [node for node in compilations[0][0].graph.nodes if "state" in node.kwargs] == []


@pytest.mark.parametrize(
    ("dtype", "turned"),
    [
        (torch.float8_e4m3fn, True),  # as activations and weights are quantized
        pytest.param(torch.float8_e4m3fn, False, marks=pytest.mark.integration),
        pytest.param(torch.float8_e5m2, True, marks=pytest.mark.integration),
        pytest.param(torch.float8_e5m2, False, marks=pytest.mark.integration),
    ],
)
def test_the_operations_are_such_as_a_compiler_expects(dtype: torch.dtype, turned: bool) -> None:
    x, scales_of, history = torch.randn(16, 32), torch.tensor([2.0, 30.0]), torch.zeros(3, 2)
    ops, rest = torch.ops.te_transform, (scales_of, history, 1, dtype, turned)
    for op, arguments in (
        (ops.quantize, (x, *rest)),
        (ops.quantize, (x, scales_of, None, *rest[2:])),
        (ops.activate, (x, "swiglu", *rest)),
        (ops.activate, (x, "gelu", *rest)),
        (ops.activate_backward, (torch.randn(16, 16), x, "swiglu", False, *rest)),
        (ops.activate_backward, (torch.randn(16, 32), x, "gelu", True, *rest)),
        (ops.cat, ([x, x[:, :5]],)),
    ):
        torch.library.opcheck(op, arguments)


def test_quantizing_saturates_and_notes_the_largest_value() -> None:
    x, history = torch.tensor([[1.0, -3.0], [1000.0, 0.5]]), torch.zeros(2, 3)
    arguments = (torch.tensor([1.0, 2.0, 1.0]), history, 1, torch.float8_e4m3fn, True)
    held, transposed, inverse = torch.ops.te_transform.quantize(x, *arguments)
    assert held.float().tolist() == [[2.0, -6.0], [448.0, 1.0]]
    assert torch.equal(transposed.float(), held.float().t())
    assert inverse.tolist() == [0.5]
    assert history.tolist() == [[0.0, 1000.0, 0.0], [0.0, 0.0, 0.0]]
    torch.ops.te_transform.quantize(x / 2, *arguments)
    assert history[0, 1] == 1000.0


@pytest.mark.parametrize(
    "activation",
    [
        *(each for each in plain.ACTIVATIONS.values() if each != plain.EXACT_GELU),
        *plain.GATED_ACTIVATIONS.values(),
    ],
)
def test_an_activation_and_its_gradient(activation: str) -> None:
    x = torch.randn(8, 12, requires_grad=True)
    out = plain.activated(activation, x)
    grad = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, x, grad)
    ops, rest = torch.ops.te_transform, (torch.float8_e4m3fn, False)
    *_, total = ops.activate_backward(
        grad, x.detach(), activation, True, torch.ones(1), torch.zeros(1, 1), 0, *rest
    )
    torch.testing.assert_close(total, expected.sum(0))
    for computed, wide in (
        (partial(ops.activate, x.detach(), activation), out),
        (partial(ops.activate_backward, grad, x.detach(), activation, False), expected),
    ):
        history = torch.zeros(1, 1)
        held, *_ = computed(torch.ones(1), history, 0, *rest)
        assert torch.equal(held.float(), wide.detach().to(torch.float8_e4m3fn).float())
        torch.testing.assert_close(history[0, 0], wide.abs().amax())
