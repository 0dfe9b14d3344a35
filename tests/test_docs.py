"""The documentation holds together: the README stays short, sentences are plain, and every link leads somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
PAGES = (*GUIDES, *sorted((ROOT / "docs" / "evidence").glob("*.md")))
MOST_LINES, MOST_ROWS, MOST_WORDS = 119, 8, 24

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
each_guide = pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(text: str) -> str:
    """The text without blocks of code: fenced ones, and lines indented by four spaces or more."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link may point at within a page, as GitHub makes it of headings."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), flags=re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def is_there(target: str, page: Path) -> bool:
    """Whether a relative link of a page leads to a file, and to a heading of it."""
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    return file.exists() and (not anchor or anchor in anchors(file))


def sentences(page: Path) -> Iterator[str]:
    """What is said in paragraphs and lists; not tables, headings and code. A piece of code counts as one word."""
    text = without_code(page.read_text(encoding="utf-8"))
    text = re.sub(r"^(?:#|\||!\[).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", text).replace("*", "")).replace("et al.", "et al")
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", text):
        yield from re.split(r"(?<=[.!?])\)?\s+(?=\(?[A-Z])", " ".join(block.split()))


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8")))
    assert [link for link in links if not link.startswith("http") and not is_there(link, page)] == []


def test_the_code_refers_to_headings_that_are_there() -> None:
    for file in (*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / "CHANGELOG.md"):
        links = re.findall(r"\bdocs/[\w/-]+\.(?:md|png|svg)(?:#[\w-]+)?", file.read_text(encoding="utf-8"))
        assert [link for link in links if not is_there(link, ROOT / "README.md")] == [], file


@each_guide
def test_sentences_are_short(page: Path) -> None:
    words = {sentence: len(re.findall(r"\S*\w\S*", sentence)) for sentence in sentences(page)}
    assert {sentence: number for sentence, number in words.items() if number > MOST_WORDS} == {}


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = text.partition("## What was measured")[2].partition("\n## ")[0]
    assert len(text.splitlines()) <= MOST_LINES
    assert len(re.findall(r"^\|", measured, flags=re.MULTILINE)) - 2 <= MOST_ROWS
    assert len(re.findall(r"!\[", text)) == 1
