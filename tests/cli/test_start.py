"""Imports before the first token: no slow and unneeded package, and a bounded number of modules.

A packed model needs no torch; for others that alone is allowed to be slow. A package that is added to the path of a
start is a decision: write it down here.
"""

import gc
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from moeflow.cli import lazy
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import pack
from tests.packed import pack_beside
from tests.tiny_granite_hybrid import write_tiny_granite_hybrid
from tests.tiny_mixtral import write_byte_tokenizer, write_tiny_mixtral

UNWANTED = {
    *("transformers", "huggingface_hub", "gguf", "yaml", "scipy", "pandas", "matplotlib", "ray"),
    *("fastapi", "pydantic", "starlette", "uvicorn", "httpx", "prometheus_client", "jinja2"),
    *("sympy", "torch._dynamo", "torch._inductor"),
}
needs_extension = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
OF_THE_SERVER = {"fastapi", "pydantic", "starlette", "uvicorn", "prometheus_client"}  # and torch's own needs
FOR_OTHER_WORK = {"_hashlib", "_ssl", "_lzma", "_bz2", "shutil", "tempfile", "secrets"}
MAX_MODULES = 486  # other than torch's and numpy's: moeflow's, and two hundred of others
MAX_DATACLASSES = 86  # half a millisecond to make each; msgspec's records take a fortieth of that

GENERATE = """
import sys
import numpy
if sys.argv[1] == "without": sys.modules["torch"] = None
else: import torch
del sys.argv[1]
before = set(sys.modules)
from moeflow.cli.main import main
try: main()
finally: print(*set(sys.modules) - before)
"""
DATACLASSES = """
import sys
from moeflow.cli.main import main
try: main()
finally:
    ours = [module for name, module in sys.modules.items() if name.startswith("moeflow.")]
    classes = {it for module in ours for it in vars(module).values() if isinstance(it, type)}
    print(*{f"{it.__module__}.{it.__name__}" for it in classes if "__dataclass_fields__" in vars(it)})
"""
ASKS = ("-p", "Hi", "--max-tokens", "2")
IMPORT = "import importlib, sys; [importlib.import_module(it) for it in sys.argv[1:]]; print(*sys.modules)"


def modules_after(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.slow
def test_a_first_token_needs_few_modules(tmp_path):
    write_tiny_mixtral(tmp_path / "model")
    write_byte_tokenizer(tmp_path / "model")
    found = modules_after(
        GENERATE, "with", "generate", tmp_path / "model", "--cache-dir", tmp_path, "-p", "Hi", "--max-tokens", "1"
    )
    assert "moeflow.engine.engine" in found
    assert found & UNWANTED == set()
    assert len(found) <= MAX_MODULES


ENGINE = """
import sys
from pathlib import Path
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.core.engine_messages import Submission
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
config = resolve(Settings(model=sys.argv[1], cache_dir=Path(sys.argv[2]), quantize="int8")).config
assert config.packed_file
engine = Engine.load(config)
engine.submit(Submission("one", [5, 9], SamplingParams(max_tokens=1), seed=0))
assert engine.step()[0].token_ids
print(*sys.modules)
"""


@needs_extension
def test_the_engine_alone_loads_no_libraries_for_what_it_does_not_do(tmp_path):
    write_tiny_mixtral(tmp_path / "model")
    pack(str(tmp_path / "model"), None, cache_dir=tmp_path, quantize="int8")
    found = modules_after(ENGINE, tmp_path / "model", tmp_path)
    unwanted = FOR_OTHER_WORK | {"statistics", "difflib"}
    assert found & (unwanted | UNWANTED | {"torch"}) == set()


def write_packed(write_tiny, folder):
    write_tiny(folder / "model")
    pack_beside(folder / "model", folder)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    write_packed(write_tiny_mixtral, folder)
    return folder


@needs_extension
@pytest.mark.slow
def test_a_packed_model_needs_no_torch_for_its_answers(packed):
    asks = (*ASKS, "--temperature", "1", "--json", "--speculator", "suffix")
    found = modules_after(GENERATE, "without", "generate", packed / "model", "--cache-dir", packed, *asks)
    assert "moeflow.engine.engine" in found
    assert found & (UNWANTED | FOR_OTHER_WORK | {"torch", "rich", "safetensors"}) == set()
    assert len(found) <= MAX_MODULES


@needs_extension
@pytest.mark.slow
def test_a_start_makes_few_dataclasses(packed):
    found = modules_after(DATACLASSES, "generate", packed / "model", "--cache-dir", packed, *ASKS)
    assert "moeflow.core.engine_config.EngineConfig" in found
    assert len(found) <= MAX_DATACLASSES


@needs_extension
@pytest.mark.slow
def test_nor_does_one_with_recurrent_layers(tmp_path):
    write_packed(write_tiny_granite_hybrid, tmp_path)
    found = modules_after(GENERATE, "without", "generate", tmp_path / "model", "--cache-dir", tmp_path, *ASKS)
    assert "moeflow.kv.state_storage" in found
    assert found & (UNWANTED | {"torch", "rich", "safetensors"}) == set()
    assert len(found) <= MAX_MODULES


@needs_extension
@pytest.mark.slow
def test_nor_to_be_talked_to(packed):
    code = "import sys; sys.modules['torch'] = None; from moeflow.cli.main import main; main()"
    command = [sys.executable, "-c", code, "chat", packed / "model", "--cache-dir", packed, "--max-tokens", "2"]
    done = subprocess.run(command, capture_output=True, text=True, input="Hi\nHo\n")
    assert done.returncode == 0, done.stderr


@needs_extension
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a process has mapped is looked up where Linux tells it")
def test_nor_to_be_served(packed):
    options = ("--port", "0", "--cache-dir", packed, "--shutdown-deadline", "1")
    command = [sys.executable, "-m", "moeflow", "serve", packed / "model", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split()[-1]
            asked = {"model": "model", "prompt": "Hi", "max_tokens": 2, "logprobs": 1}
            httpx.post(f"{url}/v1/completions", json=asked, timeout=60).raise_for_status()
            ours = psutil.Process(server.pid)
            processes = [ours, *ours.children(recursive=True)]
            mapped = [Path(f"/proc/{each.pid}/maps").read_text() for each in processes]
        finally:
            server.terminate()
            server.communicate()
    assert any("_cpu" in files for files in mapped)
    assert not any("libtorch" in files for files in mapped)


@pytest.mark.slow
def test_an_engines_process_needs_few_modules():
    found = modules_after(IMPORT, "moeflow.processes.main")
    assert found & (UNWANTED | {"torch", "rich", "click"}) == set()


@pytest.mark.slow
def test_a_servers_process_needs_no_torch():
    found = modules_after(IMPORT, "moeflow.server.launch", "moeflow.server.app", "moeflow.server.http_server")
    assert found & OF_THE_SERVER == OF_THE_SERVER
    assert found & ((UNWANTED | {"torch"}) - OF_THE_SERVER) == set()


def test_nothing_looks_for_garbage_while_modules_are_imported(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("import gc\nwas_collected = gc.isenabled()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(lazy.modules(), "was_collected", "slow_module")
    try:
        assert lazy.was_collected is False
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        gc.unfreeze()
        assert lazy.was_collected is False
        assert gc.get_freeze_count() == 0  # earlier imports are not frozen again along with later ones
    finally:
        gc.unfreeze()
