"""Tokens of an answer with their probabilities: the engine's own numbers, kept with the conversation."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.server.fake_client import REPLY
from tests.server.page.parts import answer, button, clear, exported, import_file, send_and_wait, turns
from tests.server.page.test_accessibility import violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def turn_on(page) -> None:
    button(page, "Settings").click()
    page.get_by_label("Token probabilities").check()
    button(page, "Done").click()


def tokens(page):
    return turns(page).last.get_by_role("option")


def card(page):
    return turns(page).last.locator(".token-card")


def test_tokens_are_kept_only_if_asked_for(page, engine):
    send_and_wait(page, "Hello?")
    expect(button(page, "Probabilities")).to_be_hidden()
    assert engine.submissions[-1].sampling.logprobs is None
    turn_on(page)
    send_and_wait(page, "Again?")
    assert engine.submissions[-1].sampling.logprobs == 5
    button(page, "Probabilities").click()
    expect(answer(page)).to_be_hidden()
    # Every byte is a token, and a character stands in the token that ends it.
    expect(tokens(page)).to_have_count(len(REPLY.encode()) + 1)
    assert "".join(tokens(page).all_text_contents()) == f"{REPLY}</s>"


def test_an_answer_without_them_is_tried_again_with_them(page, engine):
    send_and_wait(page, "Hello?")
    button(page, "Try again with probabilities").click()
    expect(page.locator(".attempt")).to_have_count(2)
    expect(button(page, "Probabilities")).to_be_visible()
    expect(button(page, "Try again with probabilities")).to_be_hidden()
    send_and_wait(page, "And now?")  # as the conversation is held
    assert [it.sampling.logprobs for it in engine.submissions] == [None, 5, None]


def test_keys_and_pointer_show_what_was_likely(page, engine, tmp_path):
    turn_on(page)
    send_and_wait(page, "Hello?")
    button(page, "Probabilities").click()
    tokens(page).first.hover()
    expect(card(page)).to_contain_text("G written22.3%")
    expect(card(page).get_by_role("row").first).to_contain_text("F77.9%")
    turns(page).last.get_by_role("listbox").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("[aria-selected=true][role=option]")).to_have_accessible_name(
        "“\\xc3” 22.3%, “\\xc2” 77.9%, “<s>” <0.1%"
    )
    button(page, "Next unsure token").click()
    expect(turns(page).last.get_by_label("Least sure tokens")).to_contain_text("1 of 20")
    assert violations(page) == {}
    page.keyboard.press("Escape")
    expect(card(page)).to_be_hidden()
    path = exported(page, "Export as JSON", tmp_path)
    record = json.loads(path.read_text())["conversations"][0]["messages"][1]["tokens"]
    assert len(record["rows"]) < 20 * len(REPLY.encode())  # characters
    clear(page)
    import_file(page, path, json.loads(path.read_text()))
    button(page, "Probabilities").click()
    assert "".join(tokens(page).all_text_contents()) == f"{REPLY}</s>"


def test_bytes_that_never_become_a_character_are_shown(page):
    texts = page.evaluate(
        """async () => {
          const { addTokens, TokenReader } = await pageModule("chat/token_record.js");
          const token = (bytes) => ({ token: "", bytes, logprob: -1, top_logprobs: [] });
          const reader = new TokenReader(addTokens(null, [[240, 159], [97], [195], [188, 98]].map(token)));
          return reader.read().map(({ text }) => text);
        }"""
    )
    assert texts == ["", "\ufffda", "", "\u00fcb"]
