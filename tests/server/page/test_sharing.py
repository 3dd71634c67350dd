"""A conversation as one HTML file, on paper, and the page as an installed program."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import answer, button, exported, open_settings, send_and_wait

pytestmark = [pytest.mark.browser, pytest.mark.slow]

ANSWER = """A [link](https://example.com/?a=1&b=2), $x^2$ and <img src=x onerror=alert(1)>

```python
def f(x): return "</style><script>alert(2)</script>"
```
"""


def test_one_file_has_the_conversation_and_no_scripts(page, say, browser, tmp_path):
    say(ANSWER)
    open_settings(page)
    page.get_by_label("System prompt", exact=True).fill("Be <i>kind</i>.")  # of the preset
    button(page, "Done").click()
    send_and_wait(page, "Is <b>this</b> safe?")
    expect(page.locator(".code-keyword").first).to_be_visible()
    page.get_by_label("Files to attach").set_input_files({"name": "a.txt", "mimeType": "", "buffer": b"</pre><script>"})
    say("And **more**.")
    send_and_wait(page, "And this?")
    path = exported(page, "Share as HTML", tmp_path)
    assert path.name == "is-b-this-b-safe.html"
    text = path.read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "<button" not in text
    context = browser.new_context(color_scheme="dark")
    shared = context.new_page()
    said = []
    shared.on("console", lambda message: said.append(message.text))
    shared.on("request", lambda request: said.append(request.url))
    shared.goto(path.as_uri())
    expect(shared.get_by_role("heading", level=1)).to_have_text("Is <b>this</b> safe?")
    expect(shared.locator(".prompt").first).to_have_text("Is <b>this</b> safe?")
    expect(shared.locator(".code-keyword").first).to_have_css("color", "rgb(227, 159, 211)")
    expect(shared.locator("math").first).to_be_visible()
    expect(shared.locator(".numbers").first).to_contain_text("fake-model")
    shared.get_by_text("System prompt").click()
    expect(shared.get_by_text("Be <i>kind</i>.")).to_be_visible()
    shared.get_by_text("a.txt").click()
    expect(shared.get_by_text("</pre><script>")).to_be_visible()
    expect(shared.locator("strong")).to_have_text("more")
    assert said == [path.as_uri()]
    context.close()


def test_paper_has_the_conversation_without_controls(page, say):
    say(ANSWER)
    send_and_wait(page, "Show me.")
    page.emulate_media(media="print", color_scheme="dark")
    expect(answer(page)).to_be_visible()
    expect(page.get_by_role("heading", name="fake-model")).to_be_visible()
    for name in ("Send", "Try again", "Copy question", "Settings", "Copy code"):
        expect(button(page, name)).to_be_hidden()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(250, 251, 251)"
    link = page.evaluate("getComputedStyle(document.querySelector('.prose a'), '::after').content")
    assert "attr(href)" in link or "example.com" in link
    page.emulate_media(media="screen")
    button(page, "Inspect").click()
    page.emulate_media(media="print")
    expect(answer(page)).to_be_hidden()
    expect(page.get_by_role("dialog", name="Inspect")).to_be_visible()


def test_the_page_can_be_installed(page):
    found = page.context.new_cdp_session(page).send("Page.getAppManifest")
    assert found["errors"] == []
    manifest = json.loads(found["data"])
    start = page.evaluate("([url, base]) => new URL(url, base).href", [manifest["start_url"], found["url"]])
    assert start == page.url
    sizes = page.evaluate(
        """([icons, base]) => Promise.all(icons.map(async ({ src }) => {
          const image = new Image();
          image.src = new URL(src, base).href;
          await image.decode();
          return `${image.naturalWidth}x${image.naturalHeight}`;
        }))""",
        [manifest["icons"], found["url"]],
    )
    assert [
        size for size, icon in zip(sizes, manifest["icons"], strict=True) if icon["sizes"] not in (size, "any")
    ] == []
    problems = page.context.new_cdp_session(page).send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert [it["errorId"] for it in problems if it["errorId"] != "in-incognito"] == []
