"""Linears that read one tensor become one product, of parameters that stay apart."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from te_transform.backends.joined import Split, adjacent
from te_transform.execution.attach import runner_of
from te_transform.graph.nodes import value
from tests.rules.tables import FFN, H, Make, Written, X, assert_refused, fused, linear, sites, written
from tests.zoo import CASES, seeded


def added(model: Written, x: Tensor) -> Tensor:
    return model.q(x) + model.k(x) * model.v(x)


def next_to_each_other(model: Written, x: Tensor) -> Tensor:
    return torch.cat([model.q(x), model.k(x)], -1)


def split_columns(model: Written, x: Tensor) -> Tensor:
    return sum(part(x).view(*x.shape[:-1], 2, -1).transpose(1, 2) for part in (model.q, model.k, model.v))


def viewed_across_columns(model: Written, x: Tensor) -> Tensor:
    return sum(part(x).view(len(x), -1) for part in (model.q, model.k, model.v))


def twice(model: Written, x: Tensor) -> Tensor:
    return added(model, added(model, x))


def gated(model: Written, x: Tensor) -> Tensor:
    return model.up(x) * F.silu(model.gate(x))


def behind_a_norm(model: Written, x: Tensor) -> Tensor:
    return added(model, model.norm(x))


def behind_a_norm_each(model: Written, x: Tensor) -> Tensor:
    return model.q(model.norm(x)) + model.k(model.norm(x)) * model.v(model.norm(x))


def behind_a_norm_that_is_read(model: Written, x: Tensor) -> Tensor:
    y = model.norm(x)
    return model.q(y) * torch.tanh(y) + model.k(model.norm(x))


def three(bias: bool = True) -> dict[str, Make]:
    return {name: linear(bias=bias) for name in "qkv"}


def some_biases() -> dict[str, Make]:
    """Return projections of which the keys' has no bias, as in Whisper: the softmax would cancel it."""
    return three() | {"k": linear(bias=False)}


def frozen(name: str) -> Make:
    def make() -> nn.Module:
        model = written(added, **three())()
        model.get_parameter(name).requires_grad_(False)
        return model

    return make


class Separate(nn.Module):
    """Attention of PyTorch's with a weight for each projection, whose biases are joined for the call."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(H, H) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q.bias, self.k.bias, self.v.bias))
        options = {"use_separate_proj_weight": True, "need_weights": False}
        weights = {f"{name}_proj_weight": getattr(self, name).weight for name in "qkv"}
        rest = (None, bias, None, None, False, 0.0, self.out.weight, self.out.bias)
        return F.multi_head_attention_forward(x, x, x, H, 2, *rest, **options, **weights)[0]


FUSES = {
    "biases that are joined for attention": (Separate, 1),
    "q, k and v": (written(added, **three()), 1),
    "without biases": (written(added, **three(bias=False)), 1),
    "a key without a bias": (written(added, **some_biases()), 1),
    "a first one without a bias": (written(added, **three() | {"q": linear(bias=False)}), 1),
    "one with a bias": (written(gated, up=linear(H, FFN, bias=False), gate=linear(H, FFN)), 1),
    "of different widths": (written(next_to_each_other, q=linear(), k=linear(H, 4)), 1),
    "gate and up": (written(gated, up=linear(H, FFN), gate=linear(H, FFN)), 1),
    "behind a norm": (written(behind_a_norm, norm=lambda: nn.LayerNorm(H), **three()), 1),
    "behind a call of the norm for each": (
        written(behind_a_norm_each, norm=lambda: nn.LayerNorm(H), **three()),
        1,
    ),
    "a view of the columns": (written(split_columns, **three()), 1),
    "a view across the columns": (written(viewed_across_columns, **three()), 1),
    "called twice": (written(twice, **three()), 2),
    "one weight frozen": (frozen("k.weight"), 1),
    "one bias frozen": (frozen("k.bias"), 1),
}


@pytest.mark.parametrize("name", FUSES)
def test_fuses(name: str) -> None:
    make, times = FUSES[name]
    fused(make).expect(merge_siblings=times)


class Adapted(nn.Module):
    """Frozen projections, and LoRA's of two of them, of as many rows as no FP8 kernel takes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(H, H).requires_grad_(False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(H, 4, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(4, H, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, v = (up(down(x)) for up, down in zip(self.up, self.down, strict=True))
        return (q + self.q(x)) * self.k(x) + v + self.v(x)


def test_a_frozen_sibling_of_a_trained_bias_has_no_gradient() -> None:
    model = seeded(written(lambda m, x: (m.q(x), m.k(x)), q=linear(), k=linear())).requires_grad_(False)
    model.k.bias.requires_grad_()
    q, k = te_transform.convert(model, X)(X)
    assert (q.requires_grad, k.requires_grad) == (False, True)


def test_trained_and_frozen_siblings_are_not_joined() -> None:
    """A merged linear would have the gradients of all."""
    converted = te_transform.convert(seeded(Adapted), X)
    te_transform.report(converted).expect(merge_siblings=2)
    (graph,) = runner_of(converted).graphs
    merged = [
        value(weight[0]).requires_grad for site in graph.plan.sites for weight in site.weights if weight[1:]
    ]
    assert sorted(merged) == [False, True]


def test_a_norm_that_something_else_reads_stays_apart() -> None:
    linears = {name: linear(H, H) for name in "qk"}
    report = fused(written(behind_a_norm_that_is_read, norm=lambda: nn.LayerNorm(H), **linears))
    report.expect(merge_siblings=0, layernorm_linear=2)


def same_weight() -> nn.Module:
    model = written(added, **three())()
    model.k.weight = model.q.weight
    return model


def transposed(model: Written, x: Tensor) -> Tensor:
    return F.linear(x, model.q.weight.t()) + model.k(x)


def flattened(model: Written, x: Tensor) -> Tensor:
    return F.linear(x, model.bank.flatten(end_dim=1)).chunk(2, -1)[0] + model.k(x)


def scaled(model: Written, x: Tensor) -> Tensor:
    return F.linear(x, model.q.weight * 2) + model.k(x)


def biases_by_exp(model: Written, x: Tensor) -> Tensor:
    return F.linear(x, model.q.weight, model.q.bias.exp()) + F.linear(x, model.k.weight, model.k.bias.exp())


def a_buffer() -> nn.Module:
    model = written(added, **three(bias=False))()
    weight = model.q.weight.detach()
    del model.q.weight
    model.q.weight = nn.Buffer(weight)
    return model.requires_grad_(False)


REFUSES = {
    "the same weight": (
        same_weight,
        "some of the linears have the same weight, but a merged linear has each row once: compute their "
        "product once",
    ),
    "transposed": (
        written(transposed, q=linear(bias=False), k=linear(bias=False)),
        "a weight is stored transposed, but merging needs consecutive rows: store it as [outputs, inputs], "
        "as nn.Linear does",
    ),
    "a parameter of another shape": (
        written(flattened, bank=lambda: nn.Parameter(torch.randn(2, H, H)), k=linear(bias=False)),
        "a weight is a view of a parameter in another shape, but merging needs consecutive rows: store it "
        "as [outputs, inputs], as nn.Linear does",
    ),
    "computed": (
        written(scaled, q=linear(bias=False), k=linear(bias=False)),
        "the linear's weight is computed at every call, but kernels need a parameter: compute it once and "
        "store it, if you can retrain",
    ),
    "a key without a bias and with odd rows": (
        written(next_to_each_other, q=linear(), k=linear(H, 4, bias=False)),
        "some linears have a bias or an added parameter, and one has 4 rows, but kernels for the merged "
        "linear need a multiple of 16: give it a multiple of 16 rows",
    ),
    "biases that are computed": (
        written(biases_by_exp, q=linear(), k=linear()),
        "the linear's bias is computed at every call, but it must be a parameter: compute it once and "
        "store it, if you can retrain",
    ),
    "one without rows": (
        written(next_to_each_other, q=linear(H, 0), k=linear()),
        "one of the linears has no rows, but each needs at least one: remove it from the model",
    ),
    "a buffer": (
        a_buffer,
        "the linear's weight is a buffer, but kernels need a parameter: store it as an "
        "nn.Parameter, with requires_grad=False if it is not trained",
    ),
}


def product_once(model: Written, x: Tensor) -> Tensor:
    y = F.linear(x, model.q.weight)
    return (y + model.q.bias) * (y + model.k.bias) + model.v(x)


FOLLOWED = {  # what the sentences advise
    "compute their product once": written(product_once, **three()),
    "give it a multiple of 16": written(next_to_each_other, q=linear(), k=linear(H, 16, bias=False)),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_advised_spelling_is_fused(name: str) -> None:
    fused(FOLLOWED[name]).expect(merge_siblings=1)


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    make, sentence = REFUSES[name]
    assert_refused(fused(make), "merge_siblings", sentence)


def written_between(model: Written, x: Tensor) -> Tensor:
    x = x.clone()
    y = model.q.requires_grad_(False)(x)
    x.mul_(2)
    return y + model.k(x)


def without_gradients(model: Written, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = model.q(x)
    return y + model.k(x)


@pytest.mark.parametrize("function", [written_between, without_gradients])
def test_linears_of_other_inputs_are_no_siblings(function) -> None:
    report = fused(written(function, q=linear(), k=linear()))
    assert report.counts == {"linear": 2}


def test_parameters_stay_apart_and_lie_next_to_each_other() -> None:
    model = seeded(written(added, **three()))
    parameters = dict(model.named_parameters())
    weights = [model.get_submodule(name).weight for name in "qkv"]
    assert adjacent(weights) is None
    te_transform.convert(model, X, inplace=True)
    assert [*map(id, model.parameters())] == [*map(id, parameters.values())]
    assert torch.equal(adjacent(weights), torch.cat(weights))
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    assert ends[:2] == [weight.data_ptr() for weight in weights[1:]]
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights)


def test_the_site_is_reported_at_the_module_around_the_siblings() -> None:
    make = written(lambda m, x: m.inner(x), inner=written(added, **three()))
    (site, _) = sites(make).fused
    assert (site.rule, site.path) == ("merge_siblings", "inner")


def test_attention_keeps_only_the_values_of_a_joined_product(
    te: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys are read where the product left them, and rotated ones take their place."""
    case, products, kept, split = CASES["llama"], [], [], Split.forward
    converted = te_transform.convert(case.build().bfloat16(), case.sample(), backend="te", verify=False)

    def noting(self: Split, product: Tensor, *joined: Tensor) -> tuple[Tensor, ...]:
        products.append(product.untyped_storage())
        return split(self, product, *joined)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage())
        return tensor.detach()

    monkeypatch.setattr(Split, "forward", noting)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = converted(**case.sample())[0].float().sum()
    assert len(products) == 1
    assert kept
    assert not {storage._cdata for storage in products} & {storage._cdata for storage in kept}
    for graph in runner_of(converted).graphs:
        assert not [node for node in graph.fused.graph.__self__.graph.nodes if node.target is torch.clone]
    loss.backward()
    assert all(parameter.grad is not None for parameter in converted.parameters())


@pytest.mark.integration
@pytest.mark.parametrize("verify", [False, True])
def test_a_conversion_copies_nothing_together(verify: bool) -> None:
    """A backward would keep the copies of all layers: the first calls run what was captured."""
    model = CASES["llama"].build()
    converted = te_transform.convert(model, CASES["llama"].sample(), backend="torch", verify=verify)
    assert runner_of(converted).scattered == []
    converted(**CASES["llama"].sample())
    assert runner_of(converted).scattered == []
    (attention, *_) = (part for name, part in converted.named_modules() if name.endswith("self_attn"))
    assert adjacent([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]) is not None
