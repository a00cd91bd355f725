"""Which products run in FP8, and why the others do not: a plan that can be kept in a file."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

RECIPES = ("fp8-delayed", "fp8-current", "fp8-block", "mxfp8")
_IN = "fp8"
_HEADER = """\
# Which fused modules run in the recipe's precision: "fp8" does, any other text says why not.
"""


class PrecisionError(ValueError):
    """A precision plan, or a state of scales, does not fit the model, or a plan's file cannot be read."""


@dataclass(frozen=True)
class PrecisionPlan:
    """A recipe, and for each site with matrix products why it stays out of it; None where it does not.

    `recipe` is one of convert()'s names or a TE recipe object; sites go by their paths. Give a plan to
    convert() as its recipe: sites that it does not name are decided as without it. "fp8" is None too, as in
    a file.
    With `small_calls`, calls of so few tokens that they are faster in bf16 run in the recipe too.

    Raises:
        PrecisionError: there is no recipe of that name, a site has something else, or `small_calls` is no
            bool.
    """

    recipe: Any
    sites: dict[str, str | None] = field(default_factory=dict)
    small_calls: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.recipe, str) and self.recipe not in RECIPES:
            raise PrecisionError(
                f"the recipe is {self.recipe!r}, a TE recipe or one of {', '.join(RECIPES)} is needed"
            )
        if not isinstance(self.sites, dict):
            kind = type(self.sites).__name__
            raise PrecisionError(
                f'sites is a {kind}, a dict from a site\'s name to None, "fp8" or a reason is needed'
            )
        for site, why in self.sites.items():
            if not isinstance(site, str):
                raise PrecisionError(f"sites has {site!r}, the path of a module is needed, such as 'lm_head'")
            # a name of the recipe would be taken for a reason to stay out of it
            misspelt = isinstance(why, str) and why != _IN and why.strip().lower() in (_IN, *RECIPES)
            if misspelt or not (why is None or isinstance(why, str)):
                raise PrecisionError(f'{site!r} has {why!r}, None, "fp8" or a reason is needed')
        if not isinstance(self.small_calls, bool):
            raise PrecisionError(f"small_calls is {self.small_calls!r}, True or False is needed")
        decided = {site: None if why == _IN else why for site, why in self.sites.items()}
        object.__setattr__(self, "sites", decided)

    @property
    def name(self) -> str:
        """The recipe's."""
        return self.recipe if isinstance(self.recipe, str) else type(self.recipe).__name__

    def told(self, site: str) -> str:
        """Whether a site runs in the recipe, and why not; "" where the plan has no such site."""
        if site not in self.sites:
            return ""
        why = self.sites[site]
        return f"in {self.name}" if why is None else f"not in {self.name}, because {why}"

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
            PrecisionError: it cannot be read, is no TOML, lacks what a plan has, or has what no plan takes.
        """
        try:
            found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, TypeError) as error:  # no such file, or no path
            why = getattr(error, "strerror", error)
            raise PrecisionError(
                f"{path} cannot be read ({why}), a file that write() made is needed"
            ) from error
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
        try:
            return cls(found["recipe"], sites, small)
        except PrecisionError as error:
            raise PrecisionError(f"{path}: {error}") from error


def _quoted(text: str) -> str:
    # JSON's strings are TOML's too, but for the pairs of surrogates that ASCII would need
    return json.dumps(text, ensure_ascii=False)
