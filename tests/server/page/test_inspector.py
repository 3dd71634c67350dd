"""The frame of the inspector: how it opens and closes."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import button, turns

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
WIDE = {"viewport": {"width": 1280, "height": 800}}


def inspector(page):
    return page.get_by_role("dialog", name="Inspect")


def test_back_closes_it_on_a_phone(app, serve, open_page):
    page = open_page(serve(app), **PHONE)
    entries = page.evaluate("history.length")
    button(page, "Inspect").click()
    inspector(page).get_by_role("tab", name="Log").click()
    expect(page).to_have_url(re.compile("inspect=log"))
    page.go_back()
    expect(inspector(page)).to_be_hidden()
    expect(page).not_to_have_url(re.compile("inspect="))
    page.go_forward()
    expect(inspector(page).get_by_role("tab", name="Log")).to_have_attribute("aria-selected", "true")
    inspector(page).get_by_role("button", name="Close").click()
    expect(page).not_to_have_url(re.compile("inspect="))
    assert page.evaluate("history.length") == entries + 1  # closing adds none
    expect(turns(page)).to_have_count(0)


@pytest.mark.parametrize("options", [PHONE, WIDE], ids=["phone", "wide"])
def test_every_tab_and_the_name_of_the_model_are_in_sight(app, serve, open_page, options):
    page = open_page(serve(app), **options)
    button(page, "Inspect").click()
    bar = inspector(page).get_by_role("tablist").bounding_box()
    for tab in inspector(page).get_by_role("tab").all():
        box = tab.bounding_box()
        assert box["x"] >= bar["x"]
        assert box["x"] + box["width"] <= bar["x"] + bar["width"]
        assert box["y"] + box["height"] <= bar["y"] + bar["height"]
    if options is not PHONE:  # there the inspector covers the name
        assert page.locator("#model-name").evaluate("it => it.scrollWidth <= it.clientWidth")


def test_figures_open_their_view_and_escape_closes_it(app, serve, open_page):
    page = open_page(serve(app), **WIDE)
    button(page, "Queue 0").click()
    expect(inspector(page).get_by_role("tab", name="Requests")).to_have_attribute("aria-selected", "true")
    page.get_by_role("button", name="KV cache").click()
    speed = inspector(page).get_by_role("tab", name="Speed & memory")
    expect(speed).to_have_attribute("aria-selected", "true")
    speed.focus()
    page.keyboard.press("Escape")
    expect(inspector(page)).to_be_hidden()
