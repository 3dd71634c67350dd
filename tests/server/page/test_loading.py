"""How much a browser fetches before the page is usable: on the first visit, and on the next."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import send_and_wait

pytestmark = [pytest.mark.browser, pytest.mark.slow]

FIRST_VISIT_BYTES = 185_000  # compressed, with all headers


@pytest.fixture
def fetched(app, serve, browser):
    """Return a function that opens the page and returns how many bytes each address took from the network."""
    address = serve(app) + "/"
    context = browser.new_context()
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    urls, sizes = {}, {}

    def note(event):
        sizes[urls[event["requestId"]]] = event["encodedDataLength"]

    session.on("Network.requestWillBeSent", lambda event: urls.update({event["requestId"]: event["request"]["url"]}))
    session.on("Network.loadingFinished", note)

    def fetched():
        sizes.clear()
        page.goto(address)
        expect(page.get_by_role("heading", name="fake-model")).to_be_visible()
        return {url.removeprefix(address): size for url, size in sizes.items() if size}

    yield fetched
    context.close()


def test_the_first_visit_is_small_and_the_next_fetches_no_file_again(fetched):
    first = fetched()
    files = [name for name in first if name.startswith("assets/")]
    assert len(files) > 40
    assert sum(first.values()) < FIRST_VISIT_BYTES
    again = fetched()
    assert "stats?watch=true" in again
    assert [name for name in again if name.startswith("assets/")] == []


PREFIX = "/some/prefix"
ANSWER = "```python\nreturn 1\n```\n\n$x^2$"


class Proxied:
    """An application behind a proxy, which takes a prefix off every path and has nothing without it."""

    def __init__(self, app):
        self.app = app
        self.state = app.state

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            prefix, path = scope["path"][: len(PREFIX)], scope["path"][len(PREFIX) :]
            scope = {**scope, "path": path if prefix == PREFIX else "/nothing", "raw_path": path.encode()}
        await self.app(scope, receive, send)


def test_the_page_works_below_a_proxys_prefix(app, serve, browser, say):
    """All addresses of the page are relative: its files, what its worker and its styles load, and the API's."""
    address = serve(Proxied(app)) + PREFIX + "/"
    context = browser.new_context()
    page = context.new_page()
    requests: list[str] = []
    failures: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("response", lambda response: response.ok or failures.append(response.url))
    page.goto(address)
    say(ANSWER)
    send_and_wait(page, "Show me.")
    expect(page.locator(".code-keyword")).to_have_text("return")
    expect(page.locator(".katex").first).to_be_visible()
    page.reload()
    expect(page.locator(".code-keyword")).to_have_text("return")
    assert len(requests) > 50
    assert [url for url in requests if not url.startswith(address)] == []
    assert failures == []
    context.close()


SHIFTS = """() => new Promise((resolve) => {
  let sum = 0;
  new PerformanceObserver((list) => { for (const { value } of list.getEntries()) sum += value; })
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => resolve(sum), 300);
})"""


@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_moves_while_the_page_loads(app, serve, browser, width):
    """Panels that will open take their space from the first paint on. 0.1 is good, by Google's Web Vitals."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    page.goto(serve(app))
    expect(page.get_by_role("heading", name="fake-model")).to_be_visible()
    assert page.evaluate(SHIFTS) < 0.02
    context.close()
