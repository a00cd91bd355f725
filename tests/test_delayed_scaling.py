"""The scales of delayed scaling in training, whatever is frozen or shared, on the stand-in for TE."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_transform
from te_transform.backends.fp8.registry import read_state
from te_transform.backends.fp8.scale_table import joined_names
from te_transform.execution.products import Products
from tests import stand_in
from tests.ranks import Block, Net, inputs

pytestmark = pytest.mark.usefixtures("te", "at_any_size", "compilations")

LENGTH = stand_in.DelayedScaling().amax_history_len
TINY = 1e-6  # a loss whose gradients are lost without a scale
each_compiler = pytest.mark.parametrize("compile", [False, True])


class Twice(nn.Module):
    """A model that runs the same layers twice in each forward, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(32, 32), Block(), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> a loss."""
        x = self.block(self.first(x))
        return self.head(self.block(x * 3)).float().square().mean()


class Run:
    """A model, converted and not, that train with the same weights."""

    def __init__(self, build: Callable[[], nn.Module] = Net, **options: Any):
        torch.manual_seed(0)
        self.own = build().to(torch.bfloat16)
        options = {"backend": "te", "recipe": "fp8-delayed", "verify": False, **options}
        self.fused = te_transform.convert(self.own, inputs(0), **options)
        self.optimizer = torch.optim.AdamW(self.fused.parameters(), lr=1e-2)
        self.names = {id(parameter): name for name, parameter in self.own.named_parameters()}
        self.history: dict[tuple[str, str], list[Tensor]] = defaultdict(list)

    def freeze(self, trained: Callable[[str], bool]) -> None:
        """Train these parameters alone."""
        for model in (self.own, self.fused):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(trained(name))
                parameter.grad = None

    def step(self, number: int, loss_scale: float = TINY) -> float:
        """Train a step. Return the largest error of a gradient, relative to the gradient."""
        self.own.load_state_dict(self.fused.state_dict())
        self.measure(inputs(number), loss_scale)
        self.optimizer.zero_grad()
        (self.fused(inputs(number)) * loss_scale).backward()
        pairs = zip(self.own.parameters(), self.fused.parameters(), strict=True)
        gradients = [(own.grad, fused.grad) for own, fused in pairs if own.grad is not None]
        self.optimizer.step()
        return max(float((fused - own).norm() / own.norm()) for own, fused in gradients)

    def measure(self, x: Tensor, loss_scale: float) -> None:
        """Record the amax of each product's tensors in a step of the original."""
        seen: dict[tuple[str, str], Tensor] = {}

        def note(name: str, role: str, tensor: Tensor) -> None:
            amax = tensor.detach().abs().amax().float()
            seen[name, role] = torch.maximum(amax, seen.get((name, role), amax))

        def product(parameter: Tensor, _: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
            name, out = self.names[id(parameter)], rest[-1]()
            note(name, "input", x)
            note(name, "weight", weight)
            if out.requires_grad:
                out.register_hook(lambda grad: note(name, "grad", grad))
            return out

        self.own.zero_grad()
        with Products(self.own.parameters(), product):
            loss = self.own(x) * loss_scale
        loss.backward()
        for key, amax in seen.items():
            self.history[key].append(amax)

    def kernels(self) -> Iterator[Any]:
        """Yield the kernels that were meant to run in FP8 in the last step."""
        for parameter in self.fused.parameters():
            found = read_state(parameter).kernels.values()
            yield from (kernel for kernel in found if kernel.in_recipe and kernel.last == self.last)

    @property
    def last(self) -> int:
        """The number of the last forward in training."""
        states = [read_state(parameter) for parameter in self.fused.parameters()]
        return max(kernel.last for state in states for kernel in state.kernels.values())

    def first_calls(self) -> int:
        return sum(n for why, n in te_transform.report(self.fused).plain_calls.items() if "first call" in why)

    def check_scales(self) -> None:
        """Each scale fits the largest amax of the last steps, as TE computes it."""
        for kernel in self.kernels():
            states = kernel.delayed()
            for number, names in enumerate(joined_names(kernel)):
                for role, scale in {
                    "input": states["forward"].scale[3 * number],
                    "weight": states["forward"].scale[3 * number + 1],
                    "grad": states["backward"].scale[2 * number],
                }.items():
                    steps = [amax for name in names for amax in self.history[name, role][-LENGTH:]]
                    if steps:
                        expected = stand_in.E4M3 / torch.stack(steps).max()
                        torch.testing.assert_close(scale, expected, rtol=0.2, atol=0, msg=f"{names} {role}")


@each_compiler
@pytest.mark.parametrize("build", [Net, Twice])
def test_scales_are_those_of_the_last_steps(build: type[nn.Module], compile: bool) -> None:
    """Also with evaluation in between, batches of other sizes, and gradients that are added up."""
    run = Run(build, compile=compile)
    for number in range(LENGTH + 3):
        assert run.step(number, 1.0 if number % 2 else 3.0) < 0.3
        if number > 0:
            run.check_scales()
        with torch.no_grad():
            run.fused.eval()(inputs(number))
        run.fused.train()


# of the model's 14 matrices and vectors per block: the names of those that are trained
FREEZES = {
    "norms": lambda name: "norm" in name,
    "biases": lambda name: name.endswith("bias"),
    "the head": lambda name: name.startswith("head"),
    "the first MLP's second linear": lambda name: "blocks.0.mlp.2" in name,
    "the first MLP's second linear, and all that follows": lambda name: (
        "blocks.0.mlp.2" in name or name.startswith(("blocks.1", "head"))
    ),
    "all but keys": lambda name: ".k." not in name,
    "the last bias": lambda name: name == "blocks.1.mlp.2.bias",
}


@each_compiler
@pytest.mark.parametrize("what", FREEZES)
def test_all_products_run_in_fp8_whatever_is_trained(what: str, compile: bool) -> None:
    """From the second step: a product waits for no gradient that it does not get."""
    run = Run(compile=compile)
    run.freeze(FREEZES[what])
    for number in range(4):
        assert run.step(number) < 0.3
        assert all(kernel.in_fp8 == (number > 0) for kernel in run.kernels())
    assert run.first_calls() == len([*run.kernels()])


# Frozen later, and trained again


def keys_frozen(name: str) -> bool:
    return ".k." not in name


def everything(name: str) -> bool:
    return True


def joined(run: Run) -> list[Any]:
    """Return the kernels that multiply queries and keys at once."""
    return [kernel for kernel in run.kernels() if any(len(names) == 2 for names in joined_names(kernel))]


@each_compiler
def test_parameters_may_be_frozen_and_trained_by_turns(compile: bool) -> None:
    """Each change costs one step in bf16, of the products that it changes, the first time."""
    run = Run(compile=compile)
    for number in range(12):
        if number % 3 == 0:
            run.freeze(keys_frozen if number % 2 else everything)
        assert run.step(number) < 0.3
        assert bool(joined(run)) == (number % 6 < 3)
        assert all(kernel.in_fp8 for kernel in run.kernels()) == (number not in (0, 3))
        assert number < 6 or all(kernel.in_fp8 for kernel in run.kernels())


def test_scales_of_before_are_not_used_once_their_steps_are_forgotten() -> None:
    run = Run()
    for number in range(2 * LENGTH + 2):
        if number == 2:
            run.freeze(keys_frozen)
        if number == LENGTH + 2:
            with torch.no_grad():
                for block in run.fused.blocks:
                    block.k.weight.mul_(4)
            run.freeze(everything)
        assert run.step(number) < 0.3
        assert [kernel.in_fp8 for kernel in joined(run)] in ([], [number not in (0, LENGTH + 2)] * 2)


def test_a_model_keeps_its_scales_while_another_one_trains() -> None:
    """TE empties the histories of both in each step."""
    run, other = Run(), Run()
    for number in range(3):
        run.step(number)
    for number in range(LENGTH + 2):
        other.step(number)
    assert run.step(3) < 0.3
    assert all(kernel.in_fp8 for kernel in run.kernels())


def resumed(run: Run) -> Run:
    """Return a run that begins with the state of this one."""
    state, moments = copy.deepcopy((run.fused.state_dict(), run.optimizer.state_dict()))
    scales = te_transform.scaling_state(run.fused)
    other = Run()
    other.freeze(lambda name: dict(run.fused.named_parameters())[name].requires_grad)
    other.fused.load_state_dict(state)
    other.optimizer.load_state_dict(moments)
    te_transform.load_scaling_state(other.fused, scales)
    return other


@pytest.mark.parametrize("later", [False, True])
def test_a_run_with_frozen_parameters_is_resumed_bitwise(later: bool) -> None:
    run = Run()
    for number in range(5):
        if number == 2 * later:
            run.freeze(keys_frozen)
        run.step(number)
    other = resumed(run)
    for each in (run, other):  # TE updates the scales of both in a step of one
        for number in range(5, 7):
            each.step(number)
    for own, found in zip(run.fused.parameters(), other.fused.parameters(), strict=True):
        assert torch.equal(own, found)
        assert (own.grad is None) == (found.grad is None)
        assert own.grad is None or torch.equal(own.grad, found.grad)
    assert not other.first_calls()


def test_loaded_scales_fit_products_of_more_parameters() -> None:
    """The saved run multiplied queries and keys one by one; keys have the larger weights."""
    run = Run()
    run.freeze(keys_frozen)
    with torch.no_grad():
        for block in run.fused.blocks:
            block.k.weight.mul_(4)
    for number in range(3):
        run.step(number)
    other = resumed(run)
    other.freeze(everything)
    assert other.step(3) < 0.3
    assert [kernel.in_fp8 for kernel in joined(other)] == [True, True]


def test_loaded_scales_are_those_of_the_next_step_alone() -> None:
    run = Run()
    run.freeze(keys_frozen)
    for number in range(3):
        run.step(number)
    other = resumed(run)
    other.step(3)
    with torch.no_grad():
        for block in other.fused.blocks:
            block.k.weight.mul_(4)
    other.freeze(everything)
    assert other.step(4) < 0.3
    assert [kernel.in_fp8 for kernel in joined(other)] == [False, False]


@each_compiler
def test_a_first_step_whose_gradients_overflow_gives_no_scales(compile: bool) -> None:
    """As with a loss scale that is too large at first; the user skips such a step."""
    run = Run(compile=compile)
    for number in range(3):
        (run.fused(inputs(number)) * torch.inf).backward()
        run.optimizer.zero_grad()
    assert run.step(3) < 0.3
    assert run.step(4) < 0.3
    assert all(kernel.in_fp8 for kernel in run.kernels())
