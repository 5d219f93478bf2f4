"""What the page of `keyhole explore` shows: its state, its numbers, the lines that compute them."""

import csv
import json
import math
from dataclasses import replace
from urllib.parse import parse_qsl

import numpy as np
import pytest

from keyhole.lab.explore import views
from keyhole.lab.explore.fits import (
    REPETITIONS,
    MeasuredLayer,
    MeasuredTask,
    Results,
    Run,
    reproduced_points,
)
from keyhole.lab.explore.state import VIEWS, ExploreState
from keyhole.lab.explore.views import measured_curves, refusal_to_measure, runs_of_view, show
from keyhole.lab.report.document import Chart

THEORY_VIEWS = [view for view in VIEWS if view != "tasks"]  # tasks are measured only
TARGETS = ("corr * token", "token^2 - 0.5 * query", "rotated(0.5) * token")


@pytest.fixture
def results(tmp_path):
    """Nothing is measured."""
    return Results(tmp_path)


def random_state(rng, k):
    """Each view and head distribution in turn; any sizes, heads, penalty and noise."""
    view = THEORY_VIEWS[k % len(THEORY_VIEWS)]
    # what can be turned has the form of the first target
    target = TARGETS[0] if view == "rotation" else str(rng.choice(TARGETS))
    return ExploreState(
        view=view,
        target=target,
        dim=32,
        n_samples=int(10 ** rng.uniform(1, 3)),
        n_heads=int(10 ** rng.uniform(0, 3)),
        bias=(0.0, 0.5, 1.0)[k // len(THEORY_VIEWS) % 3],
        ridge=float(10 ** rng.uniform(-4, -1)),
        noise=float(rng.choice([0.0, rng.uniform(0, 2)])),
        most_samples=int(10 ** rng.uniform(2, 3.3)),
        activation=str(rng.choice(["relu", "relu", "exp"])),
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
def test_the_lines_give_what_the_page_shows(seed, states, results):
    """Random states, biased heads among them: every number of every view, to the last bit."""
    rng, numbers = np.random.default_rng(seed), 0
    for k in range(states):
        state = random_state(rng, k)
        answer = show(state, results)
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


@pytest.mark.parametrize("view", ["curves", "needs", "spectrum", "heads"])
def test_what_takes_too_long_is_left_out_with_a_note(view, results):
    """rotated(0.5)^6 with a mean takes minutes: the rest of the view is shown in its time."""
    answer = show(ExploreState(view=view, target="rotated(0.5)^6"), results, seconds=0.5)
    assert any("takes more than" in note for note in answer.late)
    names = [str(series.name) for block in answer.blocks for series in getattr(block, "series", ())]
    rows = [row for block in answer.blocks for row in getattr(block, "rows", ())]
    assert names or rows
    assert not any("biased" in name for name in names)


def test_samples_under_noise_leave_a_tenth_of_the_variance(results):
    """The number of the page, put into the theory: the error above the noise is a tenth."""
    state = ExploreState(view="needs", noise=0.25)
    count = shown_by("needs", show(state, results))["samples, attention, ∞ heads"]
    _, error = state.question.best_ridge(int(count))
    assert (error - state.noise_variance) / state.variance == pytest.approx(0.1, rel=0.01)


def test_the_address_holds_the_state(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        state = random_state(rng, int(rng.integers(100)))
        state = replace(state, picks=((100, 20), (7, 3)), tasks=("lookup", "majority"))
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
        ({"n": "1e400"}, "n must be a whole number"),
        ({"view": "../etc/passwd"}, "a view must be one of curves"),
        ({"path": "/etc/passwd"}, "the address knows view, target"),
        ({"activation": "sigmoid"}, "an activation must be one of relu"),
        ({"picks": "1x1x1"}, "n of a pick must be"),
        ({"picks": ",".join(["10x10"] * 13)}, "at most 12 places"),
        ({"tasks": ""}, "a task must be one of average"),
        ({"tasks": "lookup,pears"}, "got 'pears'"),
        ({"tasks": "lookup,counting,pairs,maximum,majority"}, "at most 4 tasks"),
        ({"target": "corr * tokn"}, "Did you mean 'token'"),
        ({"target": "(corr + token + query)^12", "d": "64"}, "must be quick"),
        ({"target": "corr - corr + 3"}, "must vary, .* that of 3 is 0"),
        ({"target": "x" * 2000}, "at most 1000 are read"),
        ({"target": "1e300 * corr"}, "must vary, with a variance from 1e-100"),
        ({"target": "1e-300 * corr"}, "must vary, with a variance"),
    ],
)
def test_a_slip_in_the_address_is_explained(query, words):
    with pytest.raises(ValueError, match=words):
        ExploreState.read(query)


def test_finished_runs_appear_as_points_with_bars(results, seed):
    """Mean and standard error of the repetitions that are finished; of one there is no point."""
    rng, state = np.random.default_rng(seed), ExploreState(noise=0.25, bias=0.5)
    _, runs = measured_curves(state)["attention, ∞ heads, measured"]
    errors = {}
    for run in runs[:3]:
        errors[run] = rng.uniform(0.001, 0.01, len(run.sizes)).tolist()
        results.keep(run, errors[run])
    answer = show(state, Results(results.folder))  # as another process reads them
    series = {series.name: series for series in answer.blocks[0].series}
    points = series["attention, ∞ heads, measured"]
    at = {n: k for k, n in enumerate(points.x) if n == n}
    assert sorted(at) == list(REPETITIONS)  # 800 has two repetitions, the others three
    for n, k in at.items():
        values = [errors[run][run.sizes.index(n)] for run in errors if n in run.sizes]
        mean = np.mean(values) + state.noise_variance
        bar = np.std(values, ddof=1) / math.sqrt(len(values))
        assert points.y[k] == pytest.approx(mean, rel=1e-12)
        assert points.high[k] - points.y[k] == pytest.approx(bar, rel=1e-9)
    assert "MLP, ∞ wide, measured" not in series
    missing = results.missing(runs_of_view(state))
    assert len(missing) == len(runs_of_view(state)) - 3


def test_a_file_of_errors_that_was_damaged_is_named(results):
    run = runs_of_view(ExploreState())[0]
    results.keep(run, [0.1] * len(run.sizes))
    path = results.folder / "explore" / run.name
    for content in (b"{}", b"\xff", b'{"errors": [1.0]}', b'{"errors": [NaN, 1, 1, 1, 1, 1]}'):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{run.name} must hold the errors"):
            Results(results.folder).errors(run)


@pytest.mark.parametrize("setting", ["attention", "few heads", "biased", "mlp", "noise"])
def test_measured_errors_are_those_predicted(setting):
    """Twelve fits at n = 200, within the tolerance that the page states and three errors."""
    changes = {
        "attention": {},
        "few heads": {"n_heads": 20, "ridge": 1e-3},
        "biased": {"mean": 1.0},
        "mlp": {"model": "mlp"},
        "noise": {"noise": 0.5, "ridge": 1e-3},
    }
    layer = MeasuredLayer(
        model="attention",
        target="corr * token",
        dim=8,
        n_keys=4,
        n_heads=None,
        mean=0.0,
        ridge=1e-5,
        noise=0.0,
    )
    layer = replace(layer, **changes[setting])
    errors = [Run(layer, (200,), repetition).errors()[0] for repetition in range(12)]
    state = ExploreState(ridge=layer.ridge, noise=layer.noise)
    question = replace(
        state.question, mean=layer.mean, model=layer.model, n_heads=layer.n_heads or math.inf
    )
    predicted = question.curve([200])[0] - state.noise_variance
    bar = np.std(errors, ddof=1) / math.sqrt(len(errors))
    assert abs(np.mean(errors) - predicted) < 0.12 * predicted + 3 * bar


def test_a_run_gives_the_same_errors_whatever_runs_beside_it():
    state = ExploreState(dim=4, n_keys=2)
    run = next(run for run in runs_of_view(state) if run.subject.n_heads == 20)
    assert run.errors() == run.errors()
    other = replace(run, subject=replace(run.subject, mean=0.5))
    assert run.name != other.name


TABLE = {
    "model": "biased attention",
    "d": 8,
    "N": 4,
    "target": "f_{2,1}",
    "n": 100,
    "M": "inf",
    "ridge": 1e-05,
    "noise": 0.25 * ExploreState().variance,
    "predicted": 0.003,
    "measured": 0.005,
    "standard_error": 0.0001,
    "repetitions": 24,
}
"""A row of the table that `keyhole reproduce prediction` writes."""


def test_points_of_reproduce_are_shown_and_not_measured_again(results):
    charts = results.folder / "charts"
    charts.mkdir()
    with (charts / "prediction-biased-21.csv").open("w") as file:
        writer = csv.DictWriter(file, TABLE)
        writer.writeheader()
        writer.writerow(TABLE)
        writer.writerow(TABLE | {"n": 400, "M": 20})
    # tables of the same figure that are to be read by people
    (charts / "prediction-summary.csv").write_text("cells,number\nall cells,1\n")
    (charts / "prediction-outliers.csv").write_text(
        'model,d,target,measured\nattention,8,"f_{2,1}",0.00665 ± 0.0005\n'
    )
    layers = {(layer.n_heads, layer.mean, n) for layer, n in reproduced_points(results.folder)}
    assert layers == {(None, 1.0, 100), (20, 1.0, 400)}

    state = ExploreState(noise=0.25)
    _, runs = measured_curves(state)["biased, c = 1, ∞ heads, measured"]
    [point] = results.points(runs)
    assert (point.n, point.repetitions) == (100, 24)
    assert point.error == pytest.approx(0.005 - TABLE["noise"])
    # a run of that size alone is done
    at_100 = replace(runs[0], sizes=(100,))
    assert results.missing([at_100, runs[0]]) == [runs[0]]


def test_what_cannot_be_measured_says_why():
    for state, words in (
        (ExploreState(view="surface"), "click places"),
        (ExploreState(ridge=0.0), "penalty"),
        (ExploreState(view="spectrum"), "nothing to measure"),
        (ExploreState(view="heads", dim=1, target="token"), "nothing to measure"),
        (ExploreState(activation="exp"), "relu"),
        (ExploreState(view="surface", n_keys=1024, picks=((4000, 20),)), "too many keys"),
        (ExploreState(view="curves"), ""),
        (ExploreState(view="tasks", ridge=0.0), ""),
    ):
        assert words in refusal_to_measure(state)
        assert bool(words) == bool(refusal_to_measure(state))


def test_measured_places_of_the_surface_stand_on_it(results):
    state = ExploreState(view="surface", picks=((100, 20),))
    for run in runs_of_view(state):
        results.keep(run, [0.004 + 0.001 * run.repetition])
    surface, picked = show(state, results).blocks
    [(column, row, words)] = surface.points
    assert (column, row) == (4.0, pytest.approx(4.327, abs=0.01))
    assert words == picked.rows[0]["place"]
    assert words.startswith("n = 100, M = 20: measured 0.0055 ± 0.00065, predicted 0.00")


def test_a_theory_that_refuses_is_quoted_and_the_rest_is_shown(results):
    answer = show(ExploreState(dim=1, target="token"), results)
    assert any("biased" in note for note in answer.notes)
    assert any(series.name.startswith("attention") for series in answer.blocks[0].series)
    assert show(ExploreState("heads", "token", dim=1), results).blocks == []
    assert "corr^q * token" in show(ExploreState("rotation", "query^2"), results).notes[0]


def test_tasks_that_are_measured_are_drawn_and_the_others_say_so(results):
    state = ExploreState(view="tasks", tasks=("lookup", "majority"))
    runs = runs_of_view(state)
    assert {run.subject.task for run in runs} == {"lookup", "majority"}
    for run in runs:
        if run.subject.task == "lookup":
            results.keep(run, [0.5 + 0.01 * run.repetition] * len(run.sizes))
    answer = show(state, results)
    lookup, majority = answer.blocks
    assert "ReLU, biased" in {series.name for series in lookup.series}
    assert all(y == pytest.approx(0.51) for series in lookup.series for y in series.y)
    assert majority.series == []
    assert answer.notes == ["majority: nothing is measured yet. Press measure."]
    names = {}
    exec("\n".join(answer.lines), names)
    assert len(names["y"]) == 400


def test_a_learner_of_a_task_is_fitted():
    errors = Run(MeasuredTask("lookup", "relu-biased"), (50, 400), 0).errors()
    assert errors[1] < 1e-4 < errors[0] < 0.1


def test_few_heads_are_predicted_as_drawn_where_the_sets_are_small(results):
    # 1,000 sets of 780 keys in 63 dimensions took 775 MiB
    few_keys = show(ExploreState(dim=63, n_keys=10, n_heads=1, bias=0.0), results)
    many_keys = show(ExploreState(dim=63, n_keys=780, n_heads=1, bias=0.0), results)
    assert "attention, 1 heads as drawn" in [s.name for s in few_keys.blocks[0].series]
    assert "sphere_sets" not in " ".join(many_keys.lines)


def test_a_run_is_kept_as_plain_numbers(results):
    run = runs_of_view(ExploreState())[0]
    results.keep(run, [0.1] * len(run.sizes))
    record = json.loads((results.folder / "explore" / run.name).read_text())
    assert record["errors"] == [0.1] * 6
    assert record["subject"]["target"] == "corr * token"


def test_every_view_has_a_title():
    assert set(views.TITLES) == set(VIEWS)
