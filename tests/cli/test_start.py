"""What is imported before the first token: no package that is slow to import and not needed, and not ever more.

Only torch is allowed to be slow. A package that is added to the path of a start is a decision: write it down here.
"""

import gc
import subprocess
import sys

import pytest

from moeflow.cli import lazy
from tests.tiny_mixtral import write_byte_tokenizer, write_tiny_mixtral

UNWANTED = {
    *("transformers", "huggingface_hub", "gguf", "yaml", "scipy", "pandas", "matplotlib", "ray"),
    *("fastapi", "pydantic", "starlette", "uvicorn", "httpx", "prometheus_client", "jinja2"),
    *("sympy", "torch._dynamo", "torch._inductor"),
}
OF_THE_SERVER = {"fastapi", "pydantic", "starlette", "uvicorn", "prometheus_client"}  # and torch's own needs
MAX_MODULES = 560  # beside those of torch and numpy: moeflow's, rich's, a hundred of others

GENERATE = """
import sys
import numpy, torch
before = set(sys.modules)
from moeflow.cli.main import main
try: main()
finally: print(*set(sys.modules) - before)
"""
IMPORT = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*sys.modules)"


def modules_after(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.slow
def test_a_first_token_needs_few_modules(tmp_path):
    write_tiny_mixtral(tmp_path / "model")
    write_byte_tokenizer(tmp_path / "model")
    found = modules_after(
        GENERATE, "generate", tmp_path / "model", "--cache-dir", tmp_path, "-p", "Hi", "--max-tokens", "1"
    )
    assert "moeflow.engine.engine" in found
    assert found & UNWANTED == set()
    assert len(found) <= MAX_MODULES


@pytest.mark.slow
def test_an_engines_process_needs_few_modules():
    found = modules_after(IMPORT, "moeflow.engine.process.main")
    assert "torch" in found
    assert found & (UNWANTED | {"rich", "click"}) == set()


@pytest.mark.slow
def test_a_servers_process_needs_no_torch():
    found = modules_after(IMPORT, "moeflow.server.launch")
    assert found & OF_THE_SERVER == OF_THE_SERVER
    assert found & ((UNWANTED | {"torch"}) - OF_THE_SERVER) == set()


def test_nothing_looks_for_garbage_while_modules_are_imported(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("import gc\nwas_collected = gc.isenabled()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(lazy._MODULES, "was_collected", "slow_module")
    try:
        assert lazy.was_collected is False
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        gc.unfreeze()
        assert lazy.was_collected is False
        assert gc.get_freeze_count() == 0  # what was imported before is not frozen again, with what came since
    finally:
        gc.unfreeze()
