"""Attention dispatched through Hugging Face's door for models that call SDPA: as the model calls it,
always."""

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from transformers.models.llama import modeling_llama

import te_transform
from te_transform import vocabulary
from te_transform.backends import cudnn, limits
from te_transform.dispatch import NAME, DispatchSlot
from te_transform.originals import fusions
from tests import stand_in
from tests.conversions import ALL, EVERYWHERE, error, gradients, run
from tests.stand_in import Core, Te
from tests.zoo import LAYERS, WINDOW, Inputs, seeded

DECODERS = ("llama", "qwen3", "gemma", "gpt2", "gpt_neox", "opt", "phi3", "mixtral")
ENCODERS = ("bert", "roberta", "distilbert", "vit", "clip_vision")
MIXED = ("gemma2", "gemma3_text", "whisper", "bart", "clip_text")


@pytest.fixture(autouse=True)
def te(monkeypatch: pytest.MonkeyPatch) -> Te:
    return stand_in.install(monkeypatch)


class Pair:
    """A model and the converted one, and what its attention cores were asked for."""

    def __init__(self, model: nn.Module, inputs: Inputs):
        self.original, self.inputs = model, inputs
        self.converted = te_transform.convert(model, inputs, verify=False)

    @property
    def cores(self) -> list[Core]:
        return [f.fused for f in fusions(self.converted) if isinstance(f.fused, Core)]

    def asked(self, act: Callable[[], Any]) -> list[list[bool]]:
        """Of each core the calls that it took while `act` ran: whether they were causal."""
        for core in self.cores:
            core.causal.clear()
        act()
        return [list(core.causal) for core in self.cores]

    def agree(self, causal: list[bool], inputs: Inputs | None = None, layers: int | None = None) -> None:
        """Outputs and gradients are the original's; in a forward each core takes the calls given."""
        inputs = self.inputs if inputs is None else inputs
        expected = run(self.original, inputs)
        found = []
        asked = self.asked(lambda: found.extend(run(self.converted, inputs)))
        assert error(found, expected) < EVERYWHERE
        assert asked == [causal] * (LAYERS if layers is None else layers)
        found, expected = gradients(self.converted, inputs), gradients(self.original, inputs)
        assert found.keys() == expected.keys()
        used = [name for name, grad in expected.items() if grad is not None and grad.norm() > 1e-3]
        assert used
        for name in used:
            assert error([found[name]], [expected[name]]) < EVERYWHERE, name


def pair(name: str = "llama") -> Pair:
    model = ALL[name].build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.attention_dropout = 0.0
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return Pair(model, ALL[name].sample())


# What the core is called for


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_are_causal(name: str) -> None:
    both = pair(name)
    both.agree(causal=[True])
    both.agree(causal=[True], inputs=ALL[name].sample(batch=3, seq=7))
    both.agree(causal=[False], inputs=ALL[name].sample(seq=1))


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_not_causal(name: str) -> None:
    pair(name).agree(causal=[False])


@pytest.mark.parametrize("name", MIXED)
def test_models_with_attention_of_several_kinds_keep_their_numbers(name: str) -> None:
    both = pair(name)
    asked = both.asked(lambda: run(both.converted, both.inputs))
    assert any(asked)
    assert error(run(both.converted, both.inputs), run(both.original, both.inputs)) < EVERYWHERE


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_padding_is_masked(name: str, side: str) -> None:
    both, inputs = pair(name), ALL[name].sample(padded=True)
    if side == "right":
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    assert not inputs["attention_mask"].all()
    both.agree(causal=[], inputs=inputs)
    assert all(core.plain_calls["a mask"] for core in both.cores)


def test_a_window_shorter_than_the_sequence_is_masked() -> None:
    both = pair("mistral")
    both.agree(causal=[], inputs=ALL["mistral"].sample(seq=2 * WINDOW))
    both.agree(causal=[True], inputs=ALL["mistral"].sample(seq=WINDOW - 1))


def test_an_additive_mask_of_the_users_own_is_added() -> None:
    both = pair()
    mask = torch.randn(2, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    both.agree(causal=[], inputs=both.inputs | {"attention_mask": mask})


def test_is_causal_may_be_said_by_the_caller() -> None:
    both = pair()
    both.agree(causal=[False], inputs=both.inputs | {"is_causal": False})
    for model in (both.original, both.converted):
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
    both.agree(causal=[False])
    both.agree(causal=[True], inputs=both.inputs | {"is_causal": True})


def test_dropout_reaches_the_core() -> None:
    both = pair()
    given: list[float] = []
    for core in both.cores:
        core.register_forward_pre_hook(lambda module, args: given.append(args[4]))
    for layer in both.converted.model.layers:
        layer.self_attn.attention_dropout = 0.25
    run(both.converted, both.inputs, training=True)
    run(both.converted, both.inputs)
    assert given == [0.25] * LAYERS + [0.0] * LAYERS


def test_a_position_bias_is_added_by_the_models_own_function() -> None:
    both = pair()
    bias = torch.randn(1, 4, 12, 12, generator=torch.Generator().manual_seed(0))
    both.agree(causal=[], inputs=both.inputs | {"position_bias": bias})


# Generating


@pytest.mark.parametrize(
    ("name", "cache"),
    [*((name, None) for name in ("mistral", "gpt2", "gemma2", "whisper")), ("llama", "static")],
)
def test_greedy_generation_gives_the_same_tokens(name: str, cache: str | None) -> None:
    both, inputs = pair(name), ALL[name].sample(batch=1)
    options = {"cache_implementation": cache} if cache else {}
    options |= {"max_new_tokens": 2 * WINDOW, "min_new_tokens": 2 * WINDOW, "do_sample": False}
    tokens = [
        m.eval().generate(**inputs, **options, disable_compile=True) for m in (both.original, both.converted)
    ]
    assert torch.equal(*tokens)


def test_a_cache_is_filled_and_read_as_it_was() -> None:
    both, ids = pair(), ALL["llama"].sample(seq=20)["input_ids"]
    expected = run(both.original, {"input_ids": ids})[0]

    def by_parts() -> None:
        cache = transformers.DynamicCache(config=both.converted.config)
        with torch.no_grad():
            parts = [
                both.converted.eval()(part, past_key_values=cache).logits
                for part in ids.split([9, 1, 1, 9], 1)
            ]
        assert error([torch.cat(parts, 1)], [expected]) < EVERYWHERE

    # nine queries beside twenty keys are no kernel's
    assert both.asked(by_parts) == [[True, False, False]] * LAYERS


# Other cores than ours


def test_probabilities_are_handed_to_those_who_ask() -> None:
    both = pair()
    for model in (both.original, both.converted):
        model.set_attn_implementation("eager")
    found, expected = (
        m.eval()(**both.inputs, output_attentions=True).attentions for m in (both.converted, both.original)
    )
    assert len(found) == LAYERS
    assert error(list(found), list(expected)) < EVERYWHERE


def test_asking_sdpa_for_probabilities_changes_nothing() -> None:
    both = pair()
    inputs = both.inputs | {"output_attentions": True}
    assert error(run(both.converted, inputs), run(both.original, inputs)) < EVERYWHERE
    assert both.asked(lambda: run(both.converted, inputs)) == [[]] * LAYERS


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_another_implementation_may_be_set_and_the_old_one_again(name: str) -> None:
    both = pair(name)
    for implementation in ("eager", "sdpa"):
        for model in (both.original, both.converted):
            model.set_attn_implementation(implementation)
        assert error(run(both.converted, both.inputs), run(both.original, both.inputs)) < EVERYWHERE
        assert both.converted.config._attn_implementation == implementation
    both.agree(causal=[name != "bert"])


def test_another_function_under_the_name_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    both, functions = pair(), modeling_llama.ALL_ATTENTION_FUNCTIONS
    own = functions["sdpa"]
    monkeypatch.setitem(
        functions._global_mapping,
        "sdpa",
        lambda module, q, *args, **kwargs: own(module, 2 * q, *args, **kwargs),
    )
    expected = run(both.original, both.inputs)
    found = run(both.converted, both.inputs)
    assert error(found, expected) < EVERYWHERE


def test_t5_adds_a_bias_which_is_refused() -> None:
    report = te_transform.inspect(ALL["t5"].build(), ALL["t5"].sample(), backend="te")
    assert "attention" not in report.counts
    reasons = {reason for site in report.refused if site.rule == "attention" for reason in site.reasons}
    assert reasons == {"the attention adds a bias to its scores, TE's fast cores have none"}


# What the module sees of its config


def test_what_is_set_on_the_config_later_is_read() -> None:
    both = Pair(seeded(Scaled), ALL["llama"].sample())
    both.agree(causal=[True])
    for model in (both.original, both.converted):
        model.config.factor = 3.0
    both.agree(causal=[True])


def test_a_config_that_is_put_in_its_place_stays_as_it_is() -> None:
    both = pair()
    config = copy.deepcopy(both.original.config)
    before = copy.deepcopy(vars(config))
    both.converted.model.layers[0].self_attn.config = config
    expected = run(both.original, both.inputs)
    assert error(run(both.converted, both.inputs), expected) < EVERYWHERE
    assert vars(config) == before


class Attention(modeling_llama.LlamaAttention):
    """It reads its config at every call, and masks by itself where its core takes masks."""

    asked: tuple[str, ...] = ()

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **kwargs: Any
    ) -> tuple:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2) * self.config.factor
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        own = self.config._attn_implementation in ("eager", "sdpa")
        if own and query.shape[2] > 16:  # no recording of the example inputs sees it
            attention_mask = torch.ones(query.shape[2], query.shape[2]).tril().triu(-3).bool()[None, None]
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = interface(self, query, key, value, attention_mask, scaling=self.scaling)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


ALL_ATTENTION_FUNCTIONS = modeling_llama.ALL_ATTENTION_FUNCTIONS
eager_attention_forward = modeling_llama.eager_attention_forward


class Scaled(transformers.LlamaForCausalLM):
    def __init__(self):
        config = ALL["llama"].build().config
        config.factor = 1.0
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = Attention(config, index)


def test_code_that_asks_for_the_cores_name_gets_the_configs() -> None:
    both = Pair(seeded(Scaled), ALL["llama"].sample())
    both.agree(causal=[], inputs=ALL["llama"].sample(seq=20))
    attention = both.converted.model.layers[0].self_attn
    assert attention.config._attn_implementation == NAME == attention.config._attn_implementation
    assert attention.config._attn_implementation == "sdpa"
    assert attention.config._attn_implementation != "eager"
    for model in (both.original, both.converted):
        model.set_attn_implementation("eager")
    assert attention.config._attn_implementation == "eager"
    assert error(run(both.converted, both.inputs), run(both.original, both.inputs)) < EVERYWHERE


def test_code_that_asks_for_another_implementation_has_its_own_way() -> None:
    settings = ALL["gpt2_eager"].build().config.to_dict() | {"reorder_and_upcast_attn": True}
    config = transformers.GPT2Config(**settings, attn_implementation="eager")
    model = seeded(transformers.GPT2LMHeadModel, config).eval()
    converted = te_transform.convert(model, ALL["gpt2"].sample())
    assert error(run(converted, ALL["gpt2"].sample()), run(model, ALL["gpt2"].sample())) < EVERYWHERE


# The model as an object


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_compiled_model_is_right(name: str) -> None:
    both = pair(name)
    torch._dynamo.reset()
    compiled = torch.compile(both.converted, backend="eager")
    assert error(run(compiled, both.inputs), run(both.original, both.inputs)) < EVERYWHERE


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_follow_their_own_config(name: str, copied: Callable) -> None:
    both = pair(name)
    both.converted, kept = copied(both.converted), both.converted
    both.agree(causal=[True])
    kept.set_attn_implementation("eager")
    both.agree(causal=[True])
    both.converted.set_attn_implementation("eager")
    assert both.asked(lambda: run(both.converted, both.inputs)) == [[]] * LAYERS


def test_revert_gives_the_very_config_back() -> None:
    both = pair()
    config = both.converted.config
    attention = both.converted.model.layers[0].self_attn
    assert isinstance(attention, DispatchSlot)
    assert attention.config is not config
    te_transform.revert(both.converted)
    assert attention.config is config
    assert config._attn_implementation == "sdpa"


def test_cudnn_comes_first_for_its_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cudnn, "without_attention", lambda query, *_: None if query.dim() == 4 else "a shape")
    monkeypatch.setattr(vocabulary, "sdpa", lambda query, *_: seen.append(_kernel_order()) or query.item())
    core, before = cudnn.DotProductAttention(), _kernel_order()
    assert before[0] != SDPBackend.CUDNN_ATTENTION
    with pytest.raises(RuntimeError, match="converted to Scalar"):
        core(*[torch.ones(1, 1, 2, 1)] * 3)
    core(*[torch.ones(1)] * 3)
    assert seen[0] == [SDPBackend.CUDNN_ATTENTION, *(k for k in before if k != SDPBackend.CUDNN_ATTENTION)]
    assert seen[1] == _kernel_order() == before


def _kernel_order() -> list[SDPBackend]:
    return [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]


# Calls that are too small


@pytest.mark.parametrize("trained", [True, False])
def test_a_small_call_is_the_models_own(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    both, small = pair("llama"), limits.small_attention
    monkeypatch.setattr(Core, "why_plain", lambda self, hidden: small(hidden), raising=False)
    configs = [module.config for module in both.converted.modules() if isinstance(module, DispatchSlot)]
    asked: list[str] = []

    def act() -> None:
        models = both.converted.eval(), both.original.eval()
        with torch.set_grad_enabled(trained), watched(both.converted, asked):
            found, expected = (model(**both.inputs).logits.detach() for model in models)
        assert error([found], [expected]) < EVERYWHERE

    assert both.asked(act) == [[]] * LAYERS
    assert asked == ["sdpa"] * LAYERS
    (why,) = {why for core in both.cores for why in core.plain_calls}
    assert why == "attention too small to be faster"
    now = [module.config for module in both.converted.modules() if isinstance(module, DispatchSlot)]
    assert all(one is other for one, other in zip(now, configs, strict=True))
    with limits.at_any_size():
        assert both.asked(act) == [[True]] * LAYERS


@pytest.mark.parametrize(
    ("shape", "small"),
    [
        ((1, 511, 64), True),
        ((1, 4096, 1024), True),  # too few tokens for the modules around it, and not long enough
        ((4, 4096, 1024), False),
        ((1, 1400, 4096), True),
        ((1, 1500, 4096), False),
        ((64, 128, 4096), False),  # many short sequences
    ],
)
def test_attention_is_small_by_tokens_and_length(shape: tuple[int, ...], small: bool) -> None:
    assert bool(limits.small_attention(torch.empty(shape, device="meta"))) == small


@contextlib.contextmanager
def watched(model: nn.Module, asked: list[str]) -> Iterator[None]:
    """Which core every attention module's config names while its projections run."""
    inside = [module for module in model.modules() if isinstance(module, DispatchSlot)]
    hooks = [
        module.v_proj.register_forward_hook(
            lambda *_, module=module: asked.append(str(module.config._attn_implementation_internal))
        )
        for module in inside
    ]
    yield
    for hook in hooks:
        hook.remove()
