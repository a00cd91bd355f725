"""Example inputs: from the user, or generated from the model."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from te_transform.graph.denoiser_inputs import denoiser_arguments
from te_transform.graph.errors import in_a_line, in_full
from te_transform.graph.nodes import dtype_name
from te_transform.graph.preserve import preserved
from te_transform.graph.random_tensors import random_floats, random_ids
from te_transform.graph.tables import out_of_range

BATCH, LENGTH = 2, 8  # small, distinct and not 1: each size identifies its dimension
_ASK = "pass example_inputs=(tensor, ...) or example_inputs={'name': tensor, ...}"


class InputError(ValueError):
    """The error for example inputs that are missing or have an unsupported form."""


class TraceError(RuntimeError):
    """The error for a model that fails on its inputs; the model is unchanged."""

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs, error: Exception) -> TraceError:
        raised = in_full(error).partition("\n\nWhile executing")[0]  # fx appends the location in the graph
        kind = type(model).__name__
        if inputs.invented:
            return cls(
                f"expected example inputs, got none, and {kind} failed on the generated inputs ({inputs}): "
                f"{raised}\nTo use your own inputs, {_ASK}."
            )
        return cls(
            f"{kind} failed on the example inputs ({inputs}): {raised}\n"
            f"Pass example_inputs that a plain model(...) call accepts.{_remarks(model, inputs)}"
        )


@dataclass(frozen=True)
class Inputs:
    """The arguments of one forward call; `invented` is True if they were generated."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    invented: bool = False

    def __str__(self) -> str:
        parts = [_describe(a) for a in self.args] + [f"{k}={_describe(v)}" for k, v in self.kwargs.items()]
        return ", ".join(parts) or "none"

    def clone(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the arguments, their tensors and containers, since a forward may write to them."""
        leaves: dict[int, torch.Tensor] = {}  # one tensor passed twice stays one tensor

        def detached(tensor: torch.Tensor) -> torch.Tensor:
            return leaves.setdefault(id(tensor), tensor.detach().clone())

        args, kwargs = tree_map_only(torch.Tensor, detached, (self.args, self.kwargs))
        return copy.deepcopy((args, kwargs), {id(t): t for t in leaves.values()})


def _remarks(model: nn.Module, inputs: Inputs) -> str:
    """Return possible reasons why the model fails on the inputs."""
    remarks = ""
    given = (*inputs.args, *inputs.kwargs.values())
    if any(isinstance(each, list) or type(each).__module__ == "numpy" for each in given):
        remarks += " The inputs have lists or arrays; pass tensors: tokenizer(text, return_tensors='pt')."
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if any(tensor.is_nested for tensor in tensors):
        remarks += (
            " The conversion calls the model in training mode, in which PyTorch's own modules take no nested"
            " tensor: pass padded tensors and a padding mask as example_inputs, such as src_key_padding_mask."
        )
    of_inputs, of_model = _devices(tensors), _devices(model.parameters())
    if of_inputs and of_model not in ("", "meta", of_inputs):  # a model on meta accepts inputs on any device
        remarks += f" The model is on {of_model}, but the inputs are on {of_inputs}."
    return remarks


def _devices(tensors: Iterable[torch.Tensor]) -> str:
    return " and ".join(sorted({str(tensor.device) for tensor in tensors}))


def as_inputs(model: nn.Module, example_inputs: Any) -> list[Inputs]:
    """Return the example inputs as a list of Inputs, with a key/value cache switched off.

    Raises:
        InputError: the inputs have another type, are a list in place of a tuple, are an empty batch, or are
            missing and cannot be generated.
    """
    if example_inputs is None:
        return [_without_cache(model, invent(model))]
    samples = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    if not samples:
        raise InputError(
            "expected at least one sample in example_inputs, got an empty list; pass a tensor, tuple or dict"
        )
    if not _fits_signature(model, samples[:1]) and _fits_signature(model, samples):
        raise InputError(
            f"expected a tuple with the arguments of one call, got a list of {len(samples)} samples, and the "
            "forward takes as many arguments; pass tuple(example_inputs)"
        )
    inputs = [_without_cache(model, _one(sample)) for sample in samples]
    _check_values(inputs)
    return inputs


def _check_values(samples: Iterable[Inputs]) -> None:
    """Raise an InputError for a sample without values: a check or a time on it would show nothing."""
    for sample in samples:
        tensors = [tensor for tensor in _input_tensors(sample) if not tensor.is_nested]
        if tensors and not any(tensor.numel() for tensor in tensors):
            raise InputError(
                f"expected example inputs with values, got {sample}; pass a batch of at least one row"
            )


def _fits_signature(model: nn.Module, samples: list[Any]) -> bool:
    """Return False if the samples are tensors and the forward does not take as many positional arguments."""
    if not all(isinstance(sample, torch.Tensor) for sample in samples):
        return True
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*samples)
    except TypeError:
        return False
    return True


def _one(sample: Any) -> Inputs:
    if isinstance(sample, Inputs):
        return sample
    if isinstance(sample, torch.Tensor):
        return Inputs((sample,))
    if isinstance(sample, tuple):
        return Inputs(sample)
    if isinstance(sample, dict) or hasattr(sample, "keys"):  # a tokenizer's BatchEncoding has keys too
        return Inputs((), dict(sample))
    raise InputError(
        "expected example_inputs to be a tensor, a tuple (args), a dict (kwargs) or a list of these, "
        f"got {type(sample).__name__}; {_instead_of(sample)}"
    )


def _instead_of(sample: Any) -> str:
    """Return advice on what to pass in place of `sample`."""
    if isinstance(sample, torch.utils.data.DataLoader):
        return "pass one of its batches, next(iter(loader))"
    if isinstance(sample, Iterator):
        return "pass its first item, next(...)"
    if sample is None:
        return "pass None itself to generate inputs"
    if isinstance(sample, str):
        return "pass the output of a tokenizer, tokenizer(text, return_tensors='pt')"
    if isinstance(sample, (int, float, list)) or hasattr(sample, "__array__"):
        return "convert it to a tensor with a batch dimension, torch.as_tensor(...)"
    return "wrap it in a tuple or a dict, such as (x,) or {'x': x}"


def _without_cache(model: nn.Module, inputs: Inputs) -> Inputs:
    """Switch off the key/value cache that the config requests: training does not use a cache."""
    wants_cache = getattr(getattr(model, "config", None), "use_cache", None)
    if not wants_cache or "use_cache" in inputs.kwargs:
        return inputs
    if "use_cache" not in inspect.signature(model.forward).parameters:
        return inputs
    return replace(inputs, kwargs={**inputs.kwargs, "use_cache": False})


def invent(model: nn.Module, batch: int = BATCH, length: int = LENGTH, exactly: bool = False) -> Inputs:
    """Generate `batch` rows of `length` tokens from the modules of the model; always return the same values.

    The inputs are token ids, images, features or a waveform. Rows are shorter if the model has fewer
    positions than `length`, unless `exactly`. If several inputs are possible, run the model to find inputs
    that it accepts.

    Raises:
        InputError: the modules do not determine the inputs, the model fails on all candidates, or `exactly`
            is True and it has fewer positions than `length`.
    """
    length = length if exactly else min(length, positions(model)[0])
    failed: Exception | None = None  # the first error of a size without inputs
    first: Inputs | None = None  # the first inputs on which the model fails, and its error
    wrong: Exception | None = None
    for tokens, most in _sizes_to_try(model, length, exactly):
        try:
            inputs = _candidate_inputs(model, batch, tokens, most)
        except InputError as error:
            failed = failed or error
            continue
        error = _id_error(model, inputs) if _may_not_fit(model, inputs, tokens) else None
        if error is None:
            return _on_its_device(model, inputs)
        first, wrong = first or _on_its_device(model, inputs), wrong or error
        if not isinstance(error, IndexError) and _refuses_one_token(model, batch, most):
            return first  # no length works: the caller reports the model's error
    if first is None:
        raise failed
    if exactly:
        raise InputError(
            f"expected at most as many tokens as {type(model).__name__} has positions for, got {length} "
            f"({type(wrong).__name__}: {wrong}); pass fewer"
        )
    return first


def _sizes_to_try(model: nn.Module, length: int, exactly: bool) -> Iterator[tuple[int, int]]:
    """Yield lengths, each with limits for ids: `length`, and unless `exactly` shorter ones.

    A table of the model may hold tokens or positions, so the size of each is a limit and a length.
    """
    tables = sorted({m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}, reverse=True)
    shorter = {size for size in (*tables, *(length >> times for times in range(1, 32))) if 0 < size < length}
    lengths = [length, *(() if exactly else sorted(shorter, reverse=True))]
    return itertools.product(lengths, tables or [0])


def positions(model: nn.Module) -> tuple[int, str]:
    """Return the maximum number of tokens per row from the model's config, and the name of the entry."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    said = [(getattr(each, name, None), name) for each in (config, text) for name in _POSITIONS]
    # XLNet's config has -1 for no limit
    return min(((n, name) for n, name in said if isinstance(n, int) and n > 0), default=(sys.maxsize, ""))


def _may_not_fit(model: nn.Module, inputs: Inputs, length: int) -> bool:
    """Return True if a table of the model may have fewer rows than the inputs have ids or positions."""
    ids = [int(tensor.max()) for tensor in _input_tensors(inputs) if not tensor.is_floating_point()]
    needed = max(2 * length, *ids, 0)  # some models start positions at 2
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            sizes = [module.num_embeddings]
        elif type(module).__module__.startswith("torch.nn."):
            continue
        else:
            own = (*module._parameters.values(), *module._buffers.values())
            sizes = [size for tensor in own if tensor is not None for size in tensor.shape[:-1] if size > 1]
        if any(size <= needed for size in sizes):
            return True
    return False


def _id_error(model: nn.Module, inputs: Inputs) -> Exception | None:
    return out_of_range(model, *_on_its_device(model, inputs).clone(), _input_tensors(inputs))


def _refuses_one_token(model: nn.Module, batch: int, most: int) -> bool:
    """Return True if the model fails even on one token."""
    try:
        return _id_error(model, _candidate_inputs(model, batch, 1, most)) is not None
    except InputError:
        return True


def _input_tensors(inputs: Inputs) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((inputs.args, inputs.kwargs)) if isinstance(leaf, torch.Tensor)]


def _on_its_device(model: nn.Module, inputs: Inputs) -> Inputs:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (inputs.args, inputs.kwargs))
    return replace(inputs, args=args, kwargs=kwargs)


def _candidate_inputs(model: nn.Module, batch: int, length: int, most: int) -> Inputs:
    """Generate inputs of `length` tokens with ids below `most`."""
    with torch.random.fork_rng(devices=[]):  # candidates are drawn on the CPU
        torch.random.default_generator.manual_seed(0)
        candidates = _candidates(_inside(model), batch, length, most)
    failed: list[str] = []
    for inputs in candidates:
        if len(candidates) == 1 or (error := _error_of(model, inputs)) is None:
            return replace(inputs, invented=True)
        failed.append(f"on {inputs} it raised {error}")
    raise InputError(
        f"expected example inputs, got none, and {type(model).__name__} failed on all {len(failed)} guesses "
        f"for forward({_parameters_text(model)}): {failed[0]}; {_ASK}"
    )


def _inside(model: nn.Module) -> nn.Module:
    """Return the module inside of a wrapper that passes all arguments on, such as DDP's; else the model."""
    children = [*model.children()]
    kinds = {parameter.kind for parameter in inspect.signature(model.forward).parameters.values()}
    passes_on = kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return _inside(children[0]) if passes_on and len(children) == 1 else model


def _parameters_text(model: nn.Module) -> str:
    """Return the parameters of the forward, those with a default as `name=default`."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    shown = [str(p.replace(annotation=p.empty)) for p in parameters[:_SHOWN_PARAMETERS]]
    return ", ".join([*shown, "..."] if len(parameters) > len(shown) else shown)


def _required(model: nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of the forward that have no default."""
    return [
        p
        for p in inspect.signature(model.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]


def _candidates(model: nn.Module, batch: int, length: int, most: int) -> list[Inputs]:
    if _names_its_inputs(model):
        return _for_hugging_face(model, batch, length, most)
    floats = (p for p in model.parameters() if p.is_floating_point())
    like = next(floats, torch.empty(0, dtype=torch.float32, device="cpu"))
    named = denoiser_arguments(model, batch, length)
    denoised = [] if named is None else [Inputs((), named)]
    by_position = _by_position(model, batch, length, most, like)
    candidates = [*denoised, *by_position, *_as_dict(model, batch, length, most)]
    if not candidates:
        raise InputError(
            f"expected example inputs, got none, and none can be generated for {type(model).__name__}."
            f"forward({_parameters_text(model)}); {_ASK}"
        )
    return candidates


def _by_position(model: nn.Module, batch: int, length: int, most: int, like: torch.Tensor) -> list[Inputs]:
    """Return all combinations of what the first modules read, for each argument that has no default."""
    required = _required(model)
    readers = [module for module in model.modules() if isinstance(module, _READERS)]
    if not 1 <= len(required) <= _MOST_ARGUMENTS or not readers:
        return []
    first_of_each = {isinstance(module, nn.Embedding): module for module in reversed(readers)}
    first_of_each = sorted(first_of_each.values(), key=readers.index)
    read = [_read_by(module, like, batch, length, most) for module in first_of_each]
    is_of_words = isinstance(readers[0], nn.Embedding) and not any(isinstance(m, nn.Conv2d) for m in readers)
    if len(required) == 1 and not is_of_words:  # a linear may read image patches
        read += [random_floats((batch, _channels(readers), side, side), like) for side in _SIDES]
    mask = [torch.ones(batch, length, dtype=torch.int64, device="cpu")]
    several = itertools.product(*(mask if p.name == "attention_mask" else read for p in required))
    return [Inputs(values) for values in sorted(several, key=lambda values: len(set(map(id, values))))]


def _as_dict(model: nn.Module, batch: int, length: int, most: int) -> list[Inputs]:
    """Return a dict of what a part from transformers reads, for a forward with one argument.

    An encoder of sentence-transformers takes such a dict.
    """
    part = next(filter(_names_its_inputs, model.modules()), None)
    if part is None or len(_required(model)) != 1:
        return []
    mask = {"attention_mask": torch.ones(batch, length, dtype=torch.int64, device="cpu")}
    with contextlib.suppress(InputError):
        read = [inputs.kwargs for inputs in _for_hugging_face(part, batch, length, most)]
        return [Inputs((named | (mask if "input_ids" in named else {}),)) for named in read]
    return []


def _names_its_inputs(module: nn.Module) -> bool:
    return hasattr(module, "main_input_name") and hasattr(getattr(module, "config", None), "get_text_config")


def _error_of(model: nn.Module, inputs: Inputs) -> str | None:
    """Return the type and first line of the model's error on these inputs, or None if it succeeds."""
    if any(parameter.is_meta for parameter in model.parameters()):  # a forward may read values
        error = _id_error(model, inputs)  # invent() finds a length for ids out of range
        return None if error is None or isinstance(error, IndexError) else in_a_line(error)
    args, kwargs = _on_its_device(model, inputs).clone()
    try:
        with warnings.catch_warnings(action="ignore"), preserved(model), torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        return in_a_line(error)
    return None


_READERS = (nn.Embedding, nn.Conv2d, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention)
# names of config entries for the maximum number of tokens per row
_POSITIONS = (
    "max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings", "n_positions",
)  # fmt: skip
_SIDES = (16, 32, 64, 224, 256)  # side lengths of images in pixels
_SHOWN_PARAMETERS = 8
_SHOWN_ENTRIES = 4  # of a list or tuple
_MOST_ARGUMENTS = 3  # more arguments have too many combinations to try
_WAVEFORM_SAMPLES = 8000  # samples of a waveform: half a second at 16 kHz


def _channels(readers: list[nn.Module]) -> int:
    return next((module.in_channels for module in readers if isinstance(module, nn.Conv2d)), 3)


def _read_by(module: nn.Module, like: torch.Tensor, batch: int, length: int, most: int) -> torch.Tensor:
    if isinstance(module, nn.Embedding):
        return random_ids(min(module.num_embeddings, most), (batch, length))
    if isinstance(module, nn.Conv2d):
        side = 4 * max(module.kernel_size)
        return random_floats((batch, module.in_channels, side, side), like)
    if isinstance(module, nn.Linear):
        width = (module.in_features,)
    elif isinstance(module, nn.MultiheadAttention):
        width = (module.embed_dim,)
    else:
        width = tuple(module.normalized_shape)
    return random_floats((batch, length, *width), like)


def _for_hugging_face(model: nn.Module, batch: int, length: int, most: int) -> list[Inputs]:
    config, name = model.config, model.main_input_name
    like = next(p for p in model.parameters() if p.is_floating_point())
    vocabulary = min(getattr(config.get_text_config(), "vocab_size", 0) or 0, most or sys.maxsize)
    ids = random_ids(vocabulary, (batch, length)) if vocabulary else None
    if name == "input_ids" and ids is not None:
        read = [ids]
    elif name in _FLOATS:
        read = [random_floats((batch, *shape), like) for shape in _FLOATS[name](config)]
    else:
        raise InputError(
            f"expected example inputs, got none, and none can be generated for {type(model).__name__} (its "
            f"main input is {name}); pass example_inputs={{'{name}': tensor, ...}}"
        )
    more = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
    return [Inputs((), {name: values, **more}) for values in read]


def _image_shapes(config: Any) -> list[tuple[int, ...]]:
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", _SIDES[-2])
    image = (getattr(vision, "num_channels", 3), *(side if isinstance(side, (tuple, list)) else (side, side)))
    frames = getattr(vision, "num_frames", None)
    return [image] if frames is None else [(frames, *image), image]


def _sound_shapes(config: Any) -> list[tuple[int, ...]]:
    """Return the shape of a waveform, or both orders of (bands, time) if the config has spectrogram bands."""
    bands = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None)
    times = getattr(config, "max_length", None) or 2 * getattr(config, "max_source_positions", 0)
    return [(bands, times), (times, bands)] if bands and times else [(_WAVEFORM_SAMPLES,)]


# name of the main input -> its possible shapes without the batch dimension
_FLOATS: dict[str, Callable[[Any], list[tuple[int, ...]]]] = {
    "pixel_values": _image_shapes,
    "input_values": _sound_shapes,
    "input_features": _sound_shapes,
}


def _describe(value: Any) -> str:
    if isinstance(value, (list, tuple)) and len(value) <= _SHOWN_ENTRIES:
        entries = ", ".join(map(_describe, value))
        return f"[{entries}]" if isinstance(value, list) else f"({entries})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_describe(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, torch.Tensor):
        dtype = dtype_name(value.dtype)
        return f"nested {dtype}[{value.size(0)}, ...]" if value.is_nested else f"{dtype}{list(value.shape)}"
    return repr(value) if isinstance(value, (int, float, bool, str, type(None))) else type(value).__name__
