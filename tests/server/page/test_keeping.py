"""Deleted items stay deleted, and all else is kept: while answers are written, across tabs, and with full storage."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import (
    answer,
    button,
    clear,
    expect_nothing_is_kept,
    import_file,
    names,
    send,
    send_and_wait,
    turns,
)

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def streaming(page, say):
    """A page on which an answer is being written."""
    say("Here I am and more of it.", until="Here I am")
    send(page, "A secret")
    expect(answer(page)).to_have_text("Here I am")
    expect(names(page)).to_have_count(1)
    return page


def test_deleted_while_an_answer_is_written(streaming):
    button(streaming, "Delete").click()
    expect(button(streaming, "Undo")).to_be_visible()
    expect_nothing_is_kept(streaming)


def test_cleared_while_an_answer_is_written(streaming):
    clear(streaming)
    expect(streaming.get_by_text("Everything is cleared.")).to_be_attached()
    expect_nothing_is_kept(streaming)


def test_undo_puts_back_what_was_not_saved_yet(streaming):
    button(streaming, "Delete").click()
    button(streaming, "Undo").click()
    expect(answer(streaming)).to_have_text("Here I am")
    expect(names(streaming)).to_have_text(["A secret"])
    streaming.reload()
    expect(answer(streaming)).to_have_text("Here I am")


def test_trying_a_failed_turn_again_keeps_what_came_after_it(page, say):
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=502, body="Bad gateway"))
    send_and_wait(page, "One?")
    page.unroute("**/v1/chat/completions")
    say("Precious.")
    send_and_wait(page, "Two?")
    say("Better.")
    turns(page).first.get_by_role("button", name="Try again").click()
    expect(answer(page)).to_have_text("Better.")
    button(page, "Earlier version").click()
    expect(turns(page)).to_have_count(2)
    expect(answer(page)).to_have_text("Precious.")


REFUSE = """if (sessionStorage.full) IDBObjectStore.prototype.put = () => {
  throw new DOMException("no room", "QuotaExceededError");
};"""


@pytest.fixture
def set_full(page):
    """Have the browser refuse to store anything more in its tables, or not, after a reload."""
    page.add_init_script(REFUSE)

    def set_full(is_full):
        page.evaluate("(full) => (sessionStorage.full = full)", "yes" if is_full else "")
        page.reload()

    return set_full


def test_a_conversation_outlasts_reloads_without_room(page, say, set_full):
    set_full(True)
    say("Precious.")
    send_and_wait(page, "One?")
    for is_full in (True, True, False):
        set_full(is_full)
        expect(answer(page)).to_have_text("Precious.")
    expect(names(page)).to_have_text(["One?"])


def test_an_import_without_room(page, set_full, tmp_path):
    set_full(True)
    two = [{"messages": [{"role": "user", "content": text}]} for text in ("One", "Two")]
    import_file(page, tmp_path / "two.json", two)
    expect(page.get_by_text("This browser could keep only 0 of the 2 conversations in two.json")).to_be_visible()


def own(*messages):
    whole = [{"id": id, "parent": parent, "role": "user", "content": "x"} for id, parent in messages]
    conversations = [{"title": "", "messages": whole, "chosen": {}}]
    return {"format": "moeflow-conversations", "version": 1, "conversations": conversations}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (own(("", "")), "a message in it has an id that is empty"),
        (own(("a", ""), ("b", "a"), ("a", "b")), "a message in it has an id that is not its own"),
        (own(("a", "b"), ("b", "a")), "a message in it answers none before it"),
    ],
)
def test_a_file_whose_messages_are_no_tree(page, tmp_path, content, complaint):
    import_file(page, tmp_path / "bad.json", content)
    expect(page.get_by_text(f"bad.json could not be imported: {complaint}.")).to_be_visible()


def test_a_file_of_chatgpt_with_rings(page, tmp_path):
    message = {"author": {"role": "user"}, "content": {"parts": ["Still here"]}}
    mapping = {
        "root": {"id": "root", "parent": None, "children": ["root"], "message": message},
        "ring": {"id": "ring", "parent": "ring"},
    }
    import_file(page, tmp_path / "rings.json", {"mapping": mapping, "current_node": "ring"})
    expect(names(page)).to_have_text(["Still here"])


def test_a_name_is_given_to_the_conversation_it_was_typed_for(page, say):
    say("A.")
    send_and_wait(page, "first")
    button(page, "New conversation").click()
    send_and_wait(page, "second")
    button(page, "Rename").click()
    page.keyboard.type("SECOND")
    page.go_back()  # over the empty page, to the first
    expect(turns(page)).to_have_count(0)
    page.go_back()
    expect(turns(page)).to_have_count(1)
    page.keyboard.press("Enter")
    expect(names(page)).to_have_text(["SECOND", "first"])
