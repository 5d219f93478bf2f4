"""What the page of `keyhole explore` shows: its state, its numbers, the lines that compute them."""

import shutil
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
import pytest

from keyhole.lab.cells import Store, StoreError
from keyhole.lab.explore import server, views
from keyhole.lab.explore.server import Bench
from keyhole.lab.explore.views import MEANS, QUICK, VIEWS, ExploreState, cells_of, show, sweeps
from keyhole.lab.figures import prediction
from keyhole.lab.report.document import Chart
from keyhole.lab.report.html import one_page
from keyhole.theory import blocks

THEORY_VIEWS = [view for view in VIEWS if view != "tasks"]  # tasks are measured only
TARGETS = ("corr * token", "token^2 - 0.5 * query", "rotated(0.5) * token")


def random_state(rng, k):
    """Each view and head distribution in turn, few targets, whose spectra are remembered; any
    sizes, heads, penalty and noise.
    """
    return ExploreState(
        view=THEORY_VIEWS[k % len(THEORY_VIEWS)],
        target=TARGETS[0]
        if k % len(THEORY_VIEWS) == 5
        else str(rng.choice(TARGETS)),  # what can be turned has that form
        dim=32,
        n_samples=int(10 ** rng.uniform(1, 3)),
        n_heads=int(10 ** rng.uniform(0, 3)),
        bias=(0.0, 0.5, 1.0)[k // len(THEORY_VIEWS) % 3],
        ridge=float(10 ** rng.uniform(-4, -1)),
        noise=float(rng.choice([0.0, rng.uniform(0, 2)])),
        most_samples=int(10 ** rng.uniform(2, 3.3)),
    )


def shown_by(view, answer):
    """Names and numbers on the page."""
    first = answer.blocks[0]
    if view == "needs":
        return {row["to have a tenth of Var f* left"]: row["number"] for row in first.rows}
    if view == "surface":
        found = {}
        for row in first.rows:
            found.setdefault(f"{str(row['M']).replace(',', '')} heads", []).append(row["error"])
        return found
    if view == "heads":
        return {
            f"c = {c:g}": [series.y[k] for series in first.series]
            for k, c in enumerate(first.series[0].x)
        }
    if view == "rotation":
        return {
            f"{s.name}, γ = {x:g}": [y] for s in first.series for x, y in zip(s.x, s.y, strict=True)
        }
    charts = [
        block for block in answer.blocks if isinstance(block, Chart) and block.name != "levels"
    ]
    return {series.name: list(series.y) for chart in charts for series in chart.series}


def computed_by(answer):
    names = {}
    exec("\n".join(answer.lines), names)
    return names["shown"]


@pytest.mark.parametrize("states", [18, pytest.param(200, marks=pytest.mark.slow)])
def test_the_lines_give_what_the_page_shows(seed, states):
    """Random states, biased heads among them: every number of every view, to the last bit."""
    rng, numbers = np.random.default_rng(seed), 0
    for k in range(states):
        state = random_state(rng, k)
        answer = show(state, {})
        shown, computed = shown_by(state.view, answer), computed_by(answer)
        assert set(computed) == set(shown), state
        for name, values in computed.items():
            size = len(np.atleast_1d(shown[name]))
            assert np.array_equal(np.atleast_1d(shown[name]), np.atleast_1d(values)[:size]), (
                state,
                name,
            )
            numbers += size
    assert numbers > 20 * states


def test_what_is_slow_comes_later():
    """An answer that has no time has what is quick, and says that it pays to ask again."""
    state = ExploreState(bias=0.37, dim=7, target="corr * token")
    token = views.answer_by.set(0.0)
    try:
        first = show(state, {})
    finally:
        views.answer_by.reset(token)
    assert first.pending
    names = {series.name for series in first.blocks[0].series}
    assert "attention, ∞ heads" in names
    assert not any("biased" in name for name in names)
    later = show(state, {})
    assert not later.pending
    assert names < {series.name for series in later.blocks[0].series}
    assert "biased, c = 0.37, ∞ heads" in computed_by(later)


def test_the_spectrum_of_a_mean_comes_later_too():
    state = ExploreState(view="spectrum", bias=0.41, dim=6, target="corr * token")
    token = views.answer_by.set(0.0)
    try:
        first = show(state, {})
    finally:
        views.answer_by.reset(token)
    assert first.pending
    assert [series.name for series in first.blocks[0].series] == ["zero-mean heads"]
    later = show(state, {})
    assert not later.pending
    assert [series.name for series in later.blocks[0].series] == [
        "zero-mean heads",
        "biased heads, c = 0.41",
    ]


@pytest.mark.parametrize("target", ["rotated(0.5)^6", "rotated(0.5)^4 * token"])
@pytest.mark.parametrize("view", ["curves", "needs", "spectrum", "heads"])
def test_what_would_take_minutes_is_not_begun(target, view, monkeypatch):
    """Its cost is known before, and the rest of the view is shown."""

    def never(*arguments):
        raise AssertionError("a joining was computed")

    monkeypatch.setattr(blocks, "crossed_joinings", never)
    answer = show(ExploreState(view=view, target=target), {})
    assert any("s are allowed here" in note for note in answer.notes)
    assert answer.blocks


def test_the_address_holds_the_state(seed):
    from urllib.parse import parse_qsl

    rng = np.random.default_rng(seed)
    for _ in range(50):
        state = random_state(rng, int(rng.integers(100)))
        state = ExploreState(**{**vars(state), "picks": ((100, 20), (7, 3))})
        assert ExploreState.read(dict(parse_qsl(state.address))) == state
    assert ExploreState().address == ""


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"n": "ten"}, "n must be a whole number from 2 to 1e.07: got 'ten'"),
        ({"d": "2.5"}, "d must be a whole number"),
        ({"d": "100000"}, "d must be a whole number from 1 to 512"),
        ({"ridge": "-1"}, "ridge must be a number from 0"),
        ({"noise": "nan"}, "noise must be a number"),
        ({"noise": "inf"}, "noise must be a number"),
        ({"n": "1e400"}, "n must be a whole number"),
        ({"view": "../etc/passwd"}, "a view must be one of curves"),
        ({"path": "/etc/passwd"}, "the address knows view, target"),
        ({"picks": "1x1x1"}, "n of a pick must be"),
        ({"picks": ",".join(["10x10"] * 13)}, "at most 12 places"),
        ({"target": "corr * tokn"}, "Did you mean 'token'"),
        ({"target": "(corr + token + query)^10"}, "must be quick"),
        ({"target": "corr - corr + 3"}, "must vary: 3 has no variance"),
        ({"target": "x" * 2000}, "at most 1000 are read"),
        (
            {"target": "1e300 * corr"},
            r"must have a variance from 1e-100 to 1e\+100: that of 1e\+300 \* corr is about",
        ),
        ({"target": "1e-300 * corr"}, "must have a variance"),
        ({"target": "rotated(1e200)"}, "is not finite"),
        ({"target": "1e300 - 1e-300"}, "has no variance"),
    ],
)
def test_a_slip_in_the_address_is_explained(query, words):
    with pytest.raises(ValueError, match=words):
        ExploreState.read(query)


def test_measured_points_are_the_cells_of_reproduce():
    """At a setting of the quick preset, the sizes of the preset are its very cells."""
    state = ExploreState(target="corr * token", dim=8, n_keys=4, n_heads=20, ridge=1e-5)
    ours = set(cells_of(state))
    theirs = {
        c
        for c in prediction.cells(QUICK)
        if (c.target, c.dim, c.n_keys, c.ridge, c.noise) == ("corr * token", 8, 4, 1e-5, 0.0)
    }
    grid = {c for c in theirs if c.model != "mlp" and not (c.model == "biased" and c.n_heads)}
    assert grid
    assert grid <= ours
    assert {c.mean for c in cells_of(replace(state, bias=0.5)) if c.model == "biased"} == {0.5}
    assert {c.mean for c in cells_of(replace(state, view="heads")) if c.model == "biased"} == set(
        MEANS[1:]
    )
    sizes = {n for _, sweep in sweeps(state).values() for n in sweep.x}
    assert sizes == {25, 50, 100, 200, 400, 800}


def test_finished_cells_appear_as_points_with_bars(seed, tmp_path: Path):
    """The repetitions in the store make the mean of a size and its standard error; of one there is
    no point.
    """
    rng, state = np.random.default_rng(seed), ExploreState(noise=0.25, bias=0.5)
    finished = {("attention", 25): 8, ("attention", 200): 3, ("biased", 400): 2, ("biased", 800): 1}
    put = {}
    with Store(tmp_path / "cells.sqlite") as store:
        for cell in cells_of(state):
            own = cell.model, cell.n_samples
            if cell.n_heads is None and len(put.setdefault(own, [])) < finished.get(own, 0):
                put[own].append(float(rng.uniform(0.001, 0.01)))
                store.put(cell, {"mean_square": put[own][-1]}, 0.1)
    bench = Bench(tmp_path / "cells.sqlite")
    series = {s.name: s for s in show(state, bench.results(cells_of(state))).blocks[0].series}
    offer = bench.offer(state)
    bench.close()
    assert offer["missing"] == offer["cells"] - sum(finished.values())
    shown = {}
    for name, model in (
        ("attention, ∞ heads", "attention"),
        ("biased, c = 0.5, ∞ heads", "biased"),
    ):
        points = series[f"{name}, measured"]
        shown |= {
            (model, n): (y, h - y)
            for n, y, h in zip(points.x, points.y, points.high, strict=True)
            if n == n
        }
    assert set(shown) == {own for own, count in finished.items() if count > 1}
    for own, (mean, bar) in shown.items():
        values = np.array(put[own])
        np.testing.assert_allclose(mean, values.mean() + state.noise_variance, rtol=1e-12)
        np.testing.assert_allclose(bar, values.std(ddof=1) / np.sqrt(len(values)), rtol=1e-9)


def test_what_cannot_be_measured_says_why(tmp_path: Path):
    bench = Bench(tmp_path / "cells.sqlite")
    for state, words in (
        (ExploreState(view="surface"), "click places"),
        (ExploreState(ridge=0.0), "penalty"),
        (ExploreState(view="surface", dim=500, n_keys=1, picks=((4000, 4096),)), "allowed"),
        (ExploreState(view="spectrum"), "nothing to measure"),
    ):
        assert words in bench.offer(state)["refused"]
        with pytest.raises(ValueError, match="this cannot be measured"):
            bench.start(state)
    bench.close()


def test_a_theory_that_refuses_is_quoted_and_the_rest_is_shown():
    answer = show(ExploreState(dim=1, target="token"), {})
    assert any("biased" in note for note in answer.notes)
    assert any(series.name.startswith("attention") for series in answer.blocks[0].series)
    assert show(ExploreState("heads", "token", dim=1), {}).blocks == []
    assert "corr^q * token" in show(ExploreState("rotation", "query^2"), {}).notes[0]


def test_a_page_alone_carries_its_rows():
    import base64
    import re

    from keyhole.lab.report.document import Report, Section

    answer = show(ExploreState("surface", dim=3, most_samples=1000), {})
    page = one_page(Report("t", "l", [Section("s", "t", "", answer.blocks)]))
    [content] = re.findall(r'href="data:text/csv;base64,([^"]+)"', page)
    lines = base64.b64decode(content).decode().splitlines()
    assert lines[0] == "n,M,error,over Var f*"
    assert len(lines) == 1 + len(answer.blocks[0].rows)
    assert "src=" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


@pytest.fixture
def fits_of_one(monkeypatch):
    """Measuring writes a result for every cell, at once."""

    def run(plan, store, n_workers, report):
        for cell in plan.missing:
            store.put(cell, {"mean_square": 1.0}, 0.1)
        report([cell.key for cell in plan.missing])

    monkeypatch.setattr(server, "run_local", run)


def measured(bench, state):
    """Measure, and wait until that has ended."""
    bench.start(state)
    bench._thread.join(30)
    return bench.news()


def test_a_store_that_vanished_is_made_anew(tmp_path, fits_of_one):
    """What is measured afterwards is there."""
    state = ExploreState(dim=4)
    folder = tmp_path / "store"
    bench = Bench(folder / "cells.sqlite")
    measured(bench, state)
    assert bench.offer(state)["missing"] == 0
    shutil.rmtree(folder)
    offer = bench.offer(state)
    assert offer["missing"] == offer["cells"] > 0
    assert "opened anew" in bench.news()["message"]
    news = measured(bench, state)
    assert bench.offer(state)["missing"] == 0
    assert news["finished"] == offer["cells"]
    assert len(bench.results(cells_of(state))) == offer["cells"]
    bench.close()


def test_a_store_that_vanishes_while_measuring_ends_the_measurement(tmp_path, monkeypatch):
    def run(plan, store, n_workers, report):
        report([])
        shutil.rmtree(tmp_path / "store")
        for _ in range(100):
            report([])
        raise AssertionError("it was not noticed")

    monkeypatch.setattr(server, "run_local", run)
    bench = Bench(tmp_path / "store" / "cells.sqlite")
    bench.start(ExploreState(dim=4))
    bench._thread.join(30)
    assert "was removed or replaced while it was written" in bench._message
    assert bench.news()["running"] is False
    bench.close()


def test_a_store_that_cannot_be_made_anew_is_told_in_words(tmp_path):
    bench = Bench(tmp_path / "store" / "cells.sqlite")
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("a file in the place of the folder")
    with pytest.raises(StoreError, match="must stay where it is"):
        bench.offer(ExploreState())
    assert "must stay where it is" in bench.news()["message"]
    bench.close()


def test_tasks_are_chosen_in_the_address_and_measured_by_the_bench(tmp_path: Path):
    state = ExploreState.read({"view": "tasks", "tasks": "lookup,majority"})
    assert state.tasks == ("lookup", "majority")
    assert ExploreState.read(dict(parse_qsl(state.address))) == state
    cells = cells_of(state)
    assert {cell.target for cell in cells} == {"lookup", "majority"}
    assert {cell.learner for cell in cells} == {"task"}
    bench = Bench(tmp_path / "cells.sqlite")
    offer = bench.offer(replace(state, ridge=0.0))
    bench.close()
    assert offer["refused"] == ""
    assert offer["missing"] == len(cells)
    assert offer["seconds"] < 60


def test_the_tasks_that_are_measured_are_drawn_and_the_others_say_so():
    state = ExploreState(view="tasks", tasks=("lookup", "majority"))
    results = {
        cell: {"error": 0.5 + 0.01 * cell.repetition}
        for cell in cells_of(state)
        if cell.target == "lookup"
    }
    answer = show(state, results)
    lookup, majority = answer.blocks
    assert "ReLU, biased" in {series.name for series in lookup.series}
    assert all(y == pytest.approx(0.51) for series in lookup.series for y in series.y)
    assert majority.series == []
    assert answer.notes == ["majority: nothing is measured yet. Press measure."]
    names = {}
    exec("\n".join(answer.lines), names)
    assert len(names["y"]) == 400


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("", "a task must be one of average"),
        ("lookup,pears", "got 'pears'"),
        ("lookup,counting,pairs,maximum,majority", "at most 4 tasks"),
    ],
)
def test_unknown_and_too_many_tasks_are_refused(tasks, message):
    with pytest.raises(ValueError, match=message):
        ExploreState.read({"view": "tasks", "tasks": tasks})


def test_an_activation_moves_the_curves_and_few_heads_are_predicted_as_drawn():
    few = views.curves(ExploreState(n_heads=10, bias=0.0), {})
    exp = views.curves(ExploreState(n_heads=10, bias=0.0, activation="exp"), {})
    names = [series.name for series in few.blocks[0].series]
    assert "attention, 10 heads as drawn" in names
    for name in ("attention, ∞ heads", "attention, 10 heads as drawn"):
        relu_series, exp_series = (
            next(series for series in view.blocks[0].series if series.name == name)
            for view in (few, exp)
        )
        assert list(relu_series.y) != list(exp_series.y)
    assert ExploreState.read({"activation": "exp"}).address == "activation=exp"
    with pytest.raises(ValueError, match="an activation must be one of relu"):
        ExploreState.read({"activation": "sigmoid"})


def test_heads_are_not_drawn_for_more_tokens_than_a_page_can_wait_for():
    # 1,000 sets of 780 keys in 63 dimensions took 775 MiB (fuzz seed 307, case 259214)
    few_keys = show(ExploreState(dim=63, n_keys=10, n_heads=1), {})
    many_keys = show(ExploreState(dim=63, n_keys=780, n_heads=1), {})
    assert "sphere_sets" in " ".join(few_keys.lines)
    assert "sphere_sets" not in " ".join(many_keys.lines)
