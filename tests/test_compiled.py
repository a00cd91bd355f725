"""Graphs that inductor compiles.

Here AOTAutograd traces them as it does for inductor, and what it traced runs as it is: CI has no time for a
compiler. tests/gpu runs what inductor makes of them.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from io import StringIO
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor import list_mode_options
from torch._inductor.decomposition import decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import LlamaConfig, LlamaForCausalLM

import te_transform
from te_transform.execution import classes, partition, specializations
from te_transform.execution.executors import inductor
from tests.attacks import Attends, Block, Pair
from tests.conversions import ALL, EVERYWHERE, error, gradients, logged, run
from tests.models.tiny import WIDTH, Attention
from tests.zoo import seeded, zero_dropout

backend = import_module("te_transform.convert").te_transform  # the package's `convert` is the function

Compilations = list[tuple[fx.GraphModule, dict[str, Any]]]
Act = Callable[[nn.Module, Tensor], Any]


def trace(graph: fx.GraphModule, arguments: list[Any], config_patches: dict[str, Any]) -> Any:
    """In the place of inductor: what AOTAutograd hands to it, as it is."""

    def forward(graph: fx.GraphModule, _: Any) -> Any:
        # what inductor returns lies in other tensors' memory without being a view to autograd
        return make_boxed_func(lambda *given: tree_map_only(Tensor, Tensor.detach, graph(*given)))

    def backward(graph: fx.GraphModule, _: Any) -> Any:
        # dropouts whose results the forward keeps stand here too, read by nobody: they would draw
        graph.graph.eliminate_dead_code(lambda node: node.is_impure() and not is_random(node))
        graph.recompile()
        return make_boxed_func(graph.forward)

    def is_random(node: fx.Node) -> bool:
        return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())

    # With inductor's decompositions: without them aten's view, of a gradient whose strides fake tensors do
    # not foresee (attention's on a CPU, with a mask that learns), raises for the original too.
    return aot_module_simplified(
        graph, arguments, decompositions=decompositions,
        fw_compiler=forward, bw_compiler=backward,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    """The graphs that were compiled, and with what options."""
    found: Compilations = []

    def noted(graph: fx.GraphModule, arguments: list[Any], config_patches: dict[str, Any]) -> Any:
        found.append((graph, config_patches))
        return trace(graph, arguments, config_patches)

    monkeypatch.setattr(inductor, "compile_fx", noted)
    return found


compiled_pair = partial(Pair.of, compile=True)


@pytest.mark.integration  # sizes that vary are tried below
def test_a_model_with_padding_and_without(compilations: Compilations) -> None:
    case = ALL["llama"]
    model, inputs, padded = case.build(num_hidden_layers=1), case.sample(), case.sample(padded=True)
    converted = te_transform.convert(model, inputs, verify=False, compile=True)

    for given in (inputs, padded, inputs, padded):  # what the mask is changes from call to call
        assert error(run(converted, given), run(model, given)) < EVERYWHERE
    assert len(compilations) == 2
    expected, actual = (gradients(m, inputs) for m in (model, converted))
    assert [g is None for g in actual.values()] == [g is None for g in expected.values()]
    trained = [key for key, grad in expected.items() if grad is not None and grad.norm() > 1e-4]
    assert error([actual[key] for key in trained], [expected[key] for key in trained]) < EVERYWHERE
    assert len(compilations) == 3
    assert not any("uncompiled" in note for note in te_transform.report(converted).notes)


def test_attention_is_fused_and_the_rest_left_to_the_compiler(compilations: Compilations) -> None:
    case = ALL["nanogpt_manual"]
    converted = te_transform.convert(case.build(), case.sample(), verify=False, compile=True)
    run(converted, case.sample())
    ((graph, _),) = compilations
    called = [graph.get_submodule(n.target) for n in graph.graph.nodes if n.op == "call_module"]
    assert called
    assert {type(op).__name__ for op in called} == {"DotProductAttention"}


@pytest.mark.parametrize("mode", [True, "reduce-overhead", "max-autotune"])
def test_the_compiler_gets_the_options_of_the_mode(mode: bool | str, compilations: Compilations) -> None:
    Pair.of(Block, compile=mode).agree()
    ((_, options),) = compilations
    assert options == list_mode_options("default" if mode is True else mode)


@pytest.mark.integration
def test_inductor_itself(compilations: Compilations, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in its place is called as it is."""
    monkeypatch.undo()
    pair = compiled_pair(Block)
    pair.agree()
    assert not compilations
    assert not any("uncompiled" in note for note in te_transform.report(pair.converted).notes)


@pytest.mark.integration
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_inductor_does_not_take_kernels_whose_gradients_are_wrong(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a mask of finite numbers hides whole rows, as left padding does."""
    monkeypatch.undo()
    mask = torch.ones(5, 5).triu(1).index_fill(1, torch.tensor([0, 1]), 1.0) * torch.finfo(torch.float32).min

    def attend(self: Any, x: Tensor) -> Tensor:
        projected = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in projected)
        found = (q @ k.transpose(-2, -1) * scale + mask).softmax(-1) @ v
        return self.out_proj(found.transpose(1, 2).flatten(2))

    model = seeded(Attends)
    model.attention = seeded(type("Attention", (Attention,), {"forward": attend}))
    pair = compiled_pair(model, rules="attention")
    assert not any("uncompiled" in note for note in te_transform.report(pair.converted).notes)
    pair.agree()


def test_each_size_is_compiled_once_and_not_too_many_are(compilations: Compilations) -> None:
    pair = compiled_pair(Block)
    lengths = range(1, 4 + specializations.MOST)

    def act(model: nn.Module, x: Tensor) -> list[Tensor]:
        return [model(torch.ones(2, length, WIDTH)) for length in lengths]

    pair.agree(act)
    made = len(compilations)
    assert specializations.MOST <= made < len(lengths)
    pair.agree(act)
    assert len(compilations) == made
    told, report = "a graph is compiled for at most {} sets of shapes", te_transform.report(pair.converted)
    assert f"{told.format(specializations.MOST)} and modes, other calls run uncompiled" in report.notes
    assert set(report.fallbacks) == {"did not run compiled: no specialization for the call, see the notes"}
    assert str(report).count("calls of graphs did not run compiled") == 1


def llama_of(layers: int) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 40}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes))


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of four layers are."""
    monkeypatch.setattr(partition, "FEWEST", 4)


def test_equal_layers_of_a_deep_model_are_compiled_once(deep: None, compilations: Compilations) -> None:
    model = seeded(lambda: llama_of(4))
    ids = torch.randint(40, (2, 6))
    inputs = {"input_ids": ids, "labels": ids}
    converted = te_transform.convert(model, inputs, verify=False, compile=True)
    for _ in range(2):
        with torch.no_grad():  # what equal layers have in common is no number of their weights
            for parameter in model.parameters():
                parameter.mul_(1 + 0.1 * torch.rand(()))
            converted.load_state_dict(model.state_dict())
        expected, found = (gradients(each, inputs) for each in (model, converted))
        assert error([*found.values()], [*expected.values()]) < EVERYWHERE
    _, layer, _ = (graph for graph, _ in compilations)  # embeddings, a layer, and the loss
    assert [node.op for node in layer.graph.nodes].count("call_module") == 1
    assert not any("uncompiled" in note for note in te_transform.report(converted).notes)


def test_cuda_graphs_are_of_the_whole(deep: None, compilations: Compilations) -> None:
    Pair.of(Layers, compile="reduce-overhead").agree()
    assert len(compilations) == 1


class Layers(nn.Module):
    """Layers that differ: in a number, in a size, in what they are given, in whether they are trained."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.layers[3].requires_grad_(requires_grad=False)
        self.scales = [1.0, 1.0, 2.0, 1.0, 1.0, 1.0]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = layer(x * scale) + (kept[0] if kept else 0)
            kept.append(x)
        return x, kept[1], kept[4]


class Writes(Layers):
    """Its layers write to what others have made."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for layer in self.layers:
            total += layer(x)
        return total


class Switches(Layers):
    """A setting holds for some layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            for layer in [*self.layers][1:5]:
                x = layer(x)
        return self.layers[5](x)


class Casts(Layers):
    """torch.autocast is entered by the forward, around some layers."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = layer(x)
        return x.float()


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.integration) for kind in (Layers, Casts)), Writes, Switches],
)
def test_pieces_compute_what_the_whole_does(
    kind: type[nn.Module], deep: None, compilations: Compilations
) -> None:
    pair = compiled_pair(kind)
    for _ in range(3):
        pair.agree()
    assert (len(compilations) > 1) == (kind is Layers)
    assert len(compilations) < 2 * 6, "some layers are equal"
    assert not any("uncompiled" in note for note in te_transform.report(pair.converted).notes)


class InFp32(Block):
    """In fp32 wherever it is called, its backward too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


def test_a_part_without_autocast_has_its_gradients_in_fp32() -> None:
    def act(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x.requires_grad_())

    compiled_pair(InFp32).agree(act)


@pytest.mark.integration  # of one model or another the pieces are those of the modules above
@pytest.mark.parametrize(("name", "pieces"), [("gpt2", 3), ("vit", 3)])
def test_pieces_of_a_bucket_compute_what_the_whole_does(
    name: str, pieces: int, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under DDP; the weight of GPT-2's head is that of its embedding."""
    case = ALL[name]
    model, inputs = zero_dropout(seeded(case.build)), case.sample()
    monkeypatch.setattr(
        specializations, "bucket_size", lambda: sum(p.nbytes for p in model.parameters()) // 8
    )
    converted = te_transform.convert(model, inputs, verify=False, compile=True)
    expected, found = (gradients(each, inputs) for each in (model, converted))
    trained = [key for key, grad in expected.items() if grad is not None and grad.norm() > 1e-4]
    assert error([found[key] for key in trained], [expected[key] for key in trained]) < EVERYWHERE
    assert len(compilations) == pieces
    assert not any("uncompiled" in note for note in te_transform.report(converted).notes)


class Wide(nn.Module):
    """Its layers are numbered, but none is made of others: activations would be cut off from products."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(kind for _ in range(4) for kind in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_sequence_of_single_operations_is_not_cut(
    compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specializations, "bucket_size", lambda: 1)
    compiled_pair(Wide).agree()
    assert len(compilations) == 1


def test_what_fails_in_pieces_is_compiled_whole(
    deep: None, compilations: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(module: fx.GraphModule) -> None:
        raise NotImplementedError("no")

    monkeypatch.setattr(partition, "structure", fail)
    pair = compiled_pair(Layers)
    pair.agree()
    assert len(compilations) == 1
    assert not any("uncompiled" in note for note in te_transform.report(pair.converted).notes)


def test_what_the_compiler_fails_on_runs_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no kernel\nfor this")

    monkeypatch.setattr(inductor, "compile_fx", fail)
    pair = compiled_pair(Block)
    pair.agree()
    notes = te_transform.report(pair.converted).notes
    assert "a graph runs uncompiled, NotImplementedError: no kernel" in notes


def test_a_compiler_that_fails_within_a_transform_leaves_none_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        torch._C._functorch._grad_increment_nesting()
        raise NotImplementedError

    monkeypatch.setattr(inductor, "compile_fx", fail)
    pair = compiled_pair(Block)
    pair.agree()
    assert torch._C._functorch.peek_interpreter_stack() is None


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("screen", [Terminal, StringIO])
def test_compiling_shows_on_a_terminal_alone(screen: type[StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := screen())
    compiled_pair(Block).agree()
    assert ("te_transform: compiling a graph of" in shown.getvalue()) == (screen is Terminal)


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_a_mode(model: nn.Module, x: Tensor) -> Tensor:
    with Seen():
        return model(x)


def through_vmap(model: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(model)(x[:, None])


@pytest.mark.parametrize("act", [under_a_mode, through_vmap])
def test_what_looks_at_each_operation_runs_uncompiled(act: Act, compilations: Compilations) -> None:
    compiled_pair(Block).agree(act)
    assert not compilations


def test_verify_looks_at_the_uncompiled_model(compilations: Compilations) -> None:
    pair = compiled_pair(Block)
    assert te_transform.verify(pair.original, pair.converted, pair.x)
    assert not compilations


class Writes(nn.Module):
    """A forward that writes to its first argument, which may share memory with the second."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return self.block(y * 2)


def test_arguments_that_share_memory_in_some_calls(compilations: Compilations) -> None:
    pair = compiled_pair(seeded(Writes), (torch.ones(2, 5, WIDTH), torch.ones(2, 5, WIDTH)))

    def act(model: nn.Module, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            apart = model(x.clone(), x.clone())
            held = x.clone()
            together = model(held, held.view(2, 5, WIDTH))
            rows = torch.cat([x, x])
            beside = model(rows[:2], rows[2:])
            overlapping = model(rows[:2], rows[1:3])
        return [apart, together, held, beside, overlapping, rows]

    found = pair.agree(act)
    assert not torch.equal(found["output 0"], found["output 1"])
    assert not torch.equal(found["output 3"], found["output 4"])
    assert compilations


def test_a_second_derivative_is_refused() -> None:
    pair = compiled_pair(Block)
    x = pair.x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(pair.converted(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_the_door_of_torch_compile(compilations: Compilations) -> None:
    torch._dynamo.reset()
    model = seeded(Block)
    through_door = torch.compile(model, backend=backend, options={"compile": True})
    torch.testing.assert_close(through_door(torch.ones(2, 5, WIDTH)), model(torch.ones(2, 5, WIDTH)))
    assert compilations


def test_who_compiles_a_converted_model_from_outside_is_told_of_the_option() -> None:
    pair = Pair.of(Block)
    classes.tell_of_the_option.cache_clear()
    with logged("te_transform") as said:
        outside = torch.compile(pair.converted, backend="eager", fullgraph=True, dynamic=False)
        torch.testing.assert_close(outside(pair.x), pair.original(pair.x))
        outside(pair.x)
        outside(pair.x[:, 1:])  # compiled anew
    assert len(said) == 1
    assert "pass compile=True to te_transform.convert()" in said[0]
