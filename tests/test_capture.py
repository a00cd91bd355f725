"""Captures of converted models: whole, by blocks, in pieces, or none; and the code that then runs."""

import copy
import functools
import gc
import io
import logging
import pickle
import random
import sys
import threading
import tomllib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.variables.tensor import TensorVariable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform.backends import joined
from te_transform.execution.attach import runner_of
from te_transform.execution.runner import Runner
from te_transform.graph import capture, questions
from te_transform.graph.capture import SETTINGS
from te_transform.report.report import Report
from tests.attacks import Block, Loops, Pair, X, call, odd, with_input_gradient
from tests.conversions import calls, logged
from tests.models.tiny import WIDTH, Tiny
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

front_door = import_module("te_transform.convert")  # the package's `convert` is the function
backend = front_door.te_transform

LONGER = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(1))


def linears(model: nn.Module, *args: Any, training: bool = True) -> int:
    """Count the linears that run fused in a call."""
    with calls(model) as found, torch.set_grad_enabled(training):
        model.train(training)(*args)
    return found["linear"]


def graphs(model: nn.Module) -> int:
    return len(runner_of(model).graphs)


# Whole, or block by block


def test_a_model_is_one_graph_for_training_and_one_for_evaluation() -> None:
    pair = Pair.of(seeded(Tiny, 2))
    model = pair.converted
    assert graphs(model) == 1
    for expected, training in ((1, True), (2, False), (2, True), (2, False)):
        assert linears(model, X, training=training) == 2 * 6 + 1
        assert graphs(model) == expected
    pair.agree()


def test_sizes_that_vary_share_a_graph() -> None:
    pair = Pair.of(Tiny)
    for length in (3, 4, 6, 9):
        pair.x = LONGER[:, :1].expand(3, length, WIDTH).contiguous()
        pair.agree()
    assert graphs(pair.converted) == 2


class Sized(nn.Module):
    """Asks what a norm gives for its sizes."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        batch, length, _ = y.size()
        return self.linear(y).sum(1) / (batch * length)


def test_a_norm_whose_sizes_are_asked_for_is_fused_at_sizes_that_vary() -> None:
    pair = Pair.of(Sized)
    for length in (3, 4):
        pair.x = torch.randn(2, length, WIDTH)
        pair.agree()
    outcomes = [outcome for graph in runner_of(pair.converted).graphs for outcome in graph.plan.outcomes]
    assert {(outcome.rule, outcome.status) for outcome in outcomes} == {("layernorm_linear", "fused")}
    assert graphs(pair.converted) == 2


@pytest.mark.parametrize("verify", [True, pytest.param(False, marks=pytest.mark.integration)])
def test_a_deep_model_is_captured_once_and_its_report_stays(verify: bool) -> None:
    layers = 9
    pair = Pair.of(seeded(Tiny, layers), verify=verify)
    planned, report = te_transform.inspect(pair.original, X), te_transform.report(pair.converted)
    assert report.counts["merge_siblings"] == report.counts["layernorm_mlp"] == layers
    assert not report.breaks
    other = (copy.deepcopy if verify else lambda model: pickle.loads(pickle.dumps(model)))(pair.converted)
    assert linears(pair.converted, X) == 6 * layers + 1  # with the head
    assert graphs(pair.converted) == 1
    pair.agree(with_input_gradient)
    other(X)
    for found in (planned, te_transform.report(pair.converted), te_transform.report(other)):
        assert found.counts == report.counts
        assert [site.path for site in found.sites] == [site.path for site in report.sites]


def assert_laid(model: nn.Module) -> None:
    for block in model.blocks:
        weights = [getattr(block.attention, f"{name}_proj").weight for name in "qkv"]
        assert [w.data_ptr() + w.nbytes for w in weights[:2]] == [w.data_ptr() for w in weights[1:]]


def test_parameters_of_a_deep_model_lie_next_to_each_other() -> None:
    assert_laid(te_transform.convert(seeded(Tiny, 9), X, verify=False))


class InPieces(Tiny):
    """A layer may be left out, which dynamo cannot know beforehand."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand([]) > 1:
                continue
            x = block(x)
        return self.head(self.norm(x))


def test_parameters_of_a_model_in_pieces_lie_next_to_each_other() -> None:
    """An exception ends a graph. Its frames hold the tensors that the call's backward would read."""
    model = te_transform.convert(seeded(InPieces, 2), X)
    assert te_transform.report(model).breaks
    assert_laid(model)


def test_parameters_stay_where_they_are_once_a_cuda_graph_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = te_transform.convert(seeded(Tiny), X)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    model(X)
    with monkeypatch.context() as patch:
        patch.setattr(joined, "recorded", lambda: True)
        model(X)
    for _ in range(2):
        model(X)
    assert places == [parameter.data_ptr() for parameter in model.parameters()]


class Checkpointed(nn.Module):
    """Its blocks are recomputed, if it is told so."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


def test_a_model_that_begins_to_recompute_is_captured_by_blocks() -> None:
    pair = Pair.of(Checkpointed)
    assert linears(pair.converted, X) == 5
    for model in pair.models:
        model.recomputes = True
    pair.agree(with_input_gradient)  # what the graphs of this call are made of
    assert linears(pair.converted, X) == 4
    pair.agree(with_input_gradient)


def test_steps_of_a_model_that_recomputes_share_their_graphs() -> None:
    """A recomputation ends by an exception as soon as all is there that was asked for."""
    pair = Pair.of(Checkpointed)
    pair.converted.recomputes = True
    counts = []
    for _ in range(4):
        pair.converted(X).sum().backward()
        counts.append(graphs(pair.converted))
    assert counts[1:] == counts[1:2] * 3


def test_a_model_that_recomputes_already_is_converted_by_blocks() -> None:
    model = seeded(Checkpointed)
    model.recomputes = True
    pair = Pair.of(model)
    assert te_transform.report(pair.converted).counts == {"layernorm_mlp": 2}
    assert linears(pair.converted, X) == 4
    pair.agree(with_input_gradient)


class Numbered(Checkpointed):
    """Its blocks are in a dict, as those of torchtitan's models."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(self.blocks)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


def wrapped(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.blocks.register_module(name, checkpoint_wrapper(model.blocks.get_submodule(name)))
    return model


@pytest.mark.parametrize("make", [Checkpointed, Numbered])
def test_blocks_in_wrappers_of_checkpoints_are_captured(make: type[nn.Module]) -> None:
    """Some of them, and all."""
    pair = Pair.of(make)
    for name in ("1", "0"):
        for model in pair.models:
            wrapped(model, name)
        pair.agree(with_input_gradient)
        assert linears(pair.converted, X) == 4


@pytest.mark.parametrize("names", ["1", "01"])
def test_sharded_blocks_in_wrappers_of_checkpoints_are_captured(names: str, process_group: None) -> None:
    """fully_shard() shards the wrappers."""
    pair = Pair.of(Checkpointed)
    sharded = wrapped(pair.converted, *names)
    for module in (*sharded.blocks, sharded):
        fully_shard(module)
    for _ in range(2):
        assert_close(sharded(X), pair.original(X))
    assert linears(sharded, X) == 4


def test_skipped_modules_in_wrappers_of_checkpoints_stay_as_they_are() -> None:
    """Wrapped after the conversion, or before, when the path may name the wrapper."""
    after = Pair.of(Checkpointed, skip="blocks.1.mlp")
    for model in after.models:
        wrapped(model, "0", "1")
    before = [
        Pair.of(wrapped(seeded(Checkpointed), "0", "1"), skip=path)
        for path in ("blocks.1.mlp", "blocks.1._checkpoint_wrapped_module.mlp")
    ]
    for pair in (after, *before):
        pair.agree(with_input_gradient)
        assert linears(pair.converted, X) == 2


class Inside(nn.Module):
    """A block that recomputes its MLP in training."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.training else self.block(x)


def test_a_block_that_recomputes_a_part_of_itself_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training it runs as it is, and evaluation fused; each step of a training was traced anew."""

    def inside() -> nn.Module:
        model = Checkpointed()
        model.blocks = nn.ModuleList(Inside() for _ in range(2))
        return model

    torch._dynamo.reset()
    original = seeded(inside)
    pair = Pair(original, te_transform.convert(original, X, verify=False), X)
    assert "activation checkpoints are on inside blocks" in str(te_transform.report(pair.converted))
    traced: list[type] = []
    backend = Runner.backend
    monkeypatch.setattr(
        Runner, "backend", lambda self, *given: traced.append(given[-1]) or backend(self, *given)
    )
    for _ in range(2):
        pair.agree(with_input_gradient)
    assert not traced
    with torch.no_grad():
        pair.agree()  # traced once, too
        del traced[:]
        pair.agree()
    assert not traced
    assert linears(pair.converted, X, training=False) == 4
    pair.original.eval()
    pair.agree(with_input_gradient)
    assert linears(pair.converted, X, training=False) == 4


class Decoder(Tiny):
    """A language model without a mask."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.embedding(ids))


def test_a_step_of_decoding_runs_the_users_own_code() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    model = te_transform.convert(seeded(Decoder), ids, verify=False)
    assert linears(model, ids, training=False) == 7
    before = graphs(model)
    assert linears(model, ids[:, :1], training=False) == 0
    assert graphs(model) == before
    assert linears(model, ids[:, :1]) == 7  # in training it is no such step


@functools.lru_cache
def doubled(number: int) -> int:
    return 2 * number


class Cached(Block):
    def forward(self, x: Tensor) -> Tensor:
        return doubled(2) * super().forward(x)


def test_warnings_of_dynamo_are_not_given(recwarn: pytest.WarningsRecorder) -> None:
    """It warns that functools.lru_cache is ignored."""
    te_transform.convert(Cached(), X)(X)
    assert [str(each.message) for each in recwarn] == []


# Pieces


class Broken(nn.Module):
    """Looks at a value between its two halves."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 1e6:
            x = x * 0.5
        return self.second(x)


def test_each_piece_is_rewritten_and_the_report_says_what_lies_between() -> None:
    pair = Pair.of(Broken, rules="layernorm_mlp layernorm_mlp", verify=True)
    report = te_transform.report(pair.converted)
    assert [site.path for site in report.fused] == ["first.mlp", "second.mlp"]
    (count, why) = report.breaks
    assert count == (
        "the forward was captured as 2 graphs: the HTML page draws all of them, graph_text() returns the "
        "largest"
    )
    assert 'has "if x.sum() > 1e6:", which dynamo cannot capture (Data-dependent branching)' in why
    pair.agree(with_input_gradient)
    pair.x = 1e7 * X
    pair.agree(with_input_gradient, atol=1e-4)


LOCK = threading.Lock()


class CausalByLength(nn.Module):
    """Attention that is causal for more than one token: dynamo knows no such number once lengths vary. It may
    begin under a lock, before which there is no graph to end."""

    def __init__(self):
        super().__init__()
        self.norm, self.values = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, locked: bool = False) -> Tensor:
        if locked:
            with LOCK:
                self.locked = True
        v = self.values(self.norm(x))[:, None]
        return F.scaled_dot_product_attention(v, v, v, is_causal=v.shape[-2] > 1)[:, 0]


def test_the_report_says_what_breaks_in_later_calls() -> None:
    pair = Pair.of(CausalByLength)
    assert not te_transform.report(pair.converted).breaks
    pair.agree(lambda model, x: [model(x[:, :length]) for length in (4, 3, 1)])
    (why,) = te_transform.report(pair.converted).breaks
    assert "F.scaled_dot_product_attention(v, v, v, is_causal" in why
    assert "which dynamo cannot capture" in why
    pair = Pair.of(CausalByLength)
    pair.agree(lambda model, x: model(x, locked=True))
    (lock,) = te_transform.report(pair.converted).breaks
    assert "dynamo cannot capture forward() at test_capture.py:" in lock
    assert "(Unsupported context manager)" in lock


def test_a_forward_that_is_left_alone_has_its_parts_rewritten() -> None:
    pair = Pair.of(Loops)
    assert [site.path for site in te_transform.report(pair.converted).fused] == ["parts.0.mlp", "parts.1.mlp"]
    assert linears(pair.converted, X) == 4
    pair.agree(with_input_gradient)


@torch.compiler.disable
def untraced(self: nn.Module, x: Tensor) -> Tensor:
    return Block.forward(self, x)


class Untraced(Block):
    forward = untraced


@pytest.mark.parametrize("inplace", [True, False])
def test_code_that_dynamo_cannot_capture_runs_and_is_reported(inplace: bool) -> None:
    model = seeded(Untraced)
    expected = model(X)
    converted = te_transform.convert(model, X, inplace=inplace)
    report = te_transform.report(converted)
    assert not report.sites
    assert "the forward was not captured: your own code runs" in report.breaks
    assert torch.equal(converted(X), expected)


def test_capture_failure_runs_the_users_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    def fails(*_: Any) -> None:
        raise AssertionError("an error of dynamo's own")

    model = seeded(Tiny)
    expected = model(X)
    monkeypatch.setattr(InstructionTranslator, "run", fails)
    converted = te_transform.convert(model, X)
    assert torch.equal(converted(X), expected)
    report = te_transform.report(converted)
    assert "the forward was not captured: your own code runs" in report.breaks


# Settings and limits


def settings() -> dict[str, Any]:
    return torch._dynamo.config.get_config_copy()


def test_a_forward_of_pytorchs_own_is_captured_after_one_that_failed() -> None:
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32))
    with pytest.raises(te_transform.TraceError, match="Sequential failed on the example inputs"):
        te_transform.inspect(model, torch.zeros(2, 17))
    assert te_transform.inspect(model, torch.zeros(2, 16)).counts == {"layernorm_linear": 1}


def test_settings_are_those_of_our_captures_alone() -> None:
    before = settings()
    model = te_transform.convert(seeded(Tiny), X)
    model(LONGER)
    assert settings() == before
    te_transform.convert(seeded(Broken), X)
    with pytest.raises(te_transform.TraceError):
        te_transform.convert(seeded(Tiny), X[..., :3])
    assert settings() == before


@pytest.mark.integration  # test_attacks_lifecycle.py has threads
def test_threads_convert_and_capture_at_once_and_put_settings_back() -> None:
    before, models, ready = settings(), [seeded(Tiny) for _ in range(3)], threading.Barrier(3)

    def convert(model: nn.Module) -> None:
        ready.wait()
        te_transform.convert(model, X, inplace=True)(LONGER)

    threads = [threading.Thread(target=convert, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert settings() == before
    assert torch.get_default_dtype() is torch.float32
    assert {te_transform.report(model).counts["layernorm_mlp"] for model in models} == {1}


@pytest.mark.parametrize("other", [te_transform.inspect, te_transform.convert, te_transform.trace])
def test_threads_look_at_one_model_at_once(other: Callable[..., Any]) -> None:
    for _ in range(2):
        model, ready, found = seeded(Tiny), threading.Barrier(2), []

        def look(
            function: Callable[..., Any],
            model: nn.Module = model,
            ready: threading.Barrier = ready,
            found: list[Any] = found,
        ) -> None:
            ready.wait()
            found.append(function(model, X))

        threads = [threading.Thread(target=look, args=(each,)) for each in (te_transform.inspect, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 2
        reports = [each for each in found if isinstance(each, Report)]
        assert all(report.counts["layernorm_mlp"] == 1 for report in reports)


def looked_up(self: nn.Module, x: Tensor) -> Tensor:
    try:
        return x * found_in({}, "factor")
    except KeyError:
        return Block.forward(self, x)


def found_in(table: dict[str, float], name: str) -> float:
    return table[name]


def test_no_garbage_of_a_capture_holds_the_outputs_of_its_call(no_collections: None) -> None:
    """A parameter of another size gets a new gradient accumulator once no output holds the one before."""
    pair = Pair.of(odd(looked_up))
    pair.attack(lambda model: widened(model.odd.mlp))
    assert not gc.isenabled()


def widened(mlp: nn.Module) -> None:
    """Repeat the hidden units, as resize_token_embeddings() adds tokens: by `.data`."""
    mlp.fc1.weight.data = mlp.fc1.weight.data.repeat(2, 1)
    mlp.fc1.bias.data = mlp.fc1.bias.data.repeat(2)
    mlp.fc2.weight.data = mlp.fc2.weight.data.repeat(1, 2)


def test_a_capture_logs_no_error() -> None:
    """PyTorch 2.11 writes the settings of each capture as JSON, and logs an error where that fails."""
    with logged("torch._dynamo", logging.WARNING) as said:
        te_transform.convert(Tiny().train(), X)(X)
    assert said == []


def test_a_number_that_is_read_off_a_tensor_is_told_by_the_report_alone() -> None:
    TensorVariable._warn_capture_scalar_outputs.cache_clear()  # which dynamo does once
    with logged("torch._dynamo", logging.WARNING) as said:
        converted = te_transform.convert(odd(lambda self, x: x * self.mlp(self.norm(x)).sum().item()), X)
    assert said == []
    report = te_transform.report(converted)
    assert any("Tensor.item()" in sentence for sentence in report.breaks)


class GivesUp(nn.Module):
    """Dynamo leaves its forward, and traces what that calls: the part that holds its blocks, too."""

    class Part(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                raise AttributeError("nothing that is traced has this")
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.part = self.Part(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def test_a_failed_capture_does_not_warn_of_torch_compile() -> None:
    with logged("te_transform", logging.WARNING) as said:
        report = te_transform.report(te_transform.convert(seeded(GivesUp), X))
    assert said == []
    assert not [note for note in report.notes if "Logger" in note or "method call" in note]  # of our own


@pytest.fixture
def recompile_limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets how many graphs dynamo captures of one forward."""
    return partial(monkeypatch.setitem, SETTINGS, "recompile_limit")


def test_a_limit_on_graphs_is_kept_and_beyond_it_the_users_own_code_runs(
    recompile_limit: Callable[[int], None],
) -> None:
    recompile_limit(3)
    pair = Pair.of(Tiny)
    for eps in (1.0, 2.0, 3.0, 4.0):  # a graph for each
        for model in pair.models:
            model.norm.eps = eps
        pair.agree()
        assert linears(pair.converted, X) == (7 if eps < 3 else 0)
    assert graphs(pair.converted) == 3
    for model in pair.models:
        model.norm.eps = 2.0
    assert linears(pair.converted, X) == 7
    pair.agree()


def test_models_of_one_class_have_limits_of_their_own(recompile_limit: Callable[[int], None]) -> None:
    recompile_limit(2)
    models = [te_transform.convert(seeded(Tiny), X, verify=False) for _ in range(4)]
    assert [linears(model, X) for model in models] == [7] * 4


@torch._dynamo.disable(recursive=False)
def aside(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


class Scaled(nn.Module):
    """Code of which each scale is a graph, around some that is captured by itself."""

    def __init__(self, scale: int):
        super().__init__()
        self.block, self.scale = Block(), scale

    def forward(self, x: Tensor) -> Tensor:
        return aside(self.block, x * self.scale)


class LoopsOver(Loops):
    def __init__(self, *scales: int):
        super().__init__()
        self.parts = nn.ModuleList(map(Scaled, scales))


def test_no_graph_of_another_model_runs_beyond_the_recompile_limit(
    recompile_limit: Callable[[int], None],
) -> None:
    recompile_limit(2)
    other = Pair.of(LoopsOver(1, 2)).converted
    with calls(other) as found:
        pair = LoopsOver(3, 4, 5)
        Pair(pair, te_transform.convert(pair, X, verify=False), X).agree()
    assert not found


def test_earlier_captures_of_a_process_do_not_limit_the_next_model() -> None:
    """Dynamo counts the graphs of code that all models share over all models."""
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):
        models = [te_transform.convert(LoopsOver(scale), X, verify=False) for scale in range(2, 8)]
        assert len({linears(model, X) for model in models}) == 1
        assert linears(models[-1], X)


def test_code_that_is_captured_over_and_over_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MOST_TRACED", 3)
    pair = Pair.of(Tiny)
    with logged("te_transform", logging.WARNING) as said:
        for eps in (1.0, 2.0, 3.0, 4.0):
            for model in pair.models:
                model.norm.eps = eps
            pair.agree()
    assert graphs(pair.converted) <= 3
    assert not linears(pair.converted, X)
    (warning,) = said
    assert "tiny.py" in warning
    assert "has reached its limit of graphs" in warning


def test_a_graph_of_a_model_that_is_gone_runs_as_it_was_captured() -> None:
    torch._dynamo.reset()
    model = LoopsOver(1)
    converted = te_transform.convert(model, torch.zeros(1, WIDTH), verify=False)  # for another size
    te_transform.convert(model, X, verify=False)
    gc.collect()
    with torch.compiler.set_stance("eager_on_recompile"):  # takes any graph that is there
        assert_close(converted(X), model(X))


# The door of torch.compile


class Exact(Block):
    """With the exact GELU."""

    def __init__(self):
        super().__init__()
        self.mlp.act = nn.GELU()


def test_torch_compile_with_the_backend() -> None:
    torch._dynamo.reset()
    model = seeded(Tiny)
    compiled = torch.compile(model, backend=backend)
    for x in (X, LONGER):
        expected, actual = ([m(x), *gradients(m, x)] for m in (model, compiled))
        torch.testing.assert_close(actual, expected)


def gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))


def test_torch_compile_with_options() -> None:
    torch._dynamo.reset()
    model = seeded(Exact)
    compiled = torch.compile(model, backend=backend, options={"approximate": True})
    hidden = model.mlp.fc1(model.norm(X))
    expected = X + model.mlp.fc2(F.gelu(hidden, approximate="tanh"))
    torch.testing.assert_close(compiled(X), expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(model(X), expected, rtol=1e-6, atol=1e-6)


def test_torch_compile_with_wrong_options() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(seeded(Tiny), backend=backend, options={"recipe": "fast"})
    with pytest.raises(
        Exception, match=r"expected None, a TE recipe or one of fp8-delayed, .* for recipe, got 'fast'"
    ):
        compiled(X)


def test_a_mode_of_torch_compile_is_an_option_of_ours() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(seeded(Tiny), backend=backend, mode="reduce-overhead")
    with pytest.raises(Exception, match=r"pass options={'compile': 'reduce-overhead'}"):
        compiled(X)


def test_the_backend_is_registered_by_its_name() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, name = project["project"]["entry-points"]["torch_dynamo_backends"]["te_transform"].partition(
        ":"
    )
    assert getattr(import_module(module), name) is backend


def test_a_converted_model_is_compiled_by_whoever_wants_it_otherwise() -> None:
    torch._dynamo.reset()
    pair = Pair.of(Tiny)
    compiled = torch.compile(pair.converted, backend="aot_eager")
    torch.testing.assert_close(compiled(X), pair.original(X))
    assert linears(pair.converted, X) == 7
    pair.agree()


# Copies and files


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_a_file,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_a_converted_model_of_its_own(name: str) -> None:
    pair = Pair.of(Tiny, rules="merge_siblings layernorm_mlp")
    twin = COPIES[name](pair.converted)
    assert type(twin) is type(pair.converted)
    assert str(te_transform.report(twin)) == str(te_transform.report(pair.converted))
    assert graphs(twin) == 0
    assert linears(twin, X) == 7
    assert runner_of(twin) is not runner_of(pair.converted)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    pair.agree()
    Pair(copy.deepcopy(te_transform.revert(COPIES[name](twin))), twin, X).agree(with_input_gradient)


def test_reverted_is_what_it_was() -> None:
    model = seeded(Tiny)
    kinds = [type(module) for module in model.modules()]
    attributes = [vars(module).keys() for module in model.modules()]
    converted = te_transform.convert(model, X, inplace=True)
    assert type(converted) is not Tiny
    assert isinstance(converted, Tiny)
    assert type(converted).__name__ == "Tiny"
    te_transform.revert(converted)
    assert [type(module) for module in model.modules()] == kinds
    assert [vars(module).keys() for module in model.modules()] == attributes
    with pytest.raises(te_transform.ModelError, match="got a Tiny without report"):
        te_transform.report(model)


class AsksWhetherItIsTraced(nn.Module):
    """A model that makes its mask as transformers does. With `draws`, it uses a generator without a seed."""

    def __init__(self, draws: bool = False):
        super().__init__()
        self.block, self.draws = seeded(Block), draws

    def forward(self, x: Tensor) -> Tensor:
        if self.draws:
            x = x * random.SystemRandom().random()
        return self.block(x) * 2 if torch.compiler.is_compiling() else self.block(x)


@pytest.mark.parametrize("inplace", [False, True])
def test_code_that_does_something_else_where_it_is_traced_runs_as_it_is(inplace: bool) -> None:
    model = AsksWhetherItIsTraced()
    converted = te_transform.convert(copy.deepcopy(model), X, inplace=inplace)
    report = te_transform.report(converted)
    assert not report.fused
    assert any("computes other numbers, off by 1:" in note for note in report.notes)
    assert torch.equal(converted(X), model(X))
    assert torch.equal(copy.deepcopy(converted)(X), model(X))


class LeavesOutItsMask(nn.Module):
    """A model that leaves out a mask that hides nothing, as transformers does, unless it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.block = seeded(Block)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and attention_mask.all():
            return self.block(x)
        return self.block(x).cumsum(1) * attention_mask[..., None]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_mask_that_is_left_out_unless_it_is_traced_is_found_on_a_padded_sample(by_name: bool) -> None:
    model, ones = LeavesOutItsMask(), torch.ones(X.shape[:2], dtype=torch.int64)
    padded = ones.clone()
    padded[0, 0] = 0
    inputs = {"x": X, "attention_mask": padded} if by_name else (X, padded)
    converted = te_transform.convert(model, inputs)
    assert any("computes other numbers" in note for note in te_transform.report(converted).notes)
    for mask in (padded, ones):
        assert torch.equal(converted(X, mask), model(X, mask))


class AsksForItsClass(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if type(self) is AsksForItsClass else 1)


@pytest.mark.parametrize("inplace", [False, True])
def test_code_that_does_something_else_in_a_subclass_runs_as_it_is(inplace: bool) -> None:
    model = seeded(AsksForItsClass)
    converted = te_transform.convert(copy.deepcopy(model), X, inplace=inplace)
    assert any("in a subclass" in note for note in te_transform.report(converted).notes)
    for found in (converted, copy.deepcopy(converted), te_transform.revert(converted)):
        assert torch.equal(found(X), model(X))


class LooksItselfUp(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * FACTORS[type(self)]


FACTORS = {LooksItselfUp: 2.0}
RAISES = "captured, the forward raises KeyError: <class 'tests.test_capture.LooksItselfUp'>: "


@pytest.mark.parametrize("verify", [False, True])
def test_code_that_raises_in_a_subclass_runs_as_it_is(verify: bool) -> None:
    model = seeded(LooksItselfUp)
    converted = te_transform.convert(model, X, verify=verify)
    assert any(RAISES in note for note in te_transform.report(converted).notes)
    assert any(RAISES in note for note in te_transform.inspect(model, X).notes)
    assert torch.equal(converted(X), model(X))
    with pytest.raises(te_transform.TraceError, match="failed on the example inputs"):  # whatever its class
        te_transform.convert(model, X[..., 1:])


@pytest.mark.parametrize("layers", [2, pytest.param(9, marks=pytest.mark.integration)])
def test_an_encoder_hands_back_zeros_for_padding_as_where_it_is_not_traced(layers: int) -> None:
    """In evaluation alone, where it makes nested tensors; in training it is fused."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        return nn.TransformerEncoder(layer, layers)

    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    pair = Pair.of(seeded(build), {"src": X, "src_key_padding_mask": padding})

    def padded(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, src_key_padding_mask=padding)

    def without_gradients(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return padded(model, x)

    for act in (padded, without_gradients):
        pair.agree(act)
    for model in pair.models:
        model.eval()
    for act in (padded, without_gradients, call, without_gradients):
        out = pair.agree(act)["output 0"]
        assert (out[1, 3:] == 0).all() == (act is without_gradients)
    for model in pair.models:
        model.train()
    with calls(pair.converted) as found:
        pair.agree(padded)
    assert found["linear"]


class RanksOtherwiseWhereItIsTraced(AsksWhetherItIsTraced):
    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).argsort(descending=torch.compiler.is_compiling())


def test_integers_that_differ_under_tracing_are_noticed() -> None:
    model = RanksOtherwiseWhereItIsTraced()
    converted = te_transform.convert(model, X)
    assert any("computes other numbers" in note for note in te_transform.report(converted).notes)
    assert torch.equal(converted(X), model(X))


class ReturnsLessWhereItIsTraced(AsksWhetherItIsTraced):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out = self.block(x)
        return (out,) if torch.compiler.is_compiling() else (out, out * 2)


def test_an_output_that_is_missing_where_it_is_traced_is_noticed() -> None:
    model = ReturnsLessWhereItIsTraced()
    converted = te_transform.convert(model, X)
    assert any("off by inf" in note for note in te_transform.report(converted).notes)
    assert len(converted(X)) == 2


def test_random_numbers_of_nobodys_seed_are_no_difference() -> None:
    report = te_transform.report(te_transform.convert(AsksWhetherItIsTraced(draws=True), X))
    assert not any("computes other numbers" in note for note in report.notes)


def test_a_recursion_limit_that_the_forward_does_not_read_is_not_guarded() -> None:
    """PyTorch raises the limit when inductor is imported, and inspect.unwrap() asks for the limit."""
    pair = Pair.of(Block)
    pair.agree()
    before, limit = graphs(pair.converted), sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(limit + 1000)
        pair.agree()
    finally:
        sys.setrecursionlimit(limit)
    assert graphs(pair.converted) == before


class OfDefaultDtype(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + (torch.get_default_dtype() is torch.float64))


def test_an_internal_error_of_dynamo_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("no guard can be built")

    monkeypatch.setattr(questions, "_same_answer", fail)
    model, x = OfDefaultDtype(8, 8), torch.randn(2, 8)
    converted = te_transform.convert(model, x)
    assert torch.equal(converted(x), model(x))
    assert "no guard can be built" in " ".join(te_transform.report(converted).breaks)
