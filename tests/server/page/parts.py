"""What a user sees and does on the page, by the names it has for people and screen readers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect


def prompt_box(page: Page) -> Locator:
    return page.get_by_label("Your message")


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def turns(page: Page) -> Locator:
    return page.get_by_role("article")


def answer(page: Page) -> Locator:
    """The text of the last answer."""
    return turns(page).last.locator(".answer-text")


def measured(page: Page) -> Locator:
    """The small print under the last answer."""
    return turns(page).last.locator(".measured")


def number(page: Page, name: str) -> Locator:
    """A value in the row of live numbers."""
    return page.locator(".numbers div").filter(has_text=name).locator("dd")


def tokens(page: Page, name: str) -> Locator:
    """How much of the context a part takes; that of "Context" is the sum."""
    part = page.locator("#context-meter dl div").filter(has=page.get_by_role("term").get_by_text(name, exact=True))
    return part.locator("dd")


def send(page: Page, text: str) -> None:
    prompt_box(page).fill(text)
    button(page, "Send").click()


def send_by_key(page: Page, text: str) -> None:
    prompt_box(page).fill(text)
    prompt_box(page).press("Enter")


def send_and_wait(page: Page, text: str) -> None:
    """Send and wait for the end of the answer, good or bad."""
    count = turns(page).count()
    send(page, text)
    expect(turns(page)).to_have_count(count + 1)
    expect(retry_button(page)).to_be_visible()


def set_max_tokens(page: Page, value: str) -> None:
    """Set the most tokens of an answer, which are bytes for the fake engine."""
    button(page, "Settings").click()
    page.get_by_label("Max tokens", exact=True).fill(value)
    button(page, "Done").click()


def open_settings(page: Page) -> None:
    """Open the settings, with all fields in view."""
    button(page, "Settings").click()
    details = page.locator("#settings-fields .more")
    if details.get_attribute("open") is None:
        details.get_by_text("More sampling").click()


def retry_button(page: Page) -> Locator:
    """Of the last answer."""
    return turns(page).last.get_by_role("button", name="Try again", exact=True)


def history(page: Page) -> Locator:
    """The list of conversations, which is open where the window is wide."""
    return page.get_by_role("dialog", name="Conversations")


def names(page: Page) -> Locator:
    """Of the conversations in the list."""
    return history(page).get_by_role("link")


def exported(page: Page, name: str, folder: Path) -> Path:
    """Click the button of that name, which exports, and return the file, which lies in `folder`."""
    with page.expect_download() as download:
        button(page, name).click()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def import_file(page: Page, path: Path, content: Any) -> None:
    """Write the content as JSON and import it."""
    path.write_text(json.dumps(content))
    page.get_by_label("Files to import").set_input_files([path])


def clear(page: Page) -> None:
    """Remove all conversations."""
    button(page, "Settings").click()
    page.once("dialog", lambda dialog: dialog.accept())
    button(page, "Clear everything").click()
    expect(turns(page)).to_have_count(0)


def kept_ids(page: Page) -> list[str]:
    """The ids of what the browser holds, in both tables and for the time of a reload."""
    return page.evaluate(
        """async () => {
          const { ConversationStore } = await pageModule("conversations/store.js");
          const store = new ConversationStore();
          const unsaved = store.unsaved.read();
          return [...(await store.heads()), ...(await store.all()), ...(unsaved ? [unsaved] : [])].map((it) => it.id);
        }"""
    )


def expect_nothing_is_kept(page: Page) -> None:
    """Nothing is there after a reload, nor in the browser's tables."""
    page.reload()
    expect(history(page)).to_contain_text("Conversations are kept here")
    assert kept_ids(page) == []


SLOW_STORE = """async () => {
  const { ConversationStore } = await pageModule("conversations/store.js");
  const { load } = ConversationStore.prototype;
  const gate = new Promise((open) => (window.letLoad = open));
  ConversationStore.prototype.load = async function (id) {
    ConversationStore.prototype.load = load;
    const kept = await load.call(this, id);
    await gate;
    return kept;
  };
}"""


@contextlib.contextmanager
def slow_store(page: Page) -> Iterator[None]:
    """The next conversation that is read from the browser's tables is there only at the end."""
    page.evaluate(SLOW_STORE)
    yield
    page.evaluate("letLoad()")


def stream(*deltas, reason="stop"):
    """The body of a streamed answer, which ends for a reason."""
    pairs = [*((delta, None) for delta in deltas), ({}, reason)]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": end}]} for delta, end in pairs]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
