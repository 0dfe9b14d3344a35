"""A report in a real browser without a network: figures are drawn and answer, tables sort, downloads are right, print shows all."""

import csv
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from deepex.report import make_report
from tests.report.conftest import HOSTILE
from tests.report.records import Made, write_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("no Chromium is installed, without which a report cannot be tested: apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Any]:
    """Open a file with networking off; a request or a message on the console fails the test."""
    contexts, wrong = [], []

    def refuse(route: Any) -> None:
        wrong.append(f"asked for {route.request.url}")
        route.abort()

    def opened(path: Path, **options: Any) -> Page:
        context = browser.new_context(accept_downloads=True, **{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        context.set_offline(True)
        context.route(re.compile("^(https?|wss?):"), refuse)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on(
            "console",
            lambda message: wrong.append(f"{message.type}: {message.text}") if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(path.as_uri())
        wait_until(page, "window.Plotly !== undefined")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


DRAWN = ".plot .main-svg .trace, .plot .main-svg .hm, .plot .main-svg .point"


def drawn(page: Page) -> tuple[int, int]:
    """How many figures there are, and how many of them are drawn with something in them."""
    figures = "[...document.querySelectorAll('figure')]"
    there, full = page.evaluate(f"[{figures}.length, {figures}.filter((one) => one.querySelector({DRAWN!r})).length]")
    return there, full


def wait_until(page: Page, condition: str) -> None:
    """Playwright's own way evaluates text within the page, which the page's policy forbids."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"it did not come true in ten seconds: {condition}")


def scroll_through(page: Page) -> None:
    page.evaluate("""async () => {
        for (const figure of document.querySelectorAll("figure")) {
            figure.scrollIntoView({ behavior: "instant" });
            for (let i = 0; i < 100 && !figure.querySelector(".main-svg"); i++) await new Promise((go) => setTimeout(go, 20));
        }
    }""")


@pytest.fixture(scope="module")
def small_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank against two: the strong-scaling figures, few enough to try everything on."""
    folder = tmp_path_factory.mktemp("small")
    for ranks in (1, 2):
        for seed in range(2):
            write_run(folder / f"runs/{ranks}-{seed}", Made(ranks=ranks, seed=seed))
    path = folder / "report.html"
    path.write_text(make_report([folder / "runs"]).html, encoding="utf-8")
    return path


def test_every_figure_is_drawn_when_it_is_reached_and_fits_a_phone(open_page: Any, full_page: Path) -> None:
    page = open_page(full_page, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    there, at_once = drawn(page)
    assert there > 35
    assert at_once < there / 2
    scroll_through(page)
    assert drawn(page) == (there, there)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    edges = page.locator(".plot .main-svg").evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().right)")
    assert max(edges) <= 390
    labels = page.locator(".plot[role=img]").evaluate_all("(all) => all.map((one) => one.getAttribute('aria-label'))")
    assert all(len(label) > 40 for label in labels)


def test_hover_shows_values(open_page: Any, small_page: Path) -> None:
    page = open_page(small_page)
    scroll_through(page)
    page.evaluate("document.querySelector('#figure-1').scrollIntoView({ behavior: 'instant' })")
    point = page.locator("#figure-1 .trace .point").last
    point.hover(force=True)
    text = page.locator("#figure-1 .hoverlayer .hovertext").first.text_content()
    assert re.search(r"2 ranks: 1\.\d+ times as fast", text)


def test_the_theme_follows_the_system_until_it_is_chosen(open_page: Any, small_page: Path) -> None:
    page = open_page(small_page, color_scheme="dark")
    scroll_through(page)
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "document.querySelector('#figure-1 .xtick text').style.fill"
    dark = (page.evaluate(ground), page.evaluate(ink))
    page.emulate_media(color_scheme="light")
    wait_until(page, "document.documentElement.dataset.theme === 'light'")
    light = (page.evaluate(ground), page.evaluate(ink))
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    page.click("#theme")
    page.click("#theme")
    assert page.text_content("#theme") == "Theme: dark"
    assert (page.evaluate(ground), page.evaluate(ink)) == dark


def test_tables_sort_and_downloads_hold_the_data(open_page: Any, small_page: Path) -> None:
    page = open_page(small_page)
    scroll_through(page)
    name = "Convergence: training error"
    shown = page.locator("figure", has=page.locator("h3", has_text=name))
    entry = page.evaluate("(id) => JSON.parse(document.getElementById('data').textContent)[id]", shown.get_attribute("id"))
    shown.locator("summary").click()
    head = shown.locator("th", has_text="median")
    for direction in ("ascending", "descending"):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == direction
        values = [float(v) for v in shown.locator("tbody tr td:nth-child(4)").all_text_contents()]
        assert values == sorted(values, reverse=direction == "descending")
    with page.expect_download() as csv_download:
        shown.locator("button.csv").click()
    rows = list(csv.reader(io.StringIO(Path(csv_download.value.path()).read_text(encoding="utf-8"))))
    assert csv_download.value.suggested_filename == "convergence-training-error.csv"
    assert rows[0] == entry["columns"]
    assert [float(row[3]) for row in rows[1:]] == [row[3] for row in entry["rows"]]
    with page.expect_download() as svg_download:
        shown.locator("button.svg").click()
    svg = Path(svg_download.value.path()).read_text(encoding="utf-8")
    assert svg.startswith("<svg")
    assert "2 ranks" in svg
    shown.locator("button", has_text="over seconds").click()
    wait_until(page, f"document.querySelector('#{shown.get_attribute('id')} .xtitle').textContent.includes('seconds')")


def test_hostile_names_stay_text(open_page: Any, hostile_page: Path) -> None:
    page = open_page(hostile_page)
    scroll_through(page)
    assert page.locator("img, main b, .plot a").count() == 0
    assert page.title() != "broken"
    assert HOSTILE.split("\u2028")[0][:20] in page.locator("main").inner_text()
    ticks = page.evaluate("[...document.querySelectorAll('.plot text')].map((t) => t.textContent).join(' ')")
    assert "<img" in ticks


def test_print_shows_every_figure_in_light_colours(open_page: Any, small_page: Path, tmp_path: Path) -> None:
    page = open_page(small_page, color_scheme="dark")
    page.evaluate(
        "addEventListener('beforeprint', () => { window.printed = [document.documentElement.dataset.theme,"
        " document.querySelectorAll('figure').length, document.querySelectorAll('.plot .svg-container').length]; })"
    )
    page.pdf(path=tmp_path / "page.pdf", prefer_css_page_size=True)
    theme, there, shown = page.evaluate("window.printed")
    assert (theme, shown) == ("light", there)
    assert (tmp_path / "page.pdf").stat().st_size > 50_000
    wait_until(page, "document.documentElement.dataset.theme === 'dark'")
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert not page.locator("#theme").is_visible()
    assert page.locator("figure .plot").first.is_visible()


def test_data_survives_the_way_into_the_page(small_page: Path) -> None:
    data = re.search(r'id="data">(.*?)</script>', small_page.read_text(encoding="utf-8"), re.DOTALL)
    assert data
    assert all(entry["views"] and entry["rows"] for entry in json.loads(data[1]).values())
