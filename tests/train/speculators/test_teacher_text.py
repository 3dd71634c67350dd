"""What a model says when it is asked, and when it asks itself."""

from __future__ import annotations

from contextlib import closing
from itertools import repeat

import pytest
import torch

from moeflow.checkpoint.open import open_checkpoint
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.bare_model import load_bare_model, run_sequence
from moeflow.train.speculators import teacher_text
from moeflow.train.speculators.prompts import around_a_question
from moeflow.train.speculators.teacher_text import QUESTION_TOKENS, ROUND_SEQUENCES, UNKNOWN, Teacher
from tests.tiny_llama import write_tiny_llama

PROMPT = [5, 9, 200]
ANSWER_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_tiny_llama(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}:")
    return folder


@pytest.fixture(scope="module")
def tokenizer(model):
    return Tokenizer.load(model)


@pytest.fixture(scope="module")
def rounds(model):
    """Return the text of two rounds, the first of them repeated, and the counted tokens."""
    counted = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_text, "prompts", lambda *_, **__: repeat(PROMPT))
        with closing(Engine.load(resolve(Settings(model=str(model), max_num_seqs=32)).config)) as engine:
            teacher = Teacher(
                engine, [], answer_tokens=ANSWER_TOKENS, temperature=0.8, seed=0, on_tokens=counted.append
            )
            return [teacher.round(number) for number in (0, 1, 0)], counted


def test_a_round_depends_on_its_number_alone(rounds):
    (first, second, again), counted = rounds
    assert all(torch.equal(first.tensors()[name], again.tensors()[name]) for name in first.tensors())
    assert not torch.equal(first.token_ids, second.token_ids)
    assert sum(counted) > first.num_tokens + second.num_tokens + again.num_tokens  # questions were counted, too


def test_what_was_likely_is_the_models_own_distribution(rounds, model):
    (text, *_), _ = rounds
    with closing(open_checkpoint(model)) as checkpoint:
        plain = load_bare_model(checkpoint)
    for where in text.sequences()[:: ROUND_SEQUENCES // 4]:
        logprobs = plain.logits(run_sequence(plain, text.token_ids[where].tolist())).log_softmax(dim=-1)
        is_said = text.likeliest[where][1:, 0] != UNKNOWN
        found = logprobs[:-1][is_said].gather(1, text.likeliest[where][1:][is_said])
        torch.testing.assert_close(found, text.logprobs[where][1:][is_said], rtol=1e-3, atol=1e-3)
        assert torch.equal(logprobs[:-1][is_said].argmax(dim=-1), text.likeliest[where][1:][is_said][:, 0])


def test_half_of_a_round_is_asked_by_the_model_itself_as_its_template_says(rounds, tokenizer):
    (text, *_), _ = rounds
    sequences = text.sequences()
    assert len(sequences) == ROUND_SEQUENCES
    for where in sequences[: ROUND_SEQUENCES // 2]:
        assert text.token_ids[where][: len(PROMPT)].tolist() == PROMPT
    questions = set()
    for where in sequences[ROUND_SEQUENCES // 2 :]:
        num_asked = int((text.likeliest[where][:, 0] == UNKNOWN).sum())
        asked = tokenizer.decode(text.token_ids[where][:num_asked].tolist(), skip_special_tokens=False)
        assert asked.startswith("<")
        assert asked.endswith(">:")
        assert num_asked <= 3 + QUESTION_TOKENS
        questions.add(asked)
    assert len(questions) > ROUND_SEQUENCES // 4


def test_a_model_without_a_chat_template_is_asked_nothing_of_its_own(tmp_path):
    write_tiny_llama(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(tmp_path)
    assert not tokenizer.has_chat_template
    assert around_a_question(tokenizer) is None
