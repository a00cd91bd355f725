"""Side effects of a forward: modes it enters, tensors it writes to, and calls of its parts."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import te_transform
from te_transform.verify.replay import named_tensors
from tests.attacks import OTHER, Attends, Block, Pair, X, each, odd, with_input_gradient
from tests.conversions import calls
from tests.functions import Cube, Doubled, Tripled
from tests.models.tiny import WIDTH, Tiny
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

# Modes that a forward enters


def in_fp32(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return x + self.mlp(self.norm(x.float()))


def half_in_bf16(self: Any, x: Tensor) -> Tensor:
    y = self.norm(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = self.mlp.fc1(y)
    return x + self.mlp.fc2(F.gelu(y.float()))


def norm_in_bf16(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = self.mlp.fc1(self.norm(x))
    return x + self.mlp.fc2(F.gelu(y).float())


def norm_without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = self.norm(x)
    return x + self.mlp(y)


def linear_without_gradient(self: Any, x: Tensor) -> Tensor:
    y = self.norm(x)
    with torch.no_grad():
        z = self.mlp.fc1(y)
    return x + self.mlp.fc2(F.gelu(z, approximate="tanh")) + y


def one_projection_without_gradient(self: Any, x: Tensor) -> Tensor:
    a, y = self.attention, self.norm(x)
    with torch.no_grad():
        key = a.k_proj(y)
    return x + a.out_proj(F.scaled_dot_product_attention(a.q_proj(y), key, a.v_proj(y)))


def all_with_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x + self.mlp(self.norm(x))


@torch.no_grad()
def decorated(self: Any, x: Tensor) -> Tensor:
    return x + self.mlp(self.norm(x))


@torch.autocast("cpu", torch.bfloat16)
def decorated_autocast(self: Any, x: Tensor) -> Tensor:
    return x + self.mlp(self.norm(x))


def in_inference_mode(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = self.mlp(self.norm(x)).mean().item()
    return x * y + self.mlp(self.norm(x))


def by_flag(self: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(not self.training):
        return x + self.mlp(self.norm(x))


ENTERED = {
    "autocast off": in_fp32,
    "autocast, half of the MLP": half_in_bf16,
    "autocast, norm and linear": norm_in_bf16,
    "no_grad, the norm": norm_without_gradient,
    "no_grad, the linear": linear_without_gradient,
    "no_grad, one of q, k, v": one_projection_without_gradient,
    "inference_mode": in_inference_mode,
    "set_grad_enabled": by_flag,
}


@pytest.mark.parametrize("name", ENTERED)
def test_modes_that_a_forward_enters(name: str) -> None:
    base = Attends if "q, k, v" in name else Block
    pair = Pair.of(odd(ENTERED[name], base))
    low = "autocast" in name
    pair.agree(atol=3e-2 if low else 1e-5)

    def under_another(model: nn.Module, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16) if low else torch.no_grad():
            return model(x)

    pair.agree(under_another, atol=3e-2 if low else 1e-5)


# Tensors that a forward writes to


def input_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.norm(x)
    x.add_(1)
    return x + self.mlp(y)


def input_between(self: Any, x: Tensor) -> Tensor:
    x = x * 1
    q = self.mlp.fc1(x)
    x.add_(1)
    return self.mlp.fc2(q) + self.norm(x)


def projections_around_a_write(self: Any, x: Tensor) -> Tensor:
    a, y = self.attention, self.norm(x).detach()
    q = a.q_proj(y)
    with torch.no_grad():
        y.mul_(2)
    return x + a.out_proj(F.scaled_dot_product_attention(q, a.k_proj(y), a.v_proj(y))).detach()


def weight_between(self: Any, x: Tensor) -> Tensor:
    a, y = self.attention, self.norm(x)
    with torch.no_grad():
        q = a.q_proj(y)
        a.k_proj.weight.mul_(2)
        key = a.k_proj(y)
        a.k_proj.weight.div_(2)
        return x + a.out_proj(F.scaled_dot_product_attention(q, key, a.v_proj(y)))


def weight_written_by_hand(self: Any, x: Tensor) -> Tensor:
    self.mlp.fc1.weight.data.clamp_(-0.1, 0.1)
    return x + self.mlp(self.norm(x))


def a_view_of_the_norm(self: Any, x: Tensor) -> Tensor:
    y = self.norm(x)
    y[:, 0] = 0
    y.view(-1)[::3].mul_(2)
    return x + self.mlp(y)


def activation_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.mlp.fc1(self.norm(x))
    return x + self.mlp.fc2(F.relu_(y)) + y.sum()


def what_attention_gives(self: Any, x: Tensor) -> Tensor:
    """Return attention with a convolution of the values, as Nystromformer computes it."""
    a, y = self.attention, self.norm(x)
    value = a.v_proj(y)
    out = (a.q_proj(y) @ a.k_proj(y).mT / 4).softmax(-1) @ value
    out += value
    return x + a.out_proj(out)


def into_a_tensor(self: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, ::2] = self.mlp(self.norm(x))[:, ::2]
    return out.addcmul_(x, x)


WRITES = {
    "its input": input_in_place,
    "its input, between two linears": input_between,
    "the norm, between q and k": projections_around_a_write,
    "a weight, between q and k": weight_between,
    "a weight's data": weight_written_by_hand,
    "views of the norm": a_view_of_the_norm,
    "an activation": activation_in_place,
    "what attention gives": what_attention_gives,
}


@pytest.mark.parametrize("name", WRITES)
def test_tensors_that_a_forward_writes_to(name: str) -> None:
    def act(model: nn.Module, x: Tensor) -> list[Any]:
        x = x * 1
        return [model(x), x, dict(model.named_parameters())]

    Pair.of(odd(WRITES[name], Attends if "q and k" in name or "attention" in name else Block)).agree(act)


# Ways to call


class Result(NamedTuple):
    value: Tensor
    norm: Tensor


def caught(self: Any, x: Tensor) -> Tensor:
    try:
        return self.mlp(x[..., :3])
    except RuntimeError:
        return self.mlp(self.norm(x))


def own_function(self: Any, x: Tensor) -> list[Tensor]:
    return [Doubled.apply(self.mlp(Cube.apply(self.norm(x)))), Tripled.apply(self.norm(x) * 1)]


def with_other_weights(self: Any, x: Tensor) -> Tensor:
    doubled = {name: 2 * p for name, p in self.mlp.named_parameters()}
    return x + functional_call(self.mlp, doubled, self.norm(x)) + self.mlp(self.norm(x))


def twice(self: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + self.mlp(self.norm(x))
    return x


def in_a_thread(self: Any, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(self.mlp(self.norm(x))))
    thread.start(), thread.join()
    return x + found[0]


def attends_to_itself(self: Any, x: Tensor) -> Tensor:
    """Attention that is written out; the first row sees nothing and is uniform."""
    hidden = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu()
    return (self.q(x) @ self.k(x).mT).masked_fill(hidden, -1e9).softmax(-1) @ x


def gradient_of_attention(self: Any, x: Tensor) -> Any:
    x = self.mlp(self.norm(x))
    return torch.autograd.grad(attends_to_itself(self, x[:, None]).square().sum(), x, create_graph=True)


CALLS = {
    "a dict": lambda s, x: {"out": s.mlp(s.norm(x)), "in": x, "name": "block", "none": None},
    "an error that it catches": caught,
    "Functions of its own": own_function,
    "functional_call": with_other_weights,
    "a block called twice": twice,
    "vmap": lambda s, x: torch.vmap(lambda row: s.mlp(s.norm(row)))(x),
    "vmap, of several linears": lambda s, x: torch.vmap(lambda row: s.q(row) @ s.k(row).mT @ s.norm(row))(x),
    "vmaps in a vmap": lambda s, x: torch.vmap(torch.vmap(lambda row: s.q(row) * s.k(row)))(x),
    "attention in a vmap": lambda s, x: torch.vmap(lambda row: attends_to_itself(s, row[None, None]))(x),
    "the gradient of an attention": gradient_of_attention,
    "a gradient": lambda s, x: torch.func.grad(lambda z: s.mlp(s.norm(z)).sum())(x),
    "a branch on a number": lambda s, x: s.mlp(s.norm(x)) if s.norm(x).sum().item() > 1e3 else s.norm(x),
    "a thread": in_a_thread,
}


@each(CALLS, "vmap, of several linears", "vmaps in a vmap", "a thread", "a dict")
def test_ways_to_call_and_to_return(name: str) -> None:
    linears = {"q": nn.Linear(WIDTH, WIDTH), "k": nn.Linear(WIDTH, WIDTH)}
    pair = Pair.of(odd(CALLS[name], **linears))
    assert not [note for note in te_transform.report(pair.converted).notes if "RuntimeError" in note]
    pair.agree(with_input_gradient)


def test_outputs_in_float8_are_compared() -> None:
    forward = Block.forward
    pair = Pair.of(odd(lambda s, x: forward(s, x).detach().to(torch.float8_e4m3fn)), verify=True)
    assert te_transform.verify(*pair.models, X)


OTHER_LAYOUTS = {
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x[0].to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([*x]),
    "jagged": lambda x: torch.nested.nested_tensor([*x], layout=torch.jagged),
}


@each(OTHER_LAYOUTS)
def test_outputs_of_other_layouts_have_dense_parts(name: str) -> None:
    parts = dict(named_tensors({"out": OTHER_LAYOUTS[name](X)}))
    names = ["out.0", "out.1"] if name in ("nested", "jagged") else ["out"]
    assert [*parts] == names
    for part, expected in zip(parts.values(), X, strict=False):
        assert torch.equal(part.view(-1)[: expected.numel()], expected.view(-1))


RECOMPUTED = {
    "a block in a checkpoint": lambda s, x: checkpoint(s.mlp, s.norm(x), use_reentrant=False),
    "checkpoints in checkpoints": lambda s, x: checkpoint(
        lambda z: s.mlp(checkpoint(s.norm, z, use_reentrant=False)), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_checkpoints_without_a_list_of_blocks_run_as_they_are_in_training(
    name: str, capfd: pytest.CaptureFixture
) -> None:
    model = odd(RECOMPUTED[name])
    converted = te_transform.convert(model, X, verify=False)
    assert any("no list of blocks" in note for note in te_transform.report(converted).notes)
    pair = Pair(model, converted, X)
    pair.agree()
    with torch.no_grad():
        pair.agree(lambda model, x: model.eval()(x))
    assert capfd.readouterr().err == ""


def part_by_part(self: Any, x: Tensor, part: str = "") -> Tensor:
    return x + self.attention(self.norm(x)) if not part else getattr(self.attention, part)(self.norm(x))


def test_q_and_k_called_in_different_forwards() -> None:
    """Each has a backward of its own, and may have it twice."""

    def act(model: nn.Module, x: Tensor) -> list[Tensor]:
        x.requires_grad_()
        q, key = model(x, "q_proj")[0], model(x, "k_proj")[0]
        q.sum().backward()
        key.square().sum().backward(retain_graph=True)
        key.sum().backward()
        return [q.detach(), key.detach(), model(x)[0]]

    pair = Pair.of(odd(part_by_part, Attends))
    pair.agree(act)
    pair.agree(lambda model, x: [getattr(model.odd.attention, part)(x) for part in ("q_proj", "k_proj")])


def test_a_second_backward_is_right_or_refused_as_by_the_original() -> None:
    def act(model: nn.Module, x: Tensor, retain: bool) -> Tensor:
        out = model(x.requires_grad_())
        out.sum().backward(retain_graph=retain)
        out.square().sum().backward()
        return out.detach()

    pair = Pair.shared(Tiny)
    assert "error" not in pair.agree(partial(act, retain=True))
    assert "error" in pair.agree(partial(act, retain=False))


def test_a_forward_that_fails_half_way_leaves_nothing_behind() -> None:
    pair = Pair.shared(Tiny)
    for wrong in (X[..., :3], X.long(), None):
        assert "error" in pair.agree(lambda model, x, wrong=wrong: model(wrong))
    pair.agree()


PARTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "k first": lambda a, x: [a.k_proj(x), a.v_proj(x), a.q_proj(x)],
    "k of another": lambda a, x: [
        a.q_proj(x),
        a.k_proj(OTHER),
        a.v_proj(OTHER),
        a.q_proj(OTHER),
        a.v_proj(x),
    ],
    "k of an equal": lambda a, x: [a.q_proj(x), a.k_proj(x.clone()), a.v_proj(x[:1])],
    "in a checkpoint": lambda a, x: [
        a.q_proj(x),
        checkpoint(lambda x: torch.sin(a.k_proj(x)) * a.v_proj(x), x, use_reentrant=False),
    ],
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_called_from_outside(name: str) -> None:
    """Code that captures activations, or a notebook, calls the parts of a block itself."""
    Pair.shared(Tiny).agree(lambda model, x: PARTS[name](model.blocks[0].attention, x.requires_grad_()))


class Recomputed(Tiny):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Holds(nn.Module):
    """A backbone and a head, as models of transformers have them."""

    def __init__(self, kind: type[Tiny] = Tiny):
        super().__init__()
        self.backbone, self.head = kind(2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def backbone_alone(model: nn.Module, x: Tensor) -> Tensor:
    return model.backbone(x.requires_grad_())


def a_forward_of_its_own(model: nn.Module) -> None:
    """Set a forward as TRL's trainers do, which calls the backbone and computes the loss itself."""
    own = model.forward
    model.forward = lambda x, whole=False: own(x) if whole else model.backbone(x) * 2


@pytest.mark.parametrize("kind", [Tiny, Recomputed])
def test_a_backbone_that_is_called_by_itself_runs_fused(kind: type[Tiny]) -> None:
    pair = Pair.of(seeded(Holds, kind))
    pair.agree(backbone_alone)
    with calls(pair.converted) as found:
        pair.agree(backbone_alone)
    assert found["linear"] > 0
    pair.agree()
    pair.attack(a_forward_of_its_own)
    with calls(pair.converted) as found:
        pair.agree()
    assert found["linear"] > 0
    pair.agree(lambda model, x: model(x, whole=True))
    for model in pair.models:
        del model.forward
    Pair(pair.original, copy.deepcopy(pair.converted), X).agree(backbone_alone)


def test_a_part_keeps_its_class_and_runs_as_it_is_where_its_class_takes_no_subclass() -> None:
    class Final(Tiny):
        def __init_subclass__(cls, **kwargs: Any):
            raise TypeError("is final")

    model = seeded(Holds)
    model.backbone.__class__ = Final
    pair = Pair.of(model)
    assert type(pair.converted.backbone) is Final
    pair.agree(backbone_alone)
    pair.agree()
