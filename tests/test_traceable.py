"""Calls inside PyTorch and transformers that end a graph in dynamo, and do not in our captures."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import symbolic_convert, trace_rules
from torch._higher_order_ops.associative_scan import associative_scan
from torch.testing import assert_close
from transformers import Wav2Vec2Config, Wav2Vec2Model

import te_transform
from te_transform.graph.traceable import traceable_forms
from te_transform.report.graph_breaks import explain_reason
from tests.attacks import Block
from tests.models.tiny import WIDTH
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

LENGTH = 6
X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
WINDOW = CAUSAL.masked_fill(torch.ones(LENGTH, LENGTH).tril(-3).bool(), -torch.inf)
BIAS = torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))
MASKS = {"causal": CAUSAL, "window": WINDOW, "nothing": torch.zeros(LENGTH, LENGTH), "bias": BIAS}
PADDING = torch.zeros(2, LENGTH, dtype=torch.bool)
PADDING[1, 4:] = True
Layer = Callable[..., nn.Module]


class Stack(nn.Module):
    """An encoder, or a decoder, with a head; `hint` is what it is told of its mask."""

    def __init__(self, layer: Layer = nn.TransformerEncoderLayer, **hint: bool):
        super().__init__()
        self.hint, self.head = hint, nn.Linear(WIDTH, 8)
        one, is_decoder = (
            layer(WIDTH, 2, 32, 0.0, batch_first=True),
            issubclass(layer, nn.TransformerDecoderLayer),
        )
        self.stack = nn.TransformerDecoder(one, 1) if is_decoder else nn.TransformerEncoder(one, 1)

    def forward(self, x: Tensor, mask: Tensor, **masks: Tensor) -> Tensor:
        given = (x, x, mask) if isinstance(self.stack, nn.TransformerDecoder) else (x, mask)
        return self.head(self.stack(*given, **masks, **self.hint))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Transformer(WIDTH, 2, 1, 1, 32, 0.0, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.stack(x, x, mask, mask, mask)


def converted(model: nn.Module, *args: Any, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    return te_transform.convert(model, args, **options)


def same(model: nn.Module, other: nn.Module, *args: Any, **kwargs: Any) -> None:
    for training in (True, False):
        outs = [each.train(training)(*args, **kwargs) for each in (model, other)]
        assert_close(*outs)
        grads = [torch.autograd.grad(out.square().sum(), [*each.parameters()], allow_unused=True)
                 for out, each in zip(outs, (model, other), strict=True)]  # fmt: skip
        assert_close(*grads)


# Whether a mask is causal


@pytest.mark.parametrize("first", MASKS)
def test_masks_of_encoders_need_no_hint(first: str) -> None:
    model = seeded(Stack)
    fused = converted(model, X, MASKS[first], verify=first == "causal")
    report = te_transform.report(fused)
    hinted = converted(seeded(Stack, is_causal=False), X, MASKS[first], verify=False)
    assert report.counts == te_transform.report(hinted).counts
    assert not report.breaks
    for mask in MASKS.values() if first == "causal" else (MASKS[first], CAUSAL):
        same(model, fused, X, mask)
    if first == "causal":
        same(model, fused, X, CAUSAL, src_key_padding_mask=PADDING)


@pytest.mark.parametrize("build", [lambda: Stack(nn.TransformerDecoderLayer), Whole])
def test_masks_of_decoders_need_no_hint(build: Callable[[], nn.Module]) -> None:
    model = seeded(build)
    fused = converted(model, X, CAUSAL, verify=False)
    assert te_transform.report(fused).counts["attention"] >= 1
    assert not te_transform.report(fused).breaks
    for mask in (*MASKS.values(), CAUSAL.isinf()):
        same(model, fused, X, mask)


class Doubles(nn.TransformerEncoderLayer):
    """Another layer, which does something else where its mask is causal."""

    def forward(self, src: Tensor, src_mask: Any = None, is_causal: bool = False, **masks: Any) -> Tensor:
        return super().forward(src, src_mask, is_causal=is_causal, **masks) * (2.0 if is_causal else 1.0)


class Adds(nn.TransformerEncoderLayer):
    def _sa_block(self, x: Tensor, attn_mask: Any, padding: Any, is_causal: bool = False) -> Tensor:
        return super()._sa_block(x, attn_mask, padding, is_causal) + (1.0 if is_causal else 0.0)


class Beside(nn.TransformerEncoderLayer):
    """A key of zeros, which a causal mask hides as a hint, and does not as numbers."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.self_attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_zero_attn=True)


@pytest.mark.parametrize("layer", [Doubles, Adds, Beside])
def test_layers_that_depend_on_the_hint_get_it(layer: Layer) -> None:
    model = seeded(Stack, layer)
    fused = converted(model, X, CAUSAL)
    assert any("pass is_causal" in why for why in te_transform.report(fused).breaks)
    for mask in (WINDOW, CAUSAL):
        same(model, fused, X, mask)


def test_hooks_that_see_the_hint_get_it() -> None:
    def double(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
        return (args[0] * (2.0 if kwargs["is_causal"] else 1.0), *args[1:]), kwargs

    model = seeded(Stack)
    models = model, converted(model, X, CAUSAL, verify=False)
    same(*models, X, CAUSAL)
    for each in models:
        each.stack.layers[0].register_forward_pre_hook(double, with_kwargs=True)
    same(*models, X, CAUSAL)


class Learned(Stack):
    """Its mask is trained where it is not causal."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(CAUSAL.clone())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, self.mask)


def test_a_causal_mask_that_could_be_trained_gets_no_gradient() -> None:
    model = seeded(Learned)
    with torch.no_grad():
        model.mask.copy_(CAUSAL)
    fused = converted(model, X)
    same(model, fused, X)
    fused(X).sum().backward()
    assert fused.mask.grad is None


@pytest.mark.parametrize(("dtype", "mask"), [(torch.float64, CAUSAL), (torch.bfloat16, CAUSAL.double())])
def test_masks_of_another_dtype(dtype: torch.dtype, mask: Tensor) -> None:
    model = seeded(Stack).to(dtype)
    same(model, converted(model, X.to(dtype), mask), X.to(dtype), mask)


# Warnings


class Warns(Block):
    def __init__(self, *what: Any, **named: Any):
        super().__init__()
        self.what, self.named = what, named

    def tell(self, number: int) -> None:
        warnings.warn(*self.what, **self.named, stacklevel=number)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(2):
            self.tell(number + 1)
        return super().forward(x)


def warned(model: nn.Module, *args: Any) -> list[tuple[str, type]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(*args)
    return [(str(each.message), each.category) for each in found]


class Asks(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.softmax(x) + x)


class Mixes(nn.Module):
    """A bool padding mask beside a float mask, of which PyTorch warns."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.block = nn.MultiheadAttention(WIDTH, 2, batch_first=True), Block()

    def forward(self, x: Tensor) -> Tensor:
        masks = {"key_padding_mask": PADDING, "attn_mask": CAUSAL}
        return self.block(self.attention(x, x, x, **masks, need_weights=False)[0])


@pytest.mark.parametrize(
    "build",
    [
        lambda: Warns("old"),
        lambda: Warns("old", DeprecationWarning),
        lambda: Warns(message="old", category=FutureWarning),
        Asks,
        Mixes,
    ],
)
def test_warnings_end_no_graph_and_are_given_in_each_call(build: Callable[[], nn.Module]) -> None:
    model = seeded(build)
    fused = converted(model, X)
    assert te_transform.report(fused).counts["layernorm_mlp"] == 1
    assert not te_transform.report(fused).breaks
    for _ in range(2):
        assert warned(fused, X) == warned(model, X) != []
    assert_close(fused(X), model(X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Warning):
            fused(X)


def test_other_warnings_are_given_as_before() -> None:
    model = seeded(Warns, UserWarning("made"))
    assert warned(converted(model, X), X) == warned(model, X) != []


# Numbers of torch.rand()


class Drops(nn.Module):
    """Leaves layers out at random, as those of transformers do."""

    def __init__(self, rate: float = 0.0, draw: Callable[[], Tensor] = lambda: torch.rand([])):
        super().__init__()
        self.rate, self.draw = rate, draw
        self.blocks, self.drop = nn.ModuleList(Block() for _ in range(2)), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.training and self.draw() < self.rate:
                continue
            x = block(x)
        return self.drop(x)


def drawn(model: nn.Module) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return model(X), torch.rand(3)


def test_layers_that_are_never_left_out_are_one_graph() -> None:
    model = seeded(Drops)
    fused = converted(model, X)
    assert te_transform.report(fused).counts["layernorm_mlp"] == 2
    assert not te_transform.report(fused).breaks
    assert_close(drawn(fused), drawn(model))
    for each in (model, fused):
        each.rate = 0.9
    assert_close(drawn(fused), drawn(model))
    assert_close(drawn(fused.eval()), drawn(model.eval()))


def test_the_report_says_what_to_set_where_layers_are_left_out() -> None:
    said = explain_reason(
        'File "/modeling_opt.py", line 375, in forward, code: if dropout < self.layerdrop:', "forward()"
    )
    assert said.endswith("your own code runs there; set layerdrop to 0 in the model's config")


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn([]),
        lambda: torch.rand([]) - 1.0,
        lambda: torch.rand([]).sub_(1.0),
        lambda: torch.rand([]).neg(),
        lambda: torch.rand([], out=torch.zeros([])).mul_(-1),
        lambda: torch.nn.init.constant_(torch.rand([]), -1.0),
    ],
)
def test_other_numbers_are_looked_at(draw: Callable[[], Tensor]) -> None:
    model = seeded(Drops, 0.0, draw)
    assert_close(drawn(converted(model, X, verify=False)), drawn(model))


def test_speech_is_masked_as_by_the_model() -> None:
    """SpecAugment draws its masks with NumPy, between two graphs, and writes them in place."""
    config = Wav2Vec2Config(
        hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, layerdrop=0.0,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.3, mask_time_length=2,
        num_feat_extract_layers=2, conv_dim=[8, 8], conv_stride=[4, 2], conv_kernel=[8, 4],
    )  # fmt: skip
    model = seeded(Wav2Vec2Model, config)
    reports = [
        te_transform.report(converted(copy.deepcopy(model), torch.randn(2, 300), verify=verify))
        for verify in (True, False)
    ]
    assert reports[0].counts == reports[1].counts
    assert reports[0].counts["merge_siblings"] == 1
    assert any("; set apply_spec_augment=False" in why for why in reports[0].breaks)


def test_compilers_of_others_see_pytorchs_own() -> None:
    before = trace_rules.lookup(warnings.warn), symbolic_convert.compare_op_handlers["<"]
    with traceable_forms():
        assert trace_rules.lookup(warnings.warn) is not before[0]
    assert (trace_rules.lookup(warnings.warn), symbolic_convert.compare_op_handlers["<"]) == before


# Numbers of tensors that are made of Python's numbers


class Sliced(nn.Module):
    """Slices by a number that it makes a tensor of first, as DeBERTa does; `change` writes to that tensor."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any] = lambda number, x: None):
        super().__init__()
        self.change, self.block = change, Block()

    def forward(self, x: Tensor) -> Tensor:
        number = torch.tensor(min(x.size(1), 4))
        self.change(number, x)
        return self.block(x[:, : number - 1] * number.item())


class Exportable(Block):
    """A block that computes something else when it is exported, as models that call kernels do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(-x if torch.compiler.is_exporting() else x)


def test_a_capture_is_no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(Exportable)
    converted = te_transform.convert(copy.deepcopy(model), (X,), verify=False)
    assert te_transform.report(converted).breaks == ()
    assert_close(converted(X), model(X))
    assert_close(torch.export.export(converted, (X,)).module()(X), model(-X))
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)  # an exporter calls the model
    assert_close(converted(X), model(X))


class Scanned(Block):
    """A block whose residual is a running product, by a scan for GPUs when it is traced, as in Mamba."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not torch.compiler.is_compiling():
            return out.cumprod(1)
        return associative_scan(torch.mul, out, 1, combine_mode="pointwise")


def test_scans_are_operations_on_all_elements() -> None:
    """The scan for GPUs raises on a CPU, and its backward takes memory for each pair of elements."""
    model = seeded(Scanned)
    converted = te_transform.convert(copy.deepcopy(model), (X,), verify=False)
    assert te_transform.report(converted).breaks == ()
    for x in (X, X[:, :3]):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        found = [each(leaf) for each, leaf in zip((converted, model), leaves, strict=True)]
        for out in found:
            out.sum().backward()
        assert_close(*found)
        assert_close(*(leaf.grad for leaf in leaves))


def test_a_number_of_a_tensor_made_of_a_number_ends_no_graph() -> None:
    model = seeded(Sliced)
    fused = converted(model, X[:, :3])
    assert not te_transform.report(fused).breaks
    for length in (3, 2, 6):  # later ones are sizes that vary, whose numbers are not known
        same(model, fused, X[:, :length])


@pytest.mark.parametrize(
    "change",
    [
        lambda number, x: number.sub_((x.sum() < 1e9).long()),
        lambda number, x: number.view(1).__setitem__(0, (x.sum() < 1e9).long() + 1),
        lambda number, x: number.data.fill_(2),
    ],
    ids=["in place", "through a view", "through .data"],
)
def test_a_number_that_is_written_is_read_anew(change: Callable[[Tensor, Tensor], Any]) -> None:
    model = seeded(Sliced, change)
    same(model, converted(model, X), X)


def test_a_break_inside_of_torch_names_the_line_that_led_there() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.offset = Block(), nn.Buffer(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.offset = self.offset.to(x.dtype)
            return self.block(x + self.offset)

    said = " ".join(te_transform.report(converted(Moves(), X)).breaks)
    assert '"self.offset = self.offset.to(x.dtype)", which dynamo cannot capture' in said
    assert said.endswith("dynamo does not know the attributes of a tensor that the forward creates")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_strided_nested_tensor_is_told_what_to_pass() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
    model, nested = nn.TransformerEncoder(layer, 1).eval(), torch.nested.nested_tensor([X[0], X[1, :3]])
    with pytest.raises(te_transform.TraceError, match="pass padded tensors and a padding mask"):
        converted(model, nested)
    fused = converted(model, X).eval()
    with torch.no_grad():
        for found, wanted in zip(fused(nested).unbind(), model(nested).unbind(), strict=True):
            assert_close(found, wanted)
    said = str(te_transform.report(fused)).replace("\n", " ")
    assert "a nested tensor of layout torch.strided has no sizes to guard" in said
