import json
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer, MixtralForCausalLM

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CapacityError, CheckpointError, ConfigError
from moeflow.planner.hardware.host import HostResources
from moeflow.text.tokenizer import Tokenizer
from moeflow.train import bare_model
from moeflow.train.bare_model import load_bare_model, run_sequence
from moeflow.train.calibration_text import calibration_text
from moeflow.train.phases import Phase
from moeflow.train.upcycle_recipe import UpcycleRecipe
from moeflow.train.upcycling import upcycle
from moeflow.train.upcycling_quality import measure_quality
from tests.tiny_llama import LAYERS, write_tiny_llama

PHASES = [Phase.READING, Phase.CALIBRATING, Phase.FITTING, Phase.WRITING]

RECIPE = UpcycleRecipe(num_experts=4, top_k=2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "mine.txt"
    file.write_text("The quick brown fox counts: 1, 2, 3! Où est la gare ? def f(x): return {x: [x]}\n" * 12)
    return file


@pytest.fixture(scope="module")
def mixtral(llama, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "mixtral"
    upcycle(llama, folder, RECIPE, calibration=text)
    return folder


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_transformers_loads_it_unchanged_and_computes_the_same(mixtral):
    oracle, info = MixtralForCausalLM.from_pretrained(mixtral, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    token_ids = list(range(2, 120))
    with torch.inference_mode():
        expected = oracle.eval()(torch.tensor([token_ids])).logits[0]
    model = load_bare_model(open_checkpoint(mixtral))
    torch.testing.assert_close(model.logits(run_sequence(model, token_ids)), expected, atol=1e-4, rtol=1e-4)


def test_tokenizer_and_chat_template_come_along(llama, mixtral):
    ours, theirs = Tokenizer.load(mixtral), AutoTokenizer.from_pretrained(mixtral)
    sentence = "Où est <s> the 你好?"
    assert ours.encode(sentence) == theirs(sentence).input_ids == Tokenizer.load(llama).encode(sentence)
    conversation = [{"role": "user", "content": "Hello"}]
    prompt = theirs.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(conversation) == prompt


def test_same_seed_same_bytes(llama, text, mixtral, tmp_path):
    upcycle(llama, tmp_path / "again", RECIPE, calibration=text)
    assert contents(tmp_path / "again") == contents(mixtral)
    upcycle(llama, tmp_path / "other", UpcycleRecipe(num_experts=4, top_k=2, seed=1), calibration=text)
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    first, other = open_checkpoint(mixtral), open_checkpoint(tmp_path / "other")
    assert not torch.equal(first.read(gate), other.read(gate))


def test_every_expert_has_work_and_shares_sum_to_one(llama, mixtral, text):
    quality = measure_quality(llama, mixtral, read_texts=partial(calibration_text, file=text))
    assert len(quality.expert_shares) == LAYERS
    assert all(sum(layer) == pytest.approx(1.0) for layer in quality.expert_shares)
    low, high = quality.busiest_shares
    assert 0.25 <= low <= high <= 0.5  # of 4 experts with 2 a token
    assert quality.idlest_shares[0] > 0.0
    assert quality.moe_perplexity == pytest.approx(quality.dense_perplexity, rel=0.1)


def test_wrong_experts_would_show(llama, mixtral, text, tmp_path):
    """What a test of expert placement rests on: two experts swapped change the logits clearly."""
    model = load_bare_model(open_checkpoint(mixtral))
    token_ids = list(range(2, 60))
    before = model.logits(run_sequence(model, token_ids))
    for layer in model.layers:
        layer.mlp.weights.gate_up[[0, 1]] = layer.mlp.weights.gate_up[[1, 0]]
    after = model.logits(run_sequence(model, token_ids))
    assert (before - after).abs().max() > 1e-2


def test_progress_runs_through_all_phases_to_their_ends(llama, text, tmp_path):
    seen = []
    upcycle(llama, tmp_path / "m", RECIPE, calibration=text, on_progress=lambda *report: seen.append(report))
    assert list(dict.fromkeys(phase for phase, _, _ in seen)) == PHASES
    for phase in PHASES:
        counts = [(done, total) for each, done, total in seen if each == phase]
        assert counts == sorted(counts)
        assert counts[-1][0] == counts[-1][1]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("exception", [KeyboardInterrupt, RuntimeError])
def test_interrupted_in_any_phase_it_leaves_nothing(llama, text, tmp_path, phase, exception):
    def interrupt(current, done, total):
        if current == phase:
            raise exception

    with pytest.raises(exception):
        upcycle(llama, tmp_path / "m", RECIPE, calibration=text, on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_model_is_kept_unless_asked(llama, text, mixtral, tmp_path):
    upcycle(llama, tmp_path / "m", RECIPE, calibration=text)
    before = contents(tmp_path / "m")
    other = UpcycleRecipe(num_experts=3, top_k=1)
    with pytest.raises(ConfigError, match="exists already"):
        upcycle(llama, tmp_path / "m", other, calibration=text)
    assert contents(tmp_path / "m") == before
    upcycle(llama, tmp_path / "m", other, calibration=text, overwrite=True)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["num_local_experts"] == 3


@pytest.mark.parametrize("place", [".", ".."])
def test_the_source_is_never_replaced(llama, place):
    before = contents(llama)
    with pytest.raises(ConfigError, match="holds the source model"):
        upcycle(llama, llama / place, RECIPE, overwrite=True)
    assert contents(llama) == before


def test_a_mixture_of_experts_is_no_source(mixtral, tmp_path):
    with pytest.raises(CheckpointError, match="mixture of experts already"):
        upcycle(mixtral, tmp_path / "m", RECIPE)
    assert list(tmp_path.iterdir()) == []


def test_a_source_without_tokenizer_is_refused_and_leaves_nothing(tmp_path):
    write_tiny_llama(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        upcycle(tmp_path / "llama", tmp_path / "m", RECIPE)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@pytest.mark.parametrize(("share", "dtype"), [(1.2, torch.float32), (0.6, torch.bfloat16), (0.5, None)])
def test_memory_decides_the_type_or_says_need_and_have(llama, monkeypatch, share, dtype):
    checkpoint = open_checkpoint(llama)  # in float32, so its size is what float32 needs, a little more for the pass
    available = int(share * sum(info.num_bytes for info in checkpoint.tensors.values()))
    monkeypatch.setattr(bare_model, "host_resources", lambda: HostResources(2, available, available, None, 0))
    if dtype is not None:
        assert load_bare_model(checkpoint).embed_tokens.dtype == dtype
        return
    with pytest.raises(CapacityError, match=r"need .* have"):
        load_bare_model(checkpoint)
