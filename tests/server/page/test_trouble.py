"""What the page says and does when the server is busy, loading, locked, broken or gone."""

from __future__ import annotations

import asyncio
import re
import threading

import httpx
import pytest
from playwright.sync_api import expect

from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.server.http_server import HttpServer
from moeflow.server.listener import listen, url
from tests.server.fake_client import FakeClient
from tests.server.live_server import eventually
from tests.server.page.parts import answer, button, measured, retry_button, send, send_and_wait

pytestmark = [pytest.mark.browser, pytest.mark.slow]


class TestBusy:
    @pytest.fixture
    def engine(self, tokenizer):
        return FakeClient(tokenizer, max_num_seqs=1, max_model_len=4096)

    def test_a_full_queue_says_when_to_come_back(self, make_app, serve, open_page, say, engine):
        say("Welcome.", until="Wel")
        address = serve(make_app(max_queue=0))
        body = {"messages": [{"role": "user", "content": "I came first"}], "stream": True}
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body):
            page = open_page(address)
            send_and_wait(page, "Me too!")
            expect(page.get_by_role("alert")).to_contain_text(re.compile(r"The server is busy; try again in \d+ s\."))
            expect(page.get_by_role("alert")).to_contain_text("Queue full (1/1)")
        assert eventually(lambda: not engine.live)
        engine.pause_after = None
        retry_button(page).click()
        expect(answer(page)).to_have_text("Welcome.")
        expect(page.get_by_role("alert")).to_have_count(0)


def test_a_failure_in_the_middle_keeps_what_came(page, say, engine):
    say("Half an answer")
    engine.fail_after = len("Half an ")
    send_and_wait(page, "Whole?")
    expect(answer(page)).to_have_text("Half an")
    expect(page.get_by_role("alert")).to_have_text("out of memory")


def test_a_failure_before_the_first_word(page):
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=502, body="<h1>Bad gateway</h1>"))
    send_and_wait(page, "Anybody?")
    expect(page.get_by_role("alert")).to_have_text("The server answered with status 502.")


def test_a_request_that_the_server_refuses(page, engine):
    send_and_wait(page, "x" * 5000)
    expect(page.get_by_role("alert")).to_contain_text("This model's maximum context length is 4096 tokens")
    expect(page.get_by_role("alert")).to_contain_text("A shorter message or fewer files may fit.")
    assert engine.submissions == []


def test_a_dead_engine(page, engine):
    expect(page.get_by_role("heading", name="fake-model")).to_be_visible()
    engine.die()
    send_and_wait(page, "Alive?")
    expect(page.get_by_role("alert")).to_contain_text("The engine has died")


@pytest.fixture
def crashing_server(app):
    """A server, and a function that aborts all its connections at once."""
    listener = listen(ServerConfig(port=0))
    server = HttpServer(app)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()

    def crash():
        server.force_exit = server.should_exit = True
        thread.join()

    yield url(listener), crash
    crash()


def test_a_lost_connection(crashing_server, open_page, say):
    say("Half an answer", until="Half an")
    address, crash = crashing_server
    page = open_page(address)
    send(page, "Whole?")
    expect(answer(page)).to_have_text("Half an")
    crash()
    expect(page.get_by_role("alert")).to_contain_text("The connection to the server was lost")
    expect(answer(page)).to_have_text("Half an")
    expect(page.get_by_text("No connection to the server. Trying again…")).to_be_visible()
    retry_button(page).click()
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")


class TestLoading:
    @pytest.fixture
    def app(self):
        return create_app(None, ServerConfig())

    def test_a_prompt_waits_for_the_model(self, app, page, say, engine, tokenizer):
        say("Good morning.")
        expect(page.get_by_text("The server is loading the model.")).to_be_visible()
        send(page, "Hello?")
        expect(page.get_by_text("Waiting for the model to load…")).to_be_visible()
        app.state.service.attach(Generator(engine, tokenizer))
        expect(answer(page)).to_have_text("Good morning.")
        expect(page.get_by_text("The server is loading the model.")).to_be_hidden()

    def test_waiting_can_be_stopped(self, page):
        send(page, "Hello?")
        expect(page.get_by_text("Waiting for the model to load…")).to_be_visible()
        button(page, "Stop").click()
        expect(measured(page)).to_have_text("Stopped")


def test_no_key_is_asked_for_where_none_is_needed(page):
    expect(page.get_by_role("heading", name="fake-model")).to_be_visible()
    expect(page.get_by_label("API key")).to_be_hidden()


def test_an_api_key(make_app, serve, open_page, say, engine):
    say("Welcome.")
    page = open_page(serve(make_app(api_key="sesame")))
    expect(page.get_by_label("API key")).to_be_focused()
    send_and_wait(page, "Let me in.")
    expect(page.get_by_role("alert")).to_contain_text("The server asks for an API key")
    page.get_by_label("API key").fill("wrong")
    button(page, "Use key").click()
    expect(page.get_by_text("The server did not accept this API key.")).to_be_visible()
    assert engine.submissions == []

    page.get_by_label("API key").fill("sesame")
    button(page, "Use key").click()
    expect(answer(page)).to_have_text("Welcome.")  # the refused prompt went out by itself
    expect(page.get_by_label("API key")).to_be_hidden()
    assert page.evaluate("Object.values(localStorage).join().includes('sesame')") is False


def test_a_browser_that_stores_nothing(make_app, serve, open_page, say):
    say("Welcome.")
    page = open_page(serve(make_app(api_key="sesame")))
    deny = "Object.defineProperty(window, NAME, { get() { throw new DOMException('denied', 'SecurityError'); } });"
    stores = ("localStorage", "sessionStorage", "indexedDB")
    page.add_init_script("".join(deny.replace("NAME", f"'{store}'") for store in stores))
    page.reload()
    page.get_by_label("API key").fill("sesame")
    button(page, "Use key").click()
    send_and_wait(page, "Let me in.")
    expect(answer(page)).to_have_text("Welcome.")
    button(page, "New conversation").click()
    page.get_by_role("link", name="Let me in.").click()
    expect(answer(page)).to_have_text("Welcome.")  # as long as the page is there
