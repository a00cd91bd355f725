"""Transformer Engine as tests/te_contract has recorded it: what is built for TE fits it, on any machine."""

import ast
import difflib
import inspect
import json
from collections.abc import Iterator
from inspect import Parameter, Signature
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_transform import PIPELINE, Rule
from te_transform.backends import _stand_in, cudnn
from te_transform.backends import torch as plain
from te_transform.rule import ask
from tests.te_contract import record

CONTRACT = json.loads(record.FILE.read_text(encoding="utf-8"))
TE = record.source("te")
FORMS = {record.title(name, given): (name, given) for name, given in record.argument_sets()}
AGAIN = "run `python tests/te_contract/record.py` where TE is installed"

each_form = pytest.mark.parametrize("form", FORMS)


def signature(recorded: dict[str, str]) -> Signature:
    """The signature that was recorded, to bind arguments to."""
    parameters, kind = [], Parameter.POSITIONAL_OR_KEYWORD
    many = {1: Parameter.VAR_POSITIONAL, 2: Parameter.VAR_KEYWORD}
    for name, default in recorded.items():
        if name.startswith("*"):
            kind = Parameter.KEYWORD_ONLY
        if name != "*":
            given = Parameter.empty if default in ("required", "any") else default
            parameters.append(Parameter(name.strip("*"), many.get(name.count("*"), kind), default=given))
    return Signature(parameters)


def constructor(name: str) -> Signature:
    return signature(CONTRACT["modules"][name]["__init__"])


# The modules


@each_form
def test_the_torch_backends_parameters_are_tes(form: str) -> None:
    module = record.built(plain, *FORMS[form])
    assert record.tensors(module) == CONTRACT["parameters"][form]


@each_form
def test_the_state_dict_is_tes_but_for_its_extra_state(form: str) -> None:
    names = list(record.built(plain, *FORMS[form]).state_dict())
    assert CONTRACT["state_dict"][form].split() == [*names, "_extra_state"]


def test_every_form_is_recorded_and_every_activation_is_one_that_te_has() -> None:
    assert CONTRACT["parameters"].keys() == FORMS.keys(), AGAIN
    ours = {*plain.ACTIVATIONS.values(), *plain.GATED_ACTIVATIONS.values()}
    assert {given.get("activation") for _, given in FORMS.values()} - {None} == ours
    assert ours <= set(CONTRACT["activations"])  # TE itself looks at the name at the first call only


# What the rules build


def operations(bias: bool, norm: str, gamma: bool, activation: str) -> dict[str, Any]:
    """Roles as a match has them, for every rule."""

    def linear(outputs: int, inputs: int) -> SimpleNamespace:
        weight = torch.empty(outputs, inputs, device="meta", dtype=torch.bfloat16)
        return SimpleNamespace(weight=weight, bias=weight[:, 0] if bias else None)

    return {
        "linear": linear(48, 32),
        "linears": (linear(48, 32), linear(16, 32)),
        "fc1": linear(96, 32) if activation in plain.GATED_ACTIVATIONS else linear(48, 32),
        "fc2": linear(32, 48),
        "norm": SimpleNamespace(word=norm, eps=1e-6, zero_centered_gamma=gamma),
        "attention": SimpleNamespace(),
        "activation": SimpleNamespace(word=activation),
    }


def calls(rule: Rule) -> list[tuple[str, tuple, dict[str, Any]]]:
    """The constructor calls of a rule's build, made on the torch backend for every form of its operations."""
    made = []

    def noting(name: str) -> Any:
        def build(*args: Any, **kwargs: Any) -> torch.nn.Module:
            made.append((name, args, kwargs))
            return getattr(_stand_in(plain), name)(*args, **kwargs)

        return build

    noted = {name: noting(name) for name in (*record.FUSED, "DotProductAttention")}
    backend = SimpleNamespace(**{**vars(_stand_in(plain)), **noted})
    acts = [(word, "no") for word in plain.ACTIVATIONS]
    acts += [(word, half) for word in plain.GATED_ACTIVATIONS for half in ("first half", "second half")]
    forms = product((True, False), ("layer_norm", "rms_norm"), (True, False), acts)
    for bias, norm, gamma, (word, gated) in forms:
        ask(rule.build, {**operations(bias, norm, gamma, word), "backend": backend, "gated": gated})
    return made


@pytest.mark.parametrize("rule", PIPELINE, ids=lambda rule: rule.name)
def test_the_arguments_of_the_rules_are_arguments_of_te(rule: Rule) -> None:
    made = calls(rule)
    assert made
    for name, args, kwargs in made:
        if name == "DotProductAttention":  # a class of te.py's own, which is made from nothing
            assert (args, kwargs) == ((), {})
            continue
        bound = constructor(name).bind(*args, **kwargs).arguments
        assert bound == inspect.signature(getattr(plain, name)).bind(*args, **kwargs).arguments
        assert bound["device"] == "meta"  # the word: TE puts modules on torch.device("meta") into memory


# What backends/te.py uses


def te_calls() -> Iterator[tuple[str, Signature, ast.Call]]:
    """Each call that te.py makes of TE: of its functions, constructors, forwards, and methods."""
    names = record.read_of_te(TE)
    for node in filter(None, map(called, ast.walk(TE))):
        spelled = ast.unparse(node.func)
        homes = names.get(spelled, ())
        if spelled.endswith(".init_fp8_metadata"):
            homes = ("transformer_engine.pytorch.Linear.init_fp8_metadata",)
        for home in homes:
            if CONTRACT["functions"].get(home):
                yield spelled, signature(CONTRACT["functions"][home]), node
            elif home.rpartition(".")[2] in CONTRACT["modules"]:
                yield spelled, constructor(home.rpartition(".")[2]), node
    for part in TE.body:
        if getattr(part, "name", None) in ("_Fused", *record.FUSED):
            for node in filter(None, map(called, ast.walk(part))):
                method = ast.unparse(node.func).removeprefix("super().")
                if method in ("__init__", "forward"):
                    for name in record.FUSED if part.name == "_Fused" else (part.name,):
                        yield f"{name}.{method}", signature(CONTRACT["modules"][name][method]), node


def called(node: ast.AST) -> ast.Call | None:
    return node if isinstance(node, ast.Call) else None


def test_te_py_calls_te_with_arguments_that_it_has() -> None:
    seen = set()
    for spelled, recorded, node in te_calls():
        args = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
        kwargs = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        whole = len(args) + len(kwargs) == len(node.args) + len(node.keywords)
        (recorded.bind if whole else recorded.bind_partial)(*args, **kwargs)
        seen.add(spelled)
    ours = {f"{name}.{method}" for name in record.FUSED for method in ("__init__", "forward")}
    assert seen >= {"te.autocast", *ours}


def test_every_function_of_te_that_te_py_calls_is_recorded() -> None:
    names = record.read_of_te(TE)
    called = {ast.unparse(node.func) for node in ast.walk(TE) if isinstance(node, ast.Call)}
    functions = {name for name in called & names.keys() if not name.startswith(("_State.", "recipes."))}
    missing = {
        name
        for name in functions
        if not any(
            home in CONTRACT["functions"] or home.rpartition(".")[2] in CONTRACT["modules"]
            for home in names[name]
        )
    }
    assert not missing, f"add {missing} to FUNCTIONS in tests/te_contract/record.py and {AGAIN}"


INSTEAD = {"te.fp8_autocast": "te.autocast"}  # te.py asks for the first only where TE lacks the second


def test_everything_that_te_py_reads_of_te_was_there() -> None:
    names = record.read_of_te(TE)
    there = {name for name, homes in names.items() if any(CONTRACT["read"].get(home) for home in homes)}
    assert {name for name in names.keys() - there if INSTEAD.get(name) not in there} == set(), AGAIN
    assert len(there) > 10


@pytest.mark.parametrize("name", record.FUSED)
def test_every_attribute_that_is_read_of_tes_modules_was_there(name: str) -> None:
    read = record.read_of_modules()[name]
    assert {attribute for attribute in read if not CONTRACT["read"].get(f"{name}().{attribute}")} == set(), (
        AGAIN
    )
    assert {"fp8_meta", "_fp8_workspaces"} <= read


@pytest.mark.parametrize("name", record.FUSED)
def test_tes_modules_have_no_attributes_of_the_names_that_te_py_gives_its_own(name: str) -> None:
    # TE's own weight_names is the same list, and its activation has another type while it is called
    assert set(CONTRACT["overridden"][name]) <= {"weight_names", "activation"}
    assert {"plain_calls", "kept", "normalised"} <= record.given_to_modules(name)


def test_recipes_have_the_fields_that_te_py_reads() -> None:
    for recipe in CONTRACT["recipes"].values():
        assert "max_fwd" in recipe["fp8_format"]
        assert "max_bwd" in recipe["fp8_format"]
    assert CONTRACT["recipes"]["DelayedScaling"]["margin"] == "0"


def test_the_stand_ins_attention_is_te_pys() -> None:
    imported = [n for n in TE.body if isinstance(n, ast.ImportFrom) and n.module == cudnn.__name__]
    assert [alias.name for n in imported for alias in n.names] == ["DotProductAttention"]
    assert _stand_in(plain).DotProductAttention is cudnn.DotProductAttention


# Where TE is


def test_recording_again_gives_the_file() -> None:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # its libraries are loaded in there, and each fails in its own way
        pytest.skip(f"Transformer Engine cannot be imported ({type(error).__name__}: {error})")
    file = record.FILE.read_text(encoding="utf-8").splitlines()
    changes = difflib.unified_diff(file, record.text(record.contract()).splitlines(), "recorded", "here", n=1)
    assert not (lines := [*changes]), "\n".join([f"TE here is another: {AGAIN}", *lines])
