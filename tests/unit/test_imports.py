"""The shape of the package: who imports whom, who reads the environment, and what is light to import."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import paceline

PACKAGE = Path(paceline.__file__).parent

# Rooms, top to bottom: a module imports modules of its own room and of lower ones. A module at the package's root is a
# room of its own; the package itself is called "paceline".
ROOMS = [
    "__main__", "cli", "tools", "trainer", "keywords", "results", "launch", "worker", "mirror", "checkpoint", "engine",
    "data", "observe", "hub", "run", "world", "config", "system", "callbacks", "formatting", "errors", "user_code",
    "paceline",
]  # fmt: skip

# Imports that go up, each inside a function and for a reason.
UPWARDS = {
    # Methods of results that people look for; the tools themselves use what anybody can.
    ("results.load", "tools.export.export"),
    ("results.result", "tools.report.inline"),
}

# Files of the user's kind: they are run or copied, never imported as a part of the package.
RECIPES = PACKAGE / "recipes" / "__init__.py"
EXAMPLES = sorted([*PACKAGE.glob("recipes/*/*.py"), *PACKAGE.glob("templates/**/*.py")])


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "paceline"


MODULES = {
    name_of(path): path for path in PACKAGE.rglob("*.py") if path not in EXAMPLES and "recipes" not in path.parts
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


class Import(NamedTuple):
    module: str
    name: str | None  # of `from module import name`
    is_loaded: bool  # with the module that has it: not inside a function, by a string or for type checkers


def imports_in(node: ast.AST, is_loaded: bool = True) -> Iterator[Import]:
    """Every import below a node, also those inside functions, for type checkers, and by a string."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, None, is_loaded) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports are not used here"
            yield from (Import(child.module or "", alias.name, is_loaded) for alias in child.names)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            module = child.value.partition(":")[0]  # also of "module:function"
            if module.startswith("paceline.") and module.partition(".")[2] in MODULES:
                yield Import(module, None, is_loaded=False)
        else:
            is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            is_later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports_in(child, is_loaded and not is_for_types and not is_later)


@cache
def imported(module: str, *, is_loaded: bool | None = None) -> set[str]:
    """The modules of the package that a module imports: all, or only those that are loaded with it or later."""
    found = set()
    for entry in imports_in(tree_of(MODULES[module])):
        head, _, rest = entry.module.partition(".")
        if head == "paceline" and is_loaded in (None, entry.is_loaded):
            inner = ".".join(filter(None, (rest, entry.name)))
            found.add(inner if inner in MODULES else rest or "paceline")
    return found


def row(module: str) -> int:
    return ROOMS.index(module.partition(".")[0])


# --- the flow -----------------------------------------------------------------------------------------------


def test_the_imports_are_seen() -> None:
    assert {"observe.failures", "worker.build", "world"} <= imported("worker.main", is_loaded=True)
    assert {"launch", "engine.config_checks"} <= imported("trainer", is_loaded=False)  # inside a function
    assert "results.result" not in imported("trainer", is_loaded=True)
    assert "run.outcome" in imported("launch", is_loaded=False)  # for type checkers
    assert "worker.main" in imported("launch.fork_server", is_loaded=False)  # by a string
    assert "worker.main" in imported("launch.setup", is_loaded=False)  # by the name of a function
    assert "engine.muon" in imported("paceline")


def test_every_room_has_its_row() -> None:
    assert {module.partition(".")[0] for module in MODULES} == set(ROOMS)


def test_few_modules_are_at_the_root() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 8


@pytest.mark.parametrize("room", [room for room in ROOMS if (PACKAGE / room).is_dir()])
def test_a_room_says_what_it_owns(room: str) -> None:
    about = ast.get_docstring(tree_of(PACKAGE / room / "__init__.py"))
    assert about is not None
    assert len(about.splitlines()) >= 3


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"paceline"}))
def test_a_module_imports_only_from_its_room_and_lower_ones(module: str) -> None:
    upwards = {other for other in imported(module) if row(other) < row(module)}
    assert {(module, other) for other in upwards} <= UPWARDS


def test_no_exception_is_left_over() -> None:
    assert {(module, other) for module, other in UPWARDS if other in imported(module, is_loaded=False)} == UPWARDS


def test_modules_that_begin_with_an_underscore_stay_in_their_room() -> None:
    for module in MODULES:
        for other in imported(module):
            is_private = other.rpartition(".")[2].startswith("_") and other != "__main__"
            assert row(other) == row(module) or not is_private


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module: imported(module, is_loaded=True) for module in MODULES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)  # CycleError names the circle


# --- the tools ----------------------------------------------------------------------------------------------

# What users have: the public names, and the modules that build a config, read a run folder, its events and its results.
FOR_TOOLS = {
    "paceline", "callbacks", "config", "errors", "formatting", "observe.event_types", "observe.events", "results",
    "run", "system", "trainer",
}  # fmt: skip

# Rooms and modules that a tool needs besides, each with its reason.
INSIDE_TOOLS = {
    "tools.tune": {
        # A trial process starts the process that imports torch for its ranks before it does so itself, a search takes
        # signals as a launcher does, and a Ray cluster is found as for a run.
        "launch",
        # Follows events.jsonl while a trial writes it; a trial that is resumed replaces the file.
        "observe.tail",
    },
    # The doctor checks lanes, machines, trackers and devices as a launcher does.
    "tools.doctor": {"data.batches", "launch.machines", "observe.sinks.registry", "world"},
    # The profiler measures the parts of a step in ranks of its own.
    "tools.profile": {"checkpoint", "data", "engine", "launch", "observe", "worker", "world"},
    "tools.plan": {
        # Measures the parts of a step in ranks of its own, whose loop has a saver.
        "checkpoint.saver",
        "checkpoint.store",
        "data",
        "engine",
        "launch",
        "observe",
        "worker",
        "world",
        # Computes the time that failures cost with the interval that a run would choose.
        "checkpoint.interval",
        # Draws its page as the report does.
        "tools.report",
    },
    # An export writes and fingerprints weights as a run does, and normalises images as an evaluation does.
    "tools.export": {"checkpoint.weights", "data.augment", "data.feed", "engine.digest"},
}


def is_within(module: str, names: Collection[str]) -> bool:
    """Whether a module is one of these, or in a package that is one of these."""
    return any(f"{module}.".startswith(f"{name}.") for name in names)


def imported_by_tool(tool: str) -> set[str]:
    """The modules outside a tool, and beyond those for all tools, that the modules of the tool import."""
    modules = [module for module in MODULES if is_within(module, [tool])]
    return {other for module in modules for other in imported(module) if not is_within(other, {*FOR_TOOLS, tool})}


@pytest.mark.parametrize("tool", sorted({".".join(name.split(".")[:2]) for name in MODULES if name[:6] == "tools."}))
def test_tools_use_only_what_users_have(tool: str) -> None:
    assert [other for other in imported_by_tool(tool) if not is_within(other, INSIDE_TOOLS.get(tool, ()))] == []


def test_no_exception_of_a_tool_is_left_over() -> None:
    for tool, names in INSIDE_TOOLS.items():
        assert [name for name in names if not any(is_within(other, [name]) for other in imported_by_tool(tool))] == []


# --- the architecture ---------------------------------------------------------------------------------------

NAMED = re.compile(r"`([a-z_/]+\.py)(?:: (\w+))?`")  # `worker/loop.py`, `worker/loop.py: Loop`


def test_files_and_names_in_the_architecture_exist() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = [(PACKAGE / file, name) for file, name in NAMED.findall(text) if not file.startswith("tests/")]
    assert len(named) >= 15  # else this test has gone blind
    missing = [path for path, _ in named if not path.exists()]
    assert missing == []
    for path, name in named:
        defined = {getattr(node, "name", None) for node in ast.walk(tree_of(path))}
        assert not name or name in defined, f"{path.name} has no {name}"


# --- the environment ----------------------------------------------------------------------------------------

MAY_READ_THE_ENVIRONMENT = {
    "launch", "launch.environment", "launch.fork_server", "launch.kubernetes", "launch.network", "launch.processes",
    "launch.ray", "launch.ray_cluster", "system.allocator", "system.cores", "system.home", "tools.tune.shares", "world",
}  # fmt: skip
OF_THE_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def uses_of_environment(module: str) -> list[str]:
    """The expressions of `os.environ`, `os.getenv` and their kin in a module."""
    tree = tree_of(MODULES[module])
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    uses = [
        ast.unparse(parents[node])
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in OF_THE_ENVIRONMENT
    ]
    named = [entry for entry in imports_in(tree) if entry.module == "os" and entry.name in OF_THE_ENVIRONMENT]
    return uses + [f"from os import {entry.name}" for entry in named]


def test_the_environment_is_read_only_by_launchers_and_the_world() -> None:
    readers = {module: uses for module in MODULES if (uses := uses_of_environment(module))}
    assert "world" in readers  # else this test has gone blind
    assert readers.pop("worker.main") == ["os.environ['RANK']"]
    assert readers.pop("tools.profile.task") == ["os.environ.setdefault"]
    assert set(readers) <= MAY_READ_THE_ENVIRONMENT


# --- what is light, and what is public ----------------------------------------------------------------------


@pytest.mark.parametrize("module", ["paceline", "paceline.cli", "paceline.config", "paceline.trainer"])
def test_importing_it_does_not_import_torch(module: str) -> None:
    command = f"import sys, {module}; print([name for name in ('torch', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert paceline.errors is importlib.import_module("paceline.errors")
    assert not hasattr(paceline, "Trainr")


def test_the_public_names_are_where_type_checkers_look_for_them() -> None:
    tree = tree_of(MODULES["paceline"])
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    assert sorted(entry.name or "" for entry in imports_in(block)) == sorted(paceline.__all__)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_examples_use_public_names_only(path: Path) -> None:
    used = [entry for entry in imports_in(tree_of(path)) if entry.module.partition(".")[0] == "paceline"]
    private = [e for e in used if e.module != "paceline" or e.name not in {None, *paceline.__all__}]
    assert private == []
