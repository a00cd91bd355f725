"""A Llama of transformers as its users treat it: caches, masks, losses, other functions, adapters, files."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

import te_transform
from tests.attacks import Act, Pair, named
from tests.zoo import seeded

pytestmark = pytest.mark.usefixtures("at_any_size")

IDS = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(0))
LONG = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(1))
PADDED = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
LAYERS = 1


def llama(**settings: Any) -> nn.Module:
    known = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    known |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(**known | {"bos_token_id": 1, "eos_token_id": 2} | settings)
    return seeded(transformers.LlamaForCausalLM, config).eval()


def pair_of(**settings: Any) -> Pair:
    pair = Pair.of(llama(**settings), {"input_ids": IDS}, rules=LAYERS * "merge_siblings ")
    return Pair(*pair.models, IDS)


@cache
def _shared() -> Pair:
    return pair_of()


def shared() -> Pair:
    """For tests that leave it as it is."""
    torch._dynamo.reset()
    return _shared()


def logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    return model(input_ids=ids, **options).logits


def called(**options: Any) -> Act:
    return lambda model, ids: logits(model, ids, **options)


# Arguments

MASK = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
CALLS: dict[str, dict[str, Any]] = {
    "padded at the left": {"attention_mask": PADDED},
    "a mask of the user's own": {"attention_mask": MASK},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])},
    "not causal": {"is_causal": False},
    "positions of each row": {"position_ids": torch.stack([torch.arange(6), torch.arange(6).flip(0)])},
    "hidden states": {"output_hidden_states": True},
}
LATER = pytest.mark.integration  # of what test_attacks_*.py do to models that are written by hand


@pytest.mark.parametrize("name", [*CALLS][:1] + [pytest.param(name, marks=LATER) for name in [*CALLS][1:]])
def test_arguments(name: str) -> None:
    def act(model: nn.Module, ids: Tensor) -> list[Any]:
        out = model(**{"input_ids": ids, "use_cache": False} | CALLS[name])
        return out if isinstance(out, tuple) else [out.logits, out.hidden_states]

    shared().agree(act)


LABELS = IDS.masked_fill(torch.arange(6) % 3 == 0, -100)
LOSSES: dict[str, dict[str, Any]] = {
    "shifted by the caller": {"labels": LABELS, "shift_labels": IDS.flip(1)},
    "all ignored": {"labels": torch.full_like(IDS, -100)},
    "no such word": {"labels": IDS + 1000},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "no such word" else LATER) for name in LOSSES]
)
def test_losses(name: str) -> None:
    found = shared().agree(lambda model, ids: model(input_ids=ids, use_cache=False, **LOSSES[name]).loss)
    assert ("error" in found) == (name == "no such word")


def test_warning_once_ends_no_graph() -> None:
    """GPT-2 logs which loss it takes, before it takes it."""
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    inputs = {"input_ids": IDS, "labels": IDS}
    pair = Pair.of(seeded(transformers.GPT2LMHeadModel, config).eval(), inputs, rules="layernorm_mlp")
    assert te_transform.report(pair.converted).breaks == ()
    found = Pair(*pair.models, IDS).agree(lambda model, ids: model(input_ids=ids, labels=ids).loss)
    assert "error" not in found


@LATER
def test_a_loss_of_the_users_own() -> None:
    pair = pair_of()
    for model in pair.models:
        model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    pair.agree(lambda model, ids: model(input_ids=ids, labels=LABELS).loss)


# What is set later


def set_all(model: nn.Module, kind: type, **values: Any) -> None:
    for module in model.modules():
        if isinstance(module, kind):
            for name, value in values.items():
                setattr(module, name, value)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "eps of the norms": lambda m: set_all(m, modeling_llama.LlamaRMSNorm, variance_epsilon=1.0),
    "the angles": lambda m: m.model.rotary_emb.inv_freq.mul_(0.5),
    "more tokens": lambda m: torch.manual_seed(0) and m.resize_token_embeddings(60),
    "tied": lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight),
}


@pytest.mark.integration  # as attributes of models that are written by hand
def test_attributes_set_later_are_read() -> None:
    pair = pair_of()
    for name, change in CHANGES.items():
        with named(name):
            pair.attack(change, called(use_cache=False))


def look_ahead(model: Any) -> None:
    set_all(model, modeling_llama.LlamaAttention, is_causal=False)


@LATER
def test_attention_that_is_set_to_look_ahead() -> None:
    """As LLM2Vec does. transformers makes a causal mask when it is traced, and leaves it out otherwise."""
    pair = pair_of()
    pair.attack(look_ahead, called(use_cache=False))
    pair.agree(called(use_cache=False, attention_mask=PADDED))
    pair.attack(
        lambda model: set_all(model, modeling_llama.LlamaAttention, is_causal=True), called(use_cache=False)
    )


def test_attention_that_looks_ahead_gets_its_mask_by_name() -> None:
    """As a function that a user registers passes it."""

    def by_name(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **how: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value, attention_mask=mask, **how)

    model = llama().eval()
    look_ahead(model)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(transformers.AttentionInterface._global_mapping, "sdpa", by_name)
        converted = te_transform.convert(model, (IDS,), verify=False)
        assert torch.allclose(logits(converted, IDS), logits(model, IDS), atol=1e-6)


@pytest.mark.parametrize("verify", [False, True])
def test_attention_that_looks_ahead_is_fused_layer_by_layer(verify: bool) -> None:
    model = llama().eval()
    look_ahead(model)
    converted = te_transform.convert(model, (IDS,), verify=verify)
    assert torch.allclose(logits(converted, IDS), logits(model, IDS), atol=1e-6)
    report = te_transform.report(converted)
    assert report.counts["layernorm_mlp"] == LAYERS
    assert "its attention has is_causal=False" in " ".join(str(report).split())


@LATER
def test_another_implementation_of_attention_may_be_set_and_the_old_one_again() -> None:
    pair = pair_of()
    for implementation in ("eager", "sdpa"):
        for model in pair.models:
            model.set_attn_implementation(implementation)
            assert model.config._attn_implementation == implementation
        pair.agree(partial(with_probabilities, asked=implementation == "eager"))


def with_probabilities(model: nn.Module, ids: Tensor, asked: bool) -> list[Any]:
    out = model(input_ids=ids, attention_mask=PADDED, output_attentions=asked, use_cache=False)
    return [out.logits, out.attentions if asked else None]


def halved(
    self: nn.Module, *args: Any, own: Any = modeling_llama.LlamaAttention.forward, **kwargs: Any
) -> tuple:
    out, *rest = own(self, *args, **kwargs)
    return out / 2, *rest


def doubled(
    self: nn.Module, *args: Any, own: Any = modeling_llama.LlamaForCausalLM.forward, **kwargs: Any
) -> Any:
    out = own(self, *args, **kwargs)
    out.logits = 2 * out.logits
    return out


def replaced_functions() -> dict[str, tuple]:
    functions = modeling_llama.ALL_ATTENTION_FUNCTIONS
    sdpa = functions["sdpa"]
    return {
        "attention": (
            functions._global_mapping,
            "sdpa",
            lambda module, q, *args, **kwargs: sdpa(module, 2 * q, *args, **kwargs),
        ),
        "the forward of a class": (modeling_llama.LlamaAttention, "forward", halved),
        "the forward of the model": (modeling_llama.LlamaForCausalLM, "forward", doubled),
    }


@pytest.mark.integration  # test_attacks_modes.py replaces others
def test_a_function_that_is_replaced_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of()
    for name, (owner, key, function) in replaced_functions().items():
        with named(name), monkeypatch.context() as patch:
            change = patch.setitem if isinstance(owner, dict) else patch.setattr
            pair.attack(lambda _, of=(change, owner, key, function): of[0](*of[1:]), called(use_cache=False))
        with named(f"{name}, and put back"):
            pair.agree(called(use_cache=False))


def doubled_in_place(module: nn.Module, args: tuple, out: tuple[Tensor, Tensor]) -> None:
    out[0].mul_(2)


def exchanged(module: nn.Module, args: tuple, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return out[::-1]


@pytest.mark.parametrize("hook", [pytest.param(doubled_in_place, marks=LATER), exchanged])
def test_cosines_that_a_hook_changes_are_used_as_they_are(hook: Callable) -> None:
    def act(model: Any, ids: Tensor) -> Tensor:
        with ExitStack() as stack:
            stack.callback(model.model.rotary_emb.register_forward_hook(hook).remove)
            return logits(model, ids, use_cache=False)

    shared().agree(act)


def test_attention_alone_with_cosines_of_the_users_own() -> None:
    """The cosines and sines need a gradient."""

    def act(model: Any, ids: Tensor) -> list[Any]:
        x = torch.linspace(-1, 1, 2 * 5 * 32).view(2, 5, 32)
        cos, sin = (t.requires_grad_() for t in model.model.rotary_emb(x, torch.arange(5)[None]))
        out = model.model.layers[0].self_attn(x, position_embeddings=(cos, sin), attention_mask=None)[0]
        return [*torch.autograd.grad(out.square().sum(), (cos, sin), retain_graph=True), out]

    shared().agree(act)


@LATER
def test_angles_that_depend_on_the_longest_sequence_so_far() -> None:
    parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    pair = pair_of(rope_parameters=parameters, max_position_embeddings=8)
    for ids in (LONG, IDS):
        pair.agree(lambda model, _, ids=ids: logits(model, ids, use_cache=False))


@LATER
@pytest.mark.parametrize("mode", ["autocast", "inference"])
def test_modes(mode: str) -> None:
    context = torch.inference_mode if mode == "inference" else partial(torch.autocast, "cpu", torch.bfloat16)

    def act(model: Any, ids: Tensor) -> list[Any]:
        with context():
            out = model(input_ids=ids)
        return [out.logits, [layer.keys for layer in out.past_key_values.layers]]

    shared().agree(act, atol=1e-5 if mode == "inference" else 3e-2)
