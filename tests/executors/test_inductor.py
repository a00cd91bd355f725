"""The executor of inductor: which calls run compiled, and that they compute what the graph computes.

tests/compilers.py traces graphs in the place of inductor. tests/gpu runs the code that inductor generates.
"""

from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from importlib import import_module
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import list_mode_options
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

import te_transform
from te_transform.execution import classes, specializations
from tests.attacks import Attends, Block, Pair, with_input_gradient
from tests.compilers import Compiler
from tests.conversions import ALL, EVERYWHERE, error, gradients, logged, run
from tests.executors.helpers import notes
from tests.models.tiny import WIDTH, Attention
from tests.zoo import seeded

backend = import_module("te_transform.convert").te_transform  # the package's `convert` is the function
compiled_pair = partial(Pair.of, compile=True)

Act = Callable[[nn.Module, Tensor], Any]


@pytest.mark.integration  # sizes that vary are tried below
def test_a_model_with_and_without_padding_is_compiled_once_in_each_mode(compilations: Compiler) -> None:
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
    assert not notes(converted, "uncompiled")


def test_attention_alone_is_fused_in_compiled_graphs(compilations: Compiler) -> None:
    case = ALL["nanogpt_manual"]
    converted = te_transform.convert(case.build(), case.sample(), verify=False, compile=True)
    run(converted, case.sample())
    ((graph, _),) = compilations
    called = [graph.get_submodule(n.target) for n in graph.graph.nodes if n.op == "call_module"]
    assert called
    assert {type(op).__name__ for op in called} == {"DotProductAttention"}


@pytest.mark.parametrize("mode", [True, "reduce-overhead", "max-autotune"])
def test_the_compiler_gets_the_options_of_the_mode(mode: bool | str, compilations: Compiler) -> None:
    Pair.of(Block, compile=mode).agree()
    ((_, options),) = compilations
    assert options == list_mode_options("default" if mode is True else mode)


@pytest.mark.integration
def test_inductor_takes_the_graph() -> None:
    """tests/compilers.py is called as inductor is."""
    pair = compiled_pair(Block)
    pair.agree()
    assert not notes(pair.converted, "uncompiled")


@pytest.mark.integration
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_inductor_computes_gradients_of_hidden_rows(scale: float) -> None:
    """Left padding hides whole rows by finite numbers, for which some fused kernels have wrong gradients."""
    mask = torch.ones(5, 5).triu(1).index_fill(1, torch.tensor([0, 1]), 1.0) * torch.finfo(torch.float32).min

    def attend(self: Any, x: Tensor) -> Tensor:
        projected = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in projected)
        found = (q @ k.transpose(-2, -1) * scale + mask).softmax(-1) @ v
        return self.out_proj(found.transpose(1, 2).flatten(2))

    model = seeded(Attends)
    model.attention = seeded(type("Attention", (Attention,), {"forward": attend}))
    pair = compiled_pair(model, rules="attention")
    assert not notes(pair.converted, "uncompiled")
    pair.agree()


def test_each_size_is_compiled_once_up_to_a_limit(compilations: Compiler) -> None:
    pair = compiled_pair(Block)
    lengths = range(1, 4 + specializations.MAX_SPECIALIZATIONS)

    def act(model: nn.Module, x: Tensor) -> list[Tensor]:
        return [model(torch.ones(2, length, WIDTH)) for length in lengths]

    pair.agree(act)
    made = len(compilations)
    assert specializations.MAX_SPECIALIZATIONS <= made < len(lengths)
    pair.agree(act)
    assert len(compilations) == made
    told, report = "a graph is compiled for at most {} sets of shapes", te_transform.report(pair.converted)
    assert (
        f"{told.format(specializations.MAX_SPECIALIZATIONS)} and modes; other calls run uncompiled"
        in report.notes
    )
    assert set(report.fallbacks) == {"did not run compiled: no specialization for the call, see the notes"}
    assert str(report).count("calls of graphs did not run compiled") == 1


class InFp32(Block):
    """A block that computes in fp32 under autocast, and so does its backward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


@pytest.mark.usefixtures("compilations")
def test_gradients_of_a_part_without_autocast_are_in_fp32() -> None:
    def act(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x.requires_grad_())

    compiled_pair(InFp32).agree(act)


def test_compile_failure_runs_the_uncompiled_graph(compilations: Compiler) -> None:
    def fail(*_: Any) -> None:
        raise NotImplementedError("no kernel\nfor this")

    compilations.compile = fail
    pair = compiled_pair(Block)
    pair.agree()
    assert notes(pair.converted, "uncompiled") == ["a graph runs uncompiled: NotImplementedError: no kernel"]


def test_compile_failure_inside_a_transform_ends_the_transform(compilations: Compiler) -> None:
    def fail(*_: Any) -> None:
        torch._C._functorch._grad_increment_nesting()
        raise NotImplementedError

    compilations.compile = fail
    pair = compiled_pair(Block)
    pair.agree()
    assert torch._C._functorch.peek_interpreter_stack() is None


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("compilations")
@pytest.mark.parametrize("screen", [Terminal, StringIO])
def test_progress_is_shown_on_terminals_only(screen: type[StringIO]) -> None:
    with redirect_stderr(screen()) as shown:
        compiled_pair(Block).agree()
    assert ("te_transform: compiling a graph of" in shown.getvalue()) == (screen is Terminal)


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_a_mode(model: nn.Module, x: Tensor) -> Tensor:
    with Sees():
        return model(x)


def through_vmap(model: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(model)(x[:, None])


@pytest.mark.parametrize("act", [under_a_mode, through_vmap])
def test_modes_and_transforms_see_the_uncompiled_operations(act: Act, compilations: Compiler) -> None:
    compiled_pair(Block).agree(act)
    assert not compilations


class Writes(nn.Module):
    """A forward that writes to its first argument, which may share memory with the second."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return self.block(y * 2)


def test_arguments_may_share_memory_in_some_calls(compilations: Compiler) -> None:
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


@pytest.mark.usefixtures("compilations")
def test_values_do_not_keep_a_joint_projection_in_memory() -> None:
    """The backward needs the rotated queries and keys, and the values: 1 / 3 of the projection or less."""
    case = ALL["phi3"]
    model, inputs = case.build(num_hidden_layers=1), case.sample()
    converted = te_transform.convert(model, inputs, verify=False, compile=True)
    output = converted(**inputs).logits
    node = output.grad_fn
    while not isinstance(node, BackwardCFunction):
        node = node.next_functions[0][0]
    projection = converted.model.layers[0].self_attn.qkv_proj
    whole = inputs["input_ids"].numel() * projection.out_features * output.element_size()
    saved = [tensor.untyped_storage().nbytes() for tensor in node.saved_tensors if tensor is not None]
    assert whole not in saved
    actual, expected = (gradients(each, inputs) for each in (converted, model))
    assert error([*actual.values()], [*expected.values()]) < EVERYWHERE


@pytest.mark.usefixtures("compilations")
def test_a_second_derivative_is_an_error() -> None:
    pair = compiled_pair(Block)
    x = pair.x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(pair.converted(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


@pytest.mark.usefixtures("compilations")
@pytest.mark.parametrize("written", ["input", "output"])
def test_a_write_to_saved_memory_raises_in_the_backward(written: str) -> None:
    class Exponential(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.mlp(x)).exp()

    pair = compiled_pair(Exponential)
    pair.agree(with_input_gradient)
    x = pair.x.clone()
    tensors = {"input": x, "output": pair.converted(x)}
    with torch.no_grad():
        tensors[written].mul_(2)
    with pytest.raises(RuntimeError, match=r"write in place to a tensor of shape \(2, 5, \d+\)"):
        tensors["output"].sum().backward()
    pair.agree(with_input_gradient)


def test_torch_compile_with_the_backend_compiles(compilations: Compiler) -> None:
    torch._dynamo.reset()
    model = seeded(Block)
    through_door = torch.compile(model, backend=backend, options={"compile": True})
    torch.testing.assert_close(through_door(torch.ones(2, 5, WIDTH)), model(torch.ones(2, 5, WIDTH)))
    assert compilations


def test_torch_compile_of_a_converted_model_warns_of_the_option() -> None:
    pair = Pair.of(Block)
    classes.warn_compiled_outside.cache_clear()
    with logged("te_transform") as said:
        outside = torch.compile(pair.converted, backend="eager", fullgraph=True, dynamic=False)
        torch.testing.assert_close(outside(pair.x), pair.original(pair.x))
        outside(pair.x)
        outside(pair.x[:, 1:])  # compiled anew
    assert len(said) == 1
    assert "pass compile=True to te_transform.convert()" in said[0]
