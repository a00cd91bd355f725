"""Models that are not Hugging Face's, each in a line: the toy sizes and random weights of tests/zoo.py.

They are of packages that `make integrations` installs, or in the style of repositories that are none.
"""

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Generator, nn

from tests.zoo import (
    HEADS,
    HIDDEN,
    LAYERS,
    PIXELS,
    VOCAB,
    WINDOW,
    Case,
    Inputs,
    MakeInputs,
    by_name,
    ids,
    left_padding,
    seeded,
)

# Some packages want torchvision, whose compiled operations load beside the one build of PyTorch that they
# were made with; without them its description of them for compilers raises. So these packages lie in a folder
# of their own, where transformers, which imports torchvision if it is there, does not find it: not in this
# process, nor in those that it starts.
FOLDER = str(Path(sys.prefix) / "others")
sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))


# Building


def made(path: str, *args: Any, **settings: Any) -> nn.Module:
    """What a class or function gives, which is named by its module and name.

    Parts of it, which are such calls themselves among the settings, are made first.
    """
    module, _, name = path.rpartition(".")
    with patch.object(sys, "path", [*sys.path, FOLDER]):
        home = import_module(module)
    parts = {key: value() if isinstance(value, partial) else value for key, value in settings.items()}
    return getattr(home, name)(*args, **parts)


def _case(
    name: str, inputs: MakeInputs, path: str, *args: Any, padded: MakeInputs | None = None, **settings: Any
) -> Case:
    return Case(name, partial(seeded, made, path, *args, **settings), inputs, padded)


def _x_transformers(name: str, kind: str, **settings: Any) -> Case:
    layers = partial(made, f"x_transformers.{kind}", **_BLOCKS, attn_dim_head=16, **settings)
    shape = {"num_tokens": VOCAB, "max_seq_len": 64}
    return _case(
        name, _tokens, "x_transformers.TransformerWrapper", padded=_kept, attn_layers=layers, **shape
    )


def _vit_pytorch(name: str, path: str, **settings: Any) -> Case:
    return _case(name, partial(_image, name="img"), f"vit_pytorch.{path}", **(_VIT | settings))


def _timm(name: str, model: str, **settings: Any) -> Case:
    return _case(
        name, _image, "timm.create_model", model, img_size=PIXELS, num_classes=10, **(_PATCHES | settings)
    )


def _torchvision(name: str, kind: str, side: int = PIXELS, **settings: Any) -> Case:
    return _case(name, partial(_image, side=side), f"torchvision.models.{kind}", num_classes=10, **settings)


def _open_clip(name: str, **settings: Any) -> Case:
    sizes = {"layers": LAYERS, "width": HIDDEN}
    vision = partial(made, "open_clip.CLIPVisionCfg", **sizes, head_width=16, patch_size=4, image_size=PIXELS)
    text = partial(made, "open_clip.CLIPTextCfg", **sizes, heads=HEADS, context_length=16, vocab_size=VOCAB)
    parts = {"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}
    return _case(name, _image_and_text, "open_clip.CLIP", **parts, **settings)


def _litgpt(name: str, **settings: Any) -> Case:
    shape = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": HIDDEN, "intermediate_size": 128, "block_size": 64}
    vocabulary = {"vocab_size": VOCAB, "padded_vocab_size": VOCAB}
    config = partial(made, "litgpt.Config", **(shape | vocabulary | settings))
    return _case(name, partial(_tokens, name="idx"), "litgpt.GPT", config=config)


def _diffusers(name: str, kind: str, inputs: MakeInputs, **settings: Any) -> Case:
    return _case(name, inputs, f"diffusers.{kind}", **settings)


def _own(name: str, path: str, inputs: MakeInputs, **settings: Any) -> Case:
    return _case(name, inputs, f"tests.models.{path}", **settings)


def msa_transformer() -> nn.Module:
    """Meta's, which is built of the arguments of a command line."""
    import argparse

    import esm

    config = argparse.Namespace(
        layers=LAYERS,
        embed_dim=HIDDEN,
        ffn_embed_dim=128,
        attention_heads=HEADS,
        max_positions=64,
        max_tokens=1024,
        max_tokens_per_msa=2**14,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        embed_positions_msa=True,
        logit_bias=True,
    )
    return esm.MSATransformer(config, esm.Alphabet.from_architecture("msa_transformer"))


# Inputs


def _tokens(
    batch: int, seq: int, generator: Generator, name: str = "x", length: int = 0, vocabulary: int = VOCAB
) -> Inputs:
    return {name: torch.randint(3, vocabulary, (batch, length or seq), generator=generator)}


def _kept(batch: int, seq: int, generator: Generator) -> Inputs:
    return _tokens(batch, seq, generator) | {"mask": ~left_padding(batch, seq)}


def _image(batch: int, seq: int, generator: Generator, name: str = "x", side: int = PIXELS) -> Inputs:
    return {name: torch.randn(batch, 3, side, side, generator=generator)}


def _floats(**shapes: tuple[Any, ...]) -> MakeInputs:
    """Normal floats of these shapes, where "s" stands for the length, behind the batch."""

    def make(batch: int, seq: int, generator: Generator) -> Inputs:
        sizes = {name: [seq if size == "s" else size for size in shape] for name, shape in shapes.items()}
        return {name: torch.randn(batch, *shape, generator=generator) for name, shape in sizes.items()}

    return make


def _image_and_text(batch: int, seq: int, generator: Generator) -> Inputs:
    text = ids(batch, 16, generator)
    text[:, -1] = VOCAB - 1  # the end, which is looked for
    return _image(batch, seq, generator, "image") | {"text": text}


def _text_and_memory(batch: int, seq: int, generator: Generator) -> Inputs:
    memory = torch.randn(batch, 8, HIDDEN, generator=generator)
    return {"text": ids(batch, seq, generator), "image_tokens": memory}


def _source_and_target(batch: int, seq: int, generator: Generator) -> Inputs:
    return {"src": ids(batch, seq, generator), "tgt": ids(batch, seq // 2 + 2, generator)}


def _protein(batch: int, seq: int, generator: Generator, padded: bool = False, rows: int = 0) -> Inputs:
    shape = (batch, rows, seq) if rows else (batch, seq)
    tokens = torch.randint(4, 24, shape, generator=generator)
    return {"tokens": tokens.masked_fill(left_padding(batch, seq).flip(1), 1) if padded else tokens}


def _noised(floats: MakeInputs, integers: dict[str, int]) -> MakeInputs:
    """Floats, and one integer below these for each row of the batch."""

    def make(batch: int, seq: int, generator: Generator) -> Inputs:
        numbers = {k: torch.randint(high, (batch,), generator=generator) for k, high in integers.items()}
        return floats(batch, seq, generator) | numbers

    return make


def _flux_inputs(batch: int, seq: int, generator: Generator) -> Inputs:
    grid = torch.arange(16)
    places = {
        "img_ids": torch.stack([torch.zeros(16), grid // 4, grid % 4], -1),
        "txt_ids": torch.zeros(seq, 3),
        "timestep": torch.rand(batch, generator=generator),
    }
    return _FLUX(batch, seq, generator) | places


# Settings that models share

_BLOCKS = {"dim": HIDDEN, "depth": LAYERS, "heads": HEADS}
_LUCID = _BLOCKS | {"dim_head": 16}
_VIT = _LUCID | {"image_size": PIXELS, "patch_size": 4, "num_classes": 10, "mlp_dim": 128}
_PATCHES = {"patch_size": 4, "embed_dim": HIDDEN, "depth": LAYERS, "num_heads": HEADS}
_STAGES = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
_TIMM_SWIN = _STAGES | {"patch_size": 2, "window_size": 4, "depth": None, "drop_path_rate": 0.0}
_GATED = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "bias": False, "rotary_percentage": 1.0}
_LLAMA = _GATED | {"parallel_residual": False, "n_query_groups": 2}
_GEMMA = _LLAMA | {"mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "scale_embeddings": True}
_CAPPED = {"attention_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "post_attention_norm": True}
_LATENT = (4, 8, 8)  # channels and pixels of what a diffusion transformer changes
_HEADED = {"num_attention_heads": HEADS, "attention_head_dim": 16}
_DEEP = _HEADED | {"num_layers": LAYERS}
_IMAGE_OF_NOISE = {"in_channels": 4, "sample_size": 8}
_TEXT = {"encoder_hidden_states": ("s", HIDDEN)}
_OF_TEXT = _noised(_floats(hidden_states=_LATENT, **_TEXT), {"timestep": 100})
_FLUX = _floats(hidden_states=(16, 4), pooled_projections=(HIDDEN,), **_TEXT)
_JOINT = {"joint_attention_dim": HIDDEN, "caption_projection_dim": HIDDEN}
_CROSS = {"cross_attention_dim": HIDDEN, "caption_channels": HIDDEN}

OTHERS: dict[str, Case] = by_name(
    # x-transformers, vit-pytorch and others of lucidrains'
    _x_transformers("x_decoder", "Decoder"),
    _x_transformers("x_encoder", "Encoder"),
    _x_transformers(
        "x_llama",
        "Decoder",
        rotary_pos_emb=True,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        attn_flash=True,
    ),
    _x_transformers("x_alibi", "Decoder", alibi_pos_bias=True, alibi_num_heads=2, ff_relu_squared=True),
    _x_transformers("x_simple_norm", "Decoder", use_simple_rmsnorm=True, attn_kv_heads=2, ff_no_bias=True),
    _x_transformers("x_relative", "Encoder", rel_pos_bias=True, attn_qk_norm=True),
    _x_transformers("x_sandwich", "Decoder", sandwich_norm=True, attn_gate_values=True),
    _x_transformers("x_scale_norm", "Decoder", use_scalenorm=True),
    _x_transformers("x_post", "Encoder", pre_norm=False, ff_post_act_ln=True),
    _case(
        "x_seq2seq",
        _source_and_target,
        "x_transformers.XTransformer",
        dim=HIDDEN,
        **{f"{part}_num_tokens": VOCAB for part in ("enc", "dec")},
        **{f"{part}_depth": LAYERS for part in ("enc", "dec")},
        **{f"{part}_heads": HEADS for part in ("enc", "dec")},
        **{f"{part}_max_seq_len": 64 for part in ("enc", "dec")},
    ),
    _vit_pytorch("lucid_vit", "ViT"),
    _vit_pytorch("lucid_simple_vit", "SimpleViT"),
    _vit_pytorch("lucid_flash_vit", "simple_flash_attn_vit.SimpleViT"),
    _vit_pytorch("lucid_qk_norm_vit", "simple_vit_with_qk_norm.SimpleViT"),
    _vit_pytorch("lucid_deep_vit", "deepvit.DeepViT"),
    _vit_pytorch("lucid_parallel_vit", "parallel_vit.ViT"),
    _vit_pytorch("lucid_cait", "cait.CaiT", cls_depth=2),
    _vit_pytorch("lucid_xcit", "xcit.XCiT", cls_depth=1),
    _case(
        "lucid_levit",
        partial(_image, name="img"),
        "vit_pytorch.levit.LeViT",
        image_size=PIXELS,
        num_classes=10,
        stages=2,
        dim=(HIDDEN, HIDDEN),
        depth=(1, 1),
        heads=(HEADS, HEADS),
        mlp_mult=2,
        dim_key=16,
        dim_value=16,
    ),
    _case("lucid_normalized_vit", partial(_image, name="images"), "vit_pytorch.normalized_vit.nViT", **_VIT),
    _case(
        "lucid_local",
        _tokens,
        "local_attention.LocalTransformer",
        **_LUCID,
        num_tokens=VOCAB,
        max_seq_len=64,
        local_attn_window_size=WINDOW,
    ),
    _case("linformer", _tokens, "linformer.LinformerLM", **_BLOCKS, num_tokens=VOCAB, seq_len=64, k=8),
    _case(
        "performer",
        _tokens,
        "performer_pytorch.PerformerLM",
        **_LUCID,
        num_tokens=VOCAB,
        max_seq_len=64,
        nb_features=16,
    ),
    _case(
        "perceiver",
        _floats(data=(8, 8, 3)),
        "perceiver_pytorch.Perceiver",
        depth=LAYERS,
        num_freq_bands=4,
        max_freq=8.0,
        num_latents=8,
        latent_dim=HIDDEN,
        latent_heads=HEADS,
        cross_dim_head=16,
        latent_dim_head=16,
        num_classes=10,
    ),
    _case(
        "g_mlp",
        partial(_tokens, length=12),
        "g_mlp_pytorch.gMLP",
        num_tokens=VOCAB,
        dim=HIDDEN,
        depth=LAYERS,
        seq_len=12,
        causal=True,
    ),
    _case(
        "megabyte",
        partial(_tokens, name="ids", length=16),
        "MEGABYTE_pytorch.MEGABYTE",
        num_tokens=VOCAB,
        dim=(HIDDEN, 32),
        depth=(1, 1),
        heads=HEADS,
        dim_head=16,
        max_seq_len=(8, 4),
    ),
    _case(
        "coca",
        _text_and_memory,
        "coca_pytorch.CoCa",
        dim=HIDDEN,
        heads=HEADS,
        dim_head=16,
        num_tokens=VOCAB,
        unimodal_depth=1,
        multimodal_depth=1,
        num_img_queries=4,
    ),
    _case(
        "i_transformer",
        _floats(x=(24, 5)),
        "iTransformer.iTransformer",
        **_LUCID,
        num_variates=5,
        lookback_len=24,
        pred_length=(4,),
        flash_attn=False,
    ),
    # timm, torchvision, open_clip, segment-anything
    _timm("timm_vit", "vit_tiny_patch16_224"),
    _timm("timm_siglip", "vit_base_patch16_siglip_224"),
    _timm("timm_dinov2", "vit_small_patch14_reg4_dinov2"),
    _timm("timm_deit3", "deit3_small_patch16_224"),
    _timm("timm_beit", "beit_base_patch16_224"),
    _timm("timm_eva02", "eva02_tiny_patch14_224"),
    _timm("timm_cait", "cait_xxs24_224"),
    _timm("timm_parallel", "vit_small_patch16_18x2_224"),
    _timm("timm_relpos", "vit_relpos_small_patch16_224"),
    _timm("timm_swin", "swin_tiny_patch4_window7_224", **_TIMM_SWIN),
    _timm("timm_swinv2", "swinv2_tiny_window8_256", **_TIMM_SWIN),
    _torchvision(
        "torchvision_vit",
        "VisionTransformer",
        image_size=PIXELS,
        patch_size=4,
        num_layers=LAYERS,
        num_heads=HEADS,
        hidden_dim=HIDDEN,
        mlp_dim=128,
        dropout=0.1,
    ),
    _torchvision(
        "torchvision_swin",
        "SwinTransformer",
        **_STAGES,
        patch_size=[2, 2],
        window_size=[4, 4],
        stochastic_depth_prob=0.0,
    ),
    _torchvision(
        "torchvision_maxvit",
        "MaxVit",
        side=32,
        input_size=(32, 32),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=16,
        stochastic_depth_prob=0.0,
    ),
    _open_clip("open_clip"),
    _open_clip("open_clip_quick_gelu", quick_gelu=True, init_logit_bias=-10.0),
    _case(
        "sam_encoder",
        partial(_image, side=32),
        "segment_anything.modeling.ImageEncoderViT",
        **_PATCHES,
        img_size=32,
        out_chans=32,
        use_rel_pos=True,
        window_size=3,
        global_attn_indexes=(1,),
    ),
    _case(
        "sam_two_way",
        _floats(image_embedding=(HIDDEN, 4, 4), image_pe=(HIDDEN, 4, 4), point_embedding=("s", HIDDEN)),
        "segment_anything.modeling.TwoWayTransformer",
        depth=LAYERS,
        embedding_dim=HIDDEN,
        num_heads=HEADS,
        mlp_dim=128,
    ),
    # litgpt
    _litgpt("litgpt_pythia"),
    _litgpt("litgpt_llama", **_LLAMA),
    _litgpt("litgpt_qwen3", **_LLAMA, norm_qk=True),
    _litgpt("litgpt_gemma", **(_GEMMA | {"n_query_groups": 1, "head_size": 32})),
    _litgpt(
        "litgpt_gemma2",
        **_GEMMA,
        **_CAPPED,
        post_mlp_norm=True,
        sliding_window_size=WINDOW,
        sliding_window_indices=[1, 0],
    ),
    _litgpt("litgpt_phi", shared_attention_norm=True, lm_head_bias=True, gelu_approximate="tanh"),
    _litgpt(
        "litgpt_mixtral",
        **(_LLAMA | {"mlp_class_name": "LLaMAMoE"}),
        n_expert=4,
        n_expert_per_token=2,
        moe_intermediate_size=32,
    ),
    # diffusers
    _diffusers(
        "diffusers_dit",
        "DiTTransformer2DModel",
        _noised(_floats(hidden_states=_LATENT), {"timestep": 100, "class_labels": 10}),
        **_DEEP,
        **_IMAGE_OF_NOISE,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    ),
    _diffusers(
        "diffusers_pixart",
        "PixArtTransformer2DModel",
        _OF_TEXT,
        **_DEEP,
        **_IMAGE_OF_NOISE,
        **_CROSS,
        norm_num_groups=4,
    ),
    _diffusers(
        "diffusers_sana",
        "SanaTransformer2DModel",
        _OF_TEXT,
        **_DEEP,
        **_IMAGE_OF_NOISE,
        **_CROSS,
        out_channels=4,
        num_cross_attention_heads=HEADS,
        cross_attention_head_dim=16,
    ),
    _diffusers(
        "diffusers_auraflow",
        "AuraFlowTransformer2DModel",
        _OF_TEXT,
        **_HEADED,
        **_IMAGE_OF_NOISE,
        **_JOINT,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        pos_embed_max_size=64,
    ),
    _diffusers(
        "diffusers_sd3",
        "SD3Transformer2DModel",
        _noised(_floats(hidden_states=_LATENT, pooled_projections=(HIDDEN,), **_TEXT), {"timestep": 100}),
        **_DEEP,
        **_IMAGE_OF_NOISE,
        **_JOINT,
        out_channels=4,
        pooled_projection_dim=HIDDEN,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    ),
    _diffusers(
        "diffusers_flux",
        "FluxTransformer2DModel",
        _flux_inputs,
        **_DEEP,
        in_channels=4,
        num_single_layers=LAYERS,
        joint_attention_dim=HIDDEN,
        pooled_projection_dim=HIDDEN,
        axes_dims_rope=(4, 6, 6),
    ),
    _diffusers(
        "diffusers_wan",
        "WanTransformer3DModel",
        _noised(_floats(hidden_states=(4, 2, 8, 8), **_TEXT), {"timestep": 100}),
        **_DEEP,
        in_channels=4,
        out_channels=4,
        text_dim=HIDDEN,
        freq_dim=32,
        ffn_dim=128,
    ),
    _diffusers(
        "diffusers_unet",
        "UNet2DConditionModel",
        _noised(_floats(sample=_LATENT, **_TEXT), {"timestep": 100}),
        sample_size=8,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=HIDDEN,
        attention_head_dim=4,
        norm_num_groups=8,
    ),
    # fair-esm
    _case(
        "fair_esm2",
        _protein,
        "esm.model.esm2.ESM2",
        LAYERS,
        HIDDEN,
        HEADS,
        padded=partial(_protein, padded=True),
    ),
    Case("fair_esm_msa", partial(seeded, msa_transformer), partial(_protein, rows=3)),
    # written for the tests, in the style of repositories that are no packages
    _own("meta_llama", "meta_llama.Transformer", partial(_tokens, name="tokens")),
    _own("gpt_fast", "gpt_fast.GPTFast", partial(_tokens, name="idx")),
    _own("dit", "dit.DiT", _noised(_floats(x=_LATENT), {"t": 100, "y": 10})),
    _own("annotated_transformer", "annotated.Annotated", _source_and_target),
    _own("nanochat", "nanochat.NanoChat", partial(_tokens, name="idx", vocabulary=50)),
)
