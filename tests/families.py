"""Hugging Face's families beyond those of tests/zoo.py, a line each: the same toy sizes and random weights.

A line says what the family names otherwise than most, and what makes it small.
"""

from importlib.metadata import version
from typing import Any

import torch
from torch import Generator

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


# Settings that families share

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
)
if tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24):
    FAMILIES |= NEWEST
