"""GGUF files with the tokenizers of several families, through the command: what doctor finds, what generate prints."""

import json

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer as CoreTokenizer
from transformers import Qwen3Config

from moeflow.checkpoint.open import open_checkpoint
from moeflow.cli.main import main
from moeflow.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from tests.checkpoint.gguf.test_routed_families import write
from tests.engine.fakes import byte_level_core
from tests.models.parity import SHAPE, random_model
from tests.text.test_tokenizer import byte_level_fields

PROMPT = "In 1969 she'd 你好 🙂"


@pytest.fixture
def model(monkeypatch, tmp_path):
    """Return what writes a tiny model with the vocabulary of tests and a pre-tokenizer's name, or without one."""
    monkeypatch.setenv("MOEFLOW_CACHE", str(tmp_path / "cache"))
    fields = byte_level_fields(byte_level_core())
    config = Qwen3Config(**SHAPE | {"vocab_size": len(fields["token_list"])}, head_dim=16)
    random_model(config).save_pretrained(tmp_path / "folder")

    def make(name):
        own = fields | {"tokenizer_pre": name} if name else {k: v for k, v in fields.items() if k != "tokenizer_pre"}
        file = tmp_path / "model.gguf"
        write(file, "qwen3", open_checkpoint(tmp_path / "folder"), {f"add_{key}": own[key] for key in own}).close()
        return str(file)

    return make


def doctor(file):
    """Return the exit code and the findings of the tokenizer."""
    done = CliRunner().invoke(main, ["doctor", file, "--json"])
    findings = json.loads(done.stdout)
    return done.exit_code, [(it["verdict"], it["found"]) for it in findings if it["topic"] == "tokenizer"]


def generate(file):
    return CliRunner().invoke(main, ["generate", file, "-p", PROMPT, "--max-tokens", "2", "--json"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-llm", "deepseek-v3", "default", "glm4", "kimi-k2", "minimax-m2", "qwen35"])
def test_a_named_pre_tokenizer_is_read(model, name):
    file = model(name)
    assert doctor(file) == (0, [])
    done = generate(file)
    assert done.exit_code == 0, done.stderr
    assert "pre-tokenizer" not in done.stderr
    core = CoreTokenizer.from_str(byte_level_core().to_str())
    core.pre_tokenizer = PRE_TOKENIZERS[name].build()
    usage = json.loads(done.stdout)["results"][0]["usage"]
    assert usage["prompt_tokens"] == len(core.encode(PROMPT).ids)


@pytest.mark.slow
def test_a_file_without_a_name_is_read_with_a_warning(model, caplog):
    file = model(None)
    code, [(verdict, found)] = doctor(file)
    assert (code, verdict) == (0, "warn")
    assert "does not name its pre-tokenizer" in found
    assert not caplog.records, "doctor's finding is enough"
    assert generate(file).exit_code == 0
    assert "does not name its pre-tokenizer" in caplog.text


@pytest.mark.slow
def test_an_unknown_name_is_refused_by_both(model):
    file = model("from-the-future")
    code, [(verdict, found)] = doctor(file)
    assert (code, verdict) == (1, "missing")
    assert "'from-the-future' is not known; known are a.x-4.0, codeshell, command-r" in found
    done = generate(file)
    assert done.exit_code != 0
    assert "'from-the-future' is not known" in done.stderr
