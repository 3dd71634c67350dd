"""The network against transformers' own encoder, and the measured use of its experts against a plain count."""

import pytest
import torch
from transformers import SwitchTransformersConfig, SwitchTransformersEncoderModel

from moeflow.train.classifiers.expert_use import expert_use
from moeflow.train.classifiers.labelled_text import LabelledText
from moeflow.train.classifiers.network import ClassifierShape, Routed, SwitchClassifier, position_buckets

VOCAB = 40


def shape(**changes):
    sizes = {
        "hidden_size": 24,
        "num_layers": 4,
        "num_sparse_layers": 2,
        "num_experts": 6,
        "num_heads": 3,
        "head_dim": 8,
        "ffn_size": 20,
        "num_classes": 3,
    }
    return ClassifierShape(**(sizes | changes))


def network(**changes):
    torch.manual_seed(0)
    made = shape(**changes)
    one = SwitchClassifier(made, torch.randn(VOCAB, made.hidden_size), dropout=0.5).eval()
    with torch.no_grad():
        for name, weight in one.named_parameters():
            if "norm" in name or "router" in name:
                weight.add_(torch.randn_like(weight))
            if "attention_bias" in name:
                weight.add_(torch.randn_like(weight))
    return one


def texts(*lengths):
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (length,), generator=chance) for length in lengths]


def oracle(one):
    sizes = one.shape
    config = SwitchTransformersConfig(
        vocab_size=VOCAB,
        d_model=sizes.hidden_size,
        d_kv=sizes.head_dim,
        d_ff=sizes.ffn_size,
        num_heads=sizes.num_heads,
        num_layers=sizes.num_layers,
        num_sparse_encoder_layers=sizes.num_sparse_layers,
        num_experts=sizes.num_experts,
        expert_capacity=10**6,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
    )
    theirs = SwitchTransformersEncoderModel(config).eval()
    weights = {name: weight for name, weight in one.state_dict().items() if name.startswith("encoder.")}
    table = one.embed.weight.detach()
    theirs.load_state_dict(weights | {"shared.weight": table, "encoder.embed_tokens.weight": table})
    return theirs


@pytest.mark.parametrize("sparse_layers", [2, 4])
def test_texts_together_give_what_transformers_gives_for_each_alone(sparse_layers):
    one = network(num_sparse_layers=sparse_layers)
    theirs = oracle(one)
    some = texts(5, 1, 200, 33)
    with torch.no_grad():
        logits, routed = one(some)
        hidden = [theirs(input_ids=text[None]).last_hidden_state[0] for text in some]
        expected = torch.stack([one.score(states.mean(dim=0)) for states in hidden])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert len(routed) == sparse_layers
    assert len(routed[0].experts) == sum(map(len, some))
    assert len(routed[0].experts.unique()) > 2


def test_gradients_are_those_of_transformers():
    one = network()
    theirs = oracle(one)
    text = texts(30)[0]
    one([text])[0].sum().backward()
    one.score(theirs(input_ids=text[None]).last_hidden_state[0].mean(dim=0)).sum().backward()
    expected = dict(theirs.named_parameters())
    compared = 0
    for name, weight in one.encoder.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, expected[f"encoder.{name}"].grad, rtol=1e-3, atol=1e-5)
            compared += 1
    assert compared > 20


def test_buckets_are_those_of_transformers():
    attention = SwitchTransformersEncoderModel(
        SwitchTransformersConfig(num_layers=1, num_sparse_encoder_layers=1, num_experts=1, vocab_size=2)
    ).encoder.block[0]
    distances = torch.arange(-600, 601)
    expected = attention.layer[0].SelfAttention._relative_position_bucket(distances)
    assert torch.equal(position_buckets(distances), expected)


def test_losses_are_those_of_the_papers():
    logits = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0]])
    probabilities = logits.softmax(dim=1)
    routed = Routed(torch.zeros(3, 4), logits, probabilities, logits.argmax(dim=1))
    shares = 2 / 3 * probabilities[:, 0].mean() + 1 / 3 * probabilities[:, 1].mean()
    assert routed.balance_loss().item() == pytest.approx(2 * shares.item())
    assert routed.z_loss().item() == pytest.approx((logits.exp().sum(dim=1).log() ** 2).mean().item())
    even = torch.full((4, 2), 0.5)
    assert Routed(even, even, even, torch.tensor([0, 1, 0, 1])).balance_loss().item() == pytest.approx(1.0)


def test_use_of_experts_is_counted_text_by_text():
    one = network()
    some = texts(3, 1, 12)
    found = expert_use(one, LabelledText(some, torch.zeros(3, dtype=torch.int64)))
    distinct = [len(layer.experts.unique()) for text in some for layer in one([text])[1]]
    assert found.distinct_a_text == pytest.approx(sum(distinct) / 6)
    assert found.idle_share == pytest.approx(1 - sum(distinct) / 6 / 6)
    everything = one(some)[1]
    assert found.used_share == pytest.approx(sum(len(layer.experts.unique()) for layer in everything) / 12)
    assert 0 < found.evenness < found.used_share
