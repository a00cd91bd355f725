"""The catalogue: what each rule makes, every sentence it refuses with, and that their order matters."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_transform
from te_transform.originals import fusions
from te_transform.passes import attention, layernorm_linear, layernorm_mlp, linear, merge_siblings
from te_transform.weights import Same

H, FFN = 16, 32


class MLP(nn.Module):
    """norm and a gated or plain MLP, with everything that a test wants to vary."""

    def __init__(
        self, combine, *, fc1_bias=True, fc2_bias=True, norm=None, out=H, gated=False, p=0.0
    ) -> None:
        super().__init__()
        self.norm = norm or nn.LayerNorm(H)
        self.fc1 = nn.Linear(H, 2 * FFN if gated else FFN, bias=fc1_bias)
        self.fc2 = nn.Linear(FFN, out, bias=fc2_bias)
        self.drop, self.combine = nn.Dropout(p), combine

    def forward(self, x):
        return self.fc2(self.drop(self.combine(self.fc1(self.norm(x)))))


class TwoLinears(nn.Module):
    """A gated MLP of two linears, called in the order that the test says."""

    def __init__(self, up_first: bool, act=F.silu) -> None:
        super().__init__()
        self.norm, self.down = nn.RMSNorm(H, eps=1e-6), nn.Linear(FFN, H, bias=False)
        self.gate, self.up = nn.Linear(H, FFN, bias=False), nn.Linear(H, FFN, bias=False)
        self.up_first, self.act = up_first, act

    def forward(self, x):
        x = self.norm(x)
        if self.up_first:
            up = self.up(x)
            return self.down(self.act(self.gate(x)) * up)
        return self.down(self.act(self.gate(x)) * self.up(x))


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def halves(act, activated: int):
    def combine(x):
        parts = x.chunk(2, -1)
        return act(parts[activated]) * parts[1 - activated]

    return combine


def converted(model: nn.Module, **options):
    """The converted model, held to the original's output, and its report."""
    x = torch.randn(2, 5, H)
    made = te_transform.convert(model, x, **options)
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x), rtol=1e-5, atol=1e-6)
    return made, te_transform.report(made)


def reasons(report, rule: str) -> set[str]:
    return {reason for site in report.refused if site.rule == rule for reason in site.reasons}


@pytest.mark.parametrize(
    ("model", "activation"),
    [
        (MLP(tanh_gelu), "gelu"),
        (MLP(F.relu), "relu"),
        (MLP(F.silu), "silu"),
        (MLP(lambda x: x * torch.sigmoid(1.702 * x)), "qgelu"),
        (MLP(halves(F.silu, 0), gated=True), "swiglu"),
        (MLP(halves(tanh_gelu, 0), gated=True), "geglu"),
        (MLP(halves(F.relu, 0), gated=True), "reglu"),
        (MLP(halves(torch.sigmoid, 0), gated=True), "glu"),
        (MLP(halves(F.silu, 1), gated=True), "swiglu"),
        (TwoLinears(up_first=False), "swiglu"),
        (TwoLinears(up_first=True), "swiglu"),
        (TwoLinears(up_first=True, act=tanh_gelu), "geglu"),
        (MLP(F.relu, norm=nn.RMSNorm(H, eps=1e-6)), "relu"),
        (MLP(F.relu, fc1_bias=False, fc2_bias=False), "relu"),
    ],
)
def test_layernorm_mlp(model: nn.Module, activation: str) -> None:
    made, report = converted(model)
    report.expect(layernorm_mlp=1, layernorm_linear=0)
    assert made.fused.activation == activation
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in made.state_dict().items())
    for name, parameter in te_transform.revert(made).named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            MLP(F.gelu),
            "the activation is the exact (erf) GELU, LayerNormMLP has the tanh approximation: allow "
            "approximate=True",
        ),
        (
            MLP(halves(F.gelu, 0), gated=True),
            "the activation is the exact (erf) GELU, LayerNormMLP has the tanh approximation: allow "
            "approximate=True",
        ),
        (MLP(torch.sigmoid), "the activation is sigmoid, LayerNormMLP has gelu_tanh, quick_gelu, relu, silu"),
        (
            MLP(F.relu, p=0.25),
            "a dropout of 0.25 stands before the second linear, LayerNormMLP has none there: set it to 0",
        ),
        (
            MLP(F.relu, fc1_bias=False),
            "one of the two linears has a bias and one has none, LayerNormMLP has both or none",
        ),
        (MLP(F.relu, out=8), "the MLP maps 16 features to 8, LayerNormMLP keeps their number"),
        (
            MLP(F.relu, norm=nn.LayerNorm(H, elementwise_affine=False)),
            "the norm has no scale, the fused module always has one",
        ),
        (
            MLP(F.relu, norm=nn.LayerNorm(H, bias=False)),
            "the LayerNorm has no bias, the fused module's LayerNorm always has one",
        ),
    ],
)
def test_layernorm_mlp_refuses(model: nn.Module, reason: str) -> None:
    _, report = converted(model.eval())
    report.expect(layernorm_mlp=0)
    assert reason in reasons(report, "layernorm_mlp")


def test_approximate_allows_the_tanh_gelu_and_nothing_else() -> None:
    model, x = MLP(F.gelu), torch.randn(2, 5, H)
    made = te_transform.convert(model, x, approximate=True, verify=False)
    te_transform.report(made).expect(layernorm_mlp=1)
    expected = model.fc2(tanh_gelu(model.fc1(model.norm(x))))
    torch.testing.assert_close(made(x), expected)


@pytest.mark.parametrize("norm", [nn.LayerNorm(H), nn.RMSNorm(H, eps=1e-6)])
@pytest.mark.parametrize("bias", [True, False])
def test_layernorm_linear(norm: nn.Module, bias: bool) -> None:
    made, report = converted(nn.Sequential(norm, nn.Linear(H, 24, bias=bias)))
    report.expect(layernorm_linear=1, linear=0)
    assert type(made[1].fused).__name__ == "LayerNormLinear"
    assert made[1].fused.layer_norm_weight is not None


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.LayerNorm(H, elementwise_affine=False), "the norm has no scale, the fused module always has one"),
        (
            nn.LayerNorm(H, bias=False),
            "the LayerNorm has no bias, the fused module's LayerNorm always has one",
        ),
        (nn.RMSNorm(H, elementwise_affine=False), "the norm has no scale, the fused module always has one"),
    ],
)
def test_layernorm_linear_refuses(norm: nn.Module, reason: str) -> None:
    _, report = converted(nn.Sequential(norm, nn.Linear(H, H)))
    report.expect(layernorm_linear=0, linear=1)
    assert reason in reasons(report, "layernorm_linear")


def test_a_near_miss_says_what_stood_there() -> None:
    _, report = converted(nn.Sequential(nn.LayerNorm(H), nn.Tanh(), nn.Linear(H, H)))
    assert reasons(report, "layernorm_linear") == {"the linear reads tanh, layer_norm or rms_norm is needed"}


class Siblings(nn.Module):
    """q, k and v of one tensor; `read` says what is done with each."""

    def __init__(self, read=lambda y: y, biases=(True, True, True)) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(H, 8, bias=bias) for bias in biases)
        self.read = read

    def forward(self, x):
        return sum(self.read(layer(x)) for layer in (self.q, self.k, self.v))


def test_merge_siblings() -> None:
    made, report = converted(Siblings())
    report.expect(merge_siblings=1, linear=1)
    assert made.q.fused.weight.shape == (24, H)
    assert sum(p.numel() for p in made.parameters()) == 3 * 8 * (H + 1)


def frozen(model: nn.Module, name: str) -> nn.Module:
    model.get_parameter(name).requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            Siblings(biases=(True, False, True)),
            "some of the linears have a bias and some have none, a merged linear has one for all its rows "
            "or none",
        ),
        (
            frozen(Siblings(), "k.weight"),
            "some of the weights are frozen, a merged weight is trained as a whole or not at all",
        ),
        (
            frozen(Siblings(), "k.bias"),
            "some of the biases are frozen, a merged bias is trained as a whole or not at all",
        ),
        (
            Siblings(read=lambda y: y.view(y.shape[0], -1)),
            "an output is taken apart by view() across its last dimension, a column of a merged output "
            "needs reshape()",
        ),
    ],
)
def test_merge_siblings_refuses(model: nn.Module, reason: str) -> None:
    _, report = converted(model)
    report.expect(merge_siblings=0, linear=3)
    assert reason in reasons(report, "merge_siblings")


def test_a_view_that_splits_the_last_dimension_is_no_reason() -> None:
    _, report = converted(Siblings(read=lambda y: y.view(*y.shape[:-1], 2, 4).flatten(-2)))
    report.expect(merge_siblings=1)


def test_linear_takes_what_is_left() -> None:
    made, report = converted(nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H)))
    report.expect(linear=2)
    assert isinstance(made[0], nn.Linear)


class WrittenOut(nn.Module):
    """Attention by matmul, softmax, matmul."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(H, 3 * H), nn.Linear(H, H), nn.Dropout(dropout)

    def forward(self, x, mask=None):
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) * 8**-0.5
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        return self.out((self.drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(b, s, H))


def test_attention() -> None:
    made, report = converted(WrittenOut())
    report.expect(attention=1)
    assert type(made.fused).__name__ == "DotProductAttention"


def test_attention_refuses_what_is_called_already() -> None:
    class Called(WrittenOut):
        def forward(self, x):
            b, s, _ = x.shape
            parts = (t.view(b, s, 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(b, s, H))

    _, report = converted(Called())
    report.expect(attention=0)
    assert reasons(report, "attention") == {
        "the model calls scaled_dot_product_attention already, the torch backend has no faster core"
    }


def test_the_pipeline_is_the_catalogue_in_its_order() -> None:
    modules = (merge_siblings, attention, layernorm_mlp, layernorm_linear, linear)
    assert tuple(module.RULE for module in modules) == te_transform.PIPELINE
    assert [rule.name for rule in te_transform.PIPELINE] == [
        module.__name__.rpartition(".")[2] for module in modules
    ]


def test_order_matters() -> None:
    model, x = TwoLinears(up_first=False), torch.randn(2, 5, H)

    def counts(*rules) -> dict[str, int]:
        return dict(te_transform.inspect(model, x, passes=[module.RULE for module in rules]).counts)

    assert counts(merge_siblings, layernorm_mlp, layernorm_linear, linear) == {
        "merge_siblings": 1,
        "layernorm_mlp": 1,
    }
    # layernorm_linear first takes the norm and the first linear away from layernorm_mlp
    early = counts(merge_siblings, layernorm_linear, layernorm_mlp, linear)
    assert early == {"merge_siblings": 1, "layernorm_linear": 1, "linear": 1}
    # without the merge the gate and the up projection are two linears of one norm, which is none of the
    # patterns
    assert counts(layernorm_mlp, layernorm_linear, merge_siblings, linear) == {
        "merge_siblings": 1,
        "linear": 2,
    }
    # linear first leaves nothing for the others
    assert counts(linear, merge_siblings, layernorm_mlp, layernorm_linear) == {"linear": 3}


def test_rules_have_a_file_a_name_and_say_what_they_save() -> None:
    for rule in te_transform.PIPELINE:
        module = __import__(f"te_transform.passes.{rule.name}", fromlist=["RULE"])
        assert module.RULE is rule
        assert module.__doc__


def test_an_operation_that_is_only_read_is_no_part_of_the_match() -> None:
    _, report = converted(nn.Sequential(nn.Linear(H, H), nn.LayerNorm(H), nn.Linear(H, H)))
    report.expect(layernorm_linear=1, linear=1)


def test_a_sequential_hosts_no_module_that_it_would_run() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(H)
            self.mlp = nn.Sequential(nn.Linear(H, FFN), nn.GELU(approximate="tanh"), nn.Linear(FFN, H))

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    model, x = Block(), torch.randn(2, 5, H)
    made, report = converted(model)
    report.expect(layernorm_mlp=1)
    assert len(made.mlp) == 3
    torch.testing.assert_close(made.mlp(x), model.mlp(x))  # on its own, and so by its own forward
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in made.state_dict().items())
    assert str(te_transform.revert(made)) == str(model)


class OtherwiseInEvaluation(nn.Module):
    """A linear, and something else when it is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FFN, H))

    def forward(self, x):
        return F.linear(x if self.training else x.round(), self.weight)


def test_a_module_that_evaluates_otherwise_is_refused() -> None:
    model = nn.Sequential(nn.LayerNorm(H), OtherwiseInEvaluation()).eval()
    result, report = converted(model, passes=(layernorm_linear.RULE,))
    (outcome,) = report.refused
    (reason,) = outcome.reasons
    assert reason.startswith("OtherwiseInEvaluation computes something else in evaluation mode, a fused")
    x = torch.randn(2, 5, H)
    torch.testing.assert_close(result(x), model(x), rtol=0, atol=0)


class Chain(nn.Module):
    """norm, linear, norm, and two linears that become one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.norm_2 = nn.LayerNorm(H), nn.Linear(H, H), nn.LayerNorm(H)
        self.second, self.third = nn.Linear(H, FFN), nn.Linear(H, FFN)

    def forward(self, x):
        x = self.norm_2(self.first(self.norm(x)))
        return self.second(x) + self.third(x)


def test_a_fused_module_may_read_another() -> None:
    _, report = converted(Chain())
    assert report.counts == {"layernorm_linear": 2, "merge_siblings": 1}
    read = [node.args[0] for node in report.after.nodes if node.op == "call_module"]
    assert [node.op for node in read] == ["placeholder", "call_module"]


class OwnNormLinear(nn.Module):
    """A fused module that no backend has: it does the norm itself, always."""

    def __init__(self, norm, linear) -> None:
        super().__init__()
        self.eps = norm.eps
        for name, tensor in (("scale", norm.weight), ("shift", norm.bias), ("matrix", linear.weight)):
            setattr(self, name, nn.Parameter(torch.empty_like(tensor, device="meta")))

    def forward(self, x):
        return F.linear(F.layer_norm(x, x.shape[-1:], self.scale, self.shift, self.eps), self.matrix)


def test_a_rule_may_bring_its_own_fused_module() -> None:
    rule = replace(
        layernorm_linear.RULE,
        build=lambda norm, linear: OwnNormLinear(norm, linear),
        weights=(
            Same("norm.weight", "fused.scale"),
            Same("norm.bias", "fused.shift"),
            Same("linear.weight", "fused.matrix"),
        ),
    )
    model = nn.Sequential(nn.LayerNorm(H), nn.Identity(), nn.Linear(H, FFN, bias=False))
    nn.init.normal_(model[0].weight)
    result, report = converted(model, passes=(rule,), verify=False)
    assert report.counts == {"layernorm_linear": 1}
    assert isinstance(result[2].fused, OwnNormLinear)
    assert [fusion.runs for fusion in fusions(result)] == [1]
    x = torch.randn(2, 5, H)  # to the linear alone, which then does what it always did
    torch.testing.assert_close(result[2](x), model[2](x), rtol=0, atol=0)
    assert [fusion.runs for fusion in fusions(result)] == [1]
