"""Transforms, compilers and checkpoints around a converted model, or around a part of it."""

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import te_transform
from te_transform.execution.captured_graph import CapturedGraph
from tests.attacks import OTHER, Act, Attends, Pair, X, assert_same, call, with_input_gradient
from tests.models.tiny import WIDTH, Tiny
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

JOINED = "merge_siblings layernorm_mlp"


class Causal(Attends):
    """The same with attention written out under a causal mask."""

    def forward(self, x: Tensor) -> Tensor:
        a, y = self.attention, self.norm(x)
        scores = a.q_proj(y) @ a.k_proj(y).transpose(-2, -1) * WIDTH**-0.5
        hidden = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        return x + a.out_proj(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ a.v_proj(y))


# Function transforms


def loss_of(model: nn.Module) -> Callable[..., Tensor]:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).square().sum()

    return loss


def detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def per_sample(model: nn.Module, x: Tensor) -> Any:
    gradients = torch.vmap(torch.func.grad(loss_of(model)), (None, 0))(detached(model), x[:, None])
    return list(gradients.values())


def ensemble(model: nn.Module, x: Tensor) -> Tensor:
    """Several models at once, each parameter with one more dimension."""
    stacked = {name: torch.stack([p, 2 * p]) for name, p in detached(model).items()}
    return torch.vmap(lambda parameters: functional_call(model, parameters, (x,)))(stacked)


def dual(model: nn.Module, x: Tensor) -> list[Tensor]:
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(x, OTHER))
        return [part.detach() for part in forward_ad.unpack_dual(out)]


def dual_weights(model: nn.Module, x: Tensor) -> list[Tensor]:
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(p, torch.ones_like(p)) for n, p in detached(model).items()}
        return [*forward_ad.unpack_dual(functional_call(model, duals, (x,)))]


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """A loss on the gradient itself."""
    (gradient,) = torch.autograd.grad(model(x.requires_grad_()).square().sum(), x, create_graph=True)
    return gradient.square().sum()


def penalty_of_weights(model: nn.Module, x: Tensor) -> Tensor:
    gradients = torch.autograd.grad(model(x).square().sum(), [*model.parameters()], create_graph=True)
    return sum(gradient.square().sum() for gradient in gradients)


TRANSFORMS: dict[str, Act] = {
    "vmap": lambda model, x: torch.vmap(model)(x[:, None]),
    "gradients of each sample": per_sample,
    "an ensemble": ensemble,
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (OTHER,)),
    "forward AD": dual,
    "forward AD of weights": dual_weights,
    "jacfwd": lambda model, x: torch.func.jacfwd(lambda z: model(z).sum(-1))(x),
    "hessian": lambda model, x: torch.func.hessian(lambda z: model(z).square().sum())(x[:1, :2]),
    "a product with the hessian": lambda model, x: torch.autograd.functional.hvp(
        lambda z: model(z).square().sum(), x, OTHER
    ),
    "a penalty": penalty,
    "a penalty of weights": penalty_of_weights,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    pair = Pair.shared(Causal)
    assert "error" not in pair.agree(TRANSFORMS[name], atol=1e-3)
    pair.agree()


@pytest.mark.parametrize("name", ["vmap", "jvp", "a penalty"])
def test_transforms_of_sdpa(name: str) -> None:
    """Some kernels of PyTorch's have no such derivatives: then there are none in either."""
    Pair.shared(Tiny).agree(TRANSFORMS[name], atol=1e-3)


def test_an_error_in_a_transform_is_the_models_own() -> None:
    """Tensors of transforms have no memory to restore before the user's own code runs once more."""
    narrow = X[..., :3]
    for model in Pair.shared(Tiny).models:
        with pytest.raises(RuntimeError, match="normalized_shape"):
            torch.func.jvp(model, (narrow,), (narrow,))


def test_after_a_transform_that_dynamo_fails_on_the_graphs_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(Tiny)
    converted = te_transform.convert(model, X)
    torch.func.grad(loss_of(converted))(detached(converted), X)
    ran, call_of = [], CapturedGraph.__call__
    monkeypatch.setattr(CapturedGraph, "__call__", lambda *args: (ran.append(1), call_of(*args))[1])
    torch.testing.assert_close(converted(X), model(X))
    assert ran


@pytest.mark.parametrize("name", ["vmap", "gradients of each sample", "an ensemble"])
def test_a_failed_capture_inside_a_transform_is_not_repeated(name: str) -> None:
    """Each call took dynamo a hundred times of what the original takes."""
    pair, frames = Pair.of(Causal), counters["frames"]
    for number in range(3):
        before = frames["total"]
        assert "error" not in pair.agree(TRANSFORMS[name], atol=1e-3)
        assert (frames["total"] > before) == (number == 0)
    assert "error" not in pair.agree()


def test_gradcheck() -> None:
    model = Pair.of(Causal).converted.double()
    x = X[:1, :3].double().requires_grad_()
    assert torch.autograd.gradcheck(model, (x,))
    assert torch.autograd.gradgradcheck(model, (x,))


# Checkpoints of activations


def checkpointed(act: Callable[[Any, Tensor, Callable], Any]) -> Callable[[bool], Act]:
    return lambda reentrant: (
        lambda model, x: act(model, x.requires_grad_(), partial(checkpoint, use_reentrant=reentrant))
    )


def attention_alone(model: Any, x: Tensor, part: Callable) -> list[Tensor]:
    y = model.blocks[0].norm1(x)
    return [part(model.blocks[0].attention, y), y * 2]


CHECKPOINTS = {
    "the model": checkpointed(lambda model, x, part: part(model, x)),
    "its blocks": checkpointed(lambda m, x, part: m.head(part(m.norm, part(m.blocks[0], x)))),
    "attention": checkpointed(attention_alone),
    "the model, twice": checkpointed(lambda model, x, part: part(model, part(model, x))),
    "two before one backward": checkpointed(lambda m, x, part: [part(m, x), part(m, 2 * x), m(x)]),
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_around_it(name: str, reentrant: bool) -> None:
    Pair.shared(Tiny).agree(CHECKPOINTS[name](reentrant))


class Checkpoints(Tiny):
    """A model that checkpoints its blocks by itself, in training."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.training else block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_it(reentrant: bool) -> None:
    model = seeded(Checkpoints, 2)
    model.reentrant = reentrant
    pair = Pair.of(model)

    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        x.requires_grad_()
        return [model(x), model(2 * x)]

    pair.agree(step)
    for each in pair.models:
        each.eval()
    pair.agree(step)


def test_a_selective_checkpoint() -> None:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def act(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x.requires_grad_(), use_reentrant=False, context_fn=contexts)

    Pair.shared(Tiny).agree(act)
    pair = Pair.of(Tiny)
    for parameter in pair.converted.parameters():
        parameter.data = parameter.data.clone()
    pair.agree(act)  # nothing is laid together again within its forward, nor where that is repeated


def test_a_checkpoint_draws_the_same_random_numbers_again() -> None:
    def act(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x.requires_grad_(), use_reentrant=False)

    Pair.of(seeded(lambda: nn.Sequential(nn.Dropout(0.5), Tiny(), nn.Dropout(0.5)))).agree(act)


# Compilers


def test_a_compiled_model() -> None:
    pair = Pair.of(Attends)
    compiled = torch.compile(pair.converted, backend="eager", dynamic=True)
    for x in (X, torch.randn(3, 7, WIDTH)):
        assert_same("output", compiled(x), pair.original(x))
    pair.agree(lambda model, x: (compiled if model is pair.converted else model)(x))


def test_a_compiled_part() -> None:
    pair = Pair.of(Tiny, rules=JOINED)
    pair.converted.blocks[0].mlp.compile(backend="aot_eager")
    pair.agree(with_input_gradient)


def test_a_model_that_is_compiled_in_place() -> None:
    pair = Pair.of(Tiny, rules=JOINED)
    pair.converted.compile(backend="aot_eager")
    pair.agree(with_input_gradient)


def test_a_compiled_function_around_it_is_captured_once() -> None:
    pair, captured = Pair.of(Tiny, rules=JOINED), []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        captured.append(graph)
        return graph

    compiled = torch.compile(lambda x: pair.converted(x) * 2, backend=backend, fullgraph=True)
    for x in (X, OTHER, X):
        assert_same("output", compiled(x), pair.original(x) * 2)
    assert len(captured) == 1


class Alike(nn.Module):
    """Takes no more than the dtype and the shape of what was computed for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        like = torch.vmap(torch.cos)(x)
        read = (x * like).type_as(like).expand_as(like)
        return self.first(read) + self.second(read).tanh()


def test_tensors_read_for_their_dtype_are_no_part_of_a_site() -> None:
    """A site is checked by itself: half of a vmap() does not run."""
    Pair.of(Alike, rules="merge_siblings", verify=True).agree(with_input_gradient)


def test_dynamos_reset_is_survived() -> None:
    pair = Pair.of(Tiny, rules=JOINED)
    torch._dynamo.reset()
    pair.agree(with_input_gradient)


def test_converted_models_are_exported_and_traced() -> None:
    pair = Pair.of(Tiny, rules=JOINED)
    expected = pair.original(X)
    exported = torch.export.export(pair.converted, (X,)).module()
    traced = torch.jit.trace(pair.converted, X, check_trace=False)
    torch.jit.save(traced, file := io.BytesIO())
    for other in (exported, traced, torch.jit.load(io.BytesIO(file.getvalue()))):
        assert_same("output", other(X), expected)
    pair.agree()


def test_make_fx_traces_it() -> None:
    pair = Pair.of(Tiny, rules=JOINED)
    assert_same("output", make_fx(pair.converted)(X)(X), pair.original(X))


@pytest.mark.parametrize("model", [Tiny, Causal])
def test_shapes_alone(model: type[nn.Module]) -> None:
    converted = Pair.of(model, rules="merge_siblings").converted
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert converted(mode.from_tensor(X)).shape == X.shape
        assert_same("output", converted(X), seeded(model)(X))


def test_a_reverted_model_can_be_converted_again() -> None:
    pair = Pair.of(Tiny, rules=JOINED)
    again = te_transform.convert(te_transform.revert(pair.converted), X, verify=False)
    assert te_transform.report(again).fused
    Pair(pair.original, again, X).agree(call)
