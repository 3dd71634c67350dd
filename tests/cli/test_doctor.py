import dataclasses
import json
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

from moeflow.cli import doctor as module
from moeflow.cli import fitting, late
from moeflow.cli.findings import Finding, Verdict
from moeflow.cli.main import main
from moeflow.core.engine_config import ExpertSlotsConfig, MemoryPlan
from moeflow.core.errors import CapacityError, CheckpointError, ConfigError
from tests.shapes import ENGINE, TINY

CONFIG = dataclasses.replace(
    ENGINE, num_threads=2, kv_cache_bytes=3 * 1024**2, reasons=(("weights", "float32: it fits"),)
)
GOOD = Finding("memory", Verdict.OK, "8.0 GiB free")
LITTLE = Finding("disk", Verdict.WARN, "1.0 GiB free", "Free some")
GONE = Finding("torch", Verdict.MISSING, "not installed", "Install it")


class FakeCheckpoint:
    def __init__(self) -> None:
        self.tensors = {"a": types.SimpleNamespace(num_bytes=2 * 1024**2)}
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def model(monkeypatch):
    """Put a small model, which `decide` finds room for, behind every path."""
    checkpoint = FakeCheckpoint()
    monkeypatch.setitem(vars(late), "open_checkpoint", lambda path: checkpoint)
    monkeypatch.setitem(vars(late), "read_model_config", lambda checkpoint: TINY)
    monkeypatch.setitem(vars(late), "Settings", dict)
    monkeypatch.setitem(vars(late), "decide", lambda settings: CONFIG)
    monkeypatch.setitem(vars(late), "what_to_expect", lambda config, cache_dir: f"as {cache_dir} says")
    return checkpoint


@pytest.fixture
def examined(monkeypatch):
    """Replace what is found on this machine."""

    def install(*findings: Finding) -> None:
        monkeypatch.setattr(module, "examine", lambda cache_dir, cpu_isa: list(findings))
        monkeypatch.setattr(module, "examine_builtin_model", lambda wishes: [])

    return install


@pytest.mark.parametrize(("found", "code"), [((GOOD,), 0), ((GOOD, LITTLE), 0), ((GOOD, GONE, LITTLE), 1)])
def test_the_exit_code_says_whether_something_needed_is_missing(examined, found, code):
    examined(*found)
    assert CliRunner().invoke(main, ["doctor"]).exit_code == code


def test_every_finding_is_a_line_with_its_remedy_below(examined):
    examined(GOOD, LITTLE)
    lines = CliRunner().invoke(main, ["doctor"]).stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["ok", "memory", "8.0", "GiB", "free"],
        ["warn", "disk", "1.0", "GiB", "free"],
        ["Free", "some"],
    ]


def test_json_holds_the_same(examined):
    examined(GOOD, LITTLE)
    assert json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout) == [
        {"topic": "memory", "verdict": "ok", "found": "8.0 GiB free", "remedy": None},
        {"topic": "disk", "verdict": "warn", "found": "1.0 GiB free", "remedy": "Free some"},
    ]


def test_a_model_that_fits_is_described_with_its_limits(model):
    found = {finding.topic: finding for finding in fitting.examine_model({"model": "m", "cache_dir": "measured"})}
    assert found["model"].found == (
        "mixtral, 2 layers, 8 experts, 2 a token, 1 M parameters, 0 M active, 2.0 MiB on disk"
    )
    assert found["fit"].found == "weights in float32 on cpu, 2 threads"
    assert found["KV cache"].found == "3.0 MiB in float32, 1024 tokens"
    assert found["requests"].found == "32 together, 1024 tokens each at most"
    assert found["context"].verdict is Verdict.WARN
    assert "4096" in found["context"].found
    assert found["because"].found == "weights = float32: it fits"
    assert found["speed"].found == "as measured says"
    assert model.is_closed


def test_a_model_that_does_not_fit_says_need_and_have(model, monkeypatch):
    def refuse(settings):
        raise CapacityError("needs 90 GiB, has 8 GiB: use a smaller model")

    monkeypatch.setitem(vars(late), "decide", refuse)
    *_, last = fitting.examine_model({"model": "m"})
    assert (last.verdict, last.found) == (Verdict.MISSING, "needs 90 GiB, has 8 GiB: use a smaller model")


def test_a_damaged_model_is_missing(monkeypatch):
    def refuse(path: str) -> FakeCheckpoint:
        raise CheckpointError("is cut off", file=path, remedy="Download it again")

    monkeypatch.setitem(vars(late), "open_checkpoint", refuse)
    (finding,) = fitting.examine_model({"model": "m.gguf"})
    assert (finding.verdict, finding.found) == (Verdict.MISSING, "file m.gguf: is cut off. Download it again")


def test_the_built_in_model_is_looked_at_where_it_would_be(model, monkeypatch, tmp_path):
    monkeypatch.setitem(vars(late), "builtin_folder", lambda cache_dir: cache_dir / "builtin")
    monkeypatch.setitem(vars(late), "builtin_source", lambda: Path("source.gguf"))
    (finding,) = fitting.examine_builtin_model({"cache_dir": tmp_path})
    assert "not made yet" in finding.found
    assert "source.gguf" in finding.found

    (tmp_path / "builtin").mkdir()
    topics = [finding.topic for finding in fitting.examine_builtin_model({"cache_dir": tmp_path})]
    assert topics[:3] == ["built-in model", "model", "fit"]


def test_without_the_source_the_built_in_model_cannot_be_made(monkeypatch, tmp_path):
    def refuse() -> Path:
        raise ConfigError("Run `pip install source`")

    monkeypatch.setitem(vars(late), "builtin_folder", lambda cache_dir: cache_dir / "builtin")
    monkeypatch.setitem(vars(late), "builtin_source", refuse)
    (finding,) = fitting.examine_builtin_model({"cache_dir": tmp_path})
    assert (finding.verdict, finding.remedy) == (Verdict.WARN, "Run `pip install source`")


def test_a_memory_limit_is_shared_out_line_by_line():
    mib = 2**20
    memory = MemoryPlan(limit_bytes=900 * mib, process_bytes=300 * mib, weight_bytes=100 * mib, work_bytes=50 * mib)
    experts = ExpertSlotsConfig(slab_file="f", num_slots=10, slab_bytes=50 * mib, least_slots=4)
    config = dataclasses.replace(CONFIG, memory=memory, experts=experts)
    said = "\n".join(finding.found for finding in fitting.limits(config, TINY))
    for line in (
        "900.0 MiB, of which",
        "300.0 MiB  the process; a server takes",
        "100.0 MiB  weights",
        " 50.0 MiB  work space of a pass of 512 tokens",
        "  3.0 MiB  keys and values",
        "500.0 MiB  experts: up to 10 of 16, 4 at least",
    ):
        assert line in said
    resident = dataclasses.replace(CONFIG, memory=memory)
    assert not any("experts:" in finding.found for finding in fitting.limits(resident, TINY))


@pytest.mark.parametrize(("file", "is_told"), [("", True), ("/cache/model.slabs", False)])
def test_a_start_that_packs_says_how_it_would_be_quick(file, is_told):
    config = dataclasses.replace(CONFIG, cpu_isa="avx2", packed_file=file)
    starts = [finding for finding in fitting.limits(config, TINY) if finding.topic == "start"]
    assert [finding.verdict for finding in starts] == [Verdict.OK] * is_told
    assert all("`moeflow pack`" in finding.remedy for finding in starts)
