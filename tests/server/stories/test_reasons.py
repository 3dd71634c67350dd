"""The sentences that tell why a request took as long as it did."""

from __future__ import annotations

import re

import msgspec
import pytest

from moeflow.server.stories.phases import Phase
from moeflow.server.stories.reasons import UNKNOWN_PACE, Pace, seconds, slow_because
from moeflow.server.stories.seen import Pass, Seen
from moeflow.server.stories.sentences import NOT_OBSERVED
from moeflow.server.stories.story import Story

UNSEEN = Seen(not_observed=NOT_OBSERVED["not watched"])
STORY = Story(
    id="req_1",
    object_id="cmpl-1",
    endpoint="/v1/completions",
    model="m",
    key=None,
    is_batch=False,
    state="done",
    end="stop",
    error=None,
    started_at=0.0,
    total_s=0.0,
    phases=[],
    prompt_tokens=900,
    cached_tokens=0,
    completion_tokens=11,
    sequences=1,
    sequences_ahead=4,
    drafted_tokens=0,
    accepted_tokens=0,
    first_token_s=None,
    tokens_per_s=5.0,
    slowest_gap_s=None,
    slowest_gap_at=None,
)


def story(changes: dict | None = None, **durations: float) -> Story:
    phases, start_s = [], 0.0
    for name, duration_s in durations.items():
        phases.append(Phase(name, start_s, duration_s))
        start_s += duration_s
    return msgspec.structs.replace(STORY, phases=phases, total_s=start_s, **(changes or {}))


def one_pass(duration_s: float, **changes) -> Pass:
    values = {"tokens": 1, "pass_tokens": 1, "is_prompt": False, "drafted_tokens": 0, "accepted_tokens": 0}
    return Pass(**{"start_s": 0.0, "duration_s": duration_s, **values, "stall_s": 0.0, "read_bytes": 0, **changes})


def texts(told: Story, seen: Seen = UNSEEN, pace: Pace = UNKNOWN_PACE) -> list[str]:
    found = slow_because(told, seen, pace)
    assert all(reason.text == reason.template.format(**reason.values) for reason in found)
    assert all(set(reason.values) == set(re.findall(r"{(\w+)}", reason.template)) for reason in found)
    return [reason.text for reason in found]


def test_the_longest_phases_come_first():
    assert texts(story(received=0.1, queued=6.2, prompt=1.2, decode=2.5)) == [
        "62% of the time (6.2 s) was spent in the queue, behind 4 other sequences.",
        "The 11 tokens of the answer took 2.5 s, at 5.0 tokens/s.",
    ]


@pytest.mark.parametrize(
    ("changes", "durations", "expected"),
    [
        ({}, {"prompt": 1.2}, "The prompt of 900 tokens took 1.2 s; none of it was in the prefix cache."),
        (
            {"cached_tokens": 640},
            {"prompt": 1.2},
            "The prompt of 900 tokens took 1.2 s; 640 of them were in the prefix cache.",
        ),
        (
            {"sequences_ahead": 1},
            {"queued": 1.0},
            "100% of the time (1.0 s) was spent in the queue, behind one other sequence.",
        ),
        (
            {"sequences_ahead": 0},
            {"queued": 1.0},
            "100% of the time (1.0 s) was spent in the queue for the running pass to end.",
        ),
        (
            {"slowest_gap_s": 8.0, "slowest_gap_at": 7},
            {"decode": 10.0},
            "11 tokens took 10 s; one wait of 8.0 s came after token 7.",
        ),
        (
            {"tokens_per_s": None, "completion_tokens": 1},
            {"decode": 10.0},
            "The answer ended 10 s after its first token.",
        ),
        (
            {},
            {"received": 30.0},
            "100% of the time (30 s) passed before it was admitted: its body came, or its model was loaded.",
        ),
        (
            {},
            {"tokenized": 1.0},
            "100% of the time (1.0 s) made 900 tokens of the prompt's text, or compiled its grammar.",
        ),
        (
            {},
            {"sent": 1.0},
            "100% of the time (1.0 s) passed after the last token, until the client had the answer.",
        ),
        (
            {},
            {"waiting": 1.0},
            "The engine has brought nothing for 1.0 s: the request is in the queue, or its prompt is computed.",
        ),
    ],
)
def test_each_phase_has_its_sentence(changes, durations, expected):
    assert texts(story(changes, **durations)) == [expected]


def test_there_is_a_reason_where_no_phase_is_long():
    even = dict.fromkeys(("received", "tokenized", "queued", "prompt", "decode", "sent"), 1.0)
    assert len(texts(story(**even))) == 1


def test_the_plan_and_other_programs_explain_the_speed_of_an_answer():
    pace = Pace(expected_tokens_per_s=20.0, other_programs=0.6)
    assert texts(story(decode=2.0), pace=pace)[1:] == [
        "The plan expects 20.0 tokens/s for one request alone: it had 25% of that.",
        "Other programs had 60% of the processor meanwhile, which slows passes.",
    ]
    assert len(texts(story(decode=2.0), pace=Pace(other_programs=0.05))) == 1
    assert len(texts(story(queued=2.0), pace=pace)) == 1


def test_waits_for_experts_are_a_reason():
    seen = Seen(passes=[one_pass(1.0, stall_s=0.8), one_pass(1.0)])
    assert texts(story(decode=2.0), seen)[1:] == ["Passes waited 0.8 s for experts from disk."]


def test_so_is_what_lies_between_passes():
    seen = Seen(passes=[one_pass(0.5), one_pass(0.5)])
    (found,) = texts(story(decode=2.0), seen)[1:]
    assert found.startswith("1.0 s of it lay between its passes")


def test_so_are_other_requests_in_its_passes():
    seen = Seen(passes=[one_pass(1.0, pass_tokens=8), one_pass(1.0, pass_tokens=8)])
    assert texts(story(decode=2.0), seen)[1:] == [
        "Its passes computed 14 tokens of other requests, beside 2 of its own."
    ]


def test_what_was_seen_in_part_is_none():
    seen = Seen(passes=[one_pass(0.1, stall_s=1.0)], not_observed="a part of its passes was not observed")
    assert len(texts(story(decode=2.0), seen)) == 1


@pytest.mark.parametrize(
    ("duration_s", "text"), [(0.0004, "0.4 ms"), (0.012, "12 ms"), (0.64, "0.6 s"), (9.94, "9.9 s"), (75.3, "75 s")]
)
def test_durations_for_people(duration_s, text):
    assert seconds(duration_s) == text
