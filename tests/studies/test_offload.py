from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from contextlib import closing, contextmanager

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.core.units import MIB
from studies.harness.memory_limit import MemoryLimit
from studies.offload import measure
from studies.offload.contestants import BIGMOE, BIGMOE_BESIDE_BYTES, OURS, PEER, UNPREDICTED, Built, Model, within
from studies.offload.prompts import cut_prompts
from studies.offload.tables import offload_table
from studies.peers import model
from studies.peers.workers.bigmoe import BigMoeWorker
from studies.peers.workers.c_structs import read_struct
from studies.peers.workers.protocol import disk_read_bytes
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
    monkeypatch.setattr("studies.offload.prompts.Tokenizer.load", lambda _: Words())
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
    monkeypatch.setattr("studies.harness.memory_limit._MOUNT", tmp_path)
    monkeypatch.setattr("studies.harness.memory_limit.Path.read_text", lambda path, *_: groups)
    limit = MemoryLimit("one", 4096)
    monkeypatch.undo()
    (made,) = (tmp_path / files).iterdir()
    assert [file.read_text() for file in made.iterdir()] == ["4096"]
    assert limit.prefix[-1] == str(made / "cgroup.procs")


@pytest.fixture
def in_bf16(folder, tmp_path):
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}', encoding="utf-8")
    found = Model(tmp_path, "bfloat16")
    model.write_gguf(folder, found.file, model.QUANTIZATIONS["bf16"])
    return found


def test_a_peer_with_a_cache_gets_what_the_dense_weights_leave_of_the_budget(in_bf16, tmp_path):
    dense = in_bf16.dense_bytes
    with closing(open_checkpoint(in_bf16.file)) as checkpoint:
        experts = [tensor.shape for name, tensor in checkpoint.tensors.items() if ".experts." in name]
    header = in_bf16.num_bytes - dense - 2 * sum(torch.Size(shape).numel() for shape in experts)
    assert experts
    assert 0 < header < 8192
    budget = BIGMOE_BESIDE_BYTES + dense + 40 * MIB
    found = within(budget, in_bf16, ["lru"], Built(bigmoe=tmp_path / "bmoe-cli", bigmoe_options=("--overlap",)))
    assert [each.name for each in found] == [BIGMOE, OURS, UNPREDICTED, "moeflow, lru"]
    assert found[0].wish["options"] == ["--cache-mb", "40", "--force-cache", "--overlap"]
    assert {each.model for each in found} == {in_bf16.file}
    with pytest.raises(ConfigError, match="no cache is left for BigMoeOnEdge"):
        within(budget - 40 * MIB, in_bf16, [], Built(bigmoe=tmp_path / "bmoe-cli"))


HEADER = """
    struct llama_sizes {
        // says what; is there
        const char* devices;
        enum ggml_type type_k; // a type
        uint32_t size;
        bool is_fit;
        float * parts;
        ggml_abort_callback abort_callback;
        bool is_last;
    };
    struct llama_odd { size_t size;
    };
"""


def test_structs_of_a_header_are_laid_out_as_by_a_compiler():
    struct = read_struct(HEADER, "llama_sizes")
    offsets = {name: getattr(struct, name).offset for name, _ in struct._fields_}
    expected = {"devices": 0, "type_k": 8, "size": 12, "is_fit": 16, "parts": 24, "abort_callback": 32, "is_last": 40}
    assert offsets == expected
    assert ctypes.sizeof(struct) == 48
    with pytest.raises(KeyError, match="size_t"):
        read_struct(HEADER, "llama_odd")
    with pytest.raises(ValueError, match="no struct llama_other"):
        read_struct(HEADER, "llama_other")


# Speaks like the program; ends its answers after two tokens, and reports its arguments.
PROGRAM = """#!{python}
import json, sys
print("BMOE_READY", json.dumps({{"arguments": sys.argv[1:]}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "fails" in asked["prompt"]:
        print('BMOE_ERROR {{"msg": "no room"}}', flush=True)
        continue
    open({log!r}, "a", encoding="utf-8").write(" ".join(sys.argv[1:]) + "|" + line)
    print("BMOE_PROGRESS", "{{}}", flush=True)
    done = {{"tokens": min(asked["n_predict"], 2), "tok_s": 4.0, "prefill_s": 1.5, "n_prompt": 3, "read_mib": 0.5}}
    print("BMOE_DONE", json.dumps(done), flush=True)
"""


def test_bigmoe_is_asked_in_its_own_way(tmp_path):
    words = ["caf\u00e9", "is", "open", "fails"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="is"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    program, log = tmp_path / "program", tmp_path / "log"
    program.write_text(PROGRAM.format(python=sys.executable, log=str(log)), encoding="utf-8")
    program.chmod(0o755)
    wish = {"model": "m.gguf", "program": str(program), "threads": 2, "options": ["--cache-mb", "40"]}
    worker = BigMoeWorker(wish | {"tokenizer": str(tmp_path / "tokenizer.json")})
    assert worker.vocab_size == len(words)
    assert worker.prefill([0, 1]) == 1.5
    reply = worker.follow([0, 2, 1, 1, 1, 1], [0, 0, 0])
    assert (reply["num_decoded"], reply["decode_s"]) == (2, 0.5)  # its answer was over before
    assert reply["prefill_s"] == 3.0  # for as many tokens as were asked, not for its own
    assert (reply["prefill_read_bytes"], reply["decode_read_bytes"]) == (0, MIB // 2)
    arguments, line = log.read_text(encoding="utf-8").splitlines()[-1].split("|")
    assert arguments.startswith("--model m.gguf --session --moe-stream --threads 2 ")
    assert arguments.endswith(" --cache-mb 40")
    assert '"caf\u00e9 open is is is is"' in line  # as it is: the program reads no escapes beyond a byte
    assert json.loads(line)["n_predict"] == 3
    with pytest.raises(SystemExit, match="no room"):
        worker.prefill([3])
    worker._process.communicate()  # the end of its input ends it
    assert worker._process.returncode == 0


def test_a_forgotten_file_is_read_from_disk_again(tmp_path):
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout
    if kind.strip() in ("tmpfs", "overlayfs"):
        pytest.skip("files there are not on a disk of their own")
    file = tmp_path / "file"
    file.write_bytes(os.urandom(4 * MIB))
    measure.forget(file)
    before = disk_read_bytes(os.getpid())
    file.read_bytes()
    once = disk_read_bytes(os.getpid())
    file.read_bytes()
    assert once - before >= 4 * MIB
    assert disk_read_bytes(os.getpid()) == once


class Engine:
    """Answers like a process, with known figures; ends every answer after two of three tokens."""

    def __init__(self, living):
        self.living, self.asked = living, 0

    def ask(self, do, **values):
        if do != "follow":
            return {"memory": {"peak_mib": 8.0}, "counters": {}}[do]
        self.asked += 1
        return {"prefill_s": 0.5 * self.asked, "decode_s": 2.0, "num_decoded": 2, "decode_read_bytes": 600}

    @contextmanager
    def running(self):
        self.living.append(self)
        assert len(self.living) == 1  # or they would share the pages of the file
        yield self
        self.living.remove(self)


class Limit:
    prefix, peak_bytes = ("limited",), 77

    def __init__(self, name, limit_bytes):
        assert limit_bytes == 1000

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_everyone_runs_alone_and_begins_with_nothing_in_memory(monkeypatch, in_bf16):
    forgotten, started, living = [], [], []
    monkeypatch.setattr(measure, "forget", lambda file: forgotten.append(file.name))
    monkeypatch.setattr(measure, "MemoryLimit", Limit)

    def start(run, contestant, prefix=()):
        assert prefix == Limit.prefix
        started.append(contestant.name)
        return Engine(living).running()

    monkeypatch.setattr(measure.Run, "start", start)
    contestants = within(10**9, in_bf16, [], Built(bigmoe=in_bf16.folder / "bmoe-cli"))[:2]
    run = measure.Run(in_bf16, [[1] * 4] * 3, 4, 1, 0, lambda _: None)
    rows = run.within(1000, contestants, [[5, 6, 7, 8]] * 3)
    assert started == [BIGMOE, OURS] == [row["name"] for row in rows]
    assert forgotten == ["big-bf16.gguf", "big-bf16.gguf", "big-bfloat16.slabs"]
    assert rows[0]["first"] == {"prefill": [8.0], "decode": [1.0]}
    assert rows[0]["prefill"] == [4.0, pytest.approx(4 / 1.5)]
    assert rows[0]["decode"] == [1.0, 1.0]
    assert rows[0]["decode_read_per_token"] == [300, 300]
    assert (rows[0]["peak_bytes"], rows[0]["group_peak_bytes"]) == (8 * MIB, 77)


def row(name, prefill, decode, **turn):
    counted = {"expert_late_total": 0, "expert_prefetched_bytes_total": 0, **turn}
    turns = [counted] if turn else [{}]
    rates = {"prefill": prefill, "decode": decode}
    first = {"prefill": [1.0], "decode": [0.5]}
    read = {"decode_read_per_token": [1e6, 2e6], "first": first}
    return {"name": name, **rates, **read, "is_equal": True, "turns": turns, "peak_bytes": 90, "group_peak_bytes": 100}


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
                    row(BIGMOE, [20.0, 20.0], [2.0, 2.0]),
                    row(OURS, [40.0, 60.0], [4.0, 4.0], **counted),
                    row(UNPREDICTED, [40.0, 60.0], [2.0, 4.0], **counted),
                ],
            }
        ],
    }
    table = offload_table(record)
    rates = ("50.0 (40.0-60.0)", "3.50", "4.00 (4.00-4.00)", "3.00")
    assert table.rows[2] == ("25%, moeflow", *rates, "0.50", "1.5 MB", "90%", "75%", "2.0 GB")
    assert table.rows[0][2] == "" == table.rows[0][8]
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert "token for token" in table.notes[1]
    assert table.notes[2] == "At 25%, ours / BigMoeOnEdge: prefill 2.50, decode 2.00."
    assert table.notes[3] == "At 25%, decode with prediction is 1.50 times that without."
    for each in record["budgets"][0]["rows"]:  # as records were before
        del each["first"], each["decode_read_per_token"]
    assert offload_table(record).rows[2] == ("25%, moeflow", *rates, "", "", "90%", "75%", "2.0 GB")
    record["budgets"][0]["rows"][2]["is_equal"] = False
    assert "NOT" in offload_table(record).notes[1]
