"""Port models to te.TransformerLayer as an expert writes it by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
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


def divided(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the options of a TE layer for tensor and sequence parallelism over a group."""
    if group is None:
        return {}
    options = {"set_parallel_mode": True, "sequence_parallel": True}
    return {**options, "tp_group": group, "tp_size": group.size()}


def share(weight: Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> Tensor:
    """Return this rank's rows or columns of a weight, or the whole weight without a group."""
    return weight if group is None else weight.chunk(group.size(), dim)[group.rank()]


def sum_shared(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of the parameters that TE marks over the ranks.

    Each rank has the gradients of its own tokens.
    """
    grads = [p.grad for p in model.parameters() if getattr(p, "sequence_parallel", False)]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    torch._foreach_copy_([grad.view(-1) for grad in grads], flat.split([grad.numel() for grad in grads]))


def layer(hidden: int, ffn: int, heads: int, **options: Any) -> nn.Module:
    """Return the quickstart layer: sequence first, no mask, no dropout, with weights of its own."""
    return te.TransformerLayer(
        hidden,
        ffn,
        heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="no_mask",
        fuse_qkv_params=True,
        params_dtype=torch.bfloat16,
        **options,
    )


class DecoderLayer(te.TransformerLayer):
    """Llama's decoder layer on TE, called as transformers calls it.

    Over a group, it reads and returns shards of the tokens. The first layer transposes them to sequence
    first, and the last layer transposes them back.
    """

    def __init__(self, config: Any, number: int, angles: Tensor, group: dist.ProcessGroup | None = None):
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
            attn_input_format="bshd" if group is None else "sbhd",
            params_dtype=torch.bfloat16,
            **divided(group),
        )
        self.angles, self.group = angles, group
        self.is_first, self.is_last = number == 1, number == config.num_hidden_layers

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        if self.group is None:
            return super().forward(hidden_states, rotary_pos_emb=self.angles[: hidden_states.shape[1]])
        if self.is_first:
            hidden_states = hidden_states.transpose(0, 1).contiguous()
        angles = self.angles[: hidden_states.shape[0] * self.group.size()]
        out = super().forward(hidden_states, rotary_pos_emb=angles)
        return out.transpose(0, 1).contiguous() if self.is_last else out

    def load(self, source: LlamaDecoderLayer) -> DecoderLayer:
        """Copy the weights of transformers' layer."""
        attention, mlp, group = source.self_attn, source.mlp, self.group
        own, its = self.self_attention, self.layernorm_mlp
        moves = {
            own.layernorm_qkv.layer_norm_weight: source.input_layernorm.weight,
            own.layernorm_qkv.weight: torch.cat(
                [share(p.weight, group) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
            ),
            own.proj.weight: share(attention.o_proj.weight, group, 1),
            its.layer_norm_weight: source.post_attention_layernorm.weight,
            its.fc1_weight: torch.cat([share(p.weight, group) for p in (mlp.gate_proj, mlp.up_proj)]),
            its.fc2_weight: share(mlp.down_proj.weight, group, 1),
        }
        with torch.no_grad():
            for target, value in moves.items():
                target.copy_(value)
        return self


def llama(model: LlamaForCausalLM, group: dist.ProcessGroup | None = None) -> LlamaForCausalLM:
    """Replace the decoder layers of a model in place; over a group, by this rank's shards."""
    config = model.config
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        raise ValueError(f"the hand port has default rotary embeddings alone, got {rope['rope_type']}")
    width = config.hidden_size // config.num_attention_heads
    rotary = te.RotaryPositionEmbedding(width, rotary_base=rope["rope_theta"])
    angles = rotary(config.max_position_embeddings).cuda()
    for number, source in enumerate(model.model.layers):
        model.model.layers[number] = DecoderLayer(config, number + 1, angles, group).load(source)
    return model


class _Alone(nn.Module):
    """A layer that is called with its input alone, like TE's CUDA graphs."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return self.layer(hidden_states)


def graphed(model: LlamaForCausalLM, rows: int, length: int, recipe: Any) -> LlamaForCausalLM:
    """Replace each layer of the port by TE's CUDA graphs for inputs of (rows, length), in place."""
    layers = model.model.layers
    like = torch.randn(rows, length, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    samples = tuple((like.clone().requires_grad_(model.training),) for _ in layers)
    made = in_graphs(tuple(layers), samples, recipe)
    model.model.layers = nn.ModuleList(map(_Alone, made))
    return model


def in_graphs(layers: tuple[nn.Module, ...], samples: tuple[tuple[Tensor, ...], ...], recipe: Any) -> Any:
    """Return the layers as TE's CUDA graphs, for inputs like these."""
    options = {} if recipe is None else {"enabled": True, "recipe": recipe}
    return te.make_graphed_callables(layers, samples, **options)


def torchao(model: nn.Module) -> nn.Module:
    """Convert a model to torchao's float8 except for its head, and compile it, in place."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda _, name: "lm_head" not in name)
    model.compile()
    return model


def within(recipe: Any) -> Context:
    """Return the context of the forward."""
    return contextlib.nullcontext if recipe is None else lambda: te.autocast(enabled=True, recipe=recipe)
