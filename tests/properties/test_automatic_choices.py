"""Automatic choices depend on the training samples as a weighted collection, and on nothing else.

The order of the samples, duplicates in the place of weights, and rows of weight 0 may not change
what is chosen. Every test compares public attributes of two fits, below and above the number of
samples that choices are made by.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from paper import PAPER_LAYER

import keyhole as kh

BELOW, ABOVE = 60, 540
"""Training samples: fewer, and more, than choices are made by (128 to 500)."""


def draw_samples(rng, n, *, queries=True, extras=False):
    """Ragged sets whose keys, queries and outputs leave every choice in doubt."""
    keys = []
    for _ in range(n):
        size = rng.integers(1, 5)
        keys.append(rng.normal(size=(size, 3)) * [1.0, 2.0, 0.5] + [0.5, 0.0, 0.0])
    y = np.array([key[:, 0].mean() + np.abs(key[:, 1]).mean() for key in keys])
    query = None
    if queries:
        query = rng.normal(size=(n, 3))
        y = y + query[:, 0]
    columns = None
    if extras:
        columns = rng.normal(size=(n, 2)) * [1.0, 30.0]
        y = y + columns[:, 0]
    return kh.SetBatch(keys, query, columns), y + rng.normal(size=n)


def labels_of(y):
    """Three classes by the size of an output."""
    return np.array(["low", "middle", "high"])[np.digitize(y, np.quantile(y, [0.3, 0.6]))]


MODELS = {
    "16 heads": lambda: kh.AttentionRegressor(16, random_state=0),
    "default settings": lambda: kh.AttentionRegressor(random_state=0),
    "softmax": lambda: kh.AttentionRegressor(16, activation="softmax", random_state=0),
    "classes": lambda: kh.AttentionClassifier(16, random_state=0),
    "chosen identity": lambda: kh.AttentionRegressor(
        16, heads=kh.IdentityHeads(n_heads=16), random_state=0
    ),
    "norm ball": lambda: kh.NormBallRegressor(
        16, scaling="auto", query="auto", group_radius=3.0, ball_radius=1.0, tol=0.1, random_state=0
    ),
}


SIZES = [(name, n) for name in MODELS for n in (BELOW, ABOVE)]
# a tenth is held out, whatever their number
MODELS["conjugate gradients"] = lambda: kh.AttentionRegressor(
    16, alpha=[0.1, 1.0, 10.0], solver="cg", scaling="standard", random_state=0
)
SIZES.append(("conjugate gradients", BELOW))


def choices(model):
    """What a fit has chosen by itself: names that must be equal, and numbers that must be so but
    for rounding.
    """
    rule = model.tokens_
    names = {
        "scaling": rule.scaling,
        "pooling": rule.pooling,
        "query": rule.query,
        "activation": model.layer_.activation,
    }
    numbers = {"extras scale": rule.extras_scale}
    for candidate in getattr(model, "candidates_", ()):
        settings = replace(candidate, loss=0.0, seconds=0.0)
        numbers[f"loss of {settings}"] = candidate.loss
    if hasattr(model, "n_heads_"):
        names["heads"] = model.n_heads_
        numbers["alpha"] = model.alpha_
    if hasattr(model, "heads_"):
        names["heads"] = repr(model.heads_)
    if hasattr(model, "selection_"):
        numbers["error"] = model.selection_.error
    return names, numbers


def check_same_choices(one, other):
    """Raise unless two fits have chosen alike."""
    names, numbers = choices(one)
    other_names, other_numbers = choices(other)
    assert names == other_names
    assert numbers == pytest.approx(other_numbers, rel=1e-6)


def targets_for(model, y):
    """Outputs of the kind that an estimator takes."""
    if hasattr(model, "predict_proba"):
        return labels_of(y)
    return y


@pytest.mark.parametrize(
    ("name", "n", "queries"),
    [
        *[(name, n, True) for name, n in SIZES],
        *[(name, n, False) for name, n in SIZES if n == BELOW],
        *[pytest.param(name, n, False, marks=pytest.mark.slow) for name, n in SIZES if n == ABOVE],
    ],
)
def test_the_order_of_samples_does_not_matter(name, n, queries, rng):
    sets, y = draw_samples(rng, n, queries=queries)
    y = targets_for(MODELS[name](), y)
    order = rng.permutation(n)
    check_same_choices(MODELS[name]().fit(sets, y), MODELS[name]().fit(sets[order], y[order]))


@pytest.mark.parametrize(("name", "n"), SIZES)
def test_a_duplicate_is_a_weight_of_two(name, n, rng):
    sets, y = draw_samples(rng, n)
    y = targets_for(MODELS[name](), y)
    repeated = rng.permutation(n)[: n // 3]
    weights = np.ones(n)
    weights[repeated] = 2.0
    rows = rng.permutation(np.concatenate([np.arange(n), repeated]))
    check_same_choices(
        MODELS[name]().fit(sets, y, weights), MODELS[name]().fit(sets[rows], y[rows])
    )


def test_duplicates_do_not_make_a_standard_error_smaller(rng):
    """Nine duplicates of each sample: counted as ten samples, a head distribution would seem better
    by three times as many errors.
    """
    for _ in range(6):
        sets, y = draw_samples(rng, 40)
        rows = np.repeat(np.arange(40), 10)
        check_same_choices(
            MODELS["16 heads"]().fit(sets, y, np.full(40, 10.0)),
            MODELS["16 heads"]().fit(sets[rows], y[rows]),
        )


@pytest.mark.parametrize(("name", "n"), SIZES)
def test_rows_of_weight_zero_are_not_there(name, n, rng):
    sets, y = draw_samples(rng, n + n // 4)
    y = targets_for(MODELS[name](), y)
    weights = rng.uniform(0.5, 2.0, len(sets))
    weights[rng.permutation(len(sets))[: n // 4]] = 0.0
    rows = np.flatnonzero(weights)
    with_zeros = MODELS[name]().fit(sets, y, weights)
    check_same_choices(with_zeros, MODELS[name]().fit(sets[rows], y[rows], weights[rows]))


@pytest.mark.parametrize("name", ["16 heads", "default settings", "norm ball"])
def test_one_row_of_weight_zero_does_not_coarsen_the_penalties(name, rng):
    sets, y = draw_samples(rng, BELOW + 1)
    weights = np.ones(BELOW + 1)
    weights[BELOW] = 0.0
    check_same_choices(
        MODELS[name]().fit(sets, y, weights), MODELS[name]().fit(sets[:BELOW], y[:BELOW])
    )


@pytest.mark.parametrize("in_groups", [False, True])
def test_the_size_of_a_row_of_weight_zero_does_not_open_the_pooling(in_groups, rng):
    """Samples of one size have no sums to try, whatever the size of rows that are not there."""
    keys = [rng.normal(size=(4, 3)) for _ in range(BELOW)]
    keys += [rng.normal(size=(2, 3)), rng.normal(size=(9, 3))]
    sets = kh.SetBatch(keys)
    counts = np.ones(BELOW + 2, int)
    if in_groups:
        # pairs of sets, and one sample of the last two
        counts = np.full(BELOW // 2 + 1, 2)
        sets = kh.SetGroups(sets, counts)
    y = rng.normal(size=len(sets))
    n_weighted = BELOW // counts[0]
    weights = (np.arange(len(sets)) < n_weighted).astype(float)
    model = kh.AttentionRegressor(16, random_state=0).fit(sets, y, weights)
    check_same_choices(
        model, kh.AttentionRegressor(16, random_state=0).fit(sets[:n_weighted], y[:n_weighted])
    )
    assert {candidate.pooling for candidate in model.candidates_} == {"mean", "mean+statistics"}


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("n", [BELOW, ABOVE])
def test_the_scale_of_extras_is_chosen_alike(n, fit_intercept, rng):
    sets, y = draw_samples(rng, n + 10, extras=True)
    extras = sets.extras.copy()
    extras[:n, 1] = 3.0  # constant but for rows of weight 0
    sets = sets.with_extras(extras)
    weights = np.concatenate([1.0 + (np.arange(n) % 3 == 0), np.zeros(10)])
    rows = rng.permutation(np.repeat(np.arange(n), weights[:n].astype(int)))
    model = kh.AttentionRegressor(16, fit_intercept=fit_intercept, random_state=0).fit(
        sets, y, weights
    )
    other = kh.AttentionRegressor(16, fit_intercept=fit_intercept, random_state=0).fit(
        sets[rows], y[rows]
    )
    check_same_choices(model, other)
    np.testing.assert_allclose(
        model.predict(sets[:n]), other.predict(sets[:n]), rtol=1e-6, atol=1e-8
    )


@pytest.mark.parametrize("n", [BELOW, ABOVE])
def test_groups_keep_their_choices_under_another_order_and_with_weights_for_duplicates(n, rng):
    sets, y = draw_samples(rng, n)
    groups = rng.integers(0, n // 4, n)
    weights = np.where(rng.random(n) < 0.3, 2.0, 1.0)
    rows = rng.permutation(np.repeat(np.arange(n), weights.astype(int)))
    # a group that has no weight, before all others, changes the numbers of the groups and nothing
    # else
    with_zeros = np.concatenate([np.arange(n), np.arange(5)])
    labels = np.concatenate([groups, np.full(5, -1)])
    zeros = np.concatenate([weights, np.zeros(5)])
    model = MODELS["16 heads"]().fit(sets, y, weights, groups=groups)
    check_same_choices(model, MODELS["16 heads"]().fit(sets[rows], y[rows], groups=groups[rows]))
    check_same_choices(
        model, MODELS["16 heads"]().fit(sets[with_zeros], y[with_zeros], zeros, groups=labels)
    )


def test_units_of_y_do_not_change_who_is_asked(rng):
    """Choices above the draft size are made by part of the samples: the same part in every unit and
    from any origin.
    """
    sets, y = draw_samples(rng, ABOVE)
    names, _ = choices(MODELS["16 heads"]().fit(sets, y))
    for unit, origin in ((1000.0, 0.0), (1.8, 32.0)):
        assert choices(MODELS["16 heads"]().fit(sets, unit * y + origin))[0] == names


class ChosenByPosition(kh.AttentionRegressor):
    """A broken chooser: the first twenty samples choose the penalty."""

    def fit(self, X, y, sample_weight=None, *, groups=None):
        few = slice(0, 20)
        weights = None if sample_weight is None else sample_weight[few]
        alpha = (
            kh.AttentionRegressor(self.n_heads, random_state=0).fit(X[few], y[few], weights).alpha_
        )
        self.alpha = alpha
        return super().fit(X, y, sample_weight, groups=groups)


def test_a_chooser_that_goes_by_position_is_caught(rng):
    sets, y = draw_samples(rng, BELOW)
    order = rng.permutation(BELOW)
    one = ChosenByPosition(16, random_state=0).fit(sets, y)
    with pytest.raises(AssertionError):
        check_same_choices(one, ChosenByPosition(16, random_state=0).fit(sets[order], y[order]))


def test_a_chooser_that_counts_duplicates_twice_is_caught(rng):
    """The leave-one-out error of duplicates that are not left out together is lower."""
    sets, y = draw_samples(rng, BELOW)
    twice = np.concatenate([np.arange(BELOW), np.arange(BELOW)])
    one = kh.AttentionRegressor(16, random_state=0).fit(sets, y)
    jittered = y[twice] + np.concatenate(
        [np.zeros(BELOW), np.full(BELOW, 1e-9)]
    )  # no duplicates any more
    with pytest.raises(AssertionError):
        check_same_choices(
            one, kh.AttentionRegressor(16, random_state=0).fit(sets[twice], jittered)
        )


def test_infinitely_many_heads_or_finitely_many_are_chosen_by_distinct_samples(rng):
    """Sizes near which the exact kernel stops being cheaper: duplicates and rows of weight 0 cost a
    fit nothing.
    """
    sets, y = draw_samples(rng, 40, queries=False)
    rows = np.repeat(np.arange(40), 60)
    options = {**PAPER_LAYER, "alpha": 1.0, "random_state": 0}
    assert kh.AttentionRegressor(**options).fit(sets, y).n_heads_ == math.inf
    assert kh.AttentionRegressor(**options).fit(sets[rows], y[rows]).n_heads_ == math.inf
    zeros = (np.arange(len(rows)) < 40).astype(float)
    # 40 samples of weight 1 and many of weight 0
    assert kh.AttentionRegressor(**options).fit(sets[rows], y[rows], zeros).n_heads_ == math.inf


def test_a_head_distribution_that_overflows_is_passed_over(seed, monkeypatch):
    monkeypatch.setattr("keyhole.choose.STRENGTHS", (1000.0,))
    sets = kh.targets.sphere_sets(40, n_keys=4, dim=3, seed=seed)
    y = sets.tokens[::4, 0].copy()
    settings = {
        "activation": "exp",
        "pooling": "mean",
        "scaling": "none",
        "query": "given",
        "random_state": 0,
    }
    around_identity = kh.AttentionRegressor(8, kh.GaussianHeads(mean=1000.0), **settings)
    with pytest.raises(ValueError, match=r"overflow|squares below"):
        around_identity.fit(sets, y)
    zero_mean = kh.AttentionRegressor(8, kh.GaussianHeads(), **settings).fit(sets, y)
    chosen = kh.AttentionRegressor(8, **settings).fit(sets, y)
    np.testing.assert_array_equal(chosen.predict(sets), zero_mean.predict(sets))
    assert chosen.candidates_[-1].loss == np.inf


def test_a_scaling_that_overflows_is_passed_over_unless_it_was_asked_for(seed):
    rng = np.random.default_rng([seed, 12])
    x = 1e4 * rng.normal(size=(40, 3))
    y = x[:, 0]
    settings = {
        "activation": "exp",
        "heads": kh.GaussianHeads(),
        "query": "given",
        "random_state": 0,
    }
    with pytest.raises(ValueError, match=r"overflow|squares below"):
        kh.AttentionRegressor(8, scaling="none", **settings).fit(x, y)
    chosen = kh.AttentionRegressor(8, **settings).fit(x, y)
    assert chosen.tokens_.scaling != "none"


def test_a_scaling_under_which_no_penalty_can_be_judged_is_passed_over(seed):
    """exp of long tokens: some sample is fitted exactly under each of the penalties given."""
    rng = np.random.default_rng([seed, 13])
    x = 20.0 * rng.normal(size=(40, 3))
    y = x[:, 0]
    settings = {
        "alpha": [0.1, 1.0],
        "activation": "exp",
        "heads": kh.GaussianHeads(),
        "query": "given",
        "random_state": 0,
    }
    with pytest.raises(ValueError, match="cannot choose among the 2 penalties"):
        kh.AttentionRegressor(8, scaling="none", **settings).fit(x, y)
    chosen = kh.AttentionRegressor(8, **settings).fit(x, y)
    assert chosen.tokens_.scaling != "none"
