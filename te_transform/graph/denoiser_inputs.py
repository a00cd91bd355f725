"""Guess the arguments of a denoiser, such as a diffusion transformer, from their names and its config."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.graph.random_tensors import random_floats, random_ids

_LATENTS = ("hidden_states", "sample", "x")
_TIMES = ("timestep", "timesteps", "t", "time", "sigma")
_LABELS = ("class_labels", "labels", "y")
_PACKED = ("img_ids", "img_shapes", "num_frames")  # arguments of forwards that take latents as rows
_LATENT_SIDES = (16, 32, 64)  # side lengths of latents
_FRAMES = 4  # latents over time
# texts and images that condition the model -> config entries for their width, the first that a config has
_CONDITIONS = {
    "encoder_hidden_states": (
        "joint_attention_dim", "caption_channels", "cap_feat_dim", "text_embed_dim", "text_dim",
        "encoder_hid_dim", "context_in_dim", "cross_attention_dim",
    ),
    "encoder_hidden_states_2": ("text_embed_2_dim",),
    "image_embeds": ("image_embed_dim",),
}  # fmt: skip
_MASKS = {
    "encoder_attention_mask": "encoder_hidden_states",
    "encoder_attention_mask_2": "encoder_hidden_states_2",
}
_IMAGE_SIZES = ("original_size", "target_size", "crop_coords")


def denoiser_arguments(model: nn.Module, batch: int, length: int, like: Tensor) -> Iterator[dict[str, Any]]:
    """Yield guesses of the arguments by name, or nothing if the forward takes no latents and times.

    Args:
        length: tokens of a text, and of latents that the forward takes as rows.
        like: a tensor with the dtype of the guesses.
    """
    parameters = inspect.signature(model.forward).parameters
    latents, times = (next(filter(parameters.__contains__, each), "") for each in (_LATENTS, _TIMES))
    channels = _latent_channels(model)
    if not latents or not times or not channels:
        return
    known = _other_arguments(model, parameters, batch, length, like)
    as_floats = torch.rand(batch, dtype=torch.float32, device="cpu").to(like)
    as_steps = torch.arange(batch, dtype=torch.int64, device="cpu")
    is_packed = not parameters.keys().isdisjoint(_PACKED)
    shapes = [(length, channels)] if is_packed else list(_latent_shapes(model, channels))
    for time, shape in itertools.product((as_floats, as_steps), shapes):
        values: Any = random_floats((batch, *shape), like)
        yield {latents: list(values) if "cap_feats" in parameters else values, times: time, **known}


def _other_arguments(
    model: nn.Module, parameters: Mapping[str, inspect.Parameter], batch: int, length: int, like: Tensor
) -> dict[str, Any]:
    """Return the arguments whose sizes the config says, except for the latents and times."""
    found: dict[str, Any] = {}
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    height = math.gcd(length, 2)
    grid = {"num_frames": 1, "height": height, "width": length // height}  # of latents as rows
    for name, parameter in parameters.items():
        if width := _config_entry(model, *_CONDITIONS.get(name, ())):
            found[name] = random_floats((batch, length, width), like)
        elif name == "cap_feats" and (width := _config_entry(model, "cap_feat_dim")):  # Z-Image
            found[name] = list(random_floats((batch, length, width), like))
        elif name == "pooled_projections" and (width := _config_entry(model, "pooled_projection_dim")):
            found[name] = random_floats((batch, width), like)
        elif name in _MASKS and (parameter.default is parameter.empty or name.endswith("_2")):
            if _MASKS[name] in found:
                found[name] = torch.ones(batch, length, dtype=torch.int64, device="cpu")
        elif name in ("img_ids", "txt_ids") and (axes := _config_entry(model, "axes_dims_rope")):
            found[name] = random_floats((length, len(axes)), like)
        elif name in grid and "num_frames" in parameters:
            found[name] = grid[name]
        elif name == "img_shapes":
            found[name] = [[tuple(grid.values())]] * batch
        elif name in _IMAGE_SIZES and parameter.default is parameter.empty:  # CogView
            found[name] = random_floats((batch, 2), like)
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


def _latent_shapes(model: nn.Module, channels: int) -> Iterator[tuple[int, ...]]:
    """Yield shapes of the latents of images and, with the channels first or the frames, of videos."""
    sides = list(_latent_sides(model))
    frames = _config_entry(model, "video_length") or _FRAMES
    yield from ((channels, *each) for each in sides)
    for first in ((channels, frames), (frames, channels)):
        yield from ((*first, *each) for each in sides if len(each) == 2)


def _latent_sides(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield sizes of the latents in space, and in time if a convolution is over time as well."""
    if side := _config_entry(model, "sample_size", "input_size"):
        yield (side, side) if isinstance(side, int) else tuple(side)
    patch = next((m.kernel_size for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d))), (2, 2))
    yield tuple(4 * size for size in patch)
    yield from ((*(4 * size for size in patch[:-2]), side, side) for side in _LATENT_SIDES)


def _config_entry(model: nn.Module, *names: str) -> Any:
    """Return the first entry of the config that is set, or attribute of a model without config; else None."""
    entries = (getattr(getattr(model, "config", model), name, None) for name in names)
    return next(filter(None, entries), None)
