"""A value that changes at each call is captured three times at most."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform.graph.capture import capture
from te_transform.graph.long_containers import MOST_ELEMENTS
from te_transform.graph.recompiles import MOST_CAPTURES
from tests.models.tiny import WIDTH, Tiny
from tests.zoo import seeded

X = torch.linspace(-1.0, 1.0, 2 * WIDTH).view(2, WIDTH)
CALLS = 6


class Counts(Tiny):
    """Its calls change `seen`, which its output depends on."""

    seen: Any
    after: Callable[[Any], Any]
    scale: Callable[[Any], float]

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.after(self.seen)
        return super().forward(x) * self.scale(self.seen)


def counting(first: Any, after: Callable[[Any], Any], scale: Callable[[Any], float]) -> Counts:
    model = seeded(Counts)
    model.seen, model.after, model.scale = first, after, scale
    return model


CHANGING = {
    "a counter": (0, lambda seen: seen + 1, float),
    "a counter that is not used": (0, lambda seen: seen + 1, lambda seen: 1.0),
    "a schedule": (0.0, lambda seen: seen + 0.125, lambda seen: 1.0 + seen),
    "a list that grows": ([], lambda seen: [*seen, 1.0], len),
    "a name": ("a", lambda seen: seen + "a", len),
    "a dict that grows": ({}, lambda seen: {**seen, len(seen): 1}, len),
    "keys that grow": ({}, lambda seen: {**seen, len(seen): 1}, lambda seen: len(list(seen))),
}


def captured(model: nn.Module) -> tuple[Callable[..., Any], list[Any], list[str]]:
    """A model's captured forward, the graphs that it has, and the reasons that it gives."""
    graphs: list[Any] = []
    reasons: list[str] = []
    run = capture(
        type(model).forward, lambda graph, inputs: graphs.append(graph) or graph.forward, tell=reasons.append
    )
    return functools.partial(run, model), graphs, reasons


@pytest.mark.parametrize("name", CHANGING)
def test_a_value_that_each_call_changes_is_captured_three_times(name: str) -> None:
    model, twin = counting(*CHANGING[name]), counting(*CHANGING[name])
    run, graphs, reasons = captured(model)
    for _ in range(CALLS):
        assert torch.equal(run(X), twin(X))
    assert model.seen == twin.seen
    assert len(graphs) <= MOST_CAPTURES
    assert bool(reasons) is not name.startswith("a counter")  # an integer becomes an input of the graph


def test_a_value_of_the_class_that_changes_is_captured_three_times() -> None:
    class Scaled(Tiny):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return Tiny.forward(self, x) * type(self).scale

    run, graphs, reasons = captured(model := seeded(Scaled))
    for call in range(CALLS):
        Scaled.scale = 1.0 + call / 8
        assert torch.equal(run(X), model(X))
    assert len(graphs) <= MOST_CAPTURES
    assert any("type(self).scale" in why for why in reasons)


def test_two_values_that_change_by_turns_are_captured_five_times() -> None:
    """Each call differs from the last one in one value, so graphs of three values of each are five."""

    class Two(Tiny):
        first = second = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.first + self.second

    run, graphs, reasons = captured(model := seeded(Two))
    for call in range(12):
        setattr(model, "first" if call % 2 else "second", 1.0 + call / 8)
        assert torch.equal(run(X), model(X))
    assert len(graphs) == 2 * MOST_CAPTURES - 1
    assert "got more than 3 values" in reasons[0]


@pytest.mark.parametrize(
    "grow", [list, tuple, lambda numbers: dict.fromkeys(numbers, 1.0)], ids=["list", "tuple", "dict"]
)
def test_an_argument_that_grows_is_captured_three_times(grow: Callable[[range], Any]) -> None:
    class Takes(Tiny):
        def forward(self, x: Tensor, given: Any = ()) -> Tensor:
            return super().forward(x) * (1.0 + len(given))

    run, graphs, _ = captured(model := seeded(Takes))
    for call in range(CALLS):
        assert torch.equal(run(X, grow(range(call))), model(X, grow(range(call))))
    assert len(graphs) <= MOST_CAPTURES


def test_names_of_keyword_arguments_that_change_are_captured_three_times() -> None:
    def adds(self: Any, x: Tensor, **given: float) -> Tensor:
        return Tiny.forward(self, x) + sum(given.values())

    run, graphs, reasons = captured(seeded(type("Adds", (Tiny,), {"forward": adds})))
    for call in range(CALLS):
        run(X, **{f"given_{call}": 1.0})
    assert len(graphs) == MOST_CAPTURES
    assert "a constant value of given," in reasons[0]


def test_parameters_that_are_frozen_for_one_call_are_captured_three_times() -> None:
    run, graphs, _ = captured(model := seeded(Tiny))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        run(X)
    assert len(graphs) == MOST_CAPTURES < len([*model.parameters()])
    for _ in range(3):
        run(X)
    assert len(graphs) == MOST_CAPTURES + 1


def test_the_report_names_the_value_and_the_line() -> None:
    model, twin = (counting(*CHANGING["a list that grows"]) for _ in range(2))
    converted = te_transform.convert(model, X, inplace=True)
    for _ in range(CALLS):
        torch.testing.assert_close(converted(X), twin(X))
    (note,) = (note for note in te_transform.report(converted).notes if "got more than 3 values" in note)
    assert "self.seen" in note
    assert "(test_recompiles.py:" in note


TEMPERATURE = 1.0


def test_a_value_is_named_as_the_forward_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def now() -> float:
        return TEMPERATURE

    def reads(self: Any, x: Tensor) -> Tensor:
        return Tiny.forward(self, x) * (TEMPERATURE if self.training else torch.compiler.disable(now)())

    model = seeded(type("Reads", (Tiny,), {"forward": reads}))
    run, _, reasons = captured(model)
    for training in (True, False):
        model.train(training)
        for call in range(CALLS):
            monkeypatch.setitem(globals(), "TEMPERATURE", 2.0 + call)
            run(X)
    assert any("a constant value of TEMPERATURE, " in why for why in reasons)
    assert any("a constant value of a call's result, " in why for why in reasons)


def test_an_attribute_that_the_first_call_makes() -> None:
    model = seeded(Counts)
    model.after, model.scale = (lambda seen: getattr(model, "seen", "") + "a"), len
    type(model).seen = ""
    try:
        run, graphs, _ = captured(model)
        for _ in range(CALLS):
            run(X)
    finally:
        del type(model).seen
    assert len(model.seen) == CALLS
    assert len(graphs) == MOST_CAPTURES


def test_a_value_that_stays_from_some_call_on_runs_its_graph() -> None:
    model = counting("a", lambda seen: seen, len)
    run, graphs, reasons = captured(model)
    for _ in range(CALLS):
        model.seen += "a"
        run(X)
    model.seen = "aaa"  # of the second call
    assert len(graphs) == MOST_CAPTURES
    assert torch.equal(run(X), model(X))
    assert len(reasons) == CALLS - MOST_CAPTURES


def test_a_float_from_outside() -> None:
    model = seeded(Tiny)
    run, graphs, reasons = captured(model)
    for call in range(CALLS):
        model.norm.eps = 0.1 * (call + 1)
        assert torch.equal(run(X), model(X))
    assert len(graphs) == MOST_CAPTURES
    assert "eps" in reasons[0]


def test_each_layer_has_graphs_of_its_own() -> None:
    """Layers share their code, and are told apart by a number: no value of one layer changes."""
    layers = [counting("a" * number, str, len) for number in range(1, 6)]
    graphs: list[Any] = []
    run = capture(Counts.forward, lambda graph, inputs: graphs.append(graph) or graph.forward)
    for _ in range(2):
        for layer in layers:
            assert torch.equal(run(layer, X), layer(X))
    assert len(graphs) == len(layers)


def named(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a forward as transformers does: the wrapper reads the class of its module, and ends a graph."""

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        assert args[0].__class__.__name__
        torch._dynamo.graph_break()
        return forward(*args, **kwargs)

    return wrapped


def test_each_layer_in_a_wrapper_has_graphs_of_its_own() -> None:
    """The wrapper has the layer in `*args`: the class of no layer changes."""
    kinds = [type(f"Tiny{number}", (Tiny,), {"forward": named(Tiny.forward)}) for number in range(CALLS)]
    model = nn.Sequential(*map(seeded, kinds))
    run, graphs, reasons = captured(model)
    assert torch.equal(run(X), model(X))
    assert len(graphs) == CALLS
    assert not reasons


def scaled(x: Tensor, scale: float) -> Tensor:
    torch._dynamo.graph_break()
    return x * scale


def test_the_values_of_other_models_do_not_count() -> None:
    """All models call the same function, each with a value of its own."""

    class Scales(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            return scaled(super().forward(x), self.norm.eps)

    for call in range(CALLS):
        model = seeded(Scales)
        model.norm.eps = 0.1 * (call + 1)
        run, _, reasons = captured(model)
        assert torch.equal(run(X), model(X))
        assert not reasons


class Empty(Tiny):
    """A container without elements: false."""

    def __len__(self) -> int:
        return 0


class Undecided(Tiny):
    """Neither true nor false."""

    def __bool__(self) -> bool:
        raise TypeError("not a truth value")


@pytest.mark.parametrize("kind", [Empty, Undecided])
def test_a_module_without_truth_is_captured_in_each_mode(kind: type[Tiny]) -> None:
    model = seeded(kind)
    run, graphs, reasons = captured(model)
    for gradients in (True, False, True):
        with torch.set_grad_enabled(gradients):
            assert torch.equal(run(X), model(X))
    assert (len(graphs), reasons) == (2, [])


def test_modes_and_sizes_are_no_values_that_change() -> None:
    model = seeded(Tiny)
    run, _, reasons = captured(model)
    for call in range(CALLS):
        model.train(call % 2 == 0)
        with torch.set_grad_enabled(call % 3 == 0):
            for x in (X, X.repeat(1 + call, 1)):
                assert torch.equal(run(x), model(x))
    assert not reasons


# Long containers


def adds_up(seen: Any) -> int:
    return sum(seen.values() if isinstance(seen, dict) else seen)


LONG = {
    "a list that grows": (list, lambda seen: seen.append(1)),
    "a list that is added up": (list, adds_up),
    "a deque that grows": (collections.deque, lambda seen: seen.append(1)),
    "a set that grows": (set, lambda seen: seen.add(-len(seen))),
    "a dict that grows": (dict.fromkeys, lambda seen: seen.update({-len(seen): 1})),
    "a dict whose keys are asked": (dict.fromkeys, lambda seen: 1 in seen.keys()),  # noqa: SIM118
    "a dict that is added up": (lambda numbers: dict.fromkeys(numbers, 1), adds_up),
}


@pytest.mark.parametrize("name", LONG)
def test_python_reads_and_changes_a_long_container(name: str) -> None:
    class Long(Tiny):
        seen: Any
        use: Callable[[Any], Any]

        def forward(self, x: Tensor) -> Tensor:
            used = self.use(self.seen)
            return super().forward(x) * (len(self.seen) if used is None else used)

    make, use = LONG[name]
    model, twin = seeded(Long), seeded(Long)
    for each in (model, twin):
        each.seen, each.use = make(range(MOST_ELEMENTS + 1)), use
    graphs: list[Any] = []
    reasons: dict[str, str] = {}
    run = capture(Long.forward, lambda graph, inputs: graphs.append(graph) or graph.forward, reasons=reasons)
    for _ in range(2):
        assert torch.equal(run(model, X), twin(X))
    assert model.seen == twin.seen
    assert graphs
    assert any("elements of a list" in why for why in reasons)


# Hooks


def times(module: nn.Module, args: Any, out: Tensor, by: float) -> Tensor:
    return out * by


def test_hooks_that_are_there_for_one_call_are_not_captured() -> None:
    model = seeded(Tiny)
    run, graphs, _ = captured(model)
    before = run(X)
    for call in range(CALLS):
        hook = model.norm.register_forward_hook(functools.partial(times, by=2.0 + call))
        assert torch.equal(run(X), model(X))
        hook.remove()
    assert torch.equal(run(X), before)
    assert len(graphs) == 1


def test_a_hook_that_stays_is_captured_from_the_third_call_on() -> None:
    model = seeded(Tiny)
    run, graphs, _ = captured(model)
    run(X)
    model.norm.register_forward_hook(functools.partial(times, by=2.0))
    found = []
    for _ in range(4):
        assert torch.equal(run(X), model(X))
        found.append(len(graphs))
    assert found == [1, 1, 2, 2]
