"""Trainings on text whose experts are known: what is learnt, where it ends, and bits after a stop."""

import copy
import dataclasses
import math

import pytest
import torch

from moeflow.core.errors import ConfigError
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.train.predictors.routed_text import RoutedText
from moeflow.train.predictors.training import (
    PATIENCE,
    Embeddings,
    Limits,
    Progress,
    Training,
    guesses,
    in_groups,
    pieces,
    sequences_to_learn,
    split,
)

VOCAB, LAYERS, EXPERTS, TOP_K = 12, 2, 4, 2
SHAPE = PredictorShape(embedding_size=8, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, hidden_size=24, window=16)


@pytest.fixture(scope="module")
def text():
    """The first layer's expert is that of the token, the second one's that of the token before."""
    chance = torch.Generator().manual_seed(1)
    lengths = torch.tensor([20, 1, 33] * 20)
    token_ids = torch.randint(VOCAB, (int(lengths.sum()),), generator=chance)
    before = torch.cat([token_ids[:1], token_ids[:-1]])
    is_first = torch.zeros(len(token_ids), dtype=torch.bool)
    is_first[torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])] = True
    before[is_first] = 0
    first = torch.stack([token_ids % EXPERTS, before % EXPERTS], dim=1)
    experts = (first[..., None] + torch.arange(EXPERTS)) % EXPERTS
    logits = torch.tensor([4.0, 2.0, 0.0, -2.0]).expand(len(token_ids), LAYERS, EXPERTS)
    return RoutedText(
        token_ids,
        lengths,
        experts.to(torch.int16),
        logits.to(torch.float16),
        torch.ones(60, dtype=torch.bool),
        torch.ones(len(token_ids), dtype=torch.bool),
    )


def training(text, learning_rate=1e-2):
    torch.manual_seed(0)
    embeddings = Embeddings(torch.randn(VOCAB, SHAPE.embedding_size), torch.arange(VOCAB))
    return Training(ExpertPredictor(SHAPE), text, embeddings, learning_rate=learning_rate, batch_sequences=8, seed=5)


def test_a_predictor_learns_what_depends_on_this_token_and_the_one_before(text):
    one = training(text)
    losses = []
    one.run(Limits(epochs=30), lambda progress: losses.append(progress.best_loss))
    assert min(losses) < 0.1 < losses[len(losses) // 30 + 1]
    learnt = one.best_predictor()
    _, held_out = split(text)
    with torch.no_grad():
        found = guesses(learnt, text, one.embeddings, held_out).topk(TOP_K).indices
    wanted = torch.cat([text.experts[where] for where in held_out])[..., :TOP_K]
    assert (found == wanted).float().mean() > 0.95


def test_tokens_of_a_batch_are_predicted_as_if_alone(text):
    one = training(text)
    together = guesses(one.predictor, text, one.embeddings, [slice(0, 20), slice(20, 21), slice(21, 54)])
    for where in (slice(0, 20), slice(20, 21), slice(21, 54)):
        alone = guesses(one.predictor, text, one.embeddings, [where])
        torch.testing.assert_close(together[where], alone, rtol=1e-4, atol=1e-5)


def test_work_that_was_stopped_ends_with_the_same_bits(text):
    whole = training(text)
    kept = []

    def keep(progress):
        if (progress.epoch, progress.step) == (1, 3):
            kept.append((progress, copy.deepcopy(whole.tensors())))

    whole.run(Limits(epochs=3), keep)
    second = training(text)
    second.restore(*kept[0])
    second.run(Limits(epochs=3), lambda progress: None)
    assert second.progress.best_loss == whole.progress.best_loss
    for name, weight in whole.best_predictor().named_parameters():
        assert torch.equal(weight, dict(second.best_predictor().named_parameters())[name]), name


def test_it_ends_when_nothing_gets_better_with_the_best_there_was(text):
    one = training(text, learning_rate=1e-2)
    one.run(Limits(epochs=4), lambda progress: None)
    best, loss = copy.deepcopy(one.best), one.progress.best_loss
    one._learning_rate = 1.0  # ruins it
    one.run(Limits(epochs=1000), lambda progress: None)
    assert one.progress.looks_since == PATIENCE
    assert (one.progress.best_loss, one.progress.epoch) == (loss, 4 + PATIENCE)
    assert all(torch.equal(best[name], weight) for name, weight in one.best_predictor().named_parameters())


def test_time_that_is_up_within_an_epoch_ends_it_with_a_look(text):
    one = training(text)
    one.run(Limits(seconds=1e-9), lambda progress: None)
    assert one.progress.epoch == 1
    assert one.progress.best_loss < math.inf
    assert Progress(spent_s=3.0).is_over(Limits(seconds=3.0))


def test_a_tenth_is_held_out_and_pieces_cover_the_rest(text):
    learn, held_out = split(text)
    assert len(held_out) == 6
    rows = sorted(row for where in (*learn, *held_out) for row in range(where.start, where.stop))
    assert rows == list(range(len(text.token_ids)))
    assert list(pieces(slice(3, 40), 16)) == [slice(3, 19), slice(19, 35), slice(35, 40)]
    with pytest.raises(ConfigError, match="too little text"):
        split(
            RoutedText(
                text.token_ids[:20],
                text.lengths[:1],
                text.experts[:20],
                text.logits[:20],
                text.is_found[:1],
                text.is_known[:20],
            )
        )


def test_what_was_made_of_text_is_learnt_from_and_never_measured_with(text):
    is_found = torch.arange(60) % 3 != 1
    mixed = dataclasses.replace(text, is_found=is_found)
    learn, held_out = split(mixed)
    assert len(held_out) == 4
    starts = (text.lengths.cumsum(0) - text.lengths).tolist()
    found_starts = {start for start, is_one in zip(starts, is_found.tolist(), strict=True) if is_one}
    assert {where.start for where in held_out} <= found_starts
    assert sorted(where.start for where in (*learn, *held_out)) == starts
    assert sequences_to_learn(mixed) == [text.token_ids[where].tolist() for where in learn]


def test_an_epoch_has_each_piece_once_with_others_of_its_length(text):
    one = training(text)
    batches = one._batches()
    assert sorted(where.start for batch in batches for where in batch) == sorted(where.start for where in one._learn)
    lengths = [[where.stop - where.start for where in batch] for batch in batches]
    assert sum(max(batch) * len(batch) - sum(batch) for batch in lengths) < 0.35 * sum(map(sum, lengths))
    groups = list(in_groups(one._held_out))
    assert sorted(where.start for group in groups for where in group) == sorted(it.start for it in one._held_out)


def test_the_learning_rate_rises_and_then_falls_to_nearly_nothing(text):
    one = training(text, learning_rate=0.01)
    rates = []
    one.run(Limits(epochs=12), lambda progress: rates.append(one._optimizer.param_groups[0]["lr"]))
    highest = rates.index(max(rates))
    assert 0.005 < rates[highest] <= 0.01
    assert rates[: highest + 1] == sorted(rates[: highest + 1])
    assert rates[highest:] == sorted(rates[highest:], reverse=True)
    assert rates[-1] < 0.0005


def test_of_what_is_not_known_nothing_is_learnt(text):
    is_known = torch.ones(len(text.token_ids), dtype=torch.bool)
    learn, held_out = split(text)
    for where in (*learn, *held_out):
        is_known[where.start : where.start + 16] = where.stop - where.start < 2  # a window, but of short ones
    unknown = dataclasses.replace(text, is_known=is_known, experts=text.experts * is_known[:, None, None])
    one, other = training(dataclasses.replace(text, is_known=is_known)), training(unknown)
    assert all(is_known[piece].any() for piece in one._learn)
    assert sum(piece.stop - piece.start for piece in one._learn) < len(text.token_ids) / 2
    for each in (one, other):
        each.run(Limits(epochs=2), lambda progress: None)
    assert one.progress.best_loss == other.progress.best_loss
    assert len(guesses(one.predictor, unknown, one.embeddings, held_out)) == int(
        sum(is_known[where].sum() for where in held_out)
    )
