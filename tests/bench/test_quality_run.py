"""Quality of a format: the figures by hand, and the engine's perplexity against the plain one."""

from __future__ import annotations

import dataclasses
import math
from contextlib import closing

import pytest

from moeflow.bench.quality_run import (
    Answers,
    QualityTask,
    answer,
    compare,
    describe_comparison,
    in_own_precision,
    make_task,
)
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.errors import ConfigError
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.train.bare_model import load_bare_model
from moeflow.train.perplexity import perplexity
from tests.tiny_mixtral import write_tiny_mixtral


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return str(folder)


def config(folder: str, **changes):
    return resolve(Settings(model=folder, num_threads=1, max_num_seqs=1, prefix_caching=False, **changes)).config


def test_the_figures_by_hand():
    reference = Answers([math.log(0.5), math.log(0.25)], [1, 2], [[7, 8, 9], [1, 2, 3]])
    tested = Answers([math.log(0.25), math.log(0.25)], [1, 3], [[7, 8, 9], [1, 5, 3]])
    result = compare(reference, tested)
    assert result["num_tokens"] == 2
    assert result["reference_perplexity"] == pytest.approx(math.sqrt(8))
    assert result["perplexity"] == pytest.approx(4)
    assert result["change_percent"] == pytest.approx(100 * (math.sqrt(2) - 1))
    # differences log 2 and 0: their standard deviation is log 2 / sqrt 2, their mean's error half of log 2
    assert result["change_error_percent"] == pytest.approx(100 * math.sqrt(2) * math.log(2) / 2)
    assert result["same_likeliest_share"] == 0.5
    assert (result["same_greedy_tokens"], result["same_greedy_share"]) == ([3, 1], pytest.approx(4 / 6))


def test_the_engines_perplexity_is_the_plain_one(folder):
    task = QualityTask([[5 + (n * n) % 250 for n in range(start, start + 40)] for start in (0, 3)], [[5, 6, 7]], 4)
    steps = []
    found = answer(config(folder), task, lambda: steps.append(1))
    with closing(open_checkpoint(folder)) as checkpoint:
        plain = perplexity(load_bare_model(checkpoint), task.windows)
    assert math.exp(-sum(found.logprobs) / len(found.logprobs)) == pytest.approx(plain, rel=1e-3)
    assert len(found.logprobs) == len(found.likeliest) == 2 * 39
    assert [len(tokens) for tokens in found.continuations] == [4]
    assert len(steps) == task.num_steps == 3
    assert compare(found, found)["same_greedy_share"] == 1.0


def test_prompts_are_cut_from_all_over_the_text(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(ord("a") + n % 26) for n in range(1400)))
    task = make_task(folder, text, num_prompts=4, new_tokens=8, seed=0)
    assert [len(window) for window in task.windows[:2]] == [512, 512]
    assert sum(map(len, task.windows)) >= 1399
    assert [len(prompt) for prompt in task.prompts] == [48] * 4
    assert len({tuple(prompt) for prompt in task.prompts}) > 1
    assert task == make_task(folder, text, num_prompts=4, new_tokens=8, seed=0)
    assert task.prompts != make_task(folder, text, num_prompts=4, new_tokens=8, seed=1).prompts


def test_without_a_text_the_bundled_held_out_one_is_used(folder):
    task = make_task(folder, None, num_prompts=3, new_tokens=8, seed=0)
    assert sum(map(len, task.windows)) > 1000
    assert len(task.prompts) == 3


def test_formats_and_limits(folder):
    half = config(folder, dtype="bfloat16")
    wish = Settings(model=folder, dtype="bfloat16", kv_dtype="bfloat16", capacity_factor=1.5)
    assert in_own_precision(wish) == Settings(model=folder, dtype="float32", kv_dtype="auto")
    about = describe_comparison(config(folder, dtype="float32"), half)
    assert (about["reference_format"], about["weight_format"]) == ("float32", "bfloat16")
    short = dataclasses.replace(half, scheduler=dataclasses.replace(half.scheduler, max_model_len=100))
    with pytest.raises(ConfigError, match="needs 512 tokens, but the engine allows 100"):
        answer(short, QualityTask([[5] * 9], [[5]], 4), lambda: None)
