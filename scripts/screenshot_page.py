"""Takes the picture of the page that the documentation shows, from a server that runs.

    moeflow serve --port 8000 &
    python scripts/screenshot_page.py http://127.0.0.1:8000 docs/images/page.png

Asks two questions with greedy decoding, so that the same model gives the same picture. `--dark` and `--phone`
show what others see.
"""

from __future__ import annotations

import argparse
import json
import shutil

from playwright.sync_api import sync_playwright

QUESTIONS = ("What is the capital of France?", "List the four seasons of the year.")
DESKTOP = {"viewport": {"width": 1200, "height": 860}}
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
SETTINGS = {"temperature": 0, "max_tokens": 160}
ANSWER_TIMEOUT_MS = 300_000


def main() -> None:
    """Read the arguments and take the picture."""
    parser = argparse.ArgumentParser(description="Take a picture of the page after a short conversation.")
    parser.add_argument("url", help="address of a running server")
    parser.add_argument("out", help="PNG file to write")
    parser.add_argument("--dark", action="store_true", help="as on a machine set to dark")
    parser.add_argument("--phone", action="store_true", help="as on a small phone")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        parser.error("Chromium is not installed (Debian: apt-get install chromium)")
    take(chromium, options.url, options.out, dark=options.dark, phone=options.phone)


def take(chromium: str, url: str, out: str, *, dark: bool, phone: bool) -> None:
    """Have the conversation and write its picture."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(**(PHONE if phone else DESKTOP), color_scheme="dark" if dark else "light")
        context.add_init_script(f"localStorage.setItem('moeflow.settings', {json.dumps(json.dumps(SETTINGS))})")
        page = context.new_page()
        page.goto(url)
        for number, question in enumerate(QUESTIONS, start=1):
            page.get_by_label("Your message").fill(question)
            page.keyboard.press("Enter")
            answered = page.get_by_role("article").nth(number - 1).get_by_role("button", name="Try again")
            answered.wait_for(timeout=ANSWER_TIMEOUT_MS)
        page.get_by_text("Running").locator("..").get_by_text("0", exact=True).wait_for()
        page.screenshot(path=out)
        browser.close()


if __name__ == "__main__":
    main()
