"""Answers side by side: of other settings, and of two models."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server.fleet import make_fleet
from tests.server.live_server import eventually
from tests.server.page.parts import answer, button, exported, prompt_box, send, send_and_wait, turns

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def fleet(tokenizer):
    return make_fleet(tokenizer)  # a and c fit at once, a and b do not


def attempts(page):
    return page.locator(".attempt")


def asked_with(page):
    """The line with the settings of each answer."""
    return page.locator(".attempt .asked")


def try_with(page, **values):
    """Ask for the last answer again with these values, by their fields' labels."""
    page.keyboard.press("Control+Shift+Y")
    dialog = page.get_by_role("dialog", name="Try other settings")
    for label, value in values.items():
        dialog.get_by_label(label.replace("_", " "), exact=True).fill(value)
    dialog.get_by_role("button", name="Try again").click()


def test_an_answer_is_tried_with_other_settings(page, say, engine, asked, tmp_path):
    say("First.")
    send_and_wait(page, "Say.")
    say("Second, long", until=None)
    try_with(page, Temperature="0.5", Max_tokens="6", System_prompt="Be brief.")
    expect(attempts(page)).to_have_count(2)
    expect(asked_with(page)).to_have_text(
        ["Preset Default", "Preset Default · Own system prompt · Temperature 0.5 · Max tokens 6"]
    )
    expect(page.locator(".attempt .answer-text")).to_have_text(["First.", "Second"])
    expect(page.locator(".attempt .measured").get_by_text("tokens in")).to_have_count(2)
    attempts(page).last.get_by_role("button", name="Continue").click()  # with the same settings
    expect(page.locator(".attempt .answer-text").last).to_have_text("SecondSecond")
    assert [it.sampling.temperature for it in engine.submissions] == [1.0, 0.5, 0.5]
    assert asked()[1].startswith("<|system|>Be brief.<|user|>")
    assert asked()[2].startswith("<|system|>Be brief.<|user|>")

    chosen = page.get_by_text("The next message follows this answer.")
    expect(attempts(page).last.locator(chosen)).to_be_visible()
    expect(attempts(page).last.get_by_role("button", name="Use this answer")).to_be_hidden()
    button(page, "Inspect").click()  # its styles do not reach here
    expect(attempts(page).last.locator(".use-answer")).to_have_css("border-top-width", "0px")
    page.get_by_role("dialog", name="Inspect").get_by_role("button", name="Close").click()
    attempts(page).first.get_by_role("button", name="Use this answer").click()
    expect(attempts(page)).to_have_count(0)
    expect(answer(page)).to_have_text("First.")
    expect(prompt_box(page)).to_be_focused()
    send_and_wait(page, "More?")  # with the settings of the conversation
    assert engine.submissions[-1].sampling.temperature == 1.0
    assert asked()[-1] == "<|user|>Say.<|assistant|>First.<|user|>More?<|assistant|>"

    whole = exported(page, "Export as JSON", tmp_path)
    button(page, "Delete").click()
    expect(turns(page)).to_have_count(0)
    page.get_by_label("Files to import").set_input_files([whole])
    turns(page).first.get_by_role("button", name="Side by side").click()
    expect(button(page, "Show one answer")).to_be_focused()
    expect(asked_with(page).last).to_contain_text("Temperature 0.5")
    expect(page.locator(".attempt .measured").get_by_text("tokens in")).to_have_count(2)
    button(page, "Show one answer").click()
    expect(attempts(page)).to_have_count(0)
    expect(turns(page).first.get_by_role("button", name="Side by side")).to_be_focused()


def test_two_models_answer_side_by_side(fleet, serve, open_page):
    page = open_page(serve(fleet.app))
    fleet.is_paused = True
    button(page, "Ask a second model too").click()
    page.get_by_label("Second model", exact=True).select_option("c")
    send(page, "Hello?")
    expect(page.locator(".attempt .answer-text")).to_have_text(["G", "G"])  # both at once
    expect(attempts(page).get_by_role("heading")).to_have_text(["a", "c"])
    button(page, "Stop").click()
    expect(page.locator(".attempt .measured").get_by_text("Stopped")).to_have_count(2)
    assert eventually(lambda: [len(fleet.engines[name].cancelled) for name in "ac"] == [1, 1])
    fleet.is_paused = False
    fleet.go_on()
    attempts(page).last.get_by_role("button", name="Continue").click()
    expect(page.locator(".attempt .answer-text").last).to_contain_text("world")
    attempts(page).last.get_by_role("button", name="Use this answer").click()
    expect(page.get_by_label("Model", exact=True)).to_have_value("c")
    expect(page.get_by_label("Second model", exact=True)).to_be_hidden()
    send_and_wait(page, "And more?")
    assert [len(fleet.engines[name].submissions) for name in "ac"] == [1, 3]
    page.reload()
    expect(page.get_by_label("Model", exact=True)).to_have_value("c")


def test_a_model_that_cannot_answer_is_shown_next_to_one_that_can(fleet, serve, open_page):
    page = open_page(serve(fleet.app))
    send_and_wait(page, "Hello?")
    fleet.problem = "is damaged"
    page.get_by_label("Model", exact=True).select_option("b")
    button(page, "Ask a second model too").click()
    send(page, "Hello again?")
    expect(attempts(page).last.locator(".measured")).to_contain_text("tokens in")
    expect(attempts(page).first.get_by_role("alert")).to_contain_text("is damaged")
    page.reload()
    turns(page).last.get_by_role("button", name="Side by side").click()
    expect(attempts(page).first.get_by_role("alert")).to_contain_text("is damaged")
    attempts(page).last.get_by_role("button", name="Use this answer").click()
    expect(page.get_by_label("Model", exact=True)).to_have_value("a")


def test_models_that_do_not_fit_together_answer_one_after_the_other(fleet, serve, open_page):
    page = open_page(serve(fleet.app))
    fleet.is_paused = True
    button(page, "Ask a second model too").click()
    page.get_by_label("Second model", exact=True).select_option("b")
    send(page, "Hello?")
    expect(page.locator(".attempt .answer-text").first).to_have_text("G")
    expect(attempts(page).last).to_contain_text("Waiting until there is memory for b…")
    prompt_box(page).fill("And then?")
    page.keyboard.press("Enter")
    fleet.is_paused = False
    fleet.go_on()
    expect(page.locator(".attempt .measured").get_by_text("tokens in")).to_have_count(2)
    expect(prompt_box(page)).to_have_value("And then?")  # the user first chooses an answer
    page.wait_for_timeout(1000)  # the meter of the context counts after a pause
    assert fleet.history == ["+a", "-a", "+b"]  # and loads nothing for that
