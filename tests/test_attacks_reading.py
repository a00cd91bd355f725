"""Readers of a value inside of a fused op get the original's value, by any mechanism."""

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.attacks import OTHER, Pair, X
from tests.functions import Cube, Doubled, Tripled
from tests.models.tiny import MLP, WIDTH, Attention

pytestmark = pytest.mark.usefixtures("at_any_size")


class Normed(nn.Module):
    """A norm, its readers, and somebody else who reads it, before them or after."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp, self.attention = nn.LayerNorm(WIDTH), MLP(), Attention()

    def forward(self, x: Tensor, read: Callable[[Tensor], Any] | None = None, first: bool = True) -> Any:
        y = self.norm(x)
        if read is None:
            return self.attention(y)
        if first:
            return read(y), self.mlp(y)
        return self.mlp(y), read(y)


class NewKind(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * 2


@torch.jit.script
def scripted_in_place(x: Tensor) -> Tensor:
    return x.mul_(2)


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: 2 * grad)
    return x * 1


def saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x.detach(), file)
    return torch.load(io.BytesIO(file.getvalue()))


def under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        mean = x.mean()
    return x * mean


def under_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        mean = x.mean().item()
    return x * mean


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ OTHER.mT


READERS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "mask": lambda x: x[x > 0],
    "detach": lambda x: x.detach(),
    "view": lambda x: x.view(-1).contiguous(),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()) * 1,
    "strided": lambda x: torch.as_strided(x, (3,), (2,)),
    "flags": lambda x: x * (1 + x.requires_grad + 2 * x.is_leaf + 4 * (x.grad_fn is None)),
    "strides": lambda x: x * sum(x.stride()) + x.is_contiguous(),
    "version": lambda x: x * (1 + x._version),
    "in place": lambda x: x.mul_(2),
    "in place, a part": lambda x: x[:, 0].zero_(),
    "in place, Function": Tripled.apply,
    "Function": Cube.apply,
    "Function without change": Doubled.apply,
    "vmap": torch.vmap(lambda row: row * 2),
    "checkpoint": partial(checkpoint, torch.sin, use_reentrant=False),
    "checkpoint, reentrant": partial(checkpoint, torch.sin, use_reentrant=True),
    "hook": hooked,
    "no_grad": under_no_grad,
    "inference_mode": under_inference_mode,
    "autocast": under_autocast,
}


@pytest.mark.parametrize("name", READERS)
def test_other_readers_of_a_norm_get_its_value(name: str) -> None:
    Pair.shared(Normed).agree(lambda model, x: model(x.requires_grad_() * 1, READERS[name]))


@pytest.mark.parametrize("name", ["itself", "in place", "in place, Function", "numpy", "view"])
def test_other_readers_of_a_norm_get_its_value_without_gradients(name: str) -> None:
    with torch.no_grad():
        Pair.shared(Normed).agree(lambda model, x: model(x, READERS[name], False))


@pytest.mark.parametrize("name", ["itself", "Function without change", "hook", "in place", "detach", "view"])
def test_later_readers_of_a_norm_get_its_value(name: str) -> None:
    """If autograd refuses a write to a saved norm, it does so in both models."""
    found = Pair.shared(Normed).agree(lambda model, x: model(x.requires_grad_(), READERS[name], False))
    assert ("error" in found) == (name == "in place")


def test_a_gradient_of_a_norm_is_kept() -> None:
    def act(model: nn.Module, x: Tensor) -> list[Tensor]:
        kept: list[Tensor] = []
        read, out = model(x.requires_grad_(), lambda y: kept.append(y) or y.retain_grad() or y)
        (read.sum() + out.square().sum()).backward()
        return [y.grad for y in kept]

    assert Pair.shared(Normed).agree(act)["output 0"].any()


UNRECORDED = {"raises": AssertionError, "reason": "dynamo's Functions are differentiated once only"}
AS_FUNCTIONS = torch.__version__ < (2, 13)  # before, hooks are captured as such Functions


@pytest.mark.parametrize(
    "read",
    [
        torch.sin,
        pytest.param(hooked, marks=pytest.mark.xfail(AS_FUNCTIONS, **UNRECORDED)),
        pytest.param(Doubled.apply, marks=pytest.mark.xfail(**UNRECORDED)),
    ],
)
def test_gradients_of_gradients(read: Callable[[Tensor], Tensor]) -> None:
    def penalty(model: nn.Module, x: Tensor) -> list[Tensor]:
        read_, out = model(x.requires_grad_(), read)
        (gradient,) = torch.autograd.grad((read_**2).sum() + (out**3).sum(), x, create_graph=True)
        return [gradient, (gradient**2).sum()]

    Pair.of(Normed).agree(penalty, atol=1e-4)


# What a product gives: columns of one that several share


class Columns(nn.Module):
    """Hands out its projections, or does to them what it is told."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, width) for width in (WIDTH, 8, 8))

    def forward(self, x: Tensor, act: Callable[..., Any] = lambda q, k, v: (q, k, v)) -> Any:
        return act(self.q(x), self.k(x), self.v(x))


def hooked_column(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    k.register_hook(lambda grad: 2 * grad)
    return q, k, v


def added_to(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    q += 1
    return q, k.__iadd__(2), v


COLUMNS: dict[str, Callable[..., Any]] = {
    "written to": lambda q, k, v: (q.mul_(2), k * k, v),
    "written to by +=": added_to,
    "written to by setitem": lambda q, k, v: (q.__setitem__((0, 0), 1.0) or q, k, v),
    "written to, a view": lambda q, k, v: (q.view(-1).mul_(2).view_as(q), k * 1, v),
    "viewed": lambda q, k, v: (q.view(-1), k.view(2, -1), v.view(10, 4, 2)),
    "strided": lambda q, k, v: (torch.as_strided(q, (3,), (2,)), k, v),
    "viewed as integers": lambda q, k, v: (q, k, v.view(torch.int32)),
    "its strides read": lambda q, k, v: (q * q.stride(1), k * k.is_contiguous(), v * v.storage_offset()),
    "its storage read": lambda q, k, v: (q, k * k.untyped_storage().nbytes(), v),
    "hooked": hooked_column,
    "detached": lambda q, k, v: (q, k.detach(), v),
    "through a Function": lambda q, k, v: (Cube.apply(q), Doubled.apply(k), v),
    "in numpy": lambda q, k, v: (q, k, torch.from_numpy(v.detach().numpy().copy())),
    "in a checkpoint": lambda q, k, v: (q, checkpoint(torch.sin, k, use_reentrant=False), v),
    "one twice": lambda q, k, v: (q, k, k),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_a_tensor_like_any_other(name: str) -> None:
    Pair.shared(Columns, "merge_siblings").agree(lambda model, x: model(x.requires_grad_(), COLUMNS[name]))


@pytest.mark.parametrize("rows", [1, 2])
def test_columns_that_leave_share_nothing(rows: int) -> None:
    """Outside they may be viewed and written to, one without the other, even where all sizes are one."""

    def act(model: nn.Module, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            q, k, v = model(x[:rows, :rows])
            q.zero_(), k.view(-1).add_(1)
        assert [t.untyped_storage().nbytes() for t in (q, k, v)] == [t.nbytes for t in (q, k, v)]
        return [q, k, v]

    Pair.of(Columns, X[:rows, :rows], rules="merge_siblings").agree(act)


def test_columns_have_the_strides_of_the_original() -> None:
    def act(model: nn.Module, x: Tensor) -> list[Any]:
        return [(*t.stride(), t.is_contiguous(), t.storage_offset()) for t in model(x)]

    Pair.shared(Columns, "merge_siblings").agree(act)


# What a linear gives that reads a norm's output turned: the length first in memory, if nobody looks


class Turned(nn.Module):
    """The norm of what has the length first, a linear that has it second, and what is done to that."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, act: Callable[..., Any] = lambda y: y, by: str = "transposed") -> Any:
        return act(self.head(TURNS[by](self.norm(x))))


TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1),
    "permuted": lambda x: x.permute(1, 0, 2).contiguous(),
}
LOOKS: dict[str, Callable[..., Any]] = {
    "viewed": lambda y: y.view(-1, 8).log_softmax(-1),
    "viewed by another": lambda y: y.view_as(y.new_empty(y.numel())),
    "handed out": lambda y: y,
    "its strides read": lambda y: y * y.stride(0) + y.is_contiguous(),
    "of one shape with what is viewed": lambda y: (2 * y).softmax(-1).view(-1),
    "strided": lambda y: torch.as_strided(y, (3,), (2,)),
    "written to": lambda y: y.view(-1).mul_(2),
    "multiplied": lambda y: y @ y.mT,
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("look", LOOKS)
def test_transposed_outputs_keep_their_strides(look: str, turn: str) -> None:
    def act(model: nn.Module, x: Tensor) -> list[Any]:
        y = model(x, LOOKS[look], turn)
        return [y, y.is_contiguous(), y.storage_offset()]

    Pair.shared(Turned, "layernorm_linear").agree(act)
