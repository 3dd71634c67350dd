"""The training loop on a task of four weights: bits after a stop, limits, early stopping."""

import copy
import math
import signal
from dataclasses import asdict

import pytest
import torch

from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.train import loop
from moeflow.train.loop import TrainingLoop, saved_schedule
from moeflow.train.schedule import Progress, Schedule, cosine
from moeflow.train.work_folder import StateFile

STEPS_OF_EPOCH = 3


class Line:
    """Linear regression; every batch and its noise depend on epoch and step alone."""

    def __init__(self, rate=0.05, num_batches=STEPS_OF_EPOCH):
        self.weights = {"w": torch.zeros(4, requires_grad=True), "unused": torch.ones(2, requires_grad=True)}
        self.optimizer = torch.optim.AdamW(list(self.weights.values()), lr=1.0)
        self.rate, self.num_batches, self.shares, self.evaluated = rate, num_batches, [], []

    def batches(self, epoch):
        chance = torch.Generator().manual_seed(epoch)
        return list(torch.randn(self.num_batches, 8, 4, generator=chance))

    def learning_rate(self, progress, share_done):
        self.shares.append(share_done)
        return self.rate * cosine(share_done, 0.1)

    def loss(self, batch, progress):
        return (batch @ self.weights["w"] - batch @ torch.arange(4.0)).square().mean()

    def held_out_loss(self, progress):
        self.evaluated.append(progress.steps)
        return float((self.weights["w"] - torch.arange(4.0)).square().mean())


def trained(schedule, state=None, on_step=lambda _: None, **task):
    line = Line(**task)
    training = TrainingLoop(line, schedule, state)
    training.run(on_step)
    return line, training


@pytest.mark.parametrize("schedule", [Schedule(epochs=3), Schedule(steps=10, evaluate_every=2)])
@pytest.mark.parametrize("stop_at", range(1, 9))
def test_interrupted_training_ends_with_the_same_bits(tmp_path, schedule, stop_at):
    def stop(progress):
        if progress.steps == stop_at:
            signal.raise_signal(signal.SIGINT)

    whole, expected = trained(schedule)
    state = StateFile(tmp_path / "training.safetensors")
    with pytest.raises(KeyboardInterrupt):
        trained(schedule, state, stop)
    assert saved_schedule(state) == schedule
    resumed, found = trained(schedule, state)
    assert torch.equal(resumed.weights["w"], whole.weights["w"])
    assert found.tensors().keys() == expected.tensors().keys()
    assert (found.progress.best_loss, found.progress.steps) == (expected.progress.best_loss, expected.progress.steps)
    assert len(resumed.shares) == len(whole.shares) - stop_at


def test_an_interrupt_within_the_evaluation_repeats_it(tmp_path, monkeypatch):
    state = StateFile(tmp_path / "training.safetensors")
    schedule = Schedule(epochs=3)

    def stop(self, progress):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(Line, "held_out_loss", stop)
        with pytest.raises(KeyboardInterrupt):
            trained(schedule, state)
    resumed, found = trained(schedule, state)
    assert resumed.evaluated == [STEPS_OF_EPOCH * epoch for epoch in (1, 2, 3)]
    assert found.progress.best_loss == trained(schedule)[1].progress.best_loss


def test_the_state_is_saved_now_and_then(tmp_path, monkeypatch):
    state = StateFile(tmp_path / "training.safetensors")
    saved = []
    monkeypatch.setattr(loop, "SAVE_EVERY_S", -1.0)
    monkeypatch.setattr(loop, "SAVING_SHARE", math.inf)
    trained(Schedule(epochs=1), state, lambda _: saved.append(state.metadata()["progress"]["steps"]))
    assert saved == [0, 1, 2]  # after each step, once `on_step` has returned
    _, training = trained(Schedule(epochs=1), state)
    assert state.metadata()["progress"] == asdict(training.progress)


def test_a_complete_training_ends_at_once(tmp_path):
    state = StateFile(tmp_path / "training.safetensors")
    whole, _ = trained(Schedule(epochs=2), state)
    again, _ = trained(Schedule(epochs=2), state)
    assert again.shares == []
    assert torch.equal(again.weights["w"], whole.weights["w"])


def test_evaluation_follows_each_epoch_or_a_number_of_steps():
    assert trained(Schedule(epochs=2))[0].evaluated == [3, 6]
    assert trained(Schedule(steps=7, evaluate_every=3))[0].evaluated == [3, 6, 7]


def test_it_ends_without_progress_and_with_the_best_weights():
    line = Line()
    training = TrainingLoop(line, Schedule(epochs=1000, patience=3))
    best = []

    def ruin(progress):
        if progress.epoch == 4 and not best:
            line.rate = 5.0
            best.append(copy.deepcopy(training.best["w"]))

    training.run(ruin)
    assert training.progress.since_best == 3
    assert training.progress.epoch < 10
    assert torch.equal(line.weights["w"], training.best["w"])
    assert not torch.equal(best[0], torch.zeros(4))


def test_a_time_budget_ends_an_epoch_with_an_evaluation():
    line, training = trained(Schedule(seconds=1e-9))
    assert line.evaluated == [1]
    assert (training.progress.epoch, training.progress.begun_epochs) == (0, 1)
    assert training.progress.best_loss < math.inf
    assert Schedule(seconds=3.0).is_over(Progress(spent_s=3.0))


def test_the_share_that_is_done_is_that_of_the_nearest_limit():
    assert trained(Schedule(epochs=2))[0].shares == pytest.approx([step / 6 for step in range(6)])
    schedule = Schedule(steps=10, seconds=20.0)
    assert schedule.share_done(Progress(steps=3, spent_s=4.0), 1) == 0.3
    assert schedule.share_done(Progress(steps=3, spent_s=8.0), 1) == 0.4
    assert schedule.share_done(Progress(steps=3, spent_s=80.0), 1) == 1.0


def test_progress_counts_steps_epochs_or_seconds():
    progress = Progress(epoch=2, steps=7, spent_s=9.9)
    assert Schedule(steps=8, evaluate_every=1).count(progress) == (7, 8)
    assert Schedule(epochs=3).count(progress) == (2, 3)
    assert Schedule(seconds=5.0).count(progress) == (5, 5)


def test_nothing_to_learn_from_is_an_error():
    with pytest.raises(ConfigError, match="too little text"):
        trained(Schedule(epochs=1), num_batches=0)


def test_a_state_of_another_version_is_refused(tmp_path):
    state = StateFile(tmp_path / "training.safetensors")
    state.save({"weight": torch.zeros(1)}, {"progress": {"step": 3}})
    with pytest.raises(CheckpointError, match=r"another version.*--restart"):
        trained(Schedule(epochs=1), state)
