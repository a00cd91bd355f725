"""The precision plan: which products run in FP8, and why the others do not; it can be stored in a file."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

# "-fast": gradients accumulate in the tensor cores too
RECIPES = ("fp8-delayed", "fp8-delayed-fast", "fp8-current", "fp8-current-fast", "fp8-block", "mxfp8")
_IN = "fp8"
_HEADER = """\
# "fp8": the fused module runs in the recipe's precision. Any other text says why not.
"""


class PrecisionError(ValueError):
    """The error for a precision plan or a scaling state that is invalid or does not fit the model."""


@dataclass(frozen=True)
class PrecisionPlan:
    """A recipe, and for each site with matrix products None, or the reason why it stays out of the recipe.

    Pass a plan to convert() as `recipe=`. Sites that the plan does not name are decided automatically.

    Args:
        recipe: One of convert()'s recipe names, or a TE recipe object.
        sites: A dict from the path of a site to None, "fp8" (the same as None) or a reason.
        small_calls: True to use the recipe even in calls with so few tokens that bf16 is faster.

    Raises:
        PrecisionError: the recipe name is unknown, the value of a site is invalid, or `small_calls` is not a
            bool.
    """

    recipe: Any
    sites: dict[str, str | None] = field(default_factory=dict)
    small_calls: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.recipe, str) and self.recipe not in RECIPES:
            raise PrecisionError(
                f"expected a TE recipe or one of {', '.join(RECIPES)} for recipe, got {self.recipe!r}"
            )
        if not isinstance(self.sites, dict):
            kind = type(self.sites).__name__
            raise PrecisionError(
                f'expected a dict from the path of a site to None, "fp8" or a reason for sites, got a {kind}'
            )
        for site, why in self.sites.items():
            if not isinstance(site, str):
                raise PrecisionError(f"expected module paths such as 'lm_head' in sites, got {site!r}")
            # a recipe name here is a mistake: it would count as a reason to stay out of FP8
            misspelt = isinstance(why, str) and why != _IN and why.strip().lower() in (_IN, *RECIPES)
            if misspelt or not (why is None or isinstance(why, str)):
                raise PrecisionError(f'expected None, "fp8" or a reason for {site!r}, got {why!r}')
        if not isinstance(self.small_calls, bool):
            raise PrecisionError(f"expected True or False for small_calls, got {self.small_calls!r}")
        decided = {site: None if why == _IN else why for site, why in self.sites.items()}
        object.__setattr__(self, "sites", decided)

    @property
    def name(self) -> str:
        """The name of the recipe."""
        return self.recipe if isinstance(self.recipe, str) else type(self.recipe).__name__

    @property
    def is_delayed(self) -> bool:
        """True if the recipe computes scales from earlier steps."""
        kinds = {kind.__name__ for kind in type(self.recipe).__mro__}
        return self.recipe in ("fp8-delayed", "fp8-delayed-fast") or "DelayedScaling" in kinds

    def told(self, site: str) -> str:
        """Return a clause on whether a site runs in the recipe, and why not; "" for an unknown site."""
        if site not in self.sites:
            return ""
        why = self.sites[site]
        return f"in {self.name}" if why is None else f"not in {self.name}, because {why}"

    def write(self, path: str | PathLike[str]) -> None:
        """Write the plan as TOML.

        Raises:
            PrecisionError: the recipe is an object; only recipe names can be stored.
        """
        if not isinstance(self.recipe, str):
            raise PrecisionError(
                "expected one of convert()'s recipe names, such as 'fp8-delayed', to write a file, got a "
                f"{type(self.recipe).__name__}"
            )
        lines = [
            f"{_toml_string(site)} = {_toml_string(_IN if why is None else why)}"
            for site, why in self.sites.items()
        ]
        lines = [*(["small_calls = true"] if self.small_calls else []), "", "[sites]", *lines, ""]
        text = "\n".join([f"recipe = {_toml_string(self.recipe)}", *lines])
        Path(path).write_text(_HEADER + text, encoding="utf-8")

    @classmethod
    def read(cls, path: str | PathLike[str]) -> PrecisionPlan:
        """Read a plan from a file that write() made; the file may have been edited.

        Raises:
            PrecisionError: the file cannot be read, is not TOML, lacks an entry, or has an unknown or invalid
                entry.
        """
        try:
            entries = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, TypeError) as error:  # no such file, or not a path
            why = getattr(error, "strerror", error)
            raise PrecisionError(
                f"expected a file that write() made, got {path}, which cannot be read ({why})"
            ) from error
        except ValueError as error:  # not TOML, or not text
            raise PrecisionError(
                f"expected TOML in {path}, got an error ({error}); write() makes a file to start from"
            ) from error
        sites = entries.get("sites", {})
        texts = isinstance(sites, dict) and all(isinstance(why, str) for why in sites.values())
        # a misspelled table must not be ignored
        known = entries.keys() <= {"recipe", "small_calls", "sites"}
        small = entries.get("small_calls", False)
        if not (isinstance(entries.get("recipe"), str) and isinstance(small, bool) and texts and known):
            raise PrecisionError(
                f'expected in {path} a line recipe = "fp8-delayed", a table [sites] of paths with "fp8" or a '
                "reason, and at most a line small_calls = true, got something else; write() makes a file to "
                "start from"
            )
        try:
            return cls(entries["recipe"], sites, small)
        except PrecisionError as error:
            raise PrecisionError(f"{path}: {error}") from error


def _toml_string(text: str) -> str:
    # JSON strings are valid TOML, except for the surrogate pairs of ensure_ascii=True
    return json.dumps(text, ensure_ascii=False)
