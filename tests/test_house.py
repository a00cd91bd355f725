"""The rooms of the house: who may import whom, and what is done in one place only."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("graph", "canonicalize", "backends", "plan", "passes", "execution", "report", "verify")
EXTRAS = ("command_line", "experts", "fp8_only", "integrations", "page", "parallel", "profile", "training")
# May name extras: a public name imports its module when it is first read, python -m runs __main__, and the
# pipeline has the rules of extras.
ROOTS = ("te_transform", "te_transform.__main__", "te_transform.pipeline")
FRONT_DOOR = len(ROOMS)  # the files of te_transform itself, right of all rooms

# What changes an fx graph: methods of graphs and nodes, and attributes of nodes.
EDITS = {
    "call_function", "call_method", "call_module", "create_node", "eliminate_dead_code", "erase_node",
    "get_attr", "graph_copy", "insert_arg", "inserting_after", "inserting_before", "node_copy", "output",
    "placeholder", "prepend", "replace_all_uses_with", "replace_input_with", "update_arg", "update_kwarg",
}  # fmt: skip
NODE = {"args", "kwargs", "op", "target"}

# Functions of torch that make a tensor of the default dtype, on the default device, unless they are told.
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace",
    "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """The files of te_transform by the names they are imported by; the catalogue stands at the top."""
    files = [*(ROOT / "te_transform").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]
    found = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "te_transform" else ("te_transform", *parts)
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def imports(name: str) -> Iterator[tuple[str, int]]:
    """The modules of te_transform that a module imports, anywhere in it, with the lines."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} is a relative import, full names are needed"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            named = [full if full in modules() else node.module for full in inside]
        else:
            continue
        yield from ((found, node.lineno) for found in dict.fromkeys(named))


def room(name: str) -> int:
    inside = name.split(".")[1:2]
    if inside and inside[0] in EXTRAS:
        return FRONT_DOOR + 1
    return ROOMS.index(inside[0]) if inside and inside[0] in ROOMS else FRONT_DOOR


def title(place: int) -> str:
    return (*ROOMS, "the front doors", "the extras")[place]


def test_there_are_no_other_rooms() -> None:
    folders = {file.parent.name for file in (ROOT / "te_transform").glob("*/*.py")}
    assert folders <= {*ROOMS, *EXTRAS}


@pytest.mark.parametrize("name", modules())
def test_the_core_never_imports_an_extra(name: str) -> None:
    told = [(node.value, node.lineno) for node in ast.walk(tree(name)) if is_text(node)]  # of import_module()
    named = [(found, line) for found, line in (*imports(name), *told) if is_extra(found)]
    wrong = [f"{modules()[name]}:{line} imports {found}" for found, line in named]
    assert is_extra(name) or name in ROOTS or not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", modules())
def test_classes_have_ten_fields_at_most(name: str) -> None:
    """Except frozen records and protocols, which have no state: options, results, what a backend has."""
    classes = (node for node in ast.walk(tree(name)) if isinstance(node, ast.ClassDef))
    found = ((c, fields(c)) for c in classes if not is_record(c))
    large = [(c, names) for c, names in found if len(names) > 10]
    told = (f"{modules()[name]}:{c.lineno} {c.name} has {len(n)}: {', '.join(n)}" for c, n in large)
    assert not large, "\n".join(told)


def is_record(kind: ast.ClassDef) -> bool:
    """Return True if a class is a frozen dataclass or a protocol."""
    frozen = any("frozen=True" in ast.unparse(decorator) for decorator in kind.decorator_list)
    return frozen or any(is_named(base, {"Protocol"}) for base in kind.bases)


def fields(kind: ast.ClassDef) -> list[str]:
    """The attributes that a class declares, or sets in its __init__()."""
    declared = [node.target.id for node in kind.body if isinstance(node, ast.AnnAssign)]
    inits = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    stored = (node for init in inits for node in ast.walk(init) if isinstance(node, ast.Attribute))
    own = [node.attr for node in stored if isinstance(node.ctx, ast.Store) and is_self(node.value)]
    return [*dict.fromkeys([*declared, *own])]


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_extra(name: str) -> bool:
    return name.split(".")[:1] == ["te_transform"] and bool({*name.split(".")[1:2]} & {*EXTRAS})


@pytest.mark.parametrize("name", modules())
def test_imported_modules_exist(name: str) -> None:
    ours = [(found, line) for found, line in imports(name) if found.split(".")[0] == "te_transform"]
    wrong = [f"{modules()[name]}:{line} imports {found}" for found, line in ours if found not in modules()]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", modules())
def test_imports_go_left(name: str) -> None:
    wrong = [
        f"{modules()[name]}:{line} imports {found}: {title(room(found))} is right of {title(room(name))}"
        for found, line in imports(name)
        if found in modules() and room(found) > room(name) and name not in ROOTS
    ]
    assert not wrong, "\n".join(wrong)


def test_no_imports_go_in_circles() -> None:
    graph = {name: {found for found, _ in imports(name) if found in modules()} for name in modules()}
    while leaves := [name for name, needed in graph.items() if not needed & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"these import each other: {', '.join(sorted(graph))}"


@pytest.mark.parametrize("name", modules())
def test_transformer_engine_is_imported_in_one_folder(name: str) -> None:
    lines = [line for found, line in imports(name) if found.split(".")[0].startswith("transformer_engine")]
    inside = f"{name}.".startswith("te_transform.backends.te.")
    assert not lines or inside, f"{modules()[name]}:{lines[0]} imports it too"


@pytest.mark.parametrize("name", modules())
def test_private_names_stay_at_home(name: str) -> None:
    ours, wrong = ours_in(name), []
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "te_transform":
            wrong += [(alias.name, node.lineno) for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.Attribute) and is_named(node.value, ours) and is_private(node.attr):
            wrong.append((node.attr, node.lineno))
    assert not wrong, "\n".join(f"{modules()[name]}:{line} uses {what}" for what, line in wrong)


def ours_in(name: str) -> set[str]:
    """Return a module's names for the modules of te_transform that it imports."""
    froms = [node for node in ast.walk(tree(name)) if isinstance(node, ast.ImportFrom)]
    pairs = [(alias, f"{node.module}.{alias.name}") for node in froms for alias in node.names]
    return {alias.asname or alias.name for alias, full in pairs if full in modules()}


def is_self(value: ast.expr) -> bool:
    return is_named(value, {"self"})


def is_named(value: ast.expr, names: set[str]) -> bool:
    return isinstance(value, ast.Name) and value.id in names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("name", modules())
def test_no_state_is_global_or_an_attribute_of_a_tensor(name: str) -> None:
    """State of tensors is in a TensorRegistry, state of a context in a ContextVar or a Switch."""
    nodes = [*ast.walk(tree(name))]
    wrong = [(node.lineno, "has a global statement") for node in nodes if isinstance(node, ast.Global)]
    wrong += [
        (node.lineno, f"sets .{node.attr}")
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr[:4] == "_te_"
    ]
    assert not wrong, "\n".join(f"{modules()[name]}:{line} {what}" for line, what in wrong)


@pytest.mark.parametrize("name", modules())
def test_graphs_are_edited_in_one_file(name: str) -> None:
    wrong = [f"{modules()[name]}:{line} {what}" for what, line in edits(name)]
    assert not wrong or name == "te_transform.graph.edit", "\n".join(wrong)


def edits(name: str) -> Iterator[tuple[str, int]]:
    """Yield a module's edits of graphs, with the lines. Functions of ours may have equal names."""
    ours = ours_in(name)
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in EDITS and not is_named(node.func.value, ours):
                yield f"calls {node.func.attr}()", node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [(f"sets .{node.attr}", node.lineno)] * (node.attr in NODE and not is_self(node.value))


@pytest.mark.parametrize("name", modules())
def test_functions_are_short(name: str) -> None:
    functions = [node for node in ast.walk(tree(name)) if isinstance(node, ast.FunctionDef)]
    long = [f for f in functions if length(f) > 40]
    assert not long, "\n".join(f"{modules()[name]}:{f.lineno} {f.name} has {length(f)} lines" for f in long)


def length(function: ast.FunctionDef) -> int:
    """The lines of a function's body, without those of its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("name", modules())
def test_tensors_have_a_dtype_and_a_device(name: str) -> None:
    """Except in the examples of rules, which are models as users write them."""
    wrong = [line for line in factories(tree(name)) if line not in lines_of_examples(name)]
    assert not wrong, f"{modules()[name]}:{wrong[0]} makes a tensor, pass dtype= and device="


def factories(body: ast.AST) -> Iterator[int]:
    """Yield the lines of the calls that leave the dtype or the device to the defaults of the process."""
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            made = is_named(node.func.value, {"torch"}) and node.func.attr in FACTORIES
            if made and not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}:
                yield node.lineno


def lines_of_examples(name: str) -> set[int]:
    """Return the lines of a rule's example: a class Example, a function example(), an argument example=."""
    found = set()
    for node in ast.walk(tree(name)):
        of_class = isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name.lower() == "example"
        if of_class or (isinstance(node, ast.keyword) and node.arg == "example"):
            found.update(range(node.lineno, node.end_lineno + 1))
    return found


def test_no_file_of_tests_imports_another_one() -> None:
    """Fixtures of several files are in conftest.py, helpers in files that pytest does not collect."""
    wrong = []
    for file in (ROOT / "tests").rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for node in (node for node in nodes if isinstance(node, ast.ImportFrom)):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if parts[0] == "tests" and any(part.startswith("test_") for part in parts):
                wrong.append(f"{file}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


# Names that several files define by intent: an interface and what implements it.
SAME_IN_RULES = {"RULE", "refuse", "build", "Example"}  # of each rule
SAME_IN_BACKENDS = {
    "ACTIVATIONS", "CrossEntropy", "DotProductAttention", "GATED_ACTIVATIONS", "GATES", "HAS_BIAS",
    "HAS_KERNELS", "LayerNormLinear", "LayerNormMLP", "Linear", "NAME", "PaddedLinear", "Rotary",
    "WideLinear", "multiple", "recipe_now", "recipe_of",
}  # fmt: skip
SAME_ANYWHERE = {"M", "P", "T", "log"}
PUBLIC_NAMES = {"Linear"}  # a pattern of te_transform.rules has the name of the op that it matches


def test_a_name_has_one_meaning() -> None:
    """Private names too. An operation and its kernel share a name: x.py and x_kernel.py."""
    homes: dict[str, set[str]] = {}
    for name in modules():
        for defined in definitions(tree(name)):
            homes.setdefault(defined, set()).add(name.removesuffix("_kernel"))
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    allowed = SAME_IN_RULES | SAME_IN_BACKENDS | SAME_ANYWHERE | PUBLIC_NAMES
    wrong = {name: found for name, found in twice.items() if name not in allowed}
    assert not wrong, "\n".join(f"{name}: {', '.join(sorted(found))}" for name, found in wrong.items())


def definitions(body: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines at its top level."""
    for node in body.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            inside = (node for target in targets for node in ast.walk(target))
            names = [node.id for node in inside if isinstance(node, ast.Name) and is_stored(node)]
        else:
            continue
        yield from (name for name in names if not name.startswith("__"))


def is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)
