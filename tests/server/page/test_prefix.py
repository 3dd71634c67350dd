"""The page behind a real proxy that shows the server below a prefix, over TLS."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server.live_server import serve_in_thread
from tests.server.page.parts import answer, send
from tests.server.proxies import NGINX, behind

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="needs nginx"),
]


def test_the_page_works_below_a_prefix(make_app, open_page, say, go_on, tmp_path):
    say("Paris is the capital of **France**.\n\n```python\nprint(1)\n```\n$x^2$", until="Paris is")
    app = make_app(root_path="/llm", forwarded_allow_ips="127.0.0.1")
    with serve_in_thread(app) as url, behind("nginx", int(url.rpartition(":")[2]), tmp_path) as outside:
        page = open_page(f"{outside}/", ignore_https_errors=True)
        send(page, "What is the capital of France?")
        expect(answer(page)).to_have_text("Paris is")  # at once, though the answer is not complete
        go_on()
        expect(answer(page).locator("strong")).to_have_text("France")
        expect(answer(page).locator(".katex").first).to_be_visible()  # files of third parties load, too
        page.reload()
        expect(answer(page)).to_contain_text("Paris is the capital of France.")
        page.close()
