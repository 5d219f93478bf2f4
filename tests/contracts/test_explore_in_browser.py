"""The page of `keyhole explore` in a real browser: controls, errors, measuring, saving, on a desk
and on a phone.
"""

import json
import threading
import time
from urllib.parse import parse_qsl

import pytest
from chromium import NAMES, chromium, find_chromium

from keyhole.lab.explore.fits import Results
from keyhole.lab.explore.server import ExploreServer
from keyhole.lab.explore.state import ExploreState
from keyhole.lab.explore.views import measured_curves

pytestmark = pytest.mark.skipif(
    find_chromium() is None,
    reason=f"no browser: install Chromium to open the page in it (looked for {', '.join(NAMES)})",
)
DRAWN = (
    "document.querySelector('#shown .plot svg.main-svg') && "
    "document.getElementById('working').hidden"
)
SERIES = (
    "document.querySelector('[data-chart={}]').data.filter((t) => t.x.length > 2).map((t) => [t.x, "
    "t.y])"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = ExploreServer(tmp_path_factory.mktemp("explore"))
    thread = threading.Thread(target=found.run, daemon=True)
    thread.start()
    yield found
    found.stop()
    thread.join(20)


@pytest.fixture(scope="module")
def browser():
    with chromium() as new:
        yield new


@pytest.fixture
def new_page(browser):
    """Tabs that are left at the end: a browser keeps six connections to a server, and each tab
    listens on one.
    """
    pages = []

    def new():
        pages.append(browser())
        return pages[-1]

    yield new
    for page in pages:
        page.call("Page.navigate", url="about:blank")


def visit(page, server, query="", width=1280, shade="light"):
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=width < 600,
    )
    page.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": shade}]
    )
    page.call("Page.navigate", url=f"{server.address}?{query}")
    page.wait(f"document.readyState === 'complete' && {DRAWN}")


def put(page, name, value):
    """Type into a box, or move a slider, as a person does."""
    page.ask(
        f"((e) => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('input')) "
        f"}})({element(name)})"
    )


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def element(name):
    return f"document.getElementById('{name}')"


def address(page):
    page.ask("new Promise((done) => setTimeout(done, 200))")
    return page.ask("location.search")


def test_every_control_changes_what_it_should(new_page, server):
    page = new_page()
    visit(page, server, "c=0&d=4")
    shown = [page.ask(SERIES.format("curves"))]
    for name, value in {
        "ridge": "0.01",
        "noise": "0.5",
        "M": "3",
        "N": "8",
        "d": "5",
        "top": "2000",
    }.items():
        put(page, name, value)
        until(lambda: page.ask(SERIES.format("curves")) != shown[-1])
        shown.append(page.ask(SERIES.format("curves")))
    assert address(page) == "?M=3&d=5&N=8&c=0&ridge=0.01&noise=0.5&top=2000"
    put(page, "n", "77")
    page.wait("document.querySelector('#shown .table figcaption').textContent === 'n = 77'")
    put(page, "n-slider", "1000")
    page.wait(f"{element('n')}.value === '100000'")
    put(page, "family", "token")
    put(page, "power", "2")
    page.wait(f"{element('target')}.value === 'token^2'")
    page.wait("document.querySelector('#shown figcaption').textContent.includes('f* = token^2')")
    assert page.ask(f"{element('gamma-pair')}.hidden")
    put(page, "c", "0.5")
    page.wait("document.querySelector('#shown .legend').textContent.includes('biased, c = 0.5')")
    # reload keeps the state
    before = address(page), page.ask(SERIES.format("curves"))
    page.call("Page.reload")
    page.wait(f"document.readyState === 'complete' && {DRAWN}")
    assert (address(page), page.ask(SERIES.format("curves"))) == before
    assert page.ask(f"{element('family')}.value") == "token"
    # what has no name is no control
    assert (
        page.ask(
            "[...document.querySelectorAll('input, select')].filter((e) => !e.labels.length && "
            "!e.ariaLabel).length"
        )
        == 0
    )
    assert page.complaints == []
    assert all(url.startswith((server.address, "data:")) for url in page.requests)


def test_typed_nonsense_is_explained_under_the_box(new_page, server):
    page = new_page()
    visit(page, server, "c=0&d=4")
    put(page, "target", "corr * <img src=x onerror=alert(1)>")
    page.wait(
        f"{element('target-error')}.textContent.includes('cannot read the target at character 8')"
    )
    assert page.ask(f"{element('target')}.ariaInvalid") == "true"
    assert page.ask("document.images.length") == 0
    put(page, "target", "corr * token * 2")
    page.wait(f"{element('target-error')}.textContent === ''")
    page.wait(f"{element('expanded')}.textContent === '= 2 * corr * token'")
    put(page, "d", "many")
    page.wait(f"{element('problem')}.textContent.includes('d must be a whole number')")
    # the browser itself notes that a request was refused: nothing else may be on the console
    assert all("422" in str(complaint) for complaint in page.complaints)


@pytest.mark.parametrize(
    ("view", "width", "shade"),
    [("surface", 1280, "dark"), ("spectrum", 390, "light"), ("heads", 390, "dark")],
)
def test_views_are_drawn_in_silence(new_page, server, view, width, shade):
    page = new_page()
    visit(page, server, f"view={view}&c=0&d=8", width, shade)
    assert page.ask("document.querySelector('[aria-selected=true]').dataset.view") == view
    assert page.ask("document.documentElement.scrollWidth") <= width
    dark = page.ask("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert dark == (shade == "dark")
    assert (
        page.ask(
            "document.querySelectorAll('#shown .scatterlayer .trace, #shown .heatmaplayer "
            "image').length"
        )
        > 0
    )
    page.ask("document.querySelector('[aria-selected=true]').focus()")
    page.call(
        "Input.dispatchKeyEvent",
        type="keyDown",
        key="ArrowRight",
        code="ArrowRight",
        windowsVirtualKeyCode=39,
    )
    page.wait(f"document.querySelector('[aria-selected=true]').dataset.view !== '{view}'")
    assert page.complaints == []


@pytest.mark.parametrize(("width", "folded"), [(1280, False), (390, True)])
def test_settings_fold_away_where_there_is_little_room(new_page, server, width, folded):
    """A line says what they are; a click opens them, and the page is no wider than the screen."""
    page = new_page()
    visit(page, server, "c=0&d=4", width)
    is_visible = f"{element('family')}.checkVisibility()"
    assert page.ask(f"{element('fold')}.open") != folded
    assert page.ask(is_visible) != folded
    assert page.ask("getComputedStyle(document.querySelector('summary')).display") == (
        "block" if folded else "none"
    )
    line = page.ask(f"{element('settings-line')}.textContent")
    assert line == "corr * token, n = 400, M = 20, d = 4, N = 4, c = 0"
    if folded:
        page.ask("document.querySelector('#fold > summary').click()")
        page.wait(is_visible)
    assert page.ask("document.documentElement.scrollWidth") <= width
    assert page.complaints == []


def test_stop_ends_a_measurement_that_runs(new_page, server):
    page = new_page()
    visit(page, server, "view=surface&c=0&d=400&N=6&n=4000&M=2000")
    page.ask(f"{element('measure')}.click()")
    page.wait(f"!{element('stop')}.hidden")
    page.ask(f"{element('stop')}.click()")
    page.wait(f"{element('stop')}.hidden && {element('status')}.textContent === 'stopped'")
    assert page.complaints == []


def test_tasks_are_chosen_by_boxes_and_measured(new_page, server):
    page = new_page()
    visit(page, server, "view=tasks&tasks=lookup", 390)
    assert page.ask(f"{element('numbers')}.hidden")
    assert not page.ask(f"{element('tasks')}.hidden")
    checked = "[...document.querySelectorAll('#tasks input:checked')].map((box) => box.value)"
    assert page.ask(f"{checked}.join()") == "lookup"
    page.ask("document.querySelector('#tasks input[value=pairs]').click()")
    page.wait("document.querySelectorAll('#shown .plot').length === 2")
    page.wait("location.search.includes('lookup%2Cpairs')")
    page.wait(f"!{element('measure')}.disabled")
    assert page.ask("document.documentElement.scrollWidth") <= 390
    assert page.complaints == []


def test_measured_points_are_drawn_in_every_tab_and_saved(new_page, server, tmp_path):
    """Six sizes of three models: another tab sees them, and so does a saved view."""
    query = "d=8&N=4&ridge=0.001&c=0&M=20"
    page, other = new_page(), new_page()
    visit(page, server, query)
    page.wait(f"!{element('measure')}.disabled")
    page.ask(f"{element('measure')}.click()")
    visit(other, server, query)
    page.call("Page.bringToFront")  # a tab in the background does not ask
    chart = "document.querySelector('[data-chart=curves]').data"
    points = f"{chart}.filter((t) => t.error_y).map((t) => [t.x, t.y])"
    page.wait(f"{element('status')}.textContent === 'all measured'", 200)
    full = (
        f"{points}.length === 3 && {points}.every((p) => p[0].filter((x) => x !== null).length === "
        "6)"
    )
    page.wait(full)
    other.call("Page.bringToFront")
    other.wait(full)
    until(lambda: page.ask(points) == other.ask(points))

    # what is drawn is what the files hold
    state = ExploreState.read(dict(parse_qsl(query)))
    results = Results(server.explorer.folder)
    kept = []
    for _, runs in measured_curves(state).values():
        kept += [[point.n, point.error] for point in results.points(runs)]
    drawn = []
    for x, y in page.ask(points):
        drawn += [[n, error] for n, error in zip(x, y, strict=True) if n is not None]
    assert sorted(drawn) == sorted(kept)
    assert len(kept) == 18

    # the saved view, from disk
    page.ask(
        "fetch(document.getElementById('save').href).then((r) => r.text()).then((t) => { "
        "window.saved = t })"
    )
    (tmp_path / "view.html").write_text(page.ask("window.saved"))
    live = page.ask(SERIES.format("curves"))
    alone = new_page()
    alone.open(tmp_path / "view.html")
    alone.wait("document.documentElement.dataset.charts === 'done'")
    assert alone.ask(SERIES.format("curves")) == live
    assert alone.complaints == page.complaints == other.complaints == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in alone.requests)


def test_a_click_on_the_surface_chooses_a_place(new_page, server, monkeypatch):
    asked = []
    monkeypatch.setattr(server.explorer.measurement, "start", asked.append)
    page = new_page()
    visit(page, server, "view=surface&c=0&d=4&ridge=0.001")
    page.ask(
        "document.querySelector('[data-chart=surface]').emit('plotly_click', {points: [{x: 2, y: "
        "3}]})"
    )
    until(lambda: asked)
    [runs] = asked
    assert {(run.sizes, run.subject.n_heads) for run in runs} == {((32,), 8)}
    assert "picks=32x8" in address(page)
    assert page.complaints == []
