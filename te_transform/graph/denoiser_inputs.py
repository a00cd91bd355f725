"""Guess the arguments of a denoiser, such as a diffusion transformer, from their names and its config."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.graph.random_tensors import random_floats, random_ids

_LATENTS = ("hidden_states", "sample", "x")
_TIMES = ("timestep", "timesteps", "t", "time", "sigma")
_LABELS = ("class_labels", "labels", "y")
_LATENT_SIDES = (16, 32, 64)  # side lengths of latents
# argument -> config entries for its last dimension, the first that a config has
_WIDTHS = {
    "encoder_hidden_states": (
        "joint_attention_dim", "caption_channels", "cap_feat_dim", "text_embed_dim", "text_dim",
        "encoder_hid_dim", "cross_attention_dim",
    ),
    "pooled_projections": ("pooled_projection_dim",),
}  # fmt: skip


def denoiser_arguments(model: nn.Module, batch: int, length: int, like: Tensor) -> Iterator[dict[str, Any]]:
    """Yield guesses of the arguments by name, or nothing if the forward takes no latents and times.

    Args:
        length: tokens of a text, and of latents that the forward takes as rows.
        like: a tensor with the dtype of the guesses.
    """
    names = inspect.signature(model.forward).parameters
    latents, times = (next(filter(names.__contains__, each), "") for each in (_LATENTS, _TIMES))
    channels = _latent_channels(model)
    if not latents or not times or not channels:
        return
    known = _other_arguments(model, names, batch, length, like)
    as_floats = torch.rand(batch, dtype=torch.float32, device="cpu").to(like)
    as_steps = torch.arange(batch, dtype=torch.int64, device="cpu")
    is_packed = "img_ids" in names
    shapes = [(length, channels)] if is_packed else [(channels, *sides) for sides in _latent_sides(model)]
    for time, shape in itertools.product((as_floats, as_steps), shapes):
        yield {latents: random_floats((batch, *shape), like), times: time, **known}


def _other_arguments(
    model: nn.Module, names: Iterable[str], batch: int, length: int, like: Tensor
) -> dict[str, Any]:
    """Return the arguments whose sizes the config says, except for the latents and times."""
    found: dict[str, Any] = {}
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    for name in names:
        width = next(filter(None, (_config_entry(model, entry) for entry in _WIDTHS.get(name, ()))), None)
        if width:
            rows = () if name == "pooled_projections" else (length,)
            found[name] = random_floats((batch, *rows, width), like)
        elif name in ("img_ids", "txt_ids") and (axes := _config_entry(model, "axes_dims_rope")):
            found[name] = random_floats((length, len(axes)), like)
        elif name == "guidance" and _config_entry(model, "guidance_embeds"):
            found[name] = random_floats((batch,), like)
        elif name == "added_cond_kwargs" and getattr(model, "use_additional_conditions", False):  # PixArt
            sizes = {"resolution": (batch, 2), "aspect_ratio": (batch, 1)}
            found[name] = {entry: random_floats(shape, like) for entry, shape in sizes.items()}
        elif name in _LABELS and tables:
            found[name] = random_ids(min(tables), (batch,))
    return found


def _latent_channels(model: nn.Module) -> int:
    """Return the channels of the latents: an entry of the config, or those of the first convolution."""
    convolutions = (m.in_channels for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d)))
    return _config_entry(model, "in_channels") or next(convolutions, 0)


def _latent_sides(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield sizes of the latents in space, and in time if a convolution is over time as well."""
    if side := _config_entry(model, "sample_size") or _config_entry(model, "input_size"):
        yield (side, side) if isinstance(side, int) else tuple(side)
    patch = next((m.kernel_size for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d))), (2, 2))
    yield tuple(4 * size for size in patch)
    yield from ((*(4 * size for size in patch[:-2]), side, side) for side in _LATENT_SIDES)


def _config_entry(model: nn.Module, name: str) -> Any:
    """Return an entry of the config, or an attribute of a model without config."""
    return getattr(getattr(model, "config", model), name, None)
