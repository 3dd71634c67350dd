"""The view of speed, with a real tiny model: the verdict, plan and measurement, memory, and advice."""

from __future__ import annotations

from contextlib import closing

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from moeflow.engine.generator import Generator
from moeflow.kernels.cpu import extension
from moeflow.planner.served.advice import Advice
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from moeflow.text.tokenizer import Tokenizer
from tests.server.page.parts import button
from tests.server.real_client import RealClient
from tests.server.speed.planned import planned

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not extension.is_available(), reason=extension.why_not()),
]
TIMES = "\N{MULTIPLICATION SIGN}"
COMMAND = "moeflow serve --quantize int8"
FOUND = [
    Advice(kind="option", change="weights in int8", option="--quantize int8", command=COMMAND, speedup_alone=1.5),
    Advice(kind="batch", change="8 requests at once", speedup_full=3.0, full_tokens_per_s=900.0),
    Advice(kind="machine", change="RAM that is read twice as fast", speedup_alone=1.9, speedup_full=1.2),
]
LOOKS = [
    {"color_scheme": "light"},
    {"color_scheme": "dark"},
    {"color_scheme": "light", "viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True},
]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return planned(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def url(plan, serve, monkeypatch):
    """The address of a server of the model; its advice is known from the start."""
    monkeypatch.setattr("moeflow.server.speed.advice_run.AdviceRun.ask", lambda self: None)
    monkeypatch.setattr("moeflow.server.speed.advice_run.AdviceRun.found", FOUND)
    monkeypatch.setattr("moeflow.server.speed.advice_run.AdviceRun.why_not", "")
    with closing(RealClient(plan.config)) as client:
        app = create_app(Generator(client, Tokenizer.load(plan.config.model_path)), ServerConfig())
        app.state.service.models.only.plan = plan
        yield serve(app)


@pytest.fixture
def inspected(url, open_page):
    """Open the page with the view of speed, after an answer to another client."""

    def inspected(**options):
        page = open_page(url, **options)
        button(page, "Inspect").click()
        page.get_by_role("tab", name="Speed").click()
        expect(view(page)).to_contain_text("Nothing has run in the last minute.")
        httpx.post(f"{url}/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True})
        expect(view(page)).not_to_contain_text("Nothing has run")
        return page

    return inspected


def view(page):
    return page.get_by_role("tabpanel", name="Speed")


def cells(page, figure):
    return view(page).get_by_role("row").filter(has_text=figure).get_by_role("cell")


def test_it_shows_what_the_server_has_measured(inspected, url):
    page = inspected()
    seen = httpx.get(f"{url}/stats/speed").json()
    rows = {row["figure"]: row for row in seen["predicted"]}
    expect(view(page)).to_contain_text("Decoding reads")
    expect(view(page)).to_contain_text("Memory gives 10 GB/s: the roof is")
    measured = rows["alone_tokens_per_s"]["measured"]
    shown = cells(page, "Tokens/s, one request")
    expect(shown.nth(1)).to_contain_text(f"{measured['num_passes']} passes")
    planned_speed = rows["alone_tokens_per_s"]["planned"]["value"]
    expect(shown.nth(0)).to_contain_text(f"{planned_speed:,.0f}")
    expect(cells(page, "Tokens/s, several requests").nth(1)).to_contain_text("for several requests at once")
    chart = view(page).get_by_role("img")
    assert "Memory gives 10 GB/s; float32 computes 100 GFLOP/s." in chart.get_attribute("aria-label")
    assert chart.evaluate("it => it.getContext('2d').getImageData(0, 0, it.width, it.height).data.some(Boolean)")
    view(page).get_by_text("Points of the chart in numbers").click()
    points = view(page).get_by_role("region", name="Points of the chart").get_by_role("row")
    expect(points.filter(has_text="decoding, measured")).to_have_count(1)
    expect(points.filter(has_text="plan, 8 requests")).to_have_count(1)


def test_memory_and_advice_are_found_at_a_glance(inspected, url):
    page = inspected()
    memory = httpx.get(f"{url}/stats/speed").json()["memory"]
    expect(view(page)).to_contain_text(f"{memory['kv_tokens_free']:,} tokens of context")
    expect(view(page).get_by_text("of memory is left")).to_be_visible()
    advice = view(page).get_by_role("listitem").filter(has_text="Start with --quantize int8")
    expect(advice).to_contain_text(f"{TIMES}1.50 for one request")
    expect(advice.get_by_role("button", name=f"Copy the command {COMMAND}")).to_be_visible()
    expect(view(page)).to_contain_text("8 requests at once 3 times as many tokens/s in all")
    gains = f"{TIMES}1.90 for one request, {TIMES}1.20 for many at once"
    expect(view(page)).to_contain_text(f"RAM that is read twice as fast {gains}")


@pytest.mark.parametrize("options", LOOKS, ids=["light", "dark", "phone"])
def test_axe_finds_nothing_and_no_look_is_too_wide(inspected, options):
    page = inspected(**options)
    found = Axe().run(page).response["violations"]
    assert {rule["id"]: [node["html"][:200] for node in rule["nodes"]] for rule in found} == {}
    body = page.locator(".inspect-body")
    assert body.evaluate("it => it.scrollWidth <= it.clientWidth")
