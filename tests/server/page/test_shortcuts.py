"""What the keyboard does everywhere on the page, and the overlay that lists it."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server.live_server import eventually
from tests.server.page.parts import answer, button, history, measured, prompt_box, send, send_and_wait, turns

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def dialog(page, name):
    return page.get_by_role("dialog", name=name)


def test_the_overlay_lists_the_shortcuts(page):
    expect(dialog(page, "Keyboard shortcuts")).to_be_hidden()
    page.keyboard.press("Control+/")
    overlay = dialog(page, "Keyboard shortcuts")
    for text in ("New conversation", "Copy the last answer", "Settings"):
        expect(overlay.get_by_text(text, exact=True)).to_be_visible()
    expect(overlay.locator("kbd").get_by_text("Ctrl").first).to_be_visible()
    page.keyboard.press("Control+,")  # nothing opens above it
    expect(dialog(page, "Settings")).to_be_hidden()
    page.keyboard.press("Escape")
    expect(overlay).to_be_hidden()
    button(page, "Settings").click()
    button(page, "Keyboard shortcuts").click()
    expect(overlay).to_be_visible()


def test_shortcuts_do_what_their_controls_do(app, serve, open_page, say, asked):
    page = open_page(serve(app), permissions=["clipboard-read", "clipboard-write"])
    say("Here.")
    send_and_wait(page, "Are you there?")
    page.keyboard.press("Control+Shift+C")
    expect(page.get_by_text("Copied.")).to_be_attached()
    assert page.evaluate("navigator.clipboard.readText()") == "Here."
    say("Still here.")
    page.keyboard.press("Control+Shift+Enter")
    expect(answer(page)).to_have_text("Still here.")
    assert asked() == ["<|user|>Are you there?<|assistant|>"] * 2
    page.keyboard.press("Control+Shift+E")
    expect(page.get_by_label("Edit the question")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_label("Edit the question")).to_be_hidden()
    page.keyboard.press("Control+Shift+S")
    expect(history(page)).to_be_hidden()
    page.keyboard.press("Control+Shift+S")
    expect(history(page)).to_be_visible()
    page.keyboard.press("Control+,")
    expect(dialog(page, "Settings")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Shift+O")
    expect(turns(page)).to_have_count(0)
    expect(prompt_box(page)).to_be_focused()


def test_escape_stops_from_anywhere_and_leads_to_the_message(page, say, engine):
    say("One, two, three", until="One")
    send(page, "Count.")
    expect(answer(page)).to_have_text("One")
    button(page, "New conversation").focus()
    page.keyboard.press("Escape")
    expect(measured(page)).to_contain_text("Stopped")
    assert eventually(lambda: len(engine.cancelled) == 1)
    expect(prompt_box(page)).to_be_focused()
    button(page, "New conversation").focus()
    page.keyboard.press("Escape")
    expect(prompt_box(page)).to_be_focused()


def test_escape_that_ends_an_edit_stops_nothing(page, say, engine):
    say("Here.")
    send_and_wait(page, "Are you there?")
    say("One, two, three", until="One")
    send(page, "Count.")
    expect(answer(page)).to_have_text("One")
    turns(page).first.locator(".edit").click()
    box = turns(page).first.get_by_label("Edit the question")
    expect(box).to_be_focused()
    page.keyboard.press("Escape")
    expect(box).to_be_hidden()
    assert engine.cancelled == []
    button(page, "Stop").click()


@pytest.mark.parametrize("text", ["/", "o", "?", "O"])
def test_letters_alone_do_nothing(page, text):
    button(page, "New conversation").focus()
    page.keyboard.press(text)
    expect(dialog(page, "Keyboard shortcuts")).to_be_hidden()
    expect(button(page, "New conversation")).to_be_focused()


@pytest.mark.parametrize(
    ("event", "is_open"),
    [
        ({"key": "/", "code": "Digit7", "ctrlKey": True, "shiftKey": True}, True),  # a German keyboard
        ({"key": "/", "code": "Slash", "metaKey": True}, True),  # Apple's
        ({"key": "/", "code": "Slash", "ctrlKey": True, "altKey": True}, False),
        ({"key": "/", "code": "Slash", "ctrlKey": True, "isComposing": True}, False),
    ],
)
def test_keyboards_differ(page, event, is_open):
    expect(prompt_box(page)).to_be_focused()
    prompt_box(page).dispatch_event("keydown", event)
    expect(dialog(page, "Keyboard shortcuts")).to_be_visible(visible=is_open)


def test_a_keyboard_without_latin_letters(page, say):
    say("Here.")
    send_and_wait(page, "Are you there?")
    prompt_box(page).dispatch_event("keydown", {"key": "Щ", "code": "KeyO", "ctrlKey": True, "shiftKey": True})
    expect(turns(page)).to_have_count(0)


VIEWS = {
    "Control+Shift+B": "Branches",
    "Control+Shift+L": "Prompt library",
    "Control+Shift+X": "Inspect",
    "Control+Shift+Y": "Try other settings",
    "Control+,": "Settings",
}


def test_every_shortcut_is_listed_once_and_opens_its_view(page):
    send_and_wait(page, "Are you there?")
    page.keyboard.press("Control+/")
    rows = dialog(page, "Keyboard shortcuts").locator("dl > div")
    keys = ["+".join(row.locator("kbd").all_text_contents()) for row in rows.all()]
    assert len(keys) == len(set(keys)) > 15
    assert {shown.replace("Ctrl", "Control") for shown in keys} >= set(VIEWS)
    page.keyboard.press("Escape")
    for pressed, name in VIEWS.items():
        page.keyboard.press(pressed)
        expect(dialog(page, name)).to_be_visible()
        page.keyboard.press("Escape" if page.locator("dialog:modal").count() else pressed)
        expect(dialog(page, name)).to_be_hidden()
