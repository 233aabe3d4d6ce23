"""The shape of the package: who imports whom, who reads the environment, and what is light to import."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import paceline

PACKAGE = Path(paceline.__file__).parent

# Top to bottom: a module imports only modules of lower rows. The package itself is called "paceline".
LAYERS = [
    ["__main__"],
    ["cli"],
    [
        "cli.bench",
        "cli.compare",
        "cli.doctor",
        "cli.profile",
        "cli.project",
        "cli.slurm",
        "cli.train",
        "cli.trained",
        "cli.tune",
        "cli.views",
    ],
    ["cli.arguments", "cli.output"],
    ["bench.bench", "compare", "doctor.doctor", "profile.profile", "trained", "tune.tune"],
    ["bench.worker", "doctor.bandwidth", "doctor.rehearsal", "profile.advice", "profile.task", "tune.ray"],
    ["tune.search", "tune.trial"],
    ["bench.contenders", "doctor.checks", "profile.facts", "profile.trace", "tune.study", "tune.worker"],
    ["doctor.facts", "trainer"],
    ["launch"],
    ["launch.nodes", "launch.ray"],
    ["launch.carrier", "launch.guest", "launch.local", "launch.torchrun"],
    ["launch.hosts", "launch.key", "launch.restarts", "launch.silence"],
    ["launch.site"],
    ["launch.ranks"],
    ["launch.environment", "launch.transport"],
    ["launch.messages", "launch.network", "launch.slurm"],
    ["apply", "export.export", "worker"],
    ["export.hf", "export.traced", "export.weights", "watch"],
    ["export.task", "hang"],
    ["past"],
    ["loop", "own_loop", "scaler"],
    ["evaluate", "step"],
    ["backward", "probe"],
    ["graph", "guard", "reduce", "replica"],
    ["data.feed"],
    ["data.stream_loader"],
    ["data.stream"],
    ["data.loader"],
    ["data.rows"],
    ["data.curriculum"],
    ["data.sources"],
    ["data.augment", "metrics", "optim"],
    ["result"],
    ["checkpoint.saver", "checkpoint.weights"],
    ["checkpoint.state", "resume", "tune.report"],
    ["export.card", "submit", "trust", "failure", "job", "telemetry.follow", "telemetry.track"],
    ["cache", "checkpoint.store", "report.page"],
    ["report.read", "telemetry.mlflow_run", "telemetry.wandb_run"],
    ["telemetry.board", "telemetry.server", "telemetry.tracker", "telemetry.trackers", "zero"],
    ["relocation", "telemetry.sink"],
    ["checkpoint.files", "digest", "ema", "precision", "telemetry.console", "telemetry.events", "telemetry.lines"],
    ["tune.folder", "world"],
    ["run_folder", "tune.goal", "tune.space"],
    ["config"],
    ["config.builder"],
    ["config.mistakes"],
    ["config.schema"],
    ["config.text", "datasets"],
    ["datasets.download", "datasets.reader"],
    ["datasets.catalog"],
    [
        "bench.models",
        "data.batches",
        "data.claims",
        "data.workers",
        "functions",
        "fused_loss",
        "models",
        "nursery",
        "optimizer_checks",
        "predictions",
        "result_file",
        "startup",
        "telemetry.live",
        "room",
        "telemetry.stragglers",
        "travel",
    ],
    [
        "buffers",
        "child",
        "clock",
        "cpu",
        "data.order",
        "data.shard",
        "errors",
        "home",
        "lifeline",
        "memory",
        "muon",
        "origin",
        "paths",
        "progress",
        "randomness",
        "report.phases",
        "report.thin",
        "softmax_kernel",
        "stop",
        "telemetry.event_types",
        "telemetry.pace",
        "telemetry.tail",
        "tune.shares",
        "words",
    ],
    # Packages, which import nothing.
    [
        "paceline",
        "bench",
        "checkpoint",
        "data",
        "doctor",
        "export",
        "profile",
        "recipes",
        "report",
        "telemetry",
        "tune",
    ],
]

# Imports inside functions that go up, each for a reason that is told where it stands.
LAZY_UPWARDS = {
    # Names of metrics and optimizers are checked with the rest, but only torch knows them.
    ("config.mistakes", "metrics"),
    ("config.mistakes", "optim"),
}

# Files of the user's kind: they are run or copied, never imported as a part of the package.
EXAMPLES = sorted([*PACKAGE.glob("recipes/*/*.py"), *PACKAGE.glob("templates/**/*.py")])


class Import(NamedTuple):
    module: str
    name: str | None  # of `from module import name`
    is_lazy: bool


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "paceline"


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py") if path not in EXAMPLES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_in(node: ast.AST, is_lazy: bool = False) -> Iterator[Import]:
    """Every import below a node; not those for type checkers, which never run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, None, is_lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports are not used here"
            yield from (Import(child.module or "", alias.name, is_lazy) for alias in child.names)
        else:
            inside = is_lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports_in(child, inside)


def imported(module: str, *, lazy: bool) -> set[str]:
    """The modules of the package that a module imports, at its top or inside its functions."""
    found = set()
    for entry in imports_in(tree_of(MODULES[module])):
        head, _, rest = entry.module.partition(".")
        if head != "paceline" or entry.is_lazy != lazy:
            continue
        inner = ".".join(filter(None, (rest, entry.name)))
        found.add(inner if inner in MODULES else rest or "paceline")
    return found


def row(module: str) -> int:
    return next(n for n, layer in enumerate(LAYERS) if module in layer)


# --- the flow -----------------------------------------------------------------------------------------------


def test_the_imports_are_seen() -> None:
    assert {"failure", "job", "result", "data.batches", "data.loader", "world"} <= imported("worker", lazy=False)
    lazily = {"apply", "data.sources", "launch", "launch.environment", "replica", "worker", "world"}
    assert imported("trainer", lazy=True) == {*lazily, "telemetry.trackers"}
    # `Result` is for type checkers only.
    assert imported("trainer", lazy=False) == {"config", "errors", "functions", "run_folder", "startup"}


def test_every_module_has_its_place_in_the_layers() -> None:
    assert sorted(module for layer in LAYERS for module in layer) == sorted(MODULES)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_from_lower_layers(module: str) -> None:
    assert {other for other in imported(module, lazy=False) if row(other) <= row(module)} == set()


def test_imports_inside_functions_go_up_only_where_it_is_meant() -> None:
    upwards = {
        (module, other) for module in MODULES for other in imported(module, lazy=True) if row(other) <= row(module)
    }
    assert upwards == LAZY_UPWARDS


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module: imported(module, lazy=False) for module in MODULES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)  # CycleError names the circle


# --- the environment ----------------------------------------------------------------------------------------

MAY_READ_THE_ENVIRONMENT = {
    "home", "launch", "launch.environment", "launch.local", "launch.network", "launch.ranks", "launch.ray",
    "launch.torchrun", "nursery", "tune.shares", "world",
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
    assert readers.pop("worker") == ["os.environ['RANK']"]
    assert readers.pop("profile.task") == ["os.environ.setdefault"]
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
