"""`keyhole reproduce tasks`: its learners, its matrix, and verdicts that can fail."""

from dataclasses import replace

import numpy as np
import pytest
from paper import paper_regressor

from keyhole.lab import task_learners
from keyhole.lab.curves import Curve, state_of
from keyhole.lab.figures import tasks
from keyhole.lab.figures.tasks import FINDINGS, TaskResults, checks_of
from keyhole.lab.reproduce import choose_figures
from keyhole.lab.task_learners import (
    FROZEN,
    LEARNERS,
    SensitivityCell,
    TaskCell,
    TaskDraw,
    TaskTheoryCell,
    distinct_settings,
    find_task,
    is_defined,
)
from keyhole.theory.tasks import TASKS

TINY = tasks.Config(
    learners=tasks.COLUMNS,
    sizes=(10, 20),
    descent_sizes=(10, 20),
    network_sizes=(10, 20),
    repetitions=2,
    n_heads=4,
    n_test=40,
    predicted=(),
    theory_sets=50,
    sensitivity_keys=(4, 16),
)
CELL = TaskCell(
    task="lookup",
    learner="relu",
    sizes=(60,),
    most_samples=60,
    n_heads=16,
    n_test=80,
    seed=0,
    repetition=0,
)


def error_of(cell):
    [row] = cell.rows()
    return row["error"]


# ---------------------------------------------------------------- learners


def test_frozen_heads_are_the_layer_of_the_paper(seed):
    cell = replace(CELL, seed=seed)
    draw = TaskDraw.of("lookup", 60, 80, seed, 0)
    model = paper_regressor(n_heads=16, random_state=draw.fit_seed).fit(draw.train, draw.y)
    assert error_of(cell) == pytest.approx(draw.error(model.predict(draw.test)), rel=1e-9)


def test_of_several_settings_the_one_with_the_least_leave_one_out_error_is_taken(seed):
    cell = replace(CELL, learner="softmax-biased", task="nearest-key", seed=seed)
    draw = TaskDraw.of("nearest-key", 60, 80, seed, 0)
    fits = [
        setting.regressor(16, draw.fit_seed).fit(draw.train, draw.y)
        for setting in FROZEN["softmax-biased"]
    ]
    best = fits[int(np.argmin([model.loo_error_ for model in fits]))]
    assert error_of(cell) == draw.error(best.predict(draw.test))


def test_smaller_sizes_are_the_first_samples_of_the_same_draw(seed):
    cell = replace(CELL, learner="linear", sizes=(30, 60), seed=seed)
    alone = replace(cell, sizes=(30,), most_samples=30)
    assert cell.rows()[0]["error"] == pytest.approx(error_of(alone), rel=1e-9)


def test_pooled_statistics_know_the_maximum_and_not_the_lookup(seed):
    cell = replace(CELL, learner="pooled", seed=seed)
    assert error_of(replace(cell, task="maximum")) < 1e-6
    assert error_of(cell) > 0.5


def test_learned_heads_learn_a_softmax_head(seed):
    cell = replace(
        CELL, task="similarity", learner="learned", sizes=(150,), most_samples=150, n_heads=32
    )
    assert error_of(replace(cell, seed=seed)) < 0.2


@pytest.mark.parametrize("learner", ["trained", "deep-sets"])
def test_networks_learn_and_repeat_themselves(learner, seed, monkeypatch):
    pytest.importorskip("torch")
    from keyhole.lab import trained_networks

    monkeypatch.setattr(trained_networks, "STEPS", 300)
    cell = replace(CELL, task="maximum", learner=learner, sizes=(300,), most_samples=300, seed=seed)
    error = error_of(cell)
    assert error < 0.7
    assert error == error_of(cell)


def test_without_a_query_a_mean_does_nothing():
    assert not is_defined("relu-biased", "maximum")
    assert is_defined("relu-biased", "lookup")
    batch, _ = find_task("maximum").draw(5)
    [zero_mean] = distinct_settings("linear", batch)
    biased = FROZEN["linear"][1]
    assert zero_mean == FROZEN["linear"][0]
    np.testing.assert_array_equal(
        zero_mean.features(batch, 3, seed=1), biased.features(batch, 3, seed=1)
    )


@pytest.mark.parametrize(("learner", "task"), [("relu", "average"), ("softmax", "counting")])
def test_theory_predicts_frozen_heads(learner, task):
    """Measured: 5 repetitions, whose mean has a standard error of 3 to 5 %."""
    cell = replace(
        CELL, task=task, learner=learner, sizes=(200,), most_samples=200, n_heads=64, n_test=600
    )
    errors = [error_of(replace(cell, repetition=repetition)) for repetition in range(5)]
    theory = TaskTheoryCell(task, learner, sizes=(200,), n_heads=64, n_sets=600, seed=0)
    [row] = theory.rows()
    assert row["predicted"] == pytest.approx(np.mean(errors), rel=0.3)


def test_word_sensitivity_falls_for_flattened_features_and_stays_for_sharp_softmax(seed):
    def sensitivity(features, n_keys):
        cell = SensitivityCell(
            features, dim=8, n_keys=n_keys, n_heads=16, n_sets=30, seed=seed, repetition=0
        )
        [row] = cell.rows()
        return row["sensitivity"]

    assert sensitivity("mlp", 8) > 2 * sensitivity("mlp", 128)
    assert sensitivity("softmax-biased", 128) > 5 * sensitivity("relu", 128)


# ---------------------------------------------------------------- verdicts


def knows_nothing(draw, sizes, n_heads):
    """A learner that predicts the mean of its labels."""
    return [draw.error(np.full(len(draw.truth), draw.y[:n].mean())) for n in sizes]


def knows_all(draw, sizes, n_heads):
    """A learner that looks at the labels of the test sets."""
    return [0.0 for _ in sizes]


def rows_with(learner, sensitivity, monkeypatch):
    """The rows of all cells, if every learner were one and the same wrong one."""
    monkeypatch.setattr(task_learners, "LEARNERS", dict.fromkeys(LEARNERS, learner))
    monkeypatch.setattr(
        task_learners, "word_sensitivity", lambda features, n_keys, *_: sensitivity(n_keys)
    )
    monkeypatch.setattr(tasks, "has_torch", lambda: True)
    return [row for cell in tasks.cells(TINY) for row in cell.rows()]


def test_every_verdict_fails_on_a_deliberately_wrong_learner(monkeypatch):
    """Each part of each finding is refuted by a learner that knows nothing or by one that cheats.

    The negative controls are what refutes the one that cheats.
    """
    nothing = rows_with(knows_nothing, lambda n_keys: 1.0, monkeypatch)
    everything = rows_with(knows_all, lambda n_keys: 1 / n_keys**2, monkeypatch)
    assert list(FINDINGS) == [*TASKS, tasks.SENSITIVITY]
    worlds = [TaskResults.of(rows) for rows in (nothing, everything)]
    states = {}
    for task, findings in FINDINGS.items():
        parts = [[finding.check(task, measured) for finding in findings] for measured in worlds]
        assert None not in parts[0] + parts[1]  # all were measured
        for of_nothing, of_everything in zip(*parts, strict=True):
            assert not (of_nothing.is_shown and of_everything.is_shown), (task, of_nothing.words)
        states[task] = [state_of([check.is_shown for check in checks]) for checks in parts]
        # so that no verdict holds for both
        assert states[task] != ["holds", "holds"]

    # a learner that cheats is caught by the negative controls, one that knows nothing elsewhere
    for task in ("majority", "pairs", "counting"):
        assert states[task][1] != "holds"
    for task in ("similarity", "lookup", "counting", "maximum", "two-hops"):
        assert states[task][0] != "holds"
    section = tasks.section(TINY, everything)
    assert section.verdict.state != "holds"
    assert "majority (does not show)" in section.verdict.sentence


def results_of(curves):
    return TaskResults(curves=curves, predicted={}, sensitivities={})


def test_one_repetition_is_not_sure():
    curve = Curve(np.array([10.0]), np.zeros((1, 1)))
    [check] = checks_of("lookup", results_of({("lookup", "relu"): curve}))
    assert check.is_shown is None
    assert check.text().startswith("?")


def test_a_finding_about_a_learner_that_was_not_run_is_not_tested():
    assert checks_of("lookup", results_of({})) == []
    assert state_of([]) == "not tested"


# ---------------------------------------------------------------- the matrix


def test_the_matrix_reads_samples_between_sizes_and_marks_what_is_not_learned():
    falling = Curve(np.array([100.0, 400.0]), np.array([[0.4, 0.1], [0.4, 0.1]]))
    # 0.4 → 0.1 on logarithmic axes reaches 0.2 half-way
    assert tasks.samples_for(falling, floor=0.1, seed=0).value == pytest.approx(200)
    assert tasks.samples_for(falling, floor=0.5, seed=0).value == 100
    assert tasks.samples_for(falling, floor=-0.2, seed=0).value is None
    row = tasks._matrix_row("lookup", "relu", falling, floor=-0.05, seed=0)
    assert tasks.matrix_entry(row)[1] == "✕ 0.15"
    assert tasks.matrix_entry(None)[1] == ""


def test_a_small_run_has_a_matrix_a_panel_per_task_and_a_verdict_per_task():
    config = replace(
        TINY, tasks=("lookup", "pairs"), learners=("relu", "pooled"), predicted=("relu",)
    )
    rows = [row for cell in tasks.cells(config) for row in cell.rows()]
    section = tasks.section(config, rows)
    matrix, verdicts, *panels = section.blocks
    assert matrix.index == ["lookup", "pairs"]
    assert matrix.columns == ["ReLU", "pooled statistics"]
    assert [row["task"] for row in verdicts.rows] == ["lookup", "pairs"]
    assert [panel.name for panel in panels] == ["tasks-lookup", "tasks-pairs"]
    assert any(series.look == "dashed" for series in panels[0].series)
    assert section.verdict.numbers["pairs"] != "not tested"


def test_settings_are_checked_before_any_work():
    [figure] = choose_figures(["tasks"], "quick", overrides=["tasks=pairs,maximum", "sizes=20,40"])
    assert figure.config.tasks == ("pairs", "maximum")
    for override, message in [
        ("tasks=pears", "`tasks` must be of average"),
        ("learners=oracle", "`learners` must be of relu"),
        ("sizes=40,20", "`sizes` must grow"),
        ("theory_sets=100", "`theory_sets` must be above the largest size"),
    ]:
        with pytest.raises(ValueError, match=message):
            choose_figures(["tasks"], "quick", overrides=[override])
    with pytest.raises(ValueError, match="a task must be one of average"):
        find_task("pears")
