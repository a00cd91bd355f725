"""Which fused modules run in FP8, and why the others do not; a plan that can be kept in a file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from te_transform.backends.limits import DTYPES
from te_transform.weights import dtype_name

if TYPE_CHECKING:
    from te_transform.plan import Plan, Site

_IN = "fp8"
_HEADER = """\
# Which fused modules run in the recipe's precision: "fp8" does, any other text says why not.
"""


class PrecisionError(ValueError):
    """A precision plan does not fit the model, or its file cannot be read."""


@dataclass(frozen=True)
class PrecisionPlan:
    """A recipe, and for each fused module's host, by path, why it stays out of it; None where it does not.

    `recipe` is one of convert()'s names or a TE recipe object. Give a plan to convert() as its recipe:
    modules that it does not name are decided as without it. "fp8" is None too, as in a file.
    With `small_calls`, calls of so few tokens that they are faster in bf16 run in the recipe too.

    Raises:
        PrecisionError: a site has something else, or `small_calls` is no bool.
    """

    recipe: Any
    sites: dict[str, str | None] = field(default_factory=dict)
    small_calls: bool = False

    def __post_init__(self) -> None:
        for site, why in self.sites.items():
            if why is not None and not isinstance(why, str):
                raise PrecisionError(f'{site!r} has {why!r}, None, "fp8" or a reason is needed')
        if not isinstance(self.small_calls, bool):
            raise PrecisionError(f"small_calls is {self.small_calls!r}, True or False is needed")
        decided = {site: None if why == _IN else why for site, why in self.sites.items()}
        object.__setattr__(self, "sites", decided)

    def write(self, path: str | PathLike[str]) -> None:
        """Write the plan as TOML.

        Raises:
            PrecisionError: the recipe is an object, which has no name to be read back by.
        """
        if not isinstance(self.recipe, str):
            raise PrecisionError(
                f"the recipe is a {type(self.recipe).__name__}, a file needs one of convert()'s names, "
                "such as 'fp8-delayed'"
            )
        lines = [
            f"{_quoted(site)} = {_quoted(_IN if why is None else why)}" for site, why in self.sites.items()
        ]
        lines = [*(["small_calls = true"] if self.small_calls else []), "", "[sites]", *lines, ""]
        text = "\n".join([f"recipe = {_quoted(self.recipe)}", *lines])
        Path(path).write_text(_HEADER + text, encoding="utf-8")

    @classmethod
    def read(cls, path: str | PathLike[str]) -> PrecisionPlan:
        """The plan in a file that write() made, and somebody may have edited.

        Raises:
            PrecisionError: it is no TOML, or lacks what a plan has.
        """
        try:
            found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # no TOML, or not even text
            raise PrecisionError(
                f"{path} is no TOML ({error}), write() makes a file to start from"
            ) from error
        sites = found.get("sites", {})
        texts = isinstance(sites, dict) and all(isinstance(why, str) for why in sites.values())
        # a table that is misspelt would be passed over
        known = found.keys() <= {"recipe", "small_calls", "sites"}
        small = found.get("small_calls", False)
        if not (isinstance(found.get("recipe"), str) and isinstance(small, bool) and texts and known):
            raise PrecisionError(
                f'{path} needs a line recipe = "fp8-delayed" and a table [sites] of paths with "fp8" or a '
                "reason, it may have a line small_calls = true: write() makes a file to start from"
            )
        return cls(found["recipe"], sites, small)


def _quoted(text: str) -> str:
    # JSON's strings are TOML's too, but for the pairs of surrogates that ASCII would need
    return json.dumps(text, ensure_ascii=False)


def assign(made: Plan, asked: Any, backend: Any) -> PrecisionPlan:
    """The precision of every fused product in the plan.

    Args:
        made: what is going to be fused.
        asked: a recipe, or a plan that overrides what is decided here (but for shapes no kernel has).
        backend: te, or what stands for it.

    Raises:
        PrecisionError: `asked` names a module in which nothing is fused.
    """
    named = asked if isinstance(asked, PrecisionPlan) else PrecisionPlan(asked)
    sites = {site.host: site for site in made.sites.values() if site.layouts}
    if unknown := sorted(named.sites.keys() - sites.keys()):
        raise PrecisionError(
            f"the precision plan names {', '.join(unknown)}, where no product is fused: "
            "te_transform.inspect() with the same options shows the paths that there are"
        )
    multiple = backend.multiple(backend.recipe_of(named.recipe))
    heads = set(_outputs(made.recording.graph))
    decided = {}
    for path, site in sites.items():
        reasons = [*_foreign(site.fused, backend), *_wide(site.fused), *_odd(site.fused, multiple)]
        reasons += [named.sites[path]] if path in named.sites else _head(site, heads)
        decided[path] = next((why for why in reasons if why is not None), None)
    return PrecisionPlan(named.recipe, decided, named.small_calls)


def _foreign(fused: nn.Module, backend: Any) -> Iterator[str]:
    if type(fused).__module__ != backend.__name__:
        yield f"{type(fused).__name__} is a rule's own module, a recipe holds for TE's"


def _wide(fused: nn.Module) -> Iterator[str]:
    dtypes = {parameter.dtype for parameter in fused.parameters()}
    if not dtypes <= {*DTYPES}:
        found = ", ".join(sorted(map(dtype_name, dtypes)))
        yield f"the weights are {found}, FP8 needs bfloat16 or float16: convert the model to that first"


def _odd(fused: nn.Module, multiple: int) -> Iterator[str]:
    for parameter in fused.parameters():
        if parameter.dim() == 2 and any(size % multiple for size in parameter.shape):
            shape = " x ".join(map(str, parameter.shape))
            yield f"the weight is {shape}, FP8 kernels need multiples of {multiple}"


def _head(site: Site, heads: set[str]) -> Iterator[str]:
    if site.name in heads and len(site.layouts.keys() & {"weight"}):
        yield (
            "it makes the model's output, FP8 would round that itself and not what is summed up later: "
            "name it in a te_transform.PrecisionPlan to have it there"
        )


def _outputs(graph: fx.Graph) -> Iterator[str]:
    """The fused modules that make the model's output: nothing but functions of one tensor, and a bias, lies
    between."""
    waiting = [node for node in graph.nodes if node.op == "output"]
    while waiting:
        node = waiting.pop()
        added = node.target is torch.add
        sources = [n for n in node.all_input_nodes if _floating(n) and not (added and n.op == "get_attr")]
        if node.op == "output" or len(sources) == 1:
            for source in sources:
                if source.op == "call_module":
                    yield source.target
                elif source.op != "placeholder":
                    waiting.append(source)


def _floating(node: fx.Node) -> bool:
    meta = node.meta.get("tensor_meta")
    return meta is None or not hasattr(meta, "dtype") or meta.dtype.is_floating_point
