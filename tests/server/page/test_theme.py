"""The theme: the system's until the user chooses, and from then on that, before the page is drawn."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server.page.parts import button

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DARK, LIGHT = "rgb(17, 21, 20)", "rgb(250, 251, 251)"


def ground(page):
    return page.evaluate("getComputedStyle(document.documentElement).backgroundColor")


def choose(page, theme):
    button(page, "Settings").click()
    page.get_by_label("Theme").select_option(theme)
    button(page, "Done").click()


def test_the_theme_is_that_of_the_system_until_one_is_chosen(app, serve, open_page):
    page = open_page(serve(app), color_scheme="light")
    assert ground(page) == LIGHT
    page.emulate_media(color_scheme="dark")
    assert ground(page) == DARK
    choose(page, "Light")
    assert ground(page) == LIGHT
    choose(page, "System")
    assert ground(page) == DARK


def test_a_chosen_theme_stays_and_other_tabs_follow(app, serve, open_page):
    page = open_page(serve(app), color_scheme="light")
    tab = page.context.new_page()
    tab.goto(page.url)
    choose(page, "Dark")
    expect(tab.locator("html")).to_have_attribute("data-theme", "dark")
    assert ground(tab) == DARK
    page.route("**/app.js", lambda route: route.abort())  # the page as drawn before modules run
    page.reload()
    assert ground(page) == DARK
    page.unroute("**/app.js")
    page.reload()
    button(page, "Settings").click()
    expect(page.get_by_label("Theme")).to_have_value("dark")
    page.once("dialog", lambda dialog: dialog.accept())
    button(page, "Clear everything").click()
    expect(page.get_by_text("Everything is cleared.")).to_be_attached()
    assert ground(page) == LIGHT
