"""The report of drafts is true: it has every drafted token once, and the accepted path is the answer."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from moeflow.core.engine_messages import MAX_DRAFTED_TOKENS, DraftedTree, TokenOutput
from moeflow.core.errors import RequestError
from moeflow.core.observation import RequestQuestion, SeenDrafts, Watch
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.admission import check_request
from moeflow.engine.engine import Engine
from moeflow.server.stories.seen import drafted_passes
from moeflow.speculation.governor import Governor, ranked
from moeflow.speculation.speculation import Speculation
from moeflow.speculation.speculator import Draft
from moeflow.text.drafted_passes import DraftedPass, DraftTexts
from moeflow.text.output_text import SequenceText
from moeflow.text.tokenizer import Tokenizer
from tests.engine.submissions import run, submission
from tests.engine.test_speculation import load
from tests.shapes import INFO
from tests.tiny_mixtral import write_tiny_mixtral
from tests.token_trees import draft_always

NOTHING = DraftedTree([], [], [], [], [])


class Prophet:
    """Drafts from known answers, with mistakes."""

    def __init__(self, name: str, answers: dict[str, list[int]], seed: int) -> None:
        self.name, self.answers, self.rng = name, answers, random.Random(seed)

    def propose(self, requests, max_depth):
        return [[self._draft(request) for _ in range(self.rng.randrange(4))] for request in requests]

    def believed(self, grade):
        return 0.5

    def forget(self, request):
        pass

    def _draft(self, request) -> Draft:
        right = self.answers[request.request_id][len(request.output_token_ids) :]
        token_ids = [*right[: self.rng.randrange(5)], *(self.rng.randrange(2, 258) for _ in range(2))]
        return Draft(tuple(token_ids), (3,) * len(token_ids))


class Everything(Governor):
    """Computes all drafts, and keeps its choice."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[dict[str, list[tuple[int, ...]]]] = []

    def choose(self, roots, num_rows, max_tokens, absent_of=None):
        chosen = ranked(roots, max_tokens)
        self.chosen.append({request.request_id: [] for request in roots})
        for request, token in chosen:
            self.chosen[-1][request.request_id].append(path_of(token))
        return chosen


def path_of(token) -> tuple[int, ...]:
    return () if token.parent is None else (*path_of(token.parent), token.token_id)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder)
    return folder


def drafting(engine: Engine, answers: dict[str, list[int]]) -> Everything:
    governor = Everything()
    pool = [Prophet("one", answers, 1), Prophet("other", answers, 2)]
    engine._speculation = Speculation(pool, governor=governor)
    draft_always(engine._speculation)
    return governor


def jobs(**sampling):
    rng = random.Random(5)
    prompts = [[rng.randrange(2, 258) for _ in range(length)] for length in (4, 30, 17)]
    return [submission(f"r{i}", prompt, **{"max_tokens": 30, **sampling}) for i, prompt in enumerate(prompts)]


def answered(engine: Engine, submissions) -> dict[str, list[TokenOutput]]:
    for one in submissions:
        engine.submit(one)
    return run(engine)


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def paths(tree: DraftedTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token_id))
    return found


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return Tokenizer.load(tiny)


@pytest.fixture(scope="module")
def reported(tiny):
    submissions = jobs(temperature=0.7)
    with closing(load(tiny)) as engine:
        answers = {name: tokens_of(outputs) for name, outputs in answered(engine, submissions).items()}
    engine = load(tiny)
    governor = drafting(engine, answers)
    wishes = [msgspec.structs.replace(one, sampling=replace(one.sampling, token_trees=True)) for one in submissions]
    outputs = answered(engine, wishes)
    assert {name: tokens_of(found) for name, found in outputs.items()} == answers
    return outputs, governor, engine


def test_accepted_tokens_are_the_passes_first_tokens(reported):
    outputs, _, _ = reported
    trees = [(output, output.drafted_tree) for found in outputs.values() for output in found if output.drafted_tree]
    assert sum(len(tree.accepted) > 1 for _, tree in trees) > 5
    assert sum(len(tree.accepted) < len(tree.token_ids) for _, tree in trees) > 5
    for output, tree in trees:
        assert len(tree.token_ids) == output.num_drafted_tokens
        path = [tree.token_ids[node] for node in tree.accepted]
        assert path == output.token_ids[: len(path)]
        assert [-1, *tree.accepted[:-1]][: len(path)] == [tree.parents[node] for node in tree.accepted]
        if output.finish_reason is None:
            assert len(path) == len(output.token_ids) - 1
            wrong = {one[-1] for one in paths(tree) if list(one[:-1]) == path}
            assert output.token_ids[-1] not in wrong  # else it would have been accepted


def test_every_computed_draft_is_there_once(reported):
    outputs, governor, engine = reported
    chosen = sorted(path for each in governor.chosen for found in each.values() for path in found)
    told = [path for found in outputs.values() for output in found for path in paths(output.drafted_tree or NOTHING)]
    assert sorted(told) == chosen
    for found in outputs.values():
        for output in found:
            assert len(set(paths(output.drafted_tree or NOTHING))) == output.num_drafted_tokens
    stats = engine.stats()
    assert len(told) == stats.drafted_tokens_total


def test_who_drafted_and_the_counts_agree(reported):
    """Totals by speculator and depth, counted again from the reported trees."""
    outputs, _, engine = reported
    drafted = {name: [0] * 16 for name in ("one", "other")}
    accepted = {name: [0] * 16 for name in ("one", "other")}
    trees = [0] * 17
    for found in outputs.values():
        for output in found:
            tree = output.drafted_tree
            if tree is None:
                continue
            assert all(names for names in tree.speculators)
            assert all(0 < chance <= 1 for chance in tree.chances)
            assert all(
                parent < 0 or tree.chances[parent] >= chance
                for parent, chance in zip(tree.parents, tree.chances, strict=True)
            )
            for node, (path, names) in enumerate(zip(paths(tree), tree.speculators, strict=True)):
                for name in names:
                    drafted[name][len(path) - 1] += 1
                    accepted[name][len(path) - 1] += node in tree.accepted
            trees[len(tree.accepted)] += 1
    stats = engine.stats()
    assert {one.name: one.drafted_total for one in stats.speculators} == drafted
    assert {one.name: one.accepted_total for one in stats.speculators} == accepted
    assert stats.trees_total == trees
    both = [names for found in outputs.values() for o in found for names in (o.drafted_tree or NOTHING).speculators]
    assert {tuple(names) for names in both} == {("one",), ("other",), ("one", "other")}


def test_nothing_is_reported_unasked(tiny):
    submissions = jobs()
    with closing(load(tiny)) as engine:
        answers = {name: tokens_of(outputs) for name, outputs in answered(engine, submissions).items()}
    engine = load(tiny)
    drafting(engine, answers)
    found = answered(engine, submissions)
    assert engine.stats().accepted_tokens_total > 20
    assert all(output.drafted_tree is None for outputs in found.values() for output in outputs)


def test_who_asks_where_nothing_drafts_is_told_so():
    wish = SamplingParams(token_trees=True)
    with pytest.raises(RequestError, match="--speculator") as found:
        check_request(INFO, [1], wish)
    assert found.value.param == "token_trees"
    check_request(msgspec.structs.replace(INFO, speculators=("suffix",)), [1], wish)


def test_the_end_of_an_answer_ends_the_accepted_path(tiny, tokenizer):
    """An end-of-sequence token in the midst of a right draft: no answer has the tokens behind it."""
    (first, *_) = jobs(temperature=0.0)
    with closing(load(tiny)) as engine:
        whole = tokens_of(answered(engine, [first])["r0"])
    stop = next(token for token in whole[8:] if whole.index(token) > 6)
    engine = load(tiny)
    drafting(engine, {"r0": whole})
    wish = replace(first.sampling, token_trees=True, stop_token_ids=(stop,))
    outputs = answered(engine, [msgspec.structs.replace(first, sampling=wish)])["r0"]
    assert tokens_of(outputs) == whole[: whole.index(stop) + 1]
    told = [token for one in texts(tokenizer, outputs, wish) for token in one.tokens]
    assert [token.token_id for token in told] == tokens_of(outputs)


def texts(tokenizer: Tokenizer, outputs: list[TokenOutput], params: SamplingParams) -> list[DraftedPass]:
    text = SequenceText(0, tokenizer, params)
    deltas = [text.push(output) for output in outputs]
    return [delta.drafted_pass for delta in deltas if delta.drafted_pass is not None]


def test_the_text_has_the_same_tokens(reported, tokenizer):
    outputs, _, _ = reported
    for found in outputs.values():
        passes = texts(tokenizer, found, SamplingParams(token_trees=True))
        assert [token.token_id for one in passes for token in one.tokens] == tokens_of(found)
        for one, output in zip(passes, found, strict=True):
            assert [token.is_accepted for token in one.drafted].count(True) == one.num_accepted
            assert [token.token_id for token in one.drafted] == (output.drafted_tree or NOTHING).token_ids
            path = [token.token for token in one.drafted if token.is_accepted]
            assert path == [token.token for token in one.tokens[: one.num_accepted]]
            assert all(
                token.token.encode() == tokenizer.token_bytes(token.token_id) or token.token.startswith("bytes:")
                for token in one.drafted
            )


def test_a_stop_string_cuts_the_path_too(tokenizer):
    token_ids = tokenizer.encode("abcd", add_special_tokens=False)
    tree = DraftedTree(token_ids, [-1, 0, 1, 2], [["x"]] * 4, [0.5] * 4, [0, 1, 2])
    output = TokenOutput(request_id="r", token_ids=token_ids, drafted_tree=tree, num_drafted_tokens=4)
    (one,) = texts(tokenizer, [output], SamplingParams(token_trees=True, stop=("b",)))
    assert [token.token for token in one.tokens] == ["a", "b"]
    assert [token.is_accepted for token in one.drafted] == [True, True, False, False]
    assert one.num_accepted == 2


def test_long_answers_are_told_without_their_trees_in_the_end(tokenizer):
    token_ids = tokenizer.encode("ab", add_special_tokens=False)
    tree = DraftedTree([token_ids[0]] * 32, [-1, *range(31)], [["x"]] * 32, [0.5] * 32, [0])
    output = TokenOutput(request_id="r", token_ids=token_ids, drafted_tree=tree)
    text = SequenceText(0, tokenizer, SamplingParams(token_trees=True, max_tokens=None))
    passes = [text.push(output).drafted_pass for _ in range(600)]
    assert sum(len(one.drafted) for one in passes) == MAX_DRAFTED_TOKENS
    assert {(len(one.tokens), one.num_drafted, one.num_accepted) for one in passes} == {(2, 32, 1)}
    assert text.push(TokenOutput(request_id="r", finish_reason=FinishReason.LENGTH)).drafted_pass is None


def test_who_looks_sees_the_trees_of_requests_that_report_none(tiny, tokenizer, reported):
    wanted, _, _ = reported
    with closing(load(tiny)) as engine:
        drafting(engine, {name: tokens_of(outputs) for name, outputs in wanted.items()})
        engine.look(Watch())
        outputs = answered(engine, jobs(temperature=0.7))
        assert all(output.drafted_tree is None for found in outputs.values() for output in found)
        for name, found in wanted.items():
            (sequence,) = engine.look(RequestQuestion(name)).sequences
            trees = [msgspec.msgpack.decode(drafts, type=SeenDrafts).tree for drafts in sequence.drafts]
            assert trees == [output.drafted_tree for output in found if output.drafted_tree]
            assert sequence.output_token_ids == tokens_of(found)
            texts = DraftTexts(tokenizer)
            passes = [texts.push(output, len(output.token_ids)) for output in found]
            assert drafted_passes(tokenizer, sequence) == passes
            drafted = sum(one.num_drafted for one in sequence.passes)
            assert drafted == sum(len(tree.token_ids) for tree in trees) > 0
