import math

import numpy as np
import pytest

import keyhole as kh
from keyhole.attention.heads import FittedHeads, HeadLaw, Step
from keyhole.attention.learned import held_out_parts, improvement


@pytest.fixture
def task(rng):
    sets = kh.targets.sphere_sets(80, n_keys=3, dim=3, seed=int(rng.integers(1000)))
    return sets, kh.targets.Correlation(3, 3)(sets) * 5


FAST = {"steps": 6, "n_heads": 8}


def test_laws_are_laws_but_have_no_heads_before_a_training_set():
    for law in (kh.LearnedHeads(), kh.IdentityHeads()):
        assert isinstance(law, HeadLaw)
        with pytest.raises(ValueError, match="has no heads before it has seen a training set"):
            law.sample(3, 2, 0)


def test_the_result_is_determined_by_data_parameters_and_seed(task):
    sets, y = task
    first, second = (kh.LearnedHeads(**FAST).fit(sets, y, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first.means_, second.means_)
    assert first.history == second.history
    models = [
        kh.AttentionRegressor(16, law=kh.LearnedHeads(**FAST), random_state=1, scaling="none", query="given").fit(
            sets, y
        )
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*(model.predict(sets) for model in models))


def test_fitted_heads_nest_and_share_out_their_means(rng):
    law = FittedHeads(rng.normal(size=(3, 4, 4)), scale=0.3)
    whole = law.sample(10, 3, seed=5)
    np.testing.assert_array_equal(law.sample(4, 3, seed=5, start=6), whole[6:])
    noise = kh.GaussianHeads(0.0, 0.3).sample(10, 3, seed=5)
    np.testing.assert_allclose(whole - noise, law.means_[np.arange(10) % 3], atol=1e-14)
    with pytest.raises(ValueError, match="fitted to tokens of dimension 3"):
        law.sample(2, 5, 0)


def test_no_steps_is_a_choice_among_identities(task):
    sets, y = task
    law = kh.LearnedHeads(steps=0, strengths=(0.0, 2.0)).fit(sets, y)
    assert law.chosen in ("zero-mean", "identity")
    assert law.steps == 0
    assert law.history == ()


def test_few_samples_are_not_descended_on(task):
    sets, y = task
    assert kh.LearnedHeads(**FAST).fit(sets[:40], y[:40]).history == ()


@pytest.mark.parametrize(
    ("n", "gain", "learns"), [(80, 1.9, False), (80, 2.1, True), (260, 0.9, False), (260, 1.1, True)]
)
def test_few_samples_need_two_standard_errors_and_many_one(n, gain, learns, monkeypatch, seed):
    def found(*_):  # what a search says that gained so many standard errors in a step
        return [Step(0, 1.0, 1.0), Step(1, 0.5, 0.5)], gain, 1.0

    monkeypatch.setattr("keyhole.attention.learned._search", found)
    sets = kh.targets.sphere_sets(n, n_keys=2, dim=2, seed=seed)
    law = kh.LearnedHeads(**FAST).fit(sets, kh.targets.Correlation(2, 2)(sets))
    assert law.steps == (1 if learns else 0)
    assert law.reason.startswith("nothing learned beyond doubt") is not learns


def test_budgets_progress_and_callbacks(task, capsys):
    sets, y = task
    seen = []
    law = kh.LearnedHeads(steps=12, n_heads=8, callback=seen.append, verbose=True).fit(sets, y)
    assert [step.step for step in seen] == [0, 5, 10, 12]
    assert tuple(seen) == law.history
    assert "step   10: leave-one-out" in capsys.readouterr().err
    hurried = kh.LearnedHeads(steps=10_000, n_heads=8, seconds=0.3).fit(sets, y)
    assert hurried.history[-1].step < 10_000


@pytest.mark.parametrize("activation", ["relu", "softmax"])
@pytest.mark.parametrize("n_means", [1, 3])
def test_estimators_fit_the_law_first(activation, n_means, task):
    sets, y = task
    law = kh.LearnedHeads(n_means=n_means, **FAST)
    model = kh.AttentionRegressor(
        16, law=law, activation=activation, random_state=0, scaling="none", query="given"
    ).fit(sets, y)
    assert model.law is law, "the parameter is left alone"
    assert isinstance(model.law_, FittedHeads)
    np.testing.assert_array_equal(model.heads_.block(0, 16), model.law_.sample(16, 3, 0))
    assert model.law_.reason


def test_infinite_heads_take_a_learned_law(task):
    sets, y = task
    model = kh.AttentionRegressor(
        math.inf, law=kh.LearnedHeads(n_means=2, **FAST), random_state=0, scaling="none", query="given"
    ).fit(sets, y)
    assert np.isfinite(model.predict(sets)).all()


def test_weights_are_copies_for_a_law_too(task):
    sets, y = task
    counts = np.arange(80) % 2 + 1
    rows = np.repeat(np.arange(80), counts)
    law = kh.LearnedHeads(**FAST)
    weighted = kh.AttentionRegressor(16, law=law, random_state=0, scaling="none", query="given").fit(
        sets, y, sample_weight=counts
    )
    repeated = kh.AttentionRegressor(16, law=law, random_state=0, scaling="none", query="given").fit(
        sets[rows], y[rows]
    )
    np.testing.assert_allclose(weighted.law_.means_, repeated.law_.means_, atol=1e-6)


def test_the_held_out_part_is_made_of_runs():
    (mask,) = held_out_parts(1000, 0.2, seed=1)
    assert mask.sum() == 200
    assert (np.diff(mask.reshape(100, 10), axis=1) == 0).all()
    assert held_out_parts(90, 0.2, seed=1)[0].sum() == 18


def test_groups_are_held_out_whole(rng):
    groups = rng.integers(30, size=300)
    (mask,) = held_out_parts(300, 0.2, seed=0, groups=groups)
    assert not set(groups[mask]) & set(groups[~mask])
    assert 0.15 < mask.mean() < 0.35
    (both,) = held_out_parts(6, 0.9, seed=0, groups=np.array([0, 0, 0, 1, 1, 1]))
    assert 0 < both.sum() < 6, "never all of them"
    turns = held_out_parts(300, 0.2, seed=0, groups=groups, turns=5)
    np.testing.assert_array_equal(sum(t.astype(int) for t in turns), 1, "each sample once")
    assert all(not set(groups[t]) & set(groups[~t]) for t in turns)


@pytest.mark.parametrize("n_heads", [12, 60, math.inf])
def test_estimators_leave_groups_out(n_heads, task):
    sets, y = task
    groups = np.array(list("abcde"))[np.repeat([0, 1, 2, 3, 4, 2], [20, 20, 17, 2, 20, 1])]  # sizes differ
    model = kh.AttentionRegressor(
        n_heads, alpha=[0.01, 1.0], random_state=0, law=kh.GaussianHeads(), scaling="none", query="given"
    ).fit(sets, y, groups=groups)
    plain = kh.AttentionRegressor(
        n_heads, alpha=model.alpha_, random_state=0, law=kh.GaussianHeads(), scaling="none", query="given"
    ).fit(sets, y)
    np.testing.assert_allclose(model.predict(sets), plain.predict(sets), atol=1e-8)
    for group in "abcde":
        others = groups != group
        refit = kh.AttentionRegressor(
            n_heads, alpha=model.alpha_, random_state=0, law=kh.GaussianHeads(), scaling="none", query="given"
        ).fit(sets[others], y[others])
        np.testing.assert_allclose(model.loo_predictions_[~others], refit.predict(sets[~others]), atol=1e-8)
    np.testing.assert_allclose(model.loo_error_, np.mean((y - model.loo_predictions_) ** 2))
    assert model.alpha_ == model.alphas_[np.argmin(model.loo_errors_)]


def test_scales_of_coordinates(rng):
    """The answer is at the key whose first coordinate meets the query's; heads should keep out of the other seven."""
    keys, query = rng.normal(size=(400, 5, 8)), rng.normal(size=(400, 8))
    sets = kh.SetBatch(keys / 2, query / 2)
    best = (query[:, :1] * keys[:, :, 0]).argmax(axis=1)
    y = keys[np.arange(400), best, 0]
    options = {"steps": 20, "scale": 0.5, "n_heads": 64}
    fits = {
        covariance: kh.AttentionRegressor(
            100,
            kh.LearnedHeads(covariance=covariance, **options),
            activation="softmax",
            random_state=0,
            scaling="none",
            query="given",
        ).fit(sets[:300], y[:300])
        for covariance in ("none", "diagonal")
    }
    law = fits["diagonal"].law_
    assert fits["none"].law_.query_scales_ is None
    assert law.chosen == "learned"
    assert law.query_scales_[0] > 1.5 * np.median(law.query_scales_), "the coordinate that matters"
    assert law.key_scales_[0] > 1.5 * np.median(law.key_scales_)
    heads = law.sample(4000, 8, seed=1) - law.means_[0]
    measured = heads.std(axis=0) / (law.scale * np.outer(law.query_scales_, law.key_scales_))
    np.testing.assert_allclose(measured, 1.0, rtol=0.1)
    with pytest.raises(ValueError, match="infinitely many heads need noise of one scale"):
        kh.AttentionRegressor(math.inf, kh.LearnedHeads(covariance="diagonal"), scaling="none", query="given").fit(
            sets, y
        )
    infinite = kh.AttentionRegressor(
        math.inf, kh.LearnedHeads(steps=5), random_state=0, scaling="none", query="given"
    ).fit(sets[:100], y[:100])
    assert infinite.law_.query_scales_ is None, "auto"
    with pytest.raises(ValueError, match="noise of one scale"):
        kh.AttentionRegressor(math.inf, law, scaling="none", query="given").fit(sets, y)


def test_weights_of_zero_and_wrong_groups(task):
    sets, y = task
    groups = np.arange(80) // 4
    weights = (np.arange(80) >= 8).astype(float)
    law = kh.LearnedHeads(**FAST)
    found = kh.AttentionRegressor(16, law, random_state=0, scaling="none", query="given").fit(
        sets, y, weights, groups=groups
    )
    expected = kh.AttentionRegressor(16, law, random_state=0, scaling="none", query="given").fit(
        sets[8:], y[8:], groups=groups[8:]
    )
    np.testing.assert_allclose(found.predict(sets), expected.predict(sets), atol=1e-7)
    with pytest.raises(ValueError, match="at least two groups"):
        kh.AttentionRegressor(16, law=kh.GaussianHeads(), scaling="none", query="given").fit(
            sets, y, groups=np.zeros(80)
        )
    with pytest.raises(ValueError, match="`groups` must have one entry per set"):
        kh.AttentionRegressor(16, law=kh.GaussianHeads(), scaling="none", query="given").fit(
            sets, y, groups=np.arange(3)
        )


def test_siblings_do_not_fool_the_penalty(rng):
    """Copies with a little noise: leave-one-out believes what leaving groups out does not."""
    families = rng.normal(size=(40, 3))
    groups = np.repeat(np.arange(40), 4)
    sets = kh.SetBatch((families[groups] + 0.01 * rng.normal(size=(160, 3)))[:, None, :])
    y = rng.normal(size=40)[groups]  # a family's own number: nothing to learn
    plain = kh.AttentionRegressor(50, random_state=0, law=kh.GaussianHeads(), scaling="none", query="given").fit(
        sets, y
    )
    grouped = kh.AttentionRegressor(50, random_state=0, law=kh.GaussianHeads(), scaling="none", query="given").fit(
        sets, y, groups=groups
    )
    assert plain.loo_error_ < 0.5 * y.var()
    assert grouped.loo_error_ > 0.8 * y.var()
    assert grouped.alpha_ > plain.alpha_


def test_improvement_is_a_mean_with_its_standard_error(rng):
    before, after = rng.normal(size=(2, 50)) ** 2
    mean, error = improvement(before, after, None)
    np.testing.assert_allclose(mean, (before - after).mean())
    np.testing.assert_allclose(error, (before - after).std() / np.sqrt(50))
    doubled = improvement(np.repeat(before, 2), np.repeat(after, 2), None)
    np.testing.assert_allclose(doubled[0], improvement(before, after, np.full(50, 2.0))[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_means": 0}, "`n_means` must be at least 1"),
        ({"n_means": 9, "n_heads": 8}, "so that each has a head"),
        ({"scale": 0.0}, "`scale` must be larger than 0"),
        ({"validation": 1.5}, "`validation` must be a share"),
        ({"n_heads": "many"}, "`n_heads` must be one of 'auto'"),
        ({"seconds": -1.0}, "`seconds` must be"),
    ],
)
def test_wrong_parameters_are_named(wrong, message, task):
    with pytest.raises(ValueError, match=message):
        kh.LearnedHeads(**wrong).fit(*task)


def test_step_has_no_gradient(task):
    with pytest.raises(ValueError, match="`activation` must be one of 'relu', 'softmax'"):
        kh.LearnedHeads(**FAST).fit(*task, activation="step")
    assert kh.LearnedHeads(steps=0).fit(*task, activation="step").steps == 0


def test_identity_heads_keep_the_first_pair_in_doubt(rng):
    sets = kh.targets.sphere_sets(60, n_keys=3, dim=3, seed=0)
    law = kh.IdentityHeads(strengths=(2.0, 2.0, 2.0)).fit(sets, rng.normal(size=60))
    assert (law.strength, law.scale) == (2.0, 0.5)
    with pytest.raises(ValueError, match="`strengths` must be a sequence"):
        kh.IdentityHeads(strengths=3.0).fit(sets, rng.normal(size=60))
    with pytest.raises(ValueError, match=r"`scales\[0\]` must be larger than 0"):
        kh.IdentityHeads(scales=(0.0,)).fit(sets, rng.normal(size=60))


def test_names_must_fit():
    with pytest.raises(ValueError, match="must name the 3 coordinates"):
        FittedHeads(np.zeros((1, 4, 4)), 0.5).strongest_pairs(["a"])


def test_threads_change_no_bit(task, monkeypatch):
    sets, y = task
    found = []
    for threads in ("1", "3"):
        monkeypatch.setenv("NUMBA_NUM_THREADS", threads)
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        found.append(kh.LearnedHeads(**FAST).fit(sets, y, activation="softmax").means_)
    np.testing.assert_array_equal(*found)
