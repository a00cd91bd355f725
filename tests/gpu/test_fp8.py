"""FP8 on Transformer Engine is as exact as FP8 can be: verify() against the emulation, in each recipe."""

import pytest
import torch

import te_transform
from te_transform import PrecisionPlan
from te_transform.backends.fp8.registry import state_of
from tests.conversions import ALL, Pair
from tests.gpu.zoo import converted, sample
from tests.zoo import Inputs

RECIPES = ("fp8-delayed", "fp8-current", "fp8-block")
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def products(pair: Pair) -> list[str]:
    """The paths of the products that run in FP8."""
    return [path for path, why in pair.report.precision.sites.items() if why is None]


def in_fp8(name: str, recipe: str) -> Pair:
    """Converted to a recipe, in which something runs."""
    pair = converted(name, recipe)
    assert products(pair)
    return pair


@each_recipe
@pytest.mark.parametrize("name", ALL)
def test_fp8_is_as_exact_as_its_emulation(name: str, recipe: str) -> None:
    pair = in_fp8(name, recipe)
    result = te_transform.verify(pair.original, pair.converted, sample(name))
    assert result, str(result)
    assert "note: 'original' is emulated" in str(result)


@each_recipe
@pytest.mark.parametrize("name", ["gpt2", "llama", "quickstart"])
def test_fp8_runs_and_shows(name: str, recipe: str) -> None:
    """FP8 runs: the error is larger than that of bf16, and as large as that of the emulation."""
    pair = in_fp8(name, recipe)
    for _ in range(2):  # the first step of delayed scaling finds its scales
        step(pair, sample(name))
    in_bf16, in_recipe = pair.run(sample(name), training=True)
    found = [k for p in pair.converted.parameters() for k in state_of(p).kernels.values() if k.in_fp8]
    assert len(found) == len(products(pair))
    error = (in_recipe[0] - in_bf16[0]).float().norm() / in_bf16[0].float().norm()
    assert error > torch.finfo(torch.bfloat16).eps
    result = te_transform.verify(pair.original, pair.converted, sample(name))
    assert all(row.original > torch.finfo(torch.bfloat16).eps for row in result.rows if "output" in row.name)


@pytest.mark.parametrize("compiled", [False, True])
def test_fast_accumulation_reaches_the_gradients(compiled: bool) -> None:
    """The results differ by less than FP8's own rounding, which has three bits of mantissa."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)
    found = {}
    for recipe in ("fp8-delayed", "fp8-delayed-fast"):
        plan = PrecisionPlan(recipe, {"1": None})
        model = torch.nn.Sequential(torch.nn.RMSNorm(1024, device="cuda", dtype=torch.bfloat16), linear)
        fused = te_transform.convert(model, x.detach(), backend="te", recipe=plan, compile=compiled)
        for _ in range(3):  # scales come from the first steps
            found[recipe] = torch.autograd.grad((fused(x) * target).sum(), [x, fused[1].weight])
    for split, fast in zip(*found.values(), strict=True):
        assert not torch.equal(split, fast)
        assert (split - fast).float().norm() < 2**-4 * split.float().norm()


@pytest.mark.parametrize("recipe", ["fp8-delayed-fast", "fp8-current-fast"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "quickstart"])
def test_fast_accumulation_is_as_exact_as_its_emulation(name: str, recipe: str) -> None:
    pair = in_fp8(name, recipe)
    result = te_transform.verify(pair.original, pair.converted, sample(name))
    assert result, str(result)


@each_recipe
def test_a_model_converted_in_place_is_verified_against_itself(recipe: str) -> None:
    model = ALL["llama"].build().to("cuda", torch.bfloat16)
    te_transform.convert(model, sample("llama"), backend="te", recipe=recipe, inplace=True)
    result = te_transform.verify(model, model, sample("llama"))
    assert result, str(result)


@each_recipe
def test_the_models_output_too_where_a_plan_asks_for_it(recipe: str) -> None:
    model, inputs = ALL["llama"].build().to("cuda", torch.bfloat16), sample("llama")
    plan = PrecisionPlan(recipe, {"lm_head": None})
    quantized = te_transform.convert(model, inputs, backend="te", recipe=plan)
    result = te_transform.verify(model, quantized, inputs)
    assert result, str(result)


def test_verify_leaves_delayed_scales_as_they_were() -> None:
    pair = in_fp8("gpt2", "fp8-delayed")
    for _ in range(2):
        step(pair, sample("gpt2"))
    before = scales(pair)
    assert te_transform.verify(pair.original, pair.converted, sample("gpt2"))
    after = scales(pair)
    assert before
    assert all(map(torch.equal, before, after))
    step(pair, sample("gpt2"))  # and they still follow what runs
    assert not all(map(torch.equal, before, scales(pair)))


def step(pair: Pair, inputs: Inputs) -> None:
    out = pair.converted.train()(**inputs)
    out[0].float().square().mean().backward()
    pair.converted.zero_grad()


def scales(pair: Pair) -> list[torch.Tensor]:
    """Every scale and every largest value that delayed scaling remembers, copied."""
    found = [k for p in pair.converted.parameters() for k in state_of(p).kernels.values() if k.in_fp8]
    states = [kernel.module.fp8_meta[name] for kernel in found for name in ("scaling_fwd", "scaling_bwd")]
    return [tensor.clone() for state in states for tensor in (state.scale, state.amax_history)]


def test_small_calls_run_where_they_are_faster(by_size: None) -> None:
    model, inputs = ALL["llama"].build().to("cuda", torch.bfloat16), sample("llama")
    every = PrecisionPlan("fp8-current", small_calls=True)
    for recipe, plain in (("fp8-current", True), (every, False)):
        quantized = te_transform.convert(model, inputs, backend="te", recipe=recipe)
        quantized(**inputs)
        calls = te_transform.report(quantized).plain_calls
        assert any("too small to be faster in FP8" in why for why in calls) == plain
        assert te_transform.verify(model, quantized, inputs)
