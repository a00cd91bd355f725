"""Without Transformer Engine and a GPU: what is planned for TE, what of it runs in FP8, what its ops get."""

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import te_transform
from te_transform import (
    PIPELINE,
    BackendError,
    OptionError,
    PrecisionError,
    PrecisionPlan,
    backends,
)
from te_transform.backends import limits, plain
from te_transform.execution.attach import runner_of
from te_transform.graph.capture import capture
from te_transform.graph.nodes import value
from te_transform.plan.match import Site, plan
from te_transform.plan.options import Options
from te_transform.plan.product_sizes import ProductSize
from te_transform.report.places import gather
from te_transform.report.report import Report
from tests import stand_in
from tests.attacks import Attends
from tests.attacks import X as OF_ATTENDS
from tests.bitwise import untouched
from tests.conversions import ALL, DISTINCT, PLANNED_LATER, each, inspected, planned
from tests.models.tiny import WIDTH
from tests.packages import LLAMA_IDS, llama
from tests.te_contract import record as te_contract
from tests.zoo import CASES, HIDDEN, VOCAB, Case, seeded

NO_GPU = "this machine has no GPU that PyTorch can use"
PLANNED = f"backend 'te', planned only, because {NO_GPU}"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPU, if there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def with_vocabulary(name: str, size: int, **others: int) -> Case:
    """The model with as many words, for its head to have a shape that FP8 has kernels for."""
    case, build = ALL[name], ALL[name].build
    keywords = build.keywords | {"vocab_size": size} | others
    return Case(name, lambda: build.func(*build.args, **keywords), case.inputs)


# What is planned

TWO = {"attention": 2}
GPT = TWO | {"layernorm_mlp": 2, "layernorm_linear": 3, "linear": 2}
LLAMA = GPT | {"merge_siblings": 4, "rotary": 4}
LLAMA_1 = {
    "attention": 1, "layernorm_mlp": 1, "layernorm_linear": 2, "linear": 1, "merge_siblings": 2, "rotary": 2,
}  # fmt: skip
NANOGPT = GPT | {"cross_entropy": 1}  # the others have no targets
ENCODER = TWO | {"merge_siblings": 2, "layernorm_mlp": 2, "layernorm_linear": 3, "linear": 3}
QUICKSTART = TWO | {"layernorm_mlp": 2, "layernorm_linear": 2, "linear": 2}
COUNTS = {
    **dict.fromkeys(("quickstart", "quickstart_mask"), QUICKSTART),
    "nanogpt_manual": NANOGPT,
    **dict.fromkeys(("gpt2", "bloom"), GPT),
    **dict.fromkeys(("llama", "llama_eager", "qwen3"), LLAMA_1),
    "gemma3_text": LLAMA,
    "phi3": GPT | {"rotary": 4},
    "bert": ENCODER,
    "gpt_neox": GPT | {"rotary": 4},
    "vit": QUICKSTART | {"merge_siblings": 2, "linear": 3},
    "t5": {"attention": 1, "merge_siblings": 4, "layernorm_linear": 7, "linear": 9},
    "opt": {"attention": 1, "merge_siblings": 1, "layernorm_mlp": 1, "layernorm_linear": 2, "linear": 1},
    "whisper": {"merge_siblings": 5, "attention": 6, "layernorm_mlp": 4, "layernorm_linear": 8, "linear": 6},
    "torch_encoder_pre": TWO | {"layernorm_linear": 4, "linear": 4},
    "torch_mha": {"attention": 1, "layernorm_linear": 1, "linear": 1},
    "torch_mha_bare": {"linear": 2},
    "falcon": TWO | {"merge_siblings": 2, "rotary": 4, "layernorm_linear": 3, "linear": 4},
    "mixtral": {
        "attention": 1, "merge_siblings": 1, "rotary": 2, "experts": 1, "layernorm_linear": 3, "linear": 1,
    },
    "clip_text": QUICKSTART | {"merge_siblings": 2},
}  # fmt: skip

DROPPED = "a dropout of 0.1 precedes the second linear, but LayerNormMLP has no dropout there: set it to 0"
BIAS = (
    "the attention adds a learned bias to its scores, but TE's fast cores compute no gradient for it: "
    "freeze the bias, if you can retrain"
)
HANDED_OUT = (
    "the attention's scores or probabilities are also read by mean, but fused attention does not return "
    "them: pass need_weights=False or output_attentions=False, or let nothing else read them"
)

MERGED = (
    "the first linear is merged with others of the same norm, but LayerNormMLP needs its own linear: give "
    "the MLP its own norm, if you can retrain"
)
BEHIND_DROPOUT = (
    "the linear reads a norm through dropout, but LayerNormLinear has nothing between the two: set the "
    "dropout to 0"
)
BEHIND_SCALING = (
    "the linear reads a norm through dropout, mul, but LayerNormLinear has nothing between the two: "
    "compile=True joins these operations"
)
BEHIND_GETITEM = (
    "the linear reads a norm through getitem, but LayerNormLinear has nothing between the two: take the rows "
    "before the norm"
)
REFUSED = {
    "bert": {
        ("layernorm_linear", BEHIND_DROPOUT): ["bert.encoder.layer.0.attention.self  x1"],
    },
    "vit": {("layernorm_linear", BEHIND_GETITEM): ["classifier  x1"]},
    "t5": {
        ("layernorm_linear", BEHIND_DROPOUT): ["decoder.block.0.layer.1.EncDecAttention  x1"],
        ("layernorm_linear", BEHIND_SCALING): ["lm_head  x1"],
        ("attention", BIAS): [
            "encoder.block.{0,1}.layer.0.SelfAttention  x2",
            "decoder.block.0.layer.0.SelfAttention  x1",
        ],
        ("layernorm_mlp", DROPPED): [
            "encoder.block.{0,1}.layer.1.DenseReluDense  x2",
            "decoder.block.0.layer.2.DenseReluDense  x1",
        ],
    },
    "falcon": {("layernorm_mlp", MERGED): ["transformer.h.{0,1}  x2"]},
    "torch_encoder_pre": {("layernorm_mlp", DROPPED): ["layers.{0,1}  x2"]},
    "torch_mha_bare": {("attention", HANDED_OUT): ["(the model itself)  x1"]},
}


def refused(report: Report) -> dict[tuple[str, ...], list[str]]:
    return {(places.rule, *places.reasons): places.lines for places in gather(report.refused)}


@each(DISTINCT, later=(*PLANNED_LATER, "mixtral", "t5"))
def test_a_plan_for_te_changes_nothing(name: str) -> None:
    report = planned(name)
    assert report.counts == COUNTS[name]
    assert refused(report) == REFUSED.get(name, {})
    assert report.notes[0] == PLANNED


@each(DISTINCT, later=PLANNED_LATER)
def test_planned_as_te_itself_would(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # its libraries are loaded in there, and each fails in its own way
        pytest.skip(f"Transformer Engine cannot be imported ({type(error).__name__}: {error})")
    expected = inspected(ALL[name])
    monkeypatch.setattr(backends, "why_missing", lambda: None)
    report = inspected(ALL[name])
    assert report.notes == ("backend 'te', as asked", *expected.notes[1:])
    assert report.sites == expected.sites


# What convert() says


class Untouchable(nn.Module):
    """A model that must not be run."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the model was run")


X = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))


def broken() -> None:
    raise OSError("libnccl.so.2: cannot open shared object file\nand more")


MISSING = {
    "no GPU": ({}, NO_GPU),
    "no TE": (
        {"cuda.is_available": lambda: True, "sys": None},
        "Transformer Engine cannot be imported (ModuleNotFoundError: ",
    ),
    "a library": (
        {"cuda.is_available": lambda: True, "_te": broken},
        "Transformer Engine cannot be imported (OSError: libnccl.so.2: cannot open shared object file); "
        "try to import transformer_engine.pytorch before any model runs",
    ),
    "an old GPU": (
        {
            "cuda.is_available": lambda: True,
            "cuda.get_device_capability": lambda: (7, 5),
            "_te": lambda: None,
        },
        "this GPU is older than Ampere, which Transformer Engine needs",
    ),
}


@pytest.mark.parametrize("why", MISSING)
def test_convert_says_what_is_missing(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, sentence = MISSING[why]
    for name, held in found.items():
        if name == "sys":  # no module of that name, for any import from here on
            stand_in.forget(monkeypatch)
            for module in ("transformer_engine", "transformer_engine.pytorch"):
                monkeypatch.setitem(sys.modules, module, None)
        else:
            monkeypatch.setattr(f"te_transform.backends.{name}", held)
    model = Untouchable()
    for inplace in (False, True):
        with untouched(model), pytest.raises(BackendError) as raised:
            te_transform.convert(model, X, backend="te", inplace=inplace)
        assert str(raised.value).startswith(
            f"expected Transformer Engine for backend 'te', got none: {sentence}"
        )
        assert str(raised.value).endswith("; choose backend 'torch' or 'auto'")
    chosen, reason = backends.choose("auto", model)
    assert chosen is plain
    assert reason.startswith(f"backend 'torch', because {sentence}")


def test_auto_is_plain_pytorch_and_says_why() -> None:
    report = te_transform.report(te_transform.convert(seeded(Attends), OF_ATTENDS, backend="auto"))
    assert report.notes[0] == f"backend 'torch', because {NO_GPU}"
    report.expect(merge_siblings=1, linear=1)


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "reason"),
    [
        (False, torch.bfloat16, "backend 'torch', because the model is not on the GPU: move it there, "),
        (True, torch.float32, "backend 'torch', because the model's weights are not all bfloat16 or float16"),
        (True, torch.bfloat16, "backend 'te', because it runs here and the model is on the GPU"),
    ],
)
def test_auto_goes_by_the_model_where_te_runs(
    is_cuda: bool, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    te = object()
    monkeypatch.setattr(backends, "why_missing", lambda: None)
    monkeypatch.setattr(backends, "_te", lambda: te)
    weight = SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(4096, 4096), dim=lambda: 2)
    model = SimpleNamespace(parameters=lambda: [weight])
    chosen, why = backends.choose("auto", model)
    assert why.startswith(reason)
    assert chosen is (te if "'te'" in reason else plain)
    if is_cuda:  # under autocast TE's kernels take float32 too, where there is a recipe that may come
        assert backends.choose("auto", model, in_recipe=True)[0] is te
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert backends.choose("auto", model)[0] is te


@pytest.mark.parametrize("checkpoints", [False, True])
def test_auto_is_chosen_anew_where_a_model_is_captured_anew(
    checkpoints: bool, te: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer moves the model to the GPU after the conversion. A model in bf16 stands for such a model."""
    monkeypatch.setattr(backends, "_too_narrow", lambda model: None)
    monkeypatch.setattr(
        backends,
        "_why_te_cannot_run",
        lambda model, _: "it is on the CPU" if model.dtype == torch.float32 else None,
    )
    batch = {"input_ids": LLAMA_IDS, "labels": LLAMA_IDS}
    model = llama()
    if checkpoints:
        model.gradient_checkpointing_enable()
    converted = te_transform.convert(model, batch)
    before = te_transform.report(converted)
    assert before.notes[0] == "backend 'torch', because it is on the CPU"
    for trained in (model, converted):
        trained.to(torch.bfloat16)(**batch).loss.backward()
    after = te_transform.report(converted)
    assert after.notes[0].startswith("backend 'te', because it runs here")
    assert after.counts >= before.counts
    assert after.counts["cross_entropy"] == 1  # which TE alone has a kernel for
    graph = runner_of(converted).graphs[-1]
    assert any(type(site.fused).__module__.startswith(te.__name__) for site in graph.plan.sites)
    for found, wanted in zip(converted.parameters(), model.parameters(), strict=True):
        assert (found.grad - wanted.grad).norm() <= 0.02 * wanted.grad.norm()


# Which products run in FP8


def odd(rows: int, columns: int, multiple: int = 16) -> str:
    enough = " x ".join(str(math.ceil(size / multiple) * multiple) for size in (rows, columns))
    needed = f"but FP8 kernels need multiples of {multiple}: make it {enough}, if you can retrain"
    return f"the weight is {rows} x {columns}, {needed}"


HEAD = (
    "it computes the model's output, but FP8 would round the output itself, not terms of a sum: name it in a "
    "te_transform.PrecisionPlan to run it in FP8"
)
HEADS = {
    "bert": "cls.predictions.decoder",
    "whisper": "proj_out",
    "vit": "classifier",
}
HEADLESS = {name for name in ALL if name.startswith(("quickstart", "torch_", "clip_"))}


@each(DISTINCT, later=PLANNED_LATER)
def test_a_vocabulary_of_99_stays_out(name: str) -> None:
    sites = planned(name).precision.sites
    rows = 2 if name == "vit" else VOCAB
    expected = {} if name in HEADLESS else {HEADS.get(name, "lm_head"): odd(rows, HIDDEN)}
    if name == "mixtral":
        expected |= {"model.layers.0.mlp.gate": odd(4, HIDDEN)}
    if name == "torch_mha_bare":  # both linears are the model's own, the first is called "linear"
        expected = {"linear_1": HEAD}
    assert {path: why for path, why in sites.items() if why is not None} == expected


@each(["llama", "gpt2", "bert", "t5"], later=["gpt2", "bert", "t5"])
def test_the_head_stays_out_of_fp8_whatever_its_shape(name: str) -> None:
    sites = inspected(with_vocabulary(name, 112), recipe="fp8-delayed").precision.sites
    assert [path for path, why in sites.items() if why == HEAD] == [HEADS.get(name, "lm_head")]


PRODUCTS = {
    f"model.layers.{layer}.{place}": None
    for place in ("mlp", "self_attn", "self_attn.o_proj")
    for layer in (0, 1)
}


@pytest.mark.parametrize(
    "recipe",
    [
        "fp8-delayed",
        "mxfp8",
        *(pytest.param(r, marks=pytest.mark.integration) for r in ("fp8-current", "fp8-block")),
    ],
)
def test_the_plan_of_llama(recipe: str) -> None:
    case = replace(CASES["llama"], build=partial(CASES["llama"].build, num_hidden_layers=2))
    report = inspected(case, recipe=recipe)
    multiple = 32 if recipe == "mxfp8" else 16
    assert report.precision == PrecisionPlan(recipe, PRODUCTS | {"lm_head": odd(VOCAB, HIDDEN, multiple)})
    assert f"not in {recipe}: lm_head, because {odd(VOCAB, HIDDEN, multiple)}" in report.all_notes()
    assert sum(note.startswith(f"in {recipe}: model.layers.{{0,1}}.") for note in report.all_notes()) == 1


def test_mxfp8_needs_multiples_of_32() -> None:
    assert in_recipe(nn.Linear(64, 112).bfloat16(), "mxfp8") == {"0": odd(112, 64, 32)}
    assert in_recipe(nn.Linear(64, 112).bfloat16(), "fp8-delayed") == {"0": HEAD}


def in_recipe(module: nn.Module, recipe: Any, columns: int = 64) -> dict[str, str | None]:
    """Return the precision plan's sites of a model with only this module."""
    model = nn.Sequential(module)
    x = torch.randn(4, 32, columns, dtype=next(model.parameters()).dtype)
    return te_transform.inspect(model, x, backend="te", recipe=recipe).precision.sites


# Plans that are kept


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    sites = {
        "": None,  # the model itself
        "lm_head": HEAD,
        'a "quoted\\name.Ünïcode.\U0001f600': 'why "not"?\n',
        "no.reason": "",
    }
    made = PrecisionPlan("fp8-block", sites)
    made.write(tmp_path / "plan.toml")
    assert PrecisionPlan.read(tmp_path / "plan.toml") == made
    assert PrecisionPlan.read(str(tmp_path / "plan.toml")).sites == sites
    made = PrecisionPlan("fp8-block", sites, small_calls=True)
    made.write(tmp_path / "plan.toml")
    assert PrecisionPlan.read(tmp_path / "plan.toml") == made


def test_the_file_is_as_short_as_it_can_be(tmp_path: Path) -> None:
    PrecisionPlan("mxfp8", {"a.0": None, "lm_head": "it is odd"}).write(tmp_path / "plan.toml")
    assert (tmp_path / "plan.toml").read_text() == (
        '# "fp8": the fused module runs in the recipe\'s precision. Any other text says why not.\n'
        'recipe = "mxfp8"\n\n[sites]\n"a.0" = "fp8"\n"lm_head" = "it is odd"\n'
    )


def test_an_edited_file_is_honoured(tmp_path: Path) -> None:
    file, case = tmp_path / "plan.toml", with_vocabulary("llama", 112, num_hidden_layers=2)
    inspected(case, recipe="fp8-delayed").precision.write(file)
    text = file.read_text()
    for before, after in {
        '"model.layers.0.mlp" = "fp8"': '"model.layers.0.mlp" = "its loss spikes"',
        f'"lm_head" = {json.dumps(HEAD)}': '"lm_head" = "fp8"',
        '"model.layers.1.self_attn" = "fp8"\n': "",  # decided as without the file
        '"model.layers.1.mlp" = "fp8"': '"model.layers.1.mlp" = ""',
        'recipe = "fp8-delayed"': 'recipe = "fp8-current"',
    }.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    file.write_text(text)
    changed = {"model.layers.0.mlp": "its loss spikes", "model.layers.1.mlp": "", "lm_head": None}
    report = inspected(case, recipe=PrecisionPlan.read(file))
    assert report.precision == PrecisionPlan("fp8-current", PRODUCTS | changed)
    assert "not in fp8-current: model.layers.0.mlp, because its loss spikes" in report.all_notes()


class OneHead(nn.Module):
    """Attention [batch, length, width], without heads: the fused op gets a fourth dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 8
        return scores.softmax(-1) @ self.value(x)


def test_attention_in_three_dimensions_has_the_details_of_its_site() -> None:
    report = te_transform.inspect(OneHead().bfloat16(), torch.randn(2, 16, 64).bfloat16(), backend="te")
    (attention,) = (site for site in report.sites if site.rule == "attention")
    assert attention.status == "fused"
    assert attention.seconds
    assert len(attention.inside) >= 5  # two products, a transpose, a factor and a softmax


def test_the_report_says_which_calls_are_too_small() -> None:
    case = replace(CASES["llama"], build=partial(CASES["llama"].build, num_hidden_layers=1))
    tokens = f"calls with {limits.break_even_rows(HIDDEN, True):,} or more tokens run in FP8"
    assert any(note.startswith(tokens) for note in inspected(case, recipe="fp8-block").notes)
    asked = PrecisionPlan("fp8-block", small_calls=True)
    assert not any("or more tokens" in note for note in inspected(case, recipe=asked).notes)
    tokens = f"calls with {limits.break_even_rows(HIDDEN, False):,} or more tokens run in TE's modules"
    assert any(note.startswith(tokens) for note in inspected(case).notes)


def test_the_report_says_where_fused_products_gain_nothing() -> None:
    said = "products run as captured: uncompiled and in the weights' own dtype"
    gpt2 = replace(CASES["gpt2"], build=partial(CASES["gpt2"].build, n_layer=1))
    llama = CASES["llama"]
    assert any(note.startswith(said) for note in inspected(gpt2).notes)
    for case, recipe in ((gpt2, "fp8-block"), (llama, None)):
        assert not any(note.startswith(said) for note in inspected(case, recipe=recipe).notes)


@pytest.mark.parametrize("in_fp8", [True, False])
@pytest.mark.parametrize("width", [64, 1024, 4096])
def test_calls_are_too_small_below_that_number_of_tokens(width: int, in_fp8: bool) -> None:
    tokens = limits.break_even_rows(width, in_fp8)
    assert limits.too_small(tokens - 1, width, in_fp8)
    assert limits.too_small(tokens, width, in_fp8) is None
    with limits.ignore_size_limits:
        assert limits.too_small(1, width, in_fp8) is None
    assert limits.too_small(1, width, in_fp8)
    with limits.replayed:
        assert bool(limits.too_small(1, width, in_fp8)) == in_fp8


@pytest.mark.parametrize(
    ("gains", "in_fp8", "in_graphs", "work"),
    [
        (False, False, False, math.inf),
        (True, False, False, limits.MIN_GEMM_WORK),
        (False, True, False, limits.MIN_GEMM_WORK_IN_FP8),
        (False, False, True, 0),
        (False, True, True, limits.MIN_GEMM_WORK_IN_FP8_REPLAYED),
    ],
)
def test_a_product_gains_from_a_number_of_rows_on(
    gains: bool, in_fp8: bool, in_graphs: bool, work: float
) -> None:
    least = ProductSize(rows=1, width=1000, gains=gains).least_rows(in_fp8, in_graphs)
    assert least == (math.ceil(work / 1000**2) if work < math.inf else math.inf)


def test_merged_products_are_inactive_below_the_limit_of_their_joined_weight() -> None:
    """The call runs one product with the joined weight, whose smaller side is wider than q alone."""
    case = replace(CASES["llama"], build=partial(CASES["llama"].build, head_dim=HIDDEN // 8))
    options = {"recipe": PrecisionPlan("fp8-delayed", {}), "graphs": True}
    reasons = {site.path: site.inactive for site in inspected(case, **options).sites}
    assert any(
        path.endswith("self_attn") and why.endswith(f"(width {HIDDEN})") for path, why in reasons.items()
    )


def test_no_plan_puts_a_shape_into_fp8_that_has_no_kernel() -> None:
    asked = PrecisionPlan("fp8-delayed", {"0": "fp8"})
    assert asked.sites == {"0": None}
    assert in_recipe(nn.Linear(64, 99).bfloat16(), asked) == {"0": odd(99, 64)}


BAD_FILES = {
    "no TOML": (b"recipe: fp8-delayed", "expected TOML in {path}, got an error ("),
    "no text": (b"\xff\xfe\x00", "expected TOML in {path}, got an error ("),
    "an empty file": (b"", 'expected in {path} a line recipe = "fp8-delayed", a table [sites]'),
    "no recipe": (b'[sites]\nlm_head = "fp8"', "expected in {path} a line recipe"),
    "a number as recipe": (b"recipe = 8", "expected in {path} a line recipe"),
    "a number as reason": (b'recipe = "mxfp8"\n[sites]\nlm_head = 8', "expected in {path} a line recipe"),
    "a bare path": (b'recipe = "mxfp8"\n[sites]\nlm.head = "fp8"', "expected in {path} a line recipe"),
    "a list of sites": (b'recipe = "mxfp8"\nsites = ["lm_head"]', "expected in {path} a line recipe"),
    "a number for small calls": (
        b'recipe = "mxfp8"\nsmall_calls = 1\n[sites]',
        "expected in {path} a line recipe",
    ),
    "a misspelt table": (b'recipe = "mxfp8"\n[site]\nlm_head = "fp8"', "expected in {path} a line recipe"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_plan(name: str, tmp_path: Path) -> None:
    content, sentence = BAD_FILES[name]
    (tmp_path / "plan.toml").write_bytes(content)
    with pytest.raises(PrecisionError) as raised:
        PrecisionPlan.read(tmp_path / "plan.toml")
    assert str(raised.value).startswith(sentence.format(path=tmp_path / "plan.toml"))
    assert str(raised.value).endswith("write() makes a file to start from")


def test_a_file_with_an_unknown_recipe_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('recipe = "fp9"')
    with pytest.raises(PrecisionError) as raised:
        PrecisionPlan.read(tmp_path / "plan.toml")
    assert str(raised.value).startswith(f"{tmp_path / 'plan.toml'}: ")
    assert "fp9" in str(raised.value)


@pytest.mark.parametrize("path", ["no-such-plan.toml", None])
def test_no_file(path: str | None) -> None:
    with pytest.raises(
        PrecisionError, match=r"expected a file that write\(\) made, got .+, which cannot be read \(.+\)"
    ) as raised:
        PrecisionPlan.read(path)
    assert str(raised.value).startswith(f"expected a file that write() made, got {path}, ")


def test_a_recipe_object_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(PrecisionError, match=r"expected one of convert\(\)'s recipe names, .*, got a object"):
        PrecisionPlan(object()).write(tmp_path / "plan.toml")
    assert not list(tmp_path.iterdir())


def test_a_site_is_in_or_has_a_reason() -> None:
    with pytest.raises(PrecisionError, match="expected None, \"fp8\" or a reason for 'lm_head', got True"):
        PrecisionPlan("mxfp8", {"lm_head": True})
    with pytest.raises(
        PrecisionError, match=r"expected a dict from the path of a site to None, .* for sites, got a list"
    ):
        PrecisionPlan("fp8-delayed", ["lm_head"])
    with pytest.raises(PrecisionError, match="expected True or False for small_calls, got 1"):
        PrecisionPlan("mxfp8", small_calls=1)
    with pytest.raises(PrecisionError, match="expected module paths such as 'lm_head' in sites, got 0"):
        PrecisionPlan("mxfp8", {0: "fp8"})
    for misspelt in ("FP8", "fp8-delayed", " fp8"):  # taken for a reason they would keep the site out
        with pytest.raises(
            PrecisionError, match=f"None, \"fp8\" or a reason for 'lm_head', got {misspelt!r}"
        ):
            PrecisionPlan("fp8-delayed", {"lm_head": misspelt})


def test_a_plan_has_a_recipe_that_there_is() -> None:
    with pytest.raises(PrecisionError) as raised:
        PrecisionPlan("mxfp4")
    assert str(raised.value) == f"expected a TE recipe or one of {NAMES} for recipe, got 'mxfp4'"


# Mistakes are named before anything happens


NAMES = "fp8-delayed, fp8-delayed-fast, fp8-current, fp8-current-fast, fp8-block, mxfp8"
MISTAKES = {
    "no such recipe": (
        {"recipe": "fp8"},
        f"expected None, a TE recipe or one of {NAMES} for recipe, got 'fp8'",
    ),
    "no recipe in a plan": (
        {"recipe": PrecisionPlan(None, {"linear": "fp8"})},
        "expected a PrecisionPlan with a recipe, got one without",
    ),
    "no recipe at all": ({"recipe": 3}, "expected a recipe of TE or its name, got 3"),
    "True as recipe": ({"recipe": True}, "expected a recipe of TE or its name, got True"),
    "on torch": (
        {"recipe": "mxfp8", "backend": "torch"},
        "expected backend 'te' for the recipe 'mxfp8', got backend 'torch', as asked; ",
    ),
    "a plan on torch": (
        {"recipe": PrecisionPlan("mxfp8"), "backend": "torch"},
        "expected backend 'te' for the recipe 'mxfp8', got backend 'torch', as asked; ",
    ),
}


@pytest.mark.parametrize("entry", [te_transform.inspect, te_transform.convert], ids=["inspect", "convert"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_before_the_model_is_run(
    name: str, entry: Callable[..., Any], as_if_te_ran: None
) -> None:
    options, sentence = MISTAKES[name]
    model = Untouchable()
    with untouched(model), pytest.raises(OptionError) as raised:
        entry(model, X, **{"backend": "te"} | options)
    assert str(raised.value).startswith(sentence)


def test_a_recipe_where_auto_is_torch() -> None:
    model = Untouchable()
    why = f"got backend 'torch', because {NO_GPU}"
    with (
        untouched(model),
        pytest.raises(OptionError, match=f"{why}.*; call it where .* runs, or leave out the recipe"),
    ):
        te_transform.convert(model, X, recipe="fp8-delayed")
    with (
        untouched(model),
        pytest.raises(OptionError, match=f"{why}.*; choose backend 'te', which can be planned"),
    ):
        te_transform.inspect(model, X, recipe="fp8-delayed")


@pytest.mark.parametrize("inplace", [False, True])
def test_paths_where_no_product_is_fused(inplace: bool, as_if_te_ran: None) -> None:
    model = seeded(Attends)
    unknown = {"norm": "fp8", "attention.k_proj": "why not", "attention.out_proj": "known"}
    asked = PrecisionPlan("fp8-delayed", unknown)
    sentence = "got attention.k_proj, norm; te_transform.inspect"
    with untouched(model), pytest.raises(PrecisionError, match=sentence):
        te_transform.convert(model, OF_ATTENDS, backend="te", recipe=asked, inplace=inplace)
    with untouched(model), pytest.raises(PrecisionError, match=sentence):
        te_transform.inspect(model, OF_ATTENDS, backend="te", recipe=asked)


# What TE's modules would get

TE_PARAMETERS = json.loads(te_contract.FILE.read_text(encoding="utf-8"))["parameters"]
NAMES_OF = {  # of the parameters that a call's tensors stand for, after the input
    "Linear": ("weight", "bias"),
    "LayerNormLinear": ("layer_norm_weight", "layer_norm_bias", "weight", "bias"),
    "LayerNormMLP": (
        "layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"
    ),
}  # fmt: skip


def sites_of(model: nn.Module, inputs: dict[str, Tensor]) -> list[Site]:
    """The sites that have products, of all graphs that the forward is captured in."""
    options, found = Options.of(model, PIPELINE, backend="te", planning=True), []

    def keep(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable:
        found.extend(plan(graph, options).sites)
        return graph.forward

    capture(type(model).forward, keep)(model, **inputs)
    return [site for site in found if site.weights]


def tes_parameters(site: Site) -> dict[str, list[int]]:
    """Names and shapes of the parameters that TE's module in the place of `site` has, as it was recorded."""
    fused, kind = site.fused, type(site.fused).__name__
    form = {"bias": site.node.args[-1] is not None, "params_dtype": torch.bfloat16}
    for option in ("activation", "normalization", "zero_centered_gamma"):
        if hasattr(fused, option):
            form[option] = getattr(fused, option)
    (title,) = (
        te_contract.title(name, given)
        for name, given in te_contract.argument_sets()
        if name == kind and form.items() <= given.items() and "return_layernorm_output" not in given
    )
    weight = value(site.node.args[fused.PRODUCTS[-1]])
    narrow, wide = weight.shape if kind == "LayerNormMLP" else reversed(weight.shape)
    size_of = {te_contract.IN: narrow, te_contract.OUT: wide, 2 * te_contract.OUT: 2 * wide}
    found = re.findall(r"(\w+) \w+\[([\d, ]+)\]", TE_PARAMETERS[title])
    return {name: [size_of[int(size)] for size in shape.split(",")] for name, shape in found}


@each(
    ["quickstart", "nanogpt_manual", "gpt2", "llama", "phi3", "bert", "t5", "falcon", "clip_text"],
    later=(*PLANNED_LATER, "t5"),
)
def test_the_calls_have_exactly_tes_parameters(name: str) -> None:
    sites = sites_of(ALL[name].build(), ALL[name].sample())
    for site in sites:
        given = dict(zip(NAMES_OF[type(site.fused).__name__], site.node.args[1:], strict=True))
        shapes = {name: list(value(node).shape) for name, node in given.items() if node is not None}
        assert shapes == tes_parameters(site)
    parameters = [parameter for site in sites for weight in site.weights for parameter in weight]
    assert len(set(parameters)) == len(parameters)  # each weight is in one product


def test_weights_in_float64_stay_out_of_fp8_with_a_reason() -> None:
    reason = (
        "the weights are float64, but FP8 needs bfloat16, float16, or float32 under torch.autocast: store "
        "them in one of these, as model.to(torch.bfloat16) does"
    )
    assert {*in_recipe(seeded(Attends).double(), "fp8-current", WIDTH).values()} == {reason}


@pytest.mark.parametrize("around", [False, True])
def test_weights_in_float32_are_for_fp8_under_autocast(around: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        report = te_transform.inspect(seeded(Attends), OF_ATTENDS, backend="te", recipe="fp8-current")
    assert None in report.precision.sites.values()
    assert any("only under torch.autocast" in note for note in report.notes) != around
