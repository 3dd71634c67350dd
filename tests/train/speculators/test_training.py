"""Trainings of a tiny student: bits after a stop, what boosting does, and the folder that comes out."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, MiniMaxM2Config, PhimoeConfig

from moeflow.checkpoint.draft_vocabulary import read_draft_vocabulary
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.train.bare_model import load_bare_model, run_sequence
from moeflow.train.loop import TrainingLoop
from moeflow.train.speculators.batches import split, vocabulary_of
from moeflow.train.speculators.loss import boost_weights
from moeflow.train.speculators.saved_student import load_student, save_student
from moeflow.train.speculators.student import student_from
from moeflow.train.speculators.teacher_text import UNKNOWN, TeacherText
from moeflow.train.speculators.training import SpeculatorTask, predictions, stepped_schedule, timed_schedule
from moeflow.train.work_folder import StateFile, work_folder
from tests.models.parity import SHAPE, random_model
from tests.tiny_mixtral import write_tiny_mixtral


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_tiny_mixtral(folder)
    with closing(open_checkpoint(folder)) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def text():
    """Two kinds of sequences: counting up by one and by two, modulo 20."""
    rows = [(3 + (start + step * torch.arange(24)) % 20) for start in range(20) for step in (1, 2)]
    token_ids = torch.cat(rows)
    likeliest = torch.stack([token_ids, 3 + (token_ids + 5) % 20], dim=1)
    starts = torch.arange(0, len(token_ids), 24)
    likeliest[starts] = UNKNOWN
    logprobs = torch.log(torch.tensor([[0.8, 0.1]])).repeat(len(token_ids), 1)
    return TeacherText(token_ids, torch.full((len(rows),), 24), likeliest, logprobs)


def trained(target, text, weights=None, steps=8, state=None, on_step=lambda _: None):
    learn, held_out = split(text)
    weights = torch.ones(len(text.token_ids)) if weights is None else weights
    schedule = stepped_schedule(steps)
    task = SpeculatorTask(student_from(target, 1), text, learn, held_out, weights, seed=3, schedule=schedule)
    loop = TrainingLoop(task, schedule, state)
    loop.run(on_step)
    return task.student, loop


def test_interrupted_training_ends_with_the_same_bits(target, text, tmp_path):
    whole, _ = trained(target, text)

    def stop(progress):
        if progress.steps == 5:
            raise KeyboardInterrupt

    state = StateFile(tmp_path / "training.safetensors")
    with pytest.raises(KeyboardInterrupt):
        trained(target, text, state=state, on_step=stop)
    second, loop = trained(target, text, state=state)
    assert loop.progress.steps == 8
    for name, weight in whole.weights.items():
        assert torch.equal(weight, second.weights[name]), name


def test_a_timed_schedule_fills_the_budget(target, text):
    learn, held_out = split(text)
    student, weights = student_from(target, 1), torch.ones(len(text.token_ids))

    def make(schedule):
        return SpeculatorTask(student, text, learn, held_out, weights, seed=3, schedule=schedule)

    before = {name: weight.clone() for name, weight in student.weights.items()}
    schedule = timed_schedule(make, 1e6, 1)
    assert schedule.steps > 1000
    assert schedule.evaluate_every == schedule.steps // 20
    assert schedule.num_threads == 1
    assert timed_schedule(make, 0.0, 1).steps == 20
    assert all(torch.equal(weight, before[name]) for name, weight in student.weights.items())


def test_a_student_learns_and_one_of_a_pool_what_those_before_it_got_wrong(target, text):
    learn, _ = split(text)
    steps_by_two = torch.arange(len(text.token_ids)) // 24 % 2 == 1
    shares = []
    for covered in (torch.zeros_like(steps_by_two), ~steps_by_two):
        student, _ = trained(target, text, boost_weights(covered), steps=60)
        found, where = predictions(student, text, learn, 1)
        assert set(found.flatten().tolist()) <= set(vocabulary_of(text, 256)[0].tolist())
        right = found[:, 0] == text.token_ids[where]
        shares.append(float(right[steps_by_two[where]].float().mean() - right[~steps_by_two[where]].float().mean()))
    assert shares[1] > shares[0]


def test_the_folder_gives_the_same_logits_in_transformers_and_here(target, tmp_path):
    student = student_from(target, 2)
    save_student(student, torch.arange(2, 250), target, tmp_path / "1", overwrite=False)
    saved = load_student(student, tmp_path / "1")
    token_ids = torch.randint(2, 250, (30,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = saved.hidden(token_ids, [30]) @ saved.head.T
        oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "1", dtype=torch.float32)(token_ids[None]).logits[0]
    with closing(open_checkpoint(tmp_path / "1")) as checkpoint:
        model = load_bare_model(checkpoint)
        loaded = model.logits(run_sequence(model, token_ids.tolist()))
    assert torch.allclose(own, oracle, atol=2e-4)
    assert torch.allclose(loaded, oracle, atol=2e-4)
    assert read_draft_vocabulary(tmp_path / "1", 300) == list(range(2, 250))


def test_sequences_of_a_batch_see_nothing_of_each_other(target):
    student = student_from(target, 1)
    first, second = torch.arange(2, 12), torch.arange(40, 60)
    together = student.hidden(torch.cat([first, second]), [10, 20])
    assert torch.allclose(together[10:], student.hidden(second, [20]), atol=1e-5)


def test_too_little_text_and_wrong_layers_are_refused(target, text):
    with pytest.raises(ConfigError, match="from 1 to 2"):
        student_from(target, 3)
    short = replace(text, token_ids=text.token_ids[:48], lengths=text.lengths[:2])
    with pytest.raises(ConfigError, match="too little"):
        split(short)


def test_unfinished_work_of_another_kind_is_not_gone_on_with(tmp_path):
    with work_folder(tmp_path / "work") as work:
        work.check_recipe({"layers": 2})
        work.check_recipe({"layers": 2})
        with pytest.raises(ConfigError, match="another layers"):
            work.check_recipe({"layers": 3})
        with pytest.raises(ConfigError, match="another process"), work_folder(tmp_path / "work"):
            pass


def test_no_student_is_made_of_layers_that_a_llama_has_not(tmp_path):
    config = MiniMaxM2Config(**SHAPE, head_dim=16, rotary_dim=8, num_local_experts=4, num_experts_per_tok=2)
    random_model(config).save_pretrained(tmp_path)
    with (
        closing(open_checkpoint(tmp_path)) as target,
        pytest.raises(ConfigError, match="pairwise rotated heads"),
    ):
        student_from(target, 1)
    random_model(PhimoeConfig(**SHAPE, num_local_experts=4)).save_pretrained(tmp_path)
    with closing(open_checkpoint(tmp_path)) as target, pytest.raises(ConfigError, match="have layer norms"):
        student_from(target, 1)
