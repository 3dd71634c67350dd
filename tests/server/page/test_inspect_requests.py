"""The view of requests: the list of the last ones, and the story of each, with a real engine's numbers."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from moeflow import LLM
from moeflow.core.observation import RequestSight
from moeflow.engine.generator import Generator
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.server.page.parts import button, send_and_wait, turns
from tests.server.stories.real_client import RealClient
from tests.tiny_mixtral import write_tiny_mixtral
from tests.token_trees import draft_always

SETTINGS = {"temperature": 0, "max_tokens": 40, "seed": 1}
pytestmark = [pytest.mark.browser, pytest.mark.slow]


def view(page):
    return page.get_by_role("tabpanel", name="Requests")


def rows(page):
    return view(page).locator(".request-table tbody tr")


def section(page, title):
    return view(page).locator("section").filter(has=page.get_by_role("heading", name=title, exact=True))


def violations(page):
    found = Axe().run(page).response["violations"]
    return {rule["id"]: [node["html"][:200] for node in rule["nodes"]] for rule in found}


def complete(url, request_id, **body):
    headers = {"x-request-id": request_id}
    return httpx.post(f"{url}/v1/completions", json={"prompt": "Hi", **body}, headers=headers).json()


def why(page):
    turns(page).last.get_by_role("button", name="Why this speed?").click()
    expect(section(page, "What took longest").get_by_role("listitem").first).to_be_visible()


def test_requests_of_all_programs_are_listed_and_open_by_keys(app, serve, open_page, engine):
    url = serve(app)
    complete(url, "first", max_tokens=3)
    engine.fail_after = 2
    complete(url, "second")
    engine.fail_after = None
    page = open_page(url)
    page.goto(f"{url}/?inspect=requests")
    expect(rows(page)).to_have_count(2)
    expect(rows(page).first).to_contain_text("second")
    expect(rows(page).first).to_contain_text("failed")
    expect(rows(page).last).to_contain_text("2 in, 3 out")
    complete(url, "third")
    expect(rows(page).first).to_contain_text("third")  # by itself
    search = view(page).get_by_role("searchbox")
    search.fill("FIRST")
    expect(rows(page)).to_have_count(1)
    search.fill("")
    view(page).get_by_label("State of the requests").select_option("failed")
    expect(rows(page)).to_have_count(1)
    view(page).get_by_label("State of the requests").select_option("")
    rows(page).first.get_by_role("button").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(view(page).get_by_role("heading", name="Completion: failed")).to_be_focused()
    expect(section(page, "Numbers")).to_contain_text("out of memory")
    button(page, "All requests").click()
    expect(view(page).get_by_role("button", name="Story of request second")).to_be_focused()


def test_a_running_request_is_followed_to_its_end(app, serve, open_page, engine):
    page = open_page(serve(app))
    engine.pause_after = 3
    page.get_by_label("Your message").fill("Hello?")
    page.keyboard.press("Enter")
    button(page, "Inspect").click()
    page.get_by_role("tab", name="Requests").click()
    expect(rows(page)).to_contain_text(["running"])
    rows(page).get_by_role("button").click()
    expect(view(page).get_by_role("heading", name="Chat: running")).to_be_visible()
    expect(section(page, "Numbers")).to_contain_text("3 tokens")
    engine.pause_after = None
    expect(view(page).get_by_role("heading", name="Chat: done")).to_be_visible()


def test_a_story_says_what_is_missing(app, serve, open_page, engine):
    engine.sights = {0: RequestSight(layers=[], num_experts=0, sequences=[])}
    page = open_page(serve(app))
    send_and_wait(page, "Hello?")
    page.reload()
    why(page)
    expect(view(page)).to_contain_text("not observed")
    button(page, "What limits the speed now").click()
    expect(page.get_by_role("tabpanel", name="Speed & memory")).to_contain_text("Nothing")
    why(page)
    button(page, "All requests").click()
    app.state.service.stories._finished.clear()
    refused = []
    page.on("response", lambda it: refused.append(it.url) if it.status == 404 else None)
    turns(page).last.get_by_role("button", name="Why this speed?").click()
    expect(view(page)).to_contain_text("The server does not know this request any more")
    page.wait_for_timeout(2200)  # two rounds of the view
    assert len(refused) == 1


@pytest.fixture(scope="module")
def real_llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_hidden_layers=3)
    with LLM(str(folder), num_threads=1, speculators=("suffix",)) as llm:
        draft_always(llm._engine._speculation)
        yield llm


@pytest.mark.parametrize(
    "options",
    [
        {"color_scheme": "light", "viewport": {"width": 1440, "height": 900}},
        {"color_scheme": "dark", "viewport": {"width": 1440, "height": 900}},
        {"color_scheme": "light", "viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True},
    ],
    ids=["light", "dark", "phone"],
)
def test_the_numbers_of_a_story_are_those_of_its_answer(serve, open_page, real_llm, options):
    app = create_app(Generator(RealClient(real_llm), real_llm.tokenizer), ServerConfig())
    url = serve(app)
    page = open_page(url, reduced_motion="reduce", **options)
    page.evaluate("settings => localStorage.setItem('moeflow.settings', settings)", json.dumps(SETTINGS))
    page.reload()
    complete(url, "watched", max_tokens=1)
    httpx.get(f"{url}/stats/requests/watched").raise_for_status()  # to ask is to watch
    send_and_wait(page, "abcabcabcabcabc")
    why(page)
    story = httpx.get(f"{url}/stats/requests").json()["requests"][0]
    phases = section(page, "Where the time went")
    shares = phases.locator("tbody td:last-child").all_inner_texts()
    assert sum(int(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=3)
    section(page, "Passes").get_by_text("Passes as a table").click()
    expect(section(page, "Passes").locator("tbody tr").first).to_be_visible()
    cells = (
        section(page, "Passes")
        .locator("tbody tr")
        .evaluate_all("rows => rows.map((row) => [...row.cells].map((cell) => cell.textContent))")
    )
    accepted = sum(int(row[6].split(" / ")[0]) for row in cells if "/" in row[6])
    computed = sum(int(row[5]) for row in cells) + accepted
    assert computed == story["prompt_tokens"] - story["cached_tokens"] + story["completion_tokens"] - 1
    assert accepted == story["accepted_tokens"]
    drafted = sum(int(row[6].split(" / ")[1]) for row in cells if "/" in row[6])
    assert drafted == story["drafted_tokens"] > 0
    expect(section(page, "Experts")).to_contain_text(re.compile(r"It touched \d+ of 12 experts of 3 layers"))
    expect(section(page, "Drafts").locator(".drafts-line")).to_contain_text(f"{accepted} of {drafted} drafts right")
    chart = section(page, "Passes").get_by_role("img")
    expect(chart).to_have_attribute("aria-label", re.compile(f"^{len(cells)} passes took"))
    chart.focus()
    page.keyboard.press("Home")
    expect(page.locator(".tooltip").filter(visible=True)).to_contain_text("Pass 1: prompt")
    section(page, "Drafts").locator("summary").click()
    expect(section(page, "Drafts").locator(".passes li").first).to_be_visible()
    assert violations(page) == {}
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    expect(page.get_by_role("tab", name="Requests")).to_be_in_viewport(ratio=0.9)
    body = page.locator(".inspect-body")
    assert body.evaluate("it => it.scrollWidth <= it.clientWidth")
    button(page, "All requests").click()
    expect(rows(page)).to_have_count(2)
    assert violations(page) == {}
    assert body.evaluate("it => it.scrollWidth <= it.clientWidth")
    rows(page).first.get_by_role("button").click()
    button(page, "Show in Experts").click()
    expect(page.get_by_role("tabpanel", name="Experts")).to_contain_text("<|assistant|>")
