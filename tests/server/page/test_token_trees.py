"""Drafts under an answer: who asks sees the trees, and the graph is the one that the shell writes."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest
from playwright.sync_api import expect

from moeflow.text.drafted_passes import DraftedPass
from moeflow.text.token_tree_dot import to_dot
from tests.server.page.parts import answer, button, open_settings, send_and_wait, turns

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TEXT = 'Say "hi" \\ \n\t🦊 <b>bold</b>\x07'


@pytest.fixture
def drafting(engine):
    """Let the server draft. Asked for before `page`, which reads what the server does once it is opened."""
    engine.model = msgspec.structs.replace(engine.model, speculators=("suffix", "draft"))
    engine.drafts_per_pass = 3
    return engine


def turn_on(page) -> None:
    open_settings(page)
    page.get_by_label("Show drafts").check()
    button(page, "Done").click()


def drafts(page):
    return turns(page).last.locator(".drafts")


def test_nothing_is_shown_nor_asked_for_by_itself(drafting, page):
    send_and_wait(page, "Hello?")
    expect(drafts(page)).to_be_hidden()
    assert not drafting.submissions[0].sampling.token_trees


def test_what_can_be_done_with_the_trees_takes_no_line_of_its_own(drafting, page):
    turn_on(page)
    send_and_wait(page, "Hello?")
    drafts(page).locator("summary").click()
    summary, export = drafts(page).locator("summary").bounding_box(), button(page, "Save DOT").bounding_box()
    middle_of_summary, middle_of_export = (box["y"] + box["height"] / 2 for box in (summary, export))
    assert abs(middle_of_summary - middle_of_export) < 4
    assert export["x"] > summary["x"] + summary["width"]


def test_a_server_that_does_not_draft_has_no_such_setting(page, engine):
    open_settings(page)
    expect(page.get_by_label("Temperature")).to_be_visible()
    expect(page.get_by_label("Show drafts")).to_be_hidden()
    assert engine.model.speculators == ()


def test_each_pass_has_its_tree(drafting, page, say):
    say("abcdefgh")  # and an end of sequence: 9 tokens in passes of 4, 4 and 1
    turn_on(page)
    send_and_wait(page, "Hello?")
    expect(drafts(page).locator(".drafts-line")).to_have_text("3.00 tokens a pass · 6 of 12 drafts right")
    expect(drafts(page).locator(".passes li")).to_have_count(0)  # drawn when it is opened
    drafts(page).locator("summary").click()
    rows = drafts(page).locator(".passes li")
    expect(rows).to_have_count(3)
    expect(rows.first.locator(".accepted .token-text")).to_have_text(["a", "b", "c"])
    expect(rows.first.locator(".rejected")).to_have_count(3)
    expect(rows.first.locator(".own")).to_have_text("d")
    expect(rows.first.locator(".accepted .token-from").first).to_have_text("A 75%")
    expect(drafts(page).locator(".drafters li")).to_have_text(["A: suffix", "B: draft"])
    expect(rows.last.locator(".token")).to_have_count(1)
    button(page, "Try again").click()
    expect(drafts(page).locator(".passes li")).to_have_count(3)


def test_the_graph_is_the_one_that_the_shell_writes(drafting, page, say, tmp_path):
    say(TEXT)
    turn_on(page)
    send_and_wait(page, "Hello?")
    expect(answer(page)).to_contain_text("<b>bold</b>")
    drafts(page).locator("summary").click()
    expect(drafts(page).locator(".passes")).to_contain_text("↵")
    with page.expect_download() as download:
        button(page, "Save DOT").click()
    assert download.value.suggested_filename == "token-trees.dot"
    download.value.save_as(tmp_path / "saved.dot")
    body = {"messages": [{"role": "user", "content": "Hello?"}], "token_trees": True}
    choice = httpx.post(f"{page.url.partition('#')[0]}v1/chat/completions", json=body).json()["choices"][0]
    passes = msgspec.convert(choice["token_trees"], list[DraftedPass])
    assert Path(tmp_path / "saved.dot").read_text(encoding="utf-8") == to_dot({"answer": passes})


def test_a_reload_keeps_the_setting_but_not_the_trees(drafting, page):
    turn_on(page)
    send_and_wait(page, "Hello?")
    expect(drafts(page)).to_be_visible()
    page.reload()
    expect(answer(page)).to_be_visible()
    expect(drafts(page)).to_be_hidden()
    send_and_wait(page, "Again?")
    assert drafting.submissions[-1].sampling.token_trees
