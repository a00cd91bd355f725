"""Queries and keys turned in a fused kernel: only where the cosines are known, never to other numbers."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

import te_transform
from te_transform.normalise import normalise
from te_transform.rotary import RotarySlot, angles_of, rotary_of, rotating
from te_transform.slots import slot_class
from te_transform.trace import record
from tests import stand_in
from tests.bitwise import untouched
from tests.conversions import ALL, EVERYWHERE, error, gradients, run
from tests.stand_in import Core, Te
from tests.zoo import LAYERS, Inputs, seeded

TURNED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3")

pytestmark = pytest.mark.usefixtures("at_any_size")


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Te:
    return stand_in.install(monkeypatch)


class Pair:
    """A model and the converted one, which stays on one of two paths: turned in the kernel, or as it was."""

    def __init__(self, te: Te, model: nn.Module, inputs: Inputs, verify: bool = False):
        self.te, self.inputs, self.original = te, inputs, model
        self.converted = te_transform.convert(model, inputs, verify=verify)
        te.turned = 0

    def agree(self, turned: int, inputs: Inputs | None = None) -> None:
        """Outputs and gradients are the original's, and the kernel ran `turned` times in a forward."""
        inputs = self.inputs if inputs is None else inputs
        self.te.turned = 0
        assert error(run(self.converted, inputs), run(self.original, inputs)) < EVERYWHERE
        assert self.te.turned == turned
        found, expected = gradients(self.converted, inputs), gradients(self.original, inputs)
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            assert error([found[name]], [grad]) < EVERYWHERE, name


def pair(te: Te, name: str = "llama", verify: bool = False) -> Pair:
    return Pair(te, ALL[name].build(), ALL[name].sample(), verify)


def llama(**settings: Any) -> nn.Module:
    known = ALL["llama"].build().config.to_dict()
    return seeded(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**known | settings)))


def gpt_neox(part: float) -> nn.Module:
    known = ALL["gpt_neox"].build().config.to_dict()
    known["rope_parameters"] = {**known["rope_parameters"], "partial_rotary_factor": part}
    return seeded(lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**known)))


def source(model: nn.Module, inputs: Inputs) -> list[nn.Module | None]:
    """What is proved of each attention module of the model."""
    recording = normalise(record(model, te_transform.inputs.Inputs((), inputs)))
    recording.index()
    calls = [call for call in recording.calls if hasattr(call.module, "layer_idx")]
    return [rotary_of(call, recording) for call in calls if "Attention" in type(call.module).__name__]


# The path in the kernel


@pytest.mark.parametrize("name", TURNED)
def test_models_are_turned_in_the_kernel_and_keep_their_numbers(te: Te, name: str) -> None:
    both = pair(te, name, verify=name == "llama")
    assert te_transform.report(both.converted).counts["attention"] == LAYERS
    both.agree(turned=LAYERS)
    both.agree(turned=LAYERS, inputs=ALL[name].sample(batch=3, seq=17))


@pytest.mark.parametrize("trained", [True, False])
def test_a_backward_keeps_the_values_alone(te: Te, trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the whole product that they are a part of, whose queries and keys were turned since."""
    both, own, sizes = pair(te), Core.forward, []

    def forward(core: Core, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        sizes.append((value.untyped_storage().nbytes() / value.nbytes, value.transpose(1, 2).is_contiguous()))
        return own(core, query, key, value, *rest)

    monkeypatch.setattr(Core, "forward", forward)
    with torch.set_grad_enabled(trained):
        both.converted(**both.inputs, use_cache=False)  # which would have made a copy
    assert len(sizes) == LAYERS
    assert all((times == 1) == trained for times, _ in sizes)
    assert not trained or all(in_order for _, in_order in sizes)


@pytest.mark.parametrize("name", TURNED)
def test_the_module_that_makes_the_cosines_is_found(name: str) -> None:
    model = ALL[name].build()
    assert source(model, ALL[name].sample()) == [model.model.rotary_emb] * LAYERS


def test_verify_finds_nothing(te: Te) -> None:
    both = pair(te)
    result = te_transform.verify(both.original, both.converted, both.inputs)
    assert result, str(result)
    assert te.turned


def test_padding_leaves_the_shared_positions_alone(te: Te) -> None:
    both = pair(te)
    both.agree(turned=LAYERS, inputs=ALL["llama"].sample(padded=True))


def test_positions_that_do_not_begin_at_zero_are_followed(te: Te) -> None:
    both = pair(te)
    both.agree(turned=LAYERS, inputs=both.inputs | {"position_ids": torch.arange(7, 19)[None]})


def test_generation_of_one_sequence_gives_the_same_tokens(te: Te) -> None:
    both, ids = pair(te), ALL["llama"].sample(batch=1)["input_ids"]
    assert torch.equal(generated(both.converted, ids), generated(both.original, ids))
    assert te.turned == 8 * LAYERS


def generated(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    return model.eval().generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_turn_again_in_the_backward(te: Te, reentrant: bool) -> None:
    both = pair(te)
    for model in (both.original, both.converted):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.train()(**both.inputs).logits.pow(2).sum().backward()
    assert te.turned == 2 * LAYERS
    expected = {name: p.grad for name, p in both.original.named_parameters()}
    for name, held in te_transform.originals.original_parameters(both.converted).items():
        assert error([held.part(held.held.grad)], [expected[name]]) < EVERYWHERE, name


def test_two_rotary_modules_are_told_apart(te: Te) -> None:
    both = Pair(te, seeded(TwoRotaries), {"x": torch.randn(2, 5, 64)})
    assert source(both.original, both.inputs) == [both.original.near, both.original.far]
    both.agree(turned=2)


class TwoRotaries(nn.Module):
    """Local and global layers, each with angles of their own."""

    def __init__(self):
        super().__init__()
        config = ALL["llama"].build().config
        far = copy.deepcopy(config)
        far.rope_parameters["rope_theta"] = 100.0
        self.near, self.far = (modeling_llama.LlamaRotaryEmbedding(c) for c in (config, far))
        self.layers = nn.ModuleList(modeling_llama.LlamaAttention(config, i) for i in range(2))

    def forward(self, x: Tensor, swapped: bool = False) -> Tensor:
        positions = torch.arange(x.shape[1])[None]
        turns = [self.near(x, positions), self.far(x, positions)]
        for layer, turn in zip(self.layers, turns[::-1] if swapped else turns, strict=True):
            x = x + layer(x, position_embeddings=turn, attention_mask=None)[0]
        return x


def test_angles_go_with_the_cosines_whoever_reads_them(te: Te) -> None:
    both = Pair(te, seeded(TwoRotaries), {"x": torch.randn(2, 5, 64)})
    both.agree(turned=2, inputs=both.inputs | {"swapped": True})


# What is not turned in the kernel


def test_positions_of_each_row_are_turned_as_they_were(te: Te) -> None:
    both = pair(te)
    rows = torch.stack([torch.arange(12), torch.arange(12).flip(0)])
    both.agree(turned=0, inputs=both.inputs | {"position_ids": rows})


def test_generation_of_a_left_padded_batch_gives_the_same_tokens(te: Te) -> None:
    both, inputs = pair(te), ALL["llama"].sample(padded=True)
    mask = inputs["attention_mask"]
    tokens = [generated(m, inputs["input_ids"], attention_mask=mask) for m in (both.converted, both.original)]
    assert torch.equal(*tokens)
    assert te.turned == 0


def doubled(module: nn.Module, args: tuple, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return out[0] * 2, out[1]


def doubled_in_place(module: nn.Module, args: tuple, out: tuple[Tensor, Tensor]) -> None:
    out[0].mul_(2)


def doubled_in_a_copy(module: nn.Module, args: tuple, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    cos, sin = copy.deepcopy(out)
    cos.mul_(2)
    return copy.deepcopy(cos), sin


def swapped(module: nn.Module, args: tuple, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return out[::-1]


def same_twice(module: nn.Module, args: tuple, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return out[0], out[0]


@pytest.mark.parametrize("hook", [doubled, doubled_in_place, doubled_in_a_copy, swapped, same_twice])
def test_cosines_that_were_changed_are_used_as_they_are(te: Te, hook: Callable) -> None:
    both = pair(te)
    hooks = [m.model.rotary_emb.register_forward_hook(hook) for m in (both.original, both.converted)]
    both.agree(turned=0)
    for handle in hooks:
        handle.remove()
    both.agree(turned=LAYERS)


def test_sines_of_another_module_are_used_as_they_are(te: Te) -> None:
    both = Pair(te, seeded(TwoRotaries), {"x": torch.randn(2, 5, 64)})

    def of_another(model: nn.Module) -> Callable:
        return lambda module, args, out: (out[0], model.near(*args)[1])

    for model in (both.original, both.converted):
        model.far.register_forward_hook(of_another(model))
    both.agree(turned=1)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}


def test_scaled_cosines_are_not_proved(te: Te) -> None:
    model = llama(rope_parameters=YARN)
    assert model.model.rotary_emb.attention_scaling != 1.0
    assert source(model, ALL["llama"].sample()) == [None] * LAYERS
    Pair(te, model, ALL["llama"].sample()).agree(turned=0)


def test_a_scaling_that_is_set_later_is_seen(te: Te) -> None:
    both = pair(te)
    for model in (both.original, both.converted):
        model.model.rotary_emb.attention_scaling = 1.5
    both.agree(turned=0)


def test_angles_that_are_set_later_are_seen(te: Te) -> None:
    both = pair(te)
    for model in (both.original, both.converted):
        model.model.rotary_emb.inv_freq.mul_(0.5)
    both.agree(turned=LAYERS)


@pytest.mark.parametrize(("kind", "grown"), [("dynamic", 40), ("linear", 12), ("llama3", 12)])
def test_other_kinds_of_angles_are_right(te: Te, kind: str, grown: int) -> None:
    parameters = YARN | {"rope_type": kind, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    both = Pair(te, llama(rope_parameters=parameters, max_position_embeddings=16), ALL["llama"].sample())
    for length in (12, grown, 12):  # dynamic angles depend on the longest sequence so far
        both.agree(turned=LAYERS, inputs=ALL["llama"].sample(seq=length))


def test_a_part_of_each_head_is_turned_as_it_was(te: Te) -> None:
    Pair(te, gpt_neox(0.25), ALL["gpt_neox"].sample()).agree(turned=0)
    Pair(te, gpt_neox(1.0), ALL["gpt_neox"].sample()).agree(turned=LAYERS)


def test_a_rotary_module_that_is_called_for_two_kinds_of_layers_is_left_alone(te: Te) -> None:
    both = pair(te, "gemma3_text")
    assert source(both.original, both.inputs) == [None] * LAYERS
    both.agree(turned=0)
    assert not isinstance(both.converted.model.rotary_emb, RotarySlot)


def test_cosines_of_the_users_own_are_used(te: Te) -> None:
    both, x = pair(te), torch.randn(2, 5, 64)
    cos, sin = torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    layers = [m.model.layers[0].self_attn for m in (both.original, both.converted)]
    found = [layer(x, position_embeddings=(cos, sin), attention_mask=None)[0] for layer in layers]
    assert error(found[1:], found[:1]) < EVERYWHERE
    assert te.turned == 0


def test_cosines_that_want_a_gradient_get_one(te: Te) -> None:
    both, x = pair(te), torch.randn(2, 5, 64)
    grads = []
    for model in (both.original, both.converted):
        cos, sin = (t.requires_grad_() for t in model.model.rotary_emb(x, torch.arange(5)[None]))
        out = model.model.layers[0].self_attn(x, position_embeddings=(cos, sin), attention_mask=None)[0]
        grads.append(list(torch.autograd.grad(out.pow(2).sum(), (cos, sin))))
    assert error(*grads) < EVERYWHERE
    assert te.turned == 0


def test_cosines_of_another_dtype_promote_as_they_did(te: Te) -> None:
    both = pair(te)
    with torch.autocast("cpu", torch.bfloat16):  # queries in bf16, cosines in fp32
        keys = [
            model(**both.inputs).past_key_values.layers[0].keys for model in (both.original, both.converted)
        ]
    assert keys[0].dtype == keys[1].dtype == torch.float32
    assert error(keys[1:], keys[:1]) < 1e-2
    assert te.turned == 0


def test_in_inference_mode_nothing_is_noted(te: Te) -> None:
    both = pair(te)
    with torch.inference_mode():
        found, expected = (model.eval()(**both.inputs).logits for model in (both.converted, both.original))
    assert error([found], [expected]) < EVERYWHERE
    assert te.turned == 0


# Code that somebody replaces


def test_a_replaced_rotation_is_the_one_that_runs(te: Te, monkeypatch: pytest.MonkeyPatch) -> None:
    both, calls = pair(te), []
    own = modeling_llama.apply_rotary_pos_emb

    def patched(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(query.shape)
        return own(query, key, 2 * cos, sin)

    def spying(*args: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(args[0].shape)
        return own(*args)

    for function in (patched, spying):
        calls.clear()
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", function)
        both.agree(turned=0)
        assert len(calls) == 4 * LAYERS
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own)
    both.agree(turned=LAYERS)


def test_what_the_rotation_calls_may_be_replaced_too(te: Te, monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair(te)
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: -x)
    both.agree(turned=0)


def test_a_rotation_replaced_before_is_not_proved(te: Te, monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_gpt_neox.apply_rotary_pos_emb
    rotating.__globals__["_WITH_ROTATION"].pop(modeling_gpt_neox.GPTNeoXAttention.forward, None)
    monkeypatch.setattr(
        modeling_gpt_neox, "apply_rotary_pos_emb", lambda q, k, cos, sin: own(q, k, cos, -sin)
    )
    model = gpt_neox(1.0)
    assert source(model, ALL["gpt_neox"].sample()) == [None] * LAYERS
    Pair(te, model, ALL["gpt_neox"].sample()).agree(turned=0)
    monkeypatch.undo()
    assert source(model, ALL["gpt_neox"].sample()) == [model.gpt_neox.rotary_emb] * LAYERS


def test_other_globals_of_the_forward_are_those_of_today(te: Te, monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair(te)
    both.agree(turned=LAYERS)

    class Door:
        """Another door, behind which there is no softmax."""

        def get_interface(self, *_: Any) -> Callable:
            return self.attend

        def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple:
            return v.repeat_interleave(2, 1).transpose(1, 2) + q.mean() * k.mean(), None

    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Door())
    both.agree(turned=LAYERS)


def test_a_replaced_forward_of_the_class_is_the_one_that_runs(
    te: Te, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair(te)
    own = modeling_llama.LlamaAttention.forward

    def halved(self: nn.Module, *args: Any, **kwargs: Any) -> tuple:
        out, *rest = own(self, *args, **kwargs)
        return out / 2, *rest

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", halved)
    both.agree(turned=0)


# The model as an object


def test_a_compiled_model_is_right(te: Te) -> None:
    both = pair(te)
    torch._dynamo.reset()
    compiled = torch.compile(both.converted, backend="eager")
    assert error(run(compiled, both.inputs), run(both.original, both.inputs)) < EVERYWHERE
    assert te.turned == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "torch.save"])
def test_copies_are_turned_too(te: Te, copied: Any) -> None:
    both = pair(te)
    run(both.converted, both.inputs)
    if copied == "torch.save":
        torch.save(both.converted, file := io.BytesIO())
        file.seek(0)
        both.converted = torch.load(file, weights_only=False)
    else:
        both.converted = copied(both.converted)
    both.agree(turned=LAYERS)


def test_revert_gives_the_rotary_modules_class_back(te: Te) -> None:
    both = pair(te)
    rotary = both.converted.model.rotary_emb
    assert isinstance(rotary, RotarySlot)
    assert type(rotary).__name__ == "LlamaRotaryEmbedding"
    te_transform.revert(both.converted)
    assert type(rotary) is modeling_llama.LlamaRotaryEmbedding
    both.agree(turned=0)


def test_what_fails_in_convert_leaves_no_trace(te: Te, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = ALL["llama"].build(), []

    def fail(converted: nn.Module, *_: Any) -> None:
        seen.append(type(converted.model.rotary_emb))
        raise KeyboardInterrupt

    monkeypatch.setattr(
        te_transform.convert.__globals__["check_sites"], "__code__", fail.__code__
    ) if 0 else None
    monkeypatch.setitem(te_transform.convert.__globals__, "check_sites", fail)
    with untouched(model, storages=False), pytest.raises(KeyboardInterrupt):
        te_transform.convert(model, ALL["llama"].sample(), inplace=True)
    assert issubclass(seen[0], RotarySlot)


# What is noted, on modules that return cosines and sines in all ways

X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
LEARNED = nn.Parameter(torch.ones(8))


def by_name(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cos(input=x), torch.sin(input=x)


def written_to(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x + 0
    out = x.cos(), x.sin()
    x.add_(1)
    return out


KNOWN = {
    "methods": lambda x: (x.cos(), x.sin()),
    "functions": lambda x: (torch.cos(x), torch.sin(x)),
    "cast": lambda x: (x.cos().to(torch.bfloat16), x.sin().to(torch.bfloat16)),
    "times 1": lambda x: (x.cos() * 1.0, x.sin() * 1),
    "among others": lambda x: (x.cos(), x.sin(), (x + 1).cos())[:2],
}
UNKNOWN = {
    "by name": by_name,
    "scaled": lambda x: (x.cos() * 1.5, x.sin() * 1.5),
    "scaled by a tensor": lambda x: (x.cos() * torch.tensor(1.5), x.sin() * torch.tensor(1.5)),
    "scaled in place": lambda x: (x.cos().mul_(2), x.sin()),
    "one scaled": lambda x: (x.cos(), x.sin().neg()),
    "swapped": lambda x: (x.sin(), x.cos()),
    "of two tensors": lambda x: (x.cos(), (x + 1).sin()),
    "of angles changed since": written_to,
    "of learned angles": lambda x: ((x * LEARNED).cos(), (x * LEARNED).sin()),
    "in fp64": lambda x: (x.double().cos().float(), x.double().sin().float()),
    "in bf16": lambda x: (x.bfloat16().cos(), x.bfloat16().sin()),
    "rows of a table": lambda x: (x.cos()[:, :5], x.sin()[:, :5]),
    "added up": lambda x: (x.cos() + 0.1, x.sin()),
    "none": lambda x: (x + 1, x + 2),
}


class Rotary(nn.Module):
    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def noting(function: Callable) -> nn.Module:
    module = Rotary(function)
    module.__class__ = slot_class(Rotary, RotarySlot, ())
    return module


@pytest.mark.parametrize("way", KNOWN)
def test_angles_are_known_of_cosines_and_sines_alone(way: str) -> None:
    cos, sin = noting(KNOWN[way])(X)
    angles = angles_of(cos, sin)
    assert torch.equal(angles.cos().to(cos.dtype), cos)
    assert torch.equal(angles.sin().to(sin.dtype), sin)
    assert angles_of(sin, cos) is angles_of(cos, cos) is angles_of(cos + 0, sin) is None


@pytest.mark.parametrize("way", UNKNOWN)
def test_angles_are_not_known_of_anything_else(way: str) -> None:
    assert angles_of(*noting(UNKNOWN[way])(X)) is None


@pytest.mark.parametrize("out", [X, (X,), (X, None), {"cos": X, "sin": X}, (X, X, X), None])
def test_what_else_a_module_returns_passes_through(out: Any) -> None:
    assert noting(lambda x: out)(X) is out


def test_copies_of_cosines_have_no_angles() -> None:
    cos, sin = noting(KNOWN["methods"])(X)
    assert angles_of(cos, sin) is not None
    assert angles_of(*copy.deepcopy((cos, sin))) is angles_of(copy.copy(cos), sin) is None
    assert angles_of(*pickle.loads(pickle.dumps((cos, sin)))) is None


def test_angles_are_forgotten_with_the_cosines() -> None:
    notes = angles_of.__globals__["_NOTES"]
    before = len(notes)
    cos, sin = noting(KNOWN["cast"])(X)
    assert len(notes) == before + 2
    del cos, sin
    assert len(notes) == before
