"""The report in a real browser: every chart drawn, nothing on the console, no request, on a desk
and on a phone.
"""

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
        assert plot["height"] > 100, plot
        assert plot["marks"] or name == "not_finite", plot
    assert page.ask("document.documentElement.scrollWidth") <= width
    assert page.complaints == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in page.requests)
    dark = page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert dark == (shade == "dark")


def test_a_legend_hides_its_curves_and_they_stay_hidden(new_page, folders):
    page = new_page()
    page.open(folders["sample"] / "report.html")
    settle(page)
    shown = (
        "document.querySelector('.plot').data"
        ".filter((trace) => trace.visible !== 'legendonly').length"
    )
    before = page.ask(shown)
    toggle = "document.querySelector('.plot .legendtoggle')"
    for event in ("mousedown", "mouseup"):
        page.ask(f"{toggle}.dispatchEvent(new MouseEvent('{event}', {{bubbles: true}}))")
    page.wait(f"{shown} < {before}")
    hidden = page.ask(shown)
    page.ask("keyhole.draw(document.querySelector('.plot')).then(() => 1)")
    assert page.ask(shown) == hidden
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
