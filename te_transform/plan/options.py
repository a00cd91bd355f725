"""The options of convert(), checked together before anything happens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import import_module
from inspect import signature
from typing import Any

from torch import nn

from te_transform.backends import Backend, choose
from te_transform.backends.limits import cuda_graphs
from te_transform.graph import ops
from te_transform.graph.keywords import did_you_mean
from te_transform.graph.pattern import Pattern, Siblings, targets_of, within
from te_transform.plan.precision_plan import RECIPES, PrecisionPlan
from te_transform.plan.rule import Rule

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
IN_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # those of which torch.compile makes CUDA graphs


class OptionError(ValueError):
    """An option has a value it cannot have, alone or next to the others."""


@dataclass(frozen=True)
class Options:
    """What was asked of convert(); `backend` is the one chosen, `backend_reason` a sentence on why."""

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
    run_original: bool = False  # run the user's own code, because nothing was found to be faster
    is_auto: bool = False  # whether the backend was for this to choose

    @property
    def in_cuda_graphs(self) -> bool:
        """Whether calls run as CUDA graphs."""
        return self.graphs or self.compile in IN_CUDA_GRAPHS

    def now(self, model: nn.Module) -> Options:
        """The options for a graph that is captured now: "auto" is TE for a model that has come to the GPU, or
        that is called under torch.autocast, since it was converted."""
        if not self.is_auto or self.backend.HAS_KERNELS:
            return self
        chosen, reason = choose("auto", model, any_width=bool(self.compile) or self.graphs)
        return self if chosen is self.backend else replace(self, backend=chosen, backend_reason=reason)

    def ways(self, planning: bool = False) -> dict[str, Options]:
        """The ways to run a model that compile="auto" chooses among, by their names, the simplest first; as
        CUDA graphs if this machine has them, or nothing will run."""
        found = {"as it is": replace(self, compile=False, recipe=None, run_original=True)}
        recipes = [None] if self.recipe is None else [None, self.recipe]
        for replayed in (False, True)[: 1 + (planning or cuda_graphs())]:
            for compiled in (False, True):
                for recipe in recipes:
                    words = [self.backend.NAME, _name_of(recipe)]
                    words += ["compiled"] * compiled + ["as CUDA graphs"] * replayed
                    name = ", ".join(word for word in words if word)
                    found[name] = replace(self, compile=compiled, graphs=replayed, recipe=recipe)
        return found

    def asked(self) -> tuple[str, ...]:
        """What differs from the defaults of convert(), and the backend, as it would be written in a call."""
        others = ("skip", "approximate", "pad_vocabulary", "chunked_loss", "compile", "graphs", "inplace")
        others += ("verify",)
        differing = [name for name in others if getattr(self, name) != getattr(Options, name)]
        found = [f"{name}={getattr(self, name)!r}" for name in differing]
        recipe = [f"recipe={_name_of(self.recipe)!r}"] if self.recipe is not None else []
        return f"backend={self.backend.NAME!r}", *recipe, *found

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "backend": self.backend.__name__}  # a module, which a pickle names

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in {**state, "backend": import_module(state["backend"])}.items():
            object.__setattr__(self, name, value)

    def __deepcopy__(self, memo: dict) -> Options:
        return self  # frozen

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
        """The options of these arguments of convert(), or of inspect(), which is only `planning`.

        Raises:
            OptionError: what was given, what is needed.
            te_transform.backends.BackendError: the backend cannot run here.
        """
        inside = "backend_reason", "run_original", "is_auto"
        known = [name for name in cls.__dataclass_fields__ if name not in inside]
        if unknown := [name for name in flags if name not in known]:
            raise OptionError(
                f"there is no option {unknown[0]!r}, one of {', '.join(known)} is needed"
                f"{did_you_mean(unknown[0], known)}"
            )
        if backend not in ("auto", "te", "torch"):
            raise OptionError(f"backend is {backend!r}, 'auto', 'te' or 'torch' is needed")
        mode, graphs = flags.get("compile", False), flags.get("graphs", False)
        any_width = recipe is not None or bool(mode) or bool(graphs)
        chosen, reason = choose(backend, model, planning, any_width=any_width, in_recipe=recipe is not None)
        if passes is not None and not isinstance(passes, (tuple, list)):
            raise OptionError(
                f"passes is {passes!r}, a tuple of te_transform.Rule objects is needed, as PIPELINE is"
            )
        rules = pipeline if passes is None else tuple(passes)
        if wrong := [rule for rule in rules if not isinstance(rule, Rule)]:
            raise OptionError(
                f"passes has {wrong[0]!r}, te_transform.Rule objects are needed, as in te_transform.PIPELINE"
            )
        for rule in rules:
            _check_rule(rule)
        cls._check_recipe(recipe, chosen, reason, planning)
        globs = globs_of(skip)
        if not isinstance(mode, bool) and mode not in (*COMPILE_MODES, "auto"):
            known = ", ".join((*COMPILE_MODES, "auto"))
            raise OptionError(f"compile is {mode!r}, a bool or one of {known} is needed")
        for name in ("approximate", "pad_vocabulary", "chunked_loss", "graphs", "inplace", "verify"):
            if not isinstance(flags.get(name, False), bool):
                raise OptionError(f"{name} is {flags[name]!r}, True or False is needed")
        if graphs:
            cls._check_graphs(mode, planning)
        if flags.get("chunked_loss") and (mode or graphs):
            raise OptionError(
                f"chunked_loss is True, which runs uncompiled, next to compile={mode!r}, graphs={graphs}: "
                "leave these two False"
            )
        return cls(chosen, reason, rules, recipe, globs, is_auto=backend == "auto", **flags)

    @staticmethod
    def _check_graphs(mode: bool | str, planning: bool) -> None:
        if mode == "auto":
            raise OptionError(
                "graphs is True and compile is 'auto', which tries with CUDA graphs and without: leave "
                "graphs=False"
            )
        if mode in IN_CUDA_GRAPHS:
            raise OptionError(
                f"graphs is True and compile is {mode!r}, which makes CUDA graphs by itself: pass "
                "compile=True with graphs=True, or leave graphs=False"
            )
        if not planning and not cuda_graphs():
            raise OptionError(
                "graphs is True, CUDA graphs need a GPU that PyTorch can use and this machine has none: "
                "leave graphs=False"
            )

    @staticmethod
    def _check_recipe(recipe: Any, backend: Any, reason: str, planning: bool) -> None:
        named = recipe.recipe if isinstance(recipe, PrecisionPlan) else recipe
        if named is None:
            if recipe is not None:
                raise OptionError("recipe is a PrecisionPlan without a recipe, one is needed")
            return
        if isinstance(named, str) and named not in RECIPES:
            raise OptionError(
                f"recipe is {named!r}, None, a TE recipe or one of {', '.join(RECIPES)} is needed"
            )
        if not backend.HAS_KERNELS:
            if planning:
                raise OptionError(
                    f"recipe is {named!r}, it needs backend='te' and this is {reason}; pass backend='te', "
                    "which is planned on any machine"
                )
            raise OptionError(
                f"recipe is {named!r}, it needs backend='te' and this is {reason}; else leave recipe=None"
            )
        try:
            backend.recipe_of(named)
        except ValueError as error:
            raise OptionError(f"recipe is {named!r}, {error}") from error


def _check_rule(rule: Rule) -> None:
    """Raise unless the fields of `rule` are of the types that they have to be of.

    Raises:
        OptionError: what was given, what is needed.
    """
    merges, pattern = isinstance(rule.pattern, Siblings), isinstance(rule.pattern, (Siblings, Pattern))
    names = "a tuple of names, such as ('x', 'linear.weight'),"
    needed = {
        "name": (isinstance(rule.name, str) and rule.name != "", "a text"),
        "pattern": (pattern, "one of te_transform.rules, such as Call(),"),
        "refuse": (callable(rule.refuse), "a function that yields reasons"),
        "build": (merges or callable(rule.build), "a function or class that makes the fused op"),
        "reads": (_are_names(rule.reads), names),
        "hands_out": (_are_names(rule.hands_out), names),
        "shares": (_are_names(rule.shares), names),
    }
    for field, (is_right, what) in needed.items():
        if not is_right:
            raise OptionError(
                f"{field} of the rule {rule.name!r} is {getattr(rule, field)!r}, {what} is needed"
            )
    _check_targets(rule)
    _check_names(rule)


def _check_targets(rule: Rule) -> None:
    for target in (target for part in within(rule.pattern) for target in targets_of(part)):
        if not callable(target) or (isinstance(target, type) and issubclass(target, nn.Module)):
            raise OptionError(
                f"the pattern of the rule {rule.name!r} has {target!r}, a function is needed, such as "
                "te_transform.rules.ops.relu"
            )


def _check_names(rule: Rule) -> None:
    """Raise unless what a rule reads, hands out and shares is named by roles of the pattern, and arguments of
    its ops."""
    parts = within(rule.pattern)
    if any(type(part).__module__ != Pattern.__module__ for part in parts):  # who knows what these bind
        return
    found: dict[str, tuple[Any, ...]] = {}
    for part in parts:
        for name in filter(None, (getattr(part, "role", None), getattr(part, "name", None))):
            found[name] = (*found.get(name, ()), *targets_of(part))
    for field, (role, _, argument) in _named(rule):
        if role not in found:
            raise OptionError(
                f"{field} of the rule {rule.name!r} has {role!r}, a role of its pattern is needed, one of "
                f"{', '.join(found)}"
            )
        ours = [target for target in found[role] if getattr(target, "__module__", "") == ops.__name__]
        known = dict.fromkeys(name for target in ours for name in signature(target).parameters)
        if argument and ours and argument not in known:
            raise OptionError(
                f"{field} of the rule {rule.name!r} has '{role}.{argument}', an argument of {role!r} is "
                f"needed, one of {', '.join(known)}"
            )


def _named(rule: Rule) -> Iterator[tuple[str, tuple[str, str, str]]]:
    yield from (("reads", name.partition(".")) for name in rule.reads)
    yield from (("hands_out", (name, "", "")) for name in rule.hands_out)
    yield from (("shares", (name, "", "")) for name in rule.shares)


def _are_names(given: Any) -> bool:
    return isinstance(given, (tuple, list)) and all(isinstance(name, str) for name in given)


def globs_of(skip: Any) -> tuple[str, ...]:
    """The module paths and globs that `skip=` is given.

    Raises:
        OptionError: what was given, what is needed.
    """
    if not isinstance(skip, (str, tuple, list, set, frozenset)):
        raise OptionError(f"skip is {skip!r}, module paths or globs such as 'model.layers.0*' are needed")
    globs = (skip,) if isinstance(skip, str) else tuple(skip)
    if wrong := [glob for glob in globs if not isinstance(glob, str) or not glob]:
        raise OptionError(
            f"skip has {wrong[0]!r}, module paths or globs such as 'model.layers.0*' are needed"
        )
    return globs


def skipped_by(path: str, globs: Iterable[str]) -> str | None:
    """The glob that names the module there, or one that holds it."""
    parts = path.split(".")
    holders = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return next((glob for glob in globs if any(fnmatchcase(holder, glob) for holder in holders)), None)


def check_skip(globs: tuple[str, ...], model: nn.Module) -> None:
    """Raise unless every path or glob names a module of `model`.

    Raises:
        OptionError: what was given, what is needed.
    """
    paths = [path for path, _ in model.named_modules()]
    for glob in globs:
        if not any(fnmatchcase(path, glob) for path in paths):
            raise OptionError(
                f"skip has {glob!r}, which names no module of {type(model).__name__}: a path like "
                f"{paths[-1]!r} is needed, or a glob, see model.named_modules()"
            )


def _name_of(recipe: Any) -> str:
    named = recipe.recipe if isinstance(recipe, PrecisionPlan) else recipe
    return named if isinstance(named, str) else "" if named is None else type(named).__name__
