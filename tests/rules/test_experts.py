"""The experts of a mixture model: tokens sorted by expert, two products by groups, and back."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  which has a product by groups of its own
from torch import Tensor, nn

import te_transform
from te_transform.graph import ops
from tests.captures import canonicalize, capture, targets
from tests.families import FAMILIES
from tests.rules.tables import reasons, sites
from tests.zoo import seeded

LATER = pytest.mark.integration
HIDDEN, INNER, EXPERTS, CHOICES = 16, 24, 4, 2
X = torch.randn(10, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()


def swiglu(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, -1)
    return F.silu(gate) * up


def gate_last(hidden: Tensor) -> Tensor:
    up, gate = hidden.chunk(2, -1)
    return up * F.gelu(gate, approximate="tanh")


def clamped(
    hidden: Tensor, slope: float = 1.702, offset: int = 1, pairs: bool = True, least: float = -0.7
) -> Tensor:
    """The gated activation of GPT-OSS. Other models have halves, a SiLU, or no offset."""
    gate, up = (hidden[..., ::2], hidden[..., 1::2]) if pairs else hidden.chunk(2, -1)
    gate, up = gate.clamp(min=None, max=0.7), up.clamp(min=least, max=0.7)
    return (up + offset if offset else up) * (gate * torch.sigmoid(gate * slope))


def by_softmax(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, model.router).float().softmax(-1).topk(CHOICES, dim=-1)


def product(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    in_bf16 = x.dtype is torch.bfloat16
    return (F.grouped_mm if in_bf16 else torch.ops.transformers.grouped_mm_fallback)(x, weight, offs=offs)


class Mixture(nn.Module):
    """Experts as transformers computes them, with these routers and activations."""

    def __init__(
        self,
        act: Callable[[Tensor], Tensor] = swiglu,
        route: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]] = by_softmax,
        width: int = 2 * INNER,
        masked: bool = True,
        biased: bool = False,
        after: Callable[[Tensor, Tensor], None] = lambda chosen, perm: None,
    ):
        super().__init__()
        self.act, self.route, self.masked, self.after = act, route, masked, after
        self.router = nn.Parameter(torch.randn(EXPERTS, HIDDEN))
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, width, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / 4)
        self.biases = [None, None]
        if biased:
            self.biases = nn.ParameterList([torch.randn(EXPERTS, width), torch.randn(EXPERTS, HIDDEN)])
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(self, x)
        numbers, perm = torch.sort(chosen.reshape(-1))
        self.after(chosen, perm)
        rows, scales = x[perm // CHOICES], weights.reshape(-1)[perm]
        counts = torch.histc(numbers.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        beyond = (numbers >= EXPERTS).unsqueeze(-1)
        if self.masked:
            rows.masked_fill_(beyond, 0.0)
        numbers.clamp_(max=EXPERTS - 1)
        hidden = product(rows, self.gate_up.transpose(-2, -1), offs=ends)
        if self.biases[0] is not None:
            hidden.add_(self.biases[0][numbers])
        hidden = hidden.masked_fill(beyond, 0.0) if self.masked else hidden
        out = product(self.act(hidden), self.down.transpose(-2, -1), offs=ends)
        if self.biases[1] is not None:
            out.add_(self.biases[1][numbers])
        out = (out.masked_fill(beyond, 0.0) if self.masked else out) * scales.unsqueeze(-1)
        back = torch.empty_like(perm)
        back[perm] = torch.arange(perm.size(0), device=x.device)
        return self.head(out[back].view(len(x), CHOICES, HIDDEN).sum(dim=1).to(x.dtype))


def made(**how) -> Callable[[], nn.Module]:
    return lambda: Mixture(**how).bfloat16()


def with_biases_in_float32() -> nn.Module:
    model = Mixture(biased=True, act=clamped).bfloat16()
    model.biases.float()
    return model


def close(found: Tensor, wanted: Tensor) -> bool:
    return (found.double() - wanted.double()).norm() <= 0.02 * wanted.double().norm()


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    out.float().square().mean().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    return found | {"x": x.grad, "out": out.detach()}


FUSES = {
    "gated": made(),
    "without masks": made(masked=False),
    "the second half": made(act=gate_last),
    "the exact GELU": made(act=lambda hidden: F.gelu(hidden.chunk(2, -1)[0]) * hidden.chunk(2, -1)[1]),
    "no gate": made(act=lambda hidden: F.relu(hidden).square(), width=INNER),
    "chosen, then softmax": made(route=lambda m, x: (
        (top := F.linear(x, m.router).topk(CHOICES)).values.softmax(-1), top.indices
    )),
    "biases": made(biased=True),
    "biases without a gate": made(biased=True, act=lambda hidden: F.relu(hidden).square(), width=INNER),
    "clamped, in pairs, with biases": made(biased=True, act=clamped),
    "biases in float32": with_biases_in_float32,
    "clamped": made(act=partial(clamped, slope=1, offset=0, pairs=False)),
    "clamped, by 1.702": made(act=partial(clamped, pairs=False)),
    "weights in bfloat16": made(route=lambda m, x: (
        (top := by_softmax(m, x))[0].bfloat16(), top[1]
    )),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=() if backend == "te" or name == "gated" else LATER)
        for name in FUSES
        for backend in ("torch", "te")
    ],
)
def test_fuses(name: str, backend: str, te: ModuleType) -> None:
    model = seeded(FUSES[name])
    converted = te_transform.convert(model, X, backend=backend)
    te_transform.report(converted).expect(experts=1)
    wanted, found = gradients(model, X), gradients(converted, X)
    for key, value in wanted.items():
        assert found[key].dtype is value.dtype
        assert close(found[key], value), key
    if backend == "te":
        by_kernels = not any("experts" in reason for reason in te_transform.report(converted).plain_calls)
        assert by_kernels is (name != "biases in float32")


def test_a_report_with_a_recipe_says_that_they_are_not_in_it() -> None:
    asked = {"backend": "te"}, {"backend": "te", "recipe": "fp8-delayed"}
    told = [[note for note in sites(made(), X, **how).notes if "experts compute" in note] for how in asked]
    assert [*map(len, told)] == [0, 1]


def wider(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """A router that has more experts than there are here, as where others have the rest."""
    scores = F.linear(x, torch.cat([model.router, -model.router])).float()
    return scores.softmax(-1).topk(CHOICES)


def shifted(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = by_softmax(model, x)
    return weights, (chosen + 3) % (EXPERTS + 1)


def along_the_tokens(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.linear(x, model.router).float().t().softmax(0)
    weights, chosen = scores.topk(CHOICES, dim=0)
    return weights.t(), chosen.t()


def written_to(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two choices are of experts elsewhere."""
    weights, chosen = by_softmax(model, x)
    chosen[0, 0] = EXPERTS
    chosen[3, 1] = EXPERTS
    return weights, chosen


def filled(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = by_softmax(model, x)
    chosen.masked_fill_(weights < 0.2, EXPERTS)
    return weights, chosen


OTHERS = {
    "wider": wider,
    "shifted": shifted,
    "along the tokens": along_the_tokens,
    "written to": written_to,
    "filled": filled,
}


@pytest.mark.parametrize("name", OTHERS)
def test_experts_without_a_known_router_keep_their_masks(name: str) -> None:
    model = seeded(made(route=OTHERS[name]))
    converted = te_transform.convert(model, X)
    te_transform.report(converted).expect(experts=0)
    assert torch.equal(converted(X), model(X))
    (captured,) = capture(model, (X,))
    found = targets(canonicalize(captured.module.graph))
    assert torch.masked_fill in found
    assert ops.group_ends not in found


class Masked(nn.Module):
    """A model of one linear, whose outputs `mask` masks by what a router has chosen, as `given` says."""

    def __init__(self, mask: Callable[[Tensor, Tensor, Tensor, Tensor], Any]):
        super().__init__()
        self.mask, self.router, self.fc = mask, nn.Linear(8, EXPERTS), nn.Linear(8, 8)

    def forward(self, x: Tensor, given: Tensor) -> Any:
        _, chosen = self.router(x).topk(1)
        return self.mask(self.fc(x), chosen, x, given)


def mask_is_written_to(h: Tensor, chosen: Tensor, x: Tensor, given: Tensor) -> Any:
    mask = chosen >= EXPERTS
    mask[given] = True
    return h.masked_fill_(mask, 0.0)


def mask_is_written_to_below(h: Tensor, chosen: Tensor, x: Tensor, given: Tensor) -> Any:
    mask = chosen >= EXPERTS
    below = mask.unsqueeze(-1)
    mask.logical_or_(given.unsqueeze(-1))
    return h.unsqueeze(1).masked_fill(below, 0.0)


def choices_get_others(h: Tensor, chosen: Tensor, x: Tensor, given: Tensor) -> Any:
    scores = torch.where(given.unsqueeze(-1), torch.arange(16.0), -torch.arange(16.0))
    torch.topk(scores, 1, out=(torch.empty(len(h), 1), chosen))
    return h.masked_fill_(chosen >= EXPERTS, 0.0)


def choices_are_looked_at_by_an_einsum(h: Tensor, chosen: Tensor, x: Tensor, given: Tensor) -> Any:
    torch.einsum("ij->ji", chosen).add_(EXPERTS * given)
    return h.masked_fill_(chosen >= EXPERTS, 0.0)


def result_is_written_to(h: Tensor, chosen: Tensor, x: Tensor, given: Tensor) -> Any:
    masked = h.masked_fill(chosen >= EXPERTS, 0.0)
    masked.add_(given.unsqueeze(-1))
    return masked - h


def choices_are_written_to_later(h: Tensor, chosen: Tensor, x: Tensor, given: Tensor) -> Any:
    limited = chosen.clamp(max=EXPERTS - 1)
    chosen.add_(given.unsqueeze(-1))
    return h * limited


def masked_input_is_written_to(h: Tensor, chosen: Tensor, x: Tensor, given: Tensor) -> Any:
    return x.masked_fill(chosen >= EXPERTS, 0.0).mul_(2) * h


def masked_input_is_returned(h: Tensor, chosen: Tensor, x: Tensor, given: Tensor) -> Any:
    return x.masked_fill(chosen >= EXPERTS, 0.0)


def masked_without_gradient(h: Tensor, chosen: Tensor, x: Tensor, given: Tensor) -> Any:
    with torch.no_grad():
        masked = h.masked_fill(chosen >= EXPERTS, 0.0)
    return masked * h


def columns_are_masked(h: Tensor, chosen: Tensor, x: Tensor, given: Tensor) -> Any:
    return h[:, :4].masked_fill(chosen >= EXPERTS, 0.0).view(-1)


def choices_are_drawn(h: Tensor, chosen: Tensor, x: Tensor, given: Tensor) -> Any:
    drawn = torch.rand(len(h), EXPERTS).topk(1).indices
    return h.masked_fill_(drawn >= EXPERTS, 0.0) + torch.rand_like(h)


def by_name(h: Tensor, chosen: Tensor, x: Tensor, given: Tensor) -> Any:
    _, chosen = torch.topk(input=h, k=1)
    _, places = torch.sort(input=chosen.flatten())
    return h.masked_fill(torch.unsqueeze(input=places >= 8, dim=-1), 0.0)


MASKS = [
    mask_is_written_to,
    mask_is_written_to_below,
    choices_get_others,
    choices_are_looked_at_by_an_einsum,
    result_is_written_to,
    choices_are_written_to_later,
    masked_input_is_written_to,
    masked_input_is_returned,
    masked_without_gradient,
    columns_are_masked,
    choices_are_drawn,
    by_name,
]


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_goes_where_nobody_sees_it_alone(mask) -> None:
    """What writes to something does not with the example, so that no look at the example tells."""
    model = seeded(lambda: Masked(mask))
    x, none = torch.randn(6, 8), torch.zeros(6, dtype=torch.bool)
    converted = te_transform.convert(model, (x, none), backend="torch")
    notes = te_transform.report(converted).notes
    assert [note for note in notes if "no speedup" not in note] == ["backend 'torch', as asked"]
    for given in (none, torch.arange(6) % 2 == 0):
        found, wanted = (_masked(each, x, given) for each in (converted, model))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)


def _masked(model: nn.Module, x: Tensor, given: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    out = model(x, given)
    assert out is not x
    read = [x, *model.fc.parameters()]
    found = torch.autograd.grad(out.square().sum(), read, allow_unused=True, materialize_grads=True)
    return [out.detach(), *found]


def swap(chosen: Tensor, perm: Tensor) -> None:
    perm[:2] = perm[:2].flip(0)


def forget(chosen: Tensor, perm: Tensor) -> None:
    chosen.zero_()


def beyond(chosen: Tensor, perm: Tensor) -> None:
    chosen[0] = EXPERTS


@pytest.mark.parametrize("after", [swap, forget, beyond])
def test_writes_after_the_choices_are_sorted_are_read(after) -> None:
    model = seeded(made(after=after))
    with torch.no_grad():  # the backward of topk would read the choices
        assert close(te_transform.convert(model, X)(X), model(X))


class InAnotherOrder(Mixture):
    """One that counts before it sorts, and that writes to what it has counted, weighted or numbered."""

    def __init__(self, write: Callable[..., None]):
        super().__init__()
        self.write = write

    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        weights, chosen = self.route(self, x)
        weights = weights.t().contiguous().t()  # which no view lays in a row
        places, flat = torch.arange(chosen.numel()), weights.reshape(-1)
        counts = torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        self.write(counts, weights, places, by)
        _, perm = torch.sort(chosen.reshape(-1))
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        hidden = product(x[perm // CHOICES], self.gate_up.transpose(-2, -1), offs=ends)
        out = product(self.act(hidden), self.down.transpose(-2, -1), offs=ends) * flat[perm].unsqueeze(-1)
        back = torch.empty_like(perm)
        back[perm] = places
        return out[back].view(len(x), CHOICES, HIDDEN).sum(dim=1).to(x.dtype)


def nothing(counts: Tensor, weights: Tensor, places: Tensor, by: Tensor) -> None:
    pass


def move_one(counts: Tensor, weights: Tensor, places: Tensor, by: Tensor) -> None:
    counts[0] -= by
    counts[1] += by


def weigh(counts: Tensor, weights: Tensor, places: Tensor, by: Tensor) -> None:
    weights.mul_(1 + by)


def exchange(counts: Tensor, weights: Tensor, places: Tensor, by: Tensor) -> None:
    places[:2] = torch.where(by > 0, places[:2].flip(0), places[:2])


@pytest.mark.parametrize("write", [nothing, move_one, weigh, exchange])
def test_writes_before_the_choices_are_sorted_are_read(write) -> None:
    model = seeded(lambda: InAnotherOrder(write).bfloat16())
    converted = te_transform.convert(model, (X, torch.tensor(0)))
    te_transform.report(converted).expect(experts=int(write is nothing))
    for by in (0, 1):
        assert close(converted(X, torch.tensor(by)), model(X, torch.tensor(by)))


def test_a_clamp_gives_nan_no_gradient(te: ModuleType) -> None:
    """A token of NaN does not change the bias gradients of the first product, as in PyTorch."""
    model = seeded(FUSES["clamped, in pairs, with biases"])
    converted = te_transform.convert(model, X, backend="te")
    x = X.index_fill(0, torch.tensor([1]), float("nan"))
    wanted, found = (gradients(each, x)["biases.0"] for each in (model, converted))
    assert not wanted.isnan().any()
    assert close(found, wanted)


@pytest.mark.parametrize("name", ["gated", pytest.param("biases", marks=pytest.mark.integration)])
@pytest.mark.usefixtures("compilations")
def test_no_tokens_run_uncompiled(name: str) -> None:
    """Of no rows inductor hands operands to products by groups in a way that they refuse."""
    model = seeded(FUSES[name])
    converted = te_transform.convert(model, X, compile=True, verify=False)
    for each in (X, X[:0]):
        wanted, found = gradients(model, each), gradients(converted, each)
        assert all(close(found[key], value) for key, value in wanted.items())
    told = "a graph runs uncompiled: its grouped matrix products have no tokens"
    assert told in te_transform.report(converted).notes


@pytest.mark.parametrize("backend", ["torch", "te"])
def test_several_gradients_at_once(backend: str, te: ModuleType) -> None:
    model = seeded(FUSES["gated"])
    converted = te_transform.convert(model, X, backend=backend)
    given = torch.randn(3, *X.shape).bfloat16()

    def found(model: nn.Module) -> tuple[Tensor, ...]:
        x = X.clone().requires_grad_()
        return torch.autograd.grad(model(x), [x, *model.parameters()], given, is_grads_batched=True)

    assert all(map(close, found(converted), found(model)))


REFUSES = {
    "float32": (
        Mixture,
        "the experts compute in float32, but PyTorch's grouped matrix products support only bfloat16: "
        "convert the model with bfloat16 weights (te-transform: --dtype bfloat16)",
    ),
    "a narrow gate": (
        made(act=lambda hidden: F.silu(hidden[..., :1]) * hidden[..., 1:], width=INNER + 1),
        f"the gate has 1 of the first product's {INNER + 1} outputs, but the fused op needs exactly half: "
        "no kernel supports other splits",
    ),
    "uneven limits": (
        made(act=partial(clamped, least=-0.5)),
        "the product beside the gate is clamped to -0.5 and 0.7, but the fused op has one limit for both "
        "signs: no kernel supports two",
    ),
    "an odd number of pairs": (
        made(act=lambda hidden: clamped(hidden[..., :-1]), width=2 * INNER + 1),
        "the experts are not two products with a supported activation between them: no kernel supports "
        "other forms",
    ),
}


def by_order(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Without topk."""
    scores, experts = F.linear(x, model.router).float().softmax(-1).sort(-1, descending=True)
    return scores[:, :CHOICES], experts[:, :CHOICES]


def between(write: Callable[[nn.Module, Tensor], Any]) -> Callable[[], nn.Module]:
    """Experts that write to something between their two products."""

    class Writes(Mixture):
        def act(self, hidden: Tensor) -> Tensor:
            write(self, hidden)
            return swiglu(hidden)

    def make() -> nn.Module:
        model = Writes()
        del vars(model)["act"]
        return model.bfloat16()

    return make


CUT = (
    "the model calls {} between these operations (a write, or a change of mode), but the fused module is one "
    "call: move it before or after them"
)
REFUSES |= {
    "a write to what the first product has made": (
        between(lambda model, hidden: hidden.__setitem__(0, 0)),
        CUT.format("setitem"),
    ),
    "a write to something else": (
        between(lambda model, hidden: model.head.bias.detach().mul_(1)),
        CUT.format("mul_"),
    ),
    "another router": (
        made(route=by_order, masked=False),
        "the groups of tokens do not come from the indices of topk, the only recognized routing: choose "
        "the experts by torch.topk",
    ),
    "another activation": (
        made(act=torch.sin, width=INNER),
        "the experts are not two products with a supported activation between them: no kernel supports "
        "other forms",
    ),
}
OF_OTHER_KINDS = {
    ("qwen3_moe", "batched_mm"): "call model.set_experts_implementation('grouped_mm')",
}


@pytest.mark.parametrize(("name", "implementation"), OF_OTHER_KINDS)
def test_each_layers_experts_say_once_why_they_stay(name: str, implementation: str) -> None:
    case = FAMILIES[name]
    model = case.build().bfloat16()
    model.set_experts_implementation(implementation)
    report = te_transform.inspect(model, case.sample())
    refused = [site for site in report.refused if site.rule == "experts"]
    assert sorted(site.path for site in refused) == [
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
    ]
    (reason,) = {reason for site in refused for reason in site.reasons}
    assert OF_OTHER_KINDS[name, implementation] in reason


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    make, sentence = REFUSES[name]
    report = sites(make, X if name != "float32" else X.float())
    assert reasons(report, "experts") == {sentence}
