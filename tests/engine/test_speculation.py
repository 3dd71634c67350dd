"""Drafts never change an answer: the tokens, and the bits of their log-probabilities, are those of plain decoding."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from contextlib import closing

import pytest
import torch

from moeflow.core.engine_messages import Submission
from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.core.token_tree import TokenTree
from moeflow.core.trial import NOT_TRIED
from moeflow.engine.engine import Engine
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from moeflow.speculation.counts import SpeculationCounts
from tests.engine.submissions import run, submission
from tests.tiny_mixtral import write_tiny_mixtral
from tests.token_trees import draft_always, token_tree


class Drafts:
    """Drafts from known answers, some right and some wrong, in place of `Speculation`."""

    def __init__(self, answers: dict[str, list[int]], seed: int = 0) -> None:
        self.answers, self.rng = answers, random.Random(seed)
        self.counts, self.trials = SpeculationCounts(), []

    def trees(self, running, max_tokens):
        return {request: self._tree(request) for request in running if request.is_decoding and self.rng.random() < 0.8}

    def note(self, batch, kept, seconds):
        self.counts.drafted += sum(len(entry.tree) for entry in batch.entries)
        self.counts.kept += sum(len(nodes) for nodes in kept.values())

    def forget(self, request):
        pass

    def _tree(self, request: Request) -> TokenTree:
        right = self.answers[request.request_id][len(request.output_token_ids) :]
        sequences = []
        for _ in range(self.rng.randrange(1, 5)):
            known = right[: self.rng.randrange(8)]
            sequences.append([*known, *[self.rng.randrange(2, 258) for _ in range(self.rng.randrange(4))]])
        self.rng.shuffle(sequences)
        return token_tree(sequences, max_tokens=self.rng.randrange(1, 24))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return folder


def load(folder, num_blocks: int = 60, **settings) -> Engine:
    values = {"dtype": "float32"} | settings
    config = resolve(
        Settings(model=str(folder), num_threads=1, max_num_seqs=8, max_num_batched_tokens=48, **values)
    ).config
    scheduler = dataclasses.replace(config.scheduler, num_blocks=num_blocks, max_model_len=400)
    return Engine.load(dataclasses.replace(config, scheduler=scheduler))


def jobs(**sampling) -> list[Submission]:
    rng = random.Random(1)
    prompts = [[rng.randrange(2, 258) for _ in range(length)] for length in (3, 40, 90, 230, 255)]
    prompts.append([*prompts[2][:64], 5, 6])
    return [submission(f"r{i}", prompt, **{"max_tokens": 40, **sampling}) for i, prompt in enumerate(prompts)]


def answers(engine: Engine, submissions: list[Submission]):
    for one in submissions:
        engine.submit(one)
    found = run(engine)
    return {
        name: (
            [token for output in outputs for token in output.token_ids],
            [logprobs for output in outputs for logprobs in output.logprobs or ()],
            outputs[-1].finish_reason,
        )
        for name, outputs in found.items()
    }


def tokens(found):
    return {name: token_ids for name, (token_ids, *_) in found.items()}


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_dtype": "int8"}, {"dtype": "auto", "quantize": "int8"}, {"dtype": "bfloat16", "kv_dtype": "bfloat16"}],
    ids=str,
)
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.4, "repetition_penalty": 1.2}],
    ids=["greedy", "sampled"],
)
def test_answers_are_the_same_to_the_bit(tiny, settings, sampling):
    submissions = jobs(logprobs=2, **sampling)
    plain = answers(load(tiny, **settings), submissions)
    engine = load(tiny, **settings)
    engine._speculation = drafts = Drafts(tokens(plain))
    found = answers(engine, submissions)
    assert found == plain
    assert 50 < drafts.counts.kept < drafts.counts.drafted - 50


@pytest.mark.slow
def test_ranks_keep_what_the_first_one_keeps(tiny):
    submissions = jobs(logprobs=1, temperature=0.8)
    plain = answers(load(tiny), submissions)
    with closing(load(tiny, num_ranks=2, attention_layout="tensor")) as engine:
        engine._speculation = drafts = Drafts(tokens(plain))
        assert answers(engine, submissions) == plain
    assert drafts.counts.kept > 50


def test_preempted_requests_get_the_same_tokens(tiny):
    submissions = jobs(temperature=0.8, max_tokens=140)[:4]
    plain = answers(load(tiny, num_blocks=100), submissions)
    engine = load(tiny, num_blocks=26)
    engine._speculation = Drafts(tokens(plain))
    assert answers(engine, submissions) == plain
    assert engine.stats().preemptions_total > 0


def test_requests_end_where_they_end_without_drafts(tiny):
    submissions = jobs(temperature=0.8, stop_token_ids=list(range(30, 33)), min_tokens=5, max_tokens=60)
    plain = answers(load(tiny), submissions)
    longer = {name: [*token_ids, 8, 9, 10] for name, token_ids in tokens(plain).items()}
    engine = load(tiny)
    engine._speculation = Drafts(longer)
    assert answers(engine, submissions) == plain
    assert {reason.value for _, _, reason in plain.values()} == {"stop", "length"}


def test_what_is_kept_of_a_tree_can_be_reused_as_a_prefix(tiny):
    (first,) = jobs(temperature=0.0, max_tokens=60)[:1]
    plain_engine, engine = load(tiny), load(tiny)
    plain = answers(plain_engine, [first])
    engine._speculation = Drafts(tokens(plain))
    assert answers(engine, [first]) == plain
    turn = submission("turn", [*first.prompt_token_ids, *tokens(plain)["r0"], 7, 8], logprobs=1)
    want = answers(plain_engine, [turn])
    engine._speculation = None
    assert answers(engine, [turn]) == want
    assert engine.stats().prefix_hit_tokens_total == plain_engine.stats().prefix_hit_tokens_total > 0


def test_sampled_tokens_are_distributed_as_the_models(tiny):
    """With a tree of drafts, each right now and then; chi-square over the likeliest tokens."""
    engine = load(tiny)
    prompt = [5, 9, 77]
    num = 1500

    def counted(drafts) -> Counter:
        engine._speculation = drafts
        found = Counter()
        for seed in range(num):
            params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=1.0, top_k=5)
            engine.submit(Submission(f"s{seed}", prompt, params, seed=seed + (0 if drafts is None else num)))
            outputs = run(engine)[f"s{seed}"]
            found[[token for output in outputs for token in output.token_ids][1]] += 1
        return found

    plain = counted(None)

    class Tree(Drafts):
        def _tree(self, request):
            return token_tree([[token] for token, _ in plain.most_common(3)])

    drafted = counted(Tree({}))
    cells = [token for token, number in (plain + drafted).items() if number >= 20]
    rest = [num - sum(one[token] for token in cells) for one in (plain, drafted)]
    pairs = [(plain[token], drafted[token]) for token in cells] + ([tuple(rest)] if sum(rest) >= 20 else [])
    chi_square = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    degrees = len(pairs) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5 + 4  # far beyond the 99.9th percentile
    assert torch.tensor([a for a, _ in pairs]).float().std() > 0


def test_suffixes_are_found(tiny):
    """A model that repeats itself is soon drafted; whatever is drafted, the answer is the same."""
    submissions = [submission("a", [5, 6, 7, 8] * 10, max_tokens=120, temperature=0.0)]
    plain = answers(load(tiny), submissions)
    engine = load(tiny, speculators=("suffix",))
    draft_always(engine._speculation)
    assert answers(engine, submissions) == plain
    stats = engine.stats()
    assert stats.drafted_tokens_total >= stats.accepted_tokens_total
    assert stats.speculated_passes_total > 0


def test_drafts_are_tried_once_passes_have_saved_their_time_and_the_result_is_reported(tiny):
    """Drafts that cost nothing are tried again and again; no token changes."""
    submissions = [submission("a", [5, 6, 7, 8] * 10, max_tokens=300, temperature=0.0)]
    plain = answers(load(tiny), submissions)
    engine = load(tiny, speculators=("suffix",))
    engine._clock = itertools.count(1.0).__next__  # a second a pass
    engine._speculation.clock = lambda: 0.0
    (trial,) = engine.stats().trials
    assert (trial.name, trial.is_on, trial.reason) == ("drafts by suffix", False, NOT_TRIED)
    assert answers(engine, submissions) == plain
    (trial,) = engine.stats().trials
    assert trial.reason.startswith("in trial: passes take")
    assert engine.stats().speculated_passes_total > 0
