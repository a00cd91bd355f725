"""FP8 is emulated as it is defined, on the products that run in it and no others, and verify() goes by it."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

import te_transform
from te_transform.autocast import AutocastSlot, Precision, precisions
from te_transform.backends import torch as plain
from te_transform.check import place
from te_transform.emit import enter_precision
from te_transform.emulate import E4M3, E5M2, Formats, Quantiser, emulated, formats_of, product
from te_transform.originals import fusions, original_parameters
from te_transform.replay import in_double, only, run, unquantised
from te_transform.verify import verify
from tests.conftest import only_joined
from tests.conversions import cast
from tests.zoo import CASES, Inputs

KINDS = ("delayed", "float8_current_scaling", "float8_block_scaling", "mxfp8")


class Recipe:
    """What emulate.py reads of a TE recipe, at TE's defaults."""

    def __init__(self, kind: str, **changed: object):
        self.kind, self.backward_override = kind, None
        hybrid = kind in ("delayed", "float8_current_scaling")
        self.fp8_format = SimpleNamespace(name="HYBRID" if hybrid else "E4M3")
        if kind in ("float8_current_scaling", "float8_block_scaling"):
            role = SimpleNamespace(power_2_scale=kind == "float8_block_scaling")
            self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = role
        if kind == "float8_block_scaling":
            self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim = 1, 2, 1
        vars(self).update(changed)

    def __getattr__(self, name: str) -> Callable[[], bool]:
        if name not in KINDS:
            raise AttributeError(name)
        return lambda: name == self.kind


FORMATS = {kind: formats_of(Recipe(kind)) for kind in KINDS}
each_kind = pytest.mark.parametrize("kind", KINDS)


def values_of(dtype: torch.dtype) -> list[float]:
    """Every finite number of the format, decoded from its bits by hand."""
    exponents, mantissas, bias = (4, 3, 7) if dtype == E4M3 else (5, 2, 15)
    found = []
    for exponent, mantissa in itertools.product(range(2**exponents), range(2**mantissas)):
        fraction = mantissa / 2**mantissas
        subnormal = exponent == 0
        found.append((fraction if subnormal else 1 + fraction) * 2.0 ** (max(exponent, 1) - bias))
    found = found[:-1] if dtype == E4M3 else found[: -(2**mantissas)]  # NaN; infinity and NaNs
    return sorted({sign * value for value in found for sign in (1, -1)})


def nearest(value: float, held: list[float]) -> float:
    """The nearest of `held`; of two, that whose last bit is 0, every second one."""
    distance = min(abs(value - h) for h in held)
    ties = [h for h in held if abs(value - h) == distance]
    positive = [h for h in held if h >= 0]
    return min(ties, key=lambda h: positive.index(abs(h)) % 2)


def by_hand(x: Tensor, dtype: torch.dtype, block: tuple[int, int] | None, powers: bool) -> Tensor:
    """Block by block, element by element."""
    held, limit = values_of(dtype), torch.finfo(dtype).max
    rows, columns = block or x.shape
    out = torch.empty_like(x)
    for top, left in itertools.product(range(0, x.shape[0], rows), range(0, x.shape[1], columns)):
        part = x[top : top + rows, left : left + columns]
        amax = part.abs().max()
        scale = limit / amax if amax > 0 else torch.tensor(1.0)
        if powers:
            scale = 2.0 ** torch.floor(torch.log2(scale.double())).float()
        for i, j in itertools.product(*map(range, part.shape)):
            scaled = max(-limit, min(limit, float(part[i, j] * scale)))
            out[top + i, left + j] = torch.tensor(nearest(scaled, held)) / scale
    return out


# Quantisers


def test_the_formats_hold_what_their_bits_say() -> None:
    for dtype, largest, least in ((E4M3, 448.0, 2.0**-9), (E5M2, 57344.0, 2.0**-16)):
        held = values_of(dtype)
        assert max(held) == largest == torch.finfo(dtype).max
        assert min(value for value in held if value > 0) == least
        as_they_are = torch.tensor([held])  # the largest is in range as it is: the scale is 1
        assert torch.equal(Quantiser(dtype)(as_they_are), as_they_are)


@pytest.mark.parametrize("powers", [False, True], ids=["any scale", "powers"])
@pytest.mark.parametrize("block", [None, (1, 4), (4, 1), (3, 4), (16, 16)], ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_blocks_are_rounded_as_by_hand(
    dtype: torch.dtype, block: tuple[int, int] | None, powers: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 10) * torch.logspace(-4, 4, 10)
    x[2, 4:8] = 0.0
    assert torch.equal(Quantiser(dtype, block, powers)(x), by_hand(x, dtype, block, powers))


def test_turned_is_the_transpose_of_the_transpose() -> None:
    x = torch.randn(5, 10)
    for block in (None, (1, 4), (3, 4)):
        quantiser = Quantiser(E4M3, block, True)
        assert torch.equal(quantiser.turned(x), quantiser(x.t()).t())


def test_known_values() -> None:
    whole, powers = Quantiser(E4M3), Quantiser(E4M3, None, True)
    # 448 is the largest: scale 1. 17 lies between 16 and 18, 19 between 18 and 20: to the even mantissa
    x = torch.tensor([[448.0, 17.0, 19.0, -17.5, 2.0**-9, 2.0**-10, 0.0]])
    assert whole(x).tolist() == [[448.0, 16.0, 20.0, -18.0, 2.0**-9, 0.0, 0.0]]
    # 449 needs a scale of less than 1, of which the next power of two is 1/2
    assert powers(torch.tensor([[449.0, 2.0**-8, 2.0**-9]])).tolist() == [[448.0, 2.0**-8, 0.0]]
    assert whole(torch.tensor([[449.0, 1.0]]))[0, 0].item() == pytest.approx(449.0, rel=1e-6)


def test_zeros_infinities_and_extremes() -> None:
    for quantiser in (Quantiser(E4M3), Quantiser(E4M3, (1, 2), True)):
        assert torch.equal(quantiser(torch.zeros(3, 4)), torch.zeros(3, 4))
        assert torch.equal(quantiser(torch.full((1, 2), 1e-44)).isnan(), torch.zeros(1, 2, dtype=bool))
        beyond = quantiser(torch.tensor([[float("inf"), 1.0]]))  # saturates, and scales nothing away
        assert beyond.tolist() == [[448.0, 1.0]]
        assert quantiser(torch.tensor([[float("nan"), 1.0]])).isnan()[0, 0]


# Recipes


def test_the_formats_of_each_recipe() -> None:
    assert FORMATS["delayed"] == Formats(Quantiser(E4M3), Quantiser(E4M3), Quantiser(E5M2))
    assert FORMATS["float8_current_scaling"] == FORMATS["delayed"]
    row, square = Quantiser(E4M3, (1, 128), True), Quantiser(E4M3, (128, 128), True)
    assert FORMATS["float8_block_scaling"] == Formats(row, square, row)
    assert FORMATS["mxfp8"] == Formats(*[Quantiser(E4M3, (1, 32), True)] * 3)


def test_recipes_are_read_and_not_known_by_heart() -> None:
    powers = SimpleNamespace(power_2_scale=True)
    changed = Recipe("float8_current_scaling", fp8_quant_bwd_grad=powers)
    assert formats_of(changed) == Formats(Quantiser(E4M3), Quantiser(E4M3), Quantiser(E5M2, None, True))
    assert formats_of(Recipe("delayed", fp8_format=SimpleNamespace(name="E4M3"))).grad == Quantiser(E4M3)
    assert formats_of(Recipe("float8_block_scaling", w_block_scaling_dim=1)).weight.block == (1, 128)
    assert formats_of(Recipe("mxfp8", enable_2d_quantization=True)).weight.block == (32, 32)


@pytest.mark.parametrize("recipe", [Recipe("nvfp4"), Recipe("mxfp8", backward_override="dequantized")])
def test_recipes_without_emulation_are_refused(recipe: Recipe) -> None:
    with pytest.raises(
        ValueError, match=r"verify\(\) has no emulation of Recipe as it is, a recipe of delayed"
    ):
        formats_of(recipe)


# The product


def wide(rows: int, columns: int) -> Tensor:
    """Columns of very different sizes: a block that spans them loses what a block within one keeps."""
    return torch.randn(rows, columns) * 2.0 ** -(torch.arange(columns) % 24)


def close(actual: Tensor, expected: Tensor) -> bool:
    """Whether they differ by rounding alone, of the largest in a row and of the largest in a column."""
    actual, dtype = actual.detach().reshape(expected.shape), actual.dtype
    largest = torch.minimum(expected.abs().amax(0, keepdim=True), expected.abs().amax(1, keepdim=True))
    return ((actual - expected).abs() <= 8 * torch.finfo(dtype).eps * largest).all()


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_and_its_gradients(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    f = FORMATS[kind]
    x, weight = (wide(*s).to(dtype) for s in ((40, 40), (72, 40)))
    bias, grad = torch.randn(72).to(dtype), (wide(40, 72) * 1e-6).to(dtype)
    given = [tensor.requires_grad_() for tensor in (x.reshape(2, 20, 40), weight.clone(), bias.clone())]

    out = product(*given, f)
    dx, dw, db = torch.autograd.grad(out, given, grad.reshape(2, 20, 72))

    assert out.shape == (2, 20, 72)
    assert [tensor.dtype for tensor in (out, dx, dw, db)] == [dtype] * 4
    x, g, w = x.float(), grad.float(), weight.float()
    assert close(out, f.input(x) @ f.weight(w).t() + bias.float())
    assert close(dx, f.grad(g) @ f.weight(w.t()).t())
    assert close(dw, f.grad(g.t()) @ f.input(x.t()).t())
    assert close(db, g.sum(0, keepdim=True))


def test_a_product_of_what_fp8_holds_is_exact() -> None:
    x, weight = torch.tensor([[448.0, 2.0], [1.0, -16.0]]), torch.tensor([[448.0, 0.5], [4.0, 8.0]])
    for formats in FORMATS.values():
        assert torch.equal(product(x, weight, None, formats), x @ weight.t())


# The context manager


class Mixed(nn.Module):
    """Everything that a linear can be: of a norm, joined with others, transposed, the output, of a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.post = nn.LayerNorm(32), nn.LayerNorm(32)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.proj = Conv1D(32, 32)
        nn.init.normal_(self.proj.bias)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.last = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.proj(torch.tanh(self.q(h)) * torch.tanh(self.k(h)) + self.v(h))
        h = self.post(x)
        return self.last(x + self.down(F.silu(self.gate(h)) * self.up(h)))


LINEARS = ("q", "k", "v", "proj", "gate", "up", "down", "last")


class Products(TorchFunctionMode):
    """Each product with one of `weights` is computed by `multiply`."""

    def __init__(self, weights: list[Tensor], multiply: Callable[..., Tensor]):
        super().__init__()
        self.weights, self.multiply = weights, multiply

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and any(args[1] is weight for weight in self.weights):
            return self.multiply(*args)
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class OnCPU(Precision):
    """A recipe whose kernels are `multiply`, in the fused modules; it keeps what it was entered with."""

    multiply: Callable[..., Tensor] = None
    entered: list = None

    def forget(self) -> None:
        """Nothing is kept."""

    def run(self, model: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> object:
        inside = [f.fused for f in fusions(model) if f.fused in self.modules and f.enabled]
        self.entered.append((next(model.parameters()).dtype, bool(inside)))
        weights = [getattr(module, name) for module in inside for name in module.weight_names]
        with Products(weights, self.multiply):
            return forward(*args, **kwargs)


def _nothing() -> None:
    pass


def _states(scales: Tensor) -> dict[str, list[Tensor]]:
    return {"scaling_fwd": [scales.clone(), torch.zeros(1, 1)]}


def _reset(scales: Tensor, states: dict[str, list[Tensor]] | None = None) -> None:
    scales.copy_(torch.ones(1) if states is None else states["scaling_fwd"][0])


def quantise(
    converted: nn.Module,
    recipe: Recipe,
    multiply: Callable[..., Tensor] | None = None,
    outside: tuple[str, ...] = (),
) -> nn.Module:
    """Let a converted model run in a recipe of OnCPU's, but for hosts in `outside`."""
    modules = []
    for fusion in fusions(converted):
        names = sorted({"weight", "fc1_weight", "fc2_weight"} & fusion.layouts.keys())
        fusion.fused.weight_names = tuple(names)
        fusion.fused.forget_weights = _nothing
        modules += [fusion.fused] if names and place(fusion) not in outside else []
        if recipe.delayed():
            scales = fusion.fused.scales = torch.ones(1)
            fusion.fused.get_fp8_meta_tensors = partial(_states, scales)
            fusion.fused.reset_fp8_meta_tensors = partial(_reset, scales)
    multiply = multiply or (lambda x, weight, bias=None: product(x, weight, bias, formats_of(recipe)))
    enter_precision(converted, OnCPU(recipe, modules, multiply=multiply, entered=[]))
    return converted


def mixed(kind: str = "mxfp8", dtype: torch.dtype = torch.bfloat16, **options: object) -> tuple:
    """The original, the converted model in a recipe, and an input."""
    model, converted, x = copy.deepcopy(_mixed(dtype, plain.PLAIN))
    return model, quantise(converted, Recipe(kind), **options), x


@cache
def _mixed(dtype: torch.dtype, norms_apart: bool) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Mixed().to(dtype), torch.randn(4, 8, 32).to(dtype)
    return model, te_transform.convert(model, (x,), verify=False), x


@pytest.mark.parametrize("norms", ["apart", "joined"], indirect=True)
def test_each_linear_in_the_recipe_is_emulated_and_no_other(norms: str) -> None:
    model, converted, _ = mixed(outside=("last",))
    forwards = {name: getattr(model, name).forward for name in LINEARS}
    with emulated(model, converted):
        for name in LINEARS:
            linear = getattr(model, name)
            given = torch.randn(4, 8, 64 if name == "down" else 32).bfloat16()
            if name == "last":
                expected = F.linear(given, linear.weight, linear.bias)
            else:
                weight = linear.weight.t() if name == "proj" else linear.weight
                expected = product(given, weight, linear.bias, FORMATS["mxfp8"])
                assert not torch.equal(expected, forwards[name](given))
            assert torch.equal(linear(given), expected), name
    assert {name: getattr(model, name).forward for name in LINEARS} == forwards


@pytest.mark.parametrize("norms", ["apart", "joined"], indirect=True)
def test_a_converted_model_is_emulated_on_its_own_original_modules(norms: str) -> None:
    model, itself, x = mixed()
    with emulated(model, itself):
        expected = model(x)
    with only((), fusions(itself)), unquantised(itself), emulated(itself, itself):
        assert torch.equal(itself(x), expected)


def test_everything_is_put_back_whatever_is_raised() -> None:
    model, converted, _ = mixed()
    mine = lambda x: x  # noqa: E731 - a forward of the user's own
    model.q.forward = mine
    before = [sorted(vars(module)) for module in model.modules()]
    with contextlib.suppress(ZeroDivisionError), emulated(model, converted):
        assert "forward" in vars(model.proj)
        assert model.q.forward is not mine
        raise ZeroDivisionError
    assert [sorted(vars(module)) for module in model.modules()] == before
    assert model.q.forward is mine

    precisions(converted)[""].recipe = Recipe("nvfp4")
    with pytest.raises(ValueError, match="no emulation"), emulated(model, converted):
        pass
    assert [sorted(vars(module)) for module in model.modules()] == before


def test_what_no_fp8_kernel_takes_runs_as_it_is() -> None:
    model, converted, x = mixed(dtype=torch.float32)
    expected = model(x)
    with emulated(model, converted):
        assert torch.equal(model(x), expected)
        assert model(x[:0]).shape == (0, 8, 16)


def test_random_rounding_reaches_emulated_products() -> None:
    model, converted, x = mixed()
    given = te_transform.inputs.Inputs((x,))
    with emulated(model, converted):
        runs = [
            run(model, given, original_parameters(model), training=True, rounding=r) for r in (None, 0, 0)
        ]
        alone = (
            run(model.last, given, {}, training=True),
            run(model.last, given, {}, training=True, rounding=1),
        )
    once, drawn, again = runs
    assert not torch.equal(once.outputs[""], drawn.outputs[""])
    assert torch.equal(drawn.outputs[""], again.outputs[""])
    for name, gradient in once.gradients.items():
        assert not torch.equal(gradient, drawn.gradients[name]), name
    # of a product alone the result is off, by half an ulp at most, and nothing that goes into it
    exact, off = (one.outputs[""].float() for one in alone)
    assert not torch.equal(exact, off)
    assert ((exact - off).abs() <= 2**-7 * exact.abs()).all()


# verify()


def coarser(recipe: Recipe, bits: int) -> Callable[..., Tensor]:
    """The recipe's products on operands with so many bits less than the 3 of E4M3's mantissas."""

    def rounded(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x.float())
        steps = 2 ** (4 - bits)  # a mantissa is from 1/2 on
        return torch.ldexp((mantissa * steps).round() / steps, exponent).to(x.dtype)

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(rounded(x), rounded(weight), bias, formats_of(recipe))

    return multiply


@each_kind
@only_joined
def test_a_model_as_exact_as_fp8_can_be_passes(kind: str) -> None:
    model, converted, x = mixed(kind)
    result = verify(model, converted, (x,))
    assert result, str(result)
    assert f"note: 'original' is emulated, as exact as FP8 can be in {Recipe.__name__}" in str(result)
    # not for being measured by bf16: what it was measured by is as far off as FP8 is
    assert all(row.original > 4 * torch.finfo(torch.bfloat16).eps for row in output_rows(result))
    entered = precisions(converted)[""].entered
    assert entered
    assert set(entered) == {(torch.bfloat16, True)}


@pytest.mark.parametrize(("kind", "bits"), [("delayed", 3), ("mxfp8", 3), ("mxfp8", 1)])
@only_joined
def test_one_with_fewer_bits_than_fp8_fails(kind: str, bits: int) -> None:
    model, converted, x = mixed(kind, multiply=coarser(Recipe(kind), bits))
    result = verify(model, converted, (x,))
    assert not any(row.ok for row in output_rows(result))
    assert result.guilty


@only_joined
def test_one_that_quantises_a_product_it_should_not_fails() -> None:
    model, converted, x = mixed()
    precision = precisions(converted)[""]
    every, precision.modules = list(precision.modules), []
    precision.run = lambda model, forward, args, kwargs: within(every, forward, args, kwargs)
    assert not verify(model, converted, (x,))


def within(modules: list[nn.Module], forward: Callable, args: tuple, kwargs: dict) -> object:
    weights = [getattr(module, name) for module in modules for name in module.weight_names]
    with Products(weights, lambda x, w, b=None: product(x, w, b, FORMATS["mxfp8"])):
        return forward(*args, **kwargs)


@only_joined
def test_in_place_neither_the_reference_nor_the_original_is_in_the_recipe() -> None:
    _, itself, x = mixed()
    result = verify(itself, itself, (x,))
    assert result, str(result)
    assert all(row.original > 4 * torch.finfo(torch.bfloat16).eps for row in output_rows(result))
    assert set(precisions(itself)[""].entered) == {(torch.bfloat16, True)}
    assert isinstance(itself, AutocastSlot)  # again
    assert not isinstance(in_double(itself), AutocastSlot)


@only_joined
def test_delayed_scaling_is_judged_with_the_scales_of_a_step_like_this_one() -> None:
    steps: list[Tensor] = []

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """By the input's scale of the last step, as large as it was for that weight."""
        module = next(m for m in precision.modules for n in m.weight_names if getattr(m, n) is weight)
        steps.append(module.scales.clone())
        limited = x.clamp(-module.scales.item(), module.scales.item())
        module.scales.copy_(torch.maximum(module.scales, x.detach().abs().amax()))
        return product(limited, weight, bias, FORMATS["delayed"])

    model, converted, x = mixed("delayed", multiply=multiply)
    precision = precisions(converted)[""]
    assert verify(model, converted, (x,))
    assert any(step > 1 for step in steps)
    assert all(module.scales == 1 for module in precision.modules)  # as before


def test_a_recipe_without_emulation_is_said_before_anything_runs() -> None:
    model, converted, x = mixed()
    precisions(converted)[""].recipe = Recipe("nvfp4")
    with pytest.raises(ValueError, match="no emulation"):
        verify(model, converted, (x,))
    assert not precisions(converted)[""].entered


def test_without_a_recipe_nothing_is_emulated() -> None:
    model, inputs = CASES["gpt2"].build(), CASES["gpt2"].sample()
    result = verify(model, te_transform.convert(model, inputs), inputs)
    assert result
    assert "emulated" not in str(result)
    assert all(row.original < 1e-4 for row in output_rows(result))


@only_joined
@pytest.mark.parametrize("kind", ["delayed", "float8_block_scaling"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_the_zoo(name: str, kind: str) -> None:
    model = CASES[name].build().bfloat16()
    inputs: Inputs = cast(CASES[name].sample(), torch.bfloat16)
    converted = te_transform.convert(model, inputs, verify=False)
    result = verify(model, quantise(converted, Recipe(kind)), inputs)
    assert result, str(result)


def output_rows(result: te_transform.Verification) -> Iterator:
    return (row for row in result.rows if row.name.startswith("output"))


@only_joined
def test_a_tied_heads_product_is_the_heads_and_not_the_embeddings() -> None:
    model = CASES["gpt2"].build().bfloat16()
    inputs: Inputs = cast(CASES["gpt2"].sample(), torch.bfloat16)
    converted = quantise(te_transform.convert(model, inputs, verify=False), Recipe("mxfp8"))
    assert model.lm_head.weight is model.transformer.wte.weight
    with emulated(model, converted):
        assert "forward" in vars(model.lm_head)
        assert "forward" not in vars(model.transformer.wte)
    assert "forward" not in vars(model.lm_head)
