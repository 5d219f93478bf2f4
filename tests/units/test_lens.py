"""The lens on data whose truth is known: its four answers must be right."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import RidgeCV
from typer.testing import CliRunner

import keyhole as kh
from keyhole.cli._app import app
from keyhole.data import Dataset
from keyhole.lab.lens.costs import share_out
from keyhole.lab.lens.findings import (
    Findings,
    HeldOutCurve,
    LensConfig,
    Measured,
    difference,
    forecast,
    with_error,
)
from keyhole.lab.lens.fits import Gram, theory_curve
from keyhole.lab.lens.look import look
from keyhole.lab.lens.page import report_of
from keyhole.lab.lens.problem import make_folds, pose

DIM, KEYS = 3, 4
# the budget is far away, and no head distribution is learned unless a test is about that
QUIET = {"budget": 3000.0, "steps": 0}


def data_of(target, seed, n=240, noise=0.0):
    sets = kh.targets.sphere_sets(n, KEYS, DIM, seed)
    y = target(sets)
    y = y / y.std() + noise * np.random.default_rng([seed, n]).standard_normal(n)
    return Dataset(sets, y, ("a", "b", "c"), "sets on a sphere")


def says(found):
    return {name: answer.says for name, answer in found.answers.items()}


def linear(sets):
    return np.add.reduceat(sets.tokens, sets.offsets[:-1], axis=0)[:, 0] / sets.lengths


def test_attention_pays_and_the_query_matters(seed):
    found = look(
        data_of(kh.targets.Correlation(1, DIM), seed), LensConfig("regression", n_heads=64, **QUIET)
    )
    assert says(found)["attention"] == "yes"
    assert says(found)["query"] == "yes"


def test_attention_pays_and_the_query_does_not_matter(seed):
    # an even power, which no mean of the keys tells
    found = look(
        data_of(kh.targets.TokenPower(2, DIM), seed, noise=0.3),
        LensConfig("regression", n_heads=64, **QUIET),
    )
    assert says(found)["query"] == "no"
    pooled, attention = found.best("pooled"), found.best("attention")
    assert attention.error < found.learners[0].error
    assert pooled is not None


def test_attention_does_not_pay_where_the_mean_tells_all(seed):
    found = look(data_of(linear, seed, noise=1.0), LensConfig("regression", n_heads=64, **QUIET))
    assert says(found)["attention"] == "no"
    assert says(found)["query"] == "no"


def test_enough_is_enough(seed):
    """One coordinate, much noise: what there is to know is known from a hundred sets, and by a few
    heads.
    """
    rng = np.random.default_rng([seed, 2])
    keys = rng.uniform(-1, 1, size=(200, 3, 1))
    y = keys.mean(axis=(1, 2)) + 0.7 * rng.standard_normal(200)
    found = look(Dataset(kh.SetBatch(keys), y), LensConfig("regression", n_heads=64, **QUIET))
    assert says(found)["data"] != "yes"
    assert says(found)["heads"] != "yes"
    assert says(found)["query"] == "not tested"


def test_more_heads_help_where_there_is_one(seed):
    target = kh.targets.Correlation(1, DIM)
    found = look(data_of(target, seed, n=200), LensConfig("regression", n_heads=1, **QUIET))
    assert says(found)["heads"] == "yes"


def test_more_data_helps_where_the_target_is_hard_and_clean(seed):
    target = kh.targets.Correlation(2, DIM)
    found = look(data_of(target, seed), LensConfig("regression", n_heads=64, **QUIET))
    assert says(found)["data"] == "yes"


def test_noise_is_called_noise(seed):
    sets = kh.targets.sphere_sets(200, KEYS, DIM, seed)
    labels = np.random.default_rng([seed, 1]).choice(["a", "b", "c"], 200)
    found = look(Dataset(sets, labels), LensConfig("classification", n_heads=16, **QUIET))
    assert "yes" not in says(found).values()


def test_extras_are_heard_by_everyone(rng):
    """The target is a column of the samples themselves: whoever did not hear it would leave all of
    it.
    """
    keys, extras = rng.normal(size=(60, 2, 2)), rng.normal(size=(60, 1))
    found = look(
        Dataset(kh.SetBatch(keys, None, extras), extras[:, 0]),
        LensConfig("regression", n_heads=8, **QUIET),
    )
    assert max(m.error for m in found.learners if m.family != "constant") < 0.2


def test_heads_are_learned_and_softmax_has_no_kernel(seed):
    """The query asks with its first coordinate, the keys answer with their second."""
    rng = np.random.default_rng(seed)
    keys, query = rng.uniform(-2, 2, size=(320, 2, 3)), rng.uniform(-2, 2, size=(320, 3))
    y = (query[:, None, 0] * keys[:, :, 1] * keys[:, :, 2]).mean(axis=1)
    config = LensConfig("regression", n_heads=64, budget=3000.0, steps=10, activation="softmax")
    found = look(Dataset(kh.SetBatch(keys, query), y, ("x", "y", "z"), "made"), config)
    learned = next(m for m in found.learners if m.role == "learned")
    two_hops = next(m for m in found.learners if m.role == "hops")
    assert len(learned.losses) == len(two_hops.losses) == 2
    assert {distribution.hops for distribution in two_hops.distribution.values()} <= {1, 2}, (
        "two hops, or nothing learned"
    )
    assert two_hops.error < found.learners[0].error
    assert found.distribution is not None
    assert says(found)["query"] in ("yes", "perhaps")
    assert any("softmax" in note for note in found.skipped)


def test_a_budget_is_kept_by_leaving_things_out():
    data = data_of(kh.targets.Correlation(1, DIM), 0, n=400)
    found = look(data, LensConfig("regression", budget=0.8))
    assert found.cost <= 0.8
    assert found.skipped
    assert says(found)["attention"] in ("yes", "perhaps", "no", "not tested")
    assert (
        look(data, LensConfig("regression", budget=0.01)).table[0]["learner"] == "a constant guess"
    )


def test_no_clock_has_a_say(monkeypatch):
    """Same data, same seed, same findings: on a machine that stands still, and on one where an hour
    passes per look.
    """
    data, config = (
        data_of(kh.targets.Correlation(1, DIM), 0, n=60),
        LensConfig("regression", budget=7.0, n_heads=4),
    )
    calm = look(data, config)
    assert any(m.role == "learned" for m in calm.learners)
    hours = iter(3600.0 * k for k in range(10**9))
    for clock in ("time", "monotonic", "perf_counter", "process_time"):
        monkeypatch.setattr(time, clock, lambda: next(hours))
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    busy = look(data, config)
    monkeypatch.undo()
    assert json.dumps(busy.as_data()) == json.dumps(calm.as_data())


def test_nobody_has_less_because_another_is_expensive(rng):
    """Whoever is made more expensive, the cheaper ones are given what they were given."""
    for _ in range(50):
        full = dict(zip("abcdef", np.sort(rng.exponential(size=6)).tolist(), strict=True))
        options = {name: [(cost / 4**k, k) for k in range(3)] for name, cost in full.items()}
        budget = float(rng.uniform(0.5, 1.5)) * sum(full.values())
        before = share_out(budget, options)
        assert sum(seconds for seconds, _ in before.values()) <= budget
        cheap = {name for name, (_, k) in before.items() if k == 0 and full[name] <= budget / 6}
        expensive = {**options, "f": [(1e6 * cost, k) for cost, k in options["f"]]}
        after = share_out(budget, expensive)
        assert all(after[name] == before[name] for name in cheap - {"f"})
        assert all(after[name][0] >= before[name][0] for name in before if name != "f")


def test_table_and_curve_agree(seed):
    found = look(
        data_of(kh.targets.TokenPower(2, DIM), seed, n=80),
        LensConfig("regression", n_heads=8, **QUIET),
    )
    table = {row["learner"]: row["error, %"] for row in found.table}
    assert len(found.curves) == 2
    for curve in found.curves:
        assert 100 * curve.losses[-1].mean() == pytest.approx(table[curve.name], rel=1e-12)
        assert curve.sizes == (16, 23, 32, 45, 64)
        assert {len(losses) for losses in curve.losses} == {80}


def test_groups_stay_whole_and_time_runs_forward(rng):
    groups, moments = rng.integers(0, 12, 90), rng.integers(0, 40, 90).astype(float)
    for when in (None, moments):
        folds, held = make_folds(90, None, None, groups, when)
        assert ("groups" in held) == (when is None)
        for train, test in folds:
            assert not np.isin(groups[train], groups[test]).any()
            assert when is None or when[train].max() < when[test].min()
    newest = (moments > 32).astype(int)
    assert (
        make_folds(90, None, newest, None, moments)[1]
        == make_folds(90, None, None, None, moments)[1]
    )
    assert "own test part" in make_folds(90, None, newest[::-1], None, moments)[1]
    tested = np.concatenate([test for _, test in make_folds(90, None, None, groups, None)[0]])
    assert sorted(tested) == list(range(90))
    with pytest.raises(ValueError, match="times that differ"):
        make_folds(90, None, None, None, np.zeros(90))


def test_copies_in_one_group_tell_nothing_of_each_other(seed):
    """Noise, every set three times: folds that part copies call it learned, folds of whole groups
    do not.
    """
    rng = np.random.default_rng([seed, 3])
    sets = kh.SetBatch(np.repeat(rng.normal(size=(20, 2, 3)), 3, axis=0))
    y, groups = np.repeat(rng.normal(size=20), 3), np.repeat(np.arange(20), 3)
    data, config = Dataset(sets, y), LensConfig("regression", n_heads=4, **QUIET)
    assert min(row["error, %"] for row in look(data, config).table) < 10
    found = look(replace(data, groups=groups), config)
    assert min(row["error, %"] for row in found.table) > 50
    assert "yes" not in says(found).values()
    assert {len(m.losses[0]) for m in found.learners} == {4}  # a group has one say


def test_the_split_of_the_data_is_used(seed):
    data = data_of(kh.targets.TokenPower(2, DIM), seed)
    split = (np.arange(240) >= 160).astype(int)
    found = look(
        Dataset(data.sets, data.target, split=split), LensConfig("regression", n_heads=16, **QUIET)
    )
    assert found.n_train == 160
    assert all(len(m.losses) == 1 for m in found.learners)
    assert "own test part" in found.settings


@pytest.mark.parametrize(
    ("target", "words"),
    [(np.zeros(60), "must vary"), (np.array(["a"] * 60), "two classes")],
    ids=["zeros", "one"],
)
def test_nothing_to_learn(target, words):
    sets = kh.targets.sphere_sets(60, 2, 2, seed=0)
    with pytest.raises(ValueError, match=words):
        look(
            Dataset(sets, target),
            LensConfig("classification" if target.dtype.kind == "U" else "regression"),
        )
    with pytest.raises(ValueError, match="at least 40 sets"):
        look(Dataset(sets[:10], np.arange(10.0)), LensConfig("regression"))


@pytest.mark.parametrize("shape", [(60, 2, 2), (60, 1, 1)])
def test_sets_that_are_all_alike(shape, seed):
    y = np.random.default_rng(seed).normal(size=60)
    for sets in (
        kh.SetBatch(np.zeros(shape)),
        kh.SetBatch(np.ones(shape), np.ones((60, shape[2]))),
    ):
        found = look(Dataset(sets, y), LensConfig("regression", n_heads=4, **QUIET))
        assert "yes" not in says(found).values()


SIZES = (20, 28, 40, 57, 80)


def test_intervals_hold_where_the_truth_is_known():
    """Curves of a damped trend, 0/1 losses of samples that differ: nine intervals in ten hold what
    came.
    """
    rng = np.random.default_rng(0)
    held, said, n = [], [], 300
    for _ in range(200):
        rate, hard = rng.uniform(0.1, 0.9), rng.exponential(size=2 * n)
        levels = 0.25 * np.exp(-rate * (np.log2(np.array([*SIZES, 160]) / 80)))
        lost = rng.random(2 * n)[None] < np.minimum(np.outer(levels, hard), 1.0)
        seen = forecast(HeldOutCurve("c", "attention", SIZES, tuple(lost[:-1, :n].astype(float))))
        came = float(lost[-1].mean())
        held.append(seen.low <= came <= seen.high)
        if seen.says == "yes":
            said.append(came < seen.now)
    off = abs(np.mean(held) - 0.9) / np.sqrt(0.9 * 0.1 / len(held))
    assert off < 4, f"{np.mean(held):.2f} of the intervals held: {off:.1f} standard errors off"
    assert len(said) > 10
    assert np.mean(said) >= 0.9


def test_forecasts_at_the_ends(rng):
    hard = rng.exponential(size=100)
    flat = forecast(HeldOutCurve("c", "attention", SIZES, tuple(0.5 * hard for _ in SIZES)))
    assert flat.says != "yes"
    steep = forecast(HeldOutCurve("c", "attention", SIZES, tuple(40 * hard / k for k in SIZES)))
    assert steep.says == "yes"
    assert steep.n_train == 160
    nothing = forecast(HeldOutCurve("c", "attention", SIZES, tuple(np.zeros(100) for _ in SIZES)))
    assert (nothing.says, nothing.low) == ("no", 0.0)
    tiny = forecast(HeldOutCurve("c", "attention", SIZES, tuple(4e-5 * hard / k for k in SIZES)))
    assert tiny.high == pytest.approx(
        1e-6 * steep.high, rel=1e-6
    )  # no unit is special, where losses are no counts
    assert forecast(HeldOutCurve("c", "attention", SIZES[:2], (hard, hard))) is None


def test_differences_are_paired(rng):
    hard = rng.normal(size=500)
    a = Measured("a", "pooled", "", at={500: {0: hard + 0.1}})
    b = Measured("b", "attention", "", at={500: {0: hard, 1: rng.normal(size=9)}, 900: {0: hard}})
    assert difference(a, b).gain == pytest.approx(0.1)
    assert difference(a, b).error < 1e-12


def test_in_python_as_on_the_command_line(tmp_path, seed):
    data = data_of(kh.targets.TokenPower(2, DIM), seed, n=60)
    options = {"budget": 1.0, "n_heads": 8, "seed": seed}
    found = kh.lens(data.sets, data.target, **options)
    same = look(data, LensConfig("regression", 1.0, 8, seed=seed))
    assert found.table == same.table
    assert all(row["learner"] in str(found) for row in found.table)
    (tmp_path / "report.html").touch()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        found.save(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"y": np.zeros(3)}, r"one value per sample: got shape \(3,\)"),
        ({"y": np.full(60, np.nan)}, "finite numbers or labels"),
        ({"y": np.array(["a", "b"] * 30), "task": "regression"}, "numbers: got labels such as"),
        ({"groups": [1, 2]}, "`groups` must have one value per sample"),
        ({"split": np.arange(60)}, "0 .train. or 1 .test."),
        ({"budget": 0}, "`budget`"),
        ({"task": "ranking"}, "`task`"),
    ],
)
def test_slips(options, words):
    sets = kh.targets.sphere_sets(60, 2, 2, seed=0)
    with pytest.raises(ValueError, match=words):
        kh.lens(sets, **{"y": sets.query[:, 0], **options})


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = data_of(kh.targets.TokenPower(2, DIM), 0, n=80)
    np.savez(
        "sets.npz",
        keys=data.sets.tokens.reshape(80, KEYS, DIM),
        query=data.sets.query,
        y=data.target,
    )
    run = CliRunner().invoke(app, ["lens", "sets.npz", "--n-heads", "8", "--json"])
    assert run.exit_code == 0, run.output
    answer = json.loads(run.stdout)
    assert set(answer["answers"]) == {"attention", "query", "data", "heads"}
    assert answer["task"] == "regression"
    page = (tmp_path / "out/lens/sets/report.html").read_text()
    assert json.loads((tmp_path / "out/lens/sets/lens.json").read_text()) == answer
    for words in (
        "Does attention pay?",
        "Does the query matter?",
        "Would more data help?",
        "Would more heads help?",
    ):
        assert words in page
    before = sorted((tmp_path / "out").rglob("*"))
    run = CliRunner().invoke(app, ["lens", "sets.npz", "--out", "out/lens/sets"])
    assert (run.exit_code, "--overwrite" in run.stderr) == (2, True)
    assert sorted((tmp_path / "out").rglob("*")) == before


def test_samples_are_taken_apart(seed):
    """Bags with one witness: it is the first key of those found rightly, and rows are those of the
    data.
    """
    rng = np.random.default_rng(seed)
    keys, labels = rng.normal(size=(80, 4, 2)), np.arange(80) % 2
    keys[labels == 1, 2, 0] += 6.0
    found = kh.lens(
        kh.SetBatch(keys), np.array(["no", "yes"])[labels], budget=1.0, n_heads=32, seed=seed
    )
    assert 1 <= sum(one.right for one in found.examples) <= 2
    for one in found.examples:
        assert (one.truth == one.said) == one.right
        assert one.truth == ["no", "yes"][labels[one.row]]
        np.testing.assert_array_equal(one.keys, keys[one.row])
        if one.right and one.said == "yes":
            assert one.parts.argmax() == 2
    [section] = [section for section in report_of(found).sections if section.slug == "keys"]
    assert len(section.blocks[0].rows) == 3 * len(found.examples)


def test_the_best_row_is_recommended_and_its_line_has_its_error(seed):
    """Fitted to the same folds, the estimator of the line has the error that the table says."""
    data = data_of(kh.targets.Correlation(1, DIM), seed, n=120)
    found = look(data, LensConfig("regression", n_heads=16, **QUIET))
    best = found.recommended
    assert best.name == found.table[0]["learner"]
    assert str(found).endswith(f"the best row, {best.name} ({with_error(best)}): {best.line}")

    problem = pose(data, "regression", 120, 0)
    losses = []
    for k in best.losses:
        train, test = problem.fold(k, 120)
        model = eval(best.line, {"kh": kh})
        model.fit(problem.sets[train], problem.columns[train, 0])
        losses.append(problem.losses(test, model.predict(problem.sets[test])[:, None]))
    assert np.concatenate(losses).mean() == pytest.approx(best.error, abs=2 * best.uncertainty)


def test_what_is_recommended_is_the_best_row_whatever_it_is():
    def row(name, family, error, line=""):
        return Measured(name, family, "", line=line, at={10: {0: np.full(10, error)}})

    constant = row("a constant guess", "constant", 0.52)
    pooled = row("pooled statistics, ridge", "pooled", 0.2)
    attention = row("attention", "attention", 0.31, line="kh.AttentionRegressor()")
    config = LensConfig("regression")
    for best, learners, words in (
        (attention, [constant, attention], "attention (31 % ± 0 %): kh.AttentionRegressor()"),
        (pooled, [constant, attention, pooled], "ridge (20.0 % ± 0 %): no attention"),
        (constant, [constant], "a constant guess (52 % ± 0 %): nothing is learned here"),
    ):
        found = Findings(config, "ten sets", 10, learners=learners)
        assert found.recommended is best
        assert words in found.recommendation
        assert words in str(found)


def test_the_estimator_with_default_settings_is_among_the_learners(seed):
    """It selects keys and minimises the log-loss, which no Gram matrix of the lens does."""
    rng = np.random.default_rng([81, seed])
    labels = np.arange(120) % 2
    bags = rng.normal(size=(120, 60, 4))
    bags[:, :2] += 3.0 * labels[:, None, None]
    found = look(
        Dataset(kh.SetBatch(bags), labels),
        LensConfig("classification", budget=20.0, n_heads=32, steps=0, seed=seed),
    )
    default = next(m for m in found.learners if m.role == "default")
    assert list(default.losses) == [0, 1]
    assert default.error < 0.2
    assert default.mean_measure("auc") > 0.9
    assert default.line == "kh.AttentionClassifier()"


def test_theory_predicts_the_learning_curve_from_the_gram_matrix(seed):
    """Ridge on halves and quarters of the samples, best penalty, against the prediction."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((400, 30)) * np.linspace(1.0, 0.1, 30)
    y = features @ rng.standard_normal(30) + rng.standard_normal(400)
    y = (y - y.mean()) / y.std()
    predicted = theory_curve(Gram(features @ features.T), y[:, None], (50, 100, 200))

    measured = []
    for n in (50, 100, 200):
        errors = []
        for _ in range(20):
            order = rng.permutation(400)
            train, test = order[:n], order[n:]
            fit = RidgeCV(alphas=np.geomspace(1e-3, 1e3, 25)).fit(features[train], y[train])
            errors.append(np.mean((fit.predict(features[test]) - y[test]) ** 2))
        measured.append(np.mean(errors))
    np.testing.assert_allclose(predicted, measured, rtol=0.15)
    assert predicted[0] > predicted[1] > predicted[2]
