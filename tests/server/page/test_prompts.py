"""The library of prompts: "/" inserts one, and its placeholders are filled in."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import answer, button, prompt_box, send_and_wait

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def options(page):
    return page.get_by_role("listbox", name="Prompts").get_by_role("option")


@pytest.fixture
def library(page):
    """A page with two prompts."""
    page.keyboard.press("Control+Shift+L")
    for name, text in [("Brief", "Be brief: "), ("Translate", "Into {{language}}:\n{{ text }} ({{language}})")]:
        page.get_by_label("Name of the prompt").fill(name)
        page.get_by_label("Text of the prompt").fill(text)
        button(page, "Save prompt").click()
    page.keyboard.press("Escape")
    return page


def test_a_slash_inserts_a_prompt(library, say, asked):
    box = prompt_box(library)
    box.press_sequentially("Please /")
    expect(options(library)).to_contain_text(["Brief", "Translate", "Manage prompts…"])
    expect(library.get_by_text("Prompts: 2. Arrow keys choose, Enter inserts.")).to_be_attached()
    library.keyboard.press("ArrowDown")
    active = options(library).nth(1)
    expect(active).to_have_attribute("aria-selected", "true")
    expect(box).to_have_attribute("aria-activedescendant", active.get_attribute("id"))
    library.keyboard.press("Enter")
    expect(library.get_by_role("dialog", name="Fill in: Translate")).to_be_visible()
    library.get_by_label("language", exact=True).press_sequentially("German")
    library.get_by_label("text", exact=True).fill("$& {{text}}")
    library.keyboard.press("Enter")
    expect(box).to_have_value("Please Into German:\n$& {{text}} (German)")
    expect(box).to_be_focused()
    expect(options(library)).to_have_count(0)
    say("Ja.")
    library.keyboard.press("Enter")
    expect(answer(library)).to_have_text(re.compile("."))
    assert asked() == ["<|user|>Please Into German:\n$& {{text}} (German)<|assistant|>"]


def test_a_slash_that_is_none_of_a_prompt_is_sent(library, say, asked):
    box = prompt_box(library)
    say("Yes.")
    for text in ("/nothing", "/etc/hosts"):  # no prompt has such a name
        box.press_sequentially(text)
        expect(options(library)).to_have_count(0)
        box.fill("")
    box.press_sequentially("/b")
    expect(options(library)).to_contain_text(["Brief", "Manage"])
    library.keyboard.press("Escape")
    expect(options(library)).to_have_count(0)
    library.keyboard.press("Enter")
    expect(answer(library)).to_have_text(re.compile("."))
    assert asked() == ["<|user|>/b<|assistant|>"]


def test_prompts_are_edited_exported_imported_and_deleted(library, tmp_path):
    library.reload()
    library.locator("body:not([inert])").wait_for(state="attached")  # its modules have run
    library.keyboard.press("Control+Shift+L")
    dialog = library.get_by_role("dialog", name="Prompt library")
    with library.expect_download() as download:
        dialog.get_by_role("button", name="Export").click()
    file = tmp_path / "prompts.json"
    download.value.save_as(file)
    dialog.get_by_role("button", name="Edit Brief").click()
    library.get_by_label("Name of the prompt").fill("Translate")  # is taken
    button(library, "Save prompt").click()
    headings = dialog.get_by_role("heading", level=4)
    expect(headings).to_have_text(["Translate 2", "Translate"])
    library.once("dialog", lambda it: it.accept())
    dialog.get_by_role("button", name="Delete Translate", exact=True).click()
    expect(headings).to_have_text(["Translate 2"])
    library.get_by_label("Prompts to import").set_input_files([file])
    expect(headings).to_have_text(["Brief", "Translate"])
    file.write_text(json.dumps({"format": "moeflow-prompts", "version": 1, "items": [{"id": "a", "name": "b"}]}))
    library.get_by_label("Prompts to import").set_input_files([file])
    expect(dialog.get_by_text("a prompt in it has no text")).to_be_visible()
    expect(headings).to_have_text(["Brief", "Translate"])


def test_without_prompts_the_list_leads_to_the_library(page, say, asked):
    prompt_box(page).press_sequentially("/")
    expect(options(page)).to_have_text(["Manage prompts…"])
    expect(page.locator("#prompt-menu [aria-selected=true]")).to_have_count(0)
    options(page).click()
    expect(page.get_by_label("Name of the prompt")).to_be_focused()
    page.keyboard.press("Escape")
    say("Yes.")
    send_and_wait(page, "/")
    assert asked() == ["<|user|>/<|assistant|>"]
