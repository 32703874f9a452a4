"""The report in a browser: it loads no other file, has no errors, and its controls do what they say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hydragraph.report.page import write_report
from tests.report.browser import Page, browser_path, opened
from tests.report.made import EVIL, report

VIEW = "document.querySelector('.panel:not([hidden]) canvas')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    binary = browser_path()
    if binary is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium, and this test clicks through a report")
    with opened(binary, tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def shown(page: Page, tmp_path: Path) -> Iterator[Page]:
    """A report on the screen; it must never request a file or log an error, whatever a test does."""
    path = tmp_path / "report.html"
    write_report(report(), path)
    page.emulate(1100, 800)
    page.requests.clear()
    page.open(path)
    page.run("try { localStorage.clear() } catch {}")
    page.open(path)
    yield page
    page.run("1")
    assert page.errors == []
    assert set(page.requests) == {path.as_uri()}


def span(page: Page) -> float:
    """Return how much of the iteration is in view, 0 to 1."""
    wide: float = page.run(f"(Number({VIEW}.dataset.to) - Number({VIEW}.dataset.from)) / 1e9")
    return wide


def test_tabs_show_one_strategy_each(shown: Page) -> None:
    visible = "[...document.querySelectorAll('.panel')].map(panel => !panel.hidden)"
    assert shown.run(visible) == [True, False, False]
    shown.click("#tab-1")
    assert shown.run(visible) == [False, True, False]
    shown.press("ArrowRight")
    assert shown.run(visible) == [False, False, True]
    assert shown.run("document.activeElement.id") == "tab-2"
    shown.press("ArrowRight")
    assert shown.run(visible) == [True, False, False]


def test_a_timeline_zooms_and_moves(shown: Page) -> None:
    assert span(shown) == pytest.approx(1)
    shown.click(".panel:not([hidden]) [data-act='zoom in']")
    assert span(shown) == pytest.approx(0.5)
    x, y = shown.place(".panel:not([hidden]) canvas")
    shown.mouse("mouseWheel", x, y, deltaX=0, deltaY=-120, modifiers=2)
    assert 0.2 < span(shown) < 0.4
    begin = shown.run(f"Number({VIEW}.dataset.from)")
    shown.mouse("mousePressed", x, y)
    shown.mouse("mouseMoved", x - 80, y)
    shown.mouse("mouseReleased", x - 80, y)
    assert shown.run(f"Number({VIEW}.dataset.from)") > begin
    shown.press("Escape")
    shown.click(".panel:not([hidden]) [data-act='whole iteration']")
    assert span(shown) == pytest.approx(1)


def test_keys_go_from_bar_to_bar(shown: Page) -> None:
    shown.run(f"{VIEW}.focus()")
    shown.press("ArrowDown")
    words = "document.querySelector('.panel:not([hidden]) .chosen').textContent"
    first = shown.run(words)
    assert "rank 0" in first
    assert "from" in first
    assert "s" in first
    shown.press("ArrowRight")
    assert shown.run(words) != first
    shown.press("+")
    assert span(shown) == pytest.approx(0.5)
    shown.press("0")
    assert span(shown) == pytest.approx(1)


def test_hovering_tells_exact_numbers(shown: Page) -> None:
    """Some pixel of the first rank's row is a forward."""
    x, y = shown.place(".panel:not([hidden]) canvas")
    left, top = shown.run(f"(() => {{ const box = {VIEW}.getBoundingClientRect(); return [box.x, box.y]; }})()")
    told = set()
    for step in range(140, 1000, 8):
        shown.mouse("mouseMoved", left + step, top + 40)
        if not shown.run("tip.hidden"):
            told.add(shown.run("tip.textContent.split(' ')[0]"))
    assert {"forward", "backward"} <= told
    shown.mouse("mouseMoved", x, y - 600)


def test_traffic_by_kind(shown: Page) -> None:
    shades = (
        "[...document.querySelectorAll('.panel:not([hidden]) .heat rect:not(.none)')].map(r => r.getAttribute"
        "('fill-opacity'))"
    )
    before = shown.run(shades)
    shown.click(".panel:not([hidden]) .choose [data-kind=p2p]")
    assert shown.run(shades) != before
    assert shown.run("document.querySelector('.choose [data-kind=p2p]').getAttribute('aria-pressed')") == "true"


def test_light_and_dark(shown: Page, tmp_path: Path) -> None:
    """As the system has it, or as the toggle says, which a second visit remembers."""
    paper = "getComputedStyle(document.body).backgroundColor"
    light = shown.run(paper)
    bright = shown.picture(tmp_path / "light.png")
    shown.emulate(1100, 800, "dark")
    dark = shown.run(paper)
    assert dark != light
    assert shown.picture(tmp_path / "dark.png") != bright
    shown.click("#theme")
    assert shown.run(paper) == light
    shown.click("#theme")
    assert shown.run(paper) == dark
    assert shown.run("document.getElementById('theme').textContent") == "Dark"


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_nothing_is_wider_than_the_screen(shown: Page, width: int) -> None:
    """Wide tables and pictures scroll by themselves; the page does not."""
    shown.emulate(width, 800)
    assert shown.run("document.documentElement.scrollWidth") <= width


def test_print_shows_every_strategy(shown: Page) -> None:
    shown.emulate(1100, 800, media="print")
    assert shown.run("[...document.querySelectorAll('.panel')].every(p => getComputedStyle(p).display === 'block')")
    assert shown.run("getComputedStyle(document.querySelector('.picture')).display") == "block"
    assert shown.run("getComputedStyle(document.querySelector('.view')).display") == "none"


def test_names_of_strangers_stay_text(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "evil.html"
    evil = report(EVIL)
    panels = (replace(evil.panels[0], name=EVIL, held_note=EVIL), *evil.panels[1:])
    contenders = tuple(replace(row, name=EVIL, why=EVIL, origin=EVIL) for row in evil.contenders)
    write_report(replace(evil, panels=panels, contenders=contenders, source=(EVIL,), words=(EVIL,)), path)
    page.errors.clear()
    page.open(path)
    assert page.run("window.evil") is None
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.querySelector('h1').textContent") == EVIL
    assert page.errors == []


def test_the_policy_refuses_what_is_not_the_pages_own(page: Page, tmp_path: Path) -> None:
    """Were anything not escaped after all, the browser would not run it."""
    path = tmp_path / "opened.html"
    write_report(report(), path)
    text = path.read_text().replace("</main>", "<img src='x' onerror='window.evil=1'><script>window.evil=2</script>")
    path.write_text(text)
    page.open(path)
    assert page.run("window.evil") is None
    assert any("Content Security Policy" in error for error in page.errors)
    page.errors.clear()


def test_without_scripts_the_facts_are_there(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "plain.html"
    write_report(report(), path)
    page.scripts(False)
    try:
        page.open(path)
        page.emulate(1100, 800)
        assert page.run("getComputedStyle(document.querySelector('.picture')).display") == "block"
        assert page.run("document.querySelectorAll('svg.course path').length") > 10
        assert page.run("[...document.querySelectorAll('.panel')].every(panel => !panel.hidden)")
        assert page.run("document.querySelectorAll('canvas').length") == 0
    finally:
        page.scripts(True)
