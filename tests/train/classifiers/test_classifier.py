"""The whole way by the shell: files to a checkpoint that transformers loads, stops, larger ones, and errors."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoTokenizer, SwitchTransformersEncoderModel

from moeflow.checkpoint.safetensors.writer import write_json
from moeflow.cli.main import main
from moeflow.train.classifiers.classifier import ClassifierRecipe, ClassifierTexts, train_classifier
from moeflow.train.phases import Phase, ignore
from tests.train.classifiers.toy import write_model, write_texts

SIZES = (
    "--layers",
    "2",
    "--sparse-layers",
    "1",
    "--experts",
    "4",
    "--heads",
    "2",
    "--head-dim",
    "8",
    "--ffn-size",
    "16",
)
QUICK = (*SIZES, "--epochs", "2", "--learning-rate", "0.01", "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("classifiers")
    write_model(place / "model")
    write_texts(place / "train.tsv", 120)
    write_texts(place / "dev.tsv", 30, seed=5)
    return place


def run(folder, out, *options, tokens=True):
    model = ("--tokens-from", str(folder / "model")) if tokens else ()
    given = ("--data", str(folder / "train.tsv"), *model, "--out", str(folder / out), *options)
    return CliRunner().invoke(main, ["train", "classifier", *given])


@pytest.fixture(scope="module")
def small(folder):
    done = run(folder, "small", *QUICK, "--dev", str(folder / "dev.tsv"), "--labels", "negative, positive")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def logits_by_transformers(folder, texts):
    model = SwitchTransformersEncoderModel.from_pretrained(folder).eval()
    weights = load_file(folder / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        states = [model(input_ids=torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0] for text in texts]
    means = torch.stack([state.mean(dim=0) for state in states])
    return means @ weights["score.weight"].T + weights["score.bias"], model, weights


def test_transformers_loads_it_and_finds_the_same_accuracy(folder, small):
    lines = [line.split("\t") for line in (folder / "dev.tsv").read_text().splitlines()]
    logits, model, weights = logits_by_transformers(folder / "small", [text for text, _ in lines])
    right = (logits.argmax(dim=1) == torch.tensor([int(label) for _, label in lines])).float().mean().item()
    assert small["accuracies"]["dev"] == pytest.approx(right)
    theirs = model.state_dict()
    assert all(torch.equal(theirs[name], weight) for name, weight in weights.items() if not name.startswith("score."))
    assert set(theirs) <= set(weights) | {"encoder.embed_tokens.weight"}
    config = json.loads((folder / "small" / "config.json").read_text())
    assert config["id2label"] == {"0": "negative", "1": "positive"}
    assert config["architectures"] == ["SwitchTransformersForSequenceClassification"]
    assert not (folder / ".small.training").exists()


def test_a_larger_one_is_made_of_it(folder, small):
    options = ("--upcycle-from", str(folder / "small"), "--experts", "12", "--labels", "negative,positive")
    done = run(folder, "large", *options, "--epochs", "1", "--dtype", "bfloat16", "--json", tokens=False)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["shape"]["num_experts"], result["shape"]["ffn_size"]) == (12, 16)
    weights = load_file(folder / "small" / "model.safetensors")
    large = load_file(folder / "large" / "model.safetensors")
    assert {weight.dtype for weight in large.values()} == {torch.bfloat16}
    assert "encoder.block.1.layer.1.mlp.experts.expert_11.wo.weight" in large
    unseen = 200  # a byte that no text has
    assert torch.equal(large["shared.weight"][unseen], weights["shared.weight"][unseen].bfloat16())
    assert run(folder, "other", *options[:2], "--experts", "6", *options[4:], tokens=False).exit_code == 2
    other_labels = run(folder, "other", *options[:4], tokens=False)
    assert (other_labels.exit_code, "Give --labels" in other_labels.stderr) == (2, True)


def test_work_that_was_stopped_ends_with_the_same_bytes(folder):
    recipe = ClassifierRecipe(
        epochs=2, layers=2, sparse_layers=1, experts=4, heads=2, head_dim=8, ffn_size=16, learning_rate=0.01
    )
    texts = ClassifierTexts(data=folder / "train.tsv")

    def train(name, on_progress=ignore):
        train_classifier(texts, recipe, folder / name, tokens_from=folder / "model", on_progress=on_progress)

    def stop(phase, done, total):
        if (phase, done) == (Phase.TRAINING, 1):
            raise KeyboardInterrupt

    train("whole")
    with pytest.raises(KeyboardInterrupt):
        train("stopped", stop)
    assert not (folder / "stopped").exists()
    assert (folder / ".stopped.training" / "training.safetensors").exists()
    train("stopped")
    assert (folder / "stopped" / "model.safetensors").read_bytes() == (
        folder / "whole" / "model.safetensors"
    ).read_bytes()


def test_errors_name_the_remedy(folder, small, tmp_path):
    (tmp_path / "bad.tsv").write_text("a text without label\n")
    (tmp_path / "one.tsv").write_text("a text\tyes\n" * 20)
    (tmp_path / "bare").mkdir()
    write_json(tmp_path / "bare" / "config.json", {"architectures": ["Other"]})
    for options, complaint in (
        (("--data", str(tmp_path / "bad.tsv")), "bad.tsv, line 1"),
        (("--data", str(tmp_path / "one.tsv")), "at least two are needed"),
        (("--labels", "a,b,c"), "labels names a, b, c"),
        (("--experts", "1"), "experts is 1"),
        (("--layers", "3"), "multiple of sparse-layers"),
        (("--minutes", "0"), "minutes is 0"),
        (("--dropout", "1"), "dropout is 1"),
        (("--upcycle-from", str(folder / "small")), "remove --tokens-from"),
    ):
        done = run(folder, "never", *options)
        assert (done.exit_code, complaint in done.stderr) == (2, True), (options, done.output)
    taken = run(folder, "small", *QUICK)
    assert (taken.exit_code, "--overwrite" in taken.stderr) == (2, True)
    assert not (folder / "never").exists()
