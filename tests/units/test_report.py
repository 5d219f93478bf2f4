"""The report on disk: files, bytes, escaping, and numbers that are not numbers."""

import csv
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from reports import EVIL, every_block, evil, not_finite, sample

from keyhole._files import write_whole
from keyhole.lab.report.document import (
    Chart,
    HeatMap,
    Report,
    Section,
    Series,
    Table,
    Verdict,
    bars,
)
from keyhole.lab.report.html import write_report
from keyhole.lab.report.inks import KNOWN, inks_of
from keyhole.lab.report.pictures import svg_of
from keyhole.lab.report.plotly_figures import figure_of
from keyhole.lab.report.words import safe_names

VOID = {"meta", "img"}


class Page(HTMLParser):
    """Tags in order, ids, links, and the text of each script; insists on tags that close in
    order.
    """

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.scripts, self.attributes, self.text = (
            [],
            [],
            [],
            [],
            [],
            [],
            "",
        )
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("href", "src")]
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID and self.get_starttag_text()[-2:] != "/>":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [name for name, _ in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module", params=[sample, evil, not_finite], ids=lambda make: make.__name__)
def written(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param.__name__) / "deep" / "report"
    report = request.param()
    return report, folder, write_report(report, folder)


def read(folder):
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def data(page):
    return json.loads(
        page.scripts[1], parse_constant=lambda name: pytest.fail(f"{name} in the JSON")
    )


def blocks(report):
    return [block for section in report.sections for block in section.blocks]


def test_every_block_has_its_files_and_nothing_else(written):
    report, folder, paths = written
    pictures = sum(not isinstance(block, Table) for block in blocks(report))
    assert len(paths) == len(set(paths)) == 1 + len(blocks(report)) + pictures
    found = {path for path in folder.parent.parent.rglob("*") if path.is_file()}
    assert found == set(paths), "files outside the folder, or partial files left behind"
    assert paths[0] == folder / "report.html"
    for path in paths:
        start = path.read_bytes()[:200]
        if path.suffix == ".svg":
            assert b"<?xml" in start


def test_links_lead_to_files_and_anchors(written):
    _, folder, _ = written
    page = read(folder)
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        assert link[1:] in page.ids if link.startswith("#") else (folder / link).is_file()


def test_the_page_holds_every_chart_once(written):
    report, folder, _ = written
    charts = data(read(folder))["charts"]
    assert len(charts) == sum(not isinstance(block, Table) for block in blocks(report))


def test_nothing_leaves_its_place(tmp_path):
    write_report(evil(), tmp_path)
    page = read(tmp_path)
    plain = write_report(replace(evil(), sections=[]), tmp_path / "plain") and read(
        tmp_path / "plain"
    )
    # three scripts and no more; no tag and no attribute that a harmless report would lack
    assert len(page.scripts) == len(plain.scripts) == 3
    assert page.scripts[0] == plain.scripts[0]
    assert page.scripts[2] == plain.scripts[2]
    assert "onerror" not in page.attributes
    write_report(sample(), tmp_path / "sample")
    assert set(page.tags) <= set(read(tmp_path / "sample").tags)
    # what was written can be read, dollar signs and all
    assert '<script>alert("x")</script>' in page.text
    assert "$x_1$ $HOME ${lead}" in page.text
    # where the chart library looks for tags, there are none but ours
    labels = re.sub(r"</?(?:b|br|sub|sup|extra)>", "", json.dumps(data(page)["charts"]))
    assert "<" not in labels


def test_a_broken_escape_is_seen(tmp_path):
    """The twin: were the claim not escaped, the test above would meet a fourth script."""
    bare = [replace(section, blocks=()) for section in evil().sections]
    write_report(replace(evil(), sections=bare), tmp_path)
    text = (
        (tmp_path / "report.html")
        .read_text()
        .replace("&lt;/script&gt;&lt;script&gt;", "</script><script>", 1)
    )
    with pytest.raises(AssertionError):
        Page(text)


def test_rows_are_those_behind_the_chart(tmp_path):
    write_report(Report("", "", [Section("s", "", "", every_block())]), tmp_path)

    def rows(name):
        with (tmp_path / "charts" / f"{name}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    assert rows("linear") == [{"n": "16", "error": "1.0"}]
    log = rows("log")
    assert len(log) == 24
    assert list(log[1].items())[:3] == [("series", "attention"), ("x", "64.0"), ("y", "0.4")]
    assert (float(log[1]["low"]), float(log[1]["high"])) == (0.9 * 0.4, 1.1 * 0.4)
    assert log[4]["low"] == ""
    assert [float(row["value"]) for row in rows("map")][:3] == [1, -2.0, 3.0]
    assert rows("table")[1] == {"target": "g", "n": "", "ratio": "3.25"}


def test_equal_reports_give_equal_bytes(tmp_path):
    first, second = (write_report(sample(sections=1), tmp_path / name) for name in "ab")
    before = [path.read_bytes() for path in first]
    assert before == [path.read_bytes() for path in second]
    # and again over the old ones
    assert before == [
        path.read_bytes() for path in write_report(sample(sections=1), tmp_path / "a")
    ]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    write_report(not_finite(), tmp_path)
    charts = data(read(tmp_path))["charts"]
    strange = charts["strange_FalseFalse"]["data"]
    assert [None, None, None, 0.0] in [trace["x"][:4] for trace in strange]
    assert charts["all_gone"]["data"][0]["z"] == [[None, None]]
    assert "NaN" not in read(tmp_path).scripts[1]


def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_whole(b"old", tmp_path / "file")

    def broken(*_):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="no space"):
        write_whole(b"new", path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_the_page_comes_last(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(
        "keyhole.lab.report.html.write_whole", lambda content, path: order.append(path.name) or path
    )
    write_report(sample(sections=1), tmp_path)
    assert order[-1] == "report.html"


def test_empty_reports(tmp_path):
    assert [p.name for p in write_report(Report("Nothing", "", []), tmp_path)] == ["report.html"]
    write_report(Report("", "", [Section("", "", "")]), tmp_path)
    page = read(tmp_path)
    assert "unnamed" in page.ids
    assert data(page) == {"charts": {}}


def test_verdicts_are_in_the_contents(tmp_path):
    states = ("holds", "partly", "does not show", "not sure", "information")
    sections = [
        replace(section, verdict=Verdict(state, "A sentence.", {"ratio": "12 ± 1"}), rule="A rule.")
        for section, state in zip(sample(sections=5).sections, states, strict=True)
    ]
    report = replace(sample(), sections=sections)
    write_report(
        replace(report, sections=[replace(section, blocks=()) for section in report.sections]),
        tmp_path,
    )
    text = (tmp_path / "report.html").read_text()
    contents = text[text.index("<nav") : text.index("</nav>")]
    for state in ("holds", "partly", "does not show", "not sure", "information"):
        assert f'data-state="{state}"' in contents
    assert "12 ± 1" in text
    assert "Our settings" in text
    assert "A rule." in text


def test_names_are_safe_and_different():
    names = safe_names(["a/b", "a.b", "A-B", "..", "", "CON", "x" * 300, EVIL])
    assert len({name.casefold() for name in names}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,90}", name) for name in names)


def test_known_roles_keep_their_colours():
    def inks(*roles):
        return inks_of([Series(f"name {k}", [1.0], [1.0], role=r) for k, r in enumerate(roles)])

    assert inks("mlp", "attention")["attention"] == KNOWN["attention"]
    assert inks("attention")["attention"] == KNOWN["attention"]
    new = inks("attention", "first", "", "third")
    assert len({ink.colour for ink in new.values()}) == 4
    assert list(new) == ["attention", "first", "name 2", "third"]


def test_uneven_series_are_refused(tmp_path):
    chart = Chart("c", "", "", "", [Series("curve", [1.0, 2.0], [1.0])])
    with pytest.raises(ValueError, match="same size"):
        write_report(Report("", "", [Section("s", "", "", [chart])]), tmp_path)
    block = HeatMap("m", "", "", "", ["a", "b"], ["c"], [[1.0]])
    with pytest.raises(ValueError, match="reshape"):
        write_report(Report("", "", [Section("s", "", "", [block])]), tmp_path)


def test_numbers_in_tables_align(tmp_path):
    rows = [{"model": "a", "error": 0.5, "n": 1000}, {"model": "b", "error": 0.0625, "n": 20}]
    verdict = Verdict("information", "x")
    write_report(Report("", "", [Section("s", "", "", [Table("t", "", rows)], verdict)]), tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert '<td class="n">0.5000</td><td class="n">1,000</td>' in text
    assert '<td class="n">0.0625</td><td class="n">20</td>' in text


def test_a_chart_of_names_lies_on_its_side():
    """Names down the side, on the page and on paper, and in the words under the pointer."""
    series = bars("attention", [0, 1], [2.0, 3.0], [0.5, 0.5], "attention")
    chart = Chart(
        "learners", "Errors", "learner", "error, %", [series], names=["★ 256 heads", "<none>"]
    )
    figure = figure_of(chart)
    assert figure["layout"]["yaxis"]["ticktext"] == ["★ 256 heads", "&lt;none&gt;"]
    [trace] = figure["data"]
    assert (trace["x"], trace["y"]) == ([2.0, 3.0], [0, 1])
    assert "learner: &lt;none&gt;" in trace["hovertext"][1]
    picture = svg_of(chart).decode()
    assert "256 heads" in picture
    assert "<!-- error, % -->" in picture


def test_lines_that_go_with_measured_points_have_their_entry_in_the_legend():
    curves = [
        Series("attention", [1.0, 2.0], [1.0, 0.5], role="attention"),
        Series("attention, predicted", [1.0, 2.0], [1.0, 0.5], look="dashed", role="attention"),
        Series("slope", [1.0, 2.0], [1.0, 0.5], look="thin", role="oracle"),
    ]
    traces = figure_of(Chart("c", "", "n", "error", curves))["data"]
    entries = {trace["name"]: trace["showlegend"] for trace in traces}
    assert entries == {"attention": True, "attention, predicted": False, "slope": True}


def test_a_bar_that_reaches_far_below_does_not_squeeze_the_points():
    series = bars("a", [1.0, 2.0], [1.0, 0.5], [0.9999, 0.1])
    axis = figure_of(Chart("c", "", "n", "error", [series], y_log=True))["layout"]["yaxis"]
    assert axis["range"][0] > -1  # tenths


@pytest.mark.parametrize("y_log", [False, True])
def test_the_name_of_a_level_beyond_the_axis_does_not_stretch_a_picture(y_log):
    """A logarithmic axis ends above levels far below all points."""
    series = Series("attention", [50.0, 100.0, 200.0], [0.6, 0.55, 0.5])
    heights = []
    for marks in ({}, {"learned": 0.1}):
        chart = Chart("c", "Errors", "n", "error", [series], y_log=y_log, marks=marks)
        picture = svg_of(chart).decode()
        heights.append(float(re.search(r'<svg[^>]* height="([\d.]+)pt"', picture)[1]))
    assert heights[1] < 1.05 * heights[0]
