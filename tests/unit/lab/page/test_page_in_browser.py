"""The page as a browser shows it; one browser and one build of each page for the whole file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hdet.lab.page import build_report, read_run
from hdet.round_record import ComparingRecord
from tests.helpers.runs import real_records, write_run

CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--headless=new",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
LINK = '<a href="javascript:alert(3)">lr</a>%{x}'

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed; make browser installs it"
)
sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; make install installs it"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


class Visit:
    """One page in the browser, and everything that went wrong in it."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.page = browser.new_page(**({"viewport": {"width": 1280, "height": 900}} | options))
        self.page.set_default_timeout(60_000)  # a busy machine
        self.trouble: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.trouble.append(message.text))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.trouble.append("dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("html[data-is-drawn=true]")

    def figure(self, title: str) -> Any:
        return self.page.locator("figure", has=self.page.get_by_role("heading", name=title, exact=True)).first

    def drawn(self) -> list[str]:
        """Titles of the charts that show at least one trace."""
        return self.page.evaluate(
            """() => [...document.querySelectorAll("figure")].filter((figure) => figure.querySelector(
                ".scatterlayer .trace path, .barlayer .point path, .heatmaplayer image"
            )).map((figure) => figure.querySelector(".title").textContent)"""
        )

    def open_last_run(self) -> None:
        """With its first and last table of numbers, and wait until its charts are drawn."""
        self.page.evaluate(
            """() => {
                const run = [...document.querySelectorAll("details.run")].at(-1);
                const tables = [...run.querySelectorAll("details")];
                for (const details of [run, tables[0], tables.at(-1)]) details.open = true;
            }"""
        )
        self.page.wait_for_function("() => !document.querySelector('[open] .plot:not(.js-plotly-plot)')")

    def emulate(self, **media: str) -> None:
        """Change what the page is shown on, and wait until the page was told: two frames."""
        self.page.emulate_media(**media)
        self.page.evaluate("() => new Promise((d) => requestAnimationFrame(() => requestAnimationFrame(d)))")

    def theme(self) -> str:
        return self.page.evaluate("() => document.documentElement.dataset.theme")

    def close(self) -> None:
        self.page.close()
        assert self.trouble == []
        assert all(url.startswith(("file:", "data:", "blob:")) for url in self.requests), self.requests


def _renamed(record: Any, names: dict[str, str]) -> Any:
    def changed(record: Any, *fields: str) -> Any:
        found = {f: {names.get(key, key): x for key, x in getattr(record, f).items()} for f in fields}
        return replace(record, **found)

    told = changed(record.section(ComparingRecord), "signal", "velocity")
    fields = ("positions", "multipliers", "values", "correction", "base", "base_trace")
    return replace(changed(record, *fields), controllers={"comparing": told})


@pytest.fixture(scope="module")
def one(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    """The page of one run. Tests share it and leave it as they found it; at the end nothing went wrong."""
    path = tmp_path_factory.mktemp("one")
    run = read_run(write_run(path / "a", excludes=True))
    run.search = real_records("guard")[0][0].search
    visit = Visit(browser, build_report([run], path / "one.html").as_uri(), color_scheme="light")
    yield visit
    visit.close()


@pytest.fixture(scope="module")
def several_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a page of several runs, one of which has hostile names wherever it can have any."""
    path = tmp_path_factory.mktemp("several")
    paper = read_run(write_run(path / "b", name="paper", controllers=("paper",), num_replicas=8))
    evil = read_run(write_run(path / "c", name=EVIL, loss_unit=EVIL, is_finished=False))
    evil.records = [_renamed(record, {"lr.embedding": LINK, "lr.head": EVIL}) for record in evil.records]
    evil.records[5] = replace(evil.records[5], excluded={1: EVIL})
    evil.evaluations = [replace(e, metrics={EVIL: 1.0 + e.step}) for e in evil.evaluations]
    search = real_records("guard")[0][0].search
    assert search is not None
    evil.search = replace(search, reason=EVIL)
    evil.notes.append(EVIL)
    return build_report([paper, evil], path / "several runs.html").as_uri()


@pytest.fixture(scope="module")
def several(browser: Any, several_page: str) -> Iterator[Visit]:
    visit = Visit(browser, several_page, color_scheme="light")
    yield visit
    visit.close()


def test_every_chart_is_drawn(one: Visit) -> None:
    titles = one.page.locator("figure .title").all_text_contents()
    assert len(titles) == 15 and one.drawn() == titles
    assert one.page.locator(".js-plotly-plot").count() == 15


def test_the_first_screen_shows_what_was_found(one: Visit) -> None:
    assert one.page.locator(".tile dt").first.text_content() == "Learning rate"
    assert one.page.locator(".headline").text_content().startswith("Found a learning rate of ")
    bottoms = one.page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".row figure")].map((figure) => [
            figure.querySelector(".title").textContent,
            figure.querySelector(".main-svg").getBoundingClientRect().bottom + scrollY]))"""
    )
    first = ["Search for the learning rate", "Learning rate", "What the replicas said", "Loss"]
    assert list(bottoms) == first and max(bottoms.values()) < 900


def test_tools_cover_no_data_before_the_mouse_is_there(one: Visit) -> None:
    shown = "(bar) => getComputedStyle(bar).opacity"
    bar = one.figure("Loss").locator(".modebar")
    one.page.mouse.move(0, 0)
    assert bar.evaluate(shown) == "0"


def test_axes_reach_to_the_last_step_and_nothing_is_clipped(one: Visit) -> None:
    found = one.page.evaluate(
        """() => [...document.querySelectorAll(".plot")].map((div) => {
            const frame = div.getBoundingClientRect();
            const all = (parts) => [...div.querySelectorAll(parts)];
            const isCut = (box) => box.left < frame.left - 1 || box.right > frame.right + 1
                || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
            const cut = all(".legendtext, .xtitle, .ytitle, .xtick text, .ytick text").filter(
                (part) => part.textContent && isCut(part.getBoundingClientRect()));
            return [all(".xtitle, .ytitle"), all(".xtick text"), cut].map((l) => l.map((p) => p.textContent));
        })"""
    )
    assert [cut for _, _, cut in found] == [[]] * 15
    # Figure 1 has two rounds.
    assert {ticks[-1] for titles, ticks, _ in found if titles[0] == "optimizer step"} == {
        "154",
        "300",
    }  # figure 1 has two rounds
    assert not {"x", "y", "z"} & {title for titles, _, _ in found for title in titles}


def test_every_chart_has_a_name_and_a_caption(one: Visit) -> None:
    said = one.page.evaluate(
        """() => [...document.querySelectorAll("figure")].map((figure) => [
            document.getElementById(figure.getAttribute("aria-labelledby")).textContent,
            figure.querySelector(".plot").getAttribute("aria-label"),
            figure.querySelector("figcaption").textContent])"""
    )
    for title, label, caption in said:
        assert label.startswith(f"Chart: {title}. {caption}") and len(caption) > 20


def test_the_keyboard_reaches_everything(one: Visit) -> None:
    focused = "() => { const e = document.activeElement; return e.className || e.id || e.tagName }"
    seen = []
    for _ in range(8):
        one.page.keyboard.press("Tab")
        seen.append(one.page.evaluate(focused))
    assert seen == ["skip", "theme", "SUMMARY", "BUTTON", "SUMMARY", "SUMMARY", "BUTTON", "SUMMARY"]
    one.page.locator("#theme").focus()
    for expected in ("dark", "light"):
        one.page.keyboard.press("Enter")
        assert one.theme() == expected
    assert one.page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_hover_shows_the_values(one: Visit) -> None:
    assert re.search(r"step 1[0-9]0.*mean error.*0[.][0-9]+", _hover(one, "Metric: mean error"))
    figure = one.figure("Loss")
    figure.scroll_into_view_if_needed()
    point = figure.locator(".scatterlayer .trace").last.locator(".point").nth(5).bounding_box()
    one.page.mouse.move(point["x"] + 3, point["y"] + 3)
    label = figure.locator(".hoverlayer .hovertext")
    label.wait_for()
    text = label.text_content()
    assert "held-out loss" in text and "step 100" in text and "squared error" in text


def test_the_scale_can_be_switched(one: Visit) -> None:
    figure = one.figure("Loss")
    button = figure.get_by_role("button", name="Log scale")
    for state, kind in (("true", "log"), ("false", "linear")):
        button.click()
        assert button.get_attribute("aria-pressed") == state
        assert figure.locator(".plot").evaluate("(div) => div._fullLayout.yaxis.type") == kind


def test_the_legend_switches_traces(one: Visit) -> None:
    one.figure("Search for the learning rate").locator(".legendtoggle").last.click()
    one.page.wait_for_function(
        "() => document.querySelector('.plot')._fullData.at(-1).visible === 'legendonly'"
    )
    one.page.evaluate("() => Plotly.restyle(document.querySelector('.plot'), { visible: true })")


def test_dark_changes_page_and_charts(one: Visit) -> None:
    look = """() => [getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector(".xtick text")).fill,
        document.querySelector(".plot").data.at(-1).line.color]"""
    light = one.page.evaluate(look)
    button = one.page.get_by_role("button", name="Switch between light and dark")
    button.click()
    dark = one.page.evaluate(look)
    assert all(a != b for a, b in zip(light, dark, strict=True))
    button.click()
    assert one.page.evaluate(look) == light
    for scheme, expected in (("dark", dark), ("light", light)):
        one.emulate(color_scheme=scheme)
        assert one.page.evaluate(look) == expected


def test_everything_that_was_found_is_within_the_axis(one: Visit) -> None:
    seen = """(div) => [div._fullLayout.xaxis.type, div._fullLayout.xaxis.range, div.data.filter(
        (trace) => /guess|found|likely/.test(trace.name)).flatMap((trace) => trace.x)]"""
    kind, (low, high), marks = one.figure("Search for the learning rate").locator(".plot").evaluate(seen)
    assert kind == "log" and len(marks) == 8
    assert 10**low < min(marks) and max(marks) < 10**high


def test_numbers_are_tables(one: Visit) -> None:
    for title, head, rows in (
        ("What the replicas said", "what", 8),
        ("Replicas left out and healed", "what", 4),
        ("Search for the learning rate", "what", 8),
        ("Learning rate", "optimizer step", 300),
    ):
        figure = one.figure(title)
        figure.locator("summary").focus()
        one.page.keyboard.press("Enter")
        figure.locator(".numbers table").wait_for()
        assert figure.locator("thead th").first.text_content() == head
        assert figure.locator("tbody tr").count() >= rows, title
    search = one.figure("Search for the learning rate")
    assert "found" not in search.locator("table").text_content()  # marks have no numbers of their own
    assert search.locator(".scroll").evaluate("(div) => getComputedStyle(div).position") == "relative"
    assert (
        "parameters are not finite"
        in one.figure("Replicas left out and healed").locator("table").text_content()
    )


def test_the_table_of_results_can_be_sorted(several: Visit) -> None:
    column = "[...document.querySelectorAll('.results tbody td:nth-child(2)')]"
    button = several.page.get_by_role("button", name="held-out loss")
    for direction, sign in (("ascending", 1), ("descending", -1)):
        button.press("Enter")
        found = several.page.evaluate(f"() => {column}.map((cell) => Number(cell.dataset.value))")
        assert found == sorted(found, key=lambda loss, sign=sign: sign * loss)
        assert several.page.locator(f"th[aria-sort={direction}]").count() == 1


def test_several_runs_are_compared_and_open_on_demand(several: Visit) -> None:
    compared = several.drawn()
    assert compared[:3] == ["Held-out loss", "Training loss (figure 2)", "Learning rate"]
    assert (
        len(compared)
        == several.page.locator("figure").count() - several.page.locator("details figure").count()
    )
    several.page.locator("details.run > summary").first.click()
    several.page.wait_for_function(
        f"() => document.querySelectorAll('.js-plotly-plot').length > {len(compared)}"
    )
    assert len(several.drawn()) == len(compared) + several.page.locator("details.run[open] figure").count()


def test_paper_shows_every_run_in_light_colours(several: Visit) -> None:
    num_open = several.page.locator("details.run[open]").count()
    several.emulate(color_scheme="dark")
    assert several.theme() == "dark"
    several.page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    several.emulate(media="print")
    for scheme in ("light", "dark"):  # browsers change it for paper; systems do at sunset
        several.emulate(color_scheme=scheme)
        assert several.theme() == "light"
    widths = several.page.evaluate(
        "() => [...document.querySelectorAll('.plot')].map((p) => p.querySelector('.main-svg').clientWidth)"
    )
    assert max(widths) < 700  # as wide as paper
    several.page.evaluate("() => dispatchEvent(new Event('afterprint'))")
    assert several.theme() == "dark"
    several.emulate(media="screen", color_scheme="light")
    assert several.theme() == "light"
    assert several.page.locator("details.run[open]").count() == num_open


def test_hostile_names_are_only_text(several: Visit) -> None:
    several.open_last_run()
    page = several.page
    assert EVIL in page.locator("details.run h2").all_text_contents()
    assert page.evaluate("() => [document.images.length, document.scripts.length]") == [0, 4]
    assert page.locator(".main-svg a").count() == 0
    shown = " ".join(page.locator(".main-svg :is(.legendtext, .g-ytitle)").all_text_contents())
    assert f"{LINK}, signal" in shown
    hints = page.locator(".tile small").all_text_contents()
    assert any(hint.startswith(f"{EVIL}, ") for hint in hints)  # the unit of the loss
    evil = page.locator("details.run").last
    family = LINK.partition("/")[0]
    assert family in _hover(several, family, within=evil)
    assert EVIL in evil.locator("figure").last.locator("table").text_content()


def test_a_phone_does_not_scroll_sideways(browser: Any, several_page: str) -> None:
    phone = {"viewport": {"width": 375, "height": 812}, "has_touch": True, "is_mobile": True}
    visit = Visit(browser, several_page, **phone)
    visit.open_last_run()
    assert visit.page.evaluate("() => document.documentElement.scrollWidth") <= 375
    widths = visit.page.evaluate(
        "() => [...document.querySelectorAll('.main-svg')].map((svg) => svg.clientWidth)"
    )
    assert widths and max(widths) <= 375
    visit.close()


@pytest.fixture
def sweep(browser: Any, tmp_path: Path) -> Iterator[Visit]:
    """The page of a sweep in which one run diverged."""
    losses = {1e-3: 0.9, 1e-2: 0.5, 1e-1: 0.6, 1.0: 1e7}
    paths = [tmp_path / f"lr{lr:g}" for lr in losses]
    for path, (lr, loss) in zip(paths, losses.items(), strict=True):
        write_run(path, controllers=(), lr=lr, name=f"lr{lr:g}")
        lines = [json.dumps({"step": step, "loss": 2.0 if step == 0 else loss}) for step in (0, 300)]
        (path / "evaluations.jsonl").write_text("\n".join(lines) + "\n")
        (path / "records.jsonl").write_text("")
        (path / "result.json").write_text(
            json.dumps({"status": "finished", "final_loss": loss, "steps": 300})
        )
    visit = Visit(browser, build_report([read_run(path) for path in paths], tmp_path / "a.html").as_uri())
    yield visit
    visit.close()


def test_a_sweep_shows_its_curve_first(sweep: Visit) -> None:
    assert sweep.page.locator(".headline").first.text_content() == (
        "“lr0.01” ended best, with a held-out loss of 0.5."
    )
    assert sweep.drawn()[:2] == ["Loss against learning rate", "Held-out loss"]
    for title in sweep.drawn()[:2]:
        low, high = sweep.figure(title).locator(".plot").evaluate("(div) => div._fullLayout.yaxis.range")
        assert 0 < low < 0.5 and 2 < high < 2.7  # the run that diverged ended at 1e7
    assert sweep.figure("Loss against learning rate").locator(".point").count() == 4
    sweep.figure("Loss against learning rate").locator("summary").click()
    assert "lr1, loss 1e7" in sweep.figure("Loss against learning rate").locator("table").text_content()


def _hover(visit: Visit, title: str, within: Any = None) -> str:
    """What the label says in the middle of a chart whose label holds all its lines."""
    heading = visit.page.get_by_role("heading", name=title, exact=True)
    figure = (within or visit.page).locator("figure", has=heading).first
    figure.scroll_into_view_if_needed()
    box = figure.locator(".nsewdrag").bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    figure.locator(".hoverlayer .legend").wait_for()
    return figure.locator(".hoverlayer").text_content()
