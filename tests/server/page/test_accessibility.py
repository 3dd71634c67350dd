"""Rules that axe checks, of WCAG and of good practice, on what users see: in both schemes, wide and narrow."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.server.fleet import make_fleet
from tests.server.page.parts import button, history, open_settings, prompt_box, send, send_and_wait, turns

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ANSWER = """### A heading

Text with `code`, a [link](https://example.com), $x^2$ and **more**.

| A | B |
| - | -: |
| 1 | 2 |

```python
def f(x: int) -> str:  # a comment
    return "text" + str(1.5)
```

> quoted
"""


def violations(page) -> dict[str, list[str]]:
    found = Axe().run(page).response["violations"]
    return {rule["id"]: [node["html"][:200] for node in rule["nodes"]] for rule in found}


in_all_looks = pytest.mark.parametrize(
    "options",
    [
        {"color_scheme": "light"},
        {"color_scheme": "dark"},
        {"color_scheme": "light", "viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True},
    ],
    ids=["light", "dark", "phone"],
)


@in_all_looks
def test_axe_finds_nothing(app, serve, open_page, say, engine, options):
    page = open_page(serve(app), reduced_motion="reduce", **options)
    expect(page.get_by_role("heading", name="fake-model")).to_be_visible()
    assert violations(page) == {}
    say(ANSWER)
    send_and_wait(page, "Show me.")
    expect(page.locator(".code-keyword").first).to_be_visible()
    expect(page.locator(".katex").first).to_be_visible()
    button(page, "Try again").click()
    expect(page.get_by_label("Versions of the answer")).to_contain_text("2/2")
    engine.fail_after = 0
    page.get_by_label("Files to attach").set_input_files({"name": "a.txt", "mimeType": "", "buffer": b"text"})
    expect(page.get_by_label("Attached files")).to_be_visible()
    assert violations(page) == {}
    send_and_wait(page, "And then?")
    page.get_by_text("a.txt · 4 bytes").click()
    turns(page).first.get_by_role("button", name="Edit").click()
    assert violations(page) == {}
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Shift+B")
    expect(page.get_by_role("tree")).to_be_visible()
    assert violations(page) == {}
    page.keyboard.press("Escape")
    if not history(page).is_visible():
        button(page, "Conversations").click()
        assert violations(page) == {}
        page.keyboard.press("Escape")
    button(page, "Settings").click()
    assert violations(page) == {}
    button(page, "Keyboard shortcuts").click()
    assert violations(page) == {}


@in_all_looks
def test_axe_finds_nothing_in_what_a_chat_is_held_with(tokenizer, serve, open_page, options):
    page = open_page(serve(make_fleet(tokenizer).app), reduced_motion="reduce", **options)
    button(page, "Ask a second model too").click()
    send_and_wait_for_both(page, "Hello?")
    page.get_by_text("System prompt:").click()
    assert violations(page) == {}
    page.keyboard.press("Control+Shift+L")
    page.get_by_label("Name of the prompt").fill("Translate")
    page.get_by_label("Text of the prompt").fill("Translate: {{text}}")
    button(page, "Save prompt").click()
    assert violations(page) == {}
    button(page, "Close").last.click()
    prompt_box(page).press_sequentially("/")
    expect(page.locator("#prompt-menu [aria-selected=true]")).to_contain_text("Translate")
    assert violations(page) == {}
    page.keyboard.press("Enter")
    expect(page.get_by_label("text", exact=True)).to_be_focused()
    assert violations(page) == {}
    button(page, "Cancel").click()
    page.locator(".comparison-foot").get_by_role("button", name="Try other settings…").click()
    page.locator("#try-again").get_by_text("More sampling").click()
    assert violations(page) == {}
    button(page, "Cancel").click()
    open_settings(page)
    page.get_by_text("Manage presets").click()
    assert violations(page) == {}


def send_and_wait_for_both(page, text):
    send(page, text)
    expect(page.locator(".attempt .measured").get_by_text("tokens in")).to_have_count(2)


@pytest.mark.parametrize(("theme", "scheme"), [("Dark", "light"), ("Light", "dark")])
def test_axe_finds_nothing_in_the_other_theme(app, serve, open_page, say, theme, scheme):
    page = open_page(serve(app), reduced_motion="reduce", color_scheme=scheme)
    button(page, "Settings").click()
    page.get_by_label("Theme").select_option(theme)
    assert violations(page) == {}
    button(page, "Done").click()
    say(ANSWER)
    send_and_wait(page, "Show me.")
    expect(page.locator(".code-keyword").first).to_be_visible()
    assert violations(page) == {}
