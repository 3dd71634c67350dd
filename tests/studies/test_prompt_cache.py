"""The second turn of a conversation, in all the ways that are measured, on models that `random_family` writes small."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from moeflow.kernels.cpu import extension
from moeflow.text.tokenizer import Tokenizer
from studies import prompt_cache, random_family

VOCAB = 300
SMALL = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    random_family.write_model("granitemoehybrid", folder, 0, **SMALL, **MAMBA)
    return folder


def test_a_random_model_has_a_tokenizer_with_all_of_its_tokens(folder):
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == VOCAB
    text = "naïve <unused299>"
    assert max(tokenizer.encode(text)) < 258  # no text has the tokens behind those of bytes
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
@pytest.mark.skipif(not extension.is_available(), reason="only kernels give the same bits every time")
def test_a_turn_is_answered_the_same_however_it_goes_on(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_cache, "in_a_process", prompt_cache.answer)  # a process each takes half a minute
    out = tmp_path / "records.jsonl"
    arguments = [str(folder), "--tokens", "200", "--repeats", "1", "--threads", "1", "--out", str(out)]
    done = CliRunner().invoke(prompt_cache.main, arguments)
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert record["are_equal"]
    cached = {run["arm"]: run["cached_tokens"] for run in record["runs"]}
    assert cached[prompt_cache.COMPUTED] == cached[prompt_cache.ANEW] == 0
    # The first turn's 264 tokens have a checkpoint at 256, where a prefix can be taken up.
    assert cached[prompt_cache.WARM] == cached[prompt_cache.COLD] == cached[prompt_cache.KEPT] == 256
