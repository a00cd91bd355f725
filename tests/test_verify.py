"""Verification finds what is wrong, says where, takes it back, and leaves no trace; what is right passes."""

import copy
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from te_transform import Rule
from te_transform.compare import compare
from te_transform.originals import fusions, original_parameters
from te_transform.passes import layernorm_linear
from te_transform.replay import Run, in_double, run
from te_transform.variations import variations
from te_transform.verify import Verification, verify
from tests.conftest import only_joined
from tests.zoo import CASES, EXTRA, Inputs

VERIFIED = ("gpt2", "llama", "nanogpt_manual", "quickstart_mask")


def sample_of(name: str, dtype: torch.dtype = torch.float32) -> Inputs:
    inputs = CASES[name].sample()
    return {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}


def layernorm_linear_with(wrong: str | None = None, path: str | None = None, eps: float = 1.0) -> Rule:
    """The rule, building its fused module with another eps, at one norm if a path is given."""

    def build(backend, norm, linear) -> nn.Module:
        fused = layernorm_linear.build(backend, norm, linear)
        if path in (None, norm.path):
            fused.eps *= eps
            fused.zero_centered_gamma ^= wrong == "gamma"
        return fused

    return replace(layernorm_linear.RULE, build=build)


def rolled_back(model: nn.Module) -> list[te_transform.Outcome]:
    return [s for s in te_transform.report(model).refused if any("rolled back" in r for r in s.reasons)]


def outputs(model: nn.Module, inputs: Inputs) -> Tensor:
    torch.manual_seed(0)
    return model(**inputs)[0]


# What is right passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", VERIFIED)
def test_converted_models_verify(name: str, dtype: torch.dtype) -> None:
    model, inputs = CASES[name].build().to(dtype), sample_of(name, dtype)
    converted = te_transform.convert(model, inputs)
    assert fusions(converted)
    assert not rolled_back(converted)

    result = verify(model, converted, inputs)

    assert result, str(result)
    assert not result.guilty
    assert not result.skipped
    named = {row.name for row in result.rows}
    assert {f"gradient of {name}" for name, _ in model.named_parameters()} <= named


def test_a_model_converted_in_place_verifies_against_itself() -> None:
    inputs = CASES["llama"].sample()
    model = te_transform.convert(CASES["llama"].build(), inputs, inplace=True)

    assert verify(model, model, inputs)


def test_gradient_checkpoints_drop_nothing_when_they_run_again() -> None:
    model, inputs = CASES["gpt2"].build(), CASES["gpt2"].sample()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    converted = te_transform.convert(model, inputs)

    assert fusions(converted)
    assert verify(model, converted, inputs)


def test_frozen_parameters_are_passed_over() -> None:
    model, inputs = CASES["gpt2"].build(), CASES["gpt2"].sample()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    result = verify(model, te_transform.convert(model, inputs), inputs)

    assert result
    assert {row.name for row in result.rows if "gradient" in row.name} == {
        f"gradient of {name}" for name, p in model.named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize("name", ["llama_eager", "gpt2_eager"])
def test_attention_that_hands_out_no_probabilities_is_kept(name: str) -> None:
    model, inputs = EXTRA[name].build(), EXTRA[name].sample()
    converted = te_transform.convert(model, inputs)

    assert te_transform.report(converted).counts["attention"]
    assert not rolled_back(converted)


def test_experts_have_a_reference_although_grouped_products_have_no_fp64() -> None:
    model, inputs = EXTRA["mixtral"].build(), EXTRA["mixtral"].sample()

    assert verify(model, te_transform.convert(model, inputs), inputs)


@pytest.mark.parametrize("name", CASES)
def test_original_parameters_are_the_original_names_order_and_values(name: str) -> None:
    model = CASES[name].build()
    converted = te_transform.convert(model, CASES[name].sample(), verify=False)
    own, theirs = dict(model.named_parameters()), original_parameters(converted)

    assert list(original_parameters(model)) == list(own) == list(theirs)
    for key, original in theirs.items():
        assert torch.equal(original.part(original.held), own[key]), key


# What is wrong is found


@only_joined
@pytest.mark.parametrize("wrong", [{"eps": 10.0}, {"wrong": "gamma"}], ids=["eps", "gamma"])
def test_a_wrong_rule_is_taken_back_and_reported(wrong: dict) -> None:
    model, inputs = CASES["gpt2"].build().eval(), CASES["gpt2"].sample()
    converted = te_transform.convert(model, inputs, passes=[layernorm_linear_with(**wrong)])

    assert not fusions(converted)
    sites = rolled_back(converted)
    assert {site.rule for site in sites} == {"layernorm_linear"}
    assert {"transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn"} <= {site.path for site in sites}
    for site in sites:
        assert site.status == "refused"
        assert "off in float32, 1.2 times the original's" in site.reasons[0]
    assert torch.equal(outputs(converted, inputs), outputs(model, inputs))
    own, theirs = model.state_dict(), converted.state_dict()
    assert list(own) == list(theirs)
    assert all(torch.equal(own[key], theirs[key]) for key in own)


@only_joined
def test_only_the_wrong_site_is_taken_back() -> None:
    model, inputs = CASES["gpt2"].build(), CASES["gpt2"].sample()
    rule = layernorm_linear_with(path="transformer.h.1.ln_1", eps=10.0)
    converted = te_transform.convert(model, inputs, passes=[rule])

    assert [site.path for site in rolled_back(converted)] == ["transformer.h.1.attn.c_attn"]
    assert "transformer.h.0.attn.c_attn.fused" in {fusion.path for fusion in fusions(converted)}
    assert verify(model, converted, inputs)


@only_joined
def test_verify_bisects_to_the_wrong_site() -> None:
    model, inputs = CASES["gpt2"].build(), CASES["gpt2"].sample()
    rule = layernorm_linear_with(path="transformer.h.1.ln_1", eps=10.0)
    converted = te_transform.convert(model, inputs, passes=[rule], verify=False)
    assert len(fusions(converted)) > 2

    result = verify(model, converted, inputs)

    assert not result
    assert result.guilty == ("transformer.h.1.attn.c_attn",)
    assert "NOT the same" in str(result)
    assert "guilty: transformer.h.1.attn.c_attn" in str(result)
    assert all(fusion.enabled for fusion in fusions(converted))


def test_a_weight_changed_in_a_fused_module_is_found() -> None:
    model, inputs = CASES["llama"].build(), CASES["llama"].sample()
    converted = te_transform.convert(model, inputs)
    with torch.no_grad():
        converted.model.layers[1].self_attn.q_proj.fused.weight[-1] += 1e-2  # the last row of v

    result = verify(model, converted, inputs)

    assert not result
    states = [row for row in result.rows if row.inputs == "state_dict" and not row.ok]
    assert [row.name for row in states] == ["model.layers.1.self_attn.v_proj.weight"]
    assert result.guilty == ("model.layers.1.self_attn.q_proj",)


class ReadsItsNorm(nn.Module):
    """Looks at the norm's output in Python, which no graph shows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y.tolist()
        return self.linear(y)


@only_joined
def test_a_site_that_never_runs_is_taken_back() -> None:
    model = ReadsItsNorm()
    converted = te_transform.convert(model, torch.randn(2, 3, 8), passes=[layernorm_linear.RULE])

    assert not fusions(converted)
    (site,) = rolled_back(converted)
    assert "never ran on the example inputs" in site.reasons[0]


class WritesIntoTheStream(nn.Module):
    """Changes the norm's input after the norm: a norm that is put off would come too late."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        y = self.norm(x)
        x *= 2
        return self.linear(y) + x


@only_joined
def test_a_site_that_only_the_whole_model_upsets_is_not_left_in() -> None:
    model, x = WritesIntoTheStream(), torch.randn(2, 3, 8)
    converted = te_transform.convert(model, x, passes=[layernorm_linear.RULE])

    assert not fusions(converted)
    assert "the model raised RuntimeError" in rolled_back(converted)[0].reasons[0]
    assert torch.equal(converted(x), model(x))


@only_joined
def test_a_site_that_raises_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_transform.backends import torch as backend

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(backend.LayerNormLinear, "forward", forward)
    model, inputs = CASES["gpt2"].build().eval(), CASES["gpt2"].sample()
    converted = te_transform.convert(model, inputs, backend="torch", passes=[layernorm_linear.RULE])

    assert not fusions(converted)
    assert all("NotImplementedError: no such kernel" in site.reasons[0] for site in rolled_back(converted))
    assert torch.equal(outputs(converted, inputs), outputs(model, inputs))


class OneBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != 2:
            raise ValueError("two, please")
        return self.linear(self.norm(x))


def test_sizes_that_the_original_refuses_are_noted() -> None:
    model, x = OneBatch(), torch.randn(2, 3, 8)
    result = verify(model, te_transform.convert(model, x), x)

    assert result
    assert result.skipped == ("size 3 instead of 2, the original raised ValueError: two, please",)
    assert "skipped: size 3" in str(result)
    with pytest.raises(ValueError, match="does not run on the example inputs"):
        verify(model, te_transform.convert(model, x), torch.randn(4, 3, 8))


@pytest.mark.parametrize("other", [nn.Linear(8, 8), "a model"], ids=["not_converted", "no_model"])
def test_what_is_no_pair_is_refused(other: object) -> None:
    with pytest.raises(ValueError, match="a converted model is needed"):
        verify(nn.Linear(8, 8), other)


def test_another_class_is_refused() -> None:
    converted = te_transform.convert(OneBatch(), torch.randn(2, 3, 8))

    with pytest.raises(ValueError, match="the same class is needed"):
        verify(nn.Linear(8, 8), converted)


# No trace is left


def traces(model: nn.Module) -> Iterator[object]:
    """All that verification could leave behind."""
    for name, module in model.named_modules():
        hooks = [len(value) for key, value in vars(module).items() if key.endswith("_hooks")]
        yield name, type(module), module.training, hooks, sorted(vars(module))
    for parameter in model.parameters():
        yield id(parameter), id(parameter.grad), parameter._version, parameter.requires_grad
    for buffer in model.buffers():
        yield id(buffer), buffer.tolist()
    for fusion in fusions(model):
        yield fusion.enabled, fusion.runs, fusion.shared


@pytest.mark.parametrize("name", VERIFIED)
def test_nothing_is_left_behind(name: str) -> None:
    model, inputs = CASES[name].build(), CASES[name].sample()
    next(model.children()).eval()  # training flags of both kinds
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = list(traces(model))
    given = copy.deepcopy(inputs)
    states = torch.get_rng_state(), random.getstate(), torch.get_default_dtype(), torch.is_grad_enabled()

    converted = te_transform.convert(model, inputs)
    between = list(traces(converted))
    verify(model, converted, inputs)

    assert list(traces(model)) == before
    assert list(traces(converted)) == between
    assert [module.training for module in model.modules()] == [
        module.training for name, module in converted.named_modules() if not name.endswith("fused")
    ]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), torch.get_default_dtype(), torch.is_grad_enabled())
    assert all(torch.equal(given[key], inputs[key]) for key in inputs)
    assert not any(tensor.requires_grad for tensor in inputs.values())


# The numbers


def runs(converted: Tensor, original: Tensor, reference: Tensor, gradients: dict | None = None) -> tuple:
    gradients = gradients or {}
    by_run = [{key: three[i] for key, three in gradients.items()} for i in range(3)]
    tensors = (converted, original, reference)
    one, two, three = (Run({"": t}, g, {}) for t, g in zip(tensors, by_run, strict=True))
    return one, [two], three


def test_the_original_sets_the_measure() -> None:
    exact = torch.ones(100, dtype=torch.float64)
    original = (exact + 1e-4).float()
    for error, ok in ((1.1e-4, True), (1.3e-4, False)):
        (row,) = compare(*runs((exact + error).float(), original, exact), "here")
        assert row.ok is ok
        assert row.name == "output"
        assert row.original == pytest.approx(1e-4, rel=1e-2)
    assert "1.3e-04 off in float32, 1.2 times the original's 1.0e-04 plus one ulp is allowed" in str(row)


def test_a_gradient_that_cancels_is_measured_by_the_largest() -> None:
    x = torch.ones(4, dtype=torch.float64)
    large = (x.float(), x.float(), x)
    cancelled = (torch.full((4,), 1e-7), torch.zeros(4), torch.zeros(4, dtype=torch.float64))
    rows = compare(*runs(x.float(), x.float(), x, {"large": large, "cancelled": cancelled}), "here")

    assert all(row.ok for row in rows)
    alone = compare(*runs(x.float(), x.float(), x, {"cancelled": cancelled}), "here")
    assert [row.ok for row in alone] == [True, False]


@pytest.mark.parametrize(
    ("converted", "original", "reason"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0]), "inf or nan"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("inf")]), "inf or nan"),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), "inf or nan"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "has to be met exactly"),
        (torch.zeros(2), torch.zeros(3), r"is float32\[2\], the original's is float32\[3\]"),
        (torch.zeros(2).half(), torch.zeros(2), r"is float16\[2\], the original's is float32\[2\]"),
    ],
)
def test_what_no_error_can_measure(converted: Tensor, original: Tensor, reason: str) -> None:
    (row,) = compare(*runs(converted, original, original.double()), "here")

    assert not row.ok
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(str(row))


def test_equal_infinities_and_integers_pass() -> None:
    for tensor in (torch.tensor([1.0, float("inf"), float("nan")]), torch.tensor([1, 2])):
        (row,) = compare(*runs(tensor, tensor, tensor.double()), "here")
        assert row.ok


class Drops(nn.Module):
    """Every kind of dropout, and a norm that insists on float32."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.alpha_dropout(F.dropout(self.linear(x), 0.5, self.training), 0.5, self.training)
        x = F.scaled_dot_product_attention(x, x, x, None, 0.5) + self.attention(x, x, x)[0]
        x = torch.feature_dropout(torch.dropout(x, 0.5, True), 0.5, True)
        return F.rms_norm(x.float(), (8,)).to(x.dtype) + torch.ones(8)


def test_dropout_is_off_and_the_reference_is_fp64_throughout() -> None:
    model, inputs = Drops(), te_transform.inputs.Inputs((torch.randn(2, 3, 8).requires_grad_(),))
    one, two = (run(model, inputs, original_parameters(model), training=t) for t in (True, False))
    assert torch.equal(one.outputs[""], two.outputs[""])
    assert one.gradients.keys() == {"input 0", *dict(model.named_parameters())}

    twin = in_double(model)
    exact = run(twin, inputs, original_parameters(twin), training=True, double=True)
    assert exact.outputs[""].dtype is torch.float64
    (row,) = compare(Run(one.outputs, {}, {}), [Run(one.outputs, {}, {})], Run(exact.outputs, {}, {}), "")
    assert 0 < row.converted < 1e-6
    assert next(model.parameters()).dtype is torch.float32


def test_random_rounding_is_as_large_as_rounding() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    inputs = te_transform.inputs.Inputs((torch.randn(32, 64),))
    twin = in_double(model)
    exact = run(twin, inputs, original_parameters(twin), training=True, double=True)
    plain, noisy = (
        run(model, inputs, original_parameters(model), training=True, cotangents=exact.cotangents, rounding=r)
        for r in (None, 0)
    )
    assert not torch.equal(plain.outputs[""], noisy.outputs[""])
    (own, *_), (drawn, *_) = (compare(r, [r], exact, "") for r in (plain, noisy))
    assert own.converted < drawn.converted < 3 * own.converted


def test_variations_have_new_values_and_sizes() -> None:
    model = CASES["gpt2"].build()
    ids = torch.tensor([[5, 6, 7, 8], [50, 60, 70, 80]])
    made = dict(variations(model, [te_transform.inputs.Inputs((), {"input_ids": ids})]))

    assert list(made) == [
        "example inputs", "fresh values", "size 3 instead of 2", "size 3 instead of 4", "left-padded",
    ]  # fmt: skip
    shapes = [tuple(inputs.kwargs["input_ids"].shape) for inputs in made.values()]
    assert shapes == [(2, 4), (2, 4), (3, 4), (2, 3), (2, 4)]
    assert not torch.equal(made["fresh values"].kwargs["input_ids"], ids)
    assert all(
        set(i.kwargs["input_ids"].flatten().tolist()) <= set(ids.flatten().tolist()) for i in made.values()
    )
    assert made["left-padded"].kwargs["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]


def test_the_table_shows_the_worst_and_counts_all() -> None:
    model, inputs = CASES["nanogpt_flash"].build(), CASES["nanogpt_flash"].sample()
    result = verify(model, te_transform.convert(model, inputs), inputs)
    text = str(result)

    assert isinstance(result, Verification)
    assert text.startswith(f"GPT: verified, {len(result.rows)} comparisons")
    for words in ("example inputs, training", "fresh values, evaluation", "output 0", "state_dict"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 110
