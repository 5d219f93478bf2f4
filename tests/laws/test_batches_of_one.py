"""A prediction is one number: alone or in a batch, as a sum over keys, and beside plain refits.

Random problems over the product of all options, with a signal and every level of noise, so that
leave-one-out goes where it goes in practice: to large penalties, and down to the smallest that
rounding allows. A configuration that fails is printed as a line that makes it again.
"""

import dataclasses
import math

import numpy as np
import pytest
from configurations import Configuration, decisions, fit, penalties, pose

import keyhole as kh
from keyhole.ridge import problem as ridge_problem
from keyhole.ridge.problem import RoundingWarning

TOLERANCE = 1e-8
"""Of the largest prediction: what is allowed between two ways to compute the same predictions."""

NOISE_LEVELS = (0.0, 1e-6, 1e-3, 0.1, 1.0)

ROUTES = ("primal", "dual", "kernel", "kernel", "stream", "cg")
"""Routes that are drawn from, the exact kernel more often: its predictions are sums that may cancel."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration, and how much noise its outputs have."""

    config: Configuration
    noise: float

    @classmethod
    def draw(cls, rng):
        """A configuration in float64 of 20 to 59 samples, whose penalty is chosen by leave-one-out."""
        drawn = Configuration.draw(rng)
        changed = dataclasses.replace(
            drawn,
            route=ROUTES[rng.integers(len(ROUTES))],
            n=int(rng.integers(20, 60)),
            dtype="float64",
            penalty="loo",
        )
        return cls(config=changed.settled(), noise=NOISE_LEVELS[rng.integers(len(NOISE_LEVELS))])


def token_means(batch):
    """The mean of the keys of each sample, (n, d), over all of its sets."""
    many_sets = isinstance(batch, kh.SetGroups)
    sets = batch.sets if many_sets else batch
    of_sets = np.add.reduceat(sets.tokens, sets.offsets[:-1], axis=0) / sets.lengths[:, None]
    if not many_sets:
        return of_sets
    return np.add.reduceat(of_sets, batch.offsets[:-1], axis=0) / batch.counts[:, None]


def problem_of(case):
    """Samples of a configuration whose outputs follow the mean of their keys, up to noise."""
    problem = pose(case.config)
    rng = np.random.default_rng([case.config.seed, 1])
    means = token_means(problem.sets)
    signal = means[:, 0] + 0.5 * np.sin(2 * means[:, -1])
    noisy = signal + case.noise * rng.standard_normal(len(signal))
    if case.config.outputs == "one":
        y = 3.0 + noisy
    elif case.config.outputs == "two":
        y = np.column_stack([3.0 + noisy, -50.0 + 20.0 * noisy**2])
    else:
        names = np.array(["ash", "beech", "cedar"])[: 3 if case.config.outputs == "three classes" else 2]
        # every class has as many samples as the others, and some with weight: the first three have
        ranks = np.argsort(np.argsort(noisy))
        y = names[ranks * len(names) // len(ranks)]
        y[: len(names)] = names
    return dataclasses.replace(problem, y=y)


def fitted(case):
    """The problem and the model; None where the kernel of exp is beyond float64, and says so."""
    problem = problem_of(case)
    alpha = penalties(problem, case.config.n) if case.config.penalty != "loo" else "loo"
    try:
        return problem, fit(problem, alpha)
    except OverflowError as error:
        assert "Scale the tokens down" in str(error)  # noqa: PT017
        return problem, None


def relative(found, expected):
    """The largest difference as a share of the largest number expected."""
    size = np.abs(expected).max()
    return float(np.abs(found - expected).max() / size) if size > 0 else 0.0


def one_by_one(method, batch):
    """What a method says of each sample alone."""
    return np.concatenate([method(batch[[i]]) for i in range(len(batch))])


def sums_of_contributions(model, batch):
    """Contributions of keys and extras, and the intercept: one row for each sample."""
    of_keys = np.array([part.sum(axis=0) for part in model.contributions(batch)])
    of_extras = model.extras_contributions(batch).sum(axis=1)
    return (of_keys + of_extras + model.intercept_).reshape(len(batch), -1)


def disagreements(case):
    """How far predictions alone and sums of contributions are from predictions in a batch."""
    problem, model = fitted(case)
    if model is None:
        return {}
    try:
        together = decisions(model, problem.new)
    except OverflowError:
        return {}
    alone = one_by_one(lambda batch: decisions(model, batch), problem.new)
    sums = sums_of_contributions(model, problem.new)
    return {"alone": relative(alone, together), "contributions": relative(sums, together)}


@pytest.mark.filterwarnings("ignore")  # of residuals that conjugate gradients cannot reach
def test_alone_and_in_a_batch_a_prediction_is_the_same(rng):
    for _ in range(40):
        case = Case.draw(rng)
        for name, share in disagreements(case).items():
            assert share <= TOLERANCE, f"{name}: off by {share:.1e} for {case!r}"


ACTIVATIONS = ("linear", "square", "exp", "relu", "step")


def classifier_of_a_line(seed, activation, noise):
    """A classifier by the exact kernel on which side of a line points lie, and new points."""
    rng = np.random.default_rng([seed, 4])
    x = rng.normal(size=(80, 2))
    labels = x[:60, 0] + noise * rng.normal(size=60) > 0
    model = kh.AttentionClassifier(math.inf, activation=activation, random_state=0)
    return model.fit(x[:60], labels), x[60:]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("noise", NOISE_LEVELS)
def test_kernels_of_low_rank_are_not_fitted_at_the_rounding_floor(seed, activation, noise):
    """Noise outside of the span of a kernel leaves every small penalty as good as the next."""
    model, new = classifier_of_a_line(seed, activation, noise)
    together = model.decision_function(new)
    alone = one_by_one(model.decision_function, new)
    sums = sums_of_contributions(model, kh.SetBatch(new[:, None, :]))[:, 0]
    assert relative(alone, together) <= TOLERANCE
    assert relative(sums, together) <= TOLERANCE


def linear_classifier_of_noisy_points():
    """A fit whose leave-one-out error is the same at all small penalties, and new points."""
    rng = np.random.default_rng(11)
    x = rng.normal(size=(60, 2))
    labels = x[:, 0] + 0.5 * rng.normal(size=60) > 0
    model = kh.AttentionClassifier(activation="linear", random_state=0).fit(x, labels)
    return model, rng.normal(size=(50, 2))


def test_where_all_small_penalties_are_as_good_rounding_does_not_show():
    model, new = linear_classifier_of_noisy_points()
    together = model.decision_function(new)
    assert relative(one_by_one(model.decision_function, new), together) <= TOLERANCE
    assert np.abs(model.layer_.dual).max() < 1e7  # 8e11 at the rounding floor


@pytest.mark.filterwarnings("ignore::keyhole.ridge.problem.RoundingWarning")
def test_without_a_limit_on_amplification_batches_differ(monkeypatch):
    """Broken variant: every penalty counts as steady."""
    monkeypatch.setattr(ridge_problem, "STEADY", math.inf)
    model, new = linear_classifier_of_noisy_points()
    together = model.decision_function(new)
    assert relative(one_by_one(model.decision_function, new), together) > 1000 * TOLERANCE


def test_a_fixed_penalty_at_which_rounding_shows_is_warned_of(seed):
    rng = np.random.default_rng([seed, 5])
    x = rng.normal(size=(60, 2))
    y = x[:, 0] + rng.normal(size=60)
    tiny = kh.AttentionRegressor(math.inf, activation="linear", alpha=1e-11, random_state=0)
    with pytest.warns(RoundingWarning, match="alpha = 1e-11 is so small"):
        tiny.fit(x, y)
    tiny.set_params(alpha=1e-3).fit(x, y)
