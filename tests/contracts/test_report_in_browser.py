"""The report in a real browser: every chart drawn, nothing on the console, no request, on a desk
and on a phone.
"""

import time

import pytest
from chromium import NAMES, chromium, find_chromium
from reports import EVIL, evil, not_finite, sample

from keyhole.lab.report.document import Table
from keyhole.lab.report.html import write_report

pytestmark = pytest.mark.skipif(
    find_chromium() is None,
    reason=f"no browser: install Chromium to open the report in it (looked for {', '.join(NAMES)})",
)
DRAWN = "document.documentElement.dataset.charts === 'done'"
SIZES = """[...document.querySelectorAll('.plot')].map((plot) => {
  const svg = plot.querySelector('svg.main-svg');
  const { width, height } = svg ? svg.getBoundingClientRect() : { width: 0, height: 0 };
  const marks = plot.querySelectorAll('.scatterlayer .trace, .heatmaplayer image').length;
  const roots = plot.querySelectorAll('.svg-container').length;
  return { name: plot.dataset.chart, roots, width, height, marks };
})"""
REPORTS = {"sample": sample, "evil": evil, "not_finite": not_finite}


@pytest.fixture(scope="module")
def new_page():
    with chromium() as new:
        yield new


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    places = {name: tmp_path_factory.mktemp(name) for name in REPORTS}
    for name, make in REPORTS.items():
        write_report(make(), places[name])
    return places


def count(report):
    return sum(
        not isinstance(block, Table) for section in report.sections for block in section.blocks
    )


def settle(page):
    page.wait(DRAWN)
    page.ask("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")


@pytest.mark.parametrize(
    ("name", "width", "shade"),
    [
        ("sample", 1280, "light"),
        ("sample", 390, "dark"),
        pytest.param("sample", 1280, "dark", marks=pytest.mark.slow),
        pytest.param("sample", 390, "light", marks=pytest.mark.slow),
        ("evil", 1280, "light"),
        ("not_finite", 390, "dark"),
    ],
)
def test_every_chart_is_drawn_in_silence(new_page, folders, name, width, shade):
    page = new_page()
    page.open(folders[name] / "report.html", width=width, shade=shade)
    settle(page)
    plots = page.ask(SIZES)
    assert len(plots) == count(REPORTS[name]())
    for plot in plots:
        assert plot["roots"] == 1, plot
        assert plot["width"] > 200, plot
        assert plot["height"] > 150, plot
        assert plot["marks"] or name == "not_finite", plot
    assert page.ask("document.documentElement.scrollWidth") <= width
    assert page.complaints == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in page.requests)
    dark = page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert dark == (shade == "dark")


def test_the_switch_changes_page_and_charts(new_page, folders):
    page = new_page()
    page.open(folders["sample"] / "report.html")
    settle(page)
    ask = (
        "[document.documentElement.dataset.shade, "
        "document.querySelector('.plot').data.at(-2).line.color]"
    )
    seen = []
    for _ in range(4):
        seen.append(page.ask(ask))
        page.ask("document.querySelector('header > button').click()")
        settle(page)
    assert [shade for shade, _ in seen] == ["light", "light", "dark", "light"]
    assert seen[0] == seen[1] == seen[3]
    assert seen[2][1] != seen[0][1]
    assert page.complaints == []


@pytest.fixture(scope="module")
def sample_page(new_page, folders):
    """One tab with the report of every kind of block, for tests that touch different charts."""
    page = new_page()
    page.open(folders["sample"] / "report.html")
    settle(page)
    return page


def test_a_legend_switches_its_curve_in_every_chart_of_the_group(sample_page):
    page = sample_page
    shown = (
        "[...document.querySelectorAll('.group')[0].querySelectorAll('.plot')]"
        ".map((plot) => plot.data.filter((trace) => trace.visible).length)"
    )
    before = page.ask(shown)
    page.ask("document.querySelector('.legend button').click()")
    settle(page)
    assert [one - other for one, other in zip(before, page.ask(shown), strict=True)] == [1, 1]
    assert page.complaints == []


def test_zooming_places_new_ticks(sample_page):
    page = sample_page
    page.ask(
        "Plotly.relayout(document.querySelector('.plot'), {'xaxis.range': [2, 2.5], 'yaxis.range': "
        "[-1, -0.5]}).then(() => 1)"
    )
    time.sleep(0.3)
    ticks = page.ask("document.querySelector('.plot').layout.yaxis.tickvals")
    assert len(ticks) > 2
    assert all(0.0999 <= tick <= 0.3163 for tick in ticks)
    assert page.complaints == []


def test_no_script_of_the_data_runs(new_page, folders):
    page = new_page()
    page.open(folders["evil"] / "report.html")
    settle(page)
    assert page.ask("document.querySelectorAll('script').length") == 3
    assert (
        page.ask(
            "document.querySelectorAll('img').length + "
            "document.querySelectorAll('[onerror]').length"
        )
        == 0
    )
    assert page.ask("document.title") == EVIL.replace("_{a}", "a")
    assert "<img src=x onerror=alert(1)>" in page.ask(
        "document.querySelector('.plot .xtitle').textContent"
    )
    assert page.complaints == []


def test_a_complaint_is_heard(new_page, tmp_path):
    """The twin: errors, exceptions and forbidden requests must be seen by the test above."""
    page = new_page()
    (tmp_path / "bad.html").write_text(
        "<meta http-equiv='Content-Security-Policy' content=\"img-src 'none'\"><img src='https://example.org/x.png'>"
        "<script>console.error('one')</script><script>throw new Error('two')</script>"
    )
    page.open(tmp_path / "bad.html")
    page.ask("1")
    heard = str(page.complaints)
    assert all(word in heard for word in ("one", "two", "example.org"))
