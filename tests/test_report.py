"""The report says what was done, where, and why not: in words, in tables, as graphs."""

import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import FrozenInstanceError, replace
from functools import cache, wraps
from html import escape
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform.execution.timing import duration
from te_transform.graph.capture import capture
from te_transform.graph.edit import copy_graph, snapshot
from te_transform.page.bars import operations_of_call
from te_transform.page.blocks import blocks_of
from te_transform.page.colors import hue_of
from te_transform.page.details import detail
from te_transform.plan.rule import Outcome
from te_transform.report import renderer
from te_transform.report.drawing import Part
from te_transform.report.graph_breaks import explain_graphs
from te_transform.report.places import collapse, gather, most_valuable_first
from te_transform.report.report import ExpectationError, Report
from tests.conversions import ALL
from tests.models.llama import llama_of_8b

GELU = "the activation is the exact (erf) GELU, LayerNormMLP has tanh: allow approximate=True"
SHAPE = "the weight is [64, 3] and <frozen>, one of [64, 64] & trained is needed"


def fake(shape: Iterable, dtype: torch.dtype, env: ShapeEnv | None = None) -> Tensor:
    with FakeTensorMode(shape_env=env):
        return torch.empty(tuple(shape), dtype=dtype)


def fused(rule: str, *paths: str) -> list[Outcome]:
    return [Outcome(rule, path, "fused") for path in paths]


def refused(rule: str, *paths: str, why: tuple[str, ...] = (GELU,)) -> list[Outcome]:
    return [Outcome(rule, path, "refused", why) for path in paths]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(x)).reshape(2, 16))


def captured(model: nn.Module, x: Tensor) -> list[fx.GraphModule]:
    """The graphs that dynamo makes of the model's forward."""
    graphs = []

    def keep(graph: fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return graph.forward

    capture(type(model).forward, keep)(model, x)
    return graphs


def graph() -> fx.Graph:
    """Block's graph as it was captured, with shapes and module paths."""
    (found,) = captured(Block(), torch.zeros(2, 8))
    return snapshot(copy_graph(found.graph))


def after() -> fx.Graph:
    """A graph on its own that calls fused ops which exist nowhere."""
    result = fx.Graph()
    x = result.placeholder("x")
    weight = result.placeholder("l_self_weight")
    weight.meta["source"] = "L['self']._modules['h']._modules['0']._modules['mlp']._parameters['weight']"
    call = result.create_node("call_module", "h.0.mlp.layernorm_mlp", (x, weight))
    merged = result.create_node("call_module", "h.1.linear", (call, weight))
    call.meta.update(path="h.0.mlp", fused="layernorm_mlp", example_value=fake((2, 8), torch.bfloat16))
    merged.meta.update(path="h.1", fused="linear")
    result.output(merged)
    return result


def report(*sites: Outcome, model: str = "GPT", notes: tuple[str, ...] = (), **graphs: object) -> Report:
    return Report(model, sites, **{"before": graph(), "after": after(), **graphs}, notes=notes)


FULL = (
    *fused("layernorm_mlp", *(f"model.layers.{i}.mlp" for i in range(22))),
    *refused("layernorm_mlp", "model.layers.22.mlp", "model.layers.23.mlp", why=(GELU, SHAPE)),
    *fused("layernorm_linear", "lm_head", *(f"model.layers.{i}.attn.c_attn" for i in range(24))),
    *refused("linear", "", why=(SHAPE,)),
)


@pytest.mark.parametrize(
    ("paths", "lines"),
    [
        ((), ()),
        (("",), (("(the model itself)", 1),)),
        (("lm_head",), (("lm_head", 1),)),
        (("h.7.mlp",), (("h.7.mlp", 1),)),
        (("h.0.mlp", "h.1.mlp"), (("h.{0,1}.mlp", 2),)),
        (("h.5.mlp", "h.0.mlp", "h.2.mlp"), (("h.{0,2,5}.mlp", 3),)),
        (tuple(f"h.{i}.mlp" for i in range(24)), (("h.{0..23}.mlp", 24),)),
        (tuple(f"h.{i}" for i in (0, 1, 2, 3, 8, 10, 11)), (("h.{0..3,8,10,11}", 7),)),
        (("h.0.mlp", "h.0.mlp", "h.1.mlp"), (("h.{0,1}.mlp", 3),)),
        (("0", "1", "2"), (("{0..2}", 3),)),
        (("a.0.q", "a.0.k", "a.1.q", "a.1.k"), (("a.{0,1}.q", 2), ("a.{0,1}.k", 2))),
        (tuple(f"h.{i}.experts.{j}" for i in range(4) for j in range(3)), (("h.{0..3}.experts.{0..2}", 12),)),
        (("s.0.b.0", "s.0.b.1", "s.1.b.0", "s.2.b.0", "s.2.b.1"), (("s.{0,2}.b.{0,1}", 4), ("s.1.b.0", 1))),
        (("h.0", "h.0.1", "h.1"), (("h.{0,1}", 2), ("h.0.1", 1))),
        (("h.00", "h.0"), (("h.00", 1), ("h.0", 1))),
        (("layer1.x", "layer2.x"), (("layer1.x", 1), ("layer2.x", 1))),
    ],
)
def test_paths_collapse_exactly(paths: tuple[str, ...], lines: tuple[tuple[str, int], ...]) -> None:
    assert collapse(paths) == lines


def test_outcomes_are_gathered_by_rule_and_reasons() -> None:
    sites = [*refused("b", "h.0"), *refused("a", "h.0", why=(SHAPE,)), *refused("b", "h.1")]
    sites += refused("b", "h.2", why=(GELU, SHAPE))
    found = [(places.rule, places.reasons, places.lines, places.count) for places in gather(sites)]
    assert found == [
        ("b", (GELU,), ["h.{0,1}  x2"], 2),
        ("b", (GELU, SHAPE), ["h.2  x1"], 1),
        ("a", (SHAPE,), ["h.0  x1"], 1),
    ]


def test_the_most_valuable_refusal_comes_first() -> None:
    small = refused("linear", "h.0.fc", "h.1.fc", "h.2.fc")
    large = [replace(outcome, weights=8 * 8) for outcome in refused("layernorm_mlp", "h.0.mlp", "h.1.mlp")]
    one = refused("attention", "h.0.attn")
    ordered = most_valuable_first(gather([*one, *small, *large]))
    assert [(places.rule, places.weights) for places in ordered] == [
        ("layernorm_mlp", 2 * 64),
        ("linear", 0),
        ("attention", 0),
    ]
    lines = str(report(*one, *small, *large)).splitlines()
    shown = [line.split()[0] for line in lines if line.startswith(("attention", "linear", "layernorm_mlp"))]
    assert shown == ["layernorm_mlp", "linear", "attention"]


def test_sites_counts_and_frozenness() -> None:
    full = report(*FULL)
    assert full.fused + full.refused == tuple(sorted(FULL, key=lambda site: site.status))
    assert full.counts == {"layernorm_mlp": 22, "layernorm_linear": 25}
    assert full.counts["linear"] == full.counts["no_such_rule"] == 0
    assert repr(full) == "Report(GPT: 47 sites fused, 3 sites refused)"
    with pytest.raises(FrozenInstanceError):
        full.model = "other"


def test_prints_collapsed_tables_and_notes() -> None:
    text = str(report(*FULL, notes=("backend 'torch', because [te] is not installed",)))
    assert text.splitlines() == [
        "GPT: 47 sites fused, 3 sites refused",
        "",
        "rule               fused   active   refused   where, and why not",
        "──────────────────────────────────────────────────────────────────────────────────────────────────────────────",
        "layernorm_mlp         22       22             model.layers.{0..21}.mlp  x22",
        "layernorm_linear      25       25             lm_head  x1",
        "                                              model.layers.{0..23}.attn.c_attn  x24",
        "layernorm_mlp                             2   model.layers.{22,23}.mlp  x2",
        f"{' ' * 48}- {GELU.partition(' tanh')[0]}",
        "                                                tanh: allow approximate=True",
        f"{' ' * 48}- {SHAPE.removesuffix(' trained is needed')}",
        "                                                trained is needed",
        "linear                                    1   (the model itself)  x1",
        f"{' ' * 48}- {SHAPE.removesuffix(' trained is needed')}",
        "                                                trained is needed",
        "",
        "note: backend 'torch', because [te] is not installed",
    ]


def test_inactive_sites_have_a_reason() -> None:
    small = "the call has 64 tokens, but fused products gain from 1,491 on (width 4096)"
    idle = [replace(site, inactive=small) for site in fused("linear", "h.0.fc", "h.1.fc")]
    found = report(*idle, *fused("attention", "h.0.attn", "h.1.attn"), *fused("linear", "h.2.fc"))
    assert found.title == "GPT: 5 sites fused (3 active in this call), 0 sites refused"
    assert found.counts == {"linear": 3, "attention": 2}
    lines = [line.split() for line in str(found).splitlines()]
    assert ["linear", "2", "0", "h.{0,1}.fc", "x2"] in lines
    assert ["-", *small.split()] in lines
    assert ["linear", "1", "1", "h.2.fc", "x1"] in lines
    assert ["attention", "2", "2", "h.{0,1}.attn", "x2"] in lines
    assert small in parsed(found._repr_html_().partition("<details>")[0])


def test_refusals_of_deep_models_are_grouped_whatever_parameters_they_name() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.packed = nn.LayerNorm(8), nn.Parameter(torch.randn(2, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x + nn.functional.linear(self.norm(x), self.packed[0])

    model = nn.Sequential(*(Viewed() for _ in range(12)))
    found = gather(te_transform.inspect(model, torch.randn(2, 3, 8)).refused)
    assert all(places.lines == ["{0..11}  x12"] for places in found)
    reasons = [why for places in found for why in places.reasons]
    assert any("is a view of a parameter" in why and "need a whole parameter" in why for why in reasons)


def test_prints_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    text = str(report(*FULL))
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "dumb", "TTY_COMPATIBLE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert str(report(*FULL)) == text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 110


def test_loses_nothing_of_a_path_too_long_for_the_line() -> None:
    path = ".".join(f"module_{i}_of_many" for i in range(12))
    text = str(report(*refused("rule", path, why=("x" * 130 + ", y is needed",))))
    assert path in re.sub(r"\s+", "", text)
    assert "x" * 130 in re.sub(r"\s+", "", text)


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        ((), "GPT: nothing fused and nothing refused, because no rule found a site"),
        (fused("linear", "fc"), "GPT: 1 site fused, 0 sites refused"),
        (refused("linear", "fc"), "GPT: 0 sites fused, 1 site refused"),
    ],
)
def test_the_report_names_what_was_fused_and_refused(sites: list[Outcome], words: str) -> None:
    some = report(*sites)
    assert str(some).splitlines()[0] == words
    assert words in some._repr_html_()
    assert ('<table class="sites' in some._repr_html_()) == bool(sites)


def test_rich_shows_brackets_as_they_are() -> None:
    console = Console(width=200, force_terminal=True, color_system="truecolor", force_jupyter=False)
    with console.capture() as capture:
        console.print(report(*FULL, notes=("[bold]x",)))
    assert SHAPE in capture.get()
    assert "[bold]x" in capture.get()
    assert "\x1b[32mlayernorm_mlp" in capture.get()


def test_expect_is_silent_when_it_holds() -> None:
    report(*FULL).expect(layernorm_mlp=22, layernorm_linear=25, linear=0, attention=0)
    report().expect()


def test_expect_shows_the_difference() -> None:
    with pytest.raises(ExpectationError) as failure:
        report(*FULL).expect(layernorm_mlp=24, layernorm_linear=25, linear=1, attention=24)
    assert isinstance(failure.value, AssertionError)
    assert str(failure.value).splitlines() == [
        "GPT was not fused as expected",
        "  layernorm_mlp: expected 24, found 22",
        "    fused: model.layers.{0..21}.mlp  x22",
        "    refused: model.layers.{22,23}.mlp  x2",
        f"      {GELU}",
        f"      {SHAPE}",
        "  linear: expected 1, found 0",
        "    refused: (the model itself)  x1",
        f"      {SHAPE}",
        "  attention: expected 24, found 0",
        "    no site resembles its pattern, or the rule did not run "
        "(in this report: layernorm_mlp, layernorm_linear, linear)",
    ]
    with pytest.raises(ExpectationError, match=r"\(in this report: none\)"):
        report().expect(linear=1)


def test_expect_refuses_what_is_no_rule() -> None:
    for some in (report(*FULL), report()):
        with pytest.raises(TypeError, match=r"got 'layernorm_mpl'; .*; did you mean 'layernorm_mlp'\?"):
            some.expect(layernorm_mpl=0)
        with pytest.raises(TypeError, match=r"; did you mean 'layernorm_mlp'\?"):
            some.expect(LayerNormMLP=0)
    with pytest.raises(TypeError, match=r"got 'zzz'; use one of layernorm_mlp, .*, cross_entropy$"):
        report(*FULL).expect(zzz=0)
    report(rules=("mine",)).expect(mine=0)
    report(*fused("of_mine", "fc")).expect(of_mine=1)


class _Balanced(HTMLParser):
    """Collects the text, and fails on tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br", "wbr", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(html: str) -> str:
    parser = _Balanced()
    parser.feed(html)
    assert parser.open == []
    return parser.text


def test_html_has_the_same_tables_escaped() -> None:
    html = report(*FULL, model="<locals>.GPT", notes=("it's <te> & more",))._repr_html_()
    assert "&lt;locals&gt;.GPT: 47 sites fused" in html
    assert "<code>model.<wbr>layers.<wbr>{0..21}.<wbr>mlp</code> x22" in html
    assert "the weight is [64, 3] and &lt;frozen&gt;, one of [64, 64] &amp; trained is needed" in html
    assert "<li>it&#x27;s &lt;te&gt; &amp; more</li>" in html
    assert "<frozen>" not in html
    assert "<te>" not in html
    assert f"(the model itself) x1{SHAPE}" in parsed(html)


def test_a_notebook_shows_the_tables_and_the_page_in_a_frame(tmp_path: Path) -> None:
    full = report(*FULL)
    with pytest.raises(TypeError, match=r"the path of a file, got None; pass a path such as 'report\.html'$"):
        full.to_html(None)
    full.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    tables, _, frame = full._repr_html_().partition("<details>")
    assert tables.strip() in page
    assert f'srcdoc="{escape(page)}"' in frame


def test_html_says_what_was_asked_of_which_inputs() -> None:
    options = {"backend": "torch", "skip": ["fc1"], "compile": True}
    html = te_transform.inspect(Block(), torch.zeros(2, 8), **options)._repr_html_()
    shown = parsed(html.partition("<details>")[0])
    assert "inputsx float32[2, 8]" in shown
    assert "optionsbackend='torch', skip=('fc1',), compile=True" in shown


def test_html_page_needs_nothing_else(tmp_path: Path) -> None:
    full = report(*FULL, model="<blink>GPT")
    full.to_html(tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert not re.search(r"https?:|src=|<link|@import|url\((?!#)", html)
    assert html.count("<script") == 3  # the page's own: data, layout, drawing
    assert "<blink>" not in html
    assert f"torch {metadata.version('torch')}" in html
    text = parsed(html)
    for which in ("before", "after"):  # without a script, the tables have all operations
        for line in full.graph_text(which).replace("l_x_", "x").splitlines()[:-1]:
            assert all(column in text for column in re.split(r"\s{2,}", line)), line
    fused = re.findall(r'data-operation="1-\d+"><span class="chip"[^>]*>\w+</span><pre>(\w+)', html)
    assert fused == ["h_0_mlp_layernorm_mlp", "h_1_linear"]


def test_a_pickled_report_has_a_page(tmp_path: Path) -> None:
    full, html = report(*FULL), tmp_path / "report.html"
    pickle.loads(pickle.dumps(full)).to_html(html)
    assert f"<h1>{escape(full.title)}</h1>" in html.read_text(encoding="utf-8")


def test_a_package_can_draw_reports_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, full, html = ModuleType("slides"), report(*FULL), tmp_path / "report.html"
    package.page, package.notebook = "slides of {.title}".format, "a slide of {.title}".format
    monkeypatch.setitem(sys.modules, "slides", package)
    monkeypatch.setattr(renderer, "_modules", [])
    with pytest.raises(RuntimeError, match=r"expected a registered renderer .*, got none; call .* print"):
        full.to_html(html)
    assert not html.exists()
    renderer.register_renderer("slides")
    full.to_html(html)
    assert html.read_text(encoding="utf-8") == f"slides of {full.title}"
    assert full._repr_html_() == f"a slide of {full.title}"


def test_graph_text_lists_every_operation() -> None:
    assert report().graph_text("before").splitlines() == [
        "l_x_      float32[2, 8]        input",
        "linear    float32[2, 16]  fc1  linear(l_x_, weight, bias)",
        "relu      float32[2, 16]       relu(linear)",
        "reshape   float32[2, 16]       relu.reshape(2, 16)",
        "linear_1  float32[2, 8]   fc2  linear(reshape, weight, bias)",
        "add       float32[2, 8]        add(l_x_, linear_1)",
        "output                         output((add))",
    ]
    assert report().graph_text().splitlines() == [
        "x                                               input",
        "h_0_mlp_layernorm_mlp  bfloat16[2, 8]  h.0.mlp  h.0.mlp.layernorm_mlp(x, weight)",
        "h_1_linear                             h.1      h.1.linear(h_0_mlp_layernorm_mlp, h.0.mlp.weight)",
        "output                                          output(h_1_linear)",
    ]


def test_other_graphs_than_before_and_after_raise() -> None:
    for method in (report().graph_text, report().to_dot, report().to_networkx):
        with pytest.raises(ValueError, match="expected which='before' or 'after', got 'middle'; choose one"):
            method("middle")


WEIGHTS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


def test_networkx_has_attributes_and_data_dependencies() -> None:
    drawn = report().to_networkx("before")
    data = {(one, other) for one, other in drawn.edges if drawn.nodes[one]["target"] not in WEIGHTS}
    assert data == {
        ("l_x_", "linear"), ("linear", "relu"), ("relu", "reshape"), ("reshape", "linear_1"),
        ("l_x_", "add"), ("linear_1", "add"), ("add", "output"),
    }  # fmt: skip
    expected = {
        "op": "call_function",
        "target": "linear",
        "path": "fc1",
        "shape": (2, 16),
        "dtype": "float32",
    }
    assert drawn.nodes["linear"] == expected
    read = {drawn.nodes[one]["target"] for one, other in drawn.edges if other == "linear"}
    assert read == {"L_x_", "fc1.weight", "fc1.bias"}

    rewritten = report().to_networkx()
    assert ("l_self_weight", "h_1_linear") in rewritten.edges
    assert rewritten.nodes["h_1_linear"]["shape"] is rewritten.nodes["h_1_linear"]["dtype"] is None


def test_dot_clusters_blocks_and_frames_fusions() -> None:
    lines = report().to_dot().splitlines()
    assert lines[0] == "digraph model {"
    assert lines[-1] == "}"
    assert "".join(lines).count("{") == "".join(lines).count("}")
    assert re.findall('subgraph cluster_. { label="(.*?)"', "\n".join(lines)) == ["h.0", "h.1"]
    boxes = {line.split('"')[1]: line for line in lines if "fillcolor" in line and "node [" not in line}
    mlp, linear = "h_0_mlp_layernorm_mlp", "h_1_linear"
    assert set(boxes) == {"x", mlp, linear, "output"}
    assert r'label="h.0.mlp.layernorm_mlp\nbfloat16[2, 8]"' in boxes[mlp]
    assert {name for name, line in boxes.items() if "penwidth" in line} == {mlp, linear}
    colors = [re.search('fillcolor="(.*?)"', boxes[name])[1] for name in ("x", mlp, linear)]
    assert colors[0] == "white"
    assert len(set(colors)) == 3
    edges = [line.strip() for line in lines if "->" in line]
    assert edges == [f'"x" -> "{mlp}";', f'"{mlp}" -> "{linear}";', f'"{linear}" -> "output";']


def test_strange_arguments_stay_short() -> None:
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    strange = fx.Graph()
    x = strange.placeholder("x")
    nested: list = []
    for _ in range(50):
        nested = [nested, "text\n" * 1000]
    arguments = (x, list(range(100_000)), nested, {"key": x}, slice(None, 3), 'a "quoted"\nline' * 100, 1, 2)
    call = strange.call_function(torch.add, arguments, {"out": [x] * 50})
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # PyTorch's, in some versions
        strange.call_method("view", (call, size, slice(size, None, 2)))
    call.meta["example_value"] = fake((3, size), torch.float32, env)
    before = len(env.guards)

    odd = report(after=strange, before=strange)
    lines = odd.graph_text().splitlines()
    assert len(lines) == 3
    assert all(len(line) < 200 for line in lines)
    assert "add(x, [0, 1, 2, 3, 4, 5, ...], [[[[...], " in lines[1]
    assert lines[2].endswith(f"add.view({size}, {size}::2)")
    assert odd.to_networkx().nodes["add"]["shape"] == (3, str(size))
    assert f"float32[3, {size}]" in odd.to_dot()
    assert len(env.guards) == before


def test_an_empty_graph_is_listed() -> None:
    empty = report(before=fx.Graph(), after=fx.Graph())
    assert empty.graph_text() == ""
    assert empty.to_dot().splitlines()[-1] == "}"
    assert len(empty.to_networkx()) == 0


def test_dot_quotes_what_it_is_given() -> None:
    quoted = fx.Graph()
    odd = quoted.create_node("call_module", 'say "x\\y"', name="odd")
    odd.meta["path"] = 'h"0'
    text = report(after=quoted).to_dot()
    assert r'label="say \"x\\y\""' in text
    assert r'label="h\"0"' in text


# How the forward was captured


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        scale = y.sum().item()
        return self.fc(y * scale)


def test_the_report_names_graph_breaks() -> None:
    graphs = captured(Broken(), torch.zeros(2, 8))
    first, second = explain_graphs(("", graph) for graph in graphs)
    assert first == (
        "the forward was captured as 2 graphs: the HTML page draws all of them, graph_text() returns the "
        "largest"
    )
    line = Broken.forward.__code__.co_firstlineno + 2
    assert second.startswith(
        f'test_report.py:{line} has "scale = y.sum().item()", which dynamo cannot capture'
    )
    step = "keep the value a tensor, or compute it before the forward and pass a Python number"
    assert second.endswith(f"): your own code runs there; {step}")


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return self.fc(y) if y.sum() > 0 else y


def test_names_a_branch_on_a_value() -> None:
    graphs = captured(Branch(), torch.zeros(2, 8))
    assert any("(Data-dependent branching)" in note for note in explain_graphs(("", g) for g in graphs))


def test_the_report_names_blocks_that_share_a_graph() -> None:
    (graph,) = captured(Block(), torch.zeros(2, 8))
    shared = [(f"h.{layer}", graph) for layer in range(32)]
    sentence = (
        "h.{0..31} share a graph; this report leaves out the code around them and the operations that read "
        "values from it"
    )
    assert list(explain_graphs(shared)) == [sentence]
    (other,) = captured(nn.Linear(8, 8), torch.zeros(2, 8))
    assert list(explain_graphs([*shared, ("head", other)])) == [
        "the forward was captured as 2 graphs: the HTML page draws all of them, graph_text() returns the "
        "largest",
        sentence,
    ]


def test_the_report_names_blocks_that_share_several_graphs_once() -> None:
    graphs = captured(Broken(), torch.zeros(2, 8))  # of a block that dynamo breaks in two
    _, shared, why = explain_graphs((f"h.{layer}", graph) for layer in range(2) for graph in graphs)
    assert shared.startswith("h.{0,1} share 2 graphs; this report leaves out the code around them")
    assert "scale = y.sum().item()" in why


def test_the_report_says_that_nothing_was_captured() -> None:
    assert list(explain_graphs([])) == ["the forward was not captured: your own code runs"]
    with torch._dynamo.config.patch(disable=True):
        (said,) = explain_graphs([])
    assert "dynamo is switched off (by TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE, " in said


def test_later_captures_are_reported() -> None:
    x = torch.zeros(2, 8)
    with torch.compiler.set_stance("force_eager"):
        converted = te_transform.convert(Block(), x)
        converted(x)
    assert "dynamo is switched off" in str(te_transform.report(converted)).replace("\n", " ")
    converted(x)
    report = te_transform.report(converted)
    assert sum(report.counts.values()) == len(te_transform.inspect(Block(), x).sites) > 0
    assert "was captured" not in str(report)


def test_one_graph_needs_no_words() -> None:
    (graph,) = captured(Block(), torch.zeros(2, 8))
    assert list(explain_graphs([("", graph)])) == []


def test_breaks_are_printed_as_notes_are() -> None:
    broken = replace(report(*FULL, notes=("one",)), breaks=("two",))
    assert str(broken).splitlines()[-2:] == ["note: one", "note: two"]
    assert "<li>two</li>" in broken._repr_html_()


class Dropping(nn.Module):
    """Drops layers at random, as BART does: in a loop dynamo cannot go on behind a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) > 1:
                continue
            x = layer(x)
        return x


def test_the_report_names_code_that_dynamo_cannot_capture() -> None:
    report = te_transform.inspect(Dropping(), torch.ones(2, 8))
    line = Dropping.forward.__code__.co_firstlineno + 2
    if torch.__version__ < (2, 13):  # where dynamo does not say which line it was
        code = f"dynamo cannot capture forward() at test_report.py:{line - 2} (Data-dependent branching)"
    else:
        code = f'test_report.py:{line} has "if torch.rand([]) > 1:", which dynamo cannot capture'
        code += " (Data-dependent branching)"
    assert report.breaks == (
        "the forward was captured as 2 graphs: the HTML page draws all of them, graph_text() returns the "
        "largest",
        f"{code}: your own code runs there; select between tensors with torch.where(), or pass the condition "
        "as a Python bool",
    )


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)) * mask.unsqueeze(-1)


class Backbone(nn.Module):
    """Its forward makes a mask only if it is not traced, as LongT5's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(x.shape[:-1])
        for layer in self.layers:
            x = layer(x, mask)
        return x


def test_a_forward_that_raises_when_it_is_traced_is_one_reason_with_advice() -> None:
    """Dynamo then traces the functions that the forward calls: the converted model's are not among them."""
    reasons = te_transform.inspect(nn.Sequential(Backbone(), nn.Linear(8, 8)), torch.ones(2, 8)).breaks
    line = Backbone.forward.__code__.co_firstlineno
    assert [reason for reason in reasons if "cannot capture" in reason] == [
        f"dynamo cannot capture forward() at test_report.py:{line} (Observed exception): your own code runs "
        "there; it raises only when dynamo traces it: pass every argument, such as attention_mask, because "
        "some forwards make a missing one only outside of a trace"
    ]


def test_a_reason_without_a_place_is_said_too() -> None:
    reasons = {"Some reason.\n  Hint: none": "forward() at model.py:7"}
    (only,) = explain_graphs([("", captured(Block(), torch.zeros(2, 8))[0])], reasons)
    assert only == "dynamo cannot capture forward() at model.py:7 (Some reason): your own code runs there"


class Layer(nn.Linear):
    def __init__(self, slope: float, bias: bool):
        super().__init__(8, 8, bias)
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(super().forward(x), self.slope)


class Layers(nn.Module):
    """Two layers that compute the same, one by another number, and one without a bias."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(slope, bias=slope != 0.3) for slope in (0.1, 0.1, 0.2, 0.3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_equal_blocks_are_one() -> None:
    graph = te_transform.inspect(Layers(), torch.ones(2, 8)).before
    found = blocks_of([Part(("",), graph, graph)])
    counts = {block.name: block.count for block in found}
    assert {"layers.{0,1}": 2, "layers.2": 1, "layers.3": 1}.items() <= counts.items()
    operations = [n for n in graph.nodes if n.op not in ("output", "placeholder")]
    for which in ("before", "after"):
        own = [(each, block) for block in found for each in getattr(block, which)]
        assert sum(block.count for each, block in own if each.kind in ("", "minor")) == len(operations)


def test_layers_inside_a_sequential_of_unlike_modules_are_blocks() -> None:
    model = nn.Sequential(Layers(), nn.Softmax(-1), Layer(0.1, bias=True))
    graph = te_transform.inspect(model, torch.ones(2, 8)).before
    counts = {block.name: block.count for block in blocks_of([Part(("",), graph, graph)])}
    assert counts == {"0.layers.{0,1}": 2, "0.layers.2": 1, "0.layers.3": 1, "1": 1, "2": 1}


class Stack(nn.Module):
    """Layers under checkpoints, which are captured one by one, and share a graph."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)  # what the layers read has a gradient, of the first as of the others
        self.layers = nn.ModuleList(Block() for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_layers_that_share_a_graph_are_drawn_by_their_names(tmp_path: Path) -> None:
    some = te_transform.inspect(Stack(), torch.ones(2, 8))
    assert [part.paths for part in some.parts] == [tuple(f"layers.{place}" for place in range(12))]
    some.to_html(tmp_path / "report.html")
    text = parsed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "layers.{0..11} \u00d7 12 " in text
    assert "inputsfloat32[2, 8]" in text.replace("(", "")  # of the model, not of a layer
    refused = replace(some, sites=(Outcome("linear", "layers.0.fc", "refused", ("it is odd",)),))
    (block,) = blocks_of(refused.parts, refused.refused)
    assert [(site.rule, site.path) for site in block.refused] == [("linear", "fc")]


def test_every_captured_graph_is_drawn_and_equal_ones_once() -> None:
    some = te_transform.inspect(Layers(), torch.ones(2, 8))
    one, other = Part(("encoder.0",), some.before, some.after), Part(("encoder.1",), some.before, some.after)
    alone = {block.name for block in blocks_of([one])}
    assert "encoder.0.layers.{0,1}" in alone
    found = {block.name: block.count for block in blocks_of([one, other])}
    assert found["encoder.{0,1}.layers.{0,1}"] == 4
    assert len(found) == len(alone)


@cache
def two_layers() -> Report:
    case = ALL["llama"]
    return te_transform.inspect(case.build(num_hidden_layers=2), case.sample(), backend="te")


def test_operations_that_compute_the_same_are_pairs() -> None:
    some = two_layers()
    (layers,) = (block for block in blocks_of(some.parts) if block.count > 1)
    pairs = {each.rule: each.pair for each in layers.after if each.rule}
    replaced = {
        rule: [each.title for each in layers.before if each.pair == pair and each.kind != "minor"]
        for rule, pair in pairs.items()
    }
    assert replaced["layernorm_mlp"] == ["rms_norm", "linear", "silu", "linear", "mul", "linear"]
    assert replaced["layernorm_linear"] == ["rms_norm", "linear", "linear", "linear"]
    assert replaced["attention"] == ["sdpa"]
    for operations in (layers.before, layers.after):
        for place, each in enumerate(operations):
            assert all(source < place for source in each.reads)


def test_a_block_names_the_blocks_that_it_reads() -> None:
    blocks = blocks_of(two_layers().parts)
    names = [block.name for block in blocks]
    assert names[0] == "model.embed_tokens"
    assert names.index("model.rotary_emb") < names.index("model.layers.{0,1}") < names.index("lm_head")
    layers = blocks[names.index("model.layers.{0,1}")]
    assert {"model.embed_tokens", "model.rotary_emb"} <= {names[source] for source in layers.sources}
    ports = {each.title: each.value for each in layers.before if each.kind == "port"}
    assert ports["inputs_embeds"] == "from model.embed_tokens, the layer before"
    assert ports["hidden_states"] == "to the next layer, lm_head"
    inputs = [each.title for block in blocks for each in block.before if each.kind == "input"]
    assert "input_ids" in inputs


def test_views_and_parts_of_merged_products_have_a_kind() -> None:
    (layers,) = (block for block in blocks_of(two_layers().parts) if block.count > 1)
    kinds = {each.title: each.kind for each in layers.after}
    assert kinds["join"] == kinds["columns"] == kinds["layernorm_linear"] == "merged"
    assert kinds["reshape"] == kinds["transpose"] == "minor"
    assert kinds["add"] == ""


def test_the_overview_has_the_numbers_of_the_report() -> None:
    model, inputs = llama_of_8b()
    some = te_transform.inspect(model.train(), inputs, backend="te", recipe="fp8-delayed")
    before, after = some.overview.seconds
    unfused, taken = (duration(sum(classes.values())) for classes in (before, after))
    told = f"a call is predicted to take {taken} on an H100, {unfused} unfused"
    assert any(note.startswith(told) for note in some.notes)
    unfused, step = some.overview.memory
    assert step == some.memory
    assert sum(step.classes.values()) == step.peak < unfused.peak == sum(unfused.classes.values())
    text = parsed(some._repr_html_().partition("<iframe")[0] + "</details>")
    for title in ("Time of a call", "Memory of a training step", "Operations"):
        assert title in text
    assert duration(sum(after.values())) in text


def test_a_report_without_predictions_counts_operations() -> None:
    found = te_transform.inspect(Layers(), torch.ones(2, 8), backend="torch")
    text = parsed(found._repr_html_().partition("<iframe")[0] + "</details>")
    assert found.overview.unknown.startswith("predicted only for")
    assert "Time of a call" not in text
    assert "Operations" in text


@pytest.mark.parametrize("rule", [*(rule.name for rule in te_transform.PIPELINE), "mine", "yours"])
def test_a_rule_has_one_color_that_is_not_red(rule: str) -> None:
    assert 40 <= hue_of(rule) <= 345
    chips = {re.search(r"--hue: \d+", report(*fused(rule, *paths))._repr_html_())[0] for paths in ("a", "ab")}
    assert chips == {f"--hue: {hue_of(rule)}"}


def test_the_page_of_a_deep_model_is_small() -> None:
    models = [nn.Sequential(*(Block() for _ in range(depth))) for depth in (3, 12)]
    found = [te_transform.inspect(model, torch.zeros(2, 8), backend="torch") for model in models]
    sizes = [len(renderer.renderer().page(each)) for each in found]
    assert sizes[1] < sizes[0] + 9 * 100 < 150_000  # a line for each layer


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, *, scales: dict[str, Tensor], **others: Tensor) -> Tensor:
        return self.fc(hidden) * scales["low"] + others["bias"]


def takes_anything(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))


class Wrapped(Scaled):
    forward = takes_anything(Scaled.forward)


@pytest.mark.parametrize("kind", [Scaled, Wrapped])
def test_the_page_names_arguments_as_the_forward_does(kind: type[nn.Module]) -> None:
    x, low, bias = torch.ones(2, 8), torch.ones(8), torch.ones(8)
    some = te_transform.inspect(kind(), [{"hidden": x, "scales": {"low": low}, "bias": bias}])
    told = "\n".join(detail(node) for node in some.before.nodes)
    for call in ("linear(hidden, weight, bias)", "mul(linear_1, scales['low'])", "add(mul, bias)"):
        assert call in told
    some = te_transform.inspect(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), x)
    assert "linear(input, weight, bias)" in "\n".join(detail(node) for node in some.before.nodes)


def test_the_page_takes_any_text_as_the_key_of_an_argument() -> None:
    class Keyed(Scaled):
        def forward(self, scales: dict[str, Tensor]) -> Tensor:
            return self.fc(scales["low\x01"])

    some = te_transform.inspect(Keyed(), [({"low\x01": torch.ones(2, 8)},)])
    told = "\n".join(detail(node) for node in some.before.nodes)
    assert r"linear(scales['low\x01'], weight, bias)" in told


def test_inactive_sites_count_as_what_they_replace() -> None:
    case = ALL["gpt2"]
    some = te_transform.inspect(case.build(), case.sample(), backend="torch")
    inactive = {site.inactive for site in some.fused} - {""}
    blocks = blocks_of(some.parts)
    for block in blocks:
        active = {each.pair for each in block.after if each.rule and not each.is_inactive}
        sides = operations_of_call(block)
        before, after = (sorted(each.pair for each in side if each.pair not in active) for side in sides)
        assert before == after
    texts = {each.detail.rpartition("inactive: ")[2] for b in blocks for each in b.after if each.is_inactive}
    assert texts == inactive


def test_a_block_has_its_refused_sites(tmp_path: Path) -> None:
    some = te_transform.inspect(Layers(), torch.ones(2, 8))
    sites = [Outcome("linear", f"layers.{place}.fc", "refused", ("it is <odd>",)) for place in (1, 2)]
    found = {block.name: block.refused for block in blocks_of(some.parts, sites)}
    assert found["layers.0"] == ()  # equal to layers.1 otherwise
    assert [(site.rule, site.path) for site in found["layers.1"]] == [("linear", "fc")]
    replace(some, sites=tuple(sites)).to_html(tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.count("refused: linear at <code>fc</code></summary><ul><li>it is &lt;odd&gt;</li></ul>") == 2


def test_refusals_that_cost_most_come_first() -> None:
    costs = {"small": 1e-6, "large": 2e-3}
    sites = [
        Outcome(name, "fc", "refused", ("why",), weights=9, seconds=2 * cost, fused_seconds=cost)
        for name, cost in costs.items()
    ]
    sites.insert(0, Outcome("unknown", "fc", "refused", ("why",), weights=99))
    lines = str(replace(report(), sites=tuple(sites))).splitlines()
    assert [line.split()[:4] for line in lines if line.endswith("fc  x1")] == [
        ["large", "1", "2", "ms"],
        ["small", "1", "1", "us"],
        ["unknown", "1", "fc", "x1"],
    ]


def test_a_fused_op_names_each_captured_call_once() -> None:
    case = ALL["llama"]
    report = te_transform.inspect(case.build(), case.sample(), backend="torch")
    norm = ("pow", "mean", "add", "rsqrt", "mul", "mul")
    for node in report.after.nodes:
        if node.meta.get("fused") == "layernorm_mlp":
            assert node.meta["spelled"] == (*norm, "linear", "linear", "silu", "mul", "linear")
            assert f"captured as: {', '.join(node.meta['spelled'])}" in detail(node)
