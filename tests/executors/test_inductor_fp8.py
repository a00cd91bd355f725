"""The executor of inductor in FP8, on the stand-in for Transformer Engine.

tests/compilers.py traces graphs in the place of inductor. The ops that quantize run in plain PyTorch.
tests/gpu tests TE's kernels and inductor alike.
"""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from te_transform.backends.fp8.products import Scaling
from te_transform.backends.fp8.registry import state_of
from te_transform.execution import lm_head
from te_transform.verify.conversion import Conversion
from tests.attacks import Attends, Block
from tests.compilers import Compiler
from tests.conversions import ALL, gradients, run
from tests.models.tiny import WIDTH
from tests.zoo import Inputs, seeded, zero_dropout

pytestmark = pytest.mark.usefixtures("at_any_size", "compilations", "te")

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
        """Return the sentences of the report on uncompiled calls."""
        return [note for note in te_transform.report(self.compiled).notes if "uncompiled" in note]


def distance(actual: list[Tensor], exact: list[Tensor]) -> float:
    return sum(((a.double() - e) ** 2).sum() for a, e in zip(actual, exact, strict=True)).sqrt().item()


def trained(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    return [grad for grad in gradients(model, inputs).values() if grad is not None]


def of_module(build: Callable[[], nn.Module], x: Tensor = X, recipe: object = "fp8-delayed") -> Converted:
    return Converted(seeded(build), {"x": x}, recipe)


@pytest.mark.parametrize(("name", "recipe"), [("llama", "fp8-delayed"), ("gpt2", "fp8-current")])
@pytest.mark.integration
def test_compiled_models_are_as_exact_as_uncompiled_models(
    name: str, recipe: str, compilations: Compiler
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
    """Return the scales of delayed scaling, forward and backward, of each product."""
    kernels = [kernel for parameter in model.parameters() for kernel in state_of(parameter).kernels.values()]
    metas = [kernel.module.fp8_meta for kernel in kernels if kernel.built is not None]
    return [meta[key].scale.clone() for meta in metas for key in ("scaling_fwd", "scaling_bwd")]


def test_scales_are_updated_once_a_step_as_by_tes_modules() -> None:
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


@pytest.mark.integration  # test_inductor_pieces.py has bf16
def test_equal_layers_are_compiled_once_with_scales_of_their_own(deep: None, compilations: Compiler) -> None:
    case = ALL["llama"]
    pair = Converted(case.build(num_hidden_layers=4), case.sample(), "fp8-delayed")
    for _ in range(2):
        pair.hold(trained)
    assert len(compilations) == 3  # embeddings, a layer, and the loss
    assert not pair.notes


class FusedAttention(nn.Module):
    """Attention by PyTorch's function, between two products."""

    def __init__(self):
        super().__init__()
        self.ins, self.outs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.ins(x).chunk(3, -1))
        return x + self.outs(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


def test_the_output_of_attention_is_saved_once() -> None:
    pair = of_module(FusedAttention)
    for _ in range(3):
        pair.hold(trained)
    saved = pair.compiled(**pair.inputs).grad_fn.saved_tensors
    in_fp8 = [tensor.numel() for tensor in saved if tensor.dtype.itemsize == 1]
    # the first input and the second weight; the second input, which attention saves, is quantized again
    assert sorted(in_fp8) == sorted([X.numel(), WIDTH * WIDTH])


def test_two_forwards_may_precede_a_backward() -> None:
    pair = of_module(Block)

    def twice(model: nn.Module, inputs: Inputs) -> list[Tensor]:
        first, second = model.train()(**inputs), model(inputs["x"] / 2)
        loss = first.square().sum() + second.square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    for _ in range(4):
        pair.hold(twice)
    assert not pair.notes


class Shared(nn.Module):
    """A block that is called twice, so its products share a state."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


class PostNorm(Block):
    """A block whose residual reads the norm too, as in BERT."""

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


def test_products_inside_a_transform_run_in_their_own_dtype() -> None:
    pair = of_module(Differentiates)
    for _ in range(4):
        pair.hold(trained)
    assert not pair.notes


@pytest.mark.parametrize(
    "build", [*(pytest.param(build, marks=pytest.mark.integration) for build in (Shared, Repeated)), PostNorm]
)
def test_products_may_share_a_state_or_a_graph(build: type[nn.Module]) -> None:
    pair = of_module(build)
    for _ in range(4):
        pair.hold(trained)
    for _ in range(3):
        pair.hold(run)
    assert not pair.notes


@pytest.mark.parametrize("recipe", [RECIPES[0], pytest.param(RECIPES[1], marks=pytest.mark.integration)])
def test_any_number_of_rows_runs_in_fp8(recipe: str) -> None:
    pair = of_module(Attends, X[:, :5], recipe)
    for _ in range(3):
        pair.hold(trained)


@pytest.mark.integration  # test_attacks_training.py freezes parts
def test_frozen_parameters_get_no_gradients() -> None:
    pair = of_module(Attends)
    for frozen in (("norm.weight", "norm.bias"), ("attention.q_proj.weight",), ()):
        for model in (pair.exact, pair.eager, pair.compiled):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name not in frozen)
        for _ in range(3):
            pair.hold(trained)


def test_inputs_get_gradients() -> None:
    pair = of_module(Attends)

    def of_input(model: nn.Module, inputs: Inputs) -> list[Tensor]:
        x = inputs["x"].clone().requires_grad_()
        return list(torch.autograd.grad(model.train()(x).double().square().sum(), x))

    for _ in range(3):
        pair.hold(of_input)


def test_weights_are_quantized_once_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_training_may_follow_inference_mode() -> None:
    pair = of_module(Block)
    for _ in range(3):
        with torch.inference_mode():
            pair.hold(run)
    for _ in range(3):
        pair.hold(trained)
    assert not pair.notes


def test_accumulate_runs_uncompiled(compilations: Compiler) -> None:
    pair = of_module(Block)

    def accumulated(model: nn.Module, inputs: Inputs) -> list[Tensor]:
        if model is pair.exact:
            return trained(model, inputs)
        model.zero_grad()
        with te_transform.accumulate(model, steps=1):
            model.train()(**inputs).double().square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for _ in range(3):
        accumulated(pair.eager, pair.inputs)
        pair.hold(accumulated)
    assert not compilations
    why = "did not run compiled: in accumulate(), kernels add gradients to buffers"
    assert te_transform.report(pair.compiled).fallbacks == {why: 3}
    for _ in range(2):
        pair.hold(trained)
    assert compilations


class Layers(nn.Module):
    """Three blocks, each under a checkpoint, all under one, or none."""

    def __init__(self, under: str = "none"):
        super().__init__()
        self.layers, self.under = nn.ModuleList(Block() for _ in range(3)), under

    def forward(self, x: Tensor) -> Tensor:
        if self.under == "all":
            return torch.utils.checkpoint.checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            each = self.under == "each"
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if each else layer(x)
        return x


@pytest.mark.parametrize("under", ["each", "all"])
def test_checkpoints_repeat_compiled_calls(under: str, ran: list[str]) -> None:
    """Losses and gradients are bitwise those without checkpoints, also if two backwards wait."""

    def steps(under: str) -> list[list[Tensor]]:
        model = seeded(Layers).bfloat16().train()
        model.under, found = under, []
        model = te_transform.convert(
            model, {"x": X}, backend="te", recipe="fp8-delayed", compile=True, verify=False
        )
        for waiting in (1, 2, 1, 2):
            ran.clear()
            losses = [model((X * (1 + n)).requires_grad_()).double().square().sum() for n in range(waiting)]
            for loss in reversed(losses):
                loss.backward()
            found.append([*losses, *(parameter.grad for parameter in model.parameters())])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 1e-3 * parameter.grad.sign()
            model.zero_grad()
        return found

    for wanted, found in zip(steps("none"), steps(under), strict=True):
        assert all(map(torch.equal, found, wanted))
    assert ran.count("compiled") == 2 * 2 * 3  # each of three layers, in two forwards and two backwards
    assert "fused" not in ran


@pytest.mark.parametrize("options", [{"compile": True}, {"graphs": True}], ids=str)
@pytest.mark.parametrize("under", ["each", "all"])
@pytest.mark.usefixtures("cuda_graphs")
def test_checkpoints_are_as_exact(under: str, options: dict) -> None:
    """Calls without a history are compiled from the second on, in the first forward too."""
    wanted = gradients(seeded(Layers).double(), {"x": X.double()})
    found = []
    for told in ({}, options):
        model = seeded(Layers).bfloat16()
        model.under = under
        model = te_transform.convert(
            model, {"x": X}, backend="te", recipe="fp8-current", verify=False, **told
        )
        found.append([distance(trained(model, {"x": X}), [*wanted.values()]) for _ in range(3)])
    assert all(theirs <= 1.2 * own for own, theirs in zip(*found, strict=True))


def test_a_reentrant_checkpoint_repeats_a_compiled_forward_in_fp8() -> None:
    options = {"backend": "te", "recipe": "fp8-delayed", "compile": True, "verify": False}
    model = te_transform.convert(seeded(Block).bfloat16(), {"x": X}, **options).train()
    for _ in range(3):
        x = X.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).double().square().sum().backward()
    assert not any((of_gradients[::2] == 1).any() for of_gradients in scales(model)[1::2])


class WithHead(nn.Module):
    """A norm, a head and a loss behind a block."""

    def __init__(self):
        super().__init__()
        self.block, self.norm, self.head = Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4112, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.norm(self.block(x)))
        return F.cross_entropy(logits.float().flatten(0, 1), torch.arange(32, device=x.device)), logits


def trained_by_loss(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    return stepped(model, model(**inputs)[0])


def stepped(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_of_a_head_in_fp8_get_a_gradient_if_they_need_one(
    recipe: str, compilations: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a loss they get no gradient of zeros, for which the head is compiled by itself."""

    def of_both(model: nn.Module, inputs: Inputs) -> list[Tensor]:
        loss, logits = model(**inputs)
        return stepped(model, loss + logits.double().square().mean())

    monkeypatch.setattr(lm_head, "COPIED", 0)
    pair = of_module(WithHead, recipe=te_transform.PrecisionPlan(recipe, {"head": "fp8"}))
    for _ in range(3):  # the scales of delayed scaling follow the calls
        pair.hold(trained_by_loss)
    *_, (head, _) = compilations
    assert any(node.op == "call_module" for node in head.graph.nodes)
    assert len(compilations) == 2
    for act in (of_both, of_both, trained_by_loss):
        pair.hold(act)
    assert len(compilations) == 3
    assert not pair.notes


def test_the_weight_of_a_head_beside_a_loss_is_quantized_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "COPIED", 0)
    pair = of_module(WithHead, recipe=te_transform.PrecisionPlan("fp8-delayed", {"head": "fp8"}))
    for _ in range(3):
        pair.hold(trained_by_loss)
    loss, _ = pair.compiled(**pair.inputs)
    in_fp8 = [tensor.numel() for tensor in loss.grad_fn.saved_tensors if tensor.dtype.itemsize == 1]
    assert in_fp8 == [X.numel()]  # no transpose of the weight


class Regions(nn.Module):
    """Layers in fp32, of which one has the other mode of torch.autocast than the call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        with torch.autocast("cpu", torch.bfloat16, enabled=not torch.is_autocast_enabled("cpu")):
            x = self.inner(x.float()).relu()
        return x + self.last(x.float())


@pytest.mark.parametrize(("outside", "expected"), [(True, {"first", "last"}), (False, {"inner"})])
def test_the_first_call_compiles_the_products_that_an_uncompiled_call_runs_in_fp8(
    outside: bool, expected: set[str], compilations: Compiler
) -> None:
    """With fp32 weights, the products within torch.autocast."""
    x = X.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=outside):
        options = {"backend": "te", "recipe": "fp8-current", "verify": False}
        eager = te_transform.convert(seeded(Regions), x, **options)
        compiled = te_transform.convert(seeded(Regions), x, compile=True, **options)
        out = compiled(x)
        torch.testing.assert_close(out, eager(x), rtol=0.05, atol=0.05)
    ran = {name.split(".")[0] for name, p in eager.named_parameters() for k in kernels(p) if k.in_fp8}
    products = [node for node in compilations[0][0].graph.nodes if "state" in node.kwargs]
    assert ran == expected
    assert {str(node.target).split("_")[0] for node in products} == expected


def kernels(parameter: Tensor) -> list[Any]:
    return [*state_of(parameter).kernels.values()]


def test_fp8_only_weights_run_uncompiled(compilations: Compiler) -> None:
    pair = of_module(lambda: Block().requires_grad_(False))
    for _ in range(2):
        pair.hold(run)
    held = te_transform.quantize_weights(pair.compiled).names
    assert held == ("mlp.fc1.weight", "mlp.fc2.weight")
    compilations.clear()
    for _ in range(2):
        pair.hold(run)
    assert not compilations
    why = "did not run compiled: TE's modules multiply weights that are held in FP8 alone"
    assert te_transform.report(pair.compiled).fallbacks[why] == 2


def test_recipes_without_compiled_products_run_uncompiled_with_a_reason(compilations: Compiler) -> None:
    pair = of_module(Block, recipe="fp8-block")
    for _ in range(2):
        pair.hold(trained)
    assert not compilations
    assert pair.notes == ["graphs run uncompiled: Float8BlockScaling runs only in TE's modules"]


def test_sites_that_a_precision_plan_excludes_compile_without_fp8(compilations: Compiler) -> None:
    plan = te_transform.PrecisionPlan("fp8-delayed", {"mlp": "as asked"})
    pair = of_module(Block, recipe=plan)
    for _ in range(2):
        pair.hold(trained)
    assert [node for node in compilations[0][0].graph.nodes if "state" in node.kwargs] == []


def test_verify_compares_no_compiled_graphs() -> None:
    pair, recipes = of_module(Block), Mock()  # the stand-in cannot be emulated
    assert Conversion(pair.eager, pair.compiled, recipes).modes == ()
