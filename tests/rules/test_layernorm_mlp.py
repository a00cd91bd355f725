"""norm, linear, activation, linear becomes LayerNormMLP, with a gate or without."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from tests.rules.tables import (
    FFN,
    H,
    Make,
    X,
    assert_refused,
    fused,
    linear,
    reasons,
    sequential,
    sites,
    written,
)
from tests.zoo import seeded

Act = Callable[[Tensor], Tensor]


class MLP(nn.Module):
    """norm and an MLP, with everything that a test wants to vary; `combine` stands between its linears."""

    def __init__(
        self, combine: Act, norm: Make, widths: tuple[int, int], biases: tuple[bool, bool], p: float, out: int
    ):
        super().__init__()
        self.combine, self.drop = combine, nn.Dropout(p)
        self.norm, self.fc1 = norm(), nn.Linear(H, widths[0], bias=biases[0])
        self.fc2 = nn.Linear(widths[1], out, bias=biases[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.combine(self.fc1(self.norm(x)))))


def layer_norm(**options: bool) -> Make:
    return lambda: nn.LayerNorm(H, **options)


LAYER_NORM = layer_norm()


def rms_norm() -> nn.Module:
    return nn.RMSNorm(H, eps=1e-6)


def mlp(
    combine: Act,
    norm: Make = LAYER_NORM,
    widths: tuple[int, int] = (FFN, FFN),
    biases: tuple[bool, bool] = (True, True),
    p: float = 0.0,
    out: int = H,
) -> Make:
    return lambda: MLP(combine, norm, widths, biases, p, out).eval()


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def halves(act: Act, activated: int = 0) -> Act:
    def combine(x: Tensor) -> Tensor:
        parts = x.chunk(2, -1)
        return act(parts[activated]) * parts[1 - activated]

    return combine


def in_rows(x: Tensor) -> Tensor:
    rows = x.view(*x.shape[:-1], 2, FFN)
    return F.silu(rows[..., 0, :]) * rows[..., 1, :]


def unbound(x: Tensor) -> Tensor:
    up, gate = x.unflatten(-1, (2, -1)).unbind(-2)
    return up * F.silu(gate)


def by_hand(x: Tensor) -> Tensor:
    gate, up = x.tensor_split(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def clamped(
    act: Act = F.silu, offset: int = 0, limit: float = 0.4, least: float = -0.4, activated: int = 0
) -> Make:
    """A gate as GPT-OSS and DeepSeek V4 have it, with both factors clamped; half of the values are."""

    def combine(x: Tensor) -> Tensor:
        parts = x.chunk(2, -1)
        gate, up = parts[activated].clamp(max=limit), parts[1 - activated].clamp(min=least, max=limit)
        return act(gate) * (up + offset if offset else up)

    return mlp(combine, widths=(2 * FFN, FFN))


def minimax(model: nn.Module, x: Tensor) -> Tensor:
    x = model.norm(x)
    gate, up = model.gate(x).clamp(max=0.5), model.up(x).clamp(min=-0.5, max=0.5)
    return model.down((up + 1.0) * (gate * torch.sigmoid(gate * 1.702)))


def gated(act: Act, activated: int = 0) -> Make:
    return mlp(halves(act, activated), widths=(2 * FFN, FFN))


def llama(up_first: bool, act: Act = F.silu) -> Make:
    """A gated MLP of two linears, which call each other's results in this order."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        x = model.norm(x)
        up = model.up(x) if up_first else None
        gate = act(model.gate(x))
        return model.down(gate * (model.up(x) if up is None else up))

    linears = {"gate": linear(H, FFN, bias=False), "up": linear(H, FFN, bias=False)}
    return written(forward, norm=rms_norm, down=linear(FFN, H, bias=False), **linears)


FUSES = {
    "gelu": mlp(F.gelu),
    "tanh gelu": mlp(tanh_gelu),
    "relu": mlp(F.relu),
    "silu": mlp(F.silu),
    "quick gelu": mlp(quick_gelu),
    "squared relu": mlp(squared_relu),
    "geglu": gated(tanh_gelu),
    "swiglu": gated(F.silu),
    "reglu": gated(F.relu),
    "squared reglu": gated(squared_relu),
    "glu": gated(torch.sigmoid),
    "glu by name": mlp(F.glu, widths=(2 * FFN, FFN)),
    "swiglu in rows": mlp(in_rows, widths=(2 * FFN, FFN)),
    "swiglu of what is unbound": mlp(unbound, widths=(2 * FFN, FFN)),
    "swiglu by hand": mlp(by_hand, widths=(2 * FFN, FFN)),
    "the second half activated": gated(F.silu, 1),
    "a clamped gate": clamped(),
    "a clamped gate by 1.702": clamped(quick_gelu),
    "a clamped gate, one more than the other": clamped(quick_gelu, offset=1),
    "the second half clamped and activated": clamped(activated=1),
    "clamped gate and up": written(
        minimax,
        norm=rms_norm,
        gate=linear(H, FFN, bias=False),
        up=linear(H, FFN, bias=False),
        down=linear(FFN, H, bias=False),
    ),
    "a gate without limits": clamped(limit=math.inf, least=-math.inf),
    "gate and up": llama(up_first=False),
    "up and gate": llama(up_first=True),
    "up and gate with gelu": llama(up_first=True, act=tanh_gelu),
    "RMSNorm": mlp(F.relu, norm=rms_norm),
    "a norm without a bias": mlp(F.relu, norm=layer_norm(bias=False)),
    "a norm of nothing else": mlp(F.relu, norm=layer_norm(elementwise_affine=False)),
    "without biases": mlp(F.relu, biases=(False, False)),
    "modules in a row": sequential(LAYER_NORM, linear(H, FFN), nn.ReLU, nn.Identity, linear(FFN, H)),
}


@pytest.mark.parametrize("name", FUSES)
def test_fuses(name: str) -> None:
    fused(FUSES[name]).expect(layernorm_mlp=1, layernorm_linear=0, linear=0)


@pytest.mark.parametrize("joined", [False, True])
def test_fuses_beside_attention_that_reads_the_same_norm_before(joined: bool) -> None:
    """In Cohere, gate and up are one product, and the op also returns the norm for attention."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = model.norm(x)
        parts = (part(y).unflatten(-1, (2, -1)).transpose(1, 2) for part in (model.q, model.k, model.v))
        attended = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        gate, up = model.both(y).chunk(2, -1) if joined else (model.gate(y), model.up(y))
        return x + model.out(attended) + model.down(F.silu(gate) * up)

    linears = {name: linear(bias=False) for name in ("q", "k", "v", "out")}
    linears |= {name: linear(H, FFN, bias=False) for name in ("gate", "up")}
    linears |= {"both": linear(H, 2 * FFN, bias=False), "down": linear(FFN, H, bias=False)}
    report = fused(written(forward, norm=rms_norm, **linears))
    report.expect(merge_siblings=1 if joined else 2, layernorm_mlp=1, layernorm_linear=0, linear=2)


ERF = (
    "the activation is the exact (erf) GELU, but a gated LayerNormMLP has only the tanh approximation: set "
    "approximate=True, in float32 also verify=False"
)
REFUSES: dict[str, tuple[Make, str]] = {
    "exact gelu, gated": (gated(F.gelu), ERF),
    "another activation": (
        mlp(torch.sigmoid),
        "the activation is sigmoid, but LayerNormMLP has only gelu, gelu_tanh, quick_gelu, relu, silu, "
        "squared_relu: no kernel supports others",
    ),
    "an uneven gate": (
        mlp(lambda x: F.relu(x[..., :8]) * x[..., 8:16], widths=(FFN, 8)),
        "the gate has 8 of the first linear's 32 outputs, but LayerNormMLP needs exactly half: no kernel "
        "supports other splits",
    ),
    "two limits": (
        clamped(least=-0.3),
        "the product beside the gate is clamped to -0.3 and 0.4, but the fused op has one limit for both "
        "signs: no kernel supports two",
    ),
    "dropout": (
        lambda: mlp(F.relu, p=0.25)().train(),
        "a dropout of 0.25 precedes the second linear, but LayerNormMLP has no dropout there: set it to 0",
    ),
    "one bias": (
        mlp(F.relu, biases=(False, True)),
        "only one of the two linears has a bias, but LayerNormMLP has two biases or none: give the other "
        "linear a bias of zeros",
    ),
    "another width": (
        mlp(F.relu, out=8),
        "the MLP maps 16 features to 8, but LayerNormMLP keeps the number of features: no kernel changes it",
    ),
}


NAMED = {  # an activation that no kernel has, and what it is called
    "F.mish": (F.mish, "mish"),
    "nn.Mish": (nn.Mish(), "mish"),
    "torch.tanh": (torch.tanh, "tanh"),
    "F.elu in place": (partial(F.elu, inplace=True), "elu"),
    "nn.Hardswish": (nn.Hardswish(), "hardswish"),
    "F.softplus": (F.softplus, "softplus"),
    "torch.selu": (torch.selu, "selu"),
    "nn.ReLU6 in place": (nn.ReLU6(inplace=True), "relu6"),
    "a leaky relu by position": (lambda x: F.leaky_relu(x, 0.1, True), "leaky_relu"),
    "nn.PReLU": (nn.PReLU(), "prelu"),
    "no activation by name": (torch.sin, "sin"),
    "a probability": (lambda x: x * torch.special.ndtr(2 * x), "special_ndtr"),
    "written out": (lambda x: F.softplus(x).tanh() * x, "made of softplus, tanh, mul"),
    "columns in another order": (lambda x: F.gelu(x).flip(-1), "made of gelu, flip"),
    "rows in another order": (lambda x: torch.roll(F.gelu(x), 1, 1), "made of gelu, roll"),
    "two in a row": (lambda x: F.gelu(x).clamp(-1, 1), "made of gelu, clamp"),
}


def convolved(x: Tensor, width: int = FFN) -> Tensor:
    """As PVT v2 and SegFormer do: a depthwise convolution over the tokens."""
    return F.conv1d(x.mT, torch.ones(width, 1, 3), padding=1, groups=width).mT


def normalized_response(x: Tensor) -> Tensor:
    """As ConvNeXt v2 does."""
    length = x.norm(dim=1, keepdim=True)
    return x * (length / (length.mean(-1, keepdim=True) + 1e-6)) + x


NOT_POINTWISE = {
    "a depthwise convolution": (lambda x: F.gelu(convolved(x)), "conv1d, gelu"),
    "one after the activation": (lambda x: convolved(F.gelu(x)), "gelu, conv1d"),
    "a norm of responses": (
        lambda x: normalized_response(F.gelu(x)),
        "gelu, linalg_vector_norm, mean, add, div, mul",
    ),
    "a sum over tokens": (lambda x: F.gelu(x).cumsum(1), "gelu, cumsum"),
    "a sort": (lambda x: F.gelu(x.sort(-1).values), "sort, gelu"),
}


@pytest.mark.parametrize("name", NOT_POINTWISE)
def test_calls_between_the_linears_that_are_not_pointwise_are_named(name: str) -> None:
    act, called = NOT_POINTWISE[name]
    report = fused(mlp(act))
    assert reasons(report, "layernorm_mlp") == {
        f"the activation is made of {called}, but LayerNormMLP has only gelu, gelu_tanh, quick_gelu, relu, "
        "silu, squared_relu: no kernel supports others"
    }
    assert not reasons(report, "layernorm_linear")


def test_a_convolution_whose_result_others_read_is_no_activation() -> None:
    """Mamba's linear for the step sizes reads the convolution that its scan reads too."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y, gate = model.both(model.norm(x)).chunk(2, -1)
        y = F.silu(convolved(y, H))
        return model.out((F.softplus(model.step(y)) * y).cumsum(1) * F.silu(gate))

    make = written(forward, norm=rms_norm, both=linear(H, 2 * H), step=linear(), out=linear())
    assert reasons(sites(make), "layernorm_mlp") == {
        "the linear has columns beside a gate and its product, but LayerNormMLP needs only these: give the "
        "MLP its own linear and norm, if you can retrain"
    }


def test_one_of_several_experts_computes_their_norm() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = model.norm(x)
        first = model.down(F.silu(model.gate(y)) * model.up(y))
        return first + model.other_down(F.silu(model.other_gate(y)) * model.other_up(y))

    ups = {name: linear(H, FFN, bias=False) for name in ("gate", "up", "other_gate", "other_up")}
    downs = {name: linear(FFN, H, bias=False) for name in ("down", "other_down")}
    report = fused(written(forward, norm=rms_norm, **ups, **downs))
    report.expect(merge_siblings=2, layernorm_mlp=1, linear=2)
    assert reasons(report, "layernorm_mlp") == {
        "the linear reads a norm that layernorm_mlp computes, but the rule computes the norm itself: give "
        "the two their own norms, if you can retrain"
    }


@pytest.mark.parametrize("name", NAMED)
def test_an_activation_that_no_kernel_has_is_named(name: str) -> None:
    act, called = NAMED[name]
    report = fused(mlp(act))
    report.expect(layernorm_mlp=0, layernorm_linear=1, linear=1)
    assert reasons(report, "layernorm_mlp") == {
        f"the activation is {called}, but LayerNormMLP has only gelu, gelu_tanh, quick_gelu, relu, silu, "
        "squared_relu: no kernel supports others"
    }


@pytest.mark.parametrize(
    ("act", "called"),
    [
        (lambda x: torch.maximum(x, torch.zeros_like(x)), "maximum"),
        (lambda x: torch.max(x, torch.tensor(0.0)), "max"),
        (lambda x: x.clamp(min=0), "clamp"),
        (lambda x: torch.where(x > 0, x, x.new_zeros(())), "made of gt, where"),
    ],
)
def test_a_relu_that_is_written_out_is_to_be_called_by_name(act: Act, called: str) -> None:
    """A ReLU by a maximum or a clamp has another gradient at 0."""
    assert reasons(fused(mlp(act)), "layernorm_mlp") == {
        f"the activation is {called}, but LayerNormMLP has only gelu, gelu_tanh, quick_gelu, relu, silu, "
        "squared_relu: call F.relu if it computes max(x, 0)"
    }


def beside(act: Act) -> Make:
    """Attention and an MLP that read one norm; its first linear is merged with q, k and v."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = model.norm(x)
        q, k, v = (part(y)[:, None] for part in (model.q, model.k, model.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return x + attended + model.down(act(model.up(y)))

    linears = {name: linear(bias=False) for name in ("q", "k", "v")}
    linears |= {"up": linear(H, FFN, bias=False), "down": linear(FFN, H, bias=False)}
    return written(forward, norm=rms_norm, **linears)


def with_two_norms(model: nn.Module, x: Tensor) -> Tensor:
    y = model.norm(x)
    q, k, v = (part(y)[:, None] for part in (model.q, model.k, model.v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
    return x + attended + model.down(squared_relu(model.up(model.other(x))))


LEAVE_CASTS = (
    "the activation is computed in another dtype than the first linear, but LayerNormMLP uses one dtype for "
    "both: remove the casts"
)
MERGED = (
    "the first linear is merged with others of the same norm, but LayerNormMLP needs its own linear: give "
    "the MLP its own norm, if you can retrain"
)
OTHERWISE = (
    "the first linear's outputs go through silu, mul before the second linear, but LayerNormMLP has one "
    "activation, of all or half of them: no kernel supports others"
)
AFTER = (
    "the activation is multiplied by a number before the second linear, but LayerNormMLP has no factor: "
    "multiply the linear's stored weight"
)
FIRST = (
    "the first linear's outputs are multiplied by a number before the activation, but LayerNormMLP has no "
    "factor: multiply the linear's stored weight and bias"
)
MADE_OF = (
    "the activation is made of {}, but LayerNormMLP has only gelu_tanh, quick_gelu, relu, sigmoid, silu, "
    "squared_relu: no kernel supports others"
)
UNLIKE_ANY = {
    "a multiple of the activation": (mlp(lambda x: F.gelu(x) * 0.5), AFTER),
    "a multiple by a size": (mlp(lambda x: FFN**-0.5 * F.silu(x)), AFTER),
    "a quotient": (mlp(lambda x: F.relu(x) / 3), AFTER),
    "a multiple behind a gate": (gated(lambda x: F.silu(x) * 2), OTHERWISE),
    "a multiple of a gated product": (
        mlp(lambda x: F.silu(x[..., :FFN]) * x[..., FFN:] * 2, widths=(2 * FFN, FFN)),
        AFTER,
    ),
    "the activation of a multiple": (mlp(lambda x: F.gelu(x * 0.5)), FIRST),
    "mish behind a gate": (
        gated(F.mish),
        MADE_OF.replace("made of {}", "mish"),
    ),
    "two limits of a gate": (
        mlp(lambda x: F.silu(x[..., :FFN].clamp(max=1)) * x[..., FFN:].clamp(-2, 2), widths=(2 * FFN, FFN)),
        MADE_OF.format("clamp, silu, mul"),
    ),
    "a clamp after the activation": (
        mlp(lambda x: F.silu(x[..., :FFN]).clamp(max=1) * x[..., FFN:].clamp(-1, 1), widths=(2 * FFN, FFN)),
        MADE_OF.format("silu, clamp, mul"),
    ),
    "merged with q, k and v": (beside(squared_relu), MERGED),
    "in another dtype": (mlp(lambda x: F.silu(x.double()).to(x.dtype)), LEAVE_CASTS),
    "every other column": (
        mlp(lambda x: F.silu(x[..., ::2]) * x[..., 1::2], widths=(2 * FFN, FFN)),
        OTHERWISE,
    ),
    "twice the gate": (mlp(lambda x: F.silu(x) * x), OTHERWISE),
    "half of the columns alone": (
        mlp(lambda x: F.silu(x[..., :FFN]), widths=(2 * FFN, FFN)),
        OTHERWISE.replace("silu, mul", "silu"),
    ),
}


@pytest.mark.parametrize("name", UNLIKE_ANY)
def test_operations_between_the_linears_are_named(name: str) -> None:
    make, sentence = UNLIKE_ANY[name]
    report = fused(make)
    report.expect(layernorm_mlp=0)
    assert reasons(report, "layernorm_mlp") == {sentence}


NO_ACTIVATION = {
    "nothing, as in LoRA": mlp(lambda x: x * 2),
    "a softmax": mlp(lambda x: x.softmax(-1)),
    "a norm": mlp(lambda x: F.layer_norm(x, (FFN,))),
    "an activation and a norm, as in BERT's head": mlp(lambda x: F.layer_norm(F.gelu(x), (FFN,))),
}


@pytest.mark.parametrize("name", NO_ACTIVATION)
def test_two_linears_without_an_activation_are_no_mlp(name: str) -> None:
    assert not reasons(sites(NO_ACTIVATION[name]), "layernorm_mlp")


def two_linears(model: nn.Module, x: Tensor) -> Tensor:
    x = model.norm(x)
    return model.fc2(model.first(x) * F.silu(model.second(x)))


FOLLOWED = {  # what the sentences advise
    "remove the casts": mlp(F.silu),
    "give the MLP its own norm": written(
        with_two_norms,
        norm=rms_norm,
        other=rms_norm,
        up=linear(H, FFN, bias=False),
        down=linear(FFN, H, bias=False),
        **{name: linear(bias=False) for name in ("q", "k", "v")},
    ),
    "set it to 0": lambda: mlp(F.relu, p=0.0)().train(),
    "give the other linear a bias of zeros": mlp(F.relu, biases=(True, True)),
    "split the linear into two": written(
        two_linears, norm=LAYER_NORM, first=linear(H, FFN), second=linear(H, FFN), fc2=linear(FFN, H)
    ),
}


def test_a_factor_of_the_activation_is_one_of_the_second_weight() -> None:
    refused, followed = seeded(mlp(lambda x: F.gelu(x) * 0.5)), seeded(mlp(F.gelu))
    with torch.no_grad():
        followed.fc2.weight.mul_(0.5)
    torch.testing.assert_close(followed(X), refused(X))
    te_transform.inspect(followed, X).expect(layernorm_mlp=1)


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_advised_spelling_is_fused(name: str) -> None:
    sites(FOLLOWED[name], backend="te").expect(layernorm_mlp=1)


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    make, sentence = REFUSES[name]
    assert_refused(sites(make), "layernorm_mlp", sentence)


@pytest.mark.parametrize("name", ["exact gelu, gated", "an uneven gate", "dropout", "one bias"])
def test_refused_sites_compute_the_same(name: str) -> None:
    report = fused(REFUSES[name][0])
    report.expect(layernorm_mlp=0)
    assert report.counts["layernorm_linear"] + report.counts["linear"] == 2


def test_te_activates_the_first_half() -> None:
    report = sites(gated(F.silu, 1), backend="te")
    assert reasons(report, "layernorm_mlp") == {
        "the activation is applied to the second half of the first linear's outputs, but LayerNormMLP "
        "activates the first half: split the linear into two, one per half"
    }
    sites(llama(up_first=True), backend="te").expect(layernorm_mlp=1)  # joined in the order that it needs


def test_a_result_that_is_read_elsewhere_is_refused() -> None:
    def forward(model: nn.Module, x: Tensor) -> Any:
        hidden = F.relu(model.fc1(model.norm(x)))
        return model.fc2(hidden), hidden

    make = written(forward, norm=LAYER_NORM, fc1=linear(H, FFN), fc2=linear(FFN, H))
    sentence = (
        "the output of the relu is also read by the model's output, but the fused module does not return it: "
        "let nothing else read it, if the math allows"
    )
    assert reasons(sites(make), "layernorm_mlp") == {sentence}


@pytest.mark.parametrize(("make", "combine"), [(mlp(F.gelu), tanh_gelu), (gated(F.gelu), halves(tanh_gelu))])
def test_approximate_allows_the_tanh_gelu(make: Make, combine: Act) -> None:
    model = seeded(make)
    converted = te_transform.convert(model, X, approximate=True, verify=False)
    te_transform.report(converted).expect(layernorm_mlp=1)
    expected = model.fc2(combine(model.fc1(model.norm(X))))
    torch.testing.assert_close(converted(X), expected)


def test_the_site_is_reported_at_the_module_around_it() -> None:
    make = written(lambda m, x: m.inner(x), inner=mlp(F.relu))
    (site,) = sites(make).sites
    assert (site.path, site.status) == ("inner", "fused")


class DynamicTanh(nn.Module):
    """Dynamic tanh in place of a norm (Zhu et al. 2025), followed by a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(H))
        self.bias, self.project = nn.Parameter(torch.zeros(H)), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(torch.tanh(x * self.scale) * self.weight + self.bias)


@pytest.mark.parametrize("depth", [1, 2])
def test_scaled_tanh_without_first_linear_is_no_near_miss(depth: int) -> None:
    report = sites(lambda: nn.Sequential(*(DynamicTanh() for _ in range(depth))))
    assert "layernorm_mlp" not in {site.rule for site in report.refused}


def embedded(model: nn.Module, x: Tensor) -> Tensor:
    """Embed a time and a class as DiT does, and compute scales and shifts of them."""
    time = model.second(F.silu(model.first(x)))
    return model.third(F.silu(time + model.classes((x[..., 0] > 0).long())))


def test_a_chain_of_linears_is_no_near_miss() -> None:
    """No norm is missing between an activation and the linear that reads it."""
    linears = {name: linear() for name in ("first", "second", "third")}
    report = sites(written(embedded, classes=lambda: nn.Embedding(2, H), **linears))
    assert "layernorm_mlp" not in {site.rule for site in report.refused}
