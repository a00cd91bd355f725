"""CUDA graphs: what calls, and what was done to the model between them, see of calls that are replayed.

Here a recording is emulated: a replay runs the function again, on the tensors that were recorded, and writes
to those that it returned then. tests/gpu runs the same calls as CUDA graphs.
"""

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import StaticCache

import te_transform
from te_transform import OptionError
from te_transform.backends import limits
from te_transform.execution import graph_recording, replayed, specialize
from te_transform.execution.runner import runner_of
from te_transform.plan import options
from tests import attacks, stand_in, test_compiled, test_quantize
from tests.attacks import OTHER, WIDTH, Attends, Block, Pair, X, observed
from tests.conversions import ALL, EVERYWHERE, error, gradients, run
from tests.zoo import seeded, zero_dropout

te, compilations, products = stand_in.te, test_compiled.compilations, test_quantize.products  # fixtures
pytestmark = pytest.mark.usefixtures("counts")


class Emulated:
    """Graphs, whose replay runs the functions themselves."""

    counts: ClassVar[Counter[str]] = Counter()
    all: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(
        self,
        forward: Callable[[], list[Tensor]],
        backward: Callable[[list[Tensor]], list[Tensor | None]] | None,
        device: torch.device,
    ):
        self.forward, self.backward, self.records = forward, backward, torch.is_grad_enabled()
        self.all.add(self)
        self.counts["recorded"] += 1
        self.live = forward()
        self.gradients = backward(self.live) if backward else []
        self.outputs = [output.detach().clone() for output in self.live]

    def replay_forward(self) -> None:
        self.counts["forward"] += 1
        with torch.set_grad_enabled(self.records):
            self.live = self.forward()
        overwrite(self.outputs, self.live)
        for gradient in self.gradients:  # a forward may use the memory that the backward has left
            if gradient is not None:
                gradient.fill_(torch.nan)

    def replay_backward(self) -> None:
        self.counts["backward"] += 1
        with torch.enable_grad():
            overwrite(self.gradients, self.backward(self.live))

    def free(self) -> None:
        self.counts["freed"] += 1


def overwrite(kept: list[Tensor | None], made: list[Tensor | None]) -> None:
    for old, new in zip(kept, made, strict=True):
        assert (old is None) == (new is None)
        if old is not None:
            old.copy_(new.detach())


def emulate(patch: pytest.MonkeyPatch) -> None:
    """Record and replay without a GPU."""
    patch.setattr(graph_recording, "CudaGraphPair", Emulated)
    patch.setattr(options, "cuda_graphs", lambda: True)
    patch.setattr(limits, "DEVICE", "cpu")
    patch.setattr(Emulated, "counts", Counter())
    patch.setattr(Emulated, "all", weakref.WeakSet())
    # the functions themselves count what they write to
    patch.setattr(graph_recording, "increment_version", lambda tensor: None)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often something was recorded, and replayed."""
    torch._dynamo.reset()  # captures of other tests count toward dynamo's limit for a forward
    emulate(monkeypatch)
    return Emulated.counts


def pair_of(model: type[nn.Module] | nn.Module, **options: Any) -> Pair:
    """A pair whose calls in training are replayed from the next on."""
    pair = Pair.of(model, graphs=True, **options)
    for _ in range(3):
        pair.agree()
    return pair


class Deep(nn.Module):
    """Blocks with attention and without, with an auxiliary output and a buffer that counts calls."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Attends()])
        self.p = 0.0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        for block in self.blocks:
            x = F.dropout(block(x), self.p, self.training)
        return x, x.mean(-1) + self.calls


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out, means = model(x)
    return out.square().sum() + means.sum()


def notes(model: nn.Module) -> list[str]:
    return [note for note in te_transform.report(model).notes if "without CUDA graphs" in note]


@pytest.mark.parametrize("name", ["torch_encoder_pre", pytest.param("gpt2", marks=pytest.mark.integration)])
def test_models_in_training_and_evaluation_by_turns(name: str, counts: Counter) -> None:
    case = ALL[name]
    layers = {"n_layer": 1} if name == "gpt2" else {}
    model, inputs = zero_dropout(case.build(**layers)), case.sample()
    converted = te_transform.convert(model, inputs, verify=False, graphs=True)
    for _ in range(4):
        assert error(run(converted, inputs), run(model, inputs)) < EVERYWHERE
        expected, actual = (gradients(m, inputs) for m in (model, converted))
        assert expected.keys() == actual.keys()
        pairs = [(actual[key], grad) for key, grad in expected.items() if grad is not None]
        assert error(*zip(*pairs, strict=True)) < EVERYWHERE
    # in training once more: what was returned before is still there
    assert counts == {"recorded": 3, "forward": 7, "backward": 4}
    assert notes(converted) == []


def test_calls_are_replayed_from_the_third_on(counts: Counter) -> None:
    pair = Pair.of(Deep, graphs=True)
    for call in range(1, 6):
        pair.agree()
        # one replay more is the check of what was recorded
        assert counts["forward"] == counts["backward"] == max(0, call - 1 if call > 2 else 0)
    assert any("CUDA graphs, from the third" in note for note in te_transform.report(pair.converted).notes)


def test_another_size_is_another_kind(counts: Counter) -> None:
    pair = pair_of(Deep)
    for x in (X, X[:, :3], X[:1], X):
        pair.x, before = x, counts["forward"]
        for _ in range(4):
            pair.agree()
        assert counts["forward"] > before
    assert notes(pair.converted) == []


def test_gradients_are_accumulated(counts: Counter) -> None:
    pair, batches = pair_of(Deep), torch.randn(4, 2, 5, WIDTH)
    before = counts["backward"]
    found = []
    for model in pair.models:
        model.zero_grad()
        kept = []
        for batch in batches:
            loss(model, batch).backward()
            kept.append(model.blocks[0].mlp.fc1.weight.grad.clone())
        found.append(kept)
    assert counts["backward"] == before + 4
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_are_handed_out_where_they_are_until_somebody_keeps_them(counts: Counter) -> None:
    pair, weight = pair_of(Deep), "blocks.0.mlp.fc1.weight"
    parameter = pair.converted.get_parameter(weight)

    def places(steps: int) -> set[int]:
        found = set()
        for _ in range(steps):
            pair.agree()
            found.add(parameter.grad.data_ptr())
        return found

    assert len(places(3)) == 1
    before, kept = counts["forward"], parameter.grad.detach()
    was = kept.clone()
    pair.x = OTHER
    assert kept.data_ptr() not in places(3)
    assert torch.equal(kept, was)
    assert counts["recorded"] == 2
    assert counts["forward"] == before + 4  # with the check of what was recorded


class SharesAGradient(nn.Module):
    """Two parameters whose gradients autograd computes as one tensor."""

    def __init__(self):
        super().__init__()
        self.block, self.one, self.two = Block(), nn.Parameter(torch.ones(WIDTH)), nn.Parameter(X[0, 0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x).sum(), self.one + self.two


def test_gradients_that_are_one_tensor(counts: Counter) -> None:
    def act(model: nn.Module, x: Tensor) -> None:
        total, out = model(x)
        (total + out.square().sum()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad *= 2  # a clip

    pair = Pair.of(SharesAGradient, graphs=True)
    for _ in range(5):
        pair.agree(act)
    assert counts["backward"] == 4


def test_what_a_call_returned_stays(counts: Counter) -> None:
    pair = pair_of(Deep)
    parameters = [*pair.converted.parameters()]
    before = counts["forward"]
    out, _ = (model(X) for model in (pair.converted, pair.original))
    assert counts["forward"] == before + 1
    grads = torch.autograd.grad(out[0].sum() + out[1].sum(), parameters)
    values = [tensor.clone() for tensor in (*out, *grads)]
    pair.x = OTHER
    pair.agree()
    assert counts["forward"] > before + 1
    for now, then in zip((*out, *grads), values, strict=True):
        assert torch.equal(now, then)


def test_two_forwards_before_a_backward(counts: Counter) -> None:
    def act(model: nn.Module, x: Tensor) -> Tensor:
        return loss(model, x) + 2 * loss(model, x + 1) - loss(model, x * 2)

    pair = pair_of(Deep)
    for _ in range(3):
        pair.agree(act, atol=1e-4)


def test_a_forward_that_nobody_goes_back_through(counts: Counter) -> None:
    pair = pair_of(Deep)
    before = counts["forward"]
    for model in pair.models:
        for _ in range(3):
            model(X)
    assert counts["forward"] == before + 3  # none waits for a backward that cannot come
    pair.agree()


def again(model: nn.Module, x: Tensor) -> Tensor:
    out = loss(model, x.requires_grad_())
    out.backward(retain_graph=True)
    out.backward()
    return out.detach()


def second_derivative(model: nn.Module, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss(model, x.requires_grad_()), x, create_graph=True)
    return gradient.square().sum()


def of_one_output(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[1]


def of_neither(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[1].detach()


def freed(model: nn.Module, x: Tensor) -> None:
    out = loss(model, x)
    out.backward()
    out.backward()


def several_at_once(model: nn.Module, x: Tensor) -> Tensor:
    out = loss(model, x.requires_grad_())
    return torch.autograd.grad(out, x, torch.arange(3.0), is_grads_batched=True)[0]


@pytest.mark.parametrize("act", [again, second_derivative, several_at_once, of_one_output, of_neither, freed])
def test_other_backwards_than_the_recorded_one(act: Callable[[nn.Module, Tensor], Any]) -> None:
    pair = pair_of(Deep)
    for _ in range(3):
        pair.agree(act, atol=1e-4)
    pair.agree()


def test_a_second_backward_outside_of_the_autocast_of_the_forward() -> None:
    converted = te_transform.convert(seeded(Deep), X, graphs=True, verify=False)
    weight = converted.blocks[0].mlp.fc1.weight
    for _ in range(4):
        converted.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = loss(converted, X)
        out.backward(retain_graph=True)
        once = weight.grad.clone()
        out.backward()
        torch.testing.assert_close(weight.grad, 2 * once, rtol=1e-6, atol=0.0)


def test_the_kinds_of_the_longest_ago_are_let_go(counts: Counter) -> None:
    pair = pair_of(Deep)
    weight = pair.converted.blocks[0].mlp.fc1.weight
    own, others = weight.data, [weight.data.clone() for _ in range(replayed.MOST)]
    for other in others:
        weight.data = other
        pair.agree()
        weight.data = own
        pair.agree()
    assert counts["recorded"] == 1


def test_outputs_with_gradients_now_here_now_there(counts: Counter) -> None:
    pair = pair_of(Deep)
    for _ in range(3):
        pair.agree(of_one_output)
        pair.agree()
    assert notes(pair.converted) == [
        "a graph runs without CUDA graphs, the set of its outputs with gradients keeps changing"
    ]
    before = counts["forward"]
    pair.agree()
    assert counts["forward"] == before


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
def test_the_model_is_changed(name: str, counts: Counter) -> None:
    pair = pair_of(Deep)
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


def test_what_calls_all_modules_is_replaced(counts: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(Masked)

    def doubled(module: nn.Module, *args: Any) -> Any:
        return module._call_impl(*args) * 2

    pair.attack(lambda _: monkeypatch.setattr(nn.Module, "__call__", doubled), atol=1e-4)
    for _ in range(3):
        pair.agree(atol=1e-4)
    assert counts["recorded"] == 2


def test_what_was_recorded_for_moved_parameters_is_let_go() -> None:
    pair = pair_of(Deep)
    for move in (Tensor.clone, Tensor.double):
        for model in pair.models:
            for parameter in model.parameters():
                parameter.data = move(parameter.data)
        pair.x = move(pair.x)
        for _ in range(4):
            pair.agree()
    gc.collect()
    assert len(Emulated.all) == 1


class Broken(Deep):
    """A forward that dynamo captures in pieces."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.parametrize("kind", [Deep, Broken])
def test_nothing_is_left_of_a_model_that_is_gone(kind: type[nn.Module], counts: Counter) -> None:
    """Dynamo keeps what it was given for code that other models share."""
    pair = pair_of(kind)
    assert counts["recorded"]
    left = [weakref.ref(graph) for graph in runner_of(pair.converted).graphs]
    assert left
    del pair
    gc.collect()
    assert not [graph for graph in left if graph() is not None]
    assert not Emulated.all


def test_a_weight_written_to_before_the_backward() -> None:
    """Where the original raises, so does a replay: the recorded backward would read the new numbers."""

    def act(model: nn.Module, x: Tensor) -> None:
        out = loss(model, x)
        with torch.no_grad():
            model.blocks[0].mlp.fc2.weight.mul_(2)
        try:
            out.backward()
        finally:
            with torch.no_grad():
                model.blocks[0].mlp.fc2.weight.div_(2)

    pair = pair_of(Deep)
    for _ in range(2):
        assert "error" in pair.agree(act)
    pair.agree()


def test_memory_that_a_weight_was_given_before_the_backward() -> None:
    pair = pair_of(Deep)
    out, weight = loss(pair.converted, X), pair.converted.blocks[0].mlp.fc2.weight
    weight.data = weight.data * 2
    with pytest.raises(RuntimeError, match="address of the forward, got a new address before the backward"):
        out.backward()


def test_an_input_written_to_before_the_backward() -> None:
    pair, x = pair_of(Deep), X.clone()
    expected = observed(pair.original, loss, X)
    out = loss(pair.converted, x)
    pair.converted.zero_grad()
    x.fill_(torch.nan)  # what a replay reads is a copy
    out.backward()
    for name, parameter in pair.converted.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_dropout_draws_other_numbers_in_each_replay(counts: Counter) -> None:
    model = seeded(Deep)
    model.p = 0.5
    converted = te_transform.convert(model, X, graphs=True, verify=False)
    for _ in range(3):
        loss(converted, X).backward()
    one, other = (converted(X)[0] for _ in range(2))
    assert not torch.equal(one, other)
    assert counts["forward"] > 1
    states = []
    for each in (model, converted):
        torch.manual_seed(3)
        each.calls.zero_()
        states.append((loss(each, X).detach(), torch.get_rng_state()))
    torch.testing.assert_close(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


def test_recording_leaves_random_numbers_and_buffers_as_they_are() -> None:
    """The call that is recorded is run three times more, of which nobody sees anything."""
    model = seeded(Deep)
    model.p = 0.5
    pair = Pair(model, te_transform.convert(model, X, graphs=True, verify=False), X)
    states = []
    for each in pair.models:
        torch.manual_seed(0)
        states.append([(loss(each, X).backward(), each.calls.item(), torch.rand(())) for _ in range(5)])
    assert states[0] == states[1]


def test_a_call_that_fails_leaves_the_next_ones_right() -> None:
    pair = pair_of(Deep)
    for wrong in (X[..., :3], None):
        assert "error" in pair.agree(lambda model, x, wrong=wrong: model(wrong))
    pair.agree()


def test_deepcopy_and_pickle_record_for_themselves(counts: Counter) -> None:
    pair = pair_of(Deep)
    twin = Pair(pair.original, copy.deepcopy(pair.converted), X)
    for model in pair.models:
        step(model)
    with torch.no_grad():
        for own, theirs in zip(twin.converted.parameters(), pair.original.parameters(), strict=True):
            own.copy_(theirs)
        twin.converted.calls.copy_(pair.original.calls)
    before = counts["recorded"]
    for _ in range(4):
        twin.agree()
    assert counts["recorded"] == before + 1


class Odd(nn.Module):
    """A block, and what its subclasses do."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.register_buffer("seen", torch.zeros(WIDTH))


class ReturnsAPart(Odd):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x), self.seen[1:]


class ReturnsAView(Odd):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.block(x)
        return out, out[0]


class ReturnsAnInput(Odd):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x), x.view(-1)


REFUSED = {
    ReturnsAPart: "it returns memory of an argument",
    ReturnsAView: "it returns two tensors that share memory",
    ReturnsAnInput: "it returns memory of an argument",
}


@pytest.mark.parametrize("build", REFUSED)
def test_what_cannot_be_handed_out_as_copies(build: type[nn.Module], counts: Counter) -> None:
    pair = pair_of(build)
    for _ in range(3):
        pair.agree()
    assert counts["forward"] == 0
    assert notes(pair.converted) == [f"a graph runs without CUDA graphs, {REFUSED[build]}"]


def test_what_is_recorded_is_held_to_what_the_call_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads memory of its own plan, as cuDNN's attention did, would be found here."""

    class Garbage(Emulated):
        def replay_forward(self) -> None:
            super().replay_forward()
            self.outputs[0][0, 0, 0] = torch.nan

    monkeypatch.setattr(graph_recording, "CudaGraphPair", Garbage)
    pair = pair_of(Deep)
    pair.agree()
    (note,) = notes(pair.converted)
    assert "computes other numbers" in note


@pytest.mark.parametrize(("scatter", "accepted"), [((0.01,) * 16, False), ((0.01,) * 9 + (0.04,), True)])
def test_a_replay_may_differ_as_far_as_the_calls_themselves(
    scatter: tuple[float, ...], accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that add up in any order are not as far apart in any two calls."""

    class Otherwise(Emulated):
        def replay_forward(self) -> None:
            super().replay_forward()
            self.outputs[0] *= 1.06

    far = iter(scatter)
    monkeypatch.setattr(graph_recording, "CudaGraphPair", Otherwise)
    monkeypatch.setattr(replayed, "_distances", lambda *call: [next(far)] * len(call[-1]))
    pair = Pair.of(Deep, graphs=True)
    for _ in range(3):
        pair.converted(pair.x)[0].sum().backward()
    assert next(far, None) is None
    said = "a graph runs without CUDA graphs, the recording computes other numbers, off by 0.06 where "
    assert notes(pair.converted) == ([] if accepted else [said + "rounding is 0.02"])


@pytest.mark.parametrize("failing", ["recording", "the function"])
def test_a_recording_that_fails(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    target = (graph_recording, "CudaGraphPair") if failing == "recording" else (replayed, "_unfit_outputs")
    monkeypatch.setattr(*target, out_of_memory)
    pair = pair_of(Deep)
    pair.agree()
    assert notes(pair.converted) == [
        "a graph runs without CUDA graphs, OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    ]


def test_autocast_casts_weights_in_the_recording() -> None:
    """Copies that autocast keeps over a context would be those of weights before a step."""

    def act(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first = model(x)[0].square().sum()
            with torch.no_grad():
                model.blocks[0].mlp.fc1.weight.mul_(1.01)
            torch.clear_autocast_cache()
        return first.float()

    pair = pair_of(Deep)
    for _ in range(4):
        for model in pair.models:
            observed(model, act, X)
        found = [loss(model, X).item() for model in pair.models]
        assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.integration  # as the generations by turns below
def test_a_generation_with_a_static_cache(counts: Counter) -> None:
    case = ALL["llama"]
    model = case.build(num_hidden_layers=1).eval()
    converted = te_transform.convert(model, case.sample(), verify=False, graphs=True)
    ids = case.sample(seq=5)["input_ids"]

    def logits(each: nn.Module) -> list[Tensor]:
        cache, given, found = StaticCache(config=model.config, max_cache_len=16), ids, []
        with torch.no_grad():
            for _ in range(8):
                found.append(each(given, past_key_values=cache, use_cache=True).logits.clone())
                given = found[-1][:, -1:].argmax(-1)
        return found

    for batch in range(2):  # whose cache is another one, in other memory
        assert error(logits(converted), logits(model)) < EVERYWHERE
        assert counts["forward"] == 6 * (batch + 1)  # of seven tokens two are warm-ups, one is a check too
    assert notes(converted) == []


@pytest.mark.integration
@pytest.mark.parametrize("compile", [True, False])
def test_a_generation_with_weights_in_fp8_alone(
    te: ModuleType, products: list[tuple[int, ...]], counts: Counter, compile: bool
) -> None:
    case = ALL["llama"]
    model = case.build(num_hidden_layers=1).bfloat16().eval().requires_grad_(False)
    recipe = te_transform.PrecisionPlan("fp8-current", small_calls=True)
    converted = te_transform.convert(
        model, case.sample(), verify=False, backend="te", recipe=recipe, graphs=True, compile=compile
    )
    prompt = case.sample(seq=20)["input_ids"]
    with torch.no_grad():
        converted(prompt)
    te_transform.quantize_weights(converted)
    model = copy.deepcopy(converted)
    te_transform.revert(model)

    def logits(each: nn.Module) -> list[Tensor]:
        cache, found = StaticCache(config=model.config, max_cache_len=40), []
        with torch.no_grad():
            converted(prompt, past_key_values=cache, use_cache=True)  # more rows, which are rounded to FP8
            for place in range(8):
                found.append(each(prompt[:, place : place + 1], past_key_values=cache).logits.float())
        return found

    found = logits(converted)
    assert counts["forward"] >= 5
    assert {rows for rows, _ in products} == {len(prompt)}
    assert error(found, logits(model)) < 0.02
    assert notes(converted) == []


def elsewhere(model: nn.Module) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data = weight.data * 2


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)


def swapped(model: nn.Module) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight


def another_scale(model: nn.Module) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def a_hook(model: nn.Module) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often calls are looked at before they run."""
    looks, look = Counter(), specialize.Specialized.look

    def counted(self: specialize.Specialized, arguments: Sequence[Any]) -> Any:
        looks["looks"] += 1
        return look(self, arguments)

    monkeypatch.setattr(specialize.Specialized, "look", counted)
    return looks


@pytest.mark.integration  # each change alone is above
@pytest.mark.parametrize("flat", [False, True], ids=["own memory", "one memory for all"])
def test_steps_after_changes(flat: bool, counts: Counter, looks: Counter) -> None:
    case = ALL["llama"]
    model = case.build(num_hidden_layers=1).eval()
    if flat:  # joined weights are copies then, which each call makes anew
        parameters = [*model.parameters()]
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters), parameters)
    models = te_transform.convert(model, case.sample(), verify=False, graphs=True), model
    token, cache_of = case.sample(seq=1)["input_ids"], partial(StaticCache, config=model.config)
    caches = [cache_of(max_cache_len=64) for _ in models]

    @torch.no_grad()
    def agree(steps: int) -> None:
        for _ in range(steps):
            found = [
                each(token, past_key_values=cache).logits for each, cache in zip(models, caches, strict=True)
            ]
            assert error(found[:1], found[1:]) < EVERYWHERE

    agree(9)
    assert flat or looks["looks"] < 9
    for change in (in_place, elsewhere) if flat else (in_place, elsewhere, swapped, another_scale, a_hook):
        before = counts["forward"]
        for each in models:
            change(each)
        agree(7)
        assert counts["forward"] > before, change


@pytest.mark.parametrize(
    "padded",
    [pytest.param(False, marks=pytest.mark.integration), True],
    ids=["a mask of sizes", "a mask of data"],
)
def test_forwards_with_a_mask(padded: bool, counts: Counter, looks: Counter) -> None:
    case = ALL["llama"]
    model = case.build(num_hidden_layers=1).eval()
    inputs = {"input_ids": case.sample(seq=7)["input_ids"]}
    masks = [torch.ones_like(inputs["input_ids"])] if padded else []
    if padded:
        masks.append(masks[0].clone().index_fill_(1, torch.tensor([0, 1]), 0))
    given = [{**inputs, "attention_mask": mask} for mask in masks] or [inputs]
    converted = te_transform.convert(model, given[0], verify=False, graphs=True)
    with torch.no_grad():
        for call in range(9):
            each = given[call % len(given)]
            # a mask of sizes is the same in all calls, one of data is looked at in each
            assert error(converted(**each).logits, model(**each).logits) < EVERYWHERE
    assert looks["looks"] == 9 if padded else looks["looks"] < 9
    assert counts["forward"] > 0, notes(converted)


@pytest.mark.integration
def test_steps_of_two_generations_by_turns(counts: Counter) -> None:
    case = ALL["llama"]
    model = case.build(num_hidden_layers=1).eval()
    models = te_transform.convert(model, case.sample(), verify=False, graphs=True), model
    ids = case.sample(seq=5)["input_ids"]
    caches = [[StaticCache(config=model.config, max_cache_len=32) for _ in models] for _ in range(2)]
    model.requires_grad_(False)
    models[0].requires_grad_(False)
    for step in range(12):
        with torch.set_grad_enabled(step % 3 == 0):
            found = [
                each(ids[:, step % 5, None], past_key_values=cache).logits
                for each, cache in zip(models, caches[step % 2], strict=True)
            ]
        assert error(found[:1], found[1:]) < EVERYWHERE
    assert counts["forward"] > 0, notes(models[0])


@pytest.mark.integration  # as the generations by turns
def test_generate_with_a_growing_cache_and_with_a_static_one(counts: Counter) -> None:
    case = ALL["llama"]
    model = case.build(num_hidden_layers=1).eval()
    converted = te_transform.convert(model, case.sample(), verify=False, graphs=True)
    ids, how = case.sample(seq=5)["input_ids"], {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(converted.generate(ids, **how), model.generate(ids, **how))
    assert counts["recorded"] == 0
    how |= {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(converted.generate(ids, **how), model.generate(ids, **how))
    assert counts["recorded"] == 1


GRADIENTS = ("output 0", "mlp.fc1.weight", "mlp.fc2.weight", "norm.weight")


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-current"])
def test_products_in_fp8(te: ModuleType, recipe: str, counts: Counter) -> None:
    model, batches = seeded(Block), torch.randn(7, 2, 16, WIDTH, generator=torch.Generator().manual_seed(0))
    exact = copy.deepcopy(model).double()
    options = {"backend": "te", "recipe": te_transform.PrecisionPlan(recipe, small_calls=True)}
    model = model.bfloat16()
    eager = te_transform.convert(model, batches[0].bfloat16(), verify=False, **options)
    graphed = te_transform.convert(model, batches[0].bfloat16(), verify=False, graphs=True, **options)
    off = {eager: 0.0, graphed: 0.0}
    for batch in batches:
        right = observed(exact, lambda model, x: model(x), batch.double())
        for each in off:
            found = observed(each, lambda model, x: model(x), batch.bfloat16())
            off[each] += error([found[name] for name in GRADIENTS], [right[name] for name in GRADIENTS])
    assert off[graphed] <= 1.2 * off[eager]
    assert counts["forward"] >= 3
    assert notes(graphed) == []


def test_what_was_compiled_is_replayed(counts: Counter, compilations: test_compiled.Compilations) -> None:
    pair = pair_of(Deep, compile=True)
    pair.agree()
    assert len(compilations) == 1
    assert counts["forward"] > 1
    assert notes(pair.converted) == []


def test_accumulate_runs_without_them(te: ModuleType, counts: Counter) -> None:
    model = seeded(Block).bfloat16()
    x = torch.randn(2, 16, WIDTH).bfloat16()
    converted = te_transform.convert(model, x, backend="te", graphs=True)
    for _ in range(4):
        loss(converted, x).backward()
    before = counts["forward"]
    with te_transform.accumulate(converted, steps=2):
        for _ in range(2):
            loss(converted, x).backward()
    assert counts["forward"] == before > 0


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_two_ways_to_cuda_graphs_are_an_error(mode: str) -> None:
    with pytest.raises(OptionError, match="makes CUDA graphs by itself, got graphs=True; pass compile=True"):
        te_transform.convert(seeded(Block), X, graphs=True, compile=mode)


def test_without_a_gpu_the_option_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "cuda_graphs", limits.cuda_graphs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="got a machine without one; leave graphs=False"):
        te_transform.convert(seeded(Block), X, graphs=True)
    assert te_transform.inspect(seeded(Block), X, graphs=True).fused


class Marked(Tensor):
    """A subclass of tensors."""


def doubled(x: Tensor, other: Any = None) -> list[Any]:
    return [x * 2]


def writing(x: Tensor, other: Tensor) -> list[Any]:
    other.mul_(2)
    return [x * other]


UNFIT: dict[str, tuple[Callable[..., list[Any]], Any]] = {
    "it has a random generator as an argument": (doubled, torch.Generator()),
    "it reads a Marked": (doubled, X.as_subclass(Marked)),
    "it reads a tensor on meta": (doubled, X.to("meta")),
    "it writes to tensors that its operations do not name": (writing, X.clone()),
    "it returns no tensor on the GPU, or also tensors on another device": (
        lambda x, other: [x.sum().item()],
        X,
    ),
}


@pytest.mark.parametrize("why", UNFIT)
def test_what_cannot_be_recorded_is_said_once(why: str, counts: Counter) -> None:
    run, other = UNFIT[why]
    said: list[str] = []
    call = replayed.Replayed(graph_recording.Function(run, [False, True], [], [], said.append))
    with torch.no_grad():
        for _ in range(5):
            call(X, other)
    assert said == [f"a graph runs without CUDA graphs, {why}"]
    assert counts["forward"] == 0


def test_expanded_arguments_are_recorded(counts: Counter) -> None:
    said: list[str] = []
    call = replayed.Replayed(graph_recording.Function(doubled, [False], [], [], said.append))
    with torch.no_grad():
        for number in range(5):
            x = (X[:, :1] + number).expand_as(X)
            assert torch.equal(call(x)[0], x * 2)
    assert counts["forward"]
    assert not said


def test_another_choice_of_attentions_kernels_is_recorded_for_itself(counts: Counter) -> None:
    pair = pair_of(Deep)
    for choice in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel([choice, SDPBackend.MATH]):
            for _ in range(4):
                pair.agree()
    assert counts["recorded"] == 3


def test_a_model_on_another_device_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DEVICE", "cuda")
    pair = pair_of(Deep)
    pair.agree()
    assert notes(pair.converted) == ["a graph runs without CUDA graphs, it reads a tensor on cpu"]
