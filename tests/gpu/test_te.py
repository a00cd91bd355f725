"""The ops of backends/te/ on Transformer Engine itself, against plain PyTorch in fp64."""

import math
from collections.abc import Iterator
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_transform.backends import plain
from te_transform.backends.fp8.current_model import running
from te_transform.backends.fp8.gradient_sums import GradientSums
from te_transform.backends.fp8.registry import share_state, state_of
from te_transform.backends.joined import Join, make_adjacent
from te_transform.fp8_only.weights import quantize_together
from te_transform.graph import ops

ROWS, WIDTH, INNER = 64, 256, 384
BF16 = torch.bfloat16
RECIPES = ("fp8-delayed", "fp8-current", "fp8-block")
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
LAYER = {"eps": 1e-5, "normalization": "LayerNorm", "zero_centered_gamma": False}
RMS = {"eps": 1e-6, "normalization": "RMSNorm", "zero_centered_gamma": False}
NORMS = {
    **dict.fromkeys(("layer", "layer, no bias", "layer, bare"), LAYER),
    **dict.fromkeys(("rms", "rms, bare"), RMS),
    "rms, zero-centred": {"eps": 1e-6, "normalization": "RMSNorm", "zero_centered_gamma": True},
}
MLPS = [("no", name) for name in plain.ACTIVATIONS.values()]
MLPS += [("first half", name) for name in plain.GATED_ACTIVATIONS.values()]
MLPS += [("first half", plain.clamped(*limits)) for limits in (("silu", 0.7, 0), ("quick_gelu", 0.7, 1))]


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * scale).to("cuda", BF16)


X = (2, ROWS // 2, WIDTH)


class Case:
    """An op on TE, the same in plain PyTorch, and parameters for both."""

    def __init__(self, name: str, norm: str = "layer", bias: bool = True, **options: Any):
        from te_transform.backends import te

        options = {**({} if name == "Linear" else NORMS[norm]), **options}
        self.op, self.plain = getattr(te, name)(**options), getattr(plain, name)(**options)
        outs = 2 * INNER if options.get("gated") == "first half" else INNER
        shapes: list[tuple[int, ...] | None] = [(outs, WIDTH), (outs,) if bias else None]
        if name != "Linear":
            shapes = [None if "bare" in norm else (WIDTH,), (WIDTH,) if norm == "layer" else None, *shapes]
        if name == "LayerNormMLP":
            shapes += [(WIDTH, INNER), (WIDTH,) if bias else None]
        self.tensors = [
            None
            if shape is None
            else nn.Parameter(random(*shape, seed=seed, scale=0.05 if len(shape) == 2 else 0.5))
            for seed, shape in enumerate(shapes, 1)
        ]

    @property
    def trained(self) -> list[nn.Parameter]:
        return [tensor for tensor in self.tensors if tensor is not None]

    def __call__(self, x: Tensor) -> Tensor:
        return self.op(x, *self.tensors)

    @property
    def kernel(self) -> Any:
        (kernel,) = state_of(self.tensors[self.op.PRODUCTS[0] - 1]).kernels.values()
        return kernel


def step(op: Any, x: Tensor, tensors: list[Tensor | None]) -> list[Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    trained = [x, *(t for t in tensors if t is not None)]
    out = op(x, *tensors)
    cotangent = random(*out.shape, seed=99).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, trained, cotangent)]


def exact(case: Case, x: Tensor) -> list[Tensor]:
    wide = [None if t is None else t.detach().double().requires_grad_() for t in case.tensors]
    return step(case.plain, x.double(), wide)


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    pairs = zip(found, wanted, strict=True)
    return [((f.double() - w).norm() / w.norm()).item() for f, w in pairs]


CASES: dict[str, dict[str, Any]] = {
    "linear": {"name": "Linear"},
    "linear without bias": {"name": "Linear", "bias": False},
    **{f"{norm} linear": {"name": "LayerNormLinear", "norm": norm} for norm in NORMS},
    "rms linear without bias": {"name": "LayerNormLinear", "norm": "rms", "bias": False},
    "bare mlp": {"name": "LayerNormMLP", "norm": "layer, bare", "gated": "no", "activation": "gelu"},
    **{
        f"{norm} mlp, {activation}, bias {bias}": {
            "name": "LayerNormMLP", "norm": norm, "bias": bias, "gated": gated, "activation": activation,
        }
        for (gated, activation), norm, bias in zip(
            MLPS, cycle(["layer", "rms", "rms, zero-centred"]), cycle([True, False]), strict=False
        )
    },
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)


@each_case
def test_is_as_exact_as_plain_pytorch(name: str) -> None:
    case, x = Case(**CASES[name]), random(*X)
    wanted = exact(case, x)
    own = errors(step(case.op, x, case.tensors), wanted)
    theirs = errors(step(case.plain, x, case.tensors), wanted)
    assert all(o <= 1.2 * t + 2**-8 for o, t in zip(own, theirs, strict=True)), (own, theirs)
    assert not case.op.plain_calls


@each_recipe
@each_case
def test_fp8_is_rounding_and_no_more(name: str, recipe: str) -> None:
    from te_transform.backends import te

    case, x, recipe = Case(**CASES[name]), random(*X), te.recipe_of(recipe)
    for _ in range(3):
        with te.autocast(recipe):
            found = step(case.op, x, case.tensors)
    assert case.kernel.in_fp8
    own = errors(found, exact(case, x))
    # a relu's derivative jumps where rounding by e = 0.05 changes a sign: for atan(e) / pi of the numbers, of
    # which one half counts; a clamp's jumps at its limits
    has_jumps = any(word in name for word in ("relu", "reglu", "clamped"))
    jumps = math.sqrt(2 * math.atan(0.05) / math.pi) if has_jumps else 0.0
    assert max(own) < math.hypot(0.15, jumps), own
    assert own[0] > 2**-8


@each_recipe
@pytest.mark.parametrize("rows", [1, 7, 16, 17])
def test_any_number_of_rows(rows: int, recipe: str) -> None:
    from te_transform.backends import te

    case, x, recipe = Case("LayerNormLinear"), random(rows, WIDTH), te.recipe_of(recipe)
    for _ in range(2):
        with te.autocast(recipe):
            found = step(case.op, x, case.tensors)
    assert max(errors(found, exact(case, x))) < 0.2


@each_recipe
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["linear", "rms linear", *(n for n in CASES if "mlp" in n)][:4])
def test_checkpoints_repeat_what_the_forward_did(name: str, reentrant: bool, recipe: str) -> None:
    from te_transform.backends import te

    recipe, one, other = te.recipe_of(recipe), Case(**CASES[name]), Case(**CASES[name])
    for number in range(4):
        found = []
        for case in (one, other):
            x = random(*X, seed=number).requires_grad_()
            with te.autocast(recipe):
                out = case(x) if case is one else checkpoint(case, x, use_reentrant=reentrant)
            for weight in case.trained:
                weight.grad = None
            out.float().square().sum().backward()
            found.append([out.detach(), x.grad, *(weight.grad for weight in case.trained)])
        assert torch.equal(found[0][0], found[1][0])
        assert all((a - b).norm() <= 2e-3 * b.norm() for a, b in zip(*found, strict=True)), number


@each_case
def test_every_derivative_is_right(name: str) -> None:
    case, x = Case(**CASES[name]), random(*X)

    def penalty(op: Any, x: Tensor, tensors: list[Tensor | None]) -> list[Tensor]:
        x = x.detach().requires_grad_()
        trained = [x, *(t for t in tensors if t is not None)]
        grads = torch.autograd.grad(op(x, *tensors).float().square().mean(), trained, create_graph=True)
        loss = sum(grad.float().square().sum() for grad in grads)
        return [g for g in torch.autograd.grad(loss, trained, allow_unused=True) if g is not None]

    wide = [None if t is None else t.detach().double().requires_grad_() for t in case.tensors]
    wanted = penalty(case.plain, x.double(), wide)
    own, theirs = (errors(penalty(op, x, case.tensors), wanted) for op in (case.op, case.plain))
    assert all(o <= 1.5 * t + 2**-7 for o, t in zip(own, theirs, strict=True)), (own, theirs)


@each_case
def test_a_backward_can_be_repeated(name: str) -> None:
    case = Case(**CASES[name])
    out = case(random(*X)).float().square().sum()
    first = torch.autograd.grad(out, case.trained, retain_graph=True)
    again = torch.autograd.grad(out, case.trained)
    assert max(errors(list(again), [g.double() for g in first])) < 2**-6


def test_a_product_in_fp8_refuses_a_second_backward() -> None:
    from te_transform.backends import te

    for name in ("linear", "rms linear"):
        for recorded in (False, True):
            case = Case(**CASES[name])
            with te.autocast(te.recipe_of("fp8-current")):
                out = case(random(*X)).float().square().sum()
            if not recorded:
                torch.autograd.grad(out, case.trained, retain_graph=True)
            with pytest.raises(RuntimeError, match="its kernels keep nothing for a second time"):
                torch.autograd.grad(out, case.trained, create_graph=recorded)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("name", ["linear", "rms linear", *(n for n in CASES if "mlp" in n)][:4])
def test_gradients_are_added_to_buffers(name: str, recipe: str | None) -> None:
    from te_transform.backends import te

    case, gradients = Case(**CASES[name]), GradientSums(torch.float32)
    for weight in case.trained:
        state_of(weight).gradients = gradients
    recipe = None if recipe is None else te.recipe_of(recipe)
    samples = [random(*X, seed=seed) for seed in range(50, 54)]  # other numbers than those of the weights
    if te.is_delayed(recipe):  # its scales are found in a call of its own
        with te.autocast(recipe):
            case(samples[0]).float().square().sum().backward()
        for weight in case.trained:
            weight.grad = None
    for x in samples:
        with te.autocast(recipe, enabled=recipe is not None):
            out = case(x)
        out.float().square().sum().backward()
    sums = gradients.by_parameter()
    weights = [case.tensors[place - 1] for place in case.op.PRODUCTS]
    wide = [None if t is None else t.detach().double().requires_grad_() for t in case.tensors]
    for x in samples:
        case.plain(x.double(), *wide).square().sum().backward()
    for place, weight in zip(case.op.PRODUCTS, weights, strict=True):
        assert weight.grad is None
        wanted = wide[place - 1].grad
        assert (sums[weight].double() - wanted).norm() <= (0.01 if recipe is None else 0.15) * wanted.norm()
    biases = [t for t in case.trained if not any(t is weight for weight in weights)]
    assert all(bias.grad is not None for bias in biases)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_joined_and_transposed_weights(recipe: str | None) -> None:
    from te_transform.backends import te

    parts = [nn.Parameter(random(n, WIDTH, seed=n, scale=0.05)) for n in (128, 64, 64)]
    stored = nn.Parameter(random(WIDTH, 128, seed=3, scale=0.05))
    assert make_adjacent(parts)
    recipe, x, op, join = None if recipe is None else te.recipe_of(recipe), random(*X), te.Linear(), Join([])
    for _ in range(3):
        with te.autocast(recipe, enabled=recipe is not None):
            out = torch.cat([op(x, join(*parts), None), op(x, stored.t(), None)], -1)
        found = torch.autograd.grad(out, [*parts, stored], random(*out.shape, seed=9))
    wide = [p.detach().double().requires_grad_() for p in (*parts, stored)]
    exact = x.double() @ torch.cat([torch.cat(wide[:3]).t(), wide[3]], -1)
    wanted = torch.autograd.grad(exact, wide, random(*out.shape, seed=9).double())
    assert max(errors([out, *found], [exact, *wanted])) < (0.01 if recipe is None else 0.15)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
@pytest.mark.parametrize("name", ["linear", "rms linear", *(n for n in CASES if "mlp" in n)][:4])
def test_weights_that_are_held_in_fp8_compute_what_casts_did(name: str, recipe: str) -> None:
    from te_transform.backends import te

    case, x, recipe = Case(**CASES[name]), random(*X), te.recipe_of(recipe)
    for weight in case.trained:
        weight.requires_grad_(False)
    found = []
    for held in (False, True):
        if held:
            for place in case.op.PRODUCTS:
                weight = case.tensors[place - 1]
                (case.tensors[place - 1],) = quantize_together([weight])
                share_state(weight, case.tensors[place - 1])
        for _ in range(3):
            own = x.detach().requires_grad_()
            with te.autocast(recipe):
                out = case(own)
            found.append((out.detach(), *torch.autograd.grad(out, own, random(*out.shape, seed=9))))
    assert all(map(torch.equal, found[2], found[5]))


@pytest.fixture
def _serving() -> Iterator[None]:
    from te_transform.backends import te

    with te.autocast(te.recipe_of("fp8-current")), running(True, lambda: None), torch.no_grad():
        yield


@pytest.mark.usefixtures("_serving")
def test_quantized_weights_are_kept_until_one_is_written_to() -> None:
    case, x = Case("LayerNormLinear"), random(*X)
    first, kept = case(x), dict(case.kernel.module._fp8_workspaces)
    assert kept
    assert torch.equal(case(x), first)
    assert case.kernel.module._fp8_workspaces["weight"] is kept["weight"]
    case.tensors[2].mul_(2)
    assert not torch.equal(case(x), first)
    assert case.kernel.module._fp8_workspaces["weight"] is not kept["weight"]


def test_rotary_and_its_gradient() -> None:
    from te_transform.backends import te

    x, frequencies = random(2, 4, 64, 32), torch.rand(1, 64, 16, device="cuda") * 60
    angles = torch.cat([frequencies, frequencies], -1)
    rotations = te.Rotary(), plain.Rotary(), te.Rotary(1.5), plain.Rotary(1.5)
    for op, given in product(rotations, (angles, angles[0])):
        found = step(lambda x, op=op, given=given: op(x, given), x, [])
        wanted = step(lambda x, op=op: op.factor * _turned(x, angles.double()), x.double(), [])
        assert max(errors(found, wanted)) < 2**-7
        assert not op.plain_calls


@pytest.mark.parametrize("in_pairs", [False, True], ids=["halves", "pairs"])
def test_rotary_of_pairs_and_of_each_sequence(in_pairs: bool) -> None:
    """Strided queries too, as they come from one product."""
    from te_transform.backends import te

    wide, angles = random(2, 64, 4, 48), torch.rand(2, 64, 32, device="cuda") * 60
    op = te.Rotary(in_pairs=in_pairs)
    for x, given in product((random(2, 4, 64, 32), wide.transpose(1, 2)[..., 8:40]), (angles, angles[0])):
        cos, sin = (part[..., None, :, :] for part in (given.double().cos(), given.double().sin()))
        found = step(lambda x, given=given: op(x, given), x, [])
        wanted = step(lambda x, cos=cos, sin=sin: ops.rope(x, cos, sin, False, in_pairs), x.double(), [])
        assert max(errors(found, wanted)) < 2**-7
    assert not op.plain_calls


def test_a_linear_in_fp32_and_its_gradients() -> None:
    from te_transform.backends import te

    x, weight, bias = random(4, 512, 1024), random(72, 1024, seed=1), random(72, seed=2)
    op, alone = te.WideLinear(), plain.WideLinear()
    for tensors in ([weight, None], [weight, bias]):
        found, own = (step(each, x, trained(tensors, BF16)) for each in (op, alone))
        exact = step(nn.functional.linear, x.double(), trained(tensors, torch.float64))
        assert all(f.dtype is o.dtype for f, o in zip(found, own, strict=True))
        pairs = zip(errors(found, exact), errors(own, exact), strict=True)
        assert all(error <= 1.2 * original + 2**-22 for error, original in pairs)
    assert not op.plain_calls


def trained(tensors: list[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    return [t if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * angles.cos()[:, None] + torch.cat([-second, first], -1) * angles.sin()[:, None]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_and_its_gradient(reduction: str) -> None:
    from te_transform.backends import te

    logits = random(2, 33, 515).requires_grad_()
    targets = torch.randint(515, (2, 33), generator=torch.Generator().manual_seed(0)).cuda()
    targets[0, 10:20] = -100
    args = logits, targets, -100, reduction, torch.float32
    found, wanted = te.CrossEntropy()(*args), ops.cross_entropy(*args)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for recorded in (False, True, False):
        grads = [
            torch.autograd.grad(loss.sum(), logits, retain_graph=True, create_graph=recorded)[0].float()
            for loss in (found, wanted)
        ]
        assert (grads[0] - grads[1]).norm() <= 2**-7 * grads[1].norm()
    nothing = te.CrossEntropy()(logits, torch.full_like(targets, -100), *args[2:])
    assert not torch.autograd.grad(nothing.sum(), logits)[0].any()
