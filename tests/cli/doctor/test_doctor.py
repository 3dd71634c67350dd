import dataclasses
import json
import shutil
import types
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from moeflow.checkpoint.packed.file_io import PAGE_BYTES
from moeflow.cli import lazy
from moeflow.cli.doctor import doctor as module
from moeflow.cli.doctor import model_check
from moeflow.cli.doctor.diagnostics import Finding, Verdict
from moeflow.cli.main import main
from moeflow.core.engine_config import ExpertSlotsConfig, MemoryPlan
from moeflow.core.errors import CapacityError, CheckpointError, ConfigError
from moeflow.core.hybrid_config import HybridConfig
from moeflow.core.token_choice import TokenChoice
from moeflow.kernels.cpu import extension
from moeflow.planner.choices.packed_files import Damage, pack
from tests.checkpoint.packed.slabs import flip_bit
from tests.planner.example_plans import PLAN as EXAMPLE
from tests.shapes import ENGINE, TINY
from tests.tiny_mixtral import write_tiny_mixtral

needs_kernels = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
CONFIG = dataclasses.replace(ENGINE, num_threads=2, kv_cache_bytes=3 * 1024**2)
PLAN = dataclasses.replace(EXAMPLE, config=CONFIG, reasons=(("weights", "float32: it fits"),))
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
    """Put a small model, which fits for `resolve`, behind every path."""
    checkpoint = FakeCheckpoint()
    monkeypatch.setitem(vars(lazy), "open_checkpoint", lambda path: checkpoint)
    monkeypatch.setitem(vars(lazy), "read_model_config", lambda checkpoint: TINY)
    monkeypatch.setitem(vars(lazy), "Settings", dict)
    monkeypatch.setitem(vars(lazy), "with_dense_source", lambda settings: settings)
    monkeypatch.setitem(vars(lazy), "plan_for_start", lambda settings, *_: PLAN)
    monkeypatch.setitem(vars(lazy), "what_to_expect", lambda plan: f"{plan.machine} is fast")
    return checkpoint


@pytest.fixture
def examined(monkeypatch):
    """Replace the findings on this machine."""

    def install(*findings: Finding) -> None:
        monkeypatch.setattr(module, "examine", lambda cache_dir, cpu_isa: list(findings))
        monkeypatch.setattr(module, "examine_builtin_model", lambda overrides, **_: [])

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
    found = {finding.topic: finding for finding in model_check.examine_model({"model": "m", "cache_dir": "measured"})}
    assert found["model"].found == (
        "mixtral, 2 layers, 8 experts, 2 a token, 1 M parameters, 0 M active, 2.0 MiB on disk"
    )
    assert found["fit"].found == "weights in float32 on cpu, 2 threads"
    assert found["KV cache"].found == "3.0 MiB in float32, 1024 tokens"
    assert found["requests"].found == "32 together, 1024 tokens each at most"
    assert found["context"].verdict is Verdict.WARN
    assert "4096" in found["context"].found
    assert found["because"].found == "weights = float32: it fits"
    assert found["speed"].found == "this machine is fast"
    assert model.is_closed


def test_sampling_defaults_of_the_model_are_shown():
    choice = TokenChoice(temperature=0.2, repetition_penalty=1.1)
    found = model_check.limits(dataclasses.replace(CONFIG, sampling_defaults=choice), TINY)
    (sampling,) = (finding for finding in found if finding.topic == "sampling")
    assert sampling.found == "temperature 0.2, repetition_penalty 1.1"
    assert "--generation-config none" in sampling.remedy
    assert not any(finding.topic == "sampling" for finding in model_check.limits(CONFIG, TINY))


def test_a_model_that_does_not_fit_says_need_and_have(model, monkeypatch):
    def refuse(settings, *_):
        raise CapacityError("needs 90 GiB, has 8 GiB: use a smaller model")

    monkeypatch.setitem(vars(lazy), "plan_for_start", refuse)
    *_, last = model_check.examine_model({"model": "m"})
    assert (last.verdict, last.found) == (Verdict.MISSING, "needs 90 GiB, has 8 GiB: use a smaller model")


def test_other_ways_to_run_are_told_with_their_speed(model, monkeypatch):
    def plan(settings, *_):
        if settings.get("quantize") == "q4_k_m":
            raise ConfigError("not for this model")
        asked.append(settings)
        return dataclasses.replace(EXAMPLE, config=dataclasses.replace(CONFIG, cpu_isa="avx2"))

    peak = next(it.peak_bytes.value for it in EXAMPLE.forecast.memory if it.tier == "ram")
    for options, others in (
        ({}, {"quantize": "int8", "memory_bytes": int(peak / 2) // 2**20 * 2**20}),
        ({"quantize": "int4", "memory_bytes": 2**30}, {}),
    ):
        asked: list[dict[str, object]] = []
        monkeypatch.setitem(vars(lazy), "plan_for_start", plan)
        found = [it.found for it in model_check.examine_model({"model": "m", **options}) if it.topic == "or with"]
        assert asked == [{"model": "m", **options}, *({"model": "m", name: value} for name, value in others.items())]
        assert [text.split(": ")[0].split()[0] for text in found] == ["--quantize", "--memory"][: len(others)]
        assert all("tokens/s for one request" in text for text in found)


def test_a_damaged_model_is_missing(monkeypatch):
    def refuse(path: str) -> FakeCheckpoint:
        raise CheckpointError("is cut off", file=path, remedy="Download it again")

    monkeypatch.setitem(vars(lazy), "open_checkpoint", refuse)
    (finding,) = model_check.examine_model({"model": "m.gguf"})
    assert (finding.verdict, finding.found) == (Verdict.MISSING, "file m.gguf: is cut off. Download it again")


def test_the_built_in_model_is_looked_at_where_it_would_be(model, monkeypatch, tmp_path):
    monkeypatch.setitem(vars(lazy), "builtin_folder", lambda cache_dir: cache_dir / "builtin")
    monkeypatch.setitem(vars(lazy), "builtin_source", lambda: Path("source.gguf"))
    (finding,) = model_check.examine_builtin_model({"cache_dir": tmp_path})
    assert "not made yet" in finding.found
    assert "source.gguf" in finding.found

    (tmp_path / "builtin").mkdir()
    topics = [finding.topic for finding in model_check.examine_builtin_model({"cache_dir": tmp_path})]
    assert topics[:3] == ["built-in model", "model", "fit"]


def test_without_the_source_the_built_in_model_cannot_be_made(monkeypatch, tmp_path):
    def refuse() -> Path:
        raise ConfigError("Run `pip install source`")

    monkeypatch.setitem(vars(lazy), "builtin_folder", lambda cache_dir: cache_dir / "builtin")
    monkeypatch.setitem(vars(lazy), "builtin_source", refuse)
    (finding,) = model_check.examine_builtin_model({"cache_dir": tmp_path})
    assert (finding.verdict, finding.remedy) == (Verdict.WARN, "Run `pip install source`")


def test_the_share_of_experts_on_a_gpu_is_told():
    on_gpu = dataclasses.replace(CONFIG, device="cuda:1", cpu_isa="")
    hybrid = HybridConfig(num_gpu_experts=1, cpu_weight_format="int4", cpu_isa="avx2", stream_tokens=300)
    shared = dataclasses.replace(on_gpu, hybrid=hybrid)
    told = [
        [it.found for it in model_check.limits(config, TINY) if it.topic == "experts"]
        for config in (CONFIG, on_gpu, shared)
    ]
    share = f"{1 / TINY.routing.num_experts:.1%} on cuda:1: 1 of {TINY.routing.num_experts} of a layer"
    others = "the CPU computes the others in int4; for a pass of 300 tokens or more they are copied to cuda:1"
    assert told == [[], ["100% on cuda:1"], [f"{share}; {others}"]]


def test_a_memory_limit_is_shared_out_line_by_line():
    mib = 2**20
    memory = MemoryPlan(limit_bytes=900 * mib, process_bytes=300 * mib, weight_bytes=100 * mib, work_bytes=50 * mib)
    experts = ExpertSlotsConfig(packed_weights_file="f", num_slots=10, slab_bytes=50 * mib, min_slots=4)
    config = dataclasses.replace(CONFIG, memory=memory, experts=experts)
    said = "\n".join(finding.found for finding in model_check.limits(config, TINY))
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
    assert not any("experts:" in finding.found for finding in model_check.limits(resident, TINY))
    hybrid = HybridConfig(num_gpu_experts=2, cpu_weight_format="int4", cpu_isa="avx2", stream_tokens=0)
    said = "\n".join(it.found for it in model_check.limits(dataclasses.replace(config, hybrid=hybrid), TINY))
    assert "100.0 MiB  experts: 10 of 16; the GPU and the disk have the others" in said
    assert "of a pass" not in said
    assert said.count("keys and values") == 0


@pytest.mark.parametrize(("file", "is_told"), [("", True), ("/cache/model.slabs", False)])
def test_a_start_that_packs_says_how_it_would_be_quick(file, is_told):
    config = dataclasses.replace(CONFIG, cpu_isa="avx2", packed_file=file)
    starts = [finding for finding in model_check.limits(config, TINY) if finding.topic == "start"]
    assert [finding.verdict for finding in starts] == [Verdict.OK] * is_told
    assert all("`moeflow pack`" in finding.remedy for finding in starts)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A small model, and an unchanged file of its weights."""
    folder = tmp_path_factory.mktemp("packed")
    write_tiny_mixtral(folder / "model")
    return folder / "model", pack(str(folder / "model"), folder / "mine", cache_dir=None)


def verify(model, file, cache_dir, *more):
    options = ["--packed-weights", str(file), "--cache-dir", str(cache_dir), "--kv-cache", "1MiB", "--json", *more]
    done = CliRunner().invoke(main, ["doctor", str(model), "--verify", *options])
    found = json.loads(done.stdout)
    at = [finding["topic"] for finding in found].index("packed file")
    return done.exit_code, found[at:]


@needs_kernels
def test_a_whole_packed_file_is_verified(packed, tmp_path):
    model, index = packed
    code, (finding,) = verify(model, index.path, tmp_path)
    assert (code, finding["verdict"]) == (0, "ok")
    assert finding["found"] == f"{index.path}: all of it is as it was written"


@needs_kernels
def test_flipped_bits_are_found_and_whose_weights_they_are(packed, tmp_path):
    model, index = packed
    spec, file = index.spec, tmp_path / "damaged"
    shutil.copy(index.path, file)
    flip_bit(file, spec.offset(spec.number(1, 2)) + spec.slab_bytes - 1)
    flip_bit(file, spec.resident_start + spec.resident_bytes - PAGE_BYTES)
    code, (head, expert, others) = verify(model, file, tmp_path)
    assert code == 1
    assert head["found"] == f"{file}: 2 of its parts are damaged"
    assert "moeflow pack" in head["remedy"]
    names = [f"model.layers.1.block_sparse_moe.experts.2.{matrix}.weight" for matrix in ("w1", "w3", "w2")]
    assert expert["found"].startswith(
        f"layer 1, expert 2 ({', '.join(names)}): its contents have changed since it was written"
    )
    assert others["found"].startswith("weights outside of experts, piece 0 (model.embed_tokens.weight, ")
    assert {finding["verdict"] for finding in (head, expert, others)} == {"missing"}


@needs_kernels
def test_tensors_with_numbers_that_are_not_finite_are_named(tmp_path):
    model = tmp_path / "model"
    write_tiny_mixtral(model)
    tensors = load_file(model / "model.safetensors")
    names = [f"model.layers.{layer}.block_sparse_moe.experts.3.w2.weight" for layer in range(2)]
    for name in names:
        tensors[name][5, 3] = float("nan")
    save_file(tensors, model / "model.safetensors")
    done = CliRunner().invoke(main, ["doctor", str(model), "--verify", "--kv-cache", "1MiB", "--json"])
    (finding,) = [finding for finding in json.loads(done.stdout) if finding["topic"] == "weights"]
    assert (done.exit_code, finding["verdict"]) == (1, "missing")
    assert finding["found"] == f"NaN or infinite numbers in {', '.join(names)}"
    assert finding["remedy"] == "Download or convert the model again"


@needs_kernels
def test_no_more_than_ten_damaged_parts_are_named(packed, tmp_path, monkeypatch):
    model, index = packed
    damaged = [Damage(str(number), ["a", "b", "c", "d"], "") for number in range(12)]
    monkeypatch.setitem(vars(lazy), "find_damage", lambda *_: damaged)
    code, (head, *parts) = verify(model, index.path, tmp_path)
    assert (code, len(parts)) == (1, 10)
    assert "12 of its parts are damaged, of which the first 10 follow" in head["found"]
    assert parts[0]["found"] == "0 (a, b, c and 1 more): "


@needs_kernels
def test_without_a_packed_file_there_is_nothing_to_verify(packed, tmp_path):
    code, (finding,) = verify(packed[0], tmp_path / "none", tmp_path)
    assert (code, finding["verdict"], finding["found"]) == (0, "warn", "there is none to verify")


def test_lines_fit_a_page_and_long_words_stay_whole(examined):
    path = "/a" * 60
    table = "     308.4 MiB  the process; a server takes some 300 MiB more"
    examined(
        Finding("speed", Verdict.OK, "how fast this will be is not known yet " * 5, "measure this machine first " * 6),
        Finding("experts", Verdict.OK, f"the others come from {path}, which will be there"),
        Finding("", Verdict.OK, table),
    )
    lines = CliRunner().invoke(main, ["doctor"]).stdout.splitlines()
    assert all(len(line) <= 100 for line in lines if path not in line)
    assert sum(path in line for line in lines) == 1
    assert lines[1].startswith(" " * 23 + "how") or lines[1].startswith(" " * 23)
    assert lines[-1].endswith(table)
