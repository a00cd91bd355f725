"""The memory of a training step, predicted without a GPU: against what was measured on one, and by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

import te_transform
from te_transform.plan.memory import Memory, room, size_text
from tests.conversions import ALL, DISTINCT, PLANNED_LATER, each, planned
from tests.models.llama import shape_of_8b
from tests.models.quickstart import BasicLayer

MIB = 2**20
PLAIN_LOSS = tuple(rule for rule in te_transform.PIPELINE if rule.name != "cross_entropy")


def llama() -> nn.Module:
    return LlamaForCausalLM(shape_of_8b(layers=8, vocab_size=32000, length=4096))


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(32000, (2, 4096))
    return {"input_ids": ids, "labels": ids}


def layer() -> nn.Module:
    return BasicLayer(4096, 16384, 32, attention_dropout=0.0, hidden_dropout=0.0)


def states() -> dict[str, Tensor]:
    return {"x": torch.randn(2048, 4, 4096, dtype=torch.bfloat16)}


def predicted(
    build: Callable[[], nn.Module], inputs: Callable[[], Any], recipe: str | None, passes: Any = None
) -> Memory:
    """At full size, of tensors that take no memory."""
    with FakeTensorMode():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = build()
        torch.set_default_dtype(before)
        return te_transform.inspect(model, inputs(), backend="te", recipe=recipe, passes=passes).memory


# peaks beside the weights, MiB, on one H100 (docs/benchmarks.md); four Llamas with transformers' own loss
MEASURED = [
    pytest.param(llama, tokens, None, False, 12470, marks=pytest.mark.integration),
    pytest.param(llama, tokens, None, True, 10285, marks=pytest.mark.integration),
    pytest.param(llama, tokens, "fp8-current", True, 13285, marks=pytest.mark.integration),
    pytest.param(llama, tokens, "fp8-block", True, 14034, marks=pytest.mark.integration),
    (layer, states, None, False, 1473),
    (layer, states, "fp8-current", False, 2313),
]


@pytest.mark.parametrize(("build", "inputs", "recipe", "fused_loss", "measured"), MEASURED)
def test_predicts_what_was_measured(
    build: Callable, inputs: Callable, recipe: str | None, fused_loss: bool, measured: int
) -> None:
    found = predicted(build, inputs, recipe, None if fused_loss else PLAIN_LOSS)
    assert abs(found.peak / MIB - measured) <= 0.1 * measured


@pytest.mark.integration
def test_counts_weights_and_gradients_once() -> None:
    model = ALL["gpt2"].build(n_layer=1).bfloat16()  # the head is tied to the embedding
    found = te_transform.inspect(model, ALL["gpt2"].sample(), backend="te").memory
    sizes = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    assert found.weights == found.gradients == sum(sizes.values())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_()
    frozen = te_transform.inspect(model, ALL["gpt2"].sample(), backend="te").memory
    assert frozen.gradients == model.transformer.h[0].mlp.c_fc.weight.numel() * 2
    assert frozen.peak < found.peak


def test_by_hand() -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128)).bfloat16()
    found = te_transform.inspect(model, torch.randn(4, 8, 64).bfloat16(), backend="te").memory
    rows, parameters = 32, 64 + 64 + 64 * 128 + 128
    normalised, statistics, out = rows * 64 * 2, rows * 8, rows * 128 * 2
    assert found.weights == found.gradients == 2 * parameters
    assert found.kept == normalised + statistics + out
    # the gradients of the weights, of the output and of what the norm read
    assert found.peak == found.kept + found.gradients + out + rows * 64 * 2


def test_a_conversion_reports_what_its_plan_predicted(as_if_te_ran: None) -> None:
    model, inputs = ALL["llama"].build().bfloat16(), ALL["llama"].sample()
    inputs["labels"] = inputs["input_ids"]
    plan = te_transform.inspect(model, inputs, backend="te")
    converted = te_transform.convert(model, inputs, backend="te", verify=False)
    assert te_transform.report(converted).memory == plan.memory


@each(DISTINCT, later=(*PLANNED_LATER, "llama", "mixtral", "t5"))  # others here have llama
def test_every_model_has_a_prediction(name: str) -> None:
    found = planned(name).memory
    assert found.peak >= max(found.kept, found.gradients) > 0
    assert f"{size_text(found.weights)} of weights" in str(found)
    large = replace(found, weights=10 * 1024 * MIB, peak=10 * 1024 * MIB - MIB)
    assert str(large).startswith("10,239 MiB at the most beside 10.0 GiB of weights: ")


def test_the_figures_add_up_and_a_model_that_does_not_fit_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Memory("x", weights=30 * MIB, gradients=30 * MIB, kept=50 * MIB, peak=70 * MIB)
    assert found.total == (30 + 70 + 2 * 30) * MIB
    assert str(found).startswith(
        "70 MiB at the most beside 30 MiB of weights: 30 MiB of gradients and 40 MiB of activations and "
        "buffers; 50 MiB are kept for the backward, before there are gradients; 160 MiB in all with weights "
        "and 60 MiB of AdamW's state"
    )
    with torch.device("meta"):
        large = nn.Linear(2**17, 2**17)  # 64 GiB
    assert not [*room(large.eval(), found)]
    step = replace(found, weights=64 * 2**30)
    assert not [*room(large, step)]
    assert "does not fit" not in "".join(room(large.train(), found))
    (said,) = room(large, replace(found, gradients=64 * 2**30))
    assert "a training step with AdamW does not fit a GPU of 80 GiB, because it takes 128.1 GiB" in said
    (said,) = room(large.double(), None)
    assert said.startswith(
        "the model does not fit a GPU of 80 GiB, because its weights take 128.0 GiB: divide it"
    )


@pytest.mark.parametrize(
    ("size", "told"),
    [(0, "0 KiB"), (27_443, "27 KiB"), (4 * MIB, "4.0 MiB"), (12 * MIB, "12 MiB"), (2**34, "16.0 GiB")],
)
def test_sizes_have_units_that_show_their_digits(size: int, told: str) -> None:
    assert size_text(size) == told


def test_plain_pytorch_has_none() -> None:
    report = te_transform.inspect(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), torch.randn(4, 64))
    assert report.memory is None
    assert "predicted" not in str(report)


class Stack(nn.Module):
    """Blocks, `width` wide."""

    def __init__(self, blocks: int, width: int):
        super().__init__()
        made = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(blocks)]
        self.blocks = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_that_share_a_graph_are_counted_one_by_one() -> None:
    x = torch.randn(4, 8, 64, dtype=torch.bfloat16)
    few, many = (te_transform.inspect(Stack(n, 64).bfloat16(), x, backend="te").memory for n in (2, 20))
    assert many.weights == 10 * few.weights
    assert many.gradients == 10 * few.gradients
    assert many.kept == 10 * few.kept


def test_a_linear_without_columns_takes_none() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 0), nn.Linear(0, 64))

    def rest() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))

    def inputs() -> Tensor:
        return torch.randn(32, 64, dtype=torch.bfloat16)

    assert predicted(build, inputs, None).kept < predicted(rest, inputs, None).peak
