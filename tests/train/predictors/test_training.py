"""Trainings on text with known experts: the learnt choice, the end of training, and the same bits after a stop."""

import dataclasses

import pytest
import torch

from moeflow.core.errors import ConfigError
from moeflow.models.expert_predictor.network import ExpertPredictor, PredictorShape
from moeflow.train.loop import TrainingLoop
from moeflow.train.predictors.recipe import PredictorRecipe
from moeflow.train.predictors.routed_text import RoutedText
from moeflow.train.predictors.training import (
    Embeddings,
    PredictorTask,
    in_groups,
    pieces,
    predict,
    sequences_to_learn,
    split,
)
from moeflow.train.schedule import Progress, Schedule
from moeflow.train.work_folder import StateFile

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


def task(text, learning_rate=1e-2, **more):
    torch.manual_seed(0)
    embeddings = Embeddings(torch.randn(VOCAB, SHAPE.embedding_size), torch.arange(VOCAB))
    recipe = PredictorRecipe(learning_rate=learning_rate, batch_size=8, seed=5, **more)
    return PredictorTask(ExpertPredictor(SHAPE), text, embeddings, recipe)


def trained(text, epochs, on_step=lambda _: None, state=None, **more):
    one = task(text, **more)
    loop = TrainingLoop(one, Schedule(epochs=epochs), state)
    loop.run(on_step)
    return one, loop


def test_published_hyperparameters_have_neither_a_rise_nor_a_decay(text):
    one = task(text, learning_rate=5e-5, schedule="constant", loss="truncated")
    for steps, share in ((0, 0.0), (7, 0.5), (900, 1.0)):
        assert one.learning_rate(Progress(steps=steps), share) == 5e-5
    risen = task(text, learning_rate=5e-5)
    assert risen.learning_rate(Progress(), 0.0) < risen.learning_rate(Progress(steps=50), 0.0) == 5e-5
    few = dataclasses.replace(text, experts=text.experts[..., :2], logits=text.logits[..., :2])
    tasks = [task(few, loss=name) for name in ("truncated", "all")]
    losses = [float(of.loss(of.batches(0)[0], Progress()).detach()) for of in tasks]
    assert 0 < losses[0] < losses[1]  # probabilities among fewer experts are higher


def test_a_predictor_learns_what_depends_on_this_token_and_the_one_before(text):
    losses = []
    one, _ = trained(text, 30, lambda progress: losses.append(progress.best_loss))
    assert min(losses) < 0.1 < losses[len(losses) // 30 + 1]
    _, held_out = split(text)
    with torch.no_grad():
        found = predict(one.predictor, text, one.embeddings, held_out).topk(TOP_K).indices
    wanted = torch.cat([text.experts[where] for where in held_out])[..., :TOP_K]
    assert (found == wanted).float().mean() > 0.95


def test_tokens_of_a_batch_are_predicted_as_if_alone(text):
    one = task(text)
    together = predict(one.predictor, text, one.embeddings, [slice(0, 20), slice(20, 21), slice(21, 54)])
    for where in (slice(0, 20), slice(20, 21), slice(21, 54)):
        alone = predict(one.predictor, text, one.embeddings, [where])
        torch.testing.assert_close(together[where], alone, rtol=1e-4, atol=1e-5)


def test_interrupted_training_ends_with_the_same_bits(text, tmp_path):
    whole, expected = trained(text, 3)

    def stop(progress):
        if (progress.epoch, progress.epoch_step) == (1, 3):
            raise KeyboardInterrupt

    state = StateFile(tmp_path / "training.safetensors")
    with pytest.raises(KeyboardInterrupt):
        trained(text, 3, stop, state)
    second, found = trained(text, 3, state=state)
    assert found.progress.best_loss == expected.progress.best_loss
    assert all(torch.equal(weight, second.weights[name]) for name, weight in whole.weights.items())


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
    one = task(text)
    batches = one.batches(0)
    assert sorted(where.start for batch in batches for where in batch) == sorted(where.start for where in one.learn)
    lengths = [[where.stop - where.start for where in batch] for batch in batches]
    assert sum(max(batch) * len(batch) - sum(batch) for batch in lengths) < 0.35 * sum(map(sum, lengths))
    groups = list(in_groups(one.held_out))
    assert sorted(where.start for group in groups for where in group) == sorted(it.start for it in one.held_out)


def test_the_learning_rate_rises_and_then_falls_to_nearly_nothing(text):
    one = task(text, learning_rate=0.01)
    rates = []
    TrainingLoop(one, Schedule(epochs=12)).run(lambda progress: rates.append(one.optimizer.param_groups[0]["lr"]))
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
    one, loop = trained(dataclasses.replace(text, is_known=is_known), 2)
    _, other = trained(unknown, 2)
    assert all(is_known[piece].any() for piece in one.learn)
    assert sum(piece.stop - piece.start for piece in one.learn) < len(text.token_ids) / 2
    assert loop.progress.best_loss == other.progress.best_loss
    assert len(predict(one.predictor, unknown, one.embeddings, held_out)) == int(
        sum(is_known[where].sum() for where in held_out)
    )
