import fcntl
import gc
import importlib.util
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"  # read when transformers, or a test, first imports Triton
settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="all instruction sets, combinations and long runs")


def pytest_configure() -> None:
    """Have Ctrl-C work: a run in the background (nohup, cron, a shell's job) inherits that it is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests for thorough runs, and put files of slow tests first: a long file at the end would leave other
    workers idle.
    """
    if not config.getoption("--thorough"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("thorough")])
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -num_slow[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare every search for garbage the million objects that modules and tests are made of: they stay to the end."""
    gc.disable()
    try:
        with _compiled_once():
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _compiled_once() -> Iterator[None]:
    """Have one worker import everything first if nothing was compiled yet, or each would compile all of it."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    with open(__file__, encoding="utf-8") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        is_torch_compiled = bool(torch.cached and Path(torch.cached).exists())
        if not (sys.dont_write_bytecode or (is_torch_compiled and _are_tests_compiled())):
            yield
            return
    yield


def _are_tests_compiled() -> bool:
    """Return whether pytest has rewritten the last file that it collects."""
    last = max(Path(__file__).parent.rglob("test_*.py"))
    return any((last.parent / "__pycache__").glob(f"{last.stem}.*-pytest-*.pyc"))


@pytest.fixture(scope="session")
def builtin_model() -> Path:
    """The folder of the built-in model, built once on this machine; tests that use it are marked `weights`."""
    from moeflow.cli.options import default_cache_dir  # here, since most tests need no torch
    from moeflow.core.errors import ConfigError
    from moeflow.train.builtin import builtin_folder, builtin_source, ensure_builtin_model

    if not builtin_folder(default_cache_dir()).is_dir():
        try:
            builtin_source()
        except ConfigError as error:
            pytest.skip(str(error))
    return ensure_builtin_model(default_cache_dir())


@pytest.fixture(scope="session", autouse=True)
def one_certificate() -> Iterator[None]:
    """Spare HTTP clients 22 ms each for reading all certificates: tests connect to this machine only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(Path(__file__).parent / "data" / "tls" / "second.pem"))
        yield


@pytest.fixture(autouse=True)
def speed_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare engines that start in this process a second of measuring: a machine that was measured is taken as it is."""
    if "moeflow.planner.planning" not in sys.modules:  # most tests need no torch
        return
    from moeflow.planner import planning
    from moeflow.planner.hardware.this_machine import MachineNeeds, known_machine
    from tests.planner.examples import machine

    def kept_or_round(cache_dir: Path, needs: MachineNeeds, **_: object) -> object:
        return known_machine(cache_dir, needs.num_threads) or machine(ram=needs.ram_bytes)

    monkeypatch.setattr(planning, "machine_for_start", kept_or_round)
