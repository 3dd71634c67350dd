"""A page of another origin in a real browser: what browsers send anywhere without asking must not do anything here."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading

import pytest
from playwright.sync_api import expect

from moeflow.server.jobs.data_folder import Jobs
from tests.server.live_server import eventually, serve_in_thread

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PAGE = """<!doctype html><title>elsewhere</title>
<form id=form method=post enctype=multipart/form-data action="SERVER/v1/files">
<input name=purpose value=batch><input type=file name=file></form>"""
POST_FORM = """async url => {
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", new Blob(["planted"]), "planted.jsonl");
  return (await fetch(url + "/v1/files", {method: "POST", body: form, mode: "no-cors"})).type;
}"""
POST_NOTHING = """async ([url, id]) =>
  (await fetch(`${url}/v1/batches/${id}/cancel`, {method: "POST", mode: "no-cors"})).type"""


@pytest.fixture
def data(app, tmp_path):
    """Give the application a data folder; its lock goes with the test."""
    jobs = app.state.jobs = Jobs(tmp_path / "data", app.state.service)
    yield jobs
    jobs._lock.close()


@pytest.fixture
def seen(app):
    """Collect method, path, status and what browsers say of the sender, of each request that reaches the server."""
    requests = []
    build = app.build_middleware_stack

    def with_notes():
        inner = build()

        async def note(scope, receive, send):
            async def send_and_note(message):
                if message["type"] == "http.response.start":
                    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
                    requests.append((scope["method"], scope["path"], message["status"], headers.get("sec-fetch-site")))
                await send(message)

            await inner(scope, receive, send_and_note)

        return note

    app.build_middleware_stack = with_notes
    return requests


@pytest.fixture
def elsewhere(serve, app, seen, tmp_path, data):
    """Serve a page on another port; yield its port and the server's address."""
    url = serve(app)
    with pages(tmp_path / "elsewhere", PAGE.replace("SERVER", url)) as port:
        yield port, url


@contextlib.contextmanager
def pages(folder, text):
    """Serve a page; yield the port."""
    folder.mkdir()
    (folder / "index.html").write_text(text)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def foreign_page(browser, elsewhere):
    """Open the page under a host name; it is another site than 127.0.0.1 if that is localhost."""
    port, _ = elsewhere
    contexts = []

    def open_page(host):
        contexts.append(browser.new_context())
        page = contexts[-1].new_page()
        page.goto(f"http://{host}:{port}/")
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize(("host", "site"), [("localhost", "cross-site"), ("127.0.0.1", "same-site")])
def test_a_script_elsewhere_can_neither_store_nor_cancel(foreign_page, elsewhere, data, seen, host, site):
    _, url = elsewhere
    page = foreign_page(host)
    batch = data.batches.create(
        endpoint="/v1/completions", model="m", input_file_id="file-x", metadata=None, output_lifetime_s=None
    )
    assert page.evaluate(POST_FORM, url) == "opaque"  # sent, without a preflight; only the answer cannot be read
    assert page.evaluate(POST_NOTHING, [url, batch.id]) == "opaque"
    assert seen == [("POST", "/v1/files", 403, site), ("POST", f"/v1/batches/{batch.id}/cancel", 403, site)]
    assert data.files.all() == []
    assert data.batches.find(batch.id).status == "validating"


def test_a_form_elsewhere_cannot_store(foreign_page, data, seen, tmp_path):
    planted = tmp_path / "planted.jsonl"
    planted.write_text("planted")
    page = foreign_page("localhost")
    page.locator("input[type=file]").set_input_files(planted)
    page.evaluate("document.getElementById('form').submit()")
    expect(page.locator("body")).to_contain_text("origin_not_allowed")
    assert ("POST", "/v1/files", 403, "cross-site") in seen
    assert data.files.all() == []


def test_a_json_request_elsewhere_does_not_get_past_the_preflight(foreign_page, elsewhere, seen, engine):
    _, url = elsewhere
    page = foreign_page("localhost")
    ask = """async url => { try {
      await fetch(url + "/v1/completions", {method: "POST", headers: {"Content-Type": "application/json"}, body: "{}"});
      return "sent"; } catch { return "blocked"; } }"""
    assert page.evaluate(ask, url) == "blocked"
    assert [(method, status) for method, _, status, _ in seen] == [("OPTIONS", 405)]
    assert engine.submissions == []


STREAM = """async url => {
  const body = JSON.stringify({prompt: "Hi", stream: true, max_tokens: 4});
  const headers = {"Content-Type": "application/json", "Authorization": "Bearer k", "X-Stainless-Lang": "js"};
  const response = await fetch(url + "/v1/completions", {method: "POST", headers, body});
  return [response.headers.get("x-request-id"), await response.text()];
}"""


def test_a_page_that_is_allowed_may_stream_and_others_may_not(browser, make_app, tmp_path):
    with contextlib.closing(browser.new_context()) as context, pages(tmp_path / "elsewhere", PAGE) as port:
        allowed, other = f"http://localhost:{port}", f"http://127.0.0.1:{port}"
        page = context.new_page()
        with serve_in_thread(make_app(cors_origins=(allowed,), api_key="k")) as url:
            page.goto(allowed)
            request_id, text = page.evaluate(STREAM, url)
            page.goto(other)
            assert page.evaluate(f"({STREAM})('{url}').catch(() => 'blocked')") == "blocked"
    assert request_id.startswith("req_")
    assert text.endswith("data: [DONE]\n\n")


def test_our_own_page_may(browser, elsewhere, data, seen):
    _, url = elsewhere
    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    page.evaluate(POST_FORM, url)
    assert eventually(lambda: [file.filename for file in data.files.all()] == ["planted.jsonl"])
    assert ("POST", "/v1/files", 200, "same-origin") in seen
    context.close()
