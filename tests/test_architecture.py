"""The picture in docs/internals/README.md as a test: which folder may import what.

Reads source text only. `violations` takes any tree, so that the rules themselves are tested below on small
trees that break them.
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "moeflow"
INTERNALS = sorted((ROOT / "docs" / "internals").glob("*.md"))
PICTURE = (ROOT / "docs" / "internals" / "README.md").read_text(encoding="utf-8")

FLOORS = {  # of packages, and of their folders that stand apart from the rest of the package
    "core": 1,
    "kernels": 0,
    "checkpoint": 2,
    "kv": 2,
    "parallel": 2,
    "workload": 2,
    "pipeline": 3,
    "text": 3,
    "experts": 4,
    "scheduler": 4,
    "speculation": 4,
    "models": 5,
    "settings": 5,
    "planner": 6,
    "engine": 7,
    "train": 8,
    "processes": 8,
    "bench": 9,
    "server": 10,
    "cli": 11,
}
NESTED = (  # folders and files within a package, lower ones first: each imports only earlier ones of the package
    ("checkpoint/packed",),
    ("pipeline/priority", "pipeline/task", "pipeline/runtime"),
    ("experts/predict",),
    ("experts/cache",),
    ("models/layers",),
    ("parallel/blocks", "parallel/stages", "parallel/placement"),
    ("planner/costs", "planner/hardware", "planner/simulator"),
    ("engine/offload",),
)
APART = (  # folders of one package that do not import from each other
    (
        "server/api/chat",
        "server/api/completions",
        "server/api/messages",
        "server/api/ollama",
        "server/api/pooling",
        "server/api/responses",
    ),
)
TORCH_FREE = (
    "core",
    "kv/block_tables.py",
    "kv/prefix_tree.py",
    "parallel/blocks.py",
    "parallel/placement",
    "parallel/stages.py",
    "parallel/tcp/cluster_token.py",
    "parallel/tcp/refusal_log.py",
    "workload",
    "pipeline/catalog.py",
    "pipeline/priority.py",
    "pipeline/sequential.py",
    "pipeline/runtime",
    "experts/predict",
    "experts/cache",
    "experts/remote/borrowing.py",
    "processes/prefix_affinity.py",
    "scheduler",
    "settings",
    "speculation",
    "planner/simulator",
    "planner/costs/cost_model.py",
    "planner/choices/rank_layout_choice.py",
    "planner/costs/rank_costs.py",
    "planner/costs/rank_shares.py",
    "planner/search/scaling.py",
    "planner/costs/disk_waits.py",
    "planner/costs/expected_routing.py",
    "planner/costs/expected_experts.py",
    "planner/hardware/other_work.py",
    "planner/figures/policy_map.py",
    "planner/figures/roofline_figures.py",
    "planner/costs/hit_curve.py",
    "planner/costs/micro_batches.py",
    "planner/hardware/machine_files.py",
    "planner/costs/model_costs.py",
    "planner/model_files.py",
    "planner/search/milp.py",
    "planner/forecast.py",
    "planner/search/host_search.py",
    "planner/search/objective.py",
    "planner/plan_text.py",
    "planner/search/search.py",
    "planner/search/sensitivity.py",
    "planner/usage.py",
    "planner/costs/roofline.py",
    "planner/costs/routing_profile.py",
    "planner/costs/task_costs.py",
    "checkpoint/packed/writer.py",
    "core/engine_messages.py",
    "engine/client.py",
    "processes/cluster/ray_launcher.py",
    "processes/cluster/orphan_watch.py",
    "processes/cluster/ray_messages.py",
)
STARTS_WITHOUT_TORCH = (  # what a packed model's first token may take; torch is imported when something of it is used
    "llm.py",
    "cli",
    "server",
    "checkpoint",
    "kernels/attention",
    "kernels/cpu",
    "kv",
    "models/layers/decoder.py",
    "models/families/llama.py",
    "models/families/mixtral.py",
    "models/families/olmoe.py",
    "models/families/qwen3_moe.py",
    "planner/planning.py",
    "engine/engine.py",
    "processes/main.py",
    "processes/process_client.py",
    "processes/supervisor.py",
    "engine/speculators",
    "text",
    "train/builtin.py",
)
LATE_IMPORTS_ALLOWED = (
    "__init__.py",
    "kernels/whole_import.py",
    "models/registry.py",
    "cli/main.py",
    "planner/search/search.py",
    "checkpoint/gguf/blocks.py",
)
ENVIRONMENT_ALLOWED = ("server/", "cli/")
ONLY_IN: dict[str, tuple[str, ...]] = {  # module -> where it may be imported; no place: nowhere
    "fastapi": ("server/",),
    "starlette": ("server/",),
    "pydantic": ("server/",),
    "uvicorn": ("server/",),
    "prometheus_client": ("server/",),
    "tokenizers": ("text/",),
    "transformers": (),
    "gguf": ("checkpoint/gguf/blocks.py",),
    "llguidance": ("engine/constraints/",),
    "jinja2": ("text/jinja_template.py",),
    "ray": ("processes/cluster/ray_cluster.py",),
    "zmq": ("processes/", "parallel/tcp/"),
    "opentelemetry": ("server/tracing.py",),
    "grpc": ("server/rpc/",),
    "grpc_health": ("server/rpc/",),
    "google.protobuf": ("server/rpc/",),
    "click": ("cli/",),
    "huggingface_hub": ("checkpoint/hub/hub_client.py", "checkpoint/hub/local_models.py"),
    "httpx2": ("checkpoint/hub/hub_client.py",),
    "httpx": ("cli/", "bench/http_target.py", "server/fronts/forwarding.py"),
    "scipy": ("planner/search/milp.py",),
    "matplotlib": ("bench/plots.py", "bench/plan_plots.py"),
    "torch.distributed": ("parallel/device_group.py",),
    "pickle": (),
    "tests": (),
    "studies": (),
    "examples": (),
}


def is_in(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or (place.endswith("/") and name.startswith(place)) for place in places)


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))  # the walk takes longer than the search


@cache
def imports(tree: ast.AST) -> list[tuple[ast.stmt, str]]:
    """Return every import as a dotted name; `from a import b` as "a.b", since b may be a module."""
    found: list[tuple[ast.stmt, str]] = []
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found += [(node, f"{base}.{alias.name}") for alias in node.names]
    return found


def lines_of_functions(tree: ast.AST) -> set[int]:
    functions = (node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {line for function in functions for line in range(function.lineno, (function.end_lineno or 0) + 1)}


def check_import(name: str, imported: str) -> str | None:
    """Return the error, if any, of an import of `imported` in the file `name`, as far as folders go."""
    for module, places in ONLY_IN.items():
        if (imported + ".").startswith(module + ".") and not is_in(name, places):
            return f"imports {module}, allowed in: {', '.join(places) or 'no file'}"
    parts = imported.split(".")
    if parts[0] == "":
        return "imports relatively; write the full name"
    if parts[0] != "moeflow" or "/" not in name:  # the package face exports names from every level
        return None
    here, there = name.split("/")[0], ".".join(parts[1:2])
    if there not in FLOORS:
        return None if here == "cli" else f"imports {imported}: the package face is for users and the cli"
    if here == there:
        return check_nesting("/".join(name.split("/")[:2]), "/".join(parts[1:3]), imported) or check_apart(
            name.rpartition("/")[0], "/".join(parts[1:]), imported
        )
    if here == "kernels":
        return f"imports {imported}, but kernels know nothing of moeflow"
    if FLOORS[there] >= FLOORS[here]:
        return f"imports {imported}: floor {FLOORS[here]} may not look at floor {FLOORS[there]}"
    return None


def check_nesting(folder: str, target: str, imported: str) -> str | None:
    """Return the error, if any, of an import from `target` in `folder`, both parts of one package."""
    for row in NESTED:
        if folder in row and target not in row[: row.index(folder) + 1]:
            return f"imports {imported}, but {folder} stands below that"
    return None


def check_apart(folder: str, target: str, imported: str) -> str | None:
    """Return the error, if any, of an import of `target` in `folder`, a module of the same package."""
    for row in APART:
        if folder in row and any(target.startswith(f"{other}/") for other in row if other != folder):
            return f"imports {imported}, from which {folder} stands apart"
    return None


def check_file(name: str, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield "has no docstring that says what it does"
    if "/" in name and name.split("/")[0] not in FLOORS:
        yield "stands on no floor: add its folder to FLOORS and to docs/internals/README.md"
        return
    for node, imported in imports(tree):
        problem = check_import(name, imported)
        if problem:
            yield f"line {node.lineno} {problem}"
    yield from (f"line {line} {problem}" for line, problem in check_lateness_and_environment(name, tree))


def check_lateness_and_environment(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    inside = lines_of_functions(tree)
    late = [node.lineno for node, _ in imports(tree) if node.lineno in inside]
    environment = [node.lineno for node, imported in imports(tree) if imported in ("os.environ", "os.getenv")]
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr == "import_module":
            late.append(node.lineno)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            environment.append(node.lineno)
    if not is_in(name, LATE_IMPORTS_ALLOWED):
        yield from ((line, "imports inside a function; only registries may") for line in late)
    if not is_in(name, ENVIRONMENT_ALLOWED):
        yield from ((line, "reads the environment; take it as an argument") for line in environment)


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """Return the files of one import ring, or None."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return None
        for target in sorted(graph[node]):
            ring = visit(target, [*path, node])
            if ring:
                return ring
        done.add(node)
        return None

    return next(filter(None, (visit(node, []) for node in sorted(graph))), None)


def violations(package: Path) -> list[str]:
    """Return everything in the tree that breaks a rule, one line each."""
    trees = {str(file.relative_to(package)): ast.parse(file.read_bytes()) for file in sorted(package.rglob("*.py"))}
    found = [f"{name} {problem}" for name, tree in trees.items() for problem in check_file(name, tree)]
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in trees}
    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        dotted = {imported.removeprefix("moeflow.") for _, imported in imports(tree) if imported.startswith("moeflow.")}
        reached = dotted | {target.rpartition(".")[0] for target in dotted}
        graph[name] = {modules[target] for target in reached if target in modules} - {name}
    ring = find_cycle(graph)
    return [*found, f"import ring: {' -> '.join(ring)}"] if ring else found


def test_the_package_keeps_its_floors():
    assert violations(PACKAGE) == []


def picture(text: str) -> dict[str, int]:
    """Return the folders of the picture and their levels: one at the start of a line, perhaps one behind a bar."""
    floors, floor = {}, 0
    for line in filter(str.strip, text.split("```")[1].splitlines()):
        if line[:4].strip() == "-":
            continue
        floor = int(line[:4].strip() or floor)
        floors |= {part.split()[0]: floor for part in line[4:].split("|")}
    return floors


def named_files(text: str) -> set[str]:
    """Return the files and folders that stand in backticks, one for each choice in braces; * stays."""
    found = set()
    for name in re.findall(r"`([\w./*{},]+(?:\.(?:py|cpp|h)|/))`", text):
        parts = [part.split(",") for part in re.split(r"[{}]", name)]
        found |= {"".join(choice) for choice in itertools.product(*parts)}
    return found


def is_there(name: str) -> bool:
    places = (PACKAGE, ROOT) if "/" in name else (PACKAGE, ROOT / "csrc")
    return any(any(place.glob(name if "/" in name else f"**/{name}")) for place in places)


def test_the_picture_shows_the_folders_that_there_are():
    assert picture(PICTURE) == FLOORS
    assert {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")} == set(FLOORS)


@pytest.mark.parametrize("page", INTERNALS, ids=lambda page: page.name)
def test_the_document_names_no_file_that_is_not_there(page):
    names = named_files(page.read_text(encoding="utf-8"))
    assert [name for name in sorted(names) if not is_there(name)] == []


def test_names_in_a_document_are_found():
    text = "`engine/{a,b}.py` by `csrc/`, `c_*.cpp` and `x.h`, not `plan --graph` or `T.at`"
    assert named_files(text) == {"engine/a.py", "engine/b.py", "csrc/", "c_*.cpp", "x.h"}
    assert is_there("engine/engine.py")
    assert is_there("isa_*.cpp")
    assert not is_there("engine/engin.py")


@pytest.mark.parametrize("places", [TORCH_FREE, STARTS_WITHOUT_TORCH], ids=["control", "start"])
def test_what_needs_no_torch_is_imported_without_it(places):
    files = [
        f for place in places for f in ([PACKAGE / place] if place.endswith(".py") else (PACKAGE / place).rglob("*.py"))
    ]
    modules = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]
    assert len(modules) > 10
    code = "import sys, importlib\nsys.modules['torch'] = None\nfor m in sys.argv[1:]: importlib.import_module(m)"
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("core/a.py", "import moeflow.engine.b", "floor 1 may not look at floor 7"),
        ("kv/a.py", "from moeflow.checkpoint import b", "floor 2 may not look at floor 2"),
        ("experts/a.py", "from moeflow.scheduler.b import C", "floor 4 may not look at floor 4"),
        ("planner/costs/a.py", "from moeflow.planner.resolve import b", "planner/costs stands below that"),
        ("engine/a.py", "from moeflow import LLM", "package face"),
        ("kernels/a.py", "import moeflow.core.units", "kernels know nothing"),
        ("engine/a.py", "from .b import C", "relatively"),
        ("engine/a.py", "import fastapi.routing", "imports fastapi"),
        ("engine/b.py", "from transformers import AutoTokenizer", "imports transformers"),
        ("experts/a.py", "from torch import distributed", "imports torch.distributed"),
        ("checkpoint/a.py", "import pickle", "imports pickle"),
        ("bench/a.py", "from studies.parallel import tables", "imports studies"),
        ("engine/a.py", "def f():\n    import json", "inside a function"),
        ("engine/a.py", "import importlib\nimportlib.import_module('x')", "inside a function"),
        ("engine/a.py", "import os\nx = os.environ['A']", "environment"),
        ("engine/a.py", "from os import getenv", "environment"),
        ("attic/a.py", "x = 1", "no floor"),
        ("server/api/chat/a.py", "from moeflow.server.api.messages.b import C", "stands apart"),
    ],
)
def test_a_broken_rule_is_found(tmp_path, name, source, complaint):
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text(f'"""A module."""\n{source}\n')
    assert [line for line in violations(tmp_path) if complaint in line], violations(tmp_path)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("cli/a.py", "import os\nimport moeflow\nfrom moeflow.engine.b import C\nx = os.environ.get('A')"),
        ("text/tokenizer.py", "from tokenizers import Tokenizer\nfrom moeflow.core import units"),
        ("models/registry.py", "import importlib\ndef f():\n    return importlib.import_module('moeflow.models.a')"),
        ("server/a.py", "from fastapi import FastAPI\nimport torch"),
    ],
)
def test_what_is_allowed_passes(tmp_path, name, source):
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text(f'"""A module."""\n{source}\n')
    assert violations(tmp_path) == []


def test_a_missing_docstring_and_a_ring_are_found(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "a.py").write_text("from moeflow.core.b import X\n")
    (tmp_path / "core" / "b.py").write_text('"""B."""\nfrom moeflow.core import a\n')
    found = violations(tmp_path)
    assert "core/a.py has no docstring that says what it does" in found
    assert "import ring: core/a.py -> core/b.py" in found
