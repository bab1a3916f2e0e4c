import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import hdet
from hdet.errors import HdetError
from hdet.lab.page import Evaluation, Run, build_report, headline, html_page, read_run
from hdet.lab.page.html_page import sentence_html
from hdet.lab.page.sentences import figure
from tests.helpers.runs import real_records, write_run

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


class Tags(HTMLParser):
    """Every tag with its attributes, and the text of scripts left out."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def data_of(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_one_run(tmp_path: Path) -> None:
    out = build_report(
        [read_run(write_run(tmp_path / "run", controllers=("guard",), excludes=True))],
        tmp_path / "new" / "a.html",
    )
    page = out.read_text()
    tags = Tags(page).tags
    assert out == tmp_path / "new" / "a.html" and [p.name for p in out.parent.iterdir()] == ["a.html"]
    assert "<h1>feed, guard controller</h1>" in page and "4 replicas trained for 300 steps in 41 s" in page
    assert len(data_of(page)) == page.count('class="plot"') == 7
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", page) == [
        "Search for the learning rate", "Learning rate", "Loss",
        "Metrics", "Cost and health", "Settings and environment",
    ]  # fmt: skip
    policy = next(a["content"] for _, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith(
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
    )


def tiles_of(page: str) -> list[tuple[str, str, str]]:
    return re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>(.*?)</small>", page)


def test_the_first_screen_says_what_was_found(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", controllers=("guard",)))
    page = build_report([run], tmp_path / "a.html").read_text()
    search = run.search
    assert search is not None
    said = re.sub(r"</?span>", "", page)
    assert f'<p class="headline">{headline(run)}</p>' in said and "Found a learning rate" in headline(run)
    lowered = figure(search.found / 3)
    tiles = {label: (value, hint) for label, value, hint in tiles_of(said)}
    assert tiles["Learning rate"] == (lowered, f"guess: 0.01, search: {figure(search.found)}")
    assert tiles["Guard"] == ("went back 1 time", "and lowered the learning rate")
    titles = re.findall(r'class="title" id="[^"]*">(.*?)<', page)
    assert titles[:3] == ["Search for the learning rate", "Learning rate", "Loss"]


def test_a_number_does_not_break_at_its_sign() -> None:
    said = sentence_html("from 3e-4 to 1.5e-12, <b>", "x")
    assert said == '<p class="x">from <span>3e-4</span> to <span>1.5e-12</span>, &lt;b&gt;</p>'


def test_records_of_a_script_show_loss_and_learning_rate(tmp_path: Path) -> None:
    records, _ = real_records("guard")
    run = Run(path=tmp_path, name="a", records=list(records[1:]))
    page = build_report([run], tmp_path / "a.html").read_text()
    assert [label for label, _, _ in tiles_of(page)] == ["Learning rate", "Training loss", "Fan-out", "Guard"]
    assert "unfinished" not in page.partition("<main")[0].partition("<header")[2]
    assert f"Written by hdet {hdet.__version__}. The page" in page


def test_parts_of_a_metric_have_no_tile(tmp_path: Path) -> None:
    metrics = {"loss_like": 0.2, "auc_like": 0.5, "auc_dwell": 0.6, "loss": 0.3, "auc": 0.7, "ne_like": 0.8}
    run = Run(path=tmp_path, name="a", result={"final_loss": 0.3, "metrics": metrics})
    page = build_report([run], tmp_path / "a.html").read_text()
    assert [(label, value) for label, value, _ in tiles_of(page)] == [
        ("Held-out loss", "0.3"), ("auc", "0.7"), ("ne like", "0.8"),
    ]  # fmt: skip


def test_settings_are_written_with_few_digits(tmp_path: Path) -> None:
    config = {"spread": 1 / 9, "more": {"x": [0.1 + 0.2, 12345678, True]}}
    page = build_report([Run(path=tmp_path, name="a", config=config)], tmp_path / "a.html").read_text()
    assert "<td>0.111111</td>" in page and "<td>x: 0.3, 12345678, yes</td>" in page


def test_several_runs(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / "a", name="first")),
        read_run(write_run(tmp_path / "b", name="second", controllers=(), is_finished=False)),
    ]
    page = build_report(runs, tmp_path / "a.html").read_text()
    assert page.count('<details class="run">') == 2
    assert (
        page.index('<p class="headline">')
        < page.index(">Results<")
        < page.index("<h2>first</h2>")
        < page.index("<h2>second</h2>")
    )
    assert page.count("(best)") == 1


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    page = build_report([read_run(write_run(tmp_path / "run"))], tmp_path / "a.html").read_text()
    for tag, attributes in Tags(page).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        assert "src" not in attributes and not (attributes.get("href") or "#").startswith(("http", "//"))


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    evil: dict[str, Any] = {EVIL: [EVIL, {"x": EVIL}]}
    path = write_run(tmp_path / "run", controllers=("guard",), name=EVIL, loss_unit=EVIL, **evil)
    for name in ("records.jsonl", "evaluations.jsonl", "environment.json"):
        content = (path / name).read_text()
        for old in ("lr.embedding", "mean error", "Linux x86_64", "trials, weighed"):
            content = content.replace(old, json.dumps(EVIL)[1:-1])
        (path / name).write_text(content + ("not a line\n" if name.endswith("l") else ""))
    run = read_run(path)
    run.records[5] = replace(run.records[5], excluded={1: EVIL})
    run.notes.append(EVIL)
    for runs in ([run], [run, run]):
        page = build_report(runs, tmp_path / "a.html").read_text()
        tags = Tags(page).tags
        assert [tag for tag, _ in tags].count("script") == 4 and "img" not in [tag for tag, _ in tags]
        assert not any(key.startswith("on") for _, attributes in tags for key in attributes)
        assert "<script>alert" not in page and "<img src=x" not in page
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
        texts = json.dumps(data_of(page))
        assert EVIL[:20] not in texts


def test_odd_characters_can_be_written(tmp_path: Path) -> None:
    name = "a\u2028b\ud800c\x00d\U0001f600 $title ${body} %{x} \u202e"
    page = build_report(
        [Run(path=tmp_path, name=name, evaluations=[Evaluation(1, 1.0)])] * 2, tmp_path / "a.html"
    )
    text = page.read_text()
    assert "a\u2028b?c" in text and "$title ${body}" in text and data_of(text)


def test_notes_are_shown(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "environment.json").write_text("{")
    page = build_report([read_run(path)], tmp_path / "a.html").read_text()
    assert 'role="note"' in page and "environment.json, line 1: not JSON" in page


def test_a_run_without_anything_still_has_a_page(tmp_path: Path) -> None:
    page = build_report([Run(path=tmp_path, name="empty")], tmp_path / "a.html").read_text()
    assert "Nothing has been recorded of this run yet." in page and data_of(page) == []


def test_a_page_of_ten_long_runs_stays_small(tmp_path: Path) -> None:
    records, evaluations = real_records("paper", 8)
    long = [
        replace(record, step=60 * 5 * k + record.step, losses=[(x or 0) + k / 7 for x in record.losses])
        for k in range(12)
        for record in records
    ]
    found = [Evaluation(s, 1 / (s + 1), metrics={"auc": s / 7919 % 1}) for s in range(0, 6000, 2)]
    runs = [
        Run(
            path=tmp_path,
            name=f"run {i}",
            config={"lr": 0.01, "controllers": ("paper",)},
            records=[replace(r, losses=[x and x + i / 3 for x in r.losses]) for r in long],
            evaluations=[replace(e, loss=(e.loss or 0) + i / 9) for e in found],
        )
        for i in range(10)
    ]
    out = build_report(runs, tmp_path / "a.html")
    assert out.stat().st_size < 6_000_000
    assert len(data_of(out.read_text())) > 80 and evaluations


def test_a_failed_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(path=tmp_path, name="a")
    out = build_report([run], tmp_path / "a.html")
    old = out.read_bytes()

    def fail(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        build_report([run], out)
    assert out.read_bytes() == old and [p.name for p in tmp_path.iterdir()] == ["a.html"]


def test_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        build_report([], tmp_path / "a.html")


def test_a_missing_plotly_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    html_page._plotly_script.cache_clear()
    with pytest.raises(HdetError, match=r"pip install .*\[cli\]'"):
        build_report([Run(path=tmp_path, name="a")], tmp_path / "a.html")
