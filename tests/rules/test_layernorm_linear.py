"""A linear that reads a norm becomes LayerNormLinear."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from tests.rules.tables import FFN, H, Make, Written, X, fused, linear, reasons, sequential, sites, written
from tests.zoo import seeded


class LlamaNorm(nn.Module):
    """RMSNorm as Hugging Face writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class NumpyNorm(LlamaNorm):
    """It has NumPy's names of arguments."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(axis=-1, keepdims=True) + 1e-6))


class GemmaNorm(LlamaNorm):
    """Its scale is 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + self.weight.float())).type_as(x)


def norm(**options: bool) -> Make:
    return lambda: nn.LayerNorm(H, **options)


def in_order(model: Written, x: Tensor) -> Tensor:
    return model.linear(model.norm(x))


def on_one_path(model: Written, x: Tensor) -> Tensor:
    return model.linear(model.norm(x)) + model.other(model.norm(-x))


def beit() -> nn.Module:
    """One product for q, k and v, where the bias of the keys is a buffer of zeros."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        q, k, v = F.linear(
            model.norm(x), model.qkv.weight, torch.cat([model.q_bias, model.k_bias, model.v_bias])
        ).chunk(3, -1)
        return q + k * v

    biases = {"q_bias": lambda: nn.Parameter(torch.ones(H)), "v_bias": lambda: nn.Parameter(torch.ones(H))}
    buffer = {"k_bias": lambda: nn.Buffer(torch.zeros(H), persistent=False)}
    return written(forward, norm=norm(), qkv=linear(H, 3 * H, bias=False), **biases, **buffer)()


class LucidNorm(nn.Module):
    """lucidrains' LayerNorm, whose bias is a buffer of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(H)), nn.Buffer(torch.zeros(H))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.gamma, self.beta)


def turned(model: Written, x: Tensor) -> Tensor:
    return model.linear(model.norm(x).transpose(0, 1)).transpose(1, 0)


def read_before(model: Written, x: Tensor) -> Tensor:
    y = model.norm(x)
    scaled = y * 2
    return model.linear(y) + scaled


def read_elsewhere(model: Written, x: Tensor) -> Tensor:
    y = model.norm(x)
    return model.linear(y) + y


def handed_out(model: Written, x: Tensor) -> tuple[Tensor, Tensor]:
    y = model.norm(x)
    return model.linear(y), y


def cast_before_the_bias(model: Written, x: Tensor) -> Tensor:
    y = model.norm(x).to(x.dtype)
    out = F.linear(y, model.linear.weight, model.linear.weight.mean(-1))
    return out * y.mean(-1, keepdim=True)


def own(function: Callable[..., Any]) -> Make:
    return written(function, norm=norm(), linear=linear(), calls=lambda: nn.Buffer(torch.zeros(())))


def unread(model: Written, x: Tensor, write: str, **limits: float) -> Tensor:
    """As grouped experts in transformers, which clamp indices that nothing reads again."""
    indices = x[..., 0].abs().mul(4).long()
    y, few = model.norm(x), (indices >= 2).unsqueeze(-1)
    getattr(indices, write)(**limits)
    return model.linear(y) * few


FUSES = {
    "LayerNorm": sequential(norm(), linear(H, FFN)),
    "RMSNorm": sequential(lambda: nn.RMSNorm(H, eps=1e-6), linear(H, FFN)),
    "RMSNorm without eps": sequential(lambda: nn.RMSNorm(H), linear(H, FFN)),
    "a norm without a bias": sequential(norm(bias=False), linear()),
    "a norm of nothing else": sequential(norm(elementwise_affine=False), linear()),
    "an RMSNorm without a scale": sequential(lambda: nn.RMSNorm(H, elementwise_affine=False), linear()),
    "a linear without a bias": sequential(norm(), linear(H, FFN, bias=False)),
    "a norm written out": sequential(LlamaNorm, linear()),
    "a norm written out, along an axis": sequential(NumpyNorm, linear()),
    "a zero-centered norm": sequential(GemmaNorm, linear()),
    "a norm without a scale, written out": written(lambda m, x: m.linear(x * root(x)), linear=linear()),
    "a LayerNorm of nothing else, written out": written(
        lambda m, x: m.linear((x - x.mean(-1, True)) * root(x - x.mean(-1, True))), linear=linear()
    ),
    "a norm in another shape": written(
        lambda m, x: m.linear(m.norm(x).view(-1, H)).view(x.shape), norm=norm(), linear=linear()
    ),
    "functions": written(
        lambda m, x: F.linear(F.layer_norm(x, (H,), m.norm.weight, m.norm.bias), m.linear.weight),
        norm=norm(),
        linear=linear(),
    ),
    "modules in between": sequential(norm(), nn.Identity, lambda: nn.Dropout(0.0), linear()),
    "a norm over a linear": sequential(norm(), linear(), nn.Tanh),
    "a norm whose bias is a buffer": sequential(LucidNorm, linear()),
    "a bias that is computed, as BEiT's": beit,
    "of a norm that is transposed": written(turned, norm=norm(), linear=linear()),
    "of a norm that is permuted": written(
        lambda m, x: m.linear(m.norm(x).permute(1, 0, 2)).sum(0), norm=norm(), linear=linear()
    ),
    "a write that nothing reads": own(partial(unread, write="clamp_", max=1)),
    "a norm that others read": own(read_elsewhere),
    "a norm that the model returns": own(handed_out),
    "a norm in its own dtype, before the bias exists": own(cast_before_the_bias),
}


@pytest.mark.parametrize("name", FUSES)
def test_fuses(name: str) -> None:
    assert fused(FUSES[name]).counts == {"layernorm_linear": 1}


@pytest.mark.parametrize("forward", [read_elsewhere, read_before])
def test_a_norm_that_others_read_is_an_output_of_the_op(forward: Callable[..., Tensor]) -> None:
    (site,) = fused(own(forward)).sites
    assert [row.name for row in site.deviations[:2]] == ["output linear", "output norm"]


def test_a_norm_called_twice_is_fused_twice() -> None:
    assert fused(written(on_one_path, norm=norm(), linear=linear(), other=linear())).counts == {
        "layernorm_linear": 2
    }


def test_a_fused_op_may_read_another() -> None:
    report = fused(sequential(norm(), linear(), norm(), linear()))
    assert report.counts == {"layernorm_linear": 2}
    read = [node.args[0] for node in report.after.nodes if node.op == "call_module"]
    assert [node.op for node in read] == ["placeholder", "call_module"]


def test_the_site_is_reported_at_the_linear() -> None:
    (site,) = fused(written(in_order, norm=norm(), linear=linear())).sites
    assert site.path == "linear"


def counting(model: Written, x: Tensor) -> Tensor:
    y = model.norm(x)
    model.calls.add_(1)
    return model.linear(y)


def without_gradients(model: Written, x: Tensor) -> Tensor:
    y = model.norm(x)
    with torch.no_grad():
        return model.linear(y) + x


def read_before_the_bias(model: Written, x: Tensor) -> Tensor:
    y = model.norm(x)
    scaled = y * 2
    return F.linear(y, model.linear.weight, model.linear.bias * 2) + scaled


def read_by_the_bias(model: Written, x: Tensor) -> Tensor:
    y = model.norm(x)
    return F.linear(y, model.linear.weight, y.mean((0, 1)))


def hooked(model: Written, x: Tensor) -> Tensor:
    y = model.norm(x)
    out = model.linear(y)
    y.register_hook(lambda grad: 2 * grad)
    return out


CUT = (
    "the model calls {} between these operations (a write, or a change of mode), but the fused module is one "
    "call: move it before or after them"
)
BEFORE = (
    "the output of the layer_norm is also read by {} before the other inputs exist, but the fused module "
    "needs them all: move that read after the linear"
)
WRITTEN_OUT = (
    "the linear reads a written-out norm that ends in {}, but LayerNormLinear needs LayerNorm or RMSNorm: "
    "call F.layer_norm or F.rms_norm with its scale and bias, if the math allows"
)
DETACHED = (
    "the linear reads a norm whose statistics are detached, but LayerNormLinear computes their gradient too: "
    "remove detach(), if you can retrain"
)


def root(x: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


OF_OTHERS = (
    "the linear reads {}, whose mean and variance are not those of single rows, but LayerNormLinear needs "
    "LayerNorm or RMSNorm of rows: no kernel supports others"
)


def unknown(function: Callable[[nn.Module, Tensor], Tensor], last: str = "mul") -> tuple[Make, str]:
    return of_vectors(function), WRITTEN_OUT.format(last)


def of_vectors(function: Callable[[nn.Module, Tensor], Tensor]) -> Make:
    vectors = {name: lambda: nn.Parameter(torch.linspace(0.5, 1, H)) for name in "wb"}
    return written(lambda m, x: m.linear(function(m, x)), linear=linear(), **vectors)


REFUSES = {
    "a scale of several dimensions": unknown(lambda m, x: x * root(x) * m.w[None, None]),
    "a computed scale": unknown(lambda m, x: F.rms_norm(x, (H,)) * m.w.exp()),
    "two scales": unknown(lambda m, x: F.rms_norm(x, (H,), m.w) * m.w),
    "a sum over less": unknown(lambda m, x: x * (x.square().sum(-1, keepdim=True) / (H - 1) + 1e-6).rsqrt()),
    "no eps": unknown(lambda m, x: x * x.pow(2).mean(-1, keepdim=True).rsqrt() * m.w),
    "a least square": unknown(lambda m, x: m.w * x * x.pow(2).mean(-1, True).clamp(min=1e-6).rsqrt()),
    "a length": unknown(lambda m, x: x / (x.norm(dim=-1, keepdim=True) * H**-0.5 + 1e-8), "div"),
    "a deviation": unknown(lambda m, x: (x - x.mean(-1, True)) / (x.std(-1, True, True) + 1e-6) + m.b, "add"),
    "an RMSNorm with a bias": unknown(lambda m, x: F.rms_norm(x, (H,), m.w) + m.b, "add"),
    "a LayerNorm with a bias of its own": unknown(lambda m, x: F.layer_norm(x, (H,)) + m.b, "add"),
    "a mean of rows without their dimension": unknown(
        lambda m, x: x * torch.rsqrt(x.square().mean(-1) + 1e-6)[..., None] * m.w
    ),
    "an einsum": unknown(lambda m, x: x / (torch.einsum("bti,bti->bt", x, x) / H).sqrt()[..., None] * m.w),
    "a product of vectors": unknown(
        lambda m, x: x * (torch.linalg.vecdot(x, x) / H).rsqrt().unsqueeze(-1), "mul"
    ),
    "a product of a row and a column": unknown(
        lambda m, x: x * ((x[..., None, :] @ x[..., None]).squeeze(-1) / H + 1e-6).rsqrt() * m.w
    ),
    "a detached length": (of_vectors(lambda m, x: x / root(x).reciprocal().detach() * m.w), DETACHED),
    "the length of detached rows": (of_vectors(lambda m, x: m.w * x * root(x.detach())), DETACHED),
    "a unit vector": unknown(lambda m, x: F.normalize(x, dim=-1) * m.w),
    "a LayerNorm of two dimensions": (
        of_vectors(lambda m, x: F.layer_norm(x, x.shape[1:])), OF_OTHERS.format("layer_norm"),
    ),
    "an RMSNorm of two dimensions": (
        of_vectors(lambda m, x: F.rms_norm(x, x.shape[1:])), OF_OTHERS.format("rms_norm"),
    ),
    "a GroupNorm of images, as in diffusers": (
        of_vectors(lambda m, x: F.group_norm(x.mT[..., None], 4).permute(0, 2, 3, 1).flatten(1, 2)),
        OF_OTHERS.format("group_norm"),
    ),
    "a BatchNorm": (
        of_vectors(lambda m, x: F.batch_norm(x.mT, None, None, training=True).mT),
        OF_OTHERS.format("batch_norm"),
    ),
    "read before": (own(read_before_the_bias), BEFORE.format("mul")),
    "read by the bias": (own(read_by_the_bias), BEFORE.format("mean")),
    "without gradients": (own(without_gradients), CUT.format("set_grad_enabled")),
    "a write in between": (own(counting), CUT.format("add_")),
    "an unread write": (own(partial(unread, write="square_")), CUT.format("an in-place operation")),
}  # fmt: skip


FOLLOWED = {  # what the sentence advises
    "a scale of several dimensions": lambda m, x: F.rms_norm(x, (H,), m.w[None, None].flatten(), 1e-6),
    "a computed scale": lambda m, x: F.rms_norm(x, (H,), m.w.exp()),
    "two scales": lambda m, x: F.rms_norm(x, (H,), m.w * m.w),
    "a LayerNorm with a bias of its own": lambda m, x: F.layer_norm(x, (H,), None, m.b),
}
if torch.__version__ >= (2, 13):  # before, dynamo does not capture such a forward
    REFUSES["a hook of the norm"] = (
        own(hooked),
        "the output of the layer_norm has a hook, but the fused module does not compute the whole gradient "
        "of this output: remove the hook",
    )


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_advised_spelling_is_fused(name: str) -> None:
    followed = of_vectors(FOLLOWED[name])
    torch.testing.assert_close(seeded(followed)(X), seeded(REFUSES[name][0])(X))
    assert fused(followed).counts == {"layernorm_linear": 1}


def test_the_sum_of_a_zero_centered_scale_may_be_cast() -> None:
    make = of_vectors(lambda m, x: (x.float() * root(x.float()) * (1.0 + m.w).float()).type_as(x))
    assert te_transform.inspect(seeded(make).bfloat16(), X.bfloat16()).counts == {"layernorm_linear": 1}


def test_no_norm_is_seen_where_rows_are_scaled_by_what_is_learned_of_them() -> None:
    gate = written(lambda m, x: m.linear(x * m.gate(x).sigmoid()), linear=linear(), gate=linear(H, 1))
    assert not reasons(sites(gate), "layernorm_linear")


@pytest.mark.parametrize("name", REFUSES)
def test_refuses(name: str) -> None:
    make, sentence = REFUSES[name]
    report = fused(make)
    assert report.counts == {"linear": 1}
    assert reasons(report, "layernorm_linear") == {sentence}


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_refuses_a_norm_whose_scale_has_another_dtype(kind: type[nn.Module]) -> None:
    def forward(model: Written, x: Tensor) -> Tensor:
        return model.linear(model.norm(x).to(x.dtype))

    model = written(forward, norm=lambda: kind(H), linear=linear())()
    model.linear.bfloat16()
    assert reasons(te_transform.inspect(model, X.bfloat16()), "layernorm_linear") == {
        f"the linear reads {'layer' if kind is nn.LayerNorm else 'rms'}_norm of an input in bfloat16 with a "
        "scale in float32, but LayerNormLinear needs one dtype: store the scale in bfloat16"
    }
    followed = te_transform.inspect(model.bfloat16(), X.bfloat16())
    assert followed.counts == {"layernorm_linear": 1}


def test_refuses_a_norm_that_is_written_to_later() -> None:
    def forward(model: Written, x: Tensor) -> Tensor:
        y = model.norm(x)
        return model.linear(y) + y.mul_(2)

    report = te_transform.inspect(seeded(own(forward)), X)
    assert reasons(report, "layernorm_linear") == {
        "the output of the layer_norm is written in place, but autograd cannot notice a write in the fused "
        "module: write to a new tensor instead"
    }


def in_place(model: Written, x: Tensor) -> Tensor:
    h = x + model.norm.weight
    h += model.linear(model.norm(h))
    return h


def anew(model: Written, x: Tensor) -> Tensor:
    h = x + model.norm.weight
    return h + model.linear(model.norm(h))


def test_refuses_an_input_that_is_written_to_later() -> None:
    """The original saves a cast of the input; a fused norm would save the input itself."""
    models = [
        seeded(written(forward, norm=LlamaNorm, linear=linear())).bfloat16() for forward in (in_place, anew)
    ]
    converted = [te_transform.convert(model, X.bfloat16()) for model in models]
    assert reasons(te_transform.report(converted[0]), "layernorm_linear") == {
        "an input of these operations is written in place after them, but the fused module keeps it for the "
        "backward: make a new tensor there, as h = h + y does"
    }
    te_transform.report(converted[1]).expect(layernorm_linear=1)
    grads = [
        torch.autograd.grad(model(X.bfloat16()).square().sum(), [*model.parameters()])
        for model in (models[0], *converted)
    ]
    for expected, *found in zip(*grads, strict=True):
        for grad in found:
            torch.testing.assert_close(grad, expected, atol=0.1, rtol=0.05)


def image(norm: Callable[[Written, Tensor], Tensor]) -> Make:
    """A norm over the channels of an image, and a linear over its channels."""

    def forward(model: Written, x: Tensor) -> Tensor:
        return model.linear(norm(model, x.mT[..., :4].unflatten(-1, (2, 2))).flatten(2).mT)

    return written(forward, linear=linear(), w=lambda: nn.Parameter(torch.rand(H, 1, 1)))


def over_channels(model: Written, x: Tensor) -> Tensor:
    centered = x - x.mean(1, keepdim=True)
    return model.w * centered / torch.sqrt(centered.pow(2).mean(1, keepdim=True) + 1e-6)


def over_pixels(model: Written, x: Tensor) -> Tensor:
    return model.w * x / torch.sqrt(x.pow(2).mean((2, 3), keepdim=True) + 1e-6)


def test_refuses_a_norm_over_the_channels_of_images() -> None:
    report = fused(image(over_channels))
    assert reasons(report, "layernorm_linear") == {WRITTEN_OUT.format("div")}
    detached = image(lambda m, x: x * x.square().mean(1, True).add(1e-6).rsqrt().detach())
    assert reasons(sites(detached), "layernorm_linear") == {DETACHED}
    assert not reasons(sites(image(over_pixels)), "layernorm_linear")


JOINED = "compile=True joins these operations"
BETWEEN = "the linear reads a norm through {}, but LayerNormLinear has nothing between the two: {}"


def modulated(model: Written, x: Tensor) -> Tensor:
    """As diffusion transformers do."""
    scale, shift = model.condition(x.mean(1, keepdim=True)).chunk(2, -1)
    return model.linear(model.norm(x) * (1 + scale) + shift)


def scaled_first(model: Written, x: Tensor) -> Tensor:
    """As k-diffusion does: the computed scale and the statistic are one factor."""
    scale = 1 + model.condition(x.mean(1, keepdim=True))[..., :H]
    return model.linear(x * (scale * root(x)))


def positioned(model: Written, x: Tensor) -> Tensor:
    """As DETR does for queries and keys."""
    y, positions = model.norm(x), model.condition(x)[..., :H]
    return model.linear(y + positions) + y


def gated(model: Written, x: Tensor) -> Tensor:
    return model.linear(model.norm(x) * F.silu(model.condition(x)[..., :H]))


def of_heads(model: Written, x: Tensor) -> Tensor:
    return model.linear(F.rms_norm(x.unflatten(-1, (2, -1)), (H // 2,)).flatten(2))


def shifted(model: Written, x: Tensor) -> Tensor:
    """As RWKV does."""
    y = model.norm(x)
    return model.linear(torch.lerp(y, F.pad(y, (0, 0, 1, -1)), model.norm.weight))


WITH_CALLS_BETWEEN = {
    "a function": (lambda m, x: m.linear(m.norm(x).tanh().sin()), "tanh, sin", JOINED),
    "a dropout": (lambda m, x: m.linear(F.dropout(m.norm(x), 0.1)), "dropout", "set the dropout to 0"),
    "a dropout that others read": (
        lambda m, x: (lambda y: m.linear(y) + y)(F.dropout(m.norm(x), 0.1)),
        "dropout",
        "set the dropout to 0",
    ),
    "the first token": (lambda m, x: m.linear(m.norm(x)[:, 0]), "getitem", "take the rows before the norm"),
    "a mean": (lambda m, x: m.linear(m.norm(x).mean(1)), "mean", JOINED),
    "two norms in a row": (
        lambda m, x: m.linear(torch.cat((m.norm(x), m.other(-x)), 1)),
        "cat",
        JOINED,
    ),
    "two norms in a sum": (lambda m, x: m.linear(m.norm(x) + m.other(-x)), "add", JOINED),
    "a computed scale and shift": (modulated, "mul, add", JOINED),
    "a computed scale of the statistic": (scaled_first, "mul", JOINED),
    "positions": (positioned, "add", JOINED),
    "a gate": (gated, "mul", JOINED),
    "heads": (of_heads, "reshape", JOINED),
    "a shift by a token": (shifted, "pad, lerp", JOINED),
    "a mask": (lambda m, x: m.linear(m.norm(x).masked_fill(x[..., :1] > 0, 0)), "masked_fill", JOINED),
}


@pytest.mark.parametrize("name", WITH_CALLS_BETWEEN)
def test_calls_between_norm_and_linear_are_named(name: str) -> None:
    function, names, step = WITH_CALLS_BETWEEN[name]
    make = written(function, norm=norm(), other=norm(), linear=linear(), condition=linear(H, 2 * H))
    assert reasons(sites(make), "layernorm_linear") == {BETWEEN.format(names, step)}


def test_the_advised_order_is_fused() -> None:
    def first(model: Written, x: Tensor) -> Tensor:
        return model.linear(model.norm(x[:, 0]))

    assert fused(own(first)).counts == {"layernorm_linear": 1}
    without = written(lambda m, x: m.linear(F.dropout(m.norm(x), 0.0)), norm=norm(), linear=linear())
    assert fused(without).counts == {"layernorm_linear": 1}


def test_a_sum_of_norms_that_other_sums_read_is_no_reason() -> None:
    """In OLMo 2 and Swin v2, norms follow attention and MLP, and linears read the sum of all before."""

    def forward(model: Written, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + model.norm(model.linear(x).tanh())
        return x

    assert not reasons(sites(own(forward)), "layernorm_linear")


@pytest.mark.parametrize("detached", ["input", "statistics"])
def test_a_norm_may_detach_its_input_twice(detached: str) -> None:
    def forward(model: Written, x: Tensor) -> Tensor:
        y = x.detach() if detached == "input" else x
        centered = y - x.detach().mean(-1, True)
        return model.linear(centered * torch.rsqrt(x.detach().var(-1, False, True) + 1e-6)) + x

    report = fused(own(forward))
    if detached == "input":
        report.expect(layernorm_linear=1)
    else:
        assert reasons(report, "layernorm_linear") == {DETACHED}


def test_a_norm_that_others_read_transposed_is_fused() -> None:
    def forward(model: Written, x: Tensor) -> Tensor:
        y = model.norm(x).transpose(0, 1)
        return model.linear(y) + y

    assert fused(own(forward)).counts == {"layernorm_linear": 1}
