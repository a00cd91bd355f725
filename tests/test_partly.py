"""Models of which a part cannot be fused, or is written in an odd way: the rest is, and all stays right."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

import te_transform
from te_transform.report.report import Report
from tests.attacks import Pair, X, each, with_input_gradient
from tests.bitwise import untouched
from tests.models.tiny import MLP, WIDTH, Attention, Block, Tiny
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

# Parts of other kinds


class LoRA(nn.Module):
    """A Linear and a low rank beside it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class LoRALinear(nn.Linear):
    """The same, as a subclass."""

    def __init__(self, base: nn.Linear):
        super().__init__(base.in_features, base.out_features)
        self.down, self.up = (
            nn.Parameter(torch.randn(2, WIDTH)),
            nn.Parameter(torch.randn(self.out_features, 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


class Int8(nn.Module):
    """A Linear on int8 weights."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.scale = nn.Buffer(base.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Buffer((base.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Complex(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.linear = nn.Linear(base.in_features, base.out_features, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(torch.complex64)).real


class Integer(nn.Module):
    def __init__(self, base: nn.Linear):
        super().__init__()
        weight = torch.randint(-3, 3, base.weight.shape)
        self.linear = nn.Linear(base.in_features, base.out_features, bias=False)
        self.linear.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.long()).float() + x


def replace_head(kind: type[nn.Module]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.head = kind(model.head)

    return change


def hook_head(model: nn.Module) -> None:
    model.head.register_forward_hook(lambda module, args, out: 2 * out)


def pre_hook_head(model: nn.Module) -> None:
    model.head.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def idle_hook(model: nn.Module) -> None:
    model.norm.register_forward_hook(lambda module, args, out: None)


def backward_hook(model: nn.Module) -> None:
    model.norm.register_full_backward_hook(lambda module, given, got: (2 * given[0],))


def backward_pre_hook(model: nn.Module) -> None:
    model.norm.register_full_backward_pre_hook(lambda module, got: (2 * got[0],))


def norm_reused(model: nn.Module) -> None:
    model.blocks[0].norm1 = model.norm


def share_projections(model: nn.Module) -> None:
    model.blocks[0].attention.k_proj = model.blocks[0].attention.q_proj


def tie_projections(model: nn.Module) -> None:
    model.blocks[0].attention.k_proj.weight = model.blocks[0].attention.q_proj.weight


def tie_across(model: nn.Module) -> None:
    model.head.weight = model.blocks[0].attention.q_proj.weight


def freeze_query(model: nn.Module) -> None:
    model.blocks[0].attention.q_proj.requires_grad_(False)


def freeze_bias(model: nn.Module) -> None:
    model.blocks[0].attention.q_proj.bias.requires_grad_(False)


def adapt(model: nn.Module) -> None:
    attention = model.blocks[0].attention
    attention.q_proj, attention.v_proj = LoRA(attention.q_proj), LoRA(attention.v_proj)


def weight_buffer(model: nn.Module) -> None:
    weight = model.head.weight.detach()
    del model.head.weight
    model.head.weight = nn.Buffer(weight)


def own_fused(model: nn.Module) -> None:
    model.head.fused = model.head._te = True


ALL = {"merge_siblings": 1, "layernorm_mlp": 1, "layernorm_linear": 2, "linear": 1}
HEAD_ALONE = ALL | {"layernorm_linear": 1, "linear": 2}
HEAD_LEFT = ALL | {"layernorm_linear": 1}
APART = {"layernorm_mlp": 1, "layernorm_linear": 2, "linear": 3}

COMPUTED = (
    "the linear's weight is computed at every call, but kernels need a parameter: compute it once and store "
    "it, if you can retrain"
)
SAME = (
    "some of the linears have the same weight, but a merged linear has each row once: compute their product "
    "once"
)

# What is changed, what is fused then, and a reason that is given for what is not
PARTLY: dict[str, tuple[Callable[[nn.Module], object], dict[str, int], str | None]] = {
    "a forward hook": (hook_head, ALL, None),
    "a forward pre-hook": (pre_hook_head, HEAD_ALONE, None),
    "a forward hook that changes nothing": (idle_hook, ALL, None),
    "a backward hook": (backward_hook, HEAD_ALONE, None),
    "a backward pre-hook": (backward_pre_hook, HEAD_ALONE, None),
    "weight_norm": (lambda model: parametrizations.weight_norm(model.head), HEAD_LEFT, COMPUTED),
    "orthogonal": (lambda model: parametrizations.orthogonal(model.head), HEAD_LEFT, COMPUTED),
    "old spectral_norm": (lambda model: spectral_norm(model.head), HEAD_LEFT, COMPUTED),
    "a LoRA subclass": (replace_head(LoRALinear), ALL | {"linear": 3}, None),
    "LoRA": (
        adapt,
        {"merge_siblings": 1, "layernorm_mlp": 1, "layernorm_linear": 2, "linear": 6},
        None,
    ),
    "int8": (replace_head(Int8), HEAD_LEFT, COMPUTED),
    "complex": (
        replace_head(Complex),
        HEAD_LEFT,
        "the linear's weight is complex64, but kernels need a floating-point parameter: no kernel supports "
        "another dtype",
    ),
    "integer": (
        replace_head(Integer),
        HEAD_LEFT,
        "the linear's weight is int64, but kernels need a floating-point parameter: no kernel supports "
        "another dtype",
    ),
    "a buffer": (
        weight_buffer,
        HEAD_LEFT,
        "the linear's weight is a buffer, but kernels need a parameter: store it as an nn.Parameter, with "
        "requires_grad=False if it is not trained",
    ),
    "a norm used twice": (norm_reused, ALL, None),
    "a shared linear": (share_projections, APART, SAME),
    "tied weights": (tie_projections, APART, SAME),
    "a weight tied to another module": (tie_across, ALL, None),
    "a frozen linear": (freeze_query, ALL | {"linear": 2}, None),
    "a frozen bias": (freeze_bias, ALL, None),
    "attributes of our names": (own_fused, ALL, None),
}


def reasons(report: Report) -> set[str]:
    return {reason for site in report.refused for reason in site.reasons}


@each(
    PARTLY,
    "a forward hook that changes nothing", "a backward hook", "orthogonal", "old spectral_norm",
    "a LoRA subclass", "integer", "a shared linear", "a weight tied to another module", "a frozen linear",
    "attributes of our names",
)  # fmt: skip
def test_a_part_that_cannot_be_fused_says_why_and_the_model_stays_right(name: str) -> None:
    change, counts, reason = PARTLY[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = seeded(Tiny)
        change(model)
    with untouched(model):
        pair = Pair.of(model)
    report = te_transform.report(pair.converted)
    assert report.counts == counts
    assert reason is None or reason in reasons(report)
    pair.agree(with_input_gradient)


class Twice(nn.Module):
    """One block, run two times."""

    def __init__(self):
        super().__init__()
        self.tiny = Tiny()

    def forward(self, x: Tensor) -> Tensor:
        return self.tiny(self.tiny(x))


def test_a_module_entered_again_is_fused_each_time() -> None:
    pair = Pair.of(Twice)
    assert te_transform.report(pair.converted).counts == {rule: 2 * count for rule, count in ALL.items()}
    pair.agree(with_input_gradient)


class OneForward(nn.Module):
    """q, k, v and the MLP in the forward of one module."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        y, attention, mlp = self.norm1(x), self.attention, self.mlp
        y = F.scaled_dot_product_attention(attention.q_proj(y), attention.k_proj(y), attention.v_proj(y))
        x = x + attention.out_proj(y)
        return x + mlp.fc2(mlp.act(mlp.fc1(self.norm2(x))))


def test_siblings_and_an_mlp_in_one_forward_are_both_fused() -> None:
    pair = Pair.of(OneForward)
    assert te_transform.report(pair.converted).counts == ALL | {"layernorm_linear": 1}
    pair.agree(with_input_gradient)


class Final(nn.Linear):
    """A linear of a class that nobody may derive from."""

    def __init_subclass__(cls, **options: object) -> None:
        raise TypeError("Final is final")


def test_parts_of_a_class_that_takes_no_subclass_are_fused() -> None:
    make = nn.Sequential(nn.LayerNorm(WIDTH), Final(WIDTH, WIDTH), nn.ReLU(), Final(WIDTH, WIDTH))
    pair = Pair.of(make, rules="layernorm_mlp", verify=True)
    pair.agree(with_input_gradient)


def test_a_frozen_model_is_fused_and_stays_frozen() -> None:
    pair = Pair.of(seeded(Tiny).requires_grad_(False))
    assert te_transform.report(pair.converted).counts == ALL
    assert not any(parameter.requires_grad for parameter in pair.converted.parameters())
    pair.agree(with_input_gradient)


def test_a_dynamically_quantized_model() -> None:
    with warnings.catch_warnings(action="ignore"):
        model = torch.ao.quantization.quantize_dynamic(seeded(Tiny), {nn.Linear})
    converted = te_transform.convert(model, X)
    assert not te_transform.report(converted).fused
    assert torch.equal(converted(X), model(X))


def test_a_model_on_meta_is_converted_without_numbers() -> None:
    with torch.device("meta"):
        model = Tiny()
    converted = te_transform.convert(model, X.to("meta"))
    assert te_transform.report(converted).counts == ALL
    assert te_transform.inspect(model, X).counts == ALL
    assert converted(X.to("meta")).is_meta
    assert {name: tensor.shape for name, tensor in converted.state_dict().items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }
    converted.to_empty(device="cpu").load_state_dict(seeded(Tiny).state_dict())
    torch.testing.assert_close(converted(X), seeded(Tiny)(X))


def test_hooks_on_the_model_and_on_state_dicts_stay() -> None:
    model = seeded(Tiny)
    called = []
    model.register_forward_hook(lambda *_: called.append("model"))
    model.blocks[0].register_forward_pre_hook(lambda *_: called.append("block"))
    model.head.register_state_dict_post_hook(lambda *_: called.append("state_dict"))
    converted = te_transform.convert(copy.deepcopy(model), X)
    called.clear()
    converted(X)
    converted.state_dict()
    assert called == ["block", "model", "state_dict"]


def test_a_list_of_blocks_may_have_places_left_empty() -> None:
    """Blocks as in x-transformers, with a norm before, after, or on both sides."""

    class Gaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([None, Block(), None, Block()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x if block is None else block(x)
            return x

    class Empty(Gaps):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([None, None])

    for kind in (Gaps, Empty):
        pair = Pair.of(kind, rules="merge_siblings merge_siblings layernorm_mlp layernorm_mlp")
        pair.agree(with_input_gradient)


def test_layers_in_a_list_of_lists_are_captured_however_many_there_are() -> None:
    """Layers as in vit-pytorch, whose inner lists are never called."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = (
                [nn.Sequential(nn.LayerNorm(WIDTH), part()) for part in (Attention, MLP)] for _ in range(9)
            )
            self.layers = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)

        def forward(self, x: Tensor) -> Tensor:
            for attention, mlp in self.layers:
                x = x + attention(x)
                x = x + mlp(x)
            return x

    pair = Pair.of(Pairs)
    assert te_transform.report(pair.converted).counts["layernorm_mlp"] == 9
    pair.agree(with_input_gradient)
