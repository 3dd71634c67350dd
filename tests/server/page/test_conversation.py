from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from moeflow.core.engine_messages import EngineStats
from tests.server.live_server import eventually
from tests.server.page.parts import answer, button, measured, number, prompt_box, send, send_and_wait, turns

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_an_answer_appears_before_it_is_complete(page, say, go_on, engine, asked):
    say("Paris is the capital of France.", until="Paris is")
    send(page, "What is the capital of France?")
    expect(answer(page)).to_have_text("Paris is")
    expect(page.get_by_role("log", name="Conversation")).to_have_attribute("aria-busy", "true")
    expect(button(page, "Stop")).to_be_visible()
    assert len(engine.live) == 1

    go_on()
    expect(answer(page)).to_have_text("Paris is the capital of France.")
    expect(button(page, "Send")).to_be_visible()
    expect(page.get_by_role("log", name="Conversation")).to_have_attribute("aria-busy", "false")
    assert asked() == ["<|user|>What is the capital of France?<|assistant|>"]
    num_tokens = len("Paris is the capital of France.") + 1  # bytes, and the end of sequence
    expect(measured(page)).to_have_text(
        re.compile(rf"^{num_tokens} tokens in \d+\.\d s · \d+\.\d tokens/s while writing$")
    )


def test_stop_cancels_the_work(page, say, engine):
    say("One, two, three", until="One, two")
    send(page, "Count.")
    expect(answer(page)).to_have_text("One, two")
    assert engine.cancelled == []
    button(page, "Stop").click()
    expect(measured(page)).to_contain_text("Stopped")
    assert eventually(lambda: engine.cancelled == [engine.submissions[0].request_id])
    expect(answer(page)).to_have_text("One, two")
    expect(prompt_box(page)).to_be_focused()


def test_a_second_turn_sends_the_history_also_after_a_reload(page, say, asked):
    say("First answer.")
    send_and_wait(page, "First question?")
    page.reload()
    expect(answer(page)).to_have_text("First answer.")
    send_and_wait(page, "Second question?")
    expect(turns(page)).to_have_count(2)
    assert asked()[1] == "<|user|>First question?<|assistant|>First answer.<|user|>Second question?<|assistant|>"


def test_a_reload_ends_a_running_answer_and_keeps_what_came(page, say, engine):
    say("One, two, three", until="One, two")
    send(page, "Count.")
    expect(answer(page)).to_have_text("One, two")
    page.reload()
    expect(answer(page)).to_have_text("One, two")
    expect(measured(page)).to_contain_text("Stopped")
    assert eventually(lambda: len(engine.cancelled) == 1)


def test_a_turn_without_an_answer_is_not_sent_again(page, say, asked, engine):
    engine.fail_after = 0
    send_and_wait(page, "Lost?")
    expect(page.get_by_role("alert")).to_contain_text("out of memory")
    engine.fail_after = None
    say("Found.")
    send_and_wait(page, "And now?")
    expect(answer(page)).to_have_text("Found.")
    assert asked() == ["<|user|>Lost?<|assistant|>", "<|user|>And now?<|assistant|>"]


def test_the_prompt_box_by_keyboard(page, say, asked):
    say("Understood.")
    expect(prompt_box(page)).to_be_focused()
    page.keyboard.press("Enter")  # nothing to send
    page.keyboard.type("two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    expect(answer(page)).to_have_text("Understood.")
    expect(prompt_box(page)).to_have_value("")
    expect(prompt_box(page)).to_be_focused()
    assert asked() == ["<|user|>two\nlines<|assistant|>"]


def test_an_example_is_sent_at_a_click(page, say, asked):
    say("Paris.")
    expect(page.get_by_text("fake-model has 4 experts in every layer")).to_be_visible()
    examples = page.get_by_role("list", name="Examples").get_by_role("button")
    expect(examples).to_have_count(4)
    examples.first.click()
    expect(answer(page)).to_have_text("Paris.")
    assert asked() == ["<|user|>What is the capital of France?<|assistant|>"]


def test_a_new_conversation_ends_a_running_answer(page, say, engine):
    say("Once upon a time", until="Once")
    send(page, "A story, please.")
    expect(answer(page)).to_have_text("Once")
    button(page, "New conversation").click()
    assert eventually(lambda: len(engine.cancelled) == 1)
    expect(turns(page)).to_have_count(0)
    expect(button(page, "Send")).to_be_visible()


@pytest.mark.parametrize(
    ("label", "place", "text"),
    [("Copy code", "figure", "print('hi')"), ("Copy", ".answer-foot", "`a`\n```\nprint('hi')\n```")],
)
def test_copy(app, serve, open_page, say, label, place, text):
    page = open_page(serve(app), permissions=["clipboard-read", "clipboard-write"])
    say("`a`\n```\nprint('hi')\n```")
    send_and_wait(page, "Code?")
    page.locator(place).get_by_role("button", name=label).click()
    expect(page.get_by_text("Copied.")).to_be_attached()
    assert page.evaluate("navigator.clipboard.readText()") == text


def test_the_models_facts_and_live_numbers(page, say, go_on, engine):
    expect(page).to_have_title("fake-model · moeflow")
    expect(page.get_by_text("4 experts, 2 per token · 1K parameters, 500 active · float32")).to_be_visible()
    engine.snapshot = EngineStats(num_running=3, num_waiting=2, kv_blocks_total=40, kv_blocks_used=10)
    say("Paris", until="Par")
    send(page, "Where?")
    expect(number(page, "Running")).to_have_text("3")
    expect(number(page, "Queue")).to_have_text("2")
    expect(number(page, "KV cache")).to_have_text("25%")
    go_on()
    expect(number(page, "First token")).to_have_text(re.compile(r"^\d+\.\d\d s$"))
    expect(number(page, "Tokens/s")).to_have_text(re.compile(r"^\d+\.\d$"))


def test_a_hidden_tab_asks_for_nothing(app, serve, open_page):
    page = open_page(serve(app), is_alone=True)  # a clock is that of all pages of its context
    page.clock.install()
    page.reload()
    expect(page.get_by_role("heading", name="fake-model")).to_be_visible()
    polls = []
    page.on("request", lambda request: polls.append(request.url))
    with page.expect_request("**/stats?watch=true"):
        page.clock.run_for(2000)
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    polls.clear()
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.clock.run_for(60_000)
    page.evaluate("fetch('/health?last')")  # requests are reported in order: polls would come before this one
    assert [url.partition("/health")[2] for url in polls] == ["?last"]
    with page.expect_request("**/stats?watch=true"):
        page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
