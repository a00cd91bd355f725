"""Weights in FP8 alone: which they are, what they compute, and what a model shows of them."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy
import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform.backends import limits
from te_transform.backends.fp8.fp8_only import exact, is_fp8_only
from te_transform.backends.joined import Join
from te_transform.execution.attach import runner_of
from te_transform.execution.fp8_only import dequantize_weights
from te_transform.fp8_only.weights import FP8Weight, quantize_together
from tests import stand_in

pytestmark = pytest.mark.usefixtures("at_any_size")

WIDTH = 32


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# The tensors


def rounded(x: Tensor) -> Tensor:
    return stand_in.rounded(x)


def test_a_weight_is_its_rounded_values_to_everybody() -> None:
    weight = random(16, 32)
    (held,) = quantize_together([weight])
    assert isinstance(held, nn.Parameter)
    assert is_fp8_only(held)
    assert (held.shape, held.dtype, held.requires_grad) == (weight.shape, weight.dtype, False)
    assert torch.equal(held * 1, rounded(weight))
    assert torch.equal(
        nn.functional.linear(random(4, 32), held), nn.functional.linear(random(4, 32), exact(held))
    )
    assert torch.equal(held[2:4], rounded(weight)[2:4])
    assert held.quantized.nbytes == weight.numel()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bias", [None, random(16, seed=2)], ids=["without bias", "with bias"])
def test_products_of_few_rows_read_the_bytes(
    mode: Callable, bias: Tensor | None, products_of_few_rows: list[tuple[int, ...]]
) -> None:
    (held,) = quantize_together([random(16, 32)])
    with mode():
        for shape in ((1, 32), (2, 3, 32), (16, 32), (17, 32)):
            x = random(*shape, seed=1)
            linear = nn.functional.linear
            assert torch.equal(linear(x, held, bias), linear(x, exact(held), bias))
    assert products_of_few_rows == [(1, 32), (6, 32), (16, 32)]


def test_products_in_another_dtype_or_along_the_rows_read_the_values(products_of_few_rows: list) -> None:
    (held,), x = quantize_together([random(16, 32)]), random(4, 16)
    assert torch.equal(x @ held, x @ exact(held))
    wide = nn.functional.linear(random(4, 32).float(), held.float())
    assert torch.allclose(wide, random(4, 32).float() @ exact(held.float()).t())
    assert products_of_few_rows == []


def test_gradients_through_products_of_few_rows(products_of_few_rows: list) -> None:
    (held,) = quantize_together([random(16, 32)])
    found = []
    for weight in (held, exact(held)):
        x = random(4, 32, seed=1).requires_grad_()
        nn.functional.linear(x, weight).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
    assert len(products_of_few_rows) == 1


def test_copies_into_a_transposed_weight_are_quantized() -> None:
    weights = [random(16, 32, seed=seed) for seed in range(2)]
    parts, new = quantize_together(weights), random(16, 32, seed=2)
    with torch.no_grad():
        parts[1].t().copy_(new.t())
    assert torch.equal(exact(parts[1]), exact(quantize_together([weights[0], new])[1]))


def test_quantized_in_inference_mode_and_loaded_later() -> None:
    weights = [random(16, 32, seed=seed) for seed in range(2)]
    with torch.inference_mode():
        parts = quantize_together(weights)
    new = random(16, 32, seed=2)
    with torch.no_grad():
        parts[0].copy_(new)
    assert torch.equal(exact(parts[0]), exact(quantize_together([new, weights[1]])[0]))


def test_joined_weights_are_rows_of_one_tensor() -> None:
    weights = [random(16, 32, seed=seed) for seed in range(3)]
    parts = quantize_together(weights)
    assert torch.equal(torch.cat(parts), rounded(torch.cat(weights)))
    joined = Join([])(*parts)
    assert is_fp8_only(joined)
    assert torch.equal(exact(joined), rounded(torch.cat(weights)))
    copies = nn.ParameterList(copy.deepcopy(parts)).to("cpu")
    with torch.inference_mode():
        again = Join([])(*copies)
    assert is_fp8_only(again)
    assert torch.equal(again.quantized, joined.quantized)
    assert Join([])(*copies) is again is not joined
    apart = [quantize_together([weight])[0] for weight in weights]  # of a scale each
    for others in (parts[:2], parts[::-1], [*parts[:2], nn.Parameter(weights[2])], apart):
        plain = Join([])(*others)
        assert not is_fp8_only(plain)
        assert torch.equal(plain, torch.cat([exact(part) for part in others]))


def test_copies_into_an_fp8_only_weight_are_quantized() -> None:
    (held,) = quantize_together([random(16, 32)])
    with torch.no_grad():
        held.copy_(random(16, 32, seed=1) * 100)
    assert torch.equal(exact(held), rounded(random(16, 32, seed=1) * 100))


WRITES: dict[str, Callable[[Tensor], None]] = {
    "in place": lambda held: held.mul_(100),
    "of several": lambda held: torch._foreach_mul_([held], 100),
    "an output": lambda held: torch.mul(held, 100, out=held),
    "other data": lambda held: setattr(held, "data", exact(held) * 100),
    "through data": lambda held: held.data.mul_(100),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_an_fp8_only_weight_are_quantized(write: str) -> None:
    (held,) = quantize_together([random(16, 32)])
    before, version = exact(held), held.quantized._version
    with torch.no_grad():
        WRITES[write](held)
    assert is_fp8_only(held)
    assert torch.equal(exact(held), rounded(before * 100))
    assert held.quantized._version > version


PARTS: dict[str, Callable[[Tensor], None]] = {
    "a number": lambda held: held.__setitem__(0, 5.0),
    "a tensor": lambda held: held.__setitem__((slice(2, 4), 1), torch.ones(2)),
    "of another one": lambda held: held.__setitem__(0, quantize_together([random(1, 32, seed=3)])[0][0]),
    "where a mask is": lambda held: held.__setitem__(exact(held) > 0, 0.0),
}


@pytest.mark.parametrize("write", PARTS)
def test_writes_to_a_part_of_an_fp8_only_weight_are_quantized(write: str) -> None:
    (held,) = quantize_together([random(16, 32)])
    wanted = exact(held)
    PARTS[write](wanted)
    PARTS[write](held)
    assert torch.equal(exact(held), rounded(wanted))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a row": lambda held: held[0],
    "of data": lambda held: held.data[1:],
    "of another shape": lambda held: held.view(-1)[3:5],
    "a part of a view": lambda held: [*held.split(8)][1].unbind()[0],
    "transposed": lambda held: held.t()[0],
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("view", VIEWS)
def test_a_write_to_a_view_of_it_is_refused(view: str, mode: Callable) -> None:
    """The view can be read like any tensor."""
    (held,) = quantize_together([random(16, 32)])
    with mode():
        part, wanted = VIEWS[view](held), VIEWS[view](exact(held))
        assert VIEWS[view](held.clone()).is_inference() == (mode is torch.inference_mode)
    assert not part.is_inference()
    assert part.tolist() == part.float().numpy().tolist() == copy.deepcopy(part).tolist() == wanted.tolist()
    assert type(part + 1) is type(pickle.loads(pickle.dumps(part))) is Tensor
    with mode(), pytest.raises(RuntimeError, match="got zero_ on a view of an FP8-only weight"):
        part.zero_()
    assert torch.equal(VIEWS[view](exact(held)), wanted)


def test_fp8_only_weights_cannot_be_trained() -> None:
    (held,) = quantize_together([random(16, 32)])
    for set_to in (held.requires_grad_, partial(setattr, held, "requires_grad"), partial(nn.Parameter, held)):
        set_to(False)
        with pytest.raises(RuntimeError, match="expected a frozen FP8-only weight"):
            set_to(True)
    assert not held.requires_grad


def test_readers_of_memory_get_the_values() -> None:
    one, other = quantize_together([random(16, 32).float(), random(16, 32, seed=1).float()])
    values = exact(other)
    for read in (torch.from_dlpack, numpy.from_dlpack, numpy.asarray, lambda held: held.tolist()):
        assert torch.equal(torch.as_tensor(read(other)), values)
    assert torch.equal(exact(other.data.apply_(lambda x: -x)), -values)
    nn.ParameterList([one, other]).share_memory()
    assert one.quantized.is_shared()
    assert torch.equal(exact(other), -values)
    assert is_fp8_only(Join([])(one, other))


def test_a_copy_into_one_of_several_weights_gives_all_of_them_a_scale() -> None:
    weights = [random(16, 32, seed=seed) for seed in range(2)]
    parts, new = quantize_together(weights), random(16, 32, seed=2) * 100
    with torch.no_grad():
        parts[1].copy_(new)
    assert torch.equal(exact(parts[1]), rounded(new))
    assert (exact(parts[0]) - weights[0]).abs().max() < 0.5  # the scale is that of the other one now
    assert is_fp8_only(Join([])(*parts))


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_hold_bytes_of_their_own(how: str) -> None:
    one, other = quantize_together([random(16, 32), random(16, 32, seed=1)])
    copied = COPIES[how](other)
    assert isinstance(copied, nn.Parameter)
    assert is_fp8_only(copied)
    assert copied.quantized.untyped_storage().nbytes() == 16 * 32
    before = exact(other).clone()
    with torch.no_grad():
        copied.copy_(torch.zeros(16, 32))
    assert torch.equal(exact(other), before)
    assert not exact(copied).any()
    assert exact(one).any()


def test_fp8_only_weights_move_and_change_their_dtype() -> None:
    (held,) = quantize_together([random(16, 32)])
    wide = held.float()
    assert (is_fp8_only(wide), wide.dtype) == (True, torch.float32)
    assert torch.equal(wide * 1, exact(held).float()) or torch.allclose(
        wide * 1, exact(held).float(), rtol=1e-2
    )


# The model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.o, self.norm2 = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.stored = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)  # [in, out]
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Two linears that read a norm, a linear, an MLP, a weight that is stored transposed, and a head."""
        y = self.norm(x)
        x = x + self.o(torch.cat([self.q(y), self.k(y)], -1))
        x = x + self.mlp(self.norm2(x))
        return self.head(torch.tanh(x @ self.stored))


INSIDE = {"q.weight", "k.weight", "o.weight", "mlp.0.weight", "mlp.2.weight"}
X = random(2, 16, WIDTH, seed=5)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().bfloat16()


def converted(model: nn.Module, recipe: str = "fp8-current") -> nn.Module:
    made = te_transform.convert(model, X, backend="te", recipe=recipe).eval()
    return made.requires_grad_(False)


@torch.no_grad()
def answer(model: nn.Module) -> Tensor:
    return model(X)


def expected(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with rounded weights; q and k share a scale."""
    state = {name: rounded(x) if name in INSIDE else x for name, x in model.state_dict().items()}
    state["q.weight"], state["k.weight"] = rounded(torch.cat([model.q.weight, model.k.weight])).split(16)
    return state


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed"])
def test_computes_what_it_did(te: ModuleType, recipe: str) -> None:
    fused = converted(net(), recipe)
    for _ in range(3):
        before = answer(fused)
    found = te_transform.quantize_weights(fused)
    assert set(found.names) == INSIDE
    count = stand_in.Base.quantized
    again = answer(fused)
    assert torch.equal(again, before) if recipe == "fp8-current" else torch.allclose(again, before, atol=0.1)
    assert stand_in.Base.quantized == count + 1  # the one that is stored transposed


def test_calls_of_all_lengths_share_a_capture(te: ModuleType) -> None:
    fused = converted(net())
    answer(fused)
    te_transform.quantize_weights(fused)
    before = len(runner_of(fused).graphs)
    with torch.no_grad():
        for length in (12, 24, 40, 64):
            fused(random(2, length, WIDTH))
    assert len(runner_of(fused).graphs) <= before + 2  # of the first length, and of any


def test_reasons_of_weights_that_are_not_quantized(te: ModuleType) -> None:
    fused = converted(net())
    answer(fused)
    found = te_transform.quantize_weights(fused)
    assert {*found.names, *found.left_out} == {name for name, _ in fused.named_parameters()}
    assert found.left_out["head.weight"] == (
        "its product does not run in FP8, the report of the conversion says why"
    )
    assert found.left_out["norm.weight"] == "no fused product reads it"
    assert found.left_out["stored"] == "it is stored transposed, but TE's kernels need [out, in]"
    assert not te_transform.quantize_weights(fused).left_out.keys() & {*found.names}


def test_trained_weights_stay(te: ModuleType) -> None:
    fused = converted(net())
    answer(fused)
    fused.q.requires_grad_(True)
    fused.mlp.requires_grad_(True)
    found = te_transform.quantize_weights(fused)
    assert set(found.names) == {"o.weight"}
    assert "freeze it by requires_grad_(False)" in found.left_out["mlp.0.weight"]
    assert found.left_out["k.weight"].startswith("it is joined with a weight that stays: it is trained")


def test_a_weight_that_another_module_has_too_stays(te: ModuleType) -> None:
    model = net()
    model.other = nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()
    model.other.weight = model.o.weight
    fused = converted(model)
    answer(fused)
    found = te_transform.quantize_weights(fused)
    assert found.left_out["o.weight"] == (
        "it is tied to another module, which would keep the original: untie it"
    )


def test_a_weight_that_is_not_on_the_gpu_stays(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = converted(net())
    answer(fused)
    monkeypatch.setattr(limits, "DEVICE", "cuda")
    found = te_transform.quantize_weights(fused)
    assert not found.names
    assert (
        found.left_out["o.weight"] == "it is not on the GPU, where TE has its kernels: move the model first"
    )


def test_recipes_with_a_scale_for_each_block_keep_their_weights(te: ModuleType) -> None:
    fused = converted(net(), "fp8-block")
    answer(fused)
    found = te_transform.quantize_weights(fused)
    assert not found.names
    assert "has a scale per block" in found.left_out["o.weight"]


def test_state_dicts_have_the_rounded_values_and_load(te: ModuleType) -> None:
    model = net()
    fused = converted(model)
    answer(fused)
    te_transform.quantize_weights(fused)
    before, state, wanted = answer(fused), fused.state_dict(), expected(model)
    assert list(state) == list(wanted)
    assert not any(map(is_fp8_only, state.values()))
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    fresh = net()
    fresh.load_state_dict(state)
    original = model.state_dict()
    fused.load_state_dict({name: -value for name, value in original.items()})
    assert not torch.equal(answer(fused), before)
    fused.load_state_dict(original)
    assert torch.equal(answer(fused), before)
    assert all(is_fp8_only(fused.get_parameter(name)) for name in INSIDE)


def test_copies_compute_the_same(te: ModuleType) -> None:
    fused = converted(net())
    answer(fused)
    te_transform.quantize_weights(fused)
    before = answer(fused)
    for copied in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert torch.equal(answer(copied), before)
        assert all(is_fp8_only(copied.get_parameter(name)) for name in INSIDE)


def test_kernels_and_captures_do_not_keep_them_from_moving(te: ModuleType, no_collections: None) -> None:
    fused = converted(net())
    answer(fused)
    te_transform.quantize_weights(fused)
    before = answer(fused)
    for dtype in (torch.float16, torch.bfloat16):
        fused.to(dtype)
        with torch.no_grad():
            found = fused(X.to(dtype))
    assert torch.equal(found, before)


def test_trained_parameters_beside_fp8_only_weights_get_the_same_gradients(te: ModuleType) -> None:
    found = []
    for alone in (False, True):
        fused = converted(net())
        fused.norm.requires_grad_(True)
        fused.norm2.requires_grad_(True)
        answer(fused)
        if alone:
            assert te_transform.quantize_weights(fused).names
        fused.train()(X).float().square().sum().backward()
        found.append([fused.norm.weight.grad, fused.norm2.bias.grad])
    assert all(map(torch.equal, *found))


def test_plain_parameters_come_back(te: ModuleType) -> None:
    model = net()
    fused = converted(model)
    answer(fused)
    te_transform.quantize_weights(fused)
    dequantize_weights(fused)
    assert all(type(parameter) is nn.Parameter for parameter in fused.parameters())
    wanted = expected(model)
    assert all(torch.equal(value, wanted[name]) for name, value in fused.state_dict().items())
    assert not any(module._state_dict_hooks for module in fused.modules())


def test_needs_a_model_in_which_something_ran_in_fp8(te: ModuleType) -> None:
    for model in (net(), copy.deepcopy(converted(net()))):
        with pytest.raises(
            te_transform.QuantizationError,
            match="expected a model with products that have run in FP8, got a Net without",
        ):
            te_transform.quantize_weights(model)


def test_a_tensor_of_no_numbers_but_zeros_is_held_too() -> None:
    (held,) = quantize_together([torch.zeros(16, 16, dtype=torch.bfloat16)])
    assert not exact(held).any()
    assert isinstance(held, FP8Weight)
