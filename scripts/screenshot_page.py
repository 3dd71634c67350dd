"""Takes the picture of the page that the documentation shows, from a server that runs.

    moeflow serve --port 8000 &
    python scripts/screenshot_page.py http://127.0.0.1:8000 docs/images/page.png

Asks two questions with greedy decoding, so that the same model gives the same picture. `--dark` and `--phone`
show what others see. `--drafts` opens what was drafted for the last answer, of a server with speculators:

    moeflow serve --port 8000 --speculator suffix --speculator dense-source &
    python scripts/screenshot_page.py http://127.0.0.1:8000 docs/images/drafts.png --drafts

`--inspect Experts` opens that view of the inspector before the first question:

    python scripts/screenshot_page.py http://127.0.0.1:8000 docs/images/experts.png --inspect Experts
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parent.parent))

from studies.browser import MISSING, find_browser, launch

QUESTIONS = ("What is the capital of France?", "Write a Python function that adds two numbers.")
DESKTOP = {"viewport": {"width": 1200, "height": 860}}
BESIDE_INSPECTOR = {"viewport": {"width": 1600, "height": 1450}}
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
SETTINGS = {"temperature": 0, "max_tokens": 160}
ANSWER_TIMEOUT_MS = 300_000
VIEW_PERIOD_MS = 2500  # views ask the server at least so often


def main() -> None:
    """Read the arguments and take the picture."""
    parser = argparse.ArgumentParser(description="Take a picture of the page after a short conversation.")
    parser.add_argument("url", help="address of a running server")
    parser.add_argument("out", help="PNG file to write")
    parser.add_argument("--dark", action="store_true", help="as on a machine set to dark")
    parser.add_argument("--phone", action="store_true", help="as on a small phone")
    parser.add_argument("--drafts", action="store_true", help="open the drafts of the last answer")
    parser.add_argument("--inspect", metavar="VIEW", help="open this view of the inspector")
    options = parser.parse_args()
    path = find_browser()
    if path is None:
        parser.error(MISSING)
    take(path, options)


def take(path: str, options: argparse.Namespace) -> None:
    """Have the conversation and write its picture."""
    settings = {**SETTINGS, "token_trees": options.drafts}
    with sync_playwright() as playwright:
        browser = launch(playwright, path)
        screen = PHONE if options.phone else BESIDE_INSPECTOR if options.inspect else DESKTOP
        context = browser.new_context(**screen, color_scheme="dark" if options.dark else "light")
        context.add_init_script(f"localStorage.setItem('moeflow.settings', {json.dumps(json.dumps(settings))})")
        page = context.new_page()
        page.goto(options.url)
        if options.inspect and not options.phone:  # there it would cover the questions
            open_view(page, options.inspect)
        for number, question in enumerate(QUESTIONS, start=1):
            page.get_by_label("Your message").fill(question)
            page.keyboard.press("Enter")
            answered = page.get_by_role("article").nth(number - 1).get_by_role("button", name="Try again", exact=True)
            answered.wait_for(timeout=ANSWER_TIMEOUT_MS)
        page.get_by_text("Running").locator("..").get_by_text("0", exact=True).wait_for()
        if options.drafts:
            page.locator(".drafts summary").last.click()
            page.locator(".drafts").last.evaluate("it => scrollBy(0, it.getBoundingClientRect().top - innerHeight / 4)")
        if options.inspect:
            open_view(page, options.inspect)
            page.wait_for_timeout(VIEW_PERIOD_MS)
        page.screenshot(path=options.out)
        browser.close()


def open_view(page: Page, title: str) -> None:
    """Show a view of the inspector."""
    if not page.get_by_role("tab", name=title).is_visible():
        page.get_by_role("button", name="Inspect", exact=True).click()
    page.get_by_role("tab", name=title).click()


if __name__ == "__main__":
    main()
