"""Hugging Face's families beyond those of tests/zoo.py, a line each: the same toy sizes and random weights.

A line says what the family names otherwise than most, and what makes it small.
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import Generator, Tensor

from tests.zoo import (
    DECODER,
    ENCODER,
    GPT2,
    HIDDEN,
    LAYERS,
    LLAMA,
    MELS,
    PIXELS,
    SEQ2SEQ,
    VISION,
    VOCAB,
    WINDOW,
    Case,
    Inputs,
    by_name,
    hf_case,
    ids,
    image,
    text,
    text_to_text,
)

# Inputs, where they are not those of the zoo


def _frames(batch: int, seq: int, generator: Generator) -> Inputs:
    return {"pixel_values": torch.randn(batch, FRAMES, 3, PIXELS, PIXELS, generator=generator)}


def _wave(batch: int, seq: int, generator: Generator) -> Inputs:
    return {"input_values": torch.randn(batch, 16 * seq + 8, generator=generator)}


def _wave_to_text(batch: int, seq: int, generator: Generator) -> Inputs:
    wave = torch.randn(batch, 400 * seq, generator=generator)  # a frame is 384 numbers
    return {"input_values": wave, "decoder_input_ids": ids(batch, seq, generator)}


def _spectrogram(batch: int, seq: int, generator: Generator) -> Inputs:
    return {"input_values": torch.randn(batch, 32, MELS, generator=generator)}


def _spectrogram_to_text(batch: int, seq: int, generator: Generator) -> Inputs:
    features = torch.randn(batch, 4 * seq, MELS, generator=generator)
    return {"input_features": features, "decoder_input_ids": ids(batch, seq, generator)}


def _decision(batch: int, seq: int, generator: Generator) -> Inputs:
    """Return prompts with two questions: the token behind each, the number of its options, its type."""
    marks, options, types = (torch.tensor([row] * batch) for row in ((2, 5), (2, 4), (0, 1)))
    texts = ids(batch, seq, generator)
    return {"input_ids": texts, "marks": marks, "num_options": options, "question_type_ids": types}


def _beside(tokens: list[int], typed: bool = False, **others: Callable[[int, Generator], Tensor]) -> Any:
    """Return a function for inputs: texts with `tokens` in each row, and what `others` make for the batch.

    Args:
        tokens: SEEN stands for a part of a picture or of a sound.
        typed: True if the model is told which tokens are SEEN.
    """

    def inputs(batch: int, seq: int, generator: Generator, padded: bool = False) -> Inputs:
        given = text(batch, seq, generator, padded)
        first = min(seq // 3, seq - len(tokens))  # behind the padding
        given["input_ids"][:, first : first + len(tokens)] = torch.tensor(tokens)
        types = {"mm_token_type_ids": (given["input_ids"] == SEEN).int()} if typed else {}
        return given | types | {name: make(batch, generator) for name, make in others.items()}

    return inputs


def _random(*shape: int) -> Callable[[int, Generator], Tensor]:
    return lambda batch, generator: torch.randn(batch, *shape, generator=generator)


def _patches(*shape: int) -> Callable[[int, Generator], Tensor]:
    """Return a function for the PATCHES of all pictures in a row."""
    return lambda batch, generator: torch.randn(batch * PATCHES, *shape, generator=generator)


def _strip(batch: int, generator: Generator) -> Tensor:
    """Return the patches of all pictures beside each other, as one picture."""
    return torch.randn(1, 3, SIDE, batch * PATCHES * SIDE, generator=generator)


def _each(*values: int) -> Callable[[int, Generator], Tensor]:
    return lambda batch, generator: torch.tensor([values] * batch)


def _ones(*shape: int, dtype: torch.dtype = torch.long) -> Callable[[int, Generator], Tensor]:
    return lambda batch, generator: torch.ones(batch, *shape, dtype=dtype)


def _squares(batch: int, generator: Generator) -> Tensor:
    """Return the numbers of the patches in each square of 2 by 2."""
    return torch.arange(batch * PATCHES).view(-1, 2, 2, 2, 2).transpose(2, 3).reshape(-1, 4)


def _sound(batch: int, seq: int, generator: Generator) -> Inputs:
    return {"input_values": torch.randn(batch, 1, 16 * seq + 8, generator=generator)}


def _mels(batch: int, seq: int, generator: Generator) -> Inputs:
    return {"input_features": torch.randn(batch, 4 * seq, MELS, generator=generator)}


def _page(batch: int, seq: int, generator: Generator) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, 4 * PIXELS, 4 * PIXELS, generator=generator)}


# Settings that families share

SEEN = 1  # ids() returns no special token
SIDE, PATCHES = 4, 16  # of a picture

FRAMES = 4
_HEAD = {"head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
_ROUTED |= {"moe_intermediate_size": 32}
_MIXED = {"mlp_layer_types": ["dense", "sparse"]}
_OF_LATENT = _ROUTED | _LATENT | {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
_INDEXED = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2, "head_dim": 8}
_DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
_DELTA |= {"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED = {"shared_expert_intermediate_size": 64}
_BY_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16}
_GROUPS = {"n_group": 2, "topk_group": 1, "moe_intermediate_size": 32, "num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
_SCAN = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "state_size": 16}
_LONG = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_XLM = {
    "vocab_size": VOCAB,
    "emb_dim": HIDDEN,
    "n_layers": LAYERS,
    "n_heads": 4,
    "max_position_embeddings": 64,
}
_T5 = {"vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": 16, "d_ff": 128, "num_layers": LAYERS, "num_heads": 4}
_START = {"decoder_start_token_id": 0}
_BART = SEQ2SEQ | {"max_position_embeddings": 64}
_PROPHET = ENCODER | {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "ngram": 2}
_STILL = {"drop_path_rate": 0.0}  # else whole layers are dropped at random
_STAGES = {"depths": [1, 1], "num_attention_heads": [2, 4], "hidden_sizes": [32, 64]} | _STILL
_PVT = _STAGES | {"num_encoder_blocks": 2, "patch_sizes": [4, 2], "strides": [4, 2], "mlp_ratios": [2, 2]}
_SWIN = {
    "image_size": PIXELS,
    "patch_size": 2,
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
} | _STILL
_CONVOLUTIONS = {"conv_dim": [32, 32], "conv_stride": [4, 4], "conv_kernel": [8, 4]}
_SPEECH = ENCODER | _CONVOLUTIONS | {"num_feat_extract_layers": 2, "num_conv_pos_embedding_groups": 4}
_WAVE = _SPEECH | {"num_conv_pos_embeddings": 8, "apply_spec_augment": False, "layerdrop": 0.0}


def _sections(sizes: list[int]) -> dict[str, Any]:
    """How many angles are of positions in time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sizes}}


def _of(kind: str, inputs: Any = text, takes_mask: bool = True, config: str = "Config") -> Any:
    """What makes the case of a model that does `kind`, of a name, the name of the family, and settings."""

    def case(name: str, family: str, settings: dict[str, Any]) -> Case:
        return hf_case(name, family + kind, f"{family}{config}", settings, inputs, takes_mask)

    return case


_decoder = _of("ForCausalLM")
_of_text = _of("ForCausalLM", config="TextConfig")  # the decoder of a model that also sees and hears
_text_model = _of("TextModel", config="TextConfig")
_gpt = _of("LMHeadModel")
_masked = _of("ForMaskedLM")
_encoder = _of("Model")
_seq2seq = _of("ForConditionalGeneration", text_to_text)
_vision = _of("Model", image, takes_mask=False)
_classes = _of("ForImageClassification", image, takes_mask=False)
_video = _of("Model", _frames, takes_mask=False)
_speech = _of("Model", _wave, takes_mask=False)

FAMILIES: dict[str, Case] = by_name(
    # decoders of text
    _gpt("openai_gpt", "OpenAIGPT", GPT2),
    _gpt("ctrl", "CTRL", GPT2 | {"dff": 128}),
    _decoder(
        "gpt_neo",
        "GPTNeo",
        DECODER
        | {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
        },
    ),
    _decoder("gptj", "GPTJ", GPT2 | {"rotary_dim": 8}),
    _decoder("codegen", "CodeGen", GPT2 | {"rotary_dim": 8}),
    _decoder("gpt_bigcode", "GPTBigCode", GPT2),
    _decoder("gpt_neox_japanese", "GPTNeoXJapanese", DECODER | {"intermediate_multiple_size": 2}),
    _decoder(
        "xglm", "XGLM", DECODER | {"d_model": HIDDEN, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4}
    ),
    _decoder("biogpt", "BioGpt", ENCODER),
    _decoder(
        "mpt",
        "Mpt",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "expansion_ratio": 2,
        },
    ),
    _decoder("phi", "Phi", ENCODER),
    _decoder("persimmon", "Persimmon", ENCODER),
    _decoder("stablelm", "StableLm", LLAMA),
    _decoder("starcoder2", "Starcoder2", LLAMA),
    _decoder("olmo", "Olmo", LLAMA),
    _decoder("olmo2", "Olmo2", LLAMA),
    _decoder("olmo3", "Olmo3", LLAMA | _LONG),
    _decoder("cohere", "Cohere", LLAMA),
    _decoder("cohere2", "Cohere2", LLAMA | _LONG),
    _decoder("granite", "Granite", LLAMA),
    _decoder("nemotron", "Nemotron", LLAMA | _HEAD),
    _decoder("glm", "Glm", LLAMA | _HEAD),
    _decoder("glm4", "Glm4", LLAMA | _HEAD),
    _decoder("smollm3", "SmolLM3", LLAMA | {"no_rope_layers": [1, 0]}),
    _decoder("ernie4_5", "Ernie4_5", LLAMA | _HEAD),
    _decoder("exaone4", "Exaone4", LLAMA | _LONG),
    _decoder("helium", "Helium", LLAMA | _HEAD),
    _decoder("arcee", "Arcee", LLAMA),
    _decoder("apertus", "Apertus", LLAMA),
    _decoder("seed_oss", "SeedOss", LLAMA | _HEAD),
    _decoder("hunyuan_dense", "HunYuanDenseV1", LLAMA | _HEAD),
    _decoder("bitnet", "BitNet", LLAMA),
    _decoder("cwm", "Cwm", LLAMA | _LONG),
    _decoder("diffllama", "DiffLlama", LLAMA),
    _decoder("vaultgemma", "VaultGemma", LLAMA | _HEAD | _LONG),
    _decoder("modernbert_decoder", "ModernBertDecoder", ENCODER | {"local_attention": WINDOW}),
    _decoder("qwen2_moe", "Qwen2Moe", LLAMA | _EXPERTS | {"shared_expert_intermediate_size": 64}),
    _decoder("qwen3_moe", "Qwen3Moe", LLAMA | _EXPERTS | _HEAD),
    _decoder("olmoe", "Olmoe", LLAMA | _EXPERTS),
    _decoder("granitemoe", "GraniteMoe", LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    _decoder("gpt_oss", "GptOss", LLAMA | _HEAD | _LONG | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    _decoder("deepseek_v2", "DeepseekV2", LLAMA | _DEEPSEEK | _LATENT | _GROUPS),
    _decoder("deepseek_v3", "DeepseekV3", LLAMA | _DEEPSEEK | _LATENT | _GROUPS),
    _decoder(
        "minimax",
        "MiniMax",
        LLAMA
        | {"num_local_experts": 4, "block_size": 4, "layer_types": ["linear_attention", "full_attention"]},
    ),
    _decoder("lfm2", "Lfm2", LLAMA | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}),
    _decoder(
        "jamba",
        "Jamba",
        LLAMA
        | {
            "num_experts": 4,
            "use_mamba_kernels": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
        },
    ),
    _decoder("bamba", "Bamba", LLAMA | _MAMBA | {"attn_layer_indices": [1]}),
    _decoder("mamba", "Mamba", _SCAN),
    _decoder("falcon_mamba", "FalconMamba", _SCAN),
    _decoder("mamba2", "Mamba2", _SCAN | {"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8}),
    # decoders of text, of 2025 and 2026
    _decoder(
        "afmoe",
        "Afmoe",
        LLAMA
        | _EXPERTS
        | _HEAD
        | {"num_shared_experts": 1, "sliding_window": WINDOW, "global_attn_every_n_layers": 2},
    ),
    _decoder("axk1", "AXK1", LLAMA | _OF_LATENT | {"first_k_dense_replace": 1}),
    _decoder("axk2", "AXK2", LLAMA | _OF_LATENT | _INDEXED | _MIXED | {"gated_norm_rank": 4}),
    _decoder("cohere2_moe", "Cohere2Moe", LLAMA | _HEAD | _LONG | {"num_experts": 4}),
    _decoder("deepseek_v32", "DeepseekV32", LLAMA | _OF_LATENT | _INDEXED | {"first_k_dense_replace": 1}),
    _decoder(
        "deepseek_v4",
        "DeepseekV4",
        DECODER
        | _ROUTED
        | _INDEXED
        | {"head_dim": 16, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "hc_mult": 2}
        | {"sliding_window": WINDOW, "num_nextn_predict_layers": 0},
    ),
    _decoder("dots1", "Dots1", LLAMA | _ROUTED | {"first_k_dense_replace": 1}),
    _decoder(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        LLAMA | {"moe_intermediate_size": 32, "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1},
    ),
    _decoder("exaone_moe", "ExaoneMoe", LLAMA | _EXPERTS | _LONG | _MIXED),
    _decoder("falcon_h1", "FalconH1", LLAMA | _MAMBA | {"mamba_d_ssm": 128}),
    _decoder("flex_olmo", "FlexOlmo", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}),
    _of_text(
        "gemma3n",
        "Gemma3n",
        LLAMA
        | _HEAD
        | _LONG
        | _BY_LAYER
        | {"laurel_rank": 8, "num_kv_shared_layers": 0, "altup_num_inputs": 2}
        | {"activation_sparsity_pattern": [0.0, 0.0]},
    ),
    _of_text("gemma4", "Gemma4", LLAMA | _HEAD | _LONG | _BY_LAYER | {"global_head_dim": 32}),
    _of_text(
        "gemma4_moe",
        "Gemma4",
        LLAMA
        | _HEAD
        | _LONG
        | _BY_LAYER
        | {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4}
        | {"top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    _decoder("glm4_moe", "Glm4Moe", LLAMA | _ROUTED | _HEAD | {"first_k_dense_replace": 1}),
    _decoder("glm4_moe_lite", "Glm4MoeLite", LLAMA | _OF_LATENT | _MIXED),
    _decoder("glm_moe_dsa", "GlmMoeDsa", LLAMA | _OF_LATENT | _INDEXED | _MIXED),
    _text_model(
        "glm5_next",
        "Glm5Next",
        LLAMA
        | _OF_LATENT
        | _INDEXED
        | _MIXED
        | {"linear_head_dim": 16, "linear_num_heads": 4, "hc_mult": 2, "index_kpool": 2}
        | {"qk_rope_head_dim": 0, "layer_types": ["linear_attention", "full_attention"]},
    ),
    _decoder("granite_swa", "GraniteSWA", LLAMA | _LONG),
    _decoder("granitemoe_swa", "GraniteMoeSWA", LLAMA | _LONG | _LOCAL),
    _decoder(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        LLAMA | _MAMBA | _LOCAL | {"shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
    ),
    _decoder("hunyuan_moe", "HunYuanMoEV1", LLAMA | _HEAD | {"num_experts": 4, "moe_topk": 2}),
    _decoder("hy_v3", "HYV3", LLAMA | _EXPERTS | _HEAD | _MIXED),
    _decoder("hy_v4", "HYV4", LLAMA | _OF_LATENT | _INDEXED | _MIXED | {"head_dim": 24, "hc_mult": 2}),
    _decoder("hyperclovax", "HyperCLOVAX", LLAMA),
    _of_text(
        "inkling",
        "Inkling",
        DECODER
        | _ROUTED
        | _HEAD
        | _MIXED
        | {"num_key_value_heads": 2, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
        | {"swa_head_dim": 16, "sliding_window_size": WINDOW, "d_rel": 4, "rel_extent": 32}
        | {"intermediate_size": 96},
    ),
    _decoder("jais2", "Jais2", LLAMA | _HEAD),
    _decoder(
        "kimi_linear",
        "KimiLinear",
        LLAMA
        | _OF_LATENT
        | _MIXED
        | {"q_lora_rank": None, "num_local_experts": 4, "linear_head_dim": 16, "linear_num_heads": 4}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    _decoder("laguna", "Laguna", LLAMA | _EXPERTS | _HEAD | _LONG | _SHARED | _MIXED),
    _decoder(
        "lfm2_moe",
        "Lfm2Moe",
        LLAMA | _EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    _of_text(
        "llama4",
        "Llama4",
        LLAMA
        | _HEAD
        | {"intermediate_size_mlp": 96, "num_local_experts": 4, "moe_layers": [1]}
        | {"no_rope_layers": [1, 0], "attention_chunk_size": 8},
    ),
    _decoder(
        "longcat_flash",
        "LongcatFlash",
        DECODER
        | _LATENT
        | {"num_layers": 1, "ffn_hidden_size": 96, "moe_topk": 2, "n_routed_experts": 4}
        | {"zero_expert_num": 2, "expert_ffn_hidden_size": 32, "head_dim": 8},
    ),
    _decoder("mellum", "Mellum", LLAMA | _EXPERTS | _HEAD | _LONG),
    _decoder(
        "mimo_v2_flash",
        "MiMoV2Flash",
        LLAMA | _ROUTED | _LONG | _MIXED | {"head_dim": 24, "v_head_dim": 16},
    ),
    _decoder("minicpm3", "MiniCPM3", LLAMA | _LATENT | {"num_key_value_heads": 4}),
    _decoder("minimax_m2", "MiniMaxM2", LLAMA | _HEAD | _LOCAL),
    _of_text(
        "minimax_m3",
        "MiniMaxM3VL",
        LLAMA
        | _HEAD
        | _MIXED
        | _LOCAL
        | {"dense_intermediate_size": 96, "shared_intermediate_size": 32, "intermediate_size": 32}
        | {"rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4}
        | {"index_topk_blocks": 2},
    ),
    _decoder("ministral", "Ministral", LLAMA | _HEAD | _LONG),
    _decoder("ministral3", "Ministral3", LLAMA | _HEAD),
    _decoder("mistral4", "Mistral4", LLAMA | _OF_LATENT | {"first_k_dense_replace": 1}),
    _text_model("muse_glimmer", "MuseGlimmer", LLAMA | _HEAD | _LONG),
    _text_model("qwen2_vl", "Qwen2VL", LLAMA | _sections([2, 3, 3])),
    _text_model("qwen3_vl", "Qwen3VL", LLAMA | _HEAD | _sections([3, 3, 2])),
    _text_model("glm4v", "Glm4v", LLAMA | _HEAD | _sections([4, 2, 2])),
    _decoder("nanochat_hf", "NanoChat", LLAMA),
    _decoder(
        "nemotron_h",
        "NemotronH",
        {name: size for name, size in LLAMA.items() if name != "num_hidden_layers"}
        | _HEAD
        | _ROUTED
        | {"layers_block_type": ["mamba", "attention", "moe"], "ssm_state_size": 16, "chunk_size": 8}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2}
        | {"moe_shared_expert_intermediate_size": 32},
    ),
    _decoder(
        "olmo_hybrid",
        "OlmoHybrid",
        LLAMA
        | {"layer_types": ["linear_attention", "full_attention"]}
        | {"linear_key_head_dim": 16, "linear_value_head_dim": 32},
    ),
    _of("ForTokenClassification")(
        "openai_privacy_filter",
        "OpenAIPrivacyFilter",
        LLAMA | _HEAD | _LOCAL | {"sliding_window": WINDOW},
    ),
    _decoder("phimoe", "Phimoe", LLAMA | {"num_local_experts": 4}),
    _of_text("qwen3_5", "Qwen3_5", LLAMA | _HEAD | _DELTA),
    _of_text("qwen3_5_moe", "Qwen3_5Moe", LLAMA | _HEAD | _DELTA | _EXPERTS | _SHARED),
    _decoder("qwen3_next", "Qwen3Next", LLAMA | _HEAD | _DELTA | _EXPERTS | _SHARED),
    _decoder("solar_open", "SolarOpen", LLAMA | _ROUTED | _HEAD),
    _text_model(
        "step3p7",
        "Step3p7",
        LLAMA | _HEAD | _ROUTED | _LONG | _MIXED | {"share_expert_dim": 32, "num_local_experts": 4},
    ),
    _decoder("youtu", "Youtu", LLAMA | _LATENT | {"num_key_value_heads": 4}),
    _decoder(
        "zamba2",
        "Zamba2",
        LLAMA
        | {"num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 16}
        | {"n_mamba_heads": 8, "chunk_size": 8, "use_mamba_kernels": False},
    ),
    _decoder(
        "zaya",
        "Zaya",
        LLAMA | _HEAD | {"moe_intermediate_size": 32, "num_experts": 4, "router_hidden_size": 16},
    ),
    # encoders of text
    _masked("albert", "Albert", ENCODER | {"embedding_size": 32}),
    _masked("electra", "Electra", ENCODER | {"embedding_size": 32}),
    _masked("deberta", "Deberta", ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    _masked(
        "deberta_v2", "DebertaV2", ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    ),
    _masked("xlm_roberta", "XLMRoberta", ENCODER),
    _masked("xlm_roberta_xl", "XLMRobertaXL", ENCODER),
    _masked("roberta_prelayernorm", "RobertaPreLayerNorm", ENCODER),
    _masked("camembert", "Camembert", ENCODER),
    _masked("data2vec_text", "Data2VecText", ENCODER),
    _masked("ernie", "Ernie", ENCODER),
    _masked("megatron_bert", "MegatronBert", ENCODER),
    _masked(
        "mobilebert",
        "MobileBert",
        ENCODER | {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    ),
    _masked("convbert", "ConvBert", ENCODER | {"embedding_size": 32}),
    _masked("mpnet", "MPNet", ENCODER),
    _masked(
        "modernbert",
        "ModernBert",
        ENCODER | {"local_attention": WINDOW, "cls_token_id": 1, "sep_token_id": 2},
    ),
    _masked("eurobert", "EuroBert", LLAMA),
    _masked("esm", "Esm", ENCODER | {"position_embedding_type": "rotary", "mask_token_id": 3}),
    _masked("nomic_bert", "NomicBert", ENCODER),
    _masked("squeezebert", "SqueezeBert", ENCODER | {"embedding_size": HIDDEN}),
    _masked("layoutlm", "LayoutLM", ENCODER),
    _masked("rembert", "RemBert", ENCODER | {"input_embedding_size": 32, "output_embedding_size": 32}),
    _masked("esmc", "Esmc", ENCODER),
    _masked("jina_embeddings_v3", "JinaEmbeddingsV3", ENCODER),
    _masked("neomme", "NeoMME", LLAMA | _HEAD | {"embedding_rank": 32, "sliding_window": WINDOW}),
    _masked("ibert", "IBert", ENCODER),
    _masked("roformer", "RoFormer", ENCODER),
    _masked("big_bird", "BigBird", ENCODER | {"attention_type": "original_full"}),
    _masked("nystromformer", "Nystromformer", ENCODER | {"num_landmarks": 4, "segment_means_seq_len": 4}),
    _masked("longformer", "Longformer", ENCODER | {"attention_window": 8}),
    _encoder("xlm", "XLM", _XLM),
    # encoder-decoders of text
    _seq2seq("mt5", "MT5", _T5 | _START),
    _seq2seq("umt5", "UMT5", _T5 | _START),
    _seq2seq("pegasus", "Pegasus", _BART),
    _of("MTModel", text_to_text)("marian", "Marian", _BART),
    _seq2seq("mbart", "MBart", _BART),
    _seq2seq("m2m_100", "M2M100", _BART | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}),
    _seq2seq("plbart", "PLBart", _BART),
    _seq2seq("mvp", "Mvp", _BART),
    _seq2seq("blenderbot", "Blenderbot", _BART),
    _seq2seq("blenderbot_small", "BlenderbotSmall", _BART),
    _seq2seq(
        "led",
        "LED",
        SEQ2SEQ
        | {
            "attention_window": 8,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
    ),
    _seq2seq("bigbird_pegasus", "BigBirdPegasus", _BART | {"attention_type": "original_full"}),
    # vision
    _classes("deit", "DeiT", VISION),
    _classes("beit", "Beit", VISION | _STILL | {"use_relative_position_bias": True}),
    _classes("dinov2", "Dinov2", VISION | {"mlp_ratio": 2}),
    _vision("dinov2_with_registers", "Dinov2WithRegisters", VISION | {"mlp_ratio": 2}),
    _vision("siglip_vision", "SiglipVision", VISION),
    _vision("vit_msn", "ViTMSN", VISION),
    _vision("ijepa", "IJepa", VISION),
    _vision("yolos", "Yolos", VISION | {"image_size": [PIXELS, PIXELS], "num_detection_tokens": 4}),
    _vision("swin", "Swin", _SWIN | {"window_size": 2}),
    _vision("swinv2", "Swinv2", _SWIN | {"window_size": 4}),
    _classes("pvt", "Pvt", _PVT | {"image_size": PIXELS, "sequence_reduction_ratios": [2, 1]}),
    _vision("segformer", "Segformer", _PVT | {"sr_ratios": [2, 1]}),
    _video("videomae", "VideoMAE", VISION | {"num_frames": FRAMES}),
    _video("timesformer", "Timesformer", VISION | {"num_frames": FRAMES}),
    _video("vivit", "Vivit", VISION | {"num_frames": FRAMES, "tubelet_size": [2, 4, 4]}),
    # speech
    _speech("wav2vec2", "Wav2Vec2", _WAVE),
    _speech("wav2vec2_conformer", "Wav2Vec2Conformer", _WAVE | {"conv_depthwise_kernel_size": 3}),
    _speech("hubert", "Hubert", _WAVE),
    _speech("wavlm", "WavLM", _WAVE),
    _speech("unispeech", "UniSpeech", _WAVE),
    _speech("sew", "SEW", _WAVE),
    _of("Model", _spectrogram, takes_mask=False)(
        "audio_spectrogram_transformer",
        "AST",
        VISION | {"max_length": 32, "num_mel_bins": MELS, "frequency_stride": 4, "time_stride": 4},
    ),
    _of("ForConditionalGeneration", _wave_to_text, takes_mask=False)(
        "moonshine",
        "Moonshine",
        ENCODER
        | {
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
        },
    ),
    _of("ForConditionalGeneration", _spectrogram_to_text, takes_mask=False)(
        "speech_to_text",
        "Speech2Text",
        SEQ2SEQ
        | {
            "input_feat_per_channel": MELS,
            "conv_channels": 32,
            "max_source_positions": 64,
            "max_target_positions": 64,
        },
    ),
)
# Models of transformers 5.24 that see and hear beside reading

_ENCODES = {"hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": LAYERS}
_ENCODES |= {"num_attention_heads": 4}
_IMAGE, _AUDIO = {"image_token_id": SEEN}, {"audio_token_id": SEEN}
_SEES = _ENCODES | {"patch_size": SIDE}
_QWEN = {"model_type": "qwen3_5_text"} | LLAMA | _HEAD | _DELTA
_NEMOTRON = {name: size for name, size in LLAMA.items() if name != "num_hidden_layers"} | _HEAD | _ROUTED
_NEMOTRON |= {"layers_block_type": ["mamba", "attention", "moe"], "ssm_state_size": 16, "chunk_size": 8}
_NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2}
_NEMOTRON |= {"moe_shared_expert_intermediate_size": 32}
_HEARS = _ENCODES | _CONVOLUTIONS | {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
_HEARS |= {"layerdrop": 0.0}
_FRAMES = {"num_mel_bins": MELS, "subsampling_factor": 4}
_SPEAKERS = {
    "audio_config": _ENCODES | _FRAMES,
    "head_config": {
        "hidden_size": 32,
        "num_speakers": 2,
        "audio_hidden_size": HIDDEN,
        "subsampling_factor": 4,
    },
    "streaming_config": {"num_speakers": 2, "subsampling_factor": 4, "speaker_cache_length": 8},
    "chunk_length": 8,
    "chunk_right_context": 2,
    "fifo_length": 4,
    "speaker_cache_update_period": 6,
}
_SPEAKS = _ENCODES | {
    "vocab_size": VOCAB + 1,
    "max_position_embeddings": 64,
    "latent_dim": 8,
    "pad_token_id": 0,
    "audio_prompt_token_id": SEEN,
    "audio_bos_token_id": 2,
    "audio_latent_token_id": VOCAB,
    "flow_head_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "latent_dim": 8,
        "condition_dim": HIDDEN,
        "frequency_embedding_size": 32,
        "loss_weighting_hidden_size": 8,
    },
}


def _voice(width: int) -> Any:
    """Return a function for texts with a voice's prompt of two latents and a sound of three."""
    tokens = [SEEN, SEEN, 2, VOCAB, VOCAB, VOCAB]
    return _beside(tokens, audio_prompt_latents=_random(2, width), audio_latents=_random(3, 8))


def _reader(inputs: Any) -> Any:
    """Return a function for a case that reads pictures or sounds, and generates text."""
    return _of("ForConditionalGeneration", inputs)


NEWEST: dict[str, Case] = by_name(  # of transformers 5.24
    _decoder("apertus1p5", "Apertus1p5Text", LLAMA),
    _decoder(
        "bailing_hybrid",
        "BailingHybrid",
        LLAMA
        | _OF_LATENT
        | _MIXED
        | {
            "q_lora_rank": None,
            "num_local_experts": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    _decoder("beam", "Beam", LLAMA | _HEAD | _LONG),
    _decoder(
        "dory",
        "Dory",
        LLAMA
        | _HEAD
        | {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "sliding_window": WINDOW}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    _text_model("dots3_note", "Dots3Note", LLAMA | _OF_LATENT | _INDEXED | _MIXED),
    _text_model("embedding_gemma2", "EmbeddingGemma2", LLAMA | _HEAD | _LONG | {"global_head_dim": 32}),
    _decoder("flint", "Flint", LLAMA | _HEAD | _LONG),
    _masked("gte", "Gte", ENCODER),
    _text_model("inkling2", "Inkling2", LLAMA | _ROUTED | _HEAD | _MIXED),
    _text_model("inkling2_loop", "Inkling2Loop", LLAMA | _ROUTED | _HEAD | _MIXED),
    _decoder("kolibri1", "Kolibri1", LLAMA | _EXPERTS | _ROUTED | _LOCAL | _HEAD | _LONG),
    _decoder("lara_mini", "LaraMini", LLAMA | _EXPERTS | _HEAD | _DELTA),
    _decoder(
        "lfm3", "Lfm3", LLAMA | _HEAD | {"layer_types": ["conv", "full_attention"], "sliding_window": WINDOW}
    ),
    _text_model("mistral_large4", "MistralLarge4", LLAMA | _OF_LATENT | _INDEXED | _MIXED),
    _text_model(
        "muse_spark",
        "MuseSpark",
        LLAMA | _LOCAL | _HEAD | _LONG | {"moe_hidden_size": 32, "moe_intermediate_size": 32},
    ),
    _masked("ultrabert", "Ultrabert", ENCODER),
    hf_case("exaone", "LlamaForCausalLM", "ExaoneConfig", LLAMA),
    hf_case(
        "internlm3",
        "LlamaForCausalLM",
        "InternLM3Config",
        LLAMA | _HEAD | {"attention_bias": True, "mlp_bias": True},
    ),
    hf_case("iquestcoder", "LlamaForCausalLM", "IQuestCoderConfig", LLAMA | _HEAD),
    hf_case(
        "sarvam_mla",
        "DeepseekV3ForCausalLM",
        "SarvamMLAConfig",
        LLAMA | _OF_LATENT | {"first_k_dense_replace": 1, "q_lora_rank": None},
    ),
    hf_case(
        "sarvam_moe",
        "Glm4MoeForCausalLM",
        "SarvamMoEConfig",
        LLAMA | _ROUTED | _HEAD | {"first_k_dense_replace": 1},
    ),
    _of("ForDecision", _decision, takes_mask=False)(
        "jev", "Jev", {"hidden_size": HIDDEN, "softcap": 5.0, "text_config": _QWEN}
    ),
    _of("ForObjectDetection", _page, takes_mask=False)(
        "pp_doclayout_v4",
        "PPDocLayoutV4",
        {
            "hidden_size": HIDDEN,
            "encoder_hidden_dim": HIDDEN,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "decoder_layers": 2,
            "num_queries": 8,
            "encoder_in_channels": [32] * 3,
            "decoder_in_channels": [HIDDEN] * 3,
            "global_pointer_head_size": 16,
            "num_denoising": 0,
            "num_labels": 5,
            "backbone_config": {
                "model_type": "hgnet_v2",
                "depths": [1] * 4,
                "hidden_sizes": [32] * 4,
                "embedding_size": 16,
                "stem_channels": [3, 16, 16],
                "stage_in_channels": [16, 32, 32, 32],
                "stage_mid_channels": [16] * 4,
                "stage_out_channels": [32] * 4,
                "stage_num_blocks": [1] * 4,
                "stage_numb_of_layers": [1] * 4,
                "out_features": ["stage2", "stage3", "stage4"],
            },
        },
    ),
    _of("ForMaskedLM", _beside([SEEN] * 4, pixel_values=_random(1, 3, PIXELS, PIXELS)))(
        "ultravbert",
        "UltraVBert",
        {
            "text_config": {"model_type": "ultrabert"} | ENCODER,
            "vision_config": VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
            "pixel_shuffle_factor": 2,
        }
        | _IMAGE,
    ),
    _of("ForConditionalGeneration", _voice(16))(
        "gradium_phonon_tts",
        "GradiumPhononTTS",
        _SPEAKS | {"audio_prompt_dim": 16, "duration_delta_embedding_dim": 16},
    ),
    _of("ForAudioFrameClassification", _mels, takes_mask=False)(
        "nemotron3_diarization", "Nemotron3Diarization", _SPEAKERS
    ),
    hf_case(
        "omniasr_ctc",
        "OmniASRForCTC",
        "OmniASRCTCConfig",
        {"audio_config": _HEARS, "vocab_size": VOCAB},
        _sound,
        takes_mask=False,
    ),
    _of("ForConditionalGeneration", _voice(8))("pocket_tts", "PocketTTS", _SPEAKS),
    _of("Model", _sound, takes_mask=False)(
        "pocket_tts_audio_tokenizer",
        "PocketTTSAudioTokenizer",
        _ENCODES
        | {
            "num_filters": 8,
            "upsampling_ratios": [2, 2],
            "upsample_groups": HIDDEN,
            "latent_stride": 4,
            "latent_dim": 8,
            "num_key_value_heads": 4,
            "sliding_window": WINDOW,
        },
    ),
    _of("Model", _sound, takes_mask=False)(
        "wavtokenizer",
        "WavTokenizer",
        {
            "num_filters": 8,
            "upsampling_ratios": [2, 2],
            "hidden_size": 32,
            "codebook_dim": 32,
            "codebook_size": 16,
            "decoder_hidden_size": HIDDEN,
            "decoder_intermediate_size": 128,
            "decoder_num_layers": 2,
            "decoder_attention_num_groups": 8,
        },
    ),
)
READERS: dict[str, Case] = by_name(  # of pictures and sounds, also of transformers 5.24
    _reader(
        _beside(
            [SEEN] * 4,
            pixel_values=_random(1, 3, PIXELS, PIXELS),
            pixel_attention_mask=_ones(1, dtype=torch.bool),
        )
    )(
        "granite_docling",
        "GraniteDocling",
        {
            "text_config": LLAMA,
            "vision_config": VISION
            | {"out_hidden_size": HIDDEN, "scale_factor": 2, "deepstack_visual_indexes": [0, 1]},
            "pad_token_id": 0,
        }
        | _IMAGE,
    ),
    _reader(
        _beside(
            [SEEN] * 4,
            typed=True,
            pixel_values=_random(PATCHES, 48),
            image_token_pooling=_squares,
            image_grids=_each(1, 2, 1, 2),
        )
    )(
        "molmo2",
        "Molmo2",
        {
            "text_config": LLAMA | _HEAD | {"additional_vocab_size": 8},
            "vision_config": VISION | _HEAD | {"image_size": [PIXELS, PIXELS], "num_key_value_heads": 4},
            "adapter_config": _HEAD
            | {
                "vision_feature_layer": [1, 0],
                "hidden_size": HIDDEN,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "intermediate_size": 96,
                "text_hidden_size": HIDDEN,
            },
            "image_patch_id": SEEN,
        },
    ),
    _reader(_beside([SEEN] * 6, typed=True, pixel_values=_patches(48), image_grid_thw=_each(1, 4, 4)))(
        "hy_v4_vl",
        "HYV4VL",
        {
            "text_config": LLAMA | _OF_LATENT | _INDEXED | _MIXED | {"hc_mult": 2} | _sections([2, 1, 1]),
            "vision_config": _SEES | {"out_hidden_size": HIDDEN, "max_image_size": PIXELS},
        }
        | _IMAGE,
    ),
    _reader(_beside([SEEN] * 4, pixel_values=_patches(96), image_grid_thw=_each(1, 4, 4)))(
        "hyperclovax_vision_v2",
        "HyperCLOVAXVisionV2",
        {
            "text_config": {"model_type": "hyperclovax"} | LLAMA,
            "vision_config": _SEES
            | {
                "model_type": "qwen2_5_vl_vision",
                "depth": 2,
                "num_heads": 4,
                "out_hidden_size": 32,
                "window_size": 8,
                "fullatt_block_indexes": [1],
            },
        }
        | _IMAGE,
    ),
    _reader(_beside([SEEN] * 4, pixel_values=_patches(96), image_grid_thw=_each(1, 4, 4)))(
        "lfm3_vl",
        "Lfm3Vl",
        {
            "text_config": {"model_type": "lfm3"}
            | LLAMA
            | _HEAD
            | {"layer_types": ["conv", "full_attention"], "sliding_window": WINDOW},
            "vision_config": _SEES | {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
            "projector_hidden_size": 96,
        }
        | _IMAGE,
    ),
    _reader(_beside([SEEN] * 4, pixel_values=_strip, target_sizes=_each(4, 4)))(
        "minicpm_ocr",
        "MiniCPMOcr",
        {"text_config": _QWEN, "vision_config": VISION, "insert_layer_id": 0} | _IMAGE,
    ),
    _reader(_beside([VOCAB, SEEN, VOCAB + 1], typed=True, pixel_values=_strip, target_sizes=_each(4, 4)))(
        "minicpmv4_7",
        "MiniCPMV4_7",
        {
            "text_config": _QWEN | {"vocab_size": VOCAB + 2} | _sections([2, 1, 1]),
            "vision_config": VISION,
            "insert_layer_id": 0,
            "image_start_id": VOCAB,
            "image_end_id": VOCAB + 1,
            "slice_start_id": VOCAB + 2,
            "slice_end_id": VOCAB + 3,
            "newline_id": VOCAB + 4,
        }
        | _IMAGE,
    ),
    _of(
        "_Reasoning_V3",
        _beside([SEEN] * 4, pixel_values=_patches(48), image_grid_hw=_each(4, 4)),
        config="_Reasoning_V3_Config",
    )(
        "nemotron_h_omni",
        "NemotronH_Omni",
        {
            "text_config": _NEMOTRON,
            "vision_config": _SEES
            | {
                "mlp_ratio": 2.0,
                "image_size": PIXELS,
                "max_img_size": PIXELS,
                "num_cls_tokens": 1,
                "num_registers": 2,
                "video_temporal_patch_size": 2,
            },
            "vision_hidden_size": HIDDEN,
            "projector_hidden_size": 96,
        }
        | _IMAGE,
    ),
    _reader(_beside([SEEN] * 7, pixel_values=_random(3, 8 * PIXELS, 8 * PIXELS)))(
        "unlimited_ocr",
        "UnlimitedOcr",
        {
            "text_config": LLAMA | _ROUTED | _MIXED | {"num_key_value_heads": 4, "sliding_window": WINDOW},
            "vision_config": {
                "sam_config": {
                    "hidden_size": HIDDEN,
                    "output_channels": 16,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "image_size": 8 * PIXELS,
                    "patch_size": 16,
                    "window_size": 4,
                    "global_attn_indexes": [1],
                    "mlp_dim": 128,
                    "downsample_channels": [32, HIDDEN],
                },
                "encoder_config": _ENCODES | {"image_size": 32, "patch_size": 16},
            },
        }
        | _IMAGE,
    ),
    _reader(_beside([SEEN] * 4, input_features=_random(MELS, 32), input_features_mask=_ones(32)))(
        "moss_transcribe_diarize",
        "MossTranscribeDiarize",
        {
            "text_config": {"model_type": "qwen3"} | LLAMA | _HEAD,
            "audio_config": _ENCODES | {"num_mel_bins": MELS, "max_source_positions": 16},
        }
        | _AUDIO,
    ),
    _reader(_beside([SEEN] * 4, input_features=_random(16, MELS), input_features_mask=_ones(16)))(
        "nemotron3_5_transcribe",
        "Nemotron3_5Transcribe",
        {
            "text_config": _NEMOTRON,
            "audio_config": {
                "asr_config": _ENCODES | _FRAMES,
                "diarization_config": {"model_type": "nemotron3_diarization"} | _SPEAKERS,
            },
            "word_timestamp_config": _ENCODES | {"vocab_size": 8, "blank_token_id": 7},
        }
        | _AUDIO,
    ),
    _reader(_beside([SEEN] * 4, input_values=_random(1, 72)))(
        "omniasr",
        "OmniASR",
        {"text_config": {"model_type": "llama"} | LLAMA, "audio_config": _HEARS} | _AUDIO,
    ),
)
NEWEST |= READERS
if tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24):
    FAMILIES |= NEWEST
