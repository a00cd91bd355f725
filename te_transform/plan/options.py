"""The options of convert(), checked together before anything happens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import import_module
from inspect import signature
from typing import Any

from torch import nn

from te_transform.backends import Backend, choose, why_missing
from te_transform.backends.limits import cuda_graphs
from te_transform.canonicalize.op import Forms
from te_transform.graph import ops
from te_transform.graph.keywords import ArgumentError, did_you_mean
from te_transform.graph.names import without_wrappers
from te_transform.graph.pattern import Pattern, Siblings, targets_of, within
from te_transform.plan.precision_plan import RECIPES, PrecisionPlan
from te_transform.plan.rule import Rule

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
IN_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes in which torch.compile makes CUDA graphs


class OptionError(ArgumentError):
    """The error for an option that has an invalid value, or contradicts another option."""


@dataclass(frozen=True)
class Options:
    """The checked options of convert(); `backend` is the chosen backend, `backend_reason` says why."""

    backend: Backend
    backend_reason: str
    passes: tuple[Rule, ...]
    recipe: Any = None
    skip: tuple[str, ...] = ()
    approximate: bool = False
    pad_vocabulary: bool = False
    chunked_loss: bool = False
    compile: bool | str = False
    graphs: bool = False
    inplace: bool = False
    verify: bool = True
    run_original: bool = False  # True to run the user's own code, because nothing is faster
    is_auto: bool = False  # True if the backend was chosen automatically

    @cached_property
    def in_cuda_graphs(self) -> bool:
        """True if calls run as CUDA graphs."""
        return self.graphs or self.compile in IN_CUDA_GRAPHS

    def now(self, model: nn.Module) -> Options:
        """Return the options for a graph that is captured now.

        With backend="auto", TE is chosen if the model has moved to the GPU since its conversion, or is called
        under torch.autocast.
        """
        if not self.is_auto or self.backend.HAS_KERNELS:
            return self
        chosen, reason = choose("auto", model, any_width=bool(self.compile) or self.graphs)
        return self if chosen is self.backend else replace(self, backend=chosen, backend_reason=reason)

    def ways(self, planning: bool = False) -> dict[str, Options]:
        """Return the options that compile="auto" chooses among, by name, the simplest first.

        CUDA graphs are included if this machine supports them, or if `planning`.
        """
        choices = {"as it is": replace(self, compile=False, recipe=None, run_original=True)}
        recipes = [None] if self.recipe is None else [None, self.recipe]
        for replayed in (False, True)[: 1 + (planning or cuda_graphs())]:
            for compiled in (False, True):
                for recipe in recipes:
                    words = [self.backend.NAME, _name_of(recipe)]
                    words += ["compiled"] * compiled + ["as CUDA graphs"] * replayed
                    name = ", ".join(word for word in words if word)
                    choices[name] = replace(self, compile=compiled, graphs=replayed, recipe=recipe)
        return choices

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that run on the backend, in order."""
        return tuple(rule for rule in self.passes if self.backend.HAS_KERNELS or not rule.needs_kernels)

    @property
    def forms(self) -> tuple[Forms, ...]:
        """The canonical forms that these rules need besides the usual ones."""
        return tuple(dict.fromkeys(rule.forms for rule in self.rules if rule.forms is not None))

    def asked(self) -> tuple[str, ...]:
        """Return the backend and all non-default options, as keyword arguments of a call of convert()."""
        others = ("skip", "approximate", "pad_vocabulary", "chunked_loss", "compile", "graphs", "inplace")
        others += ("verify",)
        differing = [name for name in others if getattr(self, name) != getattr(Options, name)]
        arguments = [f"{name}={getattr(self, name)!r}" for name in differing]
        recipe = [f"recipe={_name_of(self.recipe)!r}"] if self.recipe is not None else []
        return f"backend={self.backend.NAME!r}", *recipe, *arguments

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "backend": self.backend.__name__}  # modules are pickled by name

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in {**state, "backend": import_module(state["backend"])}.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        model: nn.Module | None,
        pipeline: tuple[Rule, ...],
        *,
        backend: str = "auto",
        passes: Any = None,
        recipe: Any = None,
        skip: Any = (),
        planning: bool = False,
        **flags: Any,
    ) -> Options:
        """Check the arguments of convert(), or of inspect() if `planning`, and return the options.

        Raises:
            OptionError: an option is invalid; the message says what was expected.
            te_transform.backends.BackendError: the backend cannot run here.
        """
        inside = "backend_reason", "run_original", "is_auto"
        known = [name for name in cls.__dataclass_fields__ if name not in inside]
        if unknown := [name for name in flags if name not in known]:
            raise OptionError(
                f"expected one of the options {', '.join(known)}, got {unknown[0]!r}"
                f"{did_you_mean(unknown[0], known)}"
            )
        if backend not in ("auto", "te", "torch"):
            raise OptionError(f"expected backend 'auto', 'te' or 'torch', got {backend!r}", "backend")
        mode, graphs = flags.get("compile", False), flags.get("graphs", False)
        any_width = recipe is not None or bool(mode) or bool(graphs)
        chosen, reason = choose(backend, model, planning, any_width=any_width, in_recipe=recipe is not None)
        rules = pipeline if passes is None else _rules_of(passes)
        cls._check_recipe(recipe, chosen, reason, planning)
        globs = globs_of(skip)
        _check_flags(flags)
        if graphs:
            cls._check_graphs(mode, planning)
        if flags.get("chunked_loss") and (mode or graphs):
            raise OptionError(
                f"expected compile=False and graphs=False with chunked_loss=True, which runs uncompiled, got "
                f"compile={mode!r}, graphs={graphs}; leave these two False"
            )
        return cls(chosen, reason, rules, recipe, globs, is_auto=backend == "auto", **flags)

    @staticmethod
    def _check_graphs(mode: bool | str, planning: bool) -> None:
        if mode == "auto":
            raise OptionError(
                "expected graphs=False with compile='auto', which times CUDA graphs by itself, got "
                "graphs=True; leave graphs=False"
            )
        if mode in IN_CUDA_GRAPHS:
            raise OptionError(
                f"expected graphs=False with compile={mode!r}, which makes CUDA graphs by itself, got "
                "graphs=True; pass compile=True with graphs=True, or leave graphs=False"
            )
        if not planning and not cuda_graphs():
            raise OptionError(
                "expected a GPU that PyTorch can use for graphs=True, got a machine without one; leave "
                "graphs=False"
            )

    @staticmethod
    def _check_recipe(recipe: Any, backend: Any, reason: str, planning: bool) -> None:
        named = recipe.recipe if isinstance(recipe, PrecisionPlan) else recipe
        if named is None:
            if recipe is not None:
                raise OptionError(
                    "expected a PrecisionPlan with a recipe, got one without; set its recipe", "recipe"
                )
            return
        if isinstance(named, str) and named not in RECIPES:
            raise OptionError(
                f"expected None, a TE recipe or one of {', '.join(RECIPES)} for recipe, got {named!r}",
                "recipe",
            )
        if not backend.HAS_KERNELS:
            if planning:
                raise OptionError(
                    f"expected backend 'te' for the recipe {named!r}, got {reason}; choose backend 'te', "
                    "which can be planned on any machine",
                    "recipe",
                )
            do = "call it where Transformer Engine runs," if why_missing() else "choose backend 'te'"
            raise OptionError(
                f"expected backend 'te' for the recipe {named!r}, got {reason}; {do} or leave out the recipe",
                "recipe",
            )
        try:
            backend.recipe_of(named)
        except ValueError as error:
            raise OptionError(str(error), "recipe") from error


def _rules_of(passes: Any) -> tuple[Rule, ...]:
    """Return the rules of `passes`.

    Raises:
        OptionError: `passes` has something else than valid rules.
    """
    if not isinstance(passes, (tuple, list)):
        raise OptionError(
            f"expected a tuple of te_transform.Rule objects for passes, such as PIPELINE, got {passes!r}"
        )
    if wrong := [rule for rule in passes if not isinstance(rule, Rule)]:
        raise OptionError(
            f"expected te_transform.Rule objects in passes, as in te_transform.PIPELINE, got {wrong[0]!r}"
        )
    for rule in passes:
        _check_rule(rule)
    return tuple(passes)


def _check_flags(flags: dict[str, Any]) -> None:
    """Raise unless `compile` is a bool or a mode, and the other flags are bools."""
    mode, modes = flags.get("compile", False), (*COMPILE_MODES, "auto")
    if not isinstance(mode, bool) and mode not in modes:
        raise OptionError(
            f"expected a bool or one of {', '.join(modes)} for compile, got {mode!r}", "compile"
        )
    for name in ("approximate", "pad_vocabulary", "chunked_loss", "graphs", "inplace", "verify"):
        if not isinstance(flags.get(name, False), bool):
            raise OptionError(f"expected True or False for {name}, got {flags[name]!r}", name)


def _check_rule(rule: Rule) -> None:
    """Raise unless the fields of `rule` have valid types.

    Raises:
        OptionError: a field is invalid; the message says what was expected.
    """
    merges, pattern = isinstance(rule.pattern, Siblings), isinstance(rule.pattern, (Siblings, Pattern))
    names = "a tuple of names, such as ('x', 'linear.weight')"
    needed = {
        "name": (isinstance(rule.name, str) and rule.name != "", "a non-empty string"),
        "pattern": (pattern, "a pattern from te_transform.rules, such as Call()"),
        "refuse": (callable(rule.refuse), "a function that yields reasons"),
        "build": (merges or callable(rule.build), "a function or class that makes the fused op"),
        "reads": (_are_names(rule.reads), names),
        "hands_out": (_are_names(rule.hands_out), names),
        "shares": (_are_names(rule.shares), names),
        "forms": (rule.forms is None or isinstance(rule.forms, Forms), "Forms or None"),
    }
    for field, (is_right, what) in needed.items():
        if not is_right:
            raise OptionError(
                f"expected {what} for {field} of the rule {rule.name!r}, got {getattr(rule, field)!r}"
            )
    _check_targets(rule)
    _check_names(rule)


def _check_targets(rule: Rule) -> None:
    for target in (target for part in within(rule.pattern) for target in targets_of(part)):
        if not callable(target) or (isinstance(target, type) and issubclass(target, nn.Module)):
            raise OptionError(
                "expected functions such as te_transform.rules.ops.relu in the pattern of the rule "
                f"{rule.name!r}, got {target!r}"
            )


def _check_names(rule: Rule) -> None:
    """Raise unless `reads`, `hands_out` and `shares` name roles of the pattern and arguments of its ops."""
    parts = within(rule.pattern)
    if any(
        type(part).__module__ != Pattern.__module__ for part in parts
    ):  # a user's own pattern class may bind any name
        return
    targets: dict[str, tuple[Any, ...]] = {}
    for part in parts:
        for name in filter(None, (getattr(part, "role", None), getattr(part, "name", None))):
            targets[name] = (*targets.get(name, ()), *targets_of(part))
    for field, (role, _, argument) in _names_in_rule(rule):
        if role not in targets:
            raise OptionError(
                f"expected roles of the pattern ({', '.join(targets)}) in {field} of the rule {rule.name!r}, "
                f"got {role!r}"
            )
        ours = [target for target in targets[role] if ops.is_op(target)]
        known = dict.fromkeys(name for target in ours for name in signature(target).parameters)
        if argument and ours and argument not in known:
            raise OptionError(
                f"expected arguments of {role!r} ({', '.join(known)}) in {field} of the rule {rule.name!r}, "
                f"got '{role}.{argument}'"
            )


def _names_in_rule(rule: Rule) -> Iterator[tuple[str, tuple[str, str, str]]]:
    yield from (("reads", name.partition(".")) for name in rule.reads)
    yield from (("hands_out", (name, "", "")) for name in rule.hands_out)
    yield from (("shares", (name, "", "")) for name in rule.shares)


def _are_names(given: Any) -> bool:
    return isinstance(given, (tuple, list)) and all(isinstance(name, str) for name in given)


def globs_of(skip: Any) -> tuple[str, ...]:
    """Return the module paths and globs of `skip=` as a tuple.

    Raises:
        OptionError: `skip` is something else; the message says what was expected.
    """
    if not isinstance(skip, (str, tuple, list, set, frozenset)):
        raise OptionError(
            f"expected module paths or globs such as 'model.layers.0*' for skip, got {skip!r}", "skip"
        )
    globs = (skip,) if isinstance(skip, str) else tuple(skip)
    if wrong := [glob for glob in globs if not isinstance(glob, str) or not glob]:
        raise OptionError(
            f"expected module paths or globs such as 'model.layers.0*' in skip, got {wrong[0]!r}", "skip"
        )
    return globs


def skipped_by(path: str, globs: Iterable[str]) -> str | None:
    """Return the glob that matches the module at `path` or one of its parents, or None."""
    parts = path.split(".")
    holders = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return next((glob for glob in globs if any(_is_named(holder, glob) for holder in holders)), None)


def _is_named(path: str, glob: str) -> bool:
    return fnmatchcase(without_wrappers(path), without_wrappers(glob))


def check_skip(globs: tuple[str, ...], model: nn.Module) -> None:
    """Raise unless every path or glob matches a module of `model`.

    Raises:
        OptionError: a path or glob matches no module; the message names a valid path.
    """
    paths = [path for path, _ in model.named_modules()]
    for glob in globs:
        if not any(_is_named(path, glob) for path in paths):
            raise OptionError(
                f"expected a path like {paths[-1]!r} or a glob in skip, got {glob!r}, which names no module "
                f"of {type(model).__name__}; see model.named_modules()",
                "skip",
            )


def _name_of(recipe: Any) -> str:
    named = recipe.recipe if isinstance(recipe, PrecisionPlan) else recipe
    return named if isinstance(named, str) else "" if named is None else type(named).__name__
