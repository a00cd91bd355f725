"""The models that the tests share: real architectures at toy size, with random weights that hide nothing.

CASES are the ones that every test should cover, EXTRA the ones for breadth. Sequences of up to 32 fit all.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tests.models.nanogpt import GPT, GPTConfig
from tests.models.quickstart import QuickstartModel
from tests.models.self_attention import SelfAttention

HIDDEN, HEADS, LAYERS, VOCAB = 64, 4, 2, 99
PIXELS, MELS = 16, 8
WINDOW = 8  # of sliding-window attention: shorter than the sequences, so that it shows

Inputs = dict[str, Tensor]
MakeInputs = Callable[[int, int, Generator], Inputs]


@dataclass(frozen=True)
class Case:
    """A model and what it is called with.

    `inputs(batch, seq, generator)` gives the keyword arguments of forward. `padded_inputs` are the same with
    a mask over a left-padded batch, and None where the model takes no mask.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: MakeInputs
    padded_inputs: MakeInputs | None = None
    causal_lm: bool = False
    hf: bool = False

    def sample(self, batch: int = 2, seq: int = 12, seed: int = 0, padded: bool = False) -> Inputs:
        make = self.padded_inputs if padded else self.inputs
        if make is None:
            raise ValueError(f"{self.name} takes no mask")
        return make(batch, seq, torch.Generator().manual_seed(seed))


def zero_dropout(model: nn.Module) -> nn.Module:
    """Turns every dropout of `model` off, in place, so that two forwards in train mode agree."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _zero_dropout_attributes(module)
        config = getattr(module, "config", None)
        if hasattr(config, "to_diff_dict"):  # a Hugging Face config, which Falcon reads its dropout from
            _zero_dropout_attributes(config)
    return model


def _zero_dropout_attributes(owner: object) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(owner, name, 0.0)


def tensors(output: Any) -> Iterator[Tensor]:
    """Every floating tensor of a forward's output, in order; key-value caches are passed over."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors(value)


# Building


def seeded(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """make(*args, **kwargs), the same at every call, leaving the global random states alone: PyTorch's, and
    Python's, from which hyper-connections begin.

    The noise on top of the model's own initialisation leaves no bias at zero and no gamma at one, and makes
    attention far from uniform: a forgotten bias or a swapped projection shows.
    """
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        try:
            model = make(*args, **kwargs)
        finally:
            random.setstate(before)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def hugging_face(model: str, config: str, **settings: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def _torch_encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 2 * HIDDEN, norm_first=norm_first, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=not norm_first)


# Inputs


def ids(batch: int, seq: int, generator: Generator) -> Tensor:
    return torch.randint(3, VOCAB, (batch, seq), generator=generator)  # 0 to 2 are the special tokens


def left_padding(batch: int, seq: int) -> Tensor:
    """[batch, seq], True where a position is padding: at the left, a third of the first row, less in each row
    below, and nothing in the last of several."""
    lengths = torch.arange(batch, 0, -1) if batch == 1 else torch.arange(batch - 1, -1, -1)
    lengths = lengths * max(seq // 3, 1) // max(batch - 1, 1)
    return torch.arange(seq) < lengths[:, None]


def text(batch: int, seq: int, generator: Generator, padded: bool = False) -> Inputs:
    inputs = {"input_ids": ids(batch, seq, generator)}
    if padded:
        inputs["attention_mask"] = (~left_padding(batch, seq)).long()
    return inputs


def text_to_text(batch: int, seq: int, generator: Generator, padded: bool = False) -> Inputs:
    inputs = text(batch, seq, generator, padded)
    return inputs | {"decoder_input_ids": ids(batch, seq // 2 + 1, generator)}


def _speech(batch: int, seq: int, generator: Generator) -> Inputs:
    features = torch.randn(batch, MELS, 32, generator=generator)
    return {"input_features": features, "decoder_input_ids": ids(batch, seq, generator)}


def image(batch: int, seq: int, generator: Generator) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, PIXELS, PIXELS, generator=generator)}


def _nanogpt(batch: int, seq: int, generator: Generator) -> Inputs:
    return {"idx": ids(batch, seq, generator), "targets": ids(batch, seq, generator)}


def _embedded(
    batch: int, seq: int, generator: Generator, names: tuple[str, ...] = ("x",), mask: str | None = None
) -> Inputs:
    x = torch.randn(batch, seq, HIDDEN, generator=generator)
    return dict.fromkeys(names, x) | ({mask: left_padding(batch, seq)} if mask else {})


def _quickstart(batch: int, seq: int, generator: Generator) -> Inputs:
    return {"x": torch.randn(seq, batch, HIDDEN, generator=generator)}


def quickstart_masked(
    batch: int, seq: int, generator: Generator, left: bool = False, fully_masked_row: bool = False
) -> Inputs:
    """A causal mask with padding, [batch, 1, seq, seq], True = masked out.

    Padding is at the right, or at the left, where a padded query still sees itself. Every query sees a key,
    unless `fully_masked_row`: then the first sample's last query sees none.
    """
    inputs = _quickstart(batch, seq, generator)
    padding = left_padding(batch, seq) if left else left_padding(batch, seq).flip(1)
    causal = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    mask = causal | padding[:, None, None, :]
    if left:
        mask &= ~torch.eye(seq, dtype=torch.bool)
    if fully_masked_row:
        mask[0, 0, -1] = True
    return inputs | {"attention_mask": mask}


# The cases

_QUICKSTART = partial(seeded, QuickstartModel, HIDDEN, 2 * HIDDEN, HEADS, LAYERS)
_LEFT_MASKED = partial(quickstart_masked, left=True)

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    **_SPECIAL,
}
ENCODER = DECODER | {"intermediate_size": 128}
LLAMA = DECODER | {"intermediate_size": 96, "num_key_value_heads": 2}
_ONE_LAYER = {"num_hidden_layers": 1}  # has all parts of a model: those of two layers are GPT-2's and BERT's
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
    **_SPECIAL,
}
_GEMMA = LLAMA | {"num_key_value_heads": 1, "head_dim": 32}
_GEMMA_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_OPT = DECODER | {"ffn_dim": 128, "word_embed_proj_dim": HIDDEN}
VISION = {
    "image_size": PIXELS,
    "patch_size": 4,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "decoder_start_token_id": 2,
    **_SPECIAL,
}


def hf_case(
    name: str,
    model: str,
    config: str,
    settings: dict[str, Any],
    inputs: Callable[..., Inputs] = text,
    takes_mask: bool = True,
) -> Case:
    """`model` and `config` are names in transformers, which is imported when a model is first built."""
    return Case(
        name,
        partial(seeded, hugging_face, model, config, **settings),
        inputs,
        partial(inputs, padded=True) if takes_mask else None,
        causal_lm=model.endswith(("ForCausalLM", "LMHeadModel")),
        hf=True,
    )


def _encoder_case(name: str, norm_first: bool) -> Case:
    make = partial(_embedded, names=("src",))
    padded = partial(make, mask="src_key_padding_mask")
    return Case(name, partial(seeded, _torch_encoder, norm_first), make, padded)


def by_name(*cases: Case) -> dict[str, Case]:
    return {case.name: case for case in cases}


CASES: dict[str, Case] = by_name(
    Case("quickstart", _QUICKSTART, _quickstart, _LEFT_MASKED),
    Case("quickstart_mask", _QUICKSTART, quickstart_masked, _LEFT_MASKED),
    Case("nanogpt_flash", partial(seeded, GPT, GPTConfig(flash=True)), _nanogpt, causal_lm=True),
    Case("nanogpt_manual", partial(seeded, GPT, GPTConfig(flash=False)), _nanogpt, causal_lm=True),
    hf_case("gpt2", "GPT2LMHeadModel", "GPT2Config", GPT2),
    hf_case("llama", "LlamaForCausalLM", "LlamaConfig", LLAMA | _ONE_LAYER),
    hf_case("mistral", "MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": WINDOW}),
    hf_case("qwen2", "Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    hf_case("qwen3", "Qwen3ForCausalLM", "Qwen3Config", LLAMA | _ONE_LAYER | {"head_dim": 32}),
    hf_case("gemma", "GemmaForCausalLM", "GemmaConfig", _GEMMA),
    hf_case("bert", "BertForMaskedLM", "BertConfig", ENCODER),
    hf_case("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", ENCODER),
    hf_case("opt", "OPTForCausalLM", "OPTConfig", _OPT | _ONE_LAYER),
    hf_case("vit", "ViTForImageClassification", "ViTConfig", VISION, image, takes_mask=False),
    hf_case(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": LAYERS,
            "num_decoder_layers": 1,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
        },
        text_to_text,
    ),
    _encoder_case("torch_encoder_pre", norm_first=True),
    _encoder_case("torch_encoder_post", norm_first=False),
    Case("torch_mha", partial(seeded, SelfAttention), _embedded, partial(_embedded, mask="key_padding_mask")),
    Case(
        "torch_mha_bare",
        partial(seeded, nn.MultiheadAttention, HIDDEN, HEADS, dropout=0.1, batch_first=True),
        partial(_embedded, names=("query", "key", "value")),
        partial(_embedded, names=("query", "key", "value"), mask="key_padding_mask"),
    ),
)

EXTRA: dict[str, Case] = by_name(
    hf_case(
        "llama_eager",
        "LlamaForCausalLM",
        "LlamaConfig",
        LLAMA | _ONE_LAYER | {"attn_implementation": "eager"},
    ),
    hf_case("gpt2_eager", "GPT2LMHeadModel", "GPT2Config", GPT2 | {"attn_implementation": "eager"}),
    hf_case("phi3", "Phi3ForCausalLM", "Phi3Config", LLAMA),
    hf_case("falcon", "FalconForCausalLM", "FalconConfig", DECODER),
    hf_case("bloom", "BloomForCausalLM", "BloomConfig", DECODER | {"n_layer": LAYERS, "n_head": HEADS}),
    hf_case("gemma2", "Gemma2ForCausalLM", "Gemma2Config", _GEMMA | _GEMMA_LAYERS),
    hf_case("gemma3_text", "Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA | _GEMMA_LAYERS),
    hf_case("mixtral", "MixtralForCausalLM", "MixtralConfig", LLAMA | _ONE_LAYER | {"num_local_experts": 4}),
    hf_case(
        "distilbert",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": VOCAB,
            "dim": HIDDEN,
            "hidden_dim": 128,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "max_position_embeddings": 64,
        },
    ),
    hf_case("roberta", "RobertaForMaskedLM", "RobertaConfig", ENCODER),
    hf_case("clip_text", "CLIPTextModel", "CLIPTextConfig", ENCODER),
    hf_case("clip_vision", "CLIPVisionModel", "CLIPVisionConfig", VISION, image, takes_mask=False),
    hf_case(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        SEQ2SEQ | {"num_mel_bins": MELS, "max_source_positions": 16, "max_target_positions": 64},
        _speech,
        takes_mask=False,
    ),
    hf_case(
        "bart",
        "BartForConditionalGeneration",
        "BartConfig",
        SEQ2SEQ | {"max_position_embeddings": 64, "forced_eos_token_id": 2},
        text_to_text,
    ),
)
