"""compile="auto": the ways to run a model are timed, the fastest stays. Times are made up, or a CPU's."""

import copy
import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import te_transform
from te_transform import OptionError
from te_transform.convert import te_transform as backend
from te_transform.execution import timing
from te_transform.execution.attach import runner_of
from te_transform.graph.inputs import Inputs
from te_transform.inspect import plans_of
from te_transform.pipeline import PIPELINE
from te_transform.plan import cost, options
from tests import compilers
from tests.attacks import Attends, Pair, X
from tests.bitwise import untouched
from tests.conversions import ALL
from tests.executors.helpers import Deep
from tests.models.llama import llama_of_8b
from tests.ranks import spawn
from tests.zoo import seeded

WAYS = ("as it is", "torch", "torch, compiled", "torch, as CUDA graphs", "torch, compiled, as CUDA graphs")


pytestmark = pytest.mark.usefixtures("timings_file")


def way_of(model: nn.Module) -> str:
    """The way that a model runs in at the moment."""
    converted = runner_of(model)
    if converted is None or converted.options.run_original:
        return "as it is"
    chosen = converted.options
    words = ("torch", "compiled" * bool(chosen.compile), "as CUDA graphs" * chosen.graphs)
    return ", ".join(word for word in words if word)


class Times(dict):
    """Seconds by way; 1 where there are none, an error where they are 0. `asked` are the ways, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __call__(self, model: nn.Module, sample: object) -> float:
        self.asked.append(way_of(model))
        if self.get(way_of(model)) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return self.get(way_of(model), 1.0)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Replace the measured times by made-up ones."""
    made_up = Times()
    monkeypatch.setattr(timing, "seconds_of", made_up)
    return made_up


def convert(model: nn.Module, **how: object) -> nn.Module:
    return te_transform.convert(model, X, compile="auto", **{"verify": False} | how)


@pytest.mark.usefixtures("compilations", "cuda_graphs")
@pytest.mark.parametrize("best", ["as it is", "torch", "torch, compiled, as CUDA graphs"])
def test_the_fastest_stays(best: str, times: Times) -> None:
    model = seeded(Attends)
    times[best] = 0.5
    with untouched(model):
        converted = convert(model)
    assert way_of(converted) == best
    assert sorted(times.asked) == sorted(WAYS)
    report = te_transform.report(converted)
    assert report.chosen == best
    assert [each.name for each in report.timings] == [*WAYS]
    assert f"note: {best}: 500 ms, chosen" in str(report)
    pair = Pair(model, converted, X)
    for _ in range(4):  # the last of them replayed, where it is
        pair.agree()


def test_the_simpler_one_where_nothing_is_clearly_faster(times: Times) -> None:
    times.update({"as it is": 0.502, "torch": 0.5, "torch, compiled": 0.498})
    assert way_of(convert(seeded(Attends))) == "as it is"
    assert runner_of(copy.deepcopy(convert(seeded(Attends)))).options.run_original


def test_auto_tries_no_cuda_graphs_without_a_gpu(times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "cuda_graphs", lambda: False)
    convert(seeded(Attends))
    assert times.asked == ["as it is", "torch, compiled", "torch"]


@pytest.mark.usefixtures("cuda_graphs")
def test_a_way_that_fails_is_said_and_left(times: Times) -> None:
    times.update(dict.fromkeys(WAYS[1:], 0.0))
    converted = convert(seeded(Attends))
    assert way_of(converted) == "as it is"
    assert "note: torch: OutOfMemoryError: CUDA out of memory." in str(te_transform.report(converted))


def test_a_model_is_converted_if_all_settings_fail(times: Times) -> None:
    times.update(dict.fromkeys(WAYS, 0.0))
    assert way_of(convert(seeded(Attends))) == "torch"
    times.update(dict.fromkeys(WAYS, 1.0))  # failures are not kept: memory may be free again
    assert way_of(convert(seeded(Attends))) == "as it is"


def test_time_is_limited_and_the_promising_come_first(times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SECONDS_IN_ALL", -1)
    converted = convert(seeded(Attends), inplace=True)
    assert times.asked == []
    assert way_of(converted) == "torch"
    assert all("not timed" in each.why for each in te_transform.report(converted).timings)


def test_timings_are_kept(times: Times, timings_file: Path) -> None:
    times["torch"] = 0.5
    model = seeded(Attends)
    convert(model)
    before = len(times.asked)
    assert way_of(convert(copy.deepcopy(model))) == "torch"
    assert len(times.asked) == before
    convert(model.eval())  # another mode
    assert len(times.asked) == 2 * before
    te_transform.convert(model, X[:1], compile="auto")  # another size
    convert(model, skip="attention")
    assert len(times.asked) == 4 * before
    assert len(json.loads(timings_file.read_text())) == 4


def chosen_by_a_rank() -> list[str]:
    """Return what a rank chooses whose own fastest mode is another one on each of two ranks.

    The second time, one mode fails on the first rank.
    """
    is_first = torch.distributed.get_rank() == 0
    own = {"torch": 0.2, "torch, compiled": 0.9} if is_first else {"torch": 0.8, "torch, compiled": 0.1}
    timing.file = lambda: Path(os.devnull)
    timing.seconds_of = made_up = Times()
    compilers.install()
    chosen = []
    for failing in ({}, {"as it is": 0.0} if is_first else {}):
        made_up.update(own | failing)
        chosen.append(te_transform.report(convert(seeded(Attends))).chosen)
    return chosen


@pytest.mark.xdist_group("distributed")
def test_ranks_choose_what_is_fastest_on_the_slowest_rank(tmp_path: Path) -> None:
    assert spawn(chosen_by_a_rank, 2, tmp_path) == [["torch", "torch"]] * 2


def test_keys_of_timings_are_equal_in_another_process() -> None:
    chosen = options.Options.of(seeded(Attends), te_transform.PIPELINE, compile="auto")
    told = timing.told_of(seeded(Attends), Inputs((X,)), vars(chosen))
    assert "merge_siblings" in told
    assert not re.search("0x[0-9a-f]{6}", told)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', "1"])
def test_a_file_that_is_something_else(timings_file: Path, content: str) -> None:
    timings_file.parent.mkdir()
    timings_file.write_text(content)
    assert timing.kept_timings("key") == []
    timing.keep("key", [timing.Timing("torch", 0.5)])
    assert timing.kept_timings("key") == [timing.Timing("torch", 0.5)]


def test_timings_need_no_writable_folder(timings_file: Path) -> None:
    timings_file.parent.write_text("a file in its place")
    timing.keep("key", [timing.Timing("torch", 0.5)])
    assert timing.kept_timings("key") == []


@pytest.mark.usefixtures("compilations")
@pytest.mark.integration
@pytest.mark.parametrize("training", [True, False])
def test_timing_changes_nothing(training: bool) -> None:
    """On this CPU, for real; the copy too is as it was, but for what conversion does."""
    model = seeded(Deep).train(training)
    model.p = 0.5
    state = torch.get_rng_state()
    with untouched(model):
        converted = convert(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert converted.calls == 0
    assert converted.training is training
    assert all(parameter.grad is None for parameter in converted.parameters())
    timings = te_transform.report(converted).timings
    assert all(0 < each.seconds < 60 for each in timings), timings
    assert tuple(each.name for each in timings) == WAYS[: 5 if torch.cuda.is_available() else 3]


def test_a_copy_that_reads_the_originals_parameters_is_refused(times: Times) -> None:
    model = seeded(Attends)
    model.attention.forward = lambda x, own=model.attention: type(own).forward(own, x)
    with pytest.raises(te_transform.ModelError, match="inplace=True"):
        convert(model)


def test_bad_input() -> None:
    with pytest.raises(OptionError, match="which times CUDA graphs by itself"):
        convert(seeded(Attends), graphs=True)
    with pytest.raises(OptionError, match="which times a whole model"):
        backend(fx.GraphModule({}, fx.Graph()), [], options={"compile": "auto"})
    with pytest.raises(te_transform.InputError, match="of the sizes that the model will run on"):
        te_transform.convert(ALL["llama"].build(), compile="auto")
    assert te_transform.inspect(seeded(Attends), X, compile="auto").fused


def predicted(model: nn.Module, inputs: dict[str, torch.Tensor], **options: object) -> dict[str, float | str]:
    """Seconds by way, or the reason why there are none."""
    found = te_transform.inspect(model, inputs, compile="auto", **options)
    return {each.name: each.why if each.seconds is None else each.seconds for each in found.timings}


@pytest.mark.integration  # test_cli.py prints them
def test_inspect_predicts_the_times() -> None:
    model, inputs = llama_of_8b(layers=4)
    asked = {"backend": "te", "recipe": "fp8-delayed"}
    report = te_transform.inspect(model.train(), inputs, compile="auto", **asked)
    found = {each.name: each.seconds for each in report.timings}
    assert [*found] == [*options.Options.of(model, PIPELINE, planning=True, **asked).ways(planning=True)]
    # measured for 8 layers, ms: 217 as it is, 162 and 164 in bf16, 117 and 116 in FP8
    assert found["as it is"] == pytest.approx(0.108, rel=0.25)
    assert found["te, compiled"] == pytest.approx(0.082, rel=0.25)
    assert found["te, fp8-delayed, compiled"] == pytest.approx(0.058, rel=0.25)
    assert "fp8-delayed" in report.chosen
    assert cost.NOTE in report.notes
    assert re.search(r"te, compiled: \d+\.\d ms, predicted", str(report))
    in_evaluation = predicted(model.eval(), inputs, backend="te")
    assert 0.2 < in_evaluation["te, compiled"] / found["te, compiled"] < 0.5


@pytest.mark.parametrize("recipe", [pytest.param(None, marks=pytest.mark.integration), "fp8-delayed"])
def test_places_have_their_parts_of_what_is_predicted(recipe: str | None) -> None:
    model, inputs = llama_of_8b(layers=2)
    report = te_transform.inspect(model.train(), inputs, backend="te", recipe=recipe, compile="auto")
    whole = {each.name: each.seconds for each in report.timings}
    parts = [site for site in report.sites if site.seconds is not None]
    assert {site.rule for site in report.sites} - {site.rule for site in parts} == {"merge_siblings"}
    # the residuals, the embedding and the last norms of a call are no place's
    fused = "te" if recipe is None else "te, fp8-delayed"
    assert 0.93 < sum(site.seconds for site in parts) / whole["as it is"] < 1
    assert 0.93 < sum(site.fused_seconds for site in parts) / whole[fused] < 1
    assert sum(site.kept for site in parts) == report.memory.kept


@pytest.mark.parametrize("layers", [2, 9])
def test_inspect_predicts_a_call(layers: int) -> None:
    model, inputs = llama_of_8b(layers=layers)
    (told,) = (note for note in te_transform.inspect(model, inputs, backend="te").notes if "unfused" in note)
    number = r"[\d.]+ ms"
    assert re.fullmatch(
        rf"a call is predicted to take {number} on an H100, {number} unfused \(forward and backward\)", told
    )


class Dropped(nn.Module):
    """A gated MLP that no fused one is, with a dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(1024), nn.Linear(4096, 1024)
        self.gate, self.up = nn.Linear(1024, 4096), nn.Linear(1024, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.down(nn.functional.dropout(nn.functional.silu(self.gate(x)) * self.up(x), 0.1))


@pytest.mark.parametrize("tokens", [32768, 512])
def test_a_refusal_costs_what_the_model_predicts_that_fusing_saves(tokens: int) -> None:
    with torch.device("meta"):
        model, x = Dropped().to(torch.bfloat16), torch.zeros(tokens, 1024, dtype=torch.bfloat16)
    report = te_transform.inspect(model, x, backend="te")
    (mlp,) = (site for site in report.refused if site.rule == "layernorm_mlp")
    moved = 2 * tokens * (2 * 1024 + 7 * 4096)  # by the norm, silu, mul and dropout, in bytes
    less = cost.TIMES["bytes"] - cost.TIMES["bytes, fused"]
    assert mlp.saved == pytest.approx(3 * moved * less if tokens == 32768 else 0)  # few run as captured
    assert not mlp.saved or timing.duration(mlp.saved) in str(report)
    assert cost.NOTE in report.notes


@pytest.mark.parametrize(("rows", "tokens"), [(50257, 12288), (50257, 128), (99, 12288)])
def test_a_head_of_odd_rows_costs_what_padding_it_saves(rows: int, tokens: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(768, rows)).to(torch.bfloat16)
        x = torch.zeros(tokens, 768, dtype=torch.bfloat16)
    report = te_transform.inspect(model, x, backend="te")
    heads = [site for site in report.refused if site.rule == "pad_vocabulary"]
    assert len(heads) == (rows > 99)
    times = cost.TIMES["product, odd"] - cost.TIMES["product"]
    saved = 3 * 2 * tokens * 768 * rows * times if tokens > 128 else 0  # few tokens gain nothing
    assert all(site.saved == pytest.approx(saved) for site in heads)
    if tokens > 128:  # of which the GPU sets the pace
        ways = ({"pad_vocabulary": padded} for padded in (False, True))
        before, after = (predicted(model, x, backend="te", **way)["te"] for way in ways)
        assert before - after == pytest.approx(saved if rows > 99 else 0)


def few(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Models of so few tokens that they run as they were captured, in no memory."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.device("meta"):
        ids = torch.zeros(2, 512, dtype=torch.int64)
        if kind == "bert":
            model = BertForMaskedLM(BertConfig(intermediate_size=1024, attn_implementation="sdpa", **sizes))
        else:
            model = GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=1, n_head=4, use_cache=False))
        return model.to(torch.bfloat16), {"input_ids": ids, "labels": ids}


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_calls_of_few_tokens_are_predicted_as_they_run(kind: str) -> None:
    model, inputs = few(kind)
    found = predicted(model.train(), inputs, backend="te")
    if kind == "bert":  # has each operation as it was, so the model's own code may run
        assert found["te"] == found["as it is"]
    else:  # an activation of eight operations is one
        assert found["te"] < 0.9 * found["as it is"]


def test_times_that_inspect_cannot_predict_have_a_reason() -> None:
    in_fp32 = predicted(seeded(Attends), X, backend="te")
    why = "predicted only for 16-bit products (te-transform: --dtype bfloat16)"
    assert {*in_fp32.values()} == {why}
    told = te_transform.inspect(seeded(Attends), X, backend="te").notes
    assert f"no time is predicted for a call, times are {why}" in told
    unknown = te_transform.inspect(seeded(Attends), X, compile="auto")
    assert cost.NOTE not in unknown.notes
    assert {site.seconds for site in unknown.sites} == {None}
    found = predicted(seeded(Attends).bfloat16(), X.bfloat16(), backend="torch")
    assert isinstance(found.pop("as it is"), float)
    assert {*found.values()} == {"predicted for backend='te' alone"}
    found = predicted(*llama_of_8b(), backend="te", recipe="fp8-current")
    assert found["te, fp8-current"] == "predicted for recipe='fp8-delayed' alone"
    assert isinstance(found["te"], float)


def test_predictions_count_what_is_computed() -> None:
    class Written(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = x @ x.transpose(-2, -1)
            return nn.functional.linear(scores.relu() @ x, self.weight)

    model = Written()
    model.weight = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
    plans, _ = plans_of(model, torch.zeros(2, 3, 4, dtype=torch.bfloat16), backend="te")
    ((_, work),) = cost.works_of(plans, cost.ORIGINAL, None, training=False)
    assert work.products == 2 * (2 * 3 * 3 * 4 + 2 * 3 * 4 * 3 + 2 * 3 * 6 * 4)
    assert work.bytes == 2 * (2 * 3 * 3) * 2  # the relu's
    assert (work.operations, work.forwards, work.backwards) == (4, 1, 0)
    ((_, twice),) = cost.works_of(plans, cost.ORIGINAL, None, training=True)
    assert (twice.products, twice.backwards) == (3 * work.products, 1)
