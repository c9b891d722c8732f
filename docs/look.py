"""Takes pictures of the site in a browser, on a desk and on a telephone: build/docs/screens.

`make docs` calls it when the site is built. Without Chromium there are no pictures, and a line says so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SITE = Path(__file__).parents[1] / "build/docs"
PAGES = ("index.html", "docs/manager.html", "docs/reference/api.html")
"""The first page, one with much code, and one of the reference."""
WIDTHS = (1280, 390)
HEIGHT = 2200
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60


def main() -> int:
    """The exit status: 1 if the site, or a picture of it, is missing."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"no pictures of the site: none of {', '.join(BROWSERS)} is in PATH")
        return 0
    screens = SITE / "screens"
    screens.mkdir(exist_ok=True)
    for page in PAGES:
        if not (SITE / page).is_file():
            print(f"{SITE / page} is missing: run `make docs` first", file=sys.stderr)
            return 1
        for width in WIDTHS:
            picture = screens / f"{page.removesuffix('.html').replace('/', '-')}-{width}.png"
            command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            command += [f"--window-size={width},{HEIGHT}", f"--screenshot={picture}"]
            taken = subprocess.run(
                [*command, (SITE / page).as_uri()], capture_output=True, text=True, timeout=SECONDS
            )
            if not picture.is_file():
                print(f"{browser} took no picture of {page}:\n{taken.stderr}", file=sys.stderr)
                return 1
            print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
