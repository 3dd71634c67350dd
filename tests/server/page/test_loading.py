"""How much a browser fetches before the page is usable: on the first visit, and on the next."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]

FIRST_VISIT_BYTES = 160_000  # compressed, with all headers


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
    assert "stats" in again
    assert [name for name in again if name.startswith("assets/")] == []
