"""The architecture: who may import whom, and how little is imported before there is work to do."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY

PACKAGE = REPOSITORY / "finetune"

# Each row may import from the rows above it and from nothing else.
LAYERS: dict[str, set[str]] = {
    "errors": {"errors"},
    "config": {"config"},
    "leaves": {
        "data.tsv", "data.labels", "data.batching", "data.scan", "data.splits", "data.tokenize", "data.loader",
        "data.check", "data.packing", "data.segments",
        "model", "optim", "loss", "metrics", "checkpoint", "folders", "tracking", "throughput", "console",
        "launch", "distributed", "run_folder", "report", "page", "check_console", "check_page", "interrupt", "finite",
        "micro_batch", "packing", "first_tokens", "dropout", "attention", "cpu_memory", "startup", "features",
    },
    "evaluation": {"evaluation"},
    "loop": {"loop"},
    "before and after": {"plan", "results", "snapshot"},
    "assembly": {"run", "predict", "check", "benchmark"},
    "command line": {"cli"},
    "program": {"__main__"},
}  # fmt: skip

# Leaves that need another leaf, each for one plain thing.
BETWEEN_LEAVES = {
    "data.labels": {"data.tsv"},  # the table that labels are learned from
    "data.scan": {"data.tsv"},  # the table that it goes through
    "data.splits": {"data.tsv", "data.labels", "data.batching", "data.scan"},  # reads both files; holds dev rows back
    "data.loader": {"data.batching", "data.packing", "data.segments", "data.tokenize"},  # rows of a batch, their ids
    "finite": {"data.batching"},  # rows of a step
    "micro_batch": {"data.batching", "data.loader"},  # tries sizes on the longest rows
    "launch": {"cpu_memory"},  # sets it up with the rest
    "attention": {"data.segments", "dropout"},  # where texts are, and what is dropped of their weights
    "first_tokens": {"attention", "data.segments"},  # has a model use that attention
    "packing": {"attention", "data.batching", "data.loader", "first_tokens", "model"},  # tries models on such inputs
    "features": {"data.loader", "distributed", "packing"},  # computes them batch by batch, shared by the processes
    "checkpoint": {"folders"},  # a checkpoint is such a folder with a manifest
    "throughput": {"data.loader"},  # counts what a step took in
    "run_folder": {"data.batching"},  # writes the batch sizes down
    "data.check": {"data.tsv", "data.scan", "data.labels", "data.splits", "data.tokenize"},  # looks at all that is read
    "report": {"page", "run_folder"},  # a page made from that folder, and written like its other files
    "check_console": {"data.check"},  # prints that report
    "check_page": {"page", "data.check", "run_folder"},  # shows it, written like the other page
}

# The command line gives arguments to functions; parts of a run are none of its business.
ALLOWED_TO_CLI = {"errors", "config", "launch", "run", "predict", "check", "benchmark", "report"}

# Leaves take their own section or plain values. This one writes config.yaml.
MAY_SEE_THE_WHOLE_CONFIG = {"run_folder"}


def modules() -> dict[str, Path]:
    """``{"data.tsv": path}`` of all modules but the packages' own ``__init__``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "__init__.py":
            found[".".join(path.relative_to(PACKAGE).with_suffix("").parts)] = path
    return found


def imported_names(path: Path) -> Iterator[tuple[str, str | None]]:
    """``(module, name)`` of every import statement, also of those inside functions; name is None for a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((str(node.module), alias.name) for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, as ``data.tsv``."""
    found = set()
    for module, name in imported_names(path):
        if module.split(".")[0] != "finetune":
            continue
        inner = module.removeprefix("finetune").removeprefix(".")
        as_module = f"{inner}.{name}".strip(".")
        if as_module in MODULES:  # from finetune.data import tsv
            found.add(as_module)
        elif inner:
            found.add(inner)
    return found


MODULES = modules()
GRAPH = {name: own_imports(path) for name, path in MODULES.items()}
LAYER_OF = {name: number for number, names in enumerate(LAYERS.values()) for name in names}
LEAVES = LAYERS["leaves"] & set(MODULES)


def test_the_reader_sees_imports_of_all_kinds(tmp_path: Path) -> None:
    """Or the tests below would hold for want of imports."""
    path = tmp_path / "module.py"
    path.write_text(
        "import finetune.loss\nfrom finetune.errors import DataError\nfrom finetune.data import tsv\n"
        "from finetune import __version__, model\nimport os\n"
        "def late():\n    from finetune.metrics import Metrics\n    import finetune.data.labels as names\n",
        encoding="utf-8",
    )
    assert own_imports(path) == {"loss", "errors", "data.tsv", "model", "metrics", "data.labels"}
    assert GRAPH["run"] >= {"loop", "launch", "data.splits"}
    assert "run" in GRAPH["cli"]  # which is inside a function


def test_every_module_has_its_place() -> None:
    assert set(MODULES) <= set(LAYER_OF), "give a new module its layer in LAYERS"
    assert not [name for name in MODULES if "util" in name or "helper" in name or "common" in name]


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down_only(name: str) -> None:
    for other in GRAPH[name]:
        if name in LEAVES and other in LEAVES:
            assert other in BETWEEN_LEAVES.get(name, ()), f"{name} imports its neighbour {other}"
        else:
            assert LAYER_OF[other] < LAYER_OF[name], f"{name} imports {other}, which stands beside or above it"


def test_the_exceptions_are_still_needed() -> None:
    for name, others in BETWEEN_LEAVES.items():
        assert GRAPH[name] & LEAVES == others


def test_there_are_no_cycles() -> None:
    """Follows from the layers except among the leaves."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in GRAPH[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())
    assert done == set(MODULES)


def test_the_command_line_knows_commands_only() -> None:
    assert GRAPH["cli"] <= ALLOWED_TO_CLI


@pytest.mark.parametrize("name", sorted(LEAVES - MAY_SEE_THE_WHOLE_CONFIG))
def test_leaves_never_see_the_whole_config(name: str) -> None:
    taken = {what for module, what in imported_names(MODULES[name]) if module == "finetune.config"}
    assert not taken & {"Config", "PredictConfig"}


def importers(package: str) -> set[str]:
    return {
        name
        for name, path in MODULES.items()
        if any(module.split(".")[0] == package for module, _ in imported_names(path))
    }


@pytest.mark.parametrize(
    ("package", "who"),
    [
        ("wandb", {"tracking"}),
        ("evaluate", {"metrics"}),
        ("jsonargparse", {"config"}),
        ("psutil", {"launch"}),
        ("tensorboard", set()),
    ],
)
def test_one_place_knows_each_outside_tool(package: str, who: set[str]) -> None:
    assert importers(package) == who


def test_one_place_builds_the_accelerator() -> None:
    builders = [
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Accelerator"
    ]
    assert builders == ["launch"]


# ---------------------------------------------------------------- nothing heavy before there is work

HEAVY = {"torch", "transformers", "datasets", "accelerate", "wandb", "evaluate", "sklearn", "scipy", "pandas", "numpy"}
REPORT = "import json, sys; print('\\n' + json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


def loaded_after(code: str) -> set[str]:
    """Top-level modules in a fresh Python after ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{REPORT}"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_imports_nothing_heavy() -> None:
    loaded = loaded_after("import finetune")
    assert "finetune" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    ("arguments", "code", "needed"),
    [
        (["--help"], 0, "finetune"),
        (["--version"], 0, "finetune"),
        (["train", "--help"], 0, "jsonargparse"),
        (["predict", "--help"], 0, "jsonargparse"),
        (["train", "--config", "demo", "--print_config"], 0, "jsonargparse"),
        (["train", "--train.sed", "1"], 2, "jsonargparse"),  # mistakes are said at once too
        (["train"], 2, "jsonargparse"),
        (["train", "--config", "demo", "--profile", "no_such_profile"], 2, "psutil"),
        (["no_such_command"], 2, "psutil"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands_that_compute_nothing_import_nothing_heavy(arguments: list[str], code: int, needed: str) -> None:
    loaded = loaded_after(f"from finetune.cli import main\nassert main({arguments!r}) == {code}")
    assert needed in loaded
    assert not loaded & HEAVY
