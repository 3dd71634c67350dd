import json

import pytest
from click.testing import CliRunner

from moeflow.checkpoint.open import open_checkpoint
from moeflow.cli import lazy
from moeflow.cli.main import main
from moeflow.cli.upcycle import rows, texts_table
from moeflow.core.errors import CapacityError
from tests.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.slow  # each makes a model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder)
    (folder / "mine.txt").write_text("The quick brown fox counts: 1, 2, 3! def f(x): return {x: [x]}\n" * 12)
    return folder


def run(source, out, *options):
    text = str(source / "mine.txt")
    arguments = ["upcycle", str(source), "--out", str(out), "--experts", "4", "--calibration", text, *options]
    return CliRunner().invoke(main, arguments)


def test_makes_a_model_and_says_what_it_cost(source, tmp_path):
    done = run(source, tmp_path / "moe")
    assert done.exit_code == 0, done.output
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["experts"] == "4 a layer, 2 a token"
    assert "dense" in lines["perplexity"]
    assert lines["busiest"].startswith("expert")
    assert lines["model"] == str(tmp_path / "moe")
    config = open_checkpoint(tmp_path / "moe").config
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (4, 2)
    assert all(phase in done.stderr for phase in ("reading", "calibrating", "fitting", "writing", "measuring"))


def test_json_holds_the_same(source, tmp_path):
    done = run(source, tmp_path / "moe", "--top-k", "1", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["experts"], result["top_k"]) == (4, 1)
    assert result["size_bytes"] == sum(file.stat().st_size for file in (tmp_path / "moe").iterdir())
    quality = result["quality"]
    assert 0.9 < quality["moe_perplexity"] / quality["dense_perplexity"] < 1.1
    low, high = quality["busiest_expert_shares"]
    assert 0.25 <= low <= high <= 1.0
    assert set(result["seconds"]) == {"reading", "calibrating", "fitting", "writing", "measuring", "total"}


def test_an_existing_model_needs_overwrite(source, tmp_path):
    run(source, tmp_path / "moe")
    done = run(source, tmp_path / "moe", "--seed", "1")
    assert done.exit_code == 2
    assert "--overwrite" in done.stderr
    assert run(source, tmp_path / "moe", "--seed", "1", "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-k", "5"), "top-k is 5"),
        (("--perturbation", "-1"), "perturbation is -1"),
        (("--seed", "-1"), "seed is -1"),
    ],
)
def test_impossible_wishes_are_one_line(source, tmp_path, options, message):
    done = run(source, tmp_path / "moe", *options)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_model_too_large_to_measure_is_kept(source, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise CapacityError("need 20.0 GiB, have 8.0 GiB")

    monkeypatch.setattr("moeflow.train.upcycling_quality.measure_quality", refuse)
    done = run(source, tmp_path / "moe", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["quality"] is None
    assert ("perplexity", "not measured: need 20.0 GiB, have 8.0 GiB") in rows(result)
    assert lazy.open_checkpoint(tmp_path / "moe").config["num_local_experts"] == 4


def train(source, out, *options):
    (source / "other.txt").write_text("Où est la gare ? Il y a du pain et du vin.\n" * 20)
    data = [f"--data=mine={source / 'mine.txt'}", f"--data={source / 'other.txt'}"]
    command = ["upcycle", str(source), "--out", str(out), "--train", *data, *options]
    return CliRunner().invoke(main, command)


def test_trains_an_expert_for_each_text(source, tmp_path):
    done = train(source, tmp_path / "moe", "--minutes", "1", "--steps", "2", "--joint-steps", "1", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["experts"], result["top_k"]) == (2, 2)
    assert [text["name"] for text in result["quality"]["texts"]] == ["mine", "other"]
    shown = result["quality"]["texts"][0]
    assert sum(shown["expert_shares"]) == pytest.approx(1.0, abs=1e-3)
    assert all(phase in done.stderr for phase in ("branches", "routers", "joint", "writing", "measuring"))
    table = texts_table(result["quality"]["texts"])
    assert [len(list(column.cells)) for column in table.columns] == [2] * 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--train", "--experts", "3"), "there are 2 texts, but --experts is 3"),
        (("--train", "--rank", "0"), "rank is 0"),
        (("--train", "--top-k", "3"), "top-k is 3"),
        ((), "add --train"),
        (("--train", "--perturbation", "0.02"), "--perturbation belongs to experts that are copies"),
        (("--train", "--calibration", __file__), "--calibration belongs to experts that are copies"),
    ],
)
def test_impossible_trainings_are_one_line(source, tmp_path, options, message):
    data = [f"--data={name}={source / 'mine.txt'}" for name in ("a", "b")]
    done = CliRunner().invoke(main, ["upcycle", str(source), "--out", str(tmp_path / "moe"), *data, *options])
    assert done.exit_code == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_has_an_example():
    shown = CliRunner().invoke(main, ["upcycle", "--help"]).output
    assert "moeflow upcycle ~/models/SmolLM2-135M-Instruct --out" in shown
    assert "larger, not better" in " ".join(shown.split())
