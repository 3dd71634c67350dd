"""Draft models: their drafts equal transformers', and no draft changes an answer."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import logging
import random
import shutil

import pytest
import torch

from moeflow.checkpoint.draft_vocabulary import write_draft_vocabulary
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.core.request import Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine import expert_store
from moeflow.engine.engine import Engine
from moeflow.engine.speculators import draft_model
from moeflow.kernels.cpu import extension
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings
from tests.engine.streamed_runs import answers as answers_streamed
from tests.engine.streamed_runs import run as run_streamed
from tests.engine.submissions import submission
from tests.engine.test_speculation import answers, jobs, load
from tests.engine.test_streamed_model import streamed_config
from tests.tiny_llama import write_tiny_llama
from tests.tiny_mixtral import write_byte_tokenizer, write_tiny_mixtral
from tests.token_trees import draft_always

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.4}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_tiny_mixtral(folder)
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a small model's folder, and transformers' own of it."""
    folder = tmp_path_factory.mktemp("small")
    return folder, write_tiny_llama(folder)


def drafting(folder, *speculators: str, num_blocks: int = 60, **draft_changes) -> Engine:
    """Return an engine with drafts that take no time, so that all are computed."""
    config = resolve(
        Settings(
            model=str(folder),
            num_threads=1,
            max_num_seqs=8,
            max_num_batched_tokens=48,
            dtype="float32",
            speculators=speculators,
        )
    ).config
    drafts = tuple(dataclasses.replace(draft, **draft_changes) for draft in config.draft_models)
    scheduler = dataclasses.replace(config.scheduler, num_blocks=num_blocks, max_model_len=400)
    engine = Engine.load(dataclasses.replace(config, scheduler=scheduler, draft_models=drafts))
    timeless(engine)
    return engine


def timeless(engine: Engine) -> None:
    """Let each pass take a second, and drafting no time; draft without a trial."""
    draft_always(engine._speculation)
    engine._clock = itertools.count(1.0).__next__
    engine._speculation.clock = lambda: 0.0


def drafts_of(engine: Engine) -> list[draft_model.DraftModel]:
    return [one for one in engine._speculation.speculators if isinstance(one, draft_model.DraftModel)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_the_same_to_the_bit(target, small, sampling):
    submissions = jobs(logprobs=2, **sampling)
    plain = answers(load(target), submissions)
    for speculators in (
        [str(small[0])],
        ["self:int4"],
        ["early-exit:1"],
        [f"{small[0]}:bfloat16", "self:int8", "suffix"],
    ):
        engine = drafting(target, *speculators)
        assert answers(engine, submissions) == plain
        assert engine.stats().drafted_tokens_total > 50
        assert all(draft.tables.num_used == 0 for draft in drafts_of(engine))
        assert not engine._speculation._failed


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_engines_ids_that_a_draft_lacks_change_no_answer(small, tmp_path, sampling):
    """As in families that fill up their larger models' embeddings to a larger multiple."""
    write_tiny_mixtral(tmp_path, vocab_size=300)
    submissions = jobs(logprobs=2, **sampling)
    submissions += [submission("padded", [5, 258, 9, 299, 271, 30], max_tokens=40, logprobs=2, **sampling)]
    plain = answers(load(tmp_path), submissions)
    assert any(token_id >= 258 for token_ids, *_ in plain.values() for token_id in token_ids)
    engine = drafting(tmp_path, str(small[0]))
    assert answers(engine, submissions) == plain
    assert engine.stats().drafted_tokens_total > 50
    assert not engine._speculation._failed


def test_a_draft_without_embeddings_for_some_tokens_is_refused(target, tmp_path):
    write_tiny_llama(tmp_path, vocab_size=250)
    write_byte_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"needs 258 embeddings, and the draft has 250\. Take a small model"):
        drafting(target, str(tmp_path))


def test_a_draft_with_ids_that_are_no_integers_is_refused(target, tmp_path):
    write_tiny_llama(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] |= {"a": "7"}
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="does not list its tokens"):
        drafting(target, str(tmp_path))


def test_what_a_model_drafts_for_itself_is_right(target, monkeypatch):
    monkeypatch.setattr(draft_model, "NUM_LIKELIEST", 1)  # the likeliest alone, all accepted
    monkeypatch.setattr(draft_model, "LEAST_PATH", 0.0)
    engine = drafting(target, "self:float32", kv_dtype="float32")
    found = answers(engine, jobs(**GREEDY))
    stats = engine.stats()
    assert stats.accepted_tokens_total == stats.drafted_tokens_total
    num_tokens = sum(len(token_ids) for token_ids, *_ in found.values())
    assert stats.accepted_tokens_total > num_tokens / 2  # the rest comes from passes without drafts


def test_preempted_requests_get_the_same_tokens(target, small):
    submissions = jobs(temperature=0.8, max_tokens=140)[:4]
    plain = answers(load(target, num_blocks=100), submissions)
    engine = drafting(target, str(small[0]), "self:int8", num_blocks=26)
    assert answers(engine, submissions) == plain
    assert engine.stats().preemptions_total > 0
    assert all(draft.tables.num_used == 0 for draft in drafts_of(engine))


@pytest.mark.skipif(not extension.is_available(), reason=extension.why_not())
def test_a_model_in_memory_drafts_for_one_whose_experts_come_from_disk(target, small, tmp_path, monkeypatch):
    monkeypatch.setattr(expert_store, "probe_read_depth", lambda *_: 2)
    plain = run_streamed(streamed_config(str(target), tmp_path / "slabs", 5))
    config = streamed_config(str(target), tmp_path / "slabs", 5, speculators=(str(small[0]),))
    scheduler = dataclasses.replace(config.scheduler, num_kept_blocks=2)
    engine = Engine.load(dataclasses.replace(config, scheduler=scheduler))
    timeless(engine)
    assert answers_streamed(engine) == (plain, {})
    assert engine.stats().drafted_tokens_total > 10
    (draft,) = drafts_of(engine)
    assert draft.tables.num_used == 0
    assert draft.tables.num_touched <= 2  # unused blocks give their memory back
    engine.close()


def test_cancelled_requests_give_their_blocks_back(target, small):
    engine = drafting(target, str(small[0]))
    engine.submit(submission("r", [5, 6, 7, 8] * 8, max_tokens=60))
    while not drafts_of(engine)[0].tables.num_used:
        engine.step()
    engine.cancel_all()
    assert drafts_of(engine)[0].tables.num_used == 0


def test_a_conversation_is_not_computed_anew(target, small):
    """Its second turn finds the first one's keys and values."""
    engine = drafting(target, str(small[0]))
    (first,) = jobs(**GREEDY)[3:4]
    said = answers(engine, [first])["r3"][0]
    (draft,) = drafts_of(engine)
    computed = counted(draft)
    answers(engine, [submission("turn", [*first.prompt_token_ids, *said, 7, 8], max_tokens=8, **GREEDY)])
    assert computed
    assert computed[0] < 40 < len(first.prompt_token_ids)


def test_two_that_draft_together_are_at_least_as_good_as_each(target, small):
    submissions = [submission(f"r{i}", [5 + i, 6, 7, 8] * 10, max_tokens=100, **GREEDY) for i in range(2)]

    def num_passes(*speculators: str) -> int:
        engine = drafting(target, *speculators)
        passes = 0
        for one in submissions:
            engine.submit(one)
        while engine.has_work:
            engine.step()
            passes += 1
        return passes

    alone = [num_passes("suffix"), num_passes("self:int4"), num_passes("early-exit:1")]
    together = num_passes("suffix", "self:int4", "early-exit:1")
    assert together <= min(alone) < 100


def test_one_that_fails_is_left_alone_and_nobody_else_notices(target, small, caplog):
    submissions = jobs(**GREEDY)[:2]
    plain = answers(load(target), submissions)
    engine = drafting(target, str(small[0]), "self:int8")
    broken, other = drafts_of(engine)

    def fail(pieces, rows):
        raise RuntimeError("out of luck")

    broken._compute = fail
    with caplog.at_level(logging.ERROR):
        assert answers(engine, submissions) == plain
    assert [record.message for record in caplog.records if "not used any more" in record.message] == [
        f"speculator {broken.name!r} failed and is not used any more; answers are not concerned"
    ]
    assert engine.stats().drafted_tokens_total > 0
    assert broken.tables.num_used == other.tables.num_used == 0


# The drafts themselves, against transformers.


def make_request(name: str, prompt: list[int]) -> Request:
    return Request(name, prompt, SamplingParams(), max_tokens=300)


def say(request: Request, *token_ids: int) -> None:
    """Let the model have some tokens; all except the last are computed."""
    request.output_token_ids += token_ids
    request.num_computed_tokens = request.num_tokens - 1


def expected(model, request: Request, draft) -> None:
    """Hold that each token of a draft is one of the likeliest, graded by probability and by whether it is the first."""
    sequence = [*request.token_ids(0, request.num_tokens), *draft.token_ids]
    with torch.no_grad():
        probabilities = model(torch.tensor([sequence])).logits[0].softmax(-1)
    for place, (token_id, grade) in enumerate(zip(draft.token_ids, draft.grades, strict=True)):
        row = probabilities[request.num_tokens - 1 + place]
        likeliest = row.topk(draft_model.NUM_LIKELIEST).indices.tolist()
        assert token_id in likeliest
        assert place == len(draft.token_ids) - 1 or token_id == likeliest[0], "branches end where they leave the path"
        edges = [0.0, *draft_model.GRADES, 1.0]
        is_likeliest = token_id == int(row.argmax())
        assert is_likeliest == (grade < draft_model.RUNNER_UP)
        of_probability = grade if is_likeliest else grade - draft_model.RUNNER_UP
        assert edges[of_probability] - 1e-3 <= float(row[token_id]) <= edges[of_probability + 1] + 1e-3


@pytest.fixture
def alone(target, small):
    """Return a small draft model in float32."""
    engine = drafting(target, f"{small[0]}:float32", kv_dtype="float32", num_blocks=60)
    (draft,) = drafts_of(engine)
    return draft


def test_drafts_are_what_transformers_computes(alone, small, monkeypatch):
    """For any result of the previous drafts: all accepted, the first few, none, or a pass without drafts."""
    monkeypatch.setattr(draft_model, "LEAST_PATH", 0.001)  # a random model is never sure
    monkeypatch.setattr(draft_model, "LEAST_BRANCH", 0.001)
    rng = random.Random(3)
    requests = [
        make_request(f"r{i}", [rng.randrange(2, 258) for _ in range(length)]) for i, length in enumerate((2, 37, 64))
    ]
    for request in requests:
        say(request, rng.randrange(2, 258))
    num_drafts = 0
    for _ in range(25):
        running = rng.sample(requests, rng.randrange(1, 4))
        depth = rng.randrange(1, 7)
        for request, found in zip(running, alone.propose(running, depth), strict=True):
            assert found
            assert max(len(draft.token_ids) for draft in found) <= depth
            for draft in found:
                expected(small[1], request, draft)
            num_drafts += len(found)
            right = found[0].token_ids[: rng.randrange(len(found[0].token_ids) + 1)]
            say(request, *right, *[rng.randrange(2, 258) for _ in range(rng.choice((1, 1, 1, 20)))])
    assert num_drafts > 200
    for request in requests:
        alone.forget(request)
    assert alone.tables.num_used == 0


def test_one_with_a_vocabulary_drafts_the_likeliest_of_its_tokens(target, small, tmp_path):
    folder, oracle = small
    shutil.copytree(folder, tmp_path / "few")
    known = list(range(3, 250, 3))
    write_draft_vocabulary(tmp_path / "few", known)
    submissions = jobs(**GREEDY)
    few = f"{tmp_path / 'few'}:float32"
    assert answers(drafting(target, few), submissions) == answers(load(target), submissions)
    (draft,) = drafts_of(drafting(target, few, kv_dtype="float32"))
    request = make_request("r", [5, 6, 7, 8, 9])
    say(request, 11)
    ((path, *_),) = draft.propose([request], 1)
    with torch.no_grad():
        probabilities = oracle(torch.tensor([request.token_ids(0, 6)])).logits[0, -1, known].softmax(-1)
    assert path.token_ids == (known[int(probabilities.argmax())],)
    assert path.grades == (bisect.bisect_right(draft_model.GRADES, float(probabilities.max())),)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({}, "has no list of tokens"),
        ({"token_ids": [3, "4"]}, "has no list of tokens"),
        ({"token_ids": [4, 3]}, "ascending"),
        ({"token_ids": [3, 1000]}, "from 0 to"),
    ],
)
def test_a_broken_vocabulary_is_refused(target, small, tmp_path, content, problem):
    shutil.copytree(small[0], tmp_path / "few")
    (tmp_path / "few" / "draft_vocabulary.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=problem):
        drafting(target, str(tmp_path / "few"))


def counted(draft) -> list[int]:
    """Return a growing list of the numbers of tokens in the model's passes."""
    computed: list[int] = []
    compute = draft._compute

    def count(pieces, rows):
        computed.append(sum(len(piece.token_ids) for piece in pieces))
        return compute(pieces, rows)

    draft._compute = count
    return computed


def test_right_drafts_are_not_computed_again(alone, monkeypatch):
    monkeypatch.setattr(draft_model, "LEAST_PATH", 0.0)
    request = make_request("r", [5, 6, 7])
    say(request, 8)
    computed = counted(alone)
    (found,) = alone.propose([request], 5)
    assert computed == [4, 1, 1, 1, 1]
    for num_right, num_new in ((5, 2), (4, 1), (2, 1), (0, 1)):
        computed.clear()
        say(request, *found[0].token_ids[:num_right], 9)
        (found,) = alone.propose([request], 5)
        assert computed == [num_new, 1, 1, 1, 1]


def test_a_runner_up_is_believed_as_likely_as_the_model_says(alone):
    assert alone.believed(draft_model.RUNNER_UP + 2) == pytest.approx(0.15)
    assert alone.believed(2) == 0.5
    assert alone.believed(9) == pytest.approx(0.85)


def test_a_long_prompt_is_computed_in_pieces(alone, small):
    request, short = make_request("long", [*range(2, 250)] * 2), make_request("short", [5, 6])
    for one in (request, short):
        say(one, 9)
    alone._chunk_tokens = 100
    for number in range(4):
        found = alone.propose([request, short], 4)
        assert not found[0]
        assert bool(found[1]) == (number > 0)  # three tokens; two are computed with tokens of an older one
    (draft, *_), _ = alone.propose([request, short], 4)
    expected(small[1], request, draft)


def test_what_exceeds_the_models_context_or_the_answer_is_not_drafted(alone, small):
    full, nearly, ending = make_request("a", [5] * 511), make_request("b", [5] * 508), make_request("c", [5] * 9)
    ending.max_tokens = 2
    for one in (full, nearly, ending):
        say(one, 9)
    for _ in range(10):
        found = alone.propose([full, nearly, ending], 8)
    assert found[0] == found[2] == []
    assert max(len(draft.token_ids) for draft in found[1]) <= 3


def test_the_youngest_go_without_where_blocks_are_few(target, small):
    engine = drafting(target, f"{small[0]}:float32", kv_dtype="float32", num_blocks=60)
    (draft,) = drafts_of(engine)
    draft.tables.limit = 6  # blocks of 16 tokens
    requests = [make_request(f"r{i}", [7 + i] * 30) for i in range(3)]
    for request in requests:
        say(request, 9)
    found = draft.propose(requests, 4)
    assert [bool(drafts) for drafts in found] == [True, True, False]
    say(requests[0], *range(2, 60))  # needs four blocks more
    found = draft.propose(requests, 4)
    assert [bool(drafts) for drafts in found] == [True, False, False]
    draft.forget(requests[0])
    found = draft.propose(requests[1:], 4)
    assert all(found)
    expected(small[1], requests[1], found[0][0])
