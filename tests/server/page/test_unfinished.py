"""Answers that did not come to their end: written on from there, and noticed when they go round in circles."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.server.live_server import eventually
from tests.server.page.parts import answer, button, measured, send, send_and_wait, set_max_tokens, stream, turns

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_a_cut_answer_is_continued_where_it_ended(page, say, asked, engine):
    set_max_tokens(page, "6")
    say("A long story")
    send_and_wait(page, "A story, please.")
    expect(answer(page)).to_have_text("A long")
    say(" and")
    button(page, "Continue").click()
    expect(answer(page)).to_have_text("A long and")
    expect(measured(page)).to_have_text(re.compile(r"^11 tokens in \d+\.\d s( · [\d,]+\.\d tokens/s while writing)?$"))
    expect(button(page, "Continue")).to_be_hidden()
    expect(turns(page).last.get_by_label("Versions of the answer")).to_be_hidden()
    assert asked()[1] == "<|user|>A story, please.<|assistant|>A long"
    assert engine.submissions[1].sampling.max_tokens == 6
    page.reload()
    expect(answer(page)).to_have_text("A long and")


def test_an_answer_is_continued_again_and_again(page, say):
    set_max_tokens(page, "2")
    say("xyz")
    send_and_wait(page, "Letters?")
    for text in ("xyxy", "xyxyxy"):
        button(page, "Continue").click()
        expect(answer(page)).to_have_text(text)
        expect(measured(page)).to_contain_text(f"Cut off at max tokens · {len(text)} tokens in")


def test_a_stopped_answer_is_continued_and_an_earlier_one_is_not(page, say, go_on, asked):
    say("One, two, three", until="One, ")
    send(page, "Count.")
    expect(answer(page)).to_contain_text("One,")
    button(page, "Stop").click()
    expect(measured(page)).to_contain_text("Stopped")
    go_on()
    say("zwei")
    button(page, "Continue").click()
    expect(answer(page)).to_have_text("One, zwei")
    say("Bye.")
    send_and_wait(page, "Thanks.")
    assert asked()[2] == "<|user|>Count.<|assistant|>One, zwei<|user|>Thanks.<|assistant|>"
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)


def test_an_answer_with_thoughts_is_continued_behind_them(page):
    bodies = []

    def fulfill(route):
        bodies.append(route.request.post_data_json)
        first = {"reasoning_content": "Sunny?"}, {"content": "It is"}
        body = stream(*([{"content": " sunny."}] if len(bodies) > 1 else first), reason="length")
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfill)
    send_and_wait(page, "Weather?")
    expect(answer(page)).to_have_text("It is")
    button(page, "Continue").click()
    expect(answer(page)).to_have_text("It is sunny.")
    begun = {"role": "assistant", "content": "It is", "reasoning_content": "Sunny?"}
    assert bodies[1]["messages"] == [{"role": "user", "content": "Weather?"}, begun]
    assert bodies[1]["continue_final_message"] is True
    assert "continue_final_message" not in bodies[0]


def test_a_complete_answer_is_not_continued(page, say):
    say("Paris.")
    send_and_wait(page, "The capital of France?")
    expect(button(page, "Continue")).to_be_hidden()


def test_an_answer_that_goes_round_in_circles_can_be_stopped(page, say, engine):
    line = "The sea is blue, and the sky is blue.\n\n"
    beginning = f"A poem.\n\n{line * 6}"
    say(beginning + "The end.", until=beginning)
    send(page, "A poem, please.")
    notice = page.get_by_text("This answer repeats itself.")
    expect(notice).to_be_visible()
    expect(page.get_by_text("The answer repeats itself. Escape stops it.")).to_be_attached()
    button(page, "Stop it").click()
    assert eventually(lambda: engine.cancelled == [engine.submissions[0].request_id])
    expect(notice).to_be_visible()
    expect(button(page, "Stop it")).to_be_hidden()


def test_an_answer_that_found_its_end_is_not_suspected(page, say):
    say("The sea is blue, and the sky is blue.\n\n" * 6)
    send_and_wait(page, "A poem, please.")
    expect(page.get_by_text("This answer repeats itself.")).to_be_hidden()


def ends_in_circles(text):
    """Brute force: some piece with a letter is repeated 4 times and over 160 characters, at the end of the text."""
    for period in range(1, len(text) // 4 + 1):
        piece = text[-period:]
        length = period
        while length < len(text) and text[-length - 1] == text[-length - 1 + period]:
            length += 1
        if length >= max(4 * period, 160):
            return any(it.isalpha() for it in piece)
    return False


CIRCLES = [
    "",
    "x" * 159,
    "x" * 160,
    "ha " * 40,
    "ha " * 60,
    "begin " + "round and round it goes; " * 7,
    "begin " + "round and round it goes; " * 7 + "then it ends",
    "a piece that is cut off in its midst, " * 5 + "a piece that is cut",
    "begin " + "A sentence of a good many characters, and then some more. " * 3,
    "begin " + "A sentence of a good many characters, and then some more. " * 4,
    "-" * 500,
    "| --- | --- |" * 50,
    "0, 1, " * 80,
    "long " * 60 + "and " * 3,
    ("Ein längerer Satz mit Ümläuten und 🦊🦊. " * 30),
    "\n".join(f"{i}. The sea is blue." for i in range(100)),
    "".join(f"{x}{y}" for x in "abcdefghij" for y in "klmnopqrst"),
    ("word " * 300 + "and a long piece. ") * 4,
]


def test_circles_as_brute_force_finds_them(page):
    found = page.evaluate(
        """async (texts) => {
          const { endsInCircles } = await pageModule("chat/repetition.js");
          return texts.map(endsInCircles);
        }""",
        CIRCLES,
    )
    expected = [ends_in_circles(text[-4000:]) for text in CIRCLES]
    assert found == expected
    assert True in expected
    assert False in expected
