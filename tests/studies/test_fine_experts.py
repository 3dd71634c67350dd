"""Sliced experts: without mixing, a model with one expert a token stays the same; transformers computes it, too."""

import json
import sys
from functools import partial

import pytest
import torch
from transformers import MixtralForCausalLM

from moeflow.checkpoint.open import open_checkpoint
from moeflow.train.bare_model import load_bare_model, run_sequence
from moeflow.train.calibration_text import calibration_text
from moeflow.train.upcycle_recipe import UpcycleRecipe
from moeflow.train.upcycling import upcycle
from moeflow.train.upcycling_quality import measure_quality
from studies import fine_experts
from studies.fine_experts import write_fine_experts
from tests.tiny_llama import write_tiny_llama

TOKENS = list(range(2, 80))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "mine.txt"
    file.write_text("The quick brown fox counts: 1, 2, 3! Où est la gare ? def f(x): return {x: [x]}\n" * 12)
    return file


@pytest.fixture(scope="module")
def source(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_tiny_llama(folder / "llama", initializer_range=0.1)
    recipe = UpcycleRecipe(num_experts=3, top_k=1, perturbation=0.5)
    upcycle(folder / "llama", folder / "moe", recipe, calibration=text)
    return folder / "moe"


def logits(folder):
    model = load_bare_model(open_checkpoint(folder))
    return model.logits(run_sequence(model, TOKENS))


def test_all_slices_of_an_expert_are_that_expert(source, tmp_path):
    write_fine_experts(source, tmp_path / "fine", num_slices=4, mixing=1e-6)
    config = open_checkpoint(tmp_path / "fine").config
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"]) == (12, 4, 12)
    torch.testing.assert_close(logits(tmp_path / "fine"), logits(source), atol=1e-3, rtol=1e-3)


def test_mixing_takes_slices_of_several_experts(source, text, tmp_path):
    write_fine_experts(source, tmp_path / "fine", num_slices=4, mixing=0.5)
    oracle, info = MixtralForCausalLM.from_pretrained(tmp_path / "fine", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.inference_mode():
        expected = oracle.eval()(torch.tensor([TOKENS])).logits[0]
    found = logits(tmp_path / "fine")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (found - logits(source)).abs().max() > 1e-2
    quality = measure_quality(source, tmp_path / "fine", read_texts=partial(calibration_text, file=text))
    assert quality.moe_perplexity == pytest.approx(quality.dense_perplexity, rel=0.3)
    assert len({round(share, 3) for share in quality.texts[0].expert_shares[:4]}) > 1  # slices of one expert


def test_the_command_prints_perplexities(source, text, tmp_path, monkeypatch, capsys):
    measure = partial(measure_quality, read_texts=partial(calibration_text, file=text))
    monkeypatch.setattr(fine_experts, "measure_quality", measure)
    options = ["--source", str(source), "--out", str(tmp_path / "fine"), "--slices", "4", "--mixing", "0"]
    monkeypatch.setattr(sys, "argv", ["fine_experts", *options])
    fine_experts.main()
    shown = json.loads(capsys.readouterr().out)
    assert shown["perplexity"] == pytest.approx(shown["source_perplexity"], rel=1e-3)


def test_other_models_are_refused(tmp_path):
    write_tiny_llama(tmp_path / "llama")
    with pytest.raises(SystemExit, match="must be a Mixtral"):
        write_fine_experts(tmp_path / "llama", tmp_path / "fine", num_slices=4, mixing=0.1)
