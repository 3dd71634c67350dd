"""The frame of the inspector: how it opens and closes."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import button, turns

pytestmark = [pytest.mark.browser, pytest.mark.slow]

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


def inspector(page):
    return page.get_by_role("dialog", name="Inspector")


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
