"""Pictures of figures of a report, for docs/gallery.md: one for each line of FIGURES.

    python docs/example/gallery.py docs/example/report.html docs/gallery

It needs Chromium and playwright, as the tests of reports do.
"""

import io
import sys
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import sync_playwright

FIGURES: Final = {  # file: chapter, figure
    "speedup": ("Strong scaling", "Per-epoch speedup"),
}
_WIDTH, _COLOURS = 900, 128


def main(report: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 1000}, color_scheme="light")
        page.goto(report.resolve().as_uri())
        for name, (chapter, title) in FIGURES.items():
            section = page.locator("section").filter(has=page.locator("h2", has_text=chapter))
            figure = section.locator("figure").filter(has=page.locator("h3", has_text=title)).first
            figure.scroll_into_view_if_needed()
            figure.locator(".main-svg").first.wait_for()
            page.wait_for_timeout(300)
            picture = Image.open(io.BytesIO(figure.screenshot()))
            height = round(picture.height * _WIDTH / picture.width)
            small = picture.convert("RGB").resize((_WIDTH, height), Image.Resampling.LANCZOS).quantize(_COLOURS)
            small.save(folder / f"{name}.png", optimize=True)
            print(folder / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
