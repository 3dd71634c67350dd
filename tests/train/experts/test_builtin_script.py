"""The script that trains the built-in model's experts, on a tiny source."""

import pytest

from moeflow.train import builtin
from moeflow.train.experts.adapters import MATRICES
from moeflow.train.experts.saved import load_experts
from scripts import train_builtin_experts
from tests.tiny_llama import HIDDEN, LAYERS, write_tiny_llama
from tests.train.experts.factors import save_branch

NAMES = [f"text{number}" for number in range(8)]


@pytest.fixture
def source(tmp_path, monkeypatch):
    write_tiny_llama(tmp_path / "llama")
    monkeypatch.setattr(train_builtin_experts, "builtin_source", lambda: tmp_path / "llama")
    (tmp_path / "texts").mkdir()
    for name in NAMES:
        (tmp_path / "texts" / f"{name}.txt").write_text(f"{name} has a few words. " * 8)
    return tmp_path / "llama"


@pytest.mark.slow
def test_finished_experts_from_elsewhere_are_taken(source, tmp_path, capsys):
    work, out = tmp_path / "work", tmp_path / "experts.safetensors"
    work.mkdir()
    branches = [save_branch(work / f"branch-{name}.safetensors", seed) for seed, name in enumerate(NAMES)]
    options = ["--work", str(work), "--out", str(out), "--rank", "2", "--joint-steps", "0"]
    train_builtin_experts.main([str(tmp_path / "texts"), *options])
    trained = load_experts(out, builtin.fingerprint(source))
    for layer in range(LAYERS):
        assert trained.routers[layer].shape == (8, HIDDEN)
        for matrix in MATRICES:
            a, b = trained.adapters.of(layer, matrix)
            for number, branch in enumerate(branches):
                own_a, own_b = branch.of(layer, matrix)
                expected = own_a[0] @ own_b[0]
                assert (a[number] @ b[number] - expected).norm() < 0.02 * expected.norm()
    assert "as written" in capsys.readouterr().out


def test_the_number_of_texts_is_checked(source, tmp_path):
    (tmp_path / "texts" / "text7.txt").unlink()
    with pytest.raises(SystemExit, match="has 7 texts; 8 are needed"):
        train_builtin_experts.main([str(tmp_path / "texts"), "--work", str(tmp_path / "work")])
