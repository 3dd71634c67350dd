"""Rules that axe checks, of WCAG and of good practice, on what users see: in both schemes, wide and narrow."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.server.page.parts import button, history, send_and_wait, turns

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


@pytest.mark.parametrize(
    "options",
    [
        {"color_scheme": "light"},
        {"color_scheme": "dark"},
        {"color_scheme": "light", "viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True},
    ],
    ids=["light", "dark", "phone"],
)
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
    if not history(page).is_visible():
        button(page, "Conversations").click()
        assert violations(page) == {}
        page.keyboard.press("Escape")
    button(page, "Settings").click()
    assert violations(page) == {}
    button(page, "Keyboard shortcuts").click()
    assert violations(page) == {}


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
