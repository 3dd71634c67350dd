"""The page in another language: texts of the document, of templates and of modules, numbers, and the choice."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from moeflow.server.page import WEB_FOLDER
from scripts.page_texts import dictionaries
from tests.server.page.parts import answer, button, measured, prompt_box, send

pytestmark = [pytest.mark.browser, pytest.mark.slow]

# In the place of languages.js: every text in brackets, so that one that is not translated stands out.
TEXTS = {
    "What would you like to ask?": "[What would you like to ask?]",
    "Write a message": "[Write a message]",
    "Settings": "[Settings]",
    "Try again": "[Try again]",
    "{count} tokens in {seconds} s": "[{seconds} s, {count}]",
    "Send the message": "[Send the message]",
}
LANGUAGES = 'export const LANGUAGES = {{ de: {{ name: "Deutsch", texts: {} }} }};'


def test_the_choice_translates_the_page(app, serve, open_page, say, go_on):
    page = open_page(serve(app), is_alone=True)
    texts = "{" + ",".join(f'"{text}": "{other}"' for text, other in TEXTS.items()) + "}"
    body = LANGUAGES.format(texts)
    page.route("**/languages.js", lambda route: route.fulfill(body=body, content_type="text/javascript"))
    say("Yes.", until="Y")
    send(page, "One?")
    expect(answer(page)).to_have_text("Y")
    prompt_box(page).fill("Not sent")
    button(page, "Settings").click()
    page.get_by_label("Language").select_option("Deutsch")
    expect(page.get_by_text("The language changes once the answer is complete.")).to_be_visible()
    go_on()
    expect(page.get_by_role("heading", name="[Settings]")).to_be_visible()
    expect(page.get_by_label("Language")).to_be_focused()
    page.keyboard.press("Escape")
    expect(answer(page)).to_have_text("Yes.")
    expect(prompt_box(page)).to_have_value("Not sent")
    button(page, "New conversation").click()
    expect(page.get_by_role("heading", name="[What would you like to ask?]")).to_be_visible()
    expect(page.get_by_placeholder("[Write a message]")).to_be_visible()
    assert page.evaluate("document.documentElement.lang") == "de"
    prompt_box(page).fill("Hello?")
    prompt_box(page).press("Enter")
    expect(button(page, "[Try again]")).to_be_visible()
    expect(measured(page)).to_have_text(re.compile(r"\[\d+,\d s, \d+\]"))
    page.keyboard.press("Control+/")
    expect(page.get_by_text("[Send the message]")).to_be_visible()
    page.keyboard.press("Escape")
    button(page, "[Settings]").click()
    page.get_by_label("Language").select_option("English")
    expect(page.get_by_role("heading", name="Settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_placeholder("Write a message")).to_be_visible()


def test_every_language_is_offered(page):
    offered = page.locator("#language option").evaluate_all("them => them.map((it) => [it.value, it.textContent])")
    source = (WEB_FOLDER / "languages.js").read_text(encoding="utf-8")
    names = dict(re.findall(r'^  (\w+): \{\s*name: "([^"]+)"', source, re.MULTILINE))
    assert dict(offered) == {"": "Browser", "en": "English", **names}
    assert set(dictionaries()) == set(names)
    assert str(sorted(names)).replace("'", '"') in (WEB_FOLDER / "first_paint.js").read_text(encoding="utf-8")
