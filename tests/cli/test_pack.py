import json

import pytest
from click.testing import CliRunner

from moeflow.checkpoint.packed.layout import read_slab_index
from moeflow.cli.main import main
from moeflow.kernels.cpu import extension
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())


def test_writes_a_file_and_says_what_is_in_it(tmp_path):
    write_tiny_mixtral(tmp_path / "model")
    arguments = ["pack", str(tmp_path / "model"), "--quantize", "int8", "--cache-dir", str(tmp_path / "cache")]
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    index = read_slab_index((tmp_path / "cache").rglob("*.slabs").__next__())
    assert result["path"] == str(index.path)
    assert (result["layers"], result["experts"], result["weight_format"]) == (2, 4, "int8")
    assert result["size_bytes"] == index.path.stat().st_size
    again = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path / "mine")])
    assert again.stdout.startswith(f"{tmp_path / 'mine'}: 2 layers of 4 experts, ")
    assert ", in int8, " in again.stdout


def test_a_model_without_a_tokenizer_is_packed_and_told_that_nothing_was_learnt(tmp_path):
    model = tmp_path / "model"
    write_tiny_mixtral(model)
    (model / "tokenizer.json").unlink()
    done = CliRunner().invoke(main, ["pack", str(model), "--cache-dir", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["routing_tokens"] == 0
    assert "How its routers choose could not be learnt" in done.stderr
    assert "tokenizer.json" in done.stderr
