"""Outputs reach whom they are for, and no other submission of the same id."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moeflow.core.engine_messages import TokenOutput
from moeflow.core.request import FinishReason
from moeflow.processes.sinks import Sinks

LAST = FinishReason.CANCELLED


def output(name: str, token: int | None = None) -> TokenOutput:
    return TokenOutput(
        request_id=name, token_ids=[] if token is None else [token], finish_reason=None if token else LAST
    )


@given(num_tokens=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.booleans()), max_size=8))
def test_each_submission_gets_its_own_outputs(num_tokens):
    """Submitted again and again under few ids; an engine answers later, and in order."""
    sinks = Sinks()
    submitted: list[tuple[str, int, list[TokenOutput | None]]] = []
    for name, number, waits in num_tokens:
        assert sinks.abandon(name) is any(each[0] == name for each in submitted)
        got: list[TokenOutput | None] = []
        sinks.add(name, got.append)
        submitted.append((name, number, got))
        if waits:  # the engine is as far as this
            answer(sinks, submitted)
    answer(sinks, submitted)
    assert not sinks.is_waiting


def answer(sinks: Sinks, submitted: list[tuple[str, int, list[TokenOutput | None]]]) -> None:
    """Answer all submissions; only the last of an id is still wanted."""
    newest = {name: got for name, _, got in submitted}
    for index, (name, number, _) in enumerate(submitted):
        assert sinks.is_waiting
        for token in range(number):
            sinks.hand_out(output(name, 100 * index + token + 1))
        sinks.hand_out(output(name))
    for index, (name, number, got) in enumerate(submitted):
        want = [100 * index + token + 1 for token in range(number)] if newest[name] is got else []
        assert [token for each in got for token in each.token_ids] == want
    submitted.clear()


def test_the_end_is_told_once_and_only_to_those_who_wait():
    sinks = Sinks()
    got: dict[str, list[TokenOutput | None]] = {name: [] for name in ("abandoned", "finished", "waiting")}
    for name, sink in got.items():
        sinks.add(name, sink.append)
    sinks.abandon("abandoned")
    sinks.hand_out(output("finished"))
    sinks.hand_out(output("unknown", 3))
    sinks.end()
    sinks.end()
    assert got == {"abandoned": [], "finished": [output("finished")], "waiting": [None]}
    assert not sinks.is_waiting
