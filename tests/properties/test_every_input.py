"""Properties that hold for every input, tried on random configurations of the options.

Hypothesis draws some configurations for each property from the suite's ``--seed``, `make test-slow`
draws a thousand of leave-one-out. Penalties are at least a thousandth of the size of the Gram
matrix, so that two ways to the same number agree up to a thousand times the rounding of one. What
fails is not shrunk: it is small, and prints a line that makes it again.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import sklearn
from configurations import CHOICES, Configuration, Plain, decisions, estimator, fit, pose
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st

import keyhole as kh

FIXED = {
    "route": ["primal", "dual", "kernel"],
    "activation": ["relu", "softmax", "linear", "square", "step"],
    "query": ["given", "mean", "each"],
    "scaling": ["none", "sphere", "standard"],
    "penalty": ["fixed"],
}
"""What is drawn from instead of everything: what is chosen automatically has tests of its own."""


def configurations(**fixed):
    """Configurations as Hypothesis draws them, with some options fixed."""
    numbers = {
        "seed": st.integers(0, 2**31 - 1),
        "n": st.integers(6, 14),
        "dim": st.integers(1, 3),
        "n_heads": st.integers(1, 20),
        "copies": st.just(0),
        "decades": st.floats(0, 1),
    }
    options = {**{name: dict.fromkeys(values) for name, values in CHOICES.items()}, **FIXED}
    choices = {name: st.sampled_from(list(v)) for name, v in {**options, **fixed}.items()}
    return st.builds(Configuration, **numbers, **choices).map(Configuration.settled)


def few(count):
    """So many examples, the same for one ``--seed``; nothing is kept between runs."""
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=quiet,
        phases=[Phase.generate],
    )


@dataclasses.dataclass
class Trial:
    """One configuration, fitted, and the same layer by the book in long doubles."""

    problem: object
    plain: Plain
    model: object

    @classmethod
    def of(cls, config):
        problem = pose(config)
        plain = Plain(problem)
        if plain.undecided:  # a score at the jump of the step, which no precision can place
            reject()
        penalty = plain.size * 10.0 ** (3 * config.decades - 3)
        return cls(problem, plain, fit(problem, penalty))

    def check(self, result, expected, *, factor=1.0):
        """Raise unless two results agree up to rounding, as a share of the size of the outputs."""
        size = max(np.abs(self.problem.columns).max(), np.abs(expected).max())
        allowed = factor * 1e5 * self.problem.config.rounding * size
        np.testing.assert_allclose(np.reshape(result, np.shape(expected)), expected, 0, allowed)


def trial_of(seed, **options):
    """A plain configuration, some options aside."""
    chosen = {
        "route": "dual",
        "dtype": "float64",
        "container": "sets",
        "query": "given",
        "scaling": "none",
        "pooling": "mean",
        "activation": "relu",
        "heads": "gaussian",
        "dim": 2,
        "n": 12,
        "copies": 0,
        "decades": 0.0,
        "outputs": "one",
        "penalty": "fixed",
        "weights": "none",
        "groups": False,
        "fit_intercept": True,
    }
    drawn = Configuration.draw(np.random.default_rng(seed))
    return Trial.of(dataclasses.replace(drawn, **(chosen | options)).settled())


# ------------------------------------------------------------------------------------------------
# leave-one-out


def check_leave_one_out(trial):
    """Leave-one-out predictions, their error and the layer are those of plain refits."""
    model, plain, problem = trial.model, trial.plain, trial.problem
    refits = plain.left_out(model.alpha_).predictions
    left_out = model.loo_decision_ if hasattr(model, "classes_") else model.loo_predictions_
    trial.check(left_out, refits)
    squares = np.square(problem.columns - refits).mean(axis=1)
    error = np.average(squares, weights=plain.weights)
    assert model.loo_error_ == pytest.approx(error, rel=1e5 * problem.config.rounding)
    new = np.arange(len(problem.y), len(plain.gram))
    whole = plain.fit_without(np.array([], int), new, model.alpha_)
    trial.check(decisions(model, problem.new), whole.predictions)


@few(40)
@given(configurations())
def test_leave_one_out_is_refits(config):
    check_leave_one_out(Trial.of(config))


@pytest.mark.slow
@few(1000)
@given(configurations())
def test_leave_one_out_is_refits_a_thousand_times(config):
    check_leave_one_out(Trial.of(config))


def forget_weights(plain):
    plain.weights = (plain.weights > 0).astype(float)


def count_everybody(plain):
    plain.weights = np.where(plain.weights > 0, plain.weights, 1.0)


def forget_groups(plain):
    plain.problem = dataclasses.replace(plain.problem, groups=None)


def leave_nobody_out(plain):
    whole = plain.fit_without
    plain.fit_without = lambda out, who, alpha: whole(np.array([], int), who, alpha)


@pytest.mark.parametrize("route", ["primal", "dual", "kernel"])
@pytest.mark.parametrize(
    ("spoil", "options"),
    [
        (forget_weights, {"weights": "spread"}),
        (count_everybody, {"weights": "zeros"}),
        (forget_groups, {"groups": True}),
        (leave_nobody_out, {}),
    ],
)
def test_refits_that_forget_something_are_caught(seed, spoil, options, route):
    trial = trial_of(seed, route=route, **options)
    check_leave_one_out(trial)
    spoil(trial.plain)
    with pytest.raises(AssertionError):
        check_leave_one_out(trial)


# ------------------------------------------------------------------------------------------------
# predictions


@few(15)
@given(configurations())
def test_a_prediction_is_the_same_alone_in_a_batch_and_in_little_memory(config):
    trial = Trial.of(config)
    new = trial.problem.new
    together = decisions(trial.model, new)
    trial.check(np.concatenate([decisions(trial.model, new[[i]]) for i in range(4)]), together)
    with sklearn.config_context(working_memory=1e-3):
        trial.check(decisions(trial.model, new), together)


@few(12)
@given(config=configurations())
def test_save_and_load_change_no_bit(config, tmp_path_factory):
    trial = Trial.of(config)
    path = tmp_path_factory.mktemp("saved") / "model.keyhole"
    kh.save(trial.model, path)
    again = kh.load(path)
    new = trial.problem.new
    np.testing.assert_array_equal(decisions(again, new), decisions(trial.model, new))


@few(15)
@given(configurations(route=["stream"]), st.sets(st.integers(1, 13)))
def test_partial_fit_in_any_cut_is_one_pass(config, cuts):
    trial = Trial.of(config)
    problem = trial.problem
    model = estimator(problem.config, trial.model.alpha_)
    weights = np.ones(config.n) if problem.weights is None else problem.weights
    classes = {"classes": np.unique(problem.y)} if "classes" in config.outputs else {}
    ends = [0, *sorted(cut for cut in cuts if cut < config.n), config.n]
    for a, b in itertools.pairwise(ends):
        model.partial_fit(problem.sets[a:b], problem.y[a:b], sample_weight=weights[a:b], **classes)
    trial.check(decisions(model, problem.new), decisions(trial.model, problem.new))
    assert model.n_samples_seen_ == config.n


# ------------------------------------------------------------------------------------------------
# units


@few(20)
@given(
    configurations(outputs=["one", "two"]),
    st.integers(-20, 20),
    st.sampled_from([-1, 1]),
    st.floats(-100, 100),
)
def test_predictions_go_along_with_the_scale_and_origin_of_y(config, power, sign, shift):
    trial = Trial.of(config)
    problem = trial.problem
    factor = sign * 2.0**power
    shift = shift if config.fit_intercept else 0.0
    moved = dataclasses.replace(problem, y=factor * (problem.y + shift))
    other = fit(moved, trial.model.alpha_)
    result = decisions(other, problem.new) / factor - shift
    trial.check(result, decisions(trial.model, problem.new), factor=1 + abs(shift))


def in_other_units(problem, units, shift):
    """The same samples with every coordinate in a unit, and from an origin, of its own."""

    def move(batch):
        if isinstance(batch, kh.SetGroups):
            return kh.SetGroups(move(batch.sets), batch.counts, batch.extras)
        query = None
        if batch.query is not None:
            query = (batch.query + shift) * np.resize(units, batch.query_dim)
        keys = np.split((batch.tokens + shift) * units, batch.offsets[1:-1])
        return kh.SetBatch(keys, query, batch.extras)

    return dataclasses.replace(problem, sets=move(problem.sets), new=move(problem.new))


@few(20)
@given(
    configurations(scaling=["standard"], activation=["relu", "softmax", "linear", "square"]),
    st.lists(st.floats(-6, 6), min_size=3, max_size=3),
    st.floats(-10, 10),
)
def test_with_standard_scaling_units_of_tokens_are_nothing(config, decades, shift):
    trial = Trial.of(config)
    units = 10.0 ** np.array(decades[: config.dim])
    moved = in_other_units(trial.problem, units, shift)
    other = fit(moved, trial.model.alpha_)
    before = decisions(trial.model, trial.problem.new)
    trial.check(decisions(other, moved.new), before, factor=100.0)


def test_without_scaling_units_matter(seed):
    trial = trial_of(seed)
    moved = in_other_units(trial.problem, np.array([1.0, 1.001]), 0.0)
    other = fit(moved, trial.model.alpha_)
    with pytest.raises(AssertionError):
        trial.check(decisions(other, moved.new), decisions(trial.model, trial.problem.new))
