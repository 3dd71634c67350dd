"""Display of a model's text: against markdown-it's own HTML, in pieces against at once, and forbidden output.

One page for the whole file; its modules are called as the page calls them.
"""

from __future__ import annotations

import pytest

from moeflow.server.page import WEB_FOLDER

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TEXTS = [
    "",
    "one\ntwo\n\n\nthree",
    "before\n```py\nx = 1\n\ny = 2\n```\nafter",
    "```\nstill open\n\n# no heading",
    "~~~~ js\n```\n~~~\n~~~~\nafter",
    "## Title\ntext\n#hashtag\n\nSetext\n===\n\nanother\n---\n",
    "inline ```code``` stays, `a ``b`` c`, \\*escaped\\* &amp; &copy; &#35;",
    "1. one\n2. two\n   - a\n   - b\n\n     loose\n3. three\n\n7) seven\n8) eight\n\n* star\n+ plus",
    "- a\n- b\n\n\n    code after\n\n> quote\nlazy\n> > deeper\n\n- [ ] open\n- [x] done",
    "| a | b | c |\n|---|:-:|--:|\n| 1 | `x|y` | 3 |\n| only |\n\n| no | table |",
    "***\n---\n- - -\n**bold *both* bold** ~~gone~~ __x__ snake_case_word",
    '[link](https://a.example/x "title") <https://b.example> https://c.example/y?z=1 [mail](mailto:a@b.example)',
    "[ref] and [Other][two] and [none]\n\ntext\n\n[ref]: https://r.example\n[two]: <https://t.example> 'T'",
    "hard  \nbreak\\\nagain\n    not code\n\n\tcode\n\n  two spaces",
    "<div>\n<b>x</b>\n</div>\n\n<!-- note -->\n\n![pic](https://p.example/x.png) ![](https://p.example/y.png)",
    "Grüße 🦊 שלום\r\nlines\r\n\r\n- of\r\n- Windows\r\n\r\n```\r\nx\r\n```\r\n",
    "- 1\n\n- שלום\n- plain\n\n> ציטוט\n\n| שם | x |\n|--|--|\n| 1 | 2 |",
    "a\n\n$$\nx = 1\n- y\n$$\n\nb $a_1$ c \\(d\\) \\[e\\] $5 and $10\n\n$$ open\n\nnext",
    "### third first\n# then first\n#### fourth",
]

# What both sides of the comparison leave out: names and attributes of the page's own choice.
PLAIN = """
function plain(element) {
  const shown = element.cloneNode(true);
  for (const figure of shown.querySelectorAll("figure")) {
    const pre = document.createElement("pre"), code = document.createElement("code");
    code.textContent = figure.querySelector("code").textContent;
    pre.append(code);
    figure.replaceWith(pre);
  }
  for (const code of shown.querySelectorAll("pre > code")) code.textContent = code.textContent.replace(/\\n$/, "");
  for (const box of shown.querySelectorAll(".table")) box.replaceWith(...box.childNodes);
  for (const image of shown.querySelectorAll("img")) {
    const link = document.createElement("a");
    link.href = image.getAttribute("src");
    link.textContent = image.alt || image.getAttribute("src");
    image.replaceWith(link);
  }
  for (const heading of shown.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const some = document.createElement("h6");
    some.append(...heading.childNodes);
    heading.replaceWith(some);
  }
  for (const it of shown.querySelectorAll("*")) {
    const { style, className } = it;
    const align = it.matches("td, th") ? style.textAlign || className : "";
    const kept = { href: it.getAttribute("href"), start: it.getAttribute("start"), align };
    for (const name of it.getAttributeNames()) it.removeAttribute(name);
    for (const [name, value] of Object.entries(kept)) if (value) it.setAttribute(name, value);
  }
  const walker = document.createTreeWalker(shown, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) {
    const isCode = text.parentNode.closest("pre");
    if (!isCode) text.data = text.data.replace(/\\n/g, "").replace("☐", "[ ]").replace("☑", "[x]");
    if (!text.data) text.remove();
  }
  shown.normalize();
  return shown.innerHTML;
}
"""


@pytest.fixture(scope="module")
def blank(browser):
    """A page of our modules without the server, and without its policy, so that a test may read HTML."""
    types = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2"}

    def fulfill(route):
        name = route.request.url.removeprefix("http://page.test/")
        file = WEB_FOLDER / name
        if not name:
            route.fulfill(
                body="<!doctype html><title>blank</title><link rel=stylesheet href=/prose.css>",
                content_type="text/html",
            )
        else:
            route.fulfill(body=file.read_bytes(), content_type=types[file.suffix])

    context = browser.new_context()
    page = context.new_page()
    page.route("http://page.test/**", fulfill)
    page.goto("http://page.test/")
    page.add_script_tag(content=PLAIN)
    yield page
    context.close()


def test_the_same_as_the_parsers_own_html(blank):
    compare = """async texts => {
      const { MarkdownView } = await import("/markdown/view.js");
      const { default: MarkdownIt } = await import("/vendor/markdown-it/markdown-it.js");
      const oracle = new MarkdownIt({ html: false, linkify: true, breaks: true });
      oracle.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
      return texts.map(text => {
        const [ours, theirs] = [document.createElement("div"), document.createElement("div")];
        new MarkdownView(ours).update(text);
        theirs.innerHTML = oracle.render(text);
        return [plain(ours), plain(theirs)];
      });
    }"""
    for ours, theirs in blank.evaluate(compare, [text for text in TEXTS if "$" not in text]):
        assert ours == theirs


def test_in_pieces_as_at_once(blank):
    """Wherever the stream is cut, the final page is the same, and finished blocks are never drawn again."""
    compare = """async texts => {
      const { MarkdownView } = await import("/markdown/view.js");
      let seed = 1;
      const random = below => (seed = (seed * 48271) % 2147483647) % below;
      const wrong = [];
      for (let round = 0; round < 60; round += 1) {
        const some = Array.from({ length: 4 }, () => texts[random(texts.length)]);
        const text = texts[round] ?? some.join("\\n\\n");
        const [whole, grown] = [document.createElement("div"), document.createElement("div")];
        new MarkdownView(whole).update(text);
        const view = new MarkdownView(grown);
        const step = 1 + random(12);
        for (let end = 0; end < text.length; end += step) view.update(text.slice(0, end), { isGrowing: true });
        view.update(text);
        if (grown.innerHTML !== whole.innerHTML) wrong.push([text, grown.innerHTML, whole.innerHTML]);
      }
      return wrong;
    }"""
    assert blank.evaluate(compare, TEXTS) == []


def test_finished_blocks_are_not_drawn_again(blank):
    text = "first\n\n| a |\n|---|\n| 1 |\n\n```py\nx = 1\n```\n\n- one\n- two\n\nlast words"
    redrawn = """async text => {
      const { MarkdownView } = await import("/markdown/view.js");
      const element = document.createElement("div");
      const view = new MarkdownView(element);
      const seen = new Set();
      const changed = new Set();
      const observer = new MutationObserver(records => records.forEach(it => changed.add(it.target)));
      observer.observe(element, { subtree: true, childList: true, characterData: true });
      const late = [];
      for (let end = 1; end <= text.length; end += 1) {
        view.update(text.slice(0, end), { isGrowing: true });
        await null;
        for (const node of changed) if ([...seen].some(block => block.contains(node))) late.push(text.slice(0, end));
        changed.clear();
        for (const block of [...element.children].slice(0, -1)) seen.add(block);
      }
      return [late, seen.size];
    }"""
    assert blank.evaluate(redrawn, text) == [[], 4]


def test_nothing_flickers_while_a_line_is_undecided(blank):
    shown = """async text => {
      const { MarkdownView } = await import("/markdown/view.js");
      const element = document.createElement("div");
      const view = new MarkdownView(element);
      const tags = new Set();
      for (let end = 1; end <= text.length; end += 1) {
        view.update(text.slice(0, end), { isGrowing: true });
        for (const it of element.querySelectorAll("*")) tags.add(it.localName);
      }
      return [...tags].sort();
    }"""
    assert blank.evaluate(shown, "Fruit:\n- apples\n- pears\n\n**Bold**\n1. one") == ["li", "ol", "p", "strong", "ul"]
    assert blank.evaluate(shown, "***\nwords\n*") == ["hr", "p"]


HOSTILE = [
    "<script>window.taken = 1</script>",
    "<img src=x onerror='window.taken = 1'>",
    "[x](javascript:window.taken=1) [y](JaVaScRiPt&colon;window.taken=1) [z](<java\nscript:window.taken=1>)",
    "[d](data:text/html,<script>window.taken=1</script>) ![i](javascript:window.taken=1)",
    "<javascript:window.taken=1> [v](vbscript:x) [f](file:///etc/passwd) [r](/v1/models) [s](//evil.example)",
    '[t](https://a.example "onmouseover=window.taken=1") [q](https://a.example/"onclick="window.taken=1)',
    "```<img src=x onerror=window.taken=1>\n<script>window.taken=1</script>\n```",
    "$\\href{javascript:window.taken=1}{x}$ $\\htmlStyle{position:fixed}{x}$ $\\includegraphics{http://evil.example/x}$",
    "| <b onclick=window.taken=1>x</b> |\n|---|\n| <iframe src=javascript:window.taken=1> |",
    "# <svg onload=window.taken=1>\n- <style>body{display:none}</style>\n\n&lt;script&gt;window.taken=1&lt;/script&gt;",
]


def test_hostile_answers_are_text(blank):
    found = """async texts => {
      const { MarkdownView } = await import("/markdown/view.js");
      const element = document.createElement("div");
      document.body.append(element);
      new MarkdownView(element).update("$x$\\n\\n" + texts.join("\\n\\n"));
      while (!element.querySelector(".katex")) await new Promise(resolve => setTimeout(resolve, 20));
      const over = new MouseEvent("mouseover");
      for (const link of element.querySelectorAll("a")) link.dispatchEvent(over);
      const all = [...element.querySelectorAll("*")].filter(it => !it.closest(".katex"));
      const result = {
        taken: window.taken ?? null,
        tags: [...new Set(all.map(it => it.localName))],
        attributes: [...new Set(all.flatMap(it => it.getAttributeNames()))],
        links: [...element.querySelectorAll("a, [href]")].map(it => it.getAttribute("href")),
        rels: [...new Set([...element.querySelectorAll("a")].map(it => `${it.rel} ${it.target}`))],
      };
      element.remove();
      return result;
    }"""
    result = blank.evaluate(found, HOSTILE)
    assert result["taken"] is None
    assert set(result["tags"]) <= {
        *("p", "a", "br", "span", "div", "figure", "figcaption", "button", "pre", "code"),
        *("table", "thead", "tbody", "tr", "th", "td", "h3", "ul", "li"),
    }
    assert not [
        name for name in result["attributes"] if name.startswith("on") or name in ("src", "style", "id", "name")
    ]
    assert all(link.startswith("https://a.example") for link in result["links"])
    assert result["rels"] == ["noopener noreferrer nofollow _blank"]


FORMULAS = {
    "$a_1$": ["a_1"],
    "cost $5 and $10, US$7 or 5$": [],
    "$5-$10": [],
    "\\(x\\) and \\[y\\]": ["x", "y"],
    "$$x$$ in a line": ["x"],
    "$$\nx = 1\n- y\n$$": ["x = 1\n- y"],
    "\\[\n\\frac{1}{2}\n\\]": ["\\frac{1}{2}"],
    "$$ open\n\nnext $$": [],
    "`$x$`\n\n```\n$y$\n```": [],
    "a \\$x\\$ b": [],
    "- item\n\n  $$z$$\n\n> $q$": ["z", "q"],
    "| $a$ | $5 |\n|---|---|\n| $b$ | $6 |": ["a", "b"],
    "$ x$ $x $ $$ \\(\\)": [],
}


def test_which_texts_are_formulas(blank):
    find = """async texts => {
      const { MarkdownView } = await import("/markdown/view.js");
      return texts.map(text => {
        const element = document.createElement("div");
        new MarkdownView(element).update(text);
        return [...element.querySelectorAll(".math")].map(it => it.dataset.tex);
      });
    }"""
    assert dict(zip(FORMULAS, blank.evaluate(find, list(FORMULAS)), strict=True)) == FORMULAS


def test_code_is_coloured_line_by_line_and_stays_as_it_is(blank):
    code = 'def f(x):  # "no"\n    """Two\n    lines."""\n    return f"{x}<b>"\n'
    colour = """async code => {
      const { CodeBlock } = await import("/code/code_block.js");
      const block = new CodeBlock({ code: code.slice(0, 20), language: "python" });
      for (let end = 21; end <= code.length; end += 7) block.update({ code: code.slice(0, end) });
      block.update({ code });
      const until = async test => { while (!test()) await new Promise(resolve => setTimeout(resolve, 20)); };
      await until(() => block.plain.data === "");
      const kinds = [...block.content.querySelectorAll("[class]")].map(it => [it.className, it.textContent]);
      const unknown = new CodeBlock({ code: "<x>", language: "nothing" });
      document.body.append(block.element);
      getSelection().selectAllChildren(block.content);
      const selected = getSelection().toString();
      block.element.remove();
      return [block.content.textContent, block.content.children.length, kinds, unknown.content.textContent, selected];
    }"""
    text, num_lines, kinds, unknown, selected = blank.evaluate(colour, code)
    assert text == code
    assert selected.rstrip("\n") == code.rstrip("\n")
    assert num_lines == 4  # next to the part without colour yet
    assert ["code-keyword", "def"] in kinds
    assert ["code-comment", '# "no"'] in kinds
    assert unknown == "<x>"
    assert [text for kind, text in kinds if kind == "code-string"][0:2] == ['"""Two\n', '    lines."""']
