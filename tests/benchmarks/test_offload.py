from __future__ import annotations

import pytest
import torch

from benchmarks.offload.contestants import OURS, PEER, UNPREDICTED
from benchmarks.offload.limit import MemoryLimit
from benchmarks.offload.prompts import cut_prompts
from benchmarks.offload.tables import offload_table
from benchmarks.peers import model
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from tests.tiny_mixtral import write_tiny_mixtral


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offload")
    write_tiny_mixtral(folder)
    return folder


def test_the_gguf_file_is_the_same_model_as_the_folder(folder, tmp_path):
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}', encoding="utf-8")
    model.write_gguf(folder, tmp_path / "tiny.gguf", model.QUANTIZATIONS["bf16"])
    source, converted = open_checkpoint(folder), open_checkpoint(tmp_path / "tiny.gguf")
    for name in source.tensors:
        expected, got = source.read(name).float(), converted.read(name).float()
        is_exact = expected.ndim == 1 or "gate" in name
        assert torch.equal(got, expected if is_exact else expected.bfloat16().float()), name
    source.close()
    converted.close()


class Words:
    vocab_size = 50

    def encode(self, text):
        return [int(word) for word in text.split()]


def test_prompts_are_pieces_of_the_text_or_noise(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.offload.prompts.Tokenizer.load", lambda _: Words())
    text = tmp_path / "text.md"
    text.write_text(" ".join(map(str, range(50))), encoding="utf-8")
    prompts = cut_prompts(tmp_path, [text], "text", count=5, length=10, seed=1)
    assert sorted(token for prompt in prompts for token in prompt) == list(range(50))
    with pytest.raises(ConfigError, match="enough for 5 prompts of 10 tokens, not 6"):
        cut_prompts(tmp_path, [text], "text", count=6, length=10, seed=1)
    noise = cut_prompts(tmp_path, [], "noise", count=6, length=10, seed=1)
    assert [len(prompt) for prompt in noise] == [10] * 6
    assert noise == cut_prompts(tmp_path, [], "noise", count=6, length=10, seed=1)


@pytest.mark.parametrize(("groups", "files"), [("4:memory:/a/b\n0::/\n", "memory/a/b"), ("0::/x\n", "x")])
def test_a_limit_is_set_in_the_own_group_of_either_version(monkeypatch, tmp_path, groups, files):
    (tmp_path / files).mkdir(parents=True)
    monkeypatch.setattr("benchmarks.offload.limit._MOUNT", tmp_path)
    monkeypatch.setattr("benchmarks.offload.limit.Path.read_text", lambda path, *_: groups)
    limit = MemoryLimit("one", 4096)
    monkeypatch.undo()
    (made,) = (tmp_path / files).iterdir()
    assert [file.read_text() for file in made.iterdir()] == ["4096"]
    assert limit.prefix[-1] == str(made / "cgroup.procs")


def row(name, prefill, decode, **turn):
    counted = {"expert_late_total": 0, "expert_prefetched_bytes_total": 0, **turn}
    turns = [counted] if turn else [{}]
    rates = {"prefill": prefill, "decode": decode}
    return {"name": name, **rates, "is_equal": True, "turns": turns, "peak_bytes": 90, "group_peak_bytes": 100}


def test_a_record_as_a_table():
    counted = {"expert_hits_total": 3, "expert_misses_total": 1, "expert_demand_bytes_total": 2e9}
    record = {
        "format": "bfloat16",
        "workload": "text",
        "model_bytes": 10e9,
        "prompt_len": 512,
        "new_tokens": 64,
        "resident": {"prefill": [200.0], "decode": [15.0]},
        "budgets": [
            {
                "share": 0.25,
                "bytes": 100,
                "rows": [
                    row(PEER, [10.0, 20.0], [1.0, 2.0]),
                    row(OURS, [40.0, 60.0], [4.0, 4.0], **counted),
                    row(UNPREDICTED, [40.0, 60.0], [2.0, 4.0], **counted),
                ],
            }
        ],
    }
    table = offload_table(record)
    ours = ("25%, moeflow", "50.0 (40.0-60.0)", "3.50", "4.00 (4.00-4.00)", "3.00", "90%", "75%", "2.0 GB")
    assert table.rows[1] == ours
    assert table.rows[0][2] == "" == table.rows[0][6]
    assert "token for token" in table.notes[1]
    assert table.notes[2] == "At 25%, decode with prediction is 1.50 times that without."
    record["budgets"][0]["rows"][1]["is_equal"] = False
    assert "NOT" in offload_table(record).notes[1]
