"""What answers look like, on which screens, for which eyes; and that nothing in them is ever more than text."""

from __future__ import annotations

import itertools
import re

import httpx
import pytest
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import expect

from tests.server.page.parts import answer, button, prompt_box, send, send_and_wait, send_by_key, set_max_tokens

pytestmark = [pytest.mark.browser, pytest.mark.slow]


MARKUP = """<script>document.title = 'taken'</script><img src=x onerror="document.title='taken'">
**<b>bold</b>** and `<i>code</i>`

```html
<script>document.title = 'taken'</script>
```
# <u>heading</u>"""


def test_what_the_model_says_is_never_markup(page, say):
    say(MARKUP)
    send_and_wait(page, "<script>document.title = 'taken'</script>")
    shown = answer(page)
    expect(shown.locator("p").first).to_have_text(re.compile(r"^<script>document.title = 'taken'</script><img src=x"))
    expect(shown.locator("strong")).to_have_text("<b>bold</b>")
    expect(shown.locator("p code")).to_have_text("<i>code</i>")
    expect(shown.locator("pre")).to_have_text("<script>document.title = 'taken'</script>")
    expect(shown.locator("h3")).to_have_text("<u>heading</u>")
    expect(page.locator(".prompt-text")).to_have_text("<script>document.title = 'taken'</script>")
    assert shown.locator("script, img, b, i, u").count() == 0
    expect(page).to_have_title("fake-model · moeflow")


PHONE = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


def test_not_even_a_mistake_of_the_page_makes_markup(app, serve, browser):
    page = browser.new_page()  # its console reports the refused markup
    page.goto(serve(app))
    for markup in ("innerHTML = '<b>x</b>'", "insertAdjacentHTML('beforeend', '<b>x</b>')"):
        with pytest.raises(PlaywrightError, match="TrustedHTML"):
            page.evaluate(f"document.body.{markup}")
    page.close()


def test_a_phone_needs_no_sideways_scrolling(app, serve, open_page, say):
    page = open_page(serve(app), **PHONE)
    expect(page.get_by_role("heading", name="fake-model")).to_be_visible()

    def overflow():
        return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    assert overflow() == 0
    long = "unbreakable" * 20
    say(f"{long}\n\n`{long}`\n\n```\n{long}\n```\n# {long}")
    send_and_wait(page, long)
    assert overflow() == 0
    say(f"{long} {long}", until=long)
    send(page, long)
    expect(answer(page)).to_have_text(long)
    page.get_by_label("Files to attach").set_input_files({"name": f"{long}.txt", "mimeType": "", "buffer": b"text"})
    expect(page.get_by_label("Attached files")).to_be_visible()
    send_by_key(page, long)  # waits
    expect(page.locator(".queued")).to_be_visible()
    page.get_by_label("Files to attach").set_input_files({"name": f"{long}.txt", "mimeType": "", "buffer": b"text"})
    expect(page.get_by_label("Attached files")).to_be_visible()
    assert overflow() == 0
    button(page, "Stop").click()
    assert overflow() == 0
    for control in (prompt_box(page), button(page, "Send")):
        box = control.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert box["y"] + box["height"] <= 640
    button(page, "Settings").click()
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    assert overflow() == 0


WIDE_TABLE = """| Model architecture | Total number of parameters (billions) | Active parameters per token | Notes |
| --- | ---: | ---: | --- |
| Mixtral 8x7B | 46.7 | 12.9 | Two experts answer for each token, and it is good at many languages |"""
LONG_WORDS = f"""| {"Donaudampfschifffahrt" * 3} | Link |
| --- | --- |
| 1 | https://example.com/{"path" * 30} |"""
CHINESE = """| 模型架构 | 解码速度 | 最小内存 | 备注信息 |
| --- | --- | --- | --- |
| 混合专家 | 十二词元 | 二十四吉 | 每个词元使用两个专家支持多种语言每个词元使用两个专家支持多种语言 |"""
CELL_LINES = """(table) => [...table.querySelectorAll("th, td")].map((cell) => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  return new Set([...range.getClientRects()].map((it) => Math.round(it.top))).size;
})"""
BROKEN_WORDS = """(table) => [...table.querySelectorAll("th, td")].flatMap((cell) => {
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  const broken = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode())
    for (const { 0: word, index } of node.data.matchAll(/[^\\s-]+/g)) {
      const range = document.createRange();
      range.setStart(node, index);
      range.setEnd(node, index + word.length);
      if (range.getClientRects().length > 1) broken.push(word);
    }
  return broken;
})"""


def test_wide_tables_scroll_in_a_box_of_their_own(app, serve, open_page, say):
    page = open_page(serve(app), **PHONE)
    in_list = "- " + WIDE_TABLE.replace("\n", "\n  ")
    say("\n\n".join([WIDE_TABLE, in_list, LONG_WORDS, CHINESE]))
    send_and_wait(page, "Compare.")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    tables = page.get_by_label("Table", exact=True)
    expect(tables).to_have_count(4)
    for table in tables.all():
        box = table.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    wide, in_list, long_words, chinese = tables.all()
    for table in (wide, in_list):
        assert table.evaluate("(it) => it.scrollWidth - it.clientWidth") > 100
        assert table.evaluate("(it) => { it.scrollLeft = 1000; return it.scrollLeft; }") > 100
        assert table.evaluate(BROKEN_WORDS) == []
        assert max(table.evaluate(CELL_LINES)) <= 6  # and not a word in each
    assert page.evaluate("[document.documentElement.scrollWidth, scrollX]") == [360, 0]
    # A word as wide as the screen is broken, so that its column takes part of it.
    columns = long_words.locator("th").evaluate_all("(all) => all.map((it) => it.offsetWidth)")
    assert max(columns) < 250
    assert set(chinese.evaluate(CELL_LINES)[:-1]) == {1}  # though they may break at any sign


LAST_TEXT = "it.querySelector('tr:last-child td:last-child').firstChild"


def test_a_table_that_is_written_on_keeps_its_place_and_what_is_selected(app, serve, open_page, say, go_on):
    page = open_page(serve(app), **PHONE)
    beginning = f"{WIDE_TABLE}\n| Next | 1 | 2 | Be"
    say(f"{beginning}gins as a word and becomes a line that is long |", until=beginning)
    send(page, "Compare.")
    table = page.get_by_label("Table", exact=True)
    expect(table).to_contain_text("Be")
    table.evaluate("(it) => (it.scrollLeft = 150)")
    table.evaluate("(it) => getSelection().setBaseAndExtent(...TEXT, 0, ...TEXT, 2)".replace("...TEXT", LAST_TEXT))
    go_on()
    expect(table).to_contain_text("that is long")
    assert table.evaluate("(it) => it.scrollLeft") == 150
    assert page.evaluate("getSelection().toString()") == "Be"
    expect(table.locator("td").last).to_have_class("wordy")  # it asks for more space than at first


def test_a_cell_that_becomes_a_link_asks_for_less_room(page, say, go_on):
    beginning = "| a |\n| - |\n| [b](https://example.com/and/more"
    say(f"{beginning}) |", until=beginning)
    send(page, "Link.")
    cell = answer(page).locator("td")
    expect(cell).to_have_class("wordy long-word")
    go_on()
    expect(cell).to_have_text("b")
    expect(cell).not_to_have_attribute("class", re.compile("."))


def test_a_long_answer_stays_in_view_unless_the_reader_scrolls_away(page, engine, say, go_on):
    set_max_tokens(page, "4000")
    numbers = [f"No. {i}\n\n" for i in range(140)]  # every one a paragraph
    beginning = "".join(numbers[:100])
    say("".join(numbers), until=beginning)
    engine.drafts_per_pass = len(beginning) - 1  # it comes at once, so that its first paragraphs were never in view
    send(page, "Count.")
    expect(answer(page).get_by_text("No. 99")).to_be_in_viewport()
    for _ in range(10):
        text, top = paragraph_in_the_middle(page)
        page.evaluate("scrollBy(0, -200)")
        assert top_of_paragraph(page, text) == pytest.approx(top + 200, abs=1)
    text, top = paragraph_in_the_middle(page)
    engine.drafts_per_pass = 0
    go_on()
    expect(answer(page).locator("p")).to_have_count(140)
    assert top_of_paragraph(page, text) == pytest.approx(top, abs=1)
    arrow, form = button(page, "To the end").bounding_box(), page.locator("#prompt-form").bounding_box()
    assert arrow["x"] + arrow["width"] == form["x"] + form["width"]  # where it covers least of the text
    button(page, "To the end").click()
    expect(answer(page).get_by_text("No. 139")).to_be_in_viewport()
    expect(button(page, "To the end")).to_be_hidden()
    page.reload()
    expect(answer(page).get_by_text("No. 139")).to_be_in_viewport()
    page.keyboard.press("Control+Home")
    page.mouse.wheel(0, -100_000)
    expect(answer(page).get_by_text("No. 0", exact=True)).to_be_in_viewport()


def test_a_conversation_opens_at_its_end(page, say):
    set_max_tokens(page, "4000")
    say(("Text.\n\n```\n" + "code\n" * 30 + "```\n\n") * 12 + "The end.")
    send_and_wait(page, "Much code, please.")  # only the part near the view is drawn
    expect(answer(page).get_by_text("The end.")).to_be_in_viewport()
    page.reload()
    expect(answer(page).get_by_text("The end.")).to_be_in_viewport()
    expect(button(page, "To the end")).to_be_hidden()


def test_room_between_the_blocks_of_an_answer(page, say):
    say("One.\n\n## Two\n\nThree.\n\n---\n\nFour.")
    send_and_wait(page, "Write.")
    boxes = [block.bounding_box() for block in answer(page).locator("> *").all()]
    gaps = [below["y"] - above["y"] - above["height"] for above, below in itertools.pairwise(boxes)]
    before_heading, after_heading, before_line, after_line = gaps
    assert before_heading > after_heading > 8
    assert before_line == after_line > after_heading


def paragraph_in_the_middle(page):
    """Return the text and the top edge, in pixels of the view, of the answer's paragraph nearest to its middle."""
    settle(page)
    return answer(page).evaluate(
        """(answer) => {
          const distance = (it) => Math.abs(it.getBoundingClientRect().top - innerHeight / 2);
          const nearest = [...answer.querySelectorAll("p")].reduce((a, b) => (distance(b) < distance(a) ? b : a));
          return [nearest.textContent, nearest.getBoundingClientRect().top];
        }"""
    )


def top_of_paragraph(page, text):
    settle(page)
    return answer(page).get_by_text(text, exact=True).evaluate("(it) => it.getBoundingClientRect().top")


def settle(page):
    """Wait until the browser has drawn the parts near the view and adjusted the view: three frames without movement."""
    page.evaluate(
        """async () => {
          for (let calm = 0, before = ""; calm < 3; ) {
            await new Promise((done) => requestAnimationFrame(done));
            const now = `${scrollY} of ${document.documentElement.scrollHeight}`;
            calm = now === before ? calm + 1 : 0;
            before = now;
          }
        }"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(app, serve, open_page, scheme):
    """WCAG AA: 4.5 for text, 3 for the edges of fields."""
    page = open_page(serve(app), color_scheme=scheme)
    read = """(name) => {
      const probe = document.body.appendChild(document.createElement("i"));
      probe.style.color = `var(--${name})`;
      return getComputedStyle(probe).color.match(/\\d+/g).map(Number);
    }"""
    colours = {
        name: page.evaluate(read, name)
        for name in ("ground", "surface", "tint", "edge", "text", "muted", "accent", "on-accent", "wrong")
    }
    texts = [(front, back) for front in ("text", "muted", "accent", "wrong") for back in ("ground", "surface")]
    texts += [("text", "tint"), ("on-accent", "accent")]
    ratios = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in texts}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}
    assert contrast(colours["edge"], colours["surface"]) >= 3


def contrast(front: list[int], back: list[int]) -> float:
    high, low = sorted((luminance(front), luminance(back)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: list[int]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (it / 255 for it in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_page_may_load_only_what_the_server_has(app, serve):
    page = httpx.get(serve(app) + "/")
    rules = dict(rule.split(maxsplit=1) for rule in page.headers["content-security-policy"].split(";"))
    assert rules["default-src"] in ("'none'", "'self'")
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", page.text)
