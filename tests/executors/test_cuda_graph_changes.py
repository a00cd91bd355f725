"""The executor of CUDA graphs sees changes to the model and its tensors, also before a backward."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_transform
from te_transform.execution.attach import runner_of
from tests import attacks
from tests.attacks import Attends, Pair, X, observed
from tests.executors.helpers import Deep, loss, replayed
from tests.recordings import Recorder
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("cuda_graphs")


def freeze(model: nn.Module) -> None:
    model.blocks[0].mlp.fc1.weight.requires_grad_(False)


def assign(model: nn.Module) -> None:
    state = {name: value * 1.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def swap_data(model: nn.Module) -> None:
    model.blocks[0].mlp.fc1.weight.data = model.blocks[0].mlp.fc1.weight.data * 2


def step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "a frozen weight": freeze,
    "load_state_dict(assign=True)": assign,
    "weight.data": swap_data,
    "a step": step,
    "another dtype": lambda model: model.double(),
    "a hook on a module": lambda model: model.blocks[0].register_forward_hook(lambda *a: a[-1] * 2),
    "a hook on a parameter": lambda model: model.blocks[0].mlp.fc1.weight.register_hook(lambda g: g * 2),
    "a hook after accumulating": lambda model: model.blocks[0].mlp.fc1.weight
    .register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2)),
    "another eps": lambda model: setattr(model.blocks[0].norm, "eps", 0.5),
    "evaluation": lambda model: (setattr(model, "p", 0.5), model.eval()) and model.double(),
    "the buffer": lambda model: model.calls.fill_(7),
}  # fmt: skip


@attacks.each(CHANGES, "another dtype", "a hook on a module", "evaluation", "another eps")
def test_changes_to_the_model_are_seen(name: str, cuda_graphs: Recorder) -> None:
    pair = replayed(Deep)
    if name in ("another dtype", "evaluation"):
        for model in pair.models:
            CHANGES[name](model)
        pair.x = pair.x.double()
    else:
        pair.attack(CHANGES[name])
    for _ in range(4):
        pair.agree()


class Masked(Attends):
    """Attention of which a look at the mask shows that it is causal."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        x = super().forward(x)
        return F.scaled_dot_product_attention(x, x, x, mask)


def test_a_replaced_module_call_is_seen(cuda_graphs: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = replayed(Masked)

    def doubled(module: nn.Module, *args: Any) -> Any:
        return module._call_impl(*args) * 2

    pair.attack(lambda _: monkeypatch.setattr(nn.Module, "__call__", doubled), atol=1e-4)
    for _ in range(3):
        pair.agree(atol=1e-4)
    assert cuda_graphs["recorded"] == 2


def test_recordings_of_moved_parameters_are_freed(cuda_graphs: Recorder) -> None:
    pair = replayed(Deep)
    for move in (Tensor.clone, Tensor.double):
        for model in pair.models:
            for parameter in model.parameters():
                parameter.data = move(parameter.data)
        pair.x = move(pair.x)
        for _ in range(4):
            pair.agree()
    gc.collect()
    assert len(cuda_graphs.alive) == 1


class Broken(Deep):
    """A forward that dynamo captures in pieces."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.parametrize("kind", [Deep, Broken])
def test_recordings_are_freed_with_their_model(kind: type[nn.Module], cuda_graphs: Recorder) -> None:
    """Dynamo keeps what it was given for code that other models share."""
    pair = replayed(kind)
    assert cuda_graphs["recorded"]
    left = [weakref.ref(graph) for graph in runner_of(pair.converted).graphs]
    assert left
    del pair
    gc.collect()
    assert not [graph for graph in left if graph() is not None]
    assert not cuda_graphs.alive


def test_a_weight_written_before_the_backward_is_an_error() -> None:
    """The original raises too: the recorded backward would read the new numbers."""

    def act(model: nn.Module, x: Tensor) -> None:
        out = loss(model, x)
        with torch.no_grad():
            model.blocks[0].mlp.fc2.weight.mul_(2)
        try:
            out.backward()
        finally:
            with torch.no_grad():
                model.blocks[0].mlp.fc2.weight.div_(2)

    pair = replayed(Deep)
    for _ in range(2):
        assert "error" in pair.agree(act)
    pair.agree()


def test_a_weight_moved_before_the_backward_is_an_error() -> None:
    pair = replayed(Deep)
    out, weight = loss(pair.converted, X), pair.converted.blocks[0].mlp.fc2.weight
    weight.data = weight.data * 2
    with pytest.raises(RuntimeError, match="address of the forward, got a new one before the backward"):
        out.backward()


def test_an_input_may_be_overwritten_before_the_backward() -> None:
    pair, x = replayed(Deep), X.clone()
    expected = observed(pair.original, loss, X)
    out = loss(pair.converted, x)
    pair.converted.zero_grad()
    x.fill_(torch.nan)  # what a replay reads is a copy
    out.backward()
    for name, parameter in pair.converted.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_dropout_draws_new_numbers_in_each_replay(cuda_graphs: Recorder) -> None:
    model = seeded(Deep)
    model.p = 0.5
    converted = te_transform.convert(model, X, graphs=True, verify=False)
    for _ in range(3):
        loss(converted, X).backward()
    one, other = (converted(X)[0] for _ in range(2))
    assert not torch.equal(one, other)
    assert cuda_graphs["forward"] > 1
    states = []
    for each in (model, converted):
        torch.manual_seed(3)
        each.calls.zero_()
        states.append((loss(each, X).detach(), torch.get_rng_state()))
    torch.testing.assert_close(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


def test_recording_leaves_the_random_state_and_buffers_unchanged() -> None:
    """The call that is recorded is run three times more, of which nobody sees anything."""
    model = seeded(Deep)
    model.p = 0.5
    pair = Pair(model, te_transform.convert(model, X, graphs=True, verify=False), X)
    states = []
    for each in pair.models:
        torch.manual_seed(0)
        states.append([(loss(each, X).backward(), each.calls.item(), torch.rand(())) for _ in range(5)])
    assert states[0] == states[1]


def test_calls_after_a_failed_call_are_right() -> None:
    pair = replayed(Deep)
    for wrong in (X[..., :3], None):
        assert "error" in pair.agree(lambda model, x, wrong=wrong: model(wrong))
    pair.agree()


def test_copies_record_for_themselves(cuda_graphs: Recorder) -> None:
    pair = replayed(Deep)
    twin = Pair(pair.original, copy.deepcopy(pair.converted), X)
    for model in pair.models:
        step(model)
    with torch.no_grad():
        for own, theirs in zip(twin.converted.parameters(), pair.original.parameters(), strict=True):
            own.copy_(theirs)
        twin.converted.calls.copy_(pair.original.calls)
    before = cuda_graphs["recorded"]
    for _ in range(4):
        twin.agree()
    assert cuda_graphs["recorded"] == before + 1
