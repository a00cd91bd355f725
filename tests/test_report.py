"""The report says what was done, where, and why not: in words, in tables, as graphs."""

import re
import warnings
from collections.abc import Iterable
from dataclasses import FrozenInstanceError
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata

from te_transform.report import ExpectationError, Report, collapse, gather
from te_transform.rule import Outcome

GELU = "the activation is the exact (erf) GELU, LayerNormMLP has tanh: allow approximate=True"
SHAPE = "the weight is [64, 3] and <frozen>, one of [64, 64] & trained is needed"


def recorded(shape: Iterable, dtype: torch.dtype) -> TensorMetadata:
    return TensorMetadata(torch.Size(shape), dtype, False, (), None, False, {})


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


def graph() -> fx.GraphModule:
    """Block's graph with shapes and module paths, as a recording has them."""
    traced = fx.symbolic_trace(Block())
    ShapeProp(traced).propagate(torch.zeros(2, 8))
    paths = {"fc1": "h.0.fc1", "fc2": "h.0.fc2", "relu": "h.0", "reshape": "h.0", "add": "h.1"}
    for node in traced.graph.nodes:
        node.meta["path"] = paths.get(node.name, "")
    return traced


def after() -> fx.Graph:
    """A graph on its own that calls a fused module which exists nowhere."""
    result = fx.Graph()
    x = result.placeholder("x")
    weight = result.create_node("get_attr", "h.0.mlp.fused.weight")
    call = result.create_node("call_module", "h.0.mlp.fused", (x,))
    merged = result.call_function(torch.add, (call, weight))
    call.meta.update(path="h.0.mlp", tensor_meta=recorded((2, 8), torch.bfloat16))
    merged.meta.update(path="h.1", merged="h.1.q.fused")
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
        "rule               fused   where",
        "────────────────────────────────────────────────────────────────",
        "layernorm_mlp         22   model.layers.{0..21}.mlp  x22",
        "layernorm_linear      25   lm_head  x1",
        "                           model.layers.{0..23}.attn.c_attn  x24",
        "",
        "rule            refused   where, and why not",
        "──────────────────────────────────────────────────────────────────────────────────────────────────────────────",
        "layernorm_mlp         2   model.layers.{22,23}.mlp  x2",
        "                            the activation is the exact (erf) GELU, LayerNormMLP has tanh: allow",
        "                            approximate=True",
        "                            the weight is [64, 3] and <frozen>, one of [64, 64] & trained is needed",
        "linear                1   (the model itself)  x1",
        "                            the weight is [64, 3] and <frozen>, one of [64, 64] & trained is needed",
        "",
        "note: backend 'torch', because [te] is not installed",
    ]


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
        ((), "GPT: nothing was fused and nothing refused, no rule found a place in this model"),
        (fused("linear", "fc"), "GPT: 1 site fused, 0 sites refused"),
        (refused("linear", "fc"), "GPT: 0 sites fused, 1 site refused"),
    ],
)
def test_says_in_words_what_happened(sites: list[Outcome], words: str) -> None:
    some = report(*sites)
    assert str(some).splitlines()[0] == words
    assert words in some._repr_html_()
    assert ("<table" in some._repr_html_()) == bool(sites)


def test_rich_shows_brackets_as_they_are() -> None:
    console = Console(width=200, force_terminal=True, color_system="truecolor", force_jupyter=False)
    with console.capture() as capture:
        console.print(report(*FULL, notes=("[bold]x",)))
    assert SHAPE in capture.get()
    assert "[bold]x" in capture.get()
    assert "\x1b[32mlayernorm_mlp" in capture.get()


def test_expect_is_silent_when_it_holds() -> None:
    report(*FULL).expect(layernorm_mlp=22, layernorm_linear=25, linear=0, no_such_rule=0)
    report().expect()


def test_expect_shows_the_difference() -> None:
    with pytest.raises(ExpectationError) as failure:
        report(*FULL).expect(layernorm_mlp=24, layernorm_linear=25, linear=1, layernorm_mpl=24)
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
        "  layernorm_mpl: expected 24, found 0",
        "    no place resembles its pattern, or no such rule was run "
        "(in this report: layernorm_mlp, layernorm_linear, linear)",
    ]
    with pytest.raises(ExpectationError, match=r"\(in this report: none\)"):
        report().expect(linear=1)


class _Balanced(HTMLParser):
    """Collects the text, and fails on tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br"):
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
    assert "<code>model.layers.{0..21}.mlp</code> x22" in html
    assert "the weight is [64, 3] and &lt;frozen&gt;, one of [64, 64] &amp; trained is needed" in html
    assert "<li>it&#x27;s &lt;te&gt; &amp; more</li>" in html
    assert "<frozen>" not in html
    assert "<te>" not in html
    assert f"(the model itself) x1{SHAPE}" in parsed(html)


def test_html_page_needs_nothing_else(tmp_path: Path) -> None:
    full = report(*FULL, model="<b>GPT")
    full.to_html(tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert not re.search(r"https?:|src=|<script|<link", html)
    assert "<b>" not in html
    assert full._repr_html_() in html
    text = parsed(html)
    for which in ("before", "after"):
        assert f"the graph {which}" in text
        assert full.graph_text(which) in text
    marked = re.findall("<mark>(.*?)</mark>", html)
    assert [line.split()[0] for line in marked] == ["h_0_mlp_fused", "add"]


def test_graph_text_lists_every_node() -> None:
    assert report().graph_text("before").splitlines() == [
        "x        float32[2, 8]            input",
        "fc1      float32[2, 16]  h.0.fc1  fc1(x)",
        "relu     float32[2, 16]  h.0      relu(fc1)",
        "reshape  float32[2, 16]  h.0      relu.reshape(2, 16)",
        "fc2      float32[2, 8]   h.0.fc2  fc2(reshape)",
        "add      float32[2, 8]   h.1      add(x, fc2)",
        "output   float32[2, 8]            output(add)",
    ]
    assert report().graph_text().splitlines() == [
        "x                                              input",
        "h_0_mlp_fused_weight                           the model's h.0.mlp.fused.weight",
        "h_0_mlp_fused         bfloat16[2, 8]  h.0.mlp  h.0.mlp.fused(x)",
        "add                                   h.1      add(h_0_mlp_fused, h_0_mlp_fused_weight)",
        "output                                         output(add)",
    ]


def test_which_is_before_or_after() -> None:
    for method in (report().graph_text, report().to_dot, report().to_networkx):
        with pytest.raises(ValueError, match="which is 'middle', 'before' or 'after' is needed"):
            method("middle")


def test_networkx_has_attributes_and_data_dependencies() -> None:
    drawn = report().to_networkx("before")
    assert set(drawn.edges) == {
        ("x", "fc1"), ("fc1", "relu"), ("relu", "reshape"), ("reshape", "fc2"),
        ("x", "add"), ("fc2", "add"), ("add", "output"),
    }  # fmt: skip
    expected = {"op": "call_module", "target": "fc1", "path": "h.0.fc1", "shape": (2, 16), "dtype": "float32"}
    assert drawn.nodes["fc1"] == expected
    assert drawn.nodes["relu"]["target"] == "relu"

    rewritten = report().to_networkx()
    assert ("h_0_mlp_fused_weight", "add") in rewritten.edges
    assert rewritten.nodes["add"]["shape"] is rewritten.nodes["add"]["dtype"] is None


def test_dot_clusters_blocks_and_frames_fusions() -> None:
    lines = report().to_dot().splitlines()
    assert lines[0] == "digraph model {"
    assert lines[-1] == "}"
    assert "".join(lines).count("{") == "".join(lines).count("}")
    assert re.findall('subgraph cluster_. { label="(.*?)"', "\n".join(lines)) == ["h.0", "h.1"]
    boxes = {line.split('"')[1]: line for line in lines if "fillcolor" in line and "node [" not in line}
    assert set(boxes) == {"x", "h_0_mlp_fused", "add", "output"}
    assert r'label="h.0.mlp.fused\nbfloat16[2, 8]"' in boxes["h_0_mlp_fused"]
    assert {name for name, line in boxes.items() if "penwidth" in line} == {"h_0_mlp_fused", "add"}
    colours = [re.search('fillcolor="(.*?)"', boxes[name])[1] for name in ("x", "h_0_mlp_fused", "add")]
    assert colours[0] == "white"
    assert len(set(colours)) == 3
    edges = [line.strip() for line in lines if "->" in line]
    assert edges == ['"x" -> "h_0_mlp_fused";', '"h_0_mlp_fused" -> "add";', '"add" -> "output";']


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
    call.meta["tensor_meta"] = recorded((3, size), torch.float32)
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
    quoted.create_node("get_attr", 'a"b', name="a")
    odd = quoted.create_node("call_module", 'say "x\\y"', name="odd")
    odd.meta["path"] = 'h"0'
    text = report(after=quoted).to_dot()
    assert r'label="say \"x\\y\""' in text
    assert r'label="h\"0"' in text
