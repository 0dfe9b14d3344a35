"""Pictures of a report, for docs/gallery.md: its first screen, the same on a phone, and one for each line of FIGURES.

    python docs/example/gallery.py docs/example/report.html docs/gallery

It needs Chromium and playwright, as the tests of reports do.
"""

import io
import shutil
import sys
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

FIGURES: Final = {  # file: chapter, figure, and the view to choose
    "speedup": ("Strong scaling", "Per-epoch speedup", ""),
    "learning": ("Strong scaling", "Learning speedup", ""),
    "phases": ("Strong scaling", "Time per phase", ""),
    "shares": ("Strong scaling", "Share of each phase", ""),
    "convergence": ("Strong scaling", "Convergence", "over seconds"),
    "cores": ("Strong scaling", "Cores busy", ""),
    "weak": ("Weak scaling", "Weak efficiency", ""),
    "frontier": ("Ways to sync", "Speed of an epoch", ""),
    "threads": ("Threads and kernels", "Threads × ranks", ""),
    "variability": ("Variability", "Seconds per epoch", ""),
    "storage": ("Storage and input", "Samples per second", ""),
    "transfer": ("Moving data", "Bandwidth", "all-reduce"),
    "frameworks": ("Frameworks", "Samples per second", ""),
}
_WIDTH, _COLOURS = 900, 128


def main(report: Path, folder: Path) -> None:
    """Take all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    address = report.resolve().as_uri()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = _open(browser, address, 1300, 950, "light")
        _save(page.screenshot(), folder / "report.png")
        for name, (chapter, title, view) in FIGURES.items():
            section = page.locator("section").filter(has=page.locator("h2", has_text=chapter))
            figure = section.locator("figure").filter(has=page.locator("h3", has_text=title)).first
            figure.scroll_into_view_if_needed()
            figure.locator(".main-svg").first.wait_for()
            if view:
                figure.locator(".views button", has_text=view).click()
            page.wait_for_timeout(300)
            _save(figure.screenshot(), folder / f"{name}.png")
        phone = _open(browser, address, 400, 860, "dark")
        phone.locator("figure").first.scroll_into_view_if_needed()
        phone.locator(".main-svg").first.wait_for()
        phone.wait_for_timeout(300)
        _save(phone.screenshot(), folder / "phone.png", 400)
        browser.close()


def _open(browser: Browser, address: str, width: int, height: int, scheme: str) -> Page:
    size = {"width": width, "height": height}
    page = browser.new_page(viewport=size, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True)  # so that it can be asked
    page.goto(address)
    page.wait_for_function("window.Plotly !== undefined")
    return page


def _save(taken: bytes, path: Path, width: int = _WIDTH) -> None:
    picture = Image.open(io.BytesIO(taken)).convert("RGB")
    small = picture.resize((width, round(picture.height * width / picture.width)), Image.Resampling.LANCZOS)
    small.quantize(_COLOURS).save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
