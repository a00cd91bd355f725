"""What an expert writes by hand today: the same models on te.TransformerLayer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.common.recipe as recipes
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

Context = Callable[[], contextlib.AbstractContextManager]
RECIPES = {
    "bf16": None,
    "fp8-delayed": recipes.DelayedScaling(),
    "fp8-current": recipes.Float8CurrentScaling(),
}


def layer(hidden: int, ffn: int, heads: int) -> nn.Module:
    """The quickstart layer, sequence first, no mask, no dropout, with weights of its own."""
    return te.TransformerLayer(
        hidden,
        ffn,
        heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="no_mask",
        fuse_qkv_params=True,
        params_dtype=torch.bfloat16,
    )


class DecoderLayer(te.TransformerLayer):
    """Llama's decoder layer, called as transformers calls it."""

    def __init__(self, config: Any, number: int, angles: Tensor):
        super().__init__(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            num_gqa_groups=config.num_key_value_heads,
            layernorm_epsilon=config.rms_norm_eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            layer_number=number,
            self_attn_mask_type="causal",
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            bias=False,
            normalization="RMSNorm",
            activation="swiglu",
            attn_input_format="bshd",
            params_dtype=torch.bfloat16,
        )
        self.angles = angles

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return super().forward(hidden_states, rotary_pos_emb=self.angles[: hidden_states.shape[1]])

    def load(self, source: LlamaDecoderLayer) -> DecoderLayer:
        """Take the weights of transformers' layer."""
        attention, mlp = source.self_attn, source.mlp
        own, its = self.self_attention, self.layernorm_mlp
        moves = {
            own.layernorm_qkv.layer_norm_weight: source.input_layernorm.weight,
            own.layernorm_qkv.weight: torch.cat(
                [p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
            ),
            own.proj.weight: attention.o_proj.weight,
            its.layer_norm_weight: source.post_attention_layernorm.weight,
            its.fc1_weight: torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            its.fc2_weight: mlp.down_proj.weight,
        }
        with torch.no_grad():
            for target, value in moves.items():
                target.copy_(value)
        return self


def llama(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with its decoder layers replaced, in place."""
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    angles = te.RotaryPositionEmbedding(width)(config.max_position_embeddings).cuda()
    for number, source in enumerate(model.model.layers):
        model.model.layers[number] = DecoderLayer(config, number + 1, angles).load(source)
    return model


class _Alone(nn.Module):
    """A layer that is called with its input alone, as TE's graphs are."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return self.layer(hidden_states)


def graphed(model: LlamaForCausalLM, rows: int, length: int, recipe: Any) -> LlamaForCausalLM:
    """The port with each layer as CUDA graphs of TE's, for inputs of (rows, length), in place."""
    layers = model.model.layers
    like = torch.randn(rows, length, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    samples = tuple((like.clone().requires_grad_(model.training),) for _ in layers)
    made = in_graphs(tuple(layers), samples, recipe)
    model.model.layers = nn.ModuleList(map(_Alone, made))
    return model


def in_graphs(layers: tuple[nn.Module, ...], samples: tuple[tuple[Tensor, ...], ...], recipe: Any) -> Any:
    """The layers as CUDA graphs of TE's, for inputs like these."""
    options = {} if recipe is None else {"enabled": True, "recipe": recipe}
    return te.make_graphed_callables(layers, samples, **options)


def torchao(model: nn.Module) -> nn.Module:
    """Not on TE: the model in torchao's float8 but for its head, compiled, in place."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda _, name: "lm_head" not in name)
    model.compile()
    return model


def within(recipe: Any) -> Context:
    """The context that its forward runs in."""
    return contextlib.nullcontext if recipe is None else lambda: te.autocast(enabled=True, recipe=recipe)
