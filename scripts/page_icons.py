"""Draws the icons of the installed page from `web/favicon.svg`, with a browser.

    python scripts/page_icons.py

A maskable icon fills its square, and the picture stays in the middle: systems cut it to their own shape.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parent.parent))

from studies.browser import MISSING, find_browser, launch

WEB = Path(__file__).parent.parent / "moeflow" / "server" / "web"
ICONS = (("icon-192.png", 192, False), ("icon-512.png", 512, False), ("maskable-512.png", 512, True))
GROUND = "#0b6b63"  # of favicon.svg
SAFE_SHARE = 0.7  # of a maskable icon's side that the picture takes


def main() -> None:
    """Write the files."""
    path = find_browser()
    if path is None:
        sys.exit(MISSING)
    source = base64.b64encode((WEB / "favicon.svg").read_bytes()).decode()
    with sync_playwright() as playwright:
        browser = launch(playwright, path)
        page = browser.new_page()
        for name, side, is_maskable in ICONS:
            page.set_viewport_size({"width": side, "height": side})
            width = round(side * SAFE_SHARE) if is_maskable else side
            ground = GROUND if is_maskable else "transparent"
            page.set_content(
                f'<body style="margin: 0; display: grid; place-items: center; height: 100vh; background: {ground}">'
                f'<img width="{width}" height="{width}" src="data:image/svg+xml;base64,{source}">'
            )
            page.locator("img").evaluate("it => it.decode()")
            page.screenshot(path=WEB / "icons" / name, omit_background=True)
        browser.close()


if __name__ == "__main__":
    main()
