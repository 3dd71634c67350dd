import math

import pytest
import torch
from torch.nn import functional as F

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.train.bare_model import ffn_inputs, load_bare_model, run_sequence
from moeflow.train.perplexity import perplexity, windows
from tests.tiny_llama import HIDDEN, LAYERS, VOCAB, write_tiny_llama


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    oracle = write_tiny_llama(folder)
    return load_bare_model(open_checkpoint(folder)), oracle


def random_text(num_tokens):
    return torch.randint(VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)).tolist()


def oracle_nll(oracle, token_ids):
    """Sum of negative log-likelihoods of all tokens but the first, by transformers."""
    tokens = torch.tensor([token_ids])
    with torch.inference_mode():
        logits = oracle(tokens).logits[0, :-1]
    return F.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 200])
def test_one_window_agrees_with_transformers(models, num_tokens):
    model, oracle = models
    text = random_text(num_tokens)
    expected = math.exp(oracle_nll(oracle, text) / (num_tokens - 1))
    assert perplexity(model, [text]) == pytest.approx(expected, rel=1e-4)


def test_windows_see_nothing_of_each_other(models):
    model, oracle = models
    text = random_text(70)
    parts = [text[:32], text[32:64], text[64:]]
    expected = math.exp(sum(oracle_nll(oracle, part) for part in parts) / (70 - 3))
    assert perplexity(model, [text], window=32) == pytest.approx(expected, rel=1e-4)


def test_texts_count_by_their_tokens(models):
    model, oracle = models
    texts = [random_text(90), random_text(10), random_text(1)]
    expected = math.exp((oracle_nll(oracle, texts[0]) + oracle_nll(oracle, texts[1])) / (89 + 9))
    assert perplexity(model, texts) == pytest.approx(expected, rel=1e-4)


def test_a_uniform_model_is_as_surprised_as_its_vocabulary_is_large(models):
    model, _ = models
    weight = model.norm.weight.clone()
    model.norm.weight.zero_()
    assert perplexity(model, [random_text(20)]) == pytest.approx(VOCAB)
    model.norm.weight.copy_(weight)


def test_nothing_to_predict_is_a_clear_error(models):
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        perplexity(models[0], [[5], []])


def test_windows_leave_out_a_single_last_token():
    assert [list(window) for window in windows(range(9), 4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [list(window) for window in windows(range(10), 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert list(windows([], 4)) == []


def test_ffn_inputs_are_what_transformers_feeds_its_blocks(models):
    model, oracle = models
    text = random_text(20)
    expected = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, inputs: expected.append(inputs[0][0]))
        for layer in oracle.model.layers
    ]
    oracle_nll(oracle, text)
    for hook in hooks:
        hook.remove()
    with ffn_inputs(model.layers) as heard:
        run_sequence(model, text[:20])
    run_sequence(model, text)  # after the block nothing listens any more
    assert [len(inputs) for inputs in heard] == [1] * LAYERS
    for (inputs,), wanted in zip(heard, expected, strict=True):
        assert inputs.shape == (20, HIDDEN)
        torch.testing.assert_close(inputs.float(), wanted, atol=2e-2, rtol=1e-2)  # kept in bfloat16
