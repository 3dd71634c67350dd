"""The view of the time line: real passes drawn, moved by keys, summed up, and saved for Perfetto."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from moeflow import LLM
from moeflow.core.observation import TimelineSight
from moeflow.engine.generator import Generator
from moeflow.pipeline.runtime.recording import recording_of
from moeflow.pipeline.runtime.trace import Label, Trace
from moeflow.server.app import create_app
from moeflow.server.config import ServerConfig
from tests.server.page.parts import button, send_and_wait
from tests.server.stories.real_client import RealClient
from tests.tiny_mixtral import write_tiny_mixtral

pytestmark = [pytest.mark.browser, pytest.mark.slow]
LAYERS = 3
MANY = 20_000


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, num_hidden_layers=LAYERS)
    with LLM(str(folder), num_threads=1) as llm:
        yield llm


@pytest.fixture
def timeline_page(llm, serve, open_page):
    """A page with the time line before a real engine, which has just answered."""

    def timeline_page(**options):
        page = open_page(serve(create_app(Generator(RealClient(llm), llm.tokenizer), ServerConfig())), **options)
        button(page, "Inspect").click()
        page.get_by_role("tab", name="Time line").click()
        expect(view(page)).to_contain_text("Recording has begun")
        expect(view(page).get_by_role("heading", name="Sums")).to_be_hidden()
        button(page, "Close").last.click()
        send_and_wait(page, "Why me?")
        button(page, "Inspect").click()
        expect(view(page)).to_contain_text("New passes appear as they end.")
        return page

    yield timeline_page
    llm._engine._end_observing()


def view(page):
    return page.get_by_role("tabpanel", name="Time line")


def canvas(page):
    return view(page).get_by_role("application", name="Time line of the last passes")


def tooltip(page):
    return page.locator(".tooltip:visible")


def rows(page, name):
    """The texts of a table's rows."""
    found = view(page).get_by_role("region", name=name).locator("tbody tr").all()
    return [row.locator("th, td").all_inner_texts() for row in found]


def test_real_passes_are_drawn_summed_listed_and_saved(timeline_page):
    page = timeline_page()
    view(page).get_by_role("combobox", name="Last passes").select_option("4")
    expect(view(page)).to_contain_text("Passes shown: 4.")
    sums = rows(page, "Sums of the lanes")
    assert [row[0] for row in sums] == ["passes", "attention", "router", "experts", "sampling"]
    shares = [float(row[-1].removesuffix("%")) for row in sums]
    assert 0 < sum(shares[1:]) < 101, "lanes of one thread take no more than its time"
    canvas(page).focus()
    page.keyboard.press("ArrowRight")
    expect(view(page)).to_contain_text("Paused: the picture stays as it is.")
    view(page).get_by_text("Spans as a table").click()
    spans = 4 * (1 + 3 * LAYERS + 2)
    expect(view(page).get_by_role("region", name="Spans in sight").locator("tbody tr")).to_have_count(spans)
    listed = rows(page, "Spans in sight")
    assert 0 < int(canvas(page).get_attribute("data-drawn")) <= spans, "some share a pixel"
    with page.expect_download() as download:
        button(page, "Export for Perfetto").click()
    saved = json.loads(Path(download.value.path()).read_text())
    slices = [event for event in saved["traceEvents"] if event["ph"] == "X"]
    assert sorted(event["name"] for event in slices) == sorted(row[1] for row in listed)
    assert download.value.suggested_filename.startswith("moeflow-timeline-")
    assert Axe().run(page).response["violations"] == []


def test_keys_go_from_span_to_span_and_zoom(timeline_page):
    page = timeline_page()
    canvas(page).focus()
    for key, text in (
        ("Home", "pass of"),
        ("ArrowDown", "attention 0"),
        ("ArrowDown", "output projection and router 0"),
        ("ArrowDown", "experts 0"),
        ("ArrowRight", "experts 1"),
        ("ArrowLeft", "experts 0"),
        ("End", "experts 2"),
    ):
        page.keyboard.press(key)
        expect(tooltip(page)).to_contain_text(text)
        expect(page.locator("#announcer")).to_contain_text(text)
    expect(tooltip(page)).to_contain_text("FLOP/s")
    drawn = int(canvas(page).get_attribute("data-drawn"))
    page.keyboard.press("Enter")
    expect(tooltip(page)).to_contain_text("experts 2")
    view(page).get_by_text("Spans as a table").click()
    expect(view(page).get_by_role("region", name="Spans in sight").locator("tbody tr").first).to_be_visible()
    in_sight = len(rows(page, "Spans in sight"))
    assert 2 <= in_sight < drawn
    expect(canvas(page)).to_have_attribute("data-drawn", str(in_sight))
    canvas(page).focus()
    page.keyboard.press("0")
    expect(canvas(page)).to_have_attribute("data-drawn", str(drawn))
    page.keyboard.press("Escape")
    expect(tooltip(page)).to_have_count(0)
    expect(view(page)).to_be_visible()
    button(page, "Live").click()
    expect(view(page)).to_contain_text("New passes appear as they end.")


def many_spans():
    """A recording of two engines that read from disk: passes, waits, and reads of four threads."""
    chance, trace = random.Random(1), Trace()
    for number in range(64):
        trace.row("passes").record(
            Label("decode pass of 1 token, 1 request"), number * 1_000_000, number * 1_000_000 + 900_000
        )
    for number in range(MANY // 2):
        start_ns = number * 6_400
        trace.row("experts").record(
            Label("waits for experts", number % 32), start_ns, start_ns + 3_000, is_blocked=True
        )
        row = trace.row(f"disk {number % 4}", lane="disk")
        row.record(Label("read", number % 32, num_bytes=6 << 20), start_ns, start_ns + chance.randrange(1000, 20_000))
    return TimelineSight(msgspec.msgpack.encode(recording_of(trace, 0, 64, 0, None)))


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}], ids=["light", "dark"])
def test_many_spans_of_two_engines_stay_smooth(app, engine, serve, open_page, options):
    """Spans that share a pixel are drawn once, so a picture takes as long however many there are."""
    engine.sights = dict.fromkeys((0, 1), many_spans())
    page = open_page(serve(app), **options)
    button(page, "Inspect").click()
    page.get_by_role("tab", name="Time line").click()
    expect(view(page)).to_contain_text("Passes shown: 128. They waited")
    width = canvas(page).bounding_box()["width"]
    num_rows = 2 * (2 + 4)
    assert 100 < int(canvas(page).get_attribute("data-drawn")) <= num_rows * (width + 2)
    canvas(page).hover(position={"x": width / 2, "y": 95})
    expect(tooltip(page)).to_contain_text("waits for experts")
    expect(tooltip(page)).to_contain_text("It waits.")
    page.mouse.down()
    page.mouse.move(300, 300)
    page.mouse.up()
    expect(view(page)).to_contain_text("Paused")
    names = [row[0] for row in rows(page, "Sums of the lanes")]
    assert names == [f"engine {number}: {lane}" for number in (0, 1) for lane in ("passes", "experts", "disk")]


def test_it_fits_a_phone_and_fingers_zoom(timeline_page):
    page = timeline_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    small = [
        it.inner_text()
        for it in view(page).get_by_role("button").all()
        if min(it.bounding_box()["width"], it.bounding_box()["height"]) < 24
    ]
    assert small == []
    before = int(canvas(page).get_attribute("data-drawn"))
    box = canvas(page).bounding_box()
    session = page.context.new_cdp_session(page)
    for step, kind in enumerate(["touchStart", "touchMove", "touchMove", "touchMove"]):
        gap = 20 + 40 * step
        points = [{"x": box["x"] + 200 + side * gap / 2, "y": box["y"] + 60, "id": i} for i, side in enumerate((-1, 1))]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    expect(view(page)).to_contain_text("Paused")
    assert int(canvas(page).get_attribute("data-drawn")) != before
    assert Axe().run(page).response["violations"] == []
