"""`keyhole reproduce tasks`: its learners, its matrix, and verdicts that can fail."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from paper import paper_regressor

from keyhole.lab import task_learners
from keyhole.lab.cells import Cell
from keyhole.lab.figures import tasks
from keyhole.lab.figures.task_findings import FINDINGS, Interval, state_of
from keyhole.lab.jobs import compute, group
from keyhole.lab.measured import Curve
from keyhole.lab.reproduce import choose_figures
from keyhole.lab.task_learners import LEARNERS, HeadSetting, TaskDraw, find_task, is_defined
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


def results_of(config):
    """Every cell of a configuration, computed here."""
    return {cell: values for job in group(tasks.cells(config)) for cell, values, _ in compute(job)}


def task_cell(model, task="lookup", n_samples=60, **changes):
    batch, _ = find_task(task).draw(1)
    cell = Cell(
        model=model,
        target=task,
        dim=batch.dim,
        n_keys=len(batch.tokens),
        n_heads=16,
        n_samples=n_samples,
        most_samples=n_samples,
        n_test=80,
        seed=0,
        repetition=0,
        learner="task",
    )
    return replace(cell, **changes)


def values_of(cell):
    [job] = group([cell])
    [(_, values, _)] = list(compute(job))
    return values


# ---------------------------------------------------------------- learners


@pytest.mark.parametrize("task", ["lookup", "maximum"])
def test_frozen_heads_are_the_estimator(task, seed):
    """The same heads and the same penalty: the error and the leave-one-out error are its own."""
    cell = task_cell("relu", task, seed=seed)
    values = values_of(cell)
    draw = TaskDraw.of(cell)
    model = paper_regressor(n_heads=16, alpha=values["alpha"], random_state=draw.fit_seed)
    model.fit(draw.train, draw.y)
    assert values["error"] == pytest.approx(draw.error(model.predict(draw.test)), rel=1e-6)
    assert values["loo"] * np.var(draw.truth) == pytest.approx(model.loo_error_, rel=1e-6)


def test_of_several_settings_the_one_with_the_least_leave_one_out_error_is_taken(seed):
    cell = task_cell("softmax-biased", "nearest-key", seed=seed)
    chosen = values_of(cell)
    settings = LEARNERS["softmax-biased"].settings
    alone = []
    for setting in settings:
        learner = task_learners.FrozenHeads((setting,))
        [(_, values)] = learner.outcomes(TaskDraw.of(cell), [60], 16)
        alone.append(values)
    best = int(np.argmin([values["loo"] for values in alone]))
    assert chosen["setting"] == best
    assert chosen["error"] == alone[best]["error"]


def test_smaller_sizes_are_the_first_samples_of_the_same_draw(seed):
    cell = task_cell("linear", seed=seed)
    nested = replace(cell, n_samples=30)
    alone = replace(nested, most_samples=30)
    [job] = group([nested, cell])
    together = {done.n_samples: values for done, values, _ in compute(job)}
    assert together[30]["error"] == pytest.approx(values_of(alone)["error"], rel=1e-9)


def test_pooled_statistics_know_the_maximum_and_not_the_lookup(seed):
    assert values_of(task_cell("pooled", "maximum", seed=seed))["error"] < 1e-6
    assert values_of(task_cell("pooled", "lookup", seed=seed))["error"] > 0.5


def test_learned_heads_learn_a_softmax_head(seed):
    cell = task_cell("learned", "similarity", n_samples=150, n_heads=32, seed=seed)
    assert values_of(cell)["error"] < 0.2


@pytest.mark.parametrize("model", ["trained", "deep-sets"])
def test_networks_learn_and_repeat_themselves(model, seed, monkeypatch):
    pytest.importorskip("torch")
    from keyhole.lab import trained_networks

    monkeypatch.setattr(trained_networks, "STEPS", 300)
    cell = task_cell(model, "maximum", n_samples=300, n_heads=None, seed=seed)
    first = values_of(cell)
    assert first["error"] < 0.7
    assert first == values_of(cell)


def test_without_a_query_biased_heads_are_zero_mean_heads():
    assert not is_defined("relu-biased", "maximum")
    assert is_defined("relu-biased", "lookup")
    batch, _ = find_task("maximum").draw(5)
    plain = HeadSetting("relu").features(batch, 3, seed=1)
    biased = HeadSetting("relu", mean=10.0).features(batch, 3, seed=1)
    np.testing.assert_array_equal(plain, biased)


@pytest.mark.parametrize(("model", "task"), [("relu", "average"), ("softmax", "counting")])
def test_theory_predicts_frozen_heads(model, task):
    """Measured: 5 repetitions, whose mean has a standard error of 3 to 5 %."""
    errors = [
        values_of(task_cell(model, task, 200, n_heads=64, n_test=600, repetition=repetition))
        for repetition in range(5)
    ]
    cell = task_cell(model, task, 200, n_heads=64, n_test=600, learner="task-theory")
    predicted = values_of(cell)["error"]
    assert predicted == pytest.approx(np.mean([values["error"] for values in errors]), rel=0.3)


def test_word_sensitivity_falls_for_flattened_features_and_stays_for_sharp_softmax(seed):
    def sensitivity(model, n_keys):
        cell = task_cell("relu", seed=seed)
        return values_of(
            replace(cell, model=model, dim=8, n_keys=n_keys, n_test=30, learner="sensitivity")
        )["sensitivity"]

    assert sensitivity("mlp", 8) > 2 * sensitivity("mlp", 128)
    assert sensitivity("softmax-biased", 128) > 5 * sensitivity("relu", 128)


# ---------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class KnowsNothing:
    """A learner that predicts the mean of its labels."""

    def outcomes(self, draw, sizes, n_heads):
        for n in sizes:
            yield n, {"error": draw.error(np.full(len(draw.truth), draw.y[:n].mean()))}


@dataclass(frozen=True)
class KnowsAll:
    """A learner that looks at the labels of the test sets."""

    def outcomes(self, draw, sizes, n_heads):
        for n in sizes:
            yield n, {"error": draw.error(draw.truth)}


def results_with(learner, sensitivity, monkeypatch):
    """All cells, if every learner were one and the same wrong one."""
    monkeypatch.setattr(task_learners, "LEARNERS", dict.fromkeys(LEARNERS, learner))
    monkeypatch.setattr(task_learners, "_sensitivity", sensitivity)
    monkeypatch.setattr(tasks, "has_torch", lambda: True)
    results = {}
    for job in group(tasks.cells(TINY)):
        results.update(task_learners.compute_tasks(list(job.cells)))
    return results


def test_every_verdict_fails_on_a_deliberately_wrong_learner(monkeypatch):
    """Each part of each finding is refuted by a learner that knows nothing or by one that cheats.

    The negative controls are what refutes the one that cheats.
    """
    nothing = results_with(KnowsNothing(), lambda cell: 1.0, monkeypatch)
    everything = results_with(KnowsAll(), lambda cell: 1 / cell.n_keys**2, monkeypatch)
    assert list(FINDINGS) == [*TASKS, tasks.SENSITIVITY]
    worlds = [tasks.measured_results(TINY, results) for results in (nothing, everything)]
    states = {}
    for task, findings in FINDINGS.items():
        parts = []
        for measured in worlds:
            checks = [finding.check(task, measured) for finding in findings]
            assert all(check.holds is not None for check in checks)
            states.setdefault(task, []).append(state_of(checks))
            parts.append(checks)
        for of_nothing, of_everything in zip(*parts, strict=True):
            assert not (of_nothing.holds and of_everything.holds), (task, of_nothing.words)
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


def test_one_repetition_shows_nothing():
    """Without a spread there is no interval, and the least certain case does not count."""
    assert Interval.of(np.array([0.0])).high == np.inf
    measured = tasks.TaskResults({("lookup", "relu"): Curve(np.array([10.0]), np.zeros((1, 1)))})
    check = FINDINGS["lookup"][0].check("lookup", measured)
    assert check.holds is False


def test_a_finding_about_a_learner_that_was_not_run_is_not_tested():
    checks = [finding.check("lookup", tasks.TaskResults({})) for finding in FINDINGS["lookup"]]
    assert all(check.holds is None for check in checks)
    assert state_of([]) == "not tested"


# ---------------------------------------------------------------- the matrix


def test_the_matrix_reads_samples_between_sizes_and_marks_what_is_not_learned():
    falling = Curve(np.array([100.0, 400.0]), np.array([[0.4, 0.1], [0.4, 0.1]]))
    needed = tasks.samples_needed(falling, floor=0.1, seed=0)
    assert needed.value == pytest.approx(200)  # 0.4 → 0.1 on logarithmic axes reaches 0.2 half-way
    assert tasks.samples_needed(falling, floor=0.5, seed=0).value == 100
    assert tasks.samples_needed(falling, floor=-0.2, seed=0).value is None
    assert tasks._entry(falling, -0.05, 0)[1] == "✕ 0.15"
    assert tasks._entry(None, 0.0, 0)[1] == ""


def test_a_small_run_has_a_matrix_a_panel_per_task_and_a_verdict_per_task():
    config = replace(
        TINY, tasks=("lookup", "pairs"), learners=("relu", "pooled"), predicted=("relu",)
    )
    section = tasks.section(config, results_of(config))
    matrix, verdicts, *panels = section.blocks
    assert matrix.index == ["lookup", "pairs"]
    assert matrix.columns == ["ReLU", "pooled statistics"]
    assert [row["task"] for row in verdicts.rows] == ["lookup", "pairs"]
    assert [panel.name for panel in panels] == ["tasks-lookup", "tasks-pairs"]
    assert any(series.look == "dashed" for series in panels[0].series)
    assert section.verdict.numbers["pairs"] in ("holds", "partly", "does not show")


def test_settings_are_checked_before_any_work():
    [figure] = choose_figures(["tasks"], "quick", overrides=["tasks=pairs,maximum", "sizes=20,40"])
    assert figure.config.tasks == ("pairs", "maximum")
    assert choose_figures(["tasks"], "full")[0].config.repetitions >= 5
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
