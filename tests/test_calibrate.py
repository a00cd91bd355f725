"""The first scales of delayed scaling are made of what goes through the original modules' products."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform import calibrate
from te_transform.autocast import Amax, AutocastSlot
from te_transform.backends import torch as plain
from te_transform.emit import Emitted
from te_transform.inputs import Inputs
from te_transform.precision import PrecisionPlan
from tests import stand_in
from tests.bitwise import untouched
from tests.conversions import ALL
from tests.stand_in import Te
from tests.zoo import LAYERS, zero_dropout


@pytest.fixture(autouse=True)
def te(monkeypatch: pytest.MonkeyPatch) -> Te:
    te = stand_in.install(monkeypatch)
    for kind in (plain.Linear, plain.LayerNormLinear, plain.LayerNormMLP):
        weights = ("fc1_weight", "fc2_weight") if kind is plain.LayerNormMLP else ("weight",)
        monkeypatch.setattr(kind, "weight_names", weights, raising=False)
    return te


@dataclass
class Seen:
    """The largest absolute values around one linear of the original model."""

    input: float = 0.0
    grad: float = 0.0
    weight: float = 0.0


@dataclass
class Both:
    """A model, and what was made of it with which sites."""

    original: nn.Module
    converted: nn.Module
    sites: list[Emitted] = field(default_factory=list)

    def seen(self, *samples: dict[str, Tensor]) -> dict[str, list[Amax]]:
        """By the path of the module that hosts the fused one."""
        found = calibrate._seen(self.converted, self.sites, [Inputs((), sample) for sample in samples])
        return {calibrate.place(site.fusion): products for site, products in found.items()}


def both(model: nn.Module, inputs: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> Both:
    made: list[Emitted] = []
    emit = te_transform.convert.__globals__["emit"]

    def noting(model: nn.Module, site: Any, emitted: list[Emitted]) -> None:
        emit(model, site, emitted)
        made[:] = emitted

    monkeypatch.setitem(te_transform.convert.__globals__, "emit", noting)
    converted = te_transform.convert(model, inputs, verify=False)
    return Both(model, converted, [site for site in made if hasattr(site.fusion.fused, "weight_names")])


def model_and_inputs(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    inputs = ALL[name].sample()
    labels = {} if "labels" in inputs or not ALL[name].hf else {"labels": inputs["input_ids"]}
    return zero_dropout(ALL[name].build()), inputs | labels


def around(model: nn.Module, *samples: dict[str, Tensor]) -> dict[str, Seen]:
    """What goes through each module that has a matrix, by its path."""
    found: dict[str, Seen] = {}

    def watch(seen: Seen) -> Callable:
        def hook(module: nn.Module, args: tuple, out: Tensor) -> None:
            seen.input = max(seen.input, args[0].abs().max().item())
            seen.weight = module.weight.abs().max().item()
            out.register_hook(lambda grad: setattr(seen, "grad", max(seen.grad, grad.abs().max().item())))

        return hook

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            if getattr(getattr(module, "weight", None), "ndim", 0) == 2 and not isinstance(
                module, nn.Embedding
            ):
                found[path] = Seen()
                stack.callback(module.register_forward_hook(watch(found[path])).remove)
        for sample in samples:
            model.train()(**sample).loss.backward()
    model.zero_grad()
    return found


def joined(seen: dict[str, Seen], *paths: str) -> tuple[float, float, float]:
    parts = [seen[path] for path in paths]
    return max(p.input for p in parts), max(p.weight for p in parts), max(p.grad for p in parts)


def numbers(product: Amax) -> tuple[float, float, float]:
    return product.input.item(), product.weight.item(), product.grad.item()


MERGED = {
    "model.layers.{}.self_attn.q_proj": [
        [f"model.layers.{{}}.self_attn.{name}_proj" for name in ("q", "k", "v")],
    ],
    "model.layers.{}.self_attn.o_proj": [["model.layers.{}.self_attn.o_proj"]],
    "model.layers.{}.mlp": [
        ["model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"],
        ["model.layers.{}.mlp.down_proj"],
    ],
}
WHOLE = {
    "transformer.h.{}.attn.c_attn": [["transformer.h.{}.attn.c_attn"]],
    "transformer.h.{}.attn.c_proj": [["transformer.h.{}.attn.c_proj"]],
    "transformer.h.{}.mlp": [["transformer.h.{}.mlp.c_fc"], ["transformer.h.{}.mlp.c_proj"]],
}


@pytest.mark.parametrize(("name", "places"), [("llama", MERGED), ("qwen2", MERGED), ("gpt2", WHOLE)])
def test_amaxes_are_those_of_the_original_modules(
    name: str, places: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = model_and_inputs(name)
    found = both(model, inputs, monkeypatch).seen(inputs)
    expected = around(model, inputs)
    checked = 0
    for layer in range(LAYERS):
        for place, products in places.items():
            wanted = [joined(expected, *(path.format(layer) for path in paths)) for paths in products]
            assert [numbers(p) for p in found[place.format(layer)]] == [
                pytest.approx(w, rel=1e-4) for w in wanted
            ]
            checked += 1
    assert len(found) == checked + 1  # and the head, whose weight is the embedding's in GPT-2
    assert numbers(*found["lm_head"]) == pytest.approx(joined(expected, "lm_head"), rel=1e-4)


def test_the_largest_of_all_samples_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_and_inputs("llama")
    other = ALL["llama"].sample(batch=1, seq=5, seed=1)
    samples = inputs, other | {"labels": other["input_ids"]}
    found = both(model, inputs, monkeypatch).seen(*samples)
    wanted = joined(around(model, *samples), "model.layers.1.self_attn.o_proj")
    assert numbers(*found["model.layers.1.self_attn.o_proj"]) == pytest.approx(wanted, rel=1e-4)
    parts = [joined(around(model, sample), "model.layers.1.self_attn.o_proj") for sample in samples]
    assert wanted[0] == max(part[0] for part in parts)
    assert wanted[2] == max(part[2] for part in parts)


def test_gradients_are_seen_only_where_there_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_and_inputs("llama")
    pair = both(model, inputs, monkeypatch)
    with_loss, without = pair.seen(inputs), pair.seen(ALL["llama"].sample())
    assert all(p.grad is not None and p.grad > 0 for products in with_loss.values() for p in products)
    assert all(p.grad is None for products in without.values() for p in products)
    for place, products in without.items():
        for product, other in zip(products, with_loss[place], strict=True):
            assert product.input == other.input
            assert product.weight == other.weight


def test_a_frozen_model_has_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_and_inputs("llama")
    found = both(model.requires_grad_(False), inputs, monkeypatch).seen(inputs)
    assert len(found) == 3 * LAYERS + 1
    assert all(p.grad is None for products in found.values() for p in products)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_model_is_changed(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_and_inputs("llama")
    pair = both(model.train(training), inputs, monkeypatch)
    pair.converted.model.norm.weight.grad = torch.ones_like(pair.converted.model.norm.weight)
    runs = [site.fusion.runs for site in pair.sites]
    with untouched(pair.converted):
        assert pair.seen(inputs)
    assert [site.fusion.runs for site in pair.sites] == runs
    assert all(site.fusion.enabled for site in pair.sites)


def test_nothing_of_the_model_is_changed_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_and_inputs("llama")
    pair = both(model, inputs, monkeypatch)
    with untouched(pair.converted), pytest.raises(ValueError, match="input_ids"):
        pair.seen({"wrong": inputs["input_ids"]})
    assert all(site.fusion.enabled for site in pair.sites)


def test_checkpoints_do_not_hide_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_and_inputs("llama")
    pair = both(model, inputs, monkeypatch)
    expected = pair.seen(inputs)
    pair.converted.gradient_checkpointing_enable({"use_reentrant": False})
    for place, products in pair.seen(inputs).items():
        assert [numbers(p) for p in products] == [numbers(p) for p in expected[place]]


class Routed(nn.Module):
    """Of two experts one gets no token."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return torch.cat([self.one(x[rows]), self.other(x[~rows])])


def test_a_product_that_saw_nothing_has_no_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([True, False, True])
    inputs = {"x": torch.randn(3, 16), "rows": rows}
    pair = both(Routed(), inputs, monkeypatch)
    assert pair.seen(inputs).keys() == {"one", "other"}
    assert pair.seen(inputs | {"rows": torch.ones(3, dtype=torch.bool)}).keys() == {"one"}
    assert not pair.converted.one._forward_hooks


def test_the_backend_gets_one_amax_for_each_product(te: Te, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_and_inputs("llama")
    pair = both(model, inputs, monkeypatch)
    out = PrecisionPlan("delayed", {f"model.layers.{i}.mlp": None for i in range(LAYERS)} | {"lm_head": "no"})
    expected = pair.seen(inputs)
    on_gpu = [SimpleNamespace(is_cuda=True)]
    run = calibrate._seen

    def seen(model: nn.Module, *args: Any) -> Iterator:
        del model.parameters  # it is on the CPU after all
        return run(model, *args)

    monkeypatch.setattr(calibrate, "_seen", seen)
    pair.converted.parameters = lambda: on_gpu
    calibrate.quantise(pair.converted, pair.sites, out, te, [Inputs((), inputs)])
    mlps = [layer.mlp.fused for layer in pair.converted.model.layers]
    assert [(fused, recipe) for fused, recipe, _ in te.calibrated] == [(mlp, "delayed") for mlp in mlps]
    for index, (_, _, amaxes) in enumerate(te.calibrated):
        wanted = expected[f"model.layers.{index}.mlp"]
        assert amaxes == [Amax(p.input, p.weight, p.grad) for p in wanted]
    assert isinstance(pair.converted, AutocastSlot)
    assert pair.converted._te_transform_precision.modules == mlps


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_on_the_cpu_and_for_other_recipes_nothing_is_calibrated(
    te: Te, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = model_and_inputs("llama")
    pair = both(model, inputs, monkeypatch)
    calibrate.quantise(pair.converted, pair.sites, PrecisionPlan(recipe), te, [Inputs((), inputs)])
    assert te.calibrated == []
    assert pair.converted._te_transform_precision.recipe == recipe


@pytest.mark.parametrize(
    "out",
    [(1.0, "loss"), {"logits": "matrix", "loss": "loss"}, ["matrix", "loss"], "loss", ("frozen", "loss")],
)
def test_the_loss_is_the_one_number_that_has_a_gradient(out: Any) -> None:
    kinds = {"loss": torch.ones((), requires_grad=True), "matrix": torch.ones(2, 2, requires_grad=True)}
    kinds["frozen"] = torch.ones(())
    made = torch.utils._pytree.tree_map(lambda leaf: kinds.get(leaf, leaf), out)
    assert calibrate._loss(made) is kinds["loss"]
    assert calibrate._loss({"logits": kinds["matrix"]}) is calibrate._loss(kinds["frozen"]) is None
