import ast
import importlib
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

import moeflow
from moeflow.kernels.on_demand import on_demand

SOURCE = """
import signal
signal.raise_signal(signal.SIGINT)
answer = 42
"""
IMPORTER = """
from moeflow.kernels.on_demand import on_demand
with on_demand(__name__):
    import {name}
    from late_package import late_module as renamed
"""


@pytest.fixture
def import_late(tmp_path, monkeypatch):
    """Return a module's proxy: a module imports it on demand."""
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package" / "late_module.py").write_text("answer = 7", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(name, source):
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        (tmp_path / "the_importer.py").write_text(IMPORTER.format(name=name), encoding="utf-8")
        importer = importlib.import_module("the_importer")
        assert name not in sys.modules
        return importer, getattr(importer, name)

    yield run
    for name in ("the_importer", "late_package", "late_package.late_module"):
        sys.modules.pop(name, None)


def test_an_interrupt_while_a_module_is_imported_comes_after_it(import_late):
    _, module = import_late("interrupted_module", SOURCE)
    with pytest.raises(KeyboardInterrupt):
        _ = module.answer
    assert sys.modules.pop("interrupted_module").answer == 42  # whole


def test_a_change_in_a_module_is_seen(import_late, monkeypatch):
    importer, module = import_late("changing_module", "answer = 1")
    assert module.answer == 1
    monkeypatch.setattr(sys.modules["changing_module"], "answer", 2)
    assert module.answer == 2
    del sys.modules["changing_module"]
    assert "late_package.late_module" not in sys.modules
    assert importer.renamed.answer == 7


def test_others_import_at_once_while_a_block_runs():
    before, found = __import__, []
    with on_demand("the_importer"):
        thread = threading.Thread(target=lambda: found.append(__import__("json", fromlist=["loads"])))
        thread.start()
        thread.join()
    assert found[0].loads("1") == 1
    assert found[0] is sys.modules["json"]
    with pytest.raises(ValueError, match="broken"), on_demand("the_importer"):
        raise ValueError("broken")
    assert __import__ is before


def test_blocks_name_modules_only():
    names = set()
    for file in Path(moeflow.__file__).parent.rglob("*.py"):
        for block in (node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.With)):
            if ast.unparse(block.items[0]) == "on_demand(__name__)":
                for node in block.body:
                    package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                    names |= {package + alias.name for alias in node.names}
    assert "moeflow.engine.expert_store" in names
    assert [name for name in sorted(names) if find_spec(name) is None] == []
