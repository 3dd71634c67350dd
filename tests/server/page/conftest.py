"""The real application on loopback, a real browser before it and a fake engine behind it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import expect, sync_playwright

from moeflow.server.config import ServerConfig
from moeflow.server.listener import listen
from studies.browser import MISSING, find_browser, launch
from tests.server.fake_client import FakeClient
from tests.server.live_server import serve_in_thread
from tests.tiny_mixtral import EOS

# Imports a module of the page by its name: the very one that the page runs, whatever its address.
PAGE_MODULE = """globalThis.pageModule = (name) =>
  import(new URL(name, document.querySelector("script[type=module]").src));"""
TIMEOUT_MS = 10_000  # generous: CI machines share two cores


@pytest.fixture(scope="package")
def browser():
    path = find_browser()
    if path is None:
        pytest.skip(MISSING)
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = launch(playwright, path)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def shared_context(browser):
    """A context that keeps one page open: the next needs no new processes, the main cost of a page."""
    context = browser.new_context()
    context.add_init_script(PAGE_MODULE)
    context.new_page()
    yield context
    context.close()


@pytest.fixture
def engine(tokenizer):
    return FakeClient(tokenizer, max_model_len=4096)


@pytest.fixture
def say(engine, tokenizer):
    """Give the engine its answer. With `until`, it pauses after that beginning of it; see `go_on`."""

    def say(text, *, until=None):
        assert until is None or text.startswith(until)
        engine.reply = [*tokenizer.encode(text, add_special_tokens=False), EOS]
        engine.pause_after = None if until is None else len(until.encode())  # a token is a byte

    return say


@pytest.fixture
def go_on(engine):
    """Let the engine finish."""

    def go_on():
        engine.pause_after = None

    return go_on


@pytest.fixture
def asked(engine, tokenizer):
    """Return the prompts that reached the engine."""
    return lambda: [tokenizer.decode(it.prompt_token_ids, skip_special_tokens=False) for it in engine.submissions]


@pytest.fixture(scope="package")
def listener():
    """A socket for the servers of all tests, one after the other. The browser knows this server, and has cached and
    compiled its files.
    """
    with listen(ServerConfig(port=0)) as listener:
        yield listener


@pytest.fixture
def serve(listener):
    """Serve an application until the end of the test; returns its address."""
    with contextlib.ExitStack() as stack:
        yield lambda app: stack.enter_context(serve_in_thread(app, listener=listener.dup()))


@dataclass
class Visit:
    """What a page did beside showing itself."""

    url: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextlib.contextmanager
def leaving_nothing(context, url):
    """Yield the context; afterwards close its pages but the first, and clear their storage for the server."""
    yield context
    first, *pages = context.pages
    for page in pages:
        page.close()
    context.clear_cookies()
    session = context.new_cdp_session(first)
    session.send("Storage.clearDataForOrigin", {"origin": url, "storageTypes": "all"})  # the next has its address
    session.detach()


@pytest.fixture
def open_page(browser, shared_context):
    """Open pages; at the end none may have complained, nor spoken with anybody but its server.

    One that is alone, or for which options are given, shares neither processes, clock nor storage with earlier ones.
    """
    visits = []
    with contextlib.ExitStack() as stack:

        def open_page(url, *, is_alone=False, **options):
            if is_alone or options:
                context = stack.enter_context(browser.new_context(**options))
                context.add_init_script(PAGE_MODULE)
            else:
                context = stack.enter_context(leaving_nothing(shared_context, url))
            context.set_default_timeout(TIMEOUT_MS)
            page = context.new_page()
            visit = Visit(url)
            visits.append(visit)
            page.on("console", lambda message: visit.complaints.append(message.text))
            page.on("pageerror", lambda error: visit.complaints.append(str(error)))
            page.on("request", lambda request: visit.requests.append(request.url))
            page.goto(url)
            page.locator("body:not([inert])").wait_for(state="attached")  # its modules have run
            return page

        yield open_page
    for visit in visits:
        # Chromium notes every HTTP error and broken connection by itself.
        assert [text for text in visit.complaints if not text.startswith("Failed to load resource")] == []
        assert [url for url in visit.requests if not url.startswith(visit.url.rstrip("/") + "/")] == []


@pytest.fixture
def page(app, serve, open_page):
    return open_page(serve(app))
