"""The network token by token against whole texts, its window, and folders that do not belong."""

import dataclasses
from contextlib import closing

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import CheckpointError
from moeflow.kernels.cpu import extension
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.models.expert_predictor.packed_network import for_serving
from moeflow.models.expert_predictor.saved import load_predictor, save_predictor
from tests.kernels.cpu_reference import ROUNDING_ISAS
from tests.tiny_mixtral import write_tiny_mixtral

SHAPE = PredictorShape(embedding_size=12, num_layers=3, num_experts=5, top_k=2, hidden_size=16, window=4)
DIRECT = dataclasses.replace(SHAPE, has_direct=True)


def made_of(shape):
    """Return a network whose heads see embeddings from the start, if they do at all."""
    one = ExpertPredictor(shape).requires_grad_(False)
    if shape.has_direct:
        torch.nn.init.normal_(one.direct.weight, std=0.3)
    return one


@pytest.fixture(params=[(SHAPE, False), (DIRECT, False), (DIRECT, True)], ids=["published", "direct", "packed"])
def predictor(request):
    torch.manual_seed(2)
    shape, is_packed = request.param
    made = made_of(shape)
    if not is_packed:
        return made
    if not extension.is_available():
        pytest.skip(extension.why_not())
    return for_serving(made)


def test_pieces_of_texts_of_any_length_are_predicted_as_wholes(predictor):
    texts = torch.randn(2, 11, 12)
    whole = predictor(texts)
    _, (first,) = predictor.go_on(texts[:1, :3], [predictor.begin()])
    states = [first, predictor.begin()]
    # Two texts, one ahead of the other, whose next tokens are computed in one batch.
    places = [3, 0]
    for num_tokens in (1, 2, 1, 3, 1):
        pieces = torch.stack([texts[text, at : at + num_tokens] for text, at in enumerate(places)])
        logits, states = predictor.go_on(pieces, states)
        for text, at in enumerate(places):
            torch.testing.assert_close(logits[text], whole[text, at : at + num_tokens], rtol=1e-4, atol=1e-5)
        places = [at + num_tokens for at in places]
    assert all(len(state.keys) == SHAPE.window - 1 for state in states)


def test_heads_see_the_embedding_where_they_are_direct():
    torch.manual_seed(2)
    one, text = made_of(DIRECT), torch.randn(1, 6, 12)
    published = ExpertPredictor(SHAPE).requires_grad_(False)
    published.load_state_dict({name: weight for name, weight in one.state_dict().items() if name != "direct.weight"})
    sizes = text.square().mean(-1, keepdim=True).add(torch.finfo(torch.float32).eps).sqrt()
    wanted = published(text) + (text / sizes @ one.direct.weight.T).view(1, 6, 3, 5)
    torch.testing.assert_close(one(text), wanted, rtol=1e-4, atol=1e-5)


def test_a_token_is_predicted_from_those_before_it_and_itself(predictor):
    text = torch.randn(1, 6, 12)
    other = text.clone()
    other[0, 4:] = torch.randn(2, 12)
    before, after = predictor(text), predictor(other)
    assert torch.equal(before[0, :4], after[0, :4])
    assert not torch.allclose(before[0, 4], after[0, 4])


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_packed_it_says_the_same_but_for_bfloat16():
    torch.manual_seed(2)
    for is_causal in (True, False):
        shape = dataclasses.replace(DIRECT, is_causal=is_causal, hidden_size=40, embedding_size=70)
        one = made_of(shape)
        packed, texts = for_serving(one), torch.randn(3, 9, 70)
        logits, expected = packed(texts), one(texts)
        assert not torch.equal(logits, expected)
        torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02)
        rounded = ExpertPredictor(shape).requires_grad_(False)
        rounded.load_state_dict(
            {name: w.bfloat16().float() if w.dim() == 2 else w for name, w in one.state_dict().items()}
        )
        if extension.isa_name() not in ROUNDING_ISAS:
            torch.testing.assert_close(logits, rounded(texts), rtol=1e-4, atol=1e-5)
        if not is_causal:
            alone = torch.cat([packed(text[None]) for text in texts])
            assert torch.equal(alone, logits)


def test_what_is_known_as_a_whole_is_seen_as_a_whole(predictor):
    torch.manual_seed(2)
    whole = ExpertPredictor(dataclasses.replace(SHAPE, is_causal=False)).requires_grad_(False)
    texts, lengths = torch.randn(3, 9, 12), torch.tensor([9, 4, 1])
    together = whole(texts, lengths)
    for text, length, logits in zip(texts, lengths.tolist(), together, strict=True):
        torch.testing.assert_close(whole(text[None, :length])[0], logits[:length], rtol=1e-4, atol=1e-5)
    other = texts[:1].clone()
    other[0, 8] = torch.randn(12)
    assert not torch.allclose(whole(other)[0, 0], together[0, 0])


def test_a_folder_belongs_to_one_model(tmp_path):
    predictor = ExpertPredictor(SHAPE).requires_grad_(False)
    for name, seed in (("one", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        write_tiny_mixtral(tmp_path / name, seed=seed)
    folder = tmp_path / "predictor"
    with closing(open_checkpoint(tmp_path / "one")) as one, closing(open_checkpoint(tmp_path / "other")) as other:
        with pytest.raises(CheckpointError, match="moeflow train predictor"):
            load_predictor(folder, one)
        save_predictor(predictor, one, folder, {})
        loaded = load_predictor(folder, one)
        assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in predictor.state_dict().items())
        with pytest.raises(CheckpointError, match="another model"):
            load_predictor(folder, other)
        (folder / "predictor.safetensors").write_bytes(b"damaged")
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_predictor(folder, one)
