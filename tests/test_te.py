"""The ops of backends/te/ on a stand-in for Transformer Engine: what they compute, and what belongs to
whom."""

import copy
import inspect
import pickle
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform.backends import cudnn, limits, plain
from te_transform.backends.fp8.current_model import running
from te_transform.backends.fp8.registry import forget_weights, state_of
from te_transform.backends.joined import Join, make_adjacent
from te_transform.graph import ops
from tests import stand_in
from tests.conversions import ALL

pytestmark = pytest.mark.usefixtures("at_any_size")

ROWS, WIDTH, INNER = 32, 32, 48
NORMS = {
    **dict.fromkeys(("layer", "layer, no bias", "layer, bare"), ("LayerNorm", False)),
    **dict.fromkeys(("rms", "rms, bare"), ("RMSNorm", False)),
    "rms, zero-centred": ("RMSNorm", True),
}
BF16 = torch.bfloat16


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def parameter(*shape: int, seed: int) -> nn.Parameter:
    return nn.Parameter(random(*shape, seed=seed, scale=0.2))


class Case:
    """An op of TE's, the same in plain PyTorch, and parameters for both."""

    def __init__(self, te: ModuleType, op: str, norm: str = "layer", bias: bool = True, **options: Any):
        normalization, centred = NORMS[norm]
        norms = {"eps": 1e-5, "normalization": normalization, "zero_centered_gamma": centred}
        options = {**({} if op == "Linear" else norms), **options}
        self.op, self.plain = getattr(te, op)(**options), getattr(plain, op)(**options)
        gamma = [
            None if "bare" in norm else parameter(WIDTH, seed=1),
            parameter(WIDTH, seed=2) if norm == "layer" else None,
        ]
        outs = 2 * INNER if options.get("gated") == "first half" else INNER
        weights = [parameter(outs, WIDTH, seed=3), parameter(outs, seed=4) if bias else None]
        if op == "LayerNormMLP":
            weights += [parameter(WIDTH, INNER, seed=5), parameter(WIDTH, seed=6) if bias else None]
        self.tensors = weights if op == "Linear" else gamma + weights

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(self.op, x)

    def run(self, op: nn.Module, x: Tensor) -> Tensor:
        """Return the result. If it has two tensors, they are concatenated."""
        out = op(x, *self.tensors)
        return torch.cat(out, -1) if isinstance(out, tuple) else out

    @property
    def trained(self) -> list[nn.Parameter]:
        return [tensor for tensor in self.tensors if tensor is not None]

    def step(self, op: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The output, and the gradients of the input and of every parameter."""
        x = x.detach().requires_grad_()
        out = self.run(op, x)
        grads = torch.autograd.grad(out, [x, *self.trained], random(*out.shape, seed=9))
        return out.detach(), list(grads)


X = random(2, ROWS // 2, WIDTH, seed=7)
CASES = {
    "linear": {"op": "Linear"},
    "linear without bias": {"op": "Linear", "bias": False},
    "norm linear": {"op": "LayerNormLinear"},
    "rms linear": {"op": "LayerNormLinear", "norm": "rms, zero-centred", "bias": False},
    "norm without a bias": {"op": "LayerNormLinear", "norm": "layer, no bias"},
    "bare norm linear": {"op": "LayerNormLinear", "norm": "layer, bare"},
    "mlp": {"op": "LayerNormMLP", "activation": "gelu", "gated": "no"},
    "bare rms mlp": {"op": "LayerNormMLP", "norm": "rms, bare", "activation": "silu", "gated": "no"},
    "gated mlp": {
        "op": "LayerNormMLP", "norm": "rms", "bias": False, "activation": "swiglu", "gated": "first half",
    },
    "clamped mlp": {
        "op": "LayerNormMLP", "norm": "rms", "bias": False, "activation": plain.clamped("quick_gelu", 0.5, 1),
        "gated": "first half",
    },
    "norm linear and its norm": {"op": "LayerNormLinear", "returns_norm": True},
    "mlp and its norm": {"op": "LayerNormMLP", "activation": "gelu", "gated": "no", "returns_norm": True},
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)
each_recipe = pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])


def close(found: Tensor, wanted: Tensor, allowed: float) -> bool:
    return bool((found.float() - wanted.float()).norm() <= allowed * wanted.float().norm())


def kernel_of(case: Case) -> Any:
    weight = case.tensors[case.op.PRODUCTS[0] - 1]
    (kernel,) = state_of(weight).kernels.values()
    return kernel


# In the weights' own dtype


@each_case
def test_computes_what_plain_pytorch_does(te: ModuleType, name: str) -> None:
    case = Case(te, **CASES[name])
    found, wanted = case.step(case.op, X), case.step(case.plain, X)
    assert close(found[0], wanted[0], 1e-2)
    assert all(close(f, w, 2e-2) for f, w in zip(found[1], wanted[1], strict=True))
    assert (kernel_of(case).built is not None) == (type(case.op) is not te.Linear)


@pytest.mark.parametrize("name", ["norm linear", "rms linear", "mlp", "bare rms mlp", "gated mlp"])
def test_calls_that_gain_run_in_tes_modules(
    te: ModuleType, name: str, by_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's kernels of norms, and of an activation without a gate, are as fast."""
    monkeypatch.setattr(limits, "break_even_rows", lambda *_: 0)
    case = Case(te, **CASES[name])
    case.step(case.op, X)
    assert (kernel_of(case).built is not None) == (name == "gated mlp") == case.op.gains


def test_a_clamped_gate_needs_a_te_with_its_parameters(
    te: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in.LayerNormMLP, "__doc__", "activation_params: 'limit' and 'alpha'")
    te.activations.with_limits.cache_clear()
    case = Case(te, **CASES["clamped mlp"])
    case.step(case.op, X)
    assert [*case.op.plain_calls] == ["a clamped gate, whose parameters this version of TE does not have"]
    te.activations.with_limits.cache_clear()


def test_the_parameters_stay_the_users_own(te: ModuleType) -> None:
    case = Case(te, **CASES["gated mlp"])
    case.step(case.op, X)
    module = kernel_of(case).module
    assert not list(module.parameters())
    assert not any(isinstance(held, Tensor) for held in vars(module).values())
    assert not any("main_grad" in vars(weight) for weight in case.trained)


@each_case
def test_every_derivative_is_right(te: ModuleType, name: str) -> None:
    case = Case(te, **CASES[name])

    def penalty(op: nn.Module) -> list[Tensor]:
        x = X.detach().requires_grad_()
        grads = torch.autograd.grad(
            case.run(op, x).float().sin().sum(), [x, *case.trained], create_graph=True
        )
        loss = sum(grad.float().square().sum() for grad in grads)
        return list(torch.autograd.grad(loss, [x, *case.trained], allow_unused=True))

    for found, wanted in zip(penalty(case.op), penalty(case.plain), strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or close(found, wanted, 3e-2)


@each_case
def test_a_backward_can_be_repeated(te: ModuleType, name: str) -> None:
    case = Case(te, **CASES[name])
    out = case(X).float().sum()
    first = torch.autograd.grad(out, case.trained, retain_graph=True)
    again = torch.autograd.grad(out, case.trained)
    assert all(close(a, f, 2e-2) for a, f in zip(again, first, strict=True))


@pytest.mark.parametrize("name", ["linear", "norm linear", "mlp"])
@pytest.mark.parametrize("recipe", [None, "fp8-current", "fp8-delayed"])
def test_a_result_may_be_written_in_place(te: ModuleType, name: str, recipe: str | None) -> None:
    case, found = Case(te, **CASES[name]), []
    for op in (case.plain, case.op):
        for _ in range(2):  # delayed scaling takes its scales from the first
            with te.autocast(None if recipe is None else te.recipe_of(recipe), enabled=recipe is not None):
                out = op(X, *case.tensors)
                out.div_(0.7)
            grads = torch.autograd.grad(out, case.trained, random(*out.shape, seed=9))
        found.append([out, *grads])
    assert recipe is None or kernel_of(case).in_fp8
    for result, wanted in zip(found[1], found[0], strict=True):
        assert close(result, wanted, 1e-1 if recipe else 2e-2)


@pytest.mark.parametrize("recipe", [None, "fp8-current"])
@pytest.mark.parametrize("name", ["norm linear and its norm", "mlp and its norm"])
def test_a_frozen_norm_has_no_gradient(te: ModuleType, name: str, recipe: str | None) -> None:
    case = Case(te, **CASES[name])
    for tensor in case.tensors[:2]:
        tensor.requires_grad_(False)
    with te.autocast(te.recipe_of(recipe) if recipe else None, enabled=recipe is not None):
        out, normed = case.op(X, *case.tensors)
    assert (out.requires_grad, normed.requires_grad) == (True, False)
    wanted, _ = case.plain(X, *case.tensors)
    found, plainly = (torch.autograd.grad(y.float().sum(), case.tensors[2:]) for y in (out, wanted))
    assert all(close(f, p, 0.1) for f, p in zip(found, plainly, strict=True))


@pytest.mark.parametrize("trained", [(), (0,), (2,), (4,), (2, 4)])
def test_an_rms_norm_whose_input_needs_no_gradient(te: ModuleType, trained: tuple[int, ...]) -> None:
    case = Case(te, **CASES["gated mlp"])
    for place, tensor in enumerate(case.tensors):
        if tensor is not None:
            tensor.requires_grad_(place in trained)
    out = case.op(X, *case.tensors)
    assert out.requires_grad == bool(trained)
    if trained:
        leaves = [case.tensors[place] for place in trained]
        found = torch.autograd.grad(out.float().sum(), leaves)
        wanted = torch.autograd.grad(case.plain(X, *case.tensors).float().sum(), leaves)
        assert all(close(f, w, 2e-2) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("recipe", "fast"),
    {
        "fp8-delayed": (True, False, False),
        "fp8-delayed-fast": (True, True, True),
        "fp8-current": (True, False, False),
        "fp8-current-fast": (True, True, True),
    }.items(),
)
def test_fast_recipes_accumulate_gradients_as_the_forward_does(
    te: ModuleType, recipe: str, fast: tuple[bool, ...]
) -> None:
    """In compiled products and in TE's modules, which read `fp8_gemm_*` of the recipe, if it has them."""
    made = te.recipe_of(recipe)
    assert te.scaling_of(made).fast == fast
    assert te.is_delayed(made) == recipe.startswith("fp8-delayed")
    read = pickle.loads(pickle.dumps(made))
    splits = [getattr(read, f"fp8_gemm_{product}", None) for product in ("fprop", "dgrad", "wgrad")]
    assert [split is not None and not split.use_split_accumulator for split in splits] == [
        each and recipe != "fp8-delayed" for each in fast
    ]


def test_a_setting_of_a_recipe_object_reaches_compiled_products(te: ModuleType) -> None:
    made = te.recipe_of("fp8-delayed")
    made.fp8_gemm_wgrad = stand_in.MMParams(use_split_accumulator=False)
    assert te.scaling_of(made).fast == (True, False, True)


def test_one_op_serves_layers_that_share_a_graph(te: ModuleType) -> None:
    one, other = (Case(te, **CASES["mlp"]) for _ in range(2))
    with te.autocast(te.recipe_of("fp8-delayed")):
        one.op(X, *one.tensors)
        one.op(X * 2, *other.tensors)
        one.op(X * 4, *other.tensors)
    seen = [kernel_of(case).seen.products[1].input for case in (one, other)]
    assert kernel_of(one) is not kernel_of(other)
    assert not torch.equal(*seen) or one.op.normalization  # the norm takes the factor away
    assert kernel_of(one).module is not kernel_of(other).module


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_parameter_has_a_state_of_its_own(te: ModuleType, copied: Any) -> None:
    case = Case(te, **CASES["linear"])
    with te.autocast(te.recipe_of("fp8-current")):
        case.op(X, *case.tensors)
    assert state_of(case.tensors[0]).kernels
    assert not state_of(copied(case.tensors[0])).kernels


# Why not


def test_calls_in_plain_pytorch_have_a_reason(
    te: ModuleType, by_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(te, **CASES["gated mlp"])
    with limits.ignore_size_limits:
        case.op(X.double(), *(None if t is None else t.double() for t in case.tensors))
    assert case.op.plain_calls == {"float64, which TE would multiply in TF32": 1}
    case.op(X, *case.tensors)
    with te.autocast(te.recipe_of("fp8-current")):
        case.op(X, *case.tensors)
        with limits.small_calls_in_fp8:
            case.op(X, *case.tensors)
    assert case.op.plain_calls["a call too small to be faster in fused products"] == 1
    assert case.op.plain_calls["a call too small to be faster in FP8"] == 1
    monkeypatch.setattr(limits, "DEVICE", "cuda")
    with limits.ignore_size_limits:
        case.op(X, *case.tensors)
    assert case.op.plain_calls["an input on cpu"] == 1


@pytest.mark.parametrize("captured", [True, False])
def test_attention_that_may_be_replayed_says_what_cudnn_needs(
    te: ModuleType, kernels_of_hopper: None, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    monkeypatch.setattr(limits, "recorded", lambda: captured)
    odd, whole = (
        limits.without_attention(*(torch.zeros(1, 2, length, 64, dtype=BF16),) * 3, None, True)
        for length in (100, 128)
    )
    assert whole is None
    has = "100 queries and 100 keys in a call that may become a CUDA graph"
    assert odd == (f"{has}, where cuDNN's kernels need multiples of 128" if captured else None)


def test_threads_leave_the_order_of_kernels_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that comes first leaves first."""
    monkeypatch.setattr(cudnn, "without_attention", lambda *_: None)
    inside, leave = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]
    heads, before = random(1, 2, 8, 8), torch._C._get_sdp_priority_order()

    def attend(place: int) -> None:
        def waits(*_: Any) -> Tensor:
            inside[place].set()
            assert leave[place].wait(10)
            return heads

        op = cudnn.DotProductAttention(written_out=False)
        op._attend = waits
        op(heads, heads, heads)

    threads = [threading.Thread(target=attend, args=(place,)) for place in range(2)]
    for place, thread in enumerate(threads):
        thread.start()
        assert inside[place].wait(10)
    assert torch._C._get_sdp_priority_order() != before
    for place, thread in enumerate(threads):
        leave[place].set()
        thread.join()
    assert torch._C._get_sdp_priority_order() == before


def test_odd_sizes_stay_out_of_fp8(te: ModuleType) -> None:
    weight = parameter(40, WIDTH, seed=0)
    op = te.Linear()
    with te.autocast(te.recipe_of("fp8-current")):
        assert torch.equal(op(X, weight, None), plain.Linear()(X, weight, None))
    assert op.plain_calls == {"weights whose sizes are no multiples of 16": 1}


def test_function_transforms_run_in_plain_pytorch(te: ModuleType) -> None:
    case = Case(te, **CASES["norm linear"])
    torch.func.vmap(lambda x: case.op(x, *case.tensors))(X)
    assert not state_of(case.tensors[2]).kernels
    assert not case.op.plain_calls


# In FP8


def in_fp8(te: ModuleType, case: Case, recipe: str, x: Tensor = X) -> tuple[Tensor, list[Tensor]]:
    """A step, of delayed scaling the second one, whose scales are known."""
    recipe = te.recipe_of(recipe)
    for _ in range(1 + te.is_delayed(recipe)):
        with te.autocast(recipe):
            found = case.step(case.op, x)
    return found


@each_recipe
@each_case
def test_fp8_rounds_and_no_more(te: ModuleType, name: str, recipe: str) -> None:
    case = Case(te, **CASES[name])
    found, wanted = in_fp8(te, case, recipe), case.step(case.plain, X)
    for f, w in zip([found[0], *found[1]], [wanted[0], *wanted[1]], strict=True):
        assert close(f, w, 0.15)
    assert not close(found[0], wanted[0], 1e-2)
    assert kernel_of(case).in_fp8


@each_recipe
@pytest.mark.parametrize("rows", [1, 7, 16, 17])
def test_any_number_of_rows(te: ModuleType, rows: int, recipe: str) -> None:
    case, x = Case(te, **CASES["mlp and its norm"]), random(rows, WIDTH, seed=3)
    found, wanted = in_fp8(te, case, recipe, x), case.step(case.plain, x)
    assert found[0].shape == wanted[0].shape
    assert all(close(f, w, 0.2) for f, w in zip([found[0], *found[1]], [wanted[0], *wanted[1]], strict=True))


def test_padding_never_reaches_the_largest_values(te: ModuleType) -> None:
    lone = random(17, WIDTH, seed=3)
    seen = []
    for x in (lone, torch.cat([lone] * 16)):
        case = Case(te, **CASES["mlp"])
        in_fp8(te, case, "fp8-delayed", x)
        seen.append(kernel_of(case).module.fp8_meta["scaling_fwd"].amax_history.amax(0))
    torch.testing.assert_close(*seen, rtol=0.02, atol=0)


def test_sites_outside_of_a_precision_plan_stay_out_of_the_recipe(te: ModuleType) -> None:
    case = Case(te, **CASES["norm linear"])
    wanted = case.step(case.op, X)[0]
    case.op.in_fp8 = False
    with te.autocast(te.recipe_of("fp8-current")):
        assert torch.equal(case.step(case.op, X)[0], wanted)
        state_of(case.tensors[2]).in_fp8 = True  # this layer's own answer
        assert not torch.equal(case.step(case.op, X)[0], wanted)


def test_a_product_in_fp8_refuses_a_second_backward(te: ModuleType) -> None:
    case = Case(te, **CASES["norm linear"])
    with te.autocast(te.recipe_of("fp8-current")):
        out = case.op(X, *case.tensors).float().sum()
    torch.autograd.grad(out, case.trained, retain_graph=True)
    with pytest.raises(RuntimeError, match="its kernels keep nothing for a second time"):
        torch.autograd.grad(out, case.trained)


@each_recipe
@pytest.mark.parametrize("reentrant", [True, False])
@each_case
def test_checkpoints_repeat_what_the_forward_did(
    te: ModuleType, name: str, reentrant: bool, recipe: str
) -> None:
    one, other = Case(te, **CASES[name]), Case(te, **CASES[name])
    recipe, state = te.recipe_of(recipe), stand_in.FP8GlobalStateManager.quantization_state
    for number in range(4):
        steps, found = state.steps, []
        for case in (one, other):
            x = (X * (1 + number)).requires_grad_()
            with te.autocast(recipe):
                out = case(x) if case is one else checkpoint(case, x, use_reentrant=reentrant)
            for weight in case.trained:
                weight.grad = None
            out.float().square().sum().backward()
            found.append((out, x.grad, *(weight.grad for weight in case.trained)))
        assert state.steps == steps + 2
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), number


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("order", [(2, 1, 0), (0, 1, 2), (1, 2, 0)])
def test_checkpoints_repeat_each_of_several_forwards(
    te: ModuleType, order: tuple[int, ...], outer: bool | None, inner: bool
) -> None:
    """Each with the scales that it had, in whatever order, and within another checkpoint."""
    case, recipe, seen, losses = Case(te, **CASES["linear"]), te.recipe_of("fp8-delayed"), [], []

    def noted(x: Tensor) -> Tensor:
        seen.append(case(x))
        return seen[-1].square()

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(noted, x, use_reentrant=inner) * 2

    with te.autocast(recipe):
        noted(X).sum().backward()  # which gives the first scales
    seen.clear()
    for number in range(3):
        with te.autocast(recipe), running(False, _tell_nothing):
            x = (X * 3 ** (1 + number)).requires_grad_()
            out = checkpointed(x) if outer is None else checkpoint(checkpointed, x, use_reentrant=outer)
            losses.append(out.sum())
    assert len({float(scales[0]) for scales in (call.scales for call in kernel_of(case).calls.noted)}) == 3
    for number in order:
        before = len(seen)
        losses[number].backward()
        repeated = seen[before:]
        assert repeated
        assert all(torch.equal(each, seen[number]) for each in repeated)


def test_a_backward_of_one_output_repeats_the_other_with_its_own_scales(te: ModuleType) -> None:
    """A checkpoint repeats all its products for the first node that needs one of them."""
    one, other, recipe = Case(te, **CASES["linear"]), Case(te, **CASES["linear"]), te.recipe_of("fp8-delayed")
    seen, outs = [], []

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        outs = one(x).square(), other(x)
        seen.append(outs[1])
        return outs[0], outs[1].square()

    for number in range(3):
        with te.autocast(recipe), running(False, _tell_nothing):
            x = (X * 3**number).requires_grad_()
            outs.append(checkpoint(both, x, use_reentrant=False))
        if not number:
            sum(out.sum() for out in outs[0]).backward()  # which gives the first scales
            seen.clear()
    outs[2][0].sum().backward()
    assert torch.equal(seen[2], seen[1])


# The first scales of delayed scaling


def test_the_first_scales_are_those_that_were_seen(te: ModuleType) -> None:
    case, recipe = Case(te, **CASES["mlp"]), te.recipe_of("fp8-delayed")
    with te.autocast(recipe):
        found = case.step(case.op, X)
    wanted = case.step(case.plain, X)
    assert torch.equal(found[0], wanted[0])
    assert sum(case.op.plain_calls.values()) == 1
    with te.autocast(recipe):
        case.op(X.detach().requires_grad_(), *case.tensors)
        module = kernel_of(case).module
        scales = module.fp8_meta["scaling_fwd"].scale, module.fp8_meta["scaling_bwd"].scale
        norm = case.plain.norm(X, *case.tensors[:2])
        largest = torch.tensor(448.0)  # a tensor: a number over a tensor is rounded twice
        assert scales[0][0] == largest / norm.abs().amax().float()
        assert scales[0][1] == largest / case.tensors[2].abs().amax().float()
        assert scales[0][4] == largest / case.tensors[4].abs().amax().float()
        assert scales[1][2] == largest / random(*X.shape, seed=9).abs().amax().float()


def test_the_first_step_saves_no_more_than_its_inputs(te: ModuleType) -> None:
    case, recipe = Case(te, **CASES["gated mlp"]), te.recipe_of("fp8-delayed")
    saved = []
    for run in (case.op, case.plain):
        with te.autocast(recipe), NewStorages() as made:
            out = run(X.detach().requires_grad_(), *case.tensors)
        saved.append(made.alive() - out.nbytes)
    assert saved[0] < saved[1] / 10
    found, wanted = case.step(case.op, X), case.step(case.plain, X)
    assert all(map(torch.equal, found[1], wanted[1]))


class NewStorages(TorchDispatchMode):
    """The storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = (
            {
                storage._cdata: storage
                for storage in map(Tensor.untyped_storage, filter(torch.is_tensor, tree))
            }
            for tree in (tree_leaves(args), tree_leaves(out))
        )
        for address in made.keys() - given:
            self.made[address] = StorageWeakRef(made[address]), made[address].nbytes()
        return out

    def alive(self) -> int:
        """Return the bytes of those that are not freed."""
        return sum(size for storage, size in self.made.values() if not storage.expired())


def test_gradients_too_small_for_fp8_are_not_lost_in_the_first_step(te: ModuleType) -> None:
    case, recipe = Case(te, **CASES["linear"]), te.recipe_of("fp8-delayed")
    for _ in range(3):
        with te.autocast(recipe):
            x = X.detach().requires_grad_()
            out = case.op(x, *case.tensors)
            (found,) = torch.autograd.grad(out, x, random(*out.shape, seed=1, scale=1e-6))
            assert close(found, random(*out.shape, seed=1, scale=1e-6) @ case.tensors[0], 0.1)


def test_evaluation_needs_no_gradients_scales_and_training_asks_for_them(te: ModuleType) -> None:
    case, recipe = Case(te, **CASES["linear"]), te.recipe_of("fp8-delayed")
    with te.autocast(recipe), torch.no_grad():
        for expected in (1, 1, 1):
            case.op(X, *case.tensors)
            assert sum(case.op.plain_calls.values()) == expected
    for expected in (2, 2):
        with te.autocast(recipe):
            case.step(case.op, X)
        assert sum(case.op.plain_calls.values()) == expected


def test_the_first_scales_fit_every_call_of_a_layer_that_is_called_again(te: ModuleType) -> None:
    """As ALBERT's are: with the scales of its first input, larger ones would be cut off, in evaluation for
    good."""
    case, recipe = Case(te, **CASES["linear"]), te.recipe_of("fp8-delayed")
    for _ in range(2):
        with te.autocast(recipe), running(True, _tell_nothing), torch.no_grad():
            outs = [case.op(X * factor, *case.tensors) for factor in (1, 8)]
    assert sum(case.op.plain_calls.values()) == 2  # both of the first forward
    assert all(close(out, case.plain(X * f, *case.tensors), 0.1) for f, out in zip((1, 8), outs, strict=True))


def test_training_goes_on_where_inference_mode_began(te: ModuleType) -> None:
    case, recipe = Case(te, **CASES["linear"]), te.recipe_of("fp8-delayed")
    for _ in range(2):
        with te.autocast(recipe), torch.inference_mode():
            case.op(X, *case.tensors)
    for _ in range(3):
        with te.autocast(recipe):
            case.step(case.op, X)
    assert sum(case.op.plain_calls.values()) == 2  # in which scales were taken, without gradients and with


def test_a_product_whose_gradient_was_nothing_has_a_scale_of_one(te: ModuleType) -> None:
    case, recipe = Case(te, **CASES["linear"]), te.recipe_of("fp8-delayed")
    with te.autocast(recipe):
        case.op(X, *case.tensors).mul(0).sum().backward()
    with te.autocast(recipe):
        case.op(X, *case.tensors)
        assert kernel_of(case).module.fp8_meta["scaling_bwd"].scale[0] == 1


# Weights that are kept


def _tell_nothing() -> None:
    """All products run in the recipe."""


@pytest.fixture
def served(te: ModuleType) -> Iterator[Case]:
    """In evaluation, in current scaling."""
    case = Case(te, **CASES["linear"])
    with te.autocast(te.recipe_of("fp8-current")), running(True, _tell_nothing), torch.no_grad():
        yield case


def quantized(case: Case) -> int:
    """Return how often a call quantizes the weight, after a check of its result."""
    before = stand_in.Base.quantized
    found = case.op(X, *case.tensors)
    weight = case.tensors[0]
    wanted = nn.functional.linear(stand_in.rounded(X), stand_in.rounded(weight), case.tensors[1])
    assert torch.equal(found, wanted)
    return stand_in.Base.quantized - before


WRITES = {
    "in place": lambda case: case.tensors[0].mul_(2),
    "through a view": lambda case: case.tensors[0].detach()[1:2].zero_(),
    "data of its own": lambda case: setattr(case.tensors[0], "data", case.tensors[0].data + 1),
    "another parameter": lambda case: case.tensors.__setitem__(0, parameter(INNER, WIDTH, seed=11)),
}


@pytest.mark.parametrize("write", WRITES)
def test_weights_are_quantized_once_until_they_are_written_to(served: Case, write: str) -> None:
    assert [quantized(served) for _ in range(3)] == [1, 0, 0]
    WRITES[write](served)
    assert [quantized(served) for _ in range(2)] == [1, 0]


def test_calls_with_gradients_and_in_training_keep_none(served: Case) -> None:
    assert quantized(served) == 1
    with running(False, _tell_nothing):
        assert [quantized(served), quantized(served)] == [1, 1]
    assert quantized(served) == 1
    with torch.enable_grad():
        assert [quantized(served), quantized(served)] == [1, 1]
    assert [quantized(served), quantized(served)] == [1, 0]


def test_weights_that_were_kept_can_be_forgotten(served: Case) -> None:
    quantized(served)
    served.tensors[0].data.mul_(2)  # which no version counts
    forget_weights(served.trained)
    assert [quantized(served), quantized(served)] == [1, 0]


def test_weights_of_inference_mode_are_not_kept(te: ModuleType) -> None:
    with torch.inference_mode(), te.autocast(te.recipe_of("fp8-current")), running(True, _tell_nothing):
        case = Case(te, **CASES["linear"])
        assert [quantized(case), quantized(case)] == [1, 1]


@pytest.mark.parametrize("before", [1, 3])  # the first call gives no scales, but numbers to compute them from
@pytest.mark.parametrize("larger", [1.5, 4])
def test_scales_fit_the_weights_that_evaluation_loads(te: ModuleType, larger: float, before: int) -> None:
    """If weights are much larger, the inputs are calibrated too."""
    case, recipe, seen = Case(te, **CASES["linear"]), te.recipe_of("fp8-delayed"), []

    def evaluated(x: Tensor) -> Tensor:
        with te.autocast(recipe), running(True, _tell_nothing), torch.no_grad():
            seen.append(case.op.plain_calls.total())
            return case(x)

    for _ in range(before):
        evaluated(X)
    case.tensors[0].data.copy_(case.tensors[0].detach() * larger)
    case.tensors[0].requires_grad_().detach().mul_(1.0)  # a write that is counted
    x = X * (larger if larger > 2 else 1)
    for _ in range(3):
        assert close(evaluated(x), nn.functional.linear(x, *case.tensors), 0.06)
    assert seen == [0, *[1] * before, *([2, 2] if larger > 2 else [1, 1])]


# Joined and transposed weights


@each_recipe
def test_joined_weights_share_a_kernel_and_get_slices_of_the_gradient(te: ModuleType, recipe: str) -> None:
    parts = [parameter(16, WIDTH, seed=seed) for seed in range(3)]
    assert make_adjacent(parts)
    join, op, recipe = Join([]), te.Linear(), te.recipe_of(recipe)
    for _ in range(2):
        with te.autocast(recipe):
            out = op(X, join(*parts), None)
            grads = torch.autograd.grad(out.float().square().sum(), parts)
    wide = torch.cat(parts).detach().requires_grad_()
    (wanted,) = torch.autograd.grad(plain.Linear()(X, wide, None).float().square().sum(), wide)
    assert close(torch.cat(grads), wanted, 0.15)
    assert len(state_of(parts[0]).kernels) == 1
    assert not state_of(parts[1]).kernels


def test_a_write_to_frozen_joined_weights_before_the_backward_is_noticed(te: ModuleType) -> None:
    parts = [parameter(16, WIDTH, seed=seed).requires_grad_(False) for seed in range(2)]
    assert make_adjacent(parts)
    x = X.detach().requires_grad_()
    for op in (te.Linear(), plain.Linear()):
        with te.autocast(te.recipe_of("fp8-current")):
            out = op(x, Join([])(*parts), None).sum()
        parts[1].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


@each_recipe
def test_transposed_weights_are_those_of_their_parameter(te: ModuleType, recipe: str) -> None:
    stored, op, recipe = parameter(WIDTH, INNER, seed=1), te.Linear(), te.recipe_of(recipe)
    for _ in range(2):
        with te.autocast(recipe):
            (found,) = torch.autograd.grad(op(X, stored.t(), None).float().square().sum(), stored)
    (wanted,) = torch.autograd.grad((X @ stored).float().square().sum(), stored)
    assert close(found, wanted, 0.15)
    (kernel,) = state_of(stored).kernels.values()
    assert kernel.in_fp8


def test_a_square_weight_that_is_read_both_ways_is_quantized_for_each(te: ModuleType) -> None:
    stored, op = parameter(WIDTH, WIDTH, seed=1), te.Linear()
    with te.autocast(te.recipe_of("fp8-current")), running(True, _tell_nothing), torch.no_grad():
        for _ in range(2):
            for weight in (stored, stored.t()):
                wanted = nn.functional.linear(stand_in.rounded(X), stand_in.rounded(weight))
                assert torch.equal(op(X, weight, None), wanted)
    assert stand_in.Base.quantized == 2


# Rotations and the loss


def test_rotary_turns_by_the_angles(te: ModuleType) -> None:
    x, angles = random(2, 3, 8, 4).requires_grad_(), torch.randn(1, 8, 2).repeat(1, 1, 2)
    for op in (te.Rotary(), plain.Rotary()):
        found = op(x, angles)
        wide = x.detach().double()
        cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
        wanted = wide * cos + torch.cat([-wide[..., 2:], wide[..., :2]], -1) * sin
        assert close(found, wanted, 2e-2)
        (grad,) = torch.autograd.grad(found, x, torch.ones_like(found), create_graph=True)
        assert grad.shape == x.shape


@pytest.mark.parametrize("in_pairs", [False, True], ids=["halves", "pairs"])
def test_rotary_turns_each_sequence_by_its_own_angles(te: ModuleType, in_pairs: bool) -> None:
    x, angles = random(2, 3, 8, 4), torch.randn(2, 8, 4)
    kernel, alone = te.Rotary(in_pairs=in_pairs), plain.Rotary(in_pairs=in_pairs)
    with limits.ignore_size_limits:
        assert close(kernel(x, angles), alone(x, angles), 2e-2)
    assert not kernel.plain_calls


def test_cosines_are_taken_once_for_all_layers_and_anew_after_a_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, angles, taken = random(1, 2, 8, 4), torch.randn(1, 8, 4), []
    cos = Tensor.cos
    monkeypatch.setattr(Tensor, "cos", lambda self: (taken.append(1), cos(self))[1])
    first = plain.Rotary()(x, angles)
    assert torch.equal(plain.Rotary()(x, angles), first)
    assert len(taken) == 1
    angles.mul_(2)
    assert not torch.equal(plain.Rotary()(x, angles), first)
    assert len(taken) == 2


LOGITS, WORDS = random(2, 9, 17), 17
TARGETS = torch.randint(WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
IGNORING = TARGETS.masked_fill(torch.arange(9) % 3 == 0, -100)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("targets", [TARGETS, IGNORING], ids=["all", "some ignored"])
@pytest.mark.parametrize("flat", [True, False])
def test_cross_entropy_is_pytorchs(te: ModuleType, targets: Tensor, reduction: str, flat: bool) -> None:
    logits = LOGITS.detach().clone().requires_grad_()
    given = (logits.flatten(0, 1), targets.flatten()) if flat else (logits, targets)
    args = *given, -100, reduction, torch.float32
    found, wanted = te.CrossEntropy()(*args), ops.cross_entropy(*args)
    torch.testing.assert_close(found, wanted)
    for recorded in (False, True, False):  # and again
        grads = [
            torch.autograd.grad(loss.sum(), logits, retain_graph=True, create_graph=recorded)[0]
            for loss in (found, wanted)
        ]
        torch.testing.assert_close(*grads)
        assert grads[0].requires_grad == recorded


def test_cross_entropy_of_nothing_is_nan_and_of_no_word_raises(te: ModuleType) -> None:
    op, logits = te.CrossEntropy(), LOGITS.detach().clone().requires_grad_()
    nothing = op(logits, torch.full((2, 9), -100), -100, "mean", torch.float32)
    assert torch.isnan(nothing)
    assert not torch.autograd.grad(nothing, logits)[0].any()  # as PyTorch's, which a step survives
    for label in (WORDS, -1):
        targets = TARGETS.clone().index_fill_(1, torch.tensor([3]), label)
        with pytest.raises(IndexError):
            op(LOGITS, targets, -100, "mean", torch.float32)


def test_cross_entropy_says_why_it_ran_in_plain_pytorch(
    te: ModuleType, by_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, each = te.CrossEntropy(), (-100, "none", torch.bfloat16)
    wide = LOGITS.float(), TARGETS, -100, "mean", torch.float32
    assert torch.equal(op(*wide), ops.cross_entropy(*wide))
    assert op.plain_calls == {"the loss, logits in float32, targets in int64": 1}
    op(LOGITS, TARGETS, *each)
    op(LOGITS[:1], TARGETS[:1], *each)  # a sentence for each size would fill the report
    assert (
        op.plain_calls["the loss, fewer than 100,000,000 logits, too few for TE's kernel to be faster"] == 2
    )
    with limits.replayed:
        assert limits.without_cross_entropy(LOGITS[..., :8], TARGETS) is None
    monkeypatch.setattr(limits, "MIN_LOGITS", 1)
    rows, labels = LOGITS.flatten(0, 1), TARGETS.flatten()
    assert torch.equal(op(rows, labels, *each), F.cross_entropy(rows, labels, reduction="none"))
    why = f"the loss, rows of {WORDS} logits, not a multiple of 8: PyTorch is faster"
    assert op.plain_calls[why] == 1
    assert limits.without_cross_entropy(LOGITS[..., :8], TARGETS) is None


# TE's own code


def test_the_cast_of_a_gated_activations_gradient_is_put_in_once_and_only_where_it_is_missing(
    te: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformer_engine.pytorch.module import layernorm_mlp

    assert layernorm_mlp._act_func is stand_in._act_func  # importing te/ changes nothing
    for _ in range(2):
        case = Case(te, **CASES["gated mlp"])
        in_fp8(te, case, "fp8-delayed")
    patched = layernorm_mlp._act_func
    assert inspect.signature(patched) == inspect.signature(stand_in._act_func)
    name = kernel_of(case).module.options["activation"]
    recipe = te.recipe_of("fp8-delayed")
    assert callable(patched(name, recipe)[2])
    assert (
        patched("swiglu", recipe)[2]
        is patched(name)[2]
        is patched(name, te.recipe_of("fp8-current"))[2]
        is None
    )
    monkeypatch.setattr(layernorm_mlp, "_act_func", lambda *_: ("forward", "backward", "with its cast"))
    te.activations.with_own_activations.cache_clear()
    assert type(te.activations.activation_of("swiglu", bias=False)) is str


@pytest.mark.parametrize("training", [False, True])
def test_a_call_compares_no_tensor_with_none(
    te: ModuleType, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`None in tensors` asks each tensor for its ==, which takes 10 us of the CPU."""
    case = ALL["llama"]
    model, sample = case.build().bfloat16().train(training), case.sample()
    converted = te_transform.convert(model, sample, backend="te", recipe="fp8-delayed", verify=False)
    compared: list[Any] = []
    equal = Tensor.__eq__

    def counted(one: Tensor, other: Any) -> Any:
        if other is None:
            compared.append(one.shape)
        return equal(one, other)

    with torch.set_grad_enabled(training):
        for _ in range(3):  # the last one with the scales and the quantized weights of the others
            converted(**sample)
        monkeypatch.setattr(Tensor, "__eq__", counted)
        converted(**sample)
    assert compared == []
