"""Finds the browser for tests, benchmarks and scripts, and starts it without a window.

Knows names of programs only. Playwright's own builds are downloads, so they are not used.
"""

from __future__ import annotations

import shutil

from playwright.sync_api import Browser, Playwright

# The first takes half the processor time.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "Chromium is not installed (Debian: apt-get install chromium-headless-shell)"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_browser() -> str | None:
    """Return the path of the first browser on PATH; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def launch(playwright: Playwright, path: str) -> Browser:
    """Start the browser at this path."""
    return playwright.chromium.launch(executable_path=path, args=FLAGS)
