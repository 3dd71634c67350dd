from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import answer, button, history, send_and_wait, turns

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def sent(submission):
    sampling = submission.sampling
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, sampling.seed


def test_settings_reach_the_request_and_are_remembered(page, say, asked, engine):
    say("Yes.")
    values = {
        "System prompt": "Be brief.",
        "Temperature": "0.25",
        "Top-p": "0.5",
        "Top-k": "40",
        "Max tokens": "77",
        "Seed": "1234",
    }
    button(page, "Settings").click()
    for label, value in values.items():
        page.get_by_label(label, exact=True).fill(value)
    page.keyboard.press("Escape")
    expect(button(page, "Settings")).to_be_focused()
    page.reload()
    send_and_wait(page, "Ready?")
    assert sent(engine.submissions[0]) == (0.25, 0.5, 40, 77, 1234)
    assert asked() == ["<|system|>Be brief.<|user|>Ready?<|assistant|>"]


def test_settings_can_be_reset(page, say, asked, engine):
    say("Yes.")
    button(page, "Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature", exact=True).fill("0.25")
    page.get_by_label("Seed", exact=True).fill("1234")
    button(page, "Reset to defaults").click()
    button(page, "Done").click()
    send_and_wait(page, "Ready?")
    room = 4096 - len(engine.submissions[0].prompt_token_ids)  # of the context, as many as are asked for
    assert sent(engine.submissions[0]) == (0.7, 0.9, 0, room, None)
    assert asked() == ["<|user|>Ready?<|assistant|>"]


def test_a_setting_out_of_range_is_explained_and_not_used(page, say, engine):
    say("Yes.")
    button(page, "Settings").click()
    field = page.get_by_label("Temperature", exact=True)
    field.fill("9")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_accessible_description("Value must be less than or equal to 2.")
    button(page, "Done").click()
    expect(field).to_have_value("0.7")
    expect(field).to_have_attribute("aria-invalid", "false")
    send_and_wait(page, "Ready?")
    assert engine.submissions[0].sampling.temperature == 0.7


def test_no_limit_of_tokens(page, say, engine):
    say("Yes.")
    button(page, "Settings").click()
    page.get_by_label("Max tokens", exact=True).fill("")
    button(page, "Done").click()
    send_and_wait(page, "Ready?")
    assert sent(engine.submissions[0]) == (0.7, 0.9, 0, None, None)


def test_the_answer_says_when_max_tokens_cut_it_off(page, say):
    say("A long story")
    button(page, "Settings").click()
    page.get_by_label("Max tokens", exact=True).fill("6")
    button(page, "Done").click()
    send_and_wait(page, "A story, please.")
    expect(answer(page)).to_have_text("A long")
    expect(page.get_by_text("Cut off at max tokens · 6 tokens")).to_be_visible()


def test_clear_everything(page, say):
    say("Here.")
    send_and_wait(page, "Are you there?")
    button(page, "Settings").click()
    page.get_by_label("Seed", exact=True).fill("5")
    page.once("dialog", lambda dialog: dialog.accept())
    button(page, "Clear everything").click()
    expect(turns(page)).to_have_count(0)
    expect(history(page).get_by_role("link")).to_have_count(0)
    page.reload()
    expect(turns(page)).to_have_count(0)
    expect(page.get_by_label("Seed", exact=True)).to_have_value("")
    assert page.evaluate("localStorage.length") == 0
