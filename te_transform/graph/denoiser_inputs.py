"""Guess the arguments of a denoiser, such as a diffusion transformer, from their names and by running it."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from te_transform.graph.guesses import Argument, Form, Guess, furthest
from te_transform.graph.random_tensors import random_floats, random_ids

_LATENTS = ("hidden_states", "sample", "x")
_TEXTS = ("encoder_hidden_states", "cap_feats")  # passed even if the forward runs without a text
_TIME = re.compile(r"^t$|time|sigma")
_PACKED = ("img_ids", "img_shapes", "num_frames")  # arguments of forwards that take latents as rows
_LATENT_SIDES = (16, 32, 64)  # side lengths of latents
_PIXELS = 8  # along a side of a latent
_TOKENS = 8  # of a text with several rows for each token
_FRAMES = 4  # latents over time
_AXES = 3  # of positions
_TEXT_LAYERS = 64  # of a text encoder, if a denoiser reads the outputs of several
# Widths to begin with. They differ from the sizes of most modules, so a width identifies its argument.
_WIDTHS = (
    37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83,
    89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139,
)  # fmt: skip
# patterns of names -> the likeliest form of the argument; other arguments are rows of a text or an image
_LIKELIEST = {
    r"^(num_frames|height|width|img_shapes|added_cond_kwargs)$": None,  # a form of this name
    r"^shape_list$": "img_shapes",
    r"mask": "mask",
    r"_lens?$|_lengths?$": "lengths",
    r"^(y|labels|class_labels|style)$": "labels",
    r"pooled|^image_embeds$": "vector",
    r"size|coord|ratio": "pair",
    r"_ids$": "positions",
    r"time|sigma|guidance": "numbers",
}
_OTHERS = (
    "rows", "vector", "numbers", "labels", "ids", "pair", "three_pairs", "layers", "lengths", "mask",
    "booleans", "text_and_sizes", "layers_of_tokens", "list_of_layers",
)  # fmt: skip
_NO_CONDITION = re.compile(r"attention_kwargs|controlnet|cache|^return")


@dataclass(frozen=True)
class _Forms:
    """The forms of arguments: each method makes a value from a length and a width."""

    model: nn.Module
    batch: int

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and the device of the floats."""
        floats = (p for p in self.model.parameters() if p.is_floating_point())
        return next(floats, torch.empty(0, dtype=torch.float32, device="cpu"))

    @cached_property
    def classes(self) -> int:
        """The rows of the smallest embedding."""
        tables = (m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding))
        return min(tables, default=1)

    def rows(self, length: int, width: int) -> Tensor:
        return random_floats((self.batch, length, width), self.like)

    def layers(self, length: int, width: int) -> Tensor:
        return self.rows(length, width).expand(_TEXT_LAYERS, -1, -1, -1).contiguous()

    def layers_of_tokens(self, length: int, width: int) -> Tensor:
        return random_floats((self.batch, _TOKENS, length, width), self.like)

    def list_of_layers(self, length: int, width: int) -> list[Tensor]:
        layers = (len(child) for child in self.model.children() if isinstance(child, nn.ModuleList))
        return [self.rows(length, width)] * max(layers, default=1)

    def vector(self, length: int, width: int) -> Tensor:
        return random_floats((self.batch, width), self.like)

    def numbers(self, length: int, width: int) -> Tensor:
        return torch.rand(self.batch, dtype=torch.float32, device="cpu").to(self.like)

    def steps(self, length: int, width: int) -> Tensor:
        return torch.arange(self.batch, dtype=torch.int64, device="cpu")

    def labels(self, length: int, width: int) -> Tensor:
        return random_ids(self.classes, (self.batch,))

    def ids(self, length: int, width: int) -> Tensor:
        return random_ids(self.classes, (self.batch, length))

    def lengths(self, length: int, width: int) -> Tensor:
        return torch.full((self.batch,), length, dtype=torch.int64, device="cpu")

    def mask(self, length: int, width: int) -> Tensor:
        return torch.ones(self.batch, length, dtype=torch.int64, device="cpu")

    def booleans(self, length: int, width: int) -> Tensor:
        return self.mask(length, width).bool()

    def positions(self, length: int, width: int) -> Tensor:
        return random_floats((length, width), self.like)

    def pair(self, length: int, width: int) -> Tensor:
        return random_floats((self.batch, 2), self.like)

    def three_pairs(self, length: int, width: int) -> Tensor:
        return random_floats((self.batch, 6), self.like)  # sizes before and after a crop, and its corner

    def added_cond_kwargs(self, length: int, width: int) -> dict[str, Tensor]:
        ratio = random_floats((self.batch, 1), self.like)
        return {"resolution": self.pair(length, width), "aspect_ratio": ratio}

    def text_and_sizes(self, length: int, width: int) -> dict[str, Tensor]:
        return {"text_embeds": self.vector(length, width), "time_ids": self.three_pairs(length, width)}

    def num_frames(self, length: int, width: int) -> int:
        return 1

    def height(self, length: int, width: int) -> int:
        return math.gcd(length, 2)

    def width(self, length: int, width: int) -> int:
        return length // self.height(length, width)

    def img_shapes(self, length: int, width: int) -> list[Any]:
        return [[(1, self.height(length, width), self.width(length, width))]] * self.batch

    def latents(self, *shape: int) -> Form:
        """Return a form of latents of this shape, in which -1 is the width: the channels."""

        def form(length: int, width: int) -> Tensor:
            return random_floats([self.batch, *(width if size < 0 else size for size in shape)], self.like)

        return form


def denoiser_arguments(model: nn.Module, batch: int, length: int) -> dict[str, Any] | None:
    """Return a guess of the arguments by name, or None if the forward takes no latents and times.

    Args:
        length: tokens of a text, and of latents that the forward takes as rows.
    """
    parameters = inspect.signature(model.forward).parameters
    latents = next(filter(parameters.__contains__, _LATENTS), "")
    times = next(filter(_TIME.search, parameters), "")
    channels = _latent_channels(model) or _WIDTHS[-1]
    if not latents or not times:
        return None
    forms = _Forms(model, batch)
    guess: Guess = {}
    for (name, parameter), width in zip(parameters.items(), _WIDTHS, strict=False):
        is_required = name in (latents, times, *_TEXTS) or parameter.default is parameter.empty
        if is_required or (parameter.default is None and not _NO_CONDITION.search(name)):
            guess[name] = _argument(model, forms, parameter, length, width, is_required)
    is_packed = not parameters.keys().isdisjoint(_PACKED)
    shapes = [forms.latents(*each) for each in _latent_shapes(model, length, is_packed)]
    pictures = [forms.latents(-1, *(_PIXELS * size for size in each)) for each in _latent_sides(model)]
    for name in filter(re.compile(r"_(latents|cond)$").search, guess):  # beside those that are denoised
        guess[name] = replace(guess[name], forms=(*guess[name].forms, *shapes, *pictures))
    guess[latents] = Argument(_as_annotated(shapes, parameters[latents]), length, channels, True)
    guess[times] = replace(guess[times], forms=(forms.numbers, forms.steps))
    return furthest(model, guess)


def _argument(
    model: nn.Module, forms: _Forms, parameter: inspect.Parameter, length: int, width: int, is_required: bool
) -> Argument:
    """Return the argument of a parameter, in the likeliest form for its name."""
    fitting = (
        (name or parameter.name) for words, name in _LIKELIEST.items() if re.search(words, parameter.name)
    )
    likeliest = next(fitting, "rows")
    names = (likeliest, *(name for name in _OTHERS if name != likeliest))
    if likeliest == "positions":
        width = len(_config_entry(model, "axes_dims_rope") or range(_AXES))
    is_of_text = likeliest in ("mask", "lengths")
    given = _as_annotated([getattr(forms, name) for name in names], parameter)
    return Argument(given, 0 if is_of_text else length, width, is_required)


def _as_annotated(forms: list[Form], parameter: inspect.Parameter) -> tuple[Form, ...]:
    """Return forms that make lists of samples if the parameter is annotated as a list."""
    is_list = str(parameter.annotation).startswith(("list[", "List["))
    return tuple(partial(_as_list, form) if is_list else form for form in forms)


def _as_list(form: Form, length: int, width: int) -> list[Any]:
    return list(form(length, width))


def _latent_channels(model: nn.Module) -> int:
    """Return the channels of the latents: an entry of the config, or those of the first convolution."""
    convolutions = (m.in_channels for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d)))
    return _config_entry(model, "in_channels") or next(convolutions, 0)


def _latent_shapes(model: nn.Module, length: int, is_packed: bool) -> Iterator[tuple[int, ...]]:
    """Yield shapes of the latents of images, videos and sounds, in which -1 is the channels."""
    if is_packed:
        yield (length, -1)
    sides = list(_latent_sides(model))
    frames = _config_entry(model, "video_length") or _FRAMES
    videos = [each if len(each) == 3 else (frames, *each) for each in sides]
    yield from ((-1, *each) for each in (*sides, *videos))
    yield from ((first, -1, *each) for first, *each in videos)
    yield from ((-1, length), (length, -1), (-1,))
    yield from ((*each, -1) for each in videos)
    yield (length, -1, *_patch(model))


def _latent_sides(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield sizes of the latents in space, and in time if a convolution is over time as well."""
    if side := _config_entry(model, "sample_size", "input_size"):
        yield (side, side) if isinstance(side, int) else tuple(side)
    patch = _patch(model)
    yield tuple(4 * size for size in patch)
    yield from ((*(4 * size for size in patch[:-2]), side, side) for side in _LATENT_SIDES)


def _patch(model: nn.Module) -> tuple[int, ...]:
    """Return the sizes of the first convolution's kernel."""
    kernels = (m.kernel_size for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Conv3d)))
    return next(kernels, (2, 2))


def _config_entry(model: nn.Module, *names: str) -> Any:
    """Return the first entry of the config that is set, or attribute of a model without config; else None."""
    entries = (getattr(getattr(model, "config", model), name, None) for name in names)
    return next(filter(None, entries), None)
