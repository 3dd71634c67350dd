import json
import statistics

import pytest

from moeflow.core.errors import ConfigError
from moeflow.workload.offline import SHAPES, made_up_lengths, make_job, read_questions, replicated_lengths


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_made_up_lengths_are_the_papers(shape):
    lengths = made_up_lengths(shape, 4000, seed=0)
    assert max(lengths) == shape.longest_prompt
    assert statistics.fmean(lengths) == pytest.approx(shape.mean_prompt, rel=0.01)
    assert lengths == made_up_lengths(shape, 4000, seed=0) != made_up_lengths(shape, 4000, seed=1)


def test_questions_are_replicated_evenly():
    drawn = replicated_lengths([3, 5, 9], 100, seed=0)
    assert len(drawn) == 100
    assert max(map(drawn.count, (3, 5, 9))) - min(map(drawn.count, (3, 5, 9))) <= 1


def test_questions_are_read(tmp_path):
    file = tmp_path / "questions.jsonl"
    lines = [json.dumps({"question_id": i, "turns": [f"q{i}", "more"]}) for i in range(3)]
    file.write_text("\n".join(lines) + "\n\n", encoding="utf-8-sig")
    assert read_questions(file) == ["q0", "q1", "q2"]


@pytest.mark.parametrize("content", ["", "x", "[]", "{}", '{"turns": []}'])
def test_what_holds_no_question_is_told(tmp_path, content):
    file = tmp_path / "questions.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match="no question"):
        read_questions(file)


def test_a_job_is_due_at_once():
    job = make_job([4, 7], 3, vocab_size=10, seed=0)
    assert [(each.at_s, len(each.prompt_token_ids), each.num_new) for each in job] == [(0.0, 4, 3), (0.0, 7, 3)]
    assert all(0 <= token < 10 for each in job for token in each.prompt_token_ids)
