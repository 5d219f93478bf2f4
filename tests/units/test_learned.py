import math
from dataclasses import replace

import numpy as np
import pytest
from devices import DEVICE
from paper import paper_regressor

import keyhole as kh
from keyhole import costs
from keyhole.attention.descent import Adam, DescentSettings, HeadDescent, HostSamples
from keyhole.attention.head_error import (
    Judgement,
    Task,
    gradient_in_heads,
    held_out_parts,
    improvement,
    judge,
)
from keyhole.attention.heads import FittedHeads, HeadDistribution, Step, standard_normals
from keyhole.attention.hops import CHAIN, Start
from keyhole.attention.search import (
    Descended,
    RunningDescent,
    Split,
    SplitView,
    TaskView,
    best_of_fewest_hops,
    choose_identity,
    race_from_all_starts,
    starts_of,
)
from keyhole.spec import LayerSpec


@pytest.fixture
def task(rng):
    sets = kh.targets.sphere_sets(80, n_keys=3, dim=3, seed=int(rng.integers(1000)))
    return sets, kh.targets.Correlation(3, 3)(sets) * 5


FAST = {"max_iter": 6, "hops": 1}


def test_learned_heads_are_a_distribution_that_needs_a_training_set():
    for distribution in (kh.LearnedHeads(), kh.IdentityHeads()):
        assert isinstance(distribution, HeadDistribution)
        with pytest.raises(ValueError, match="has no heads before it has seen a training set"):
            distribution.sample(3, 2, 0)


def test_the_result_is_determined_by_data_parameters_and_seed(task):
    sets, y = task
    first, second = (kh.LearnedHeads(**FAST).fit(sets, y, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first.means_, second.means_)
    assert first.history == second.history
    models = [
        kh.AttentionRegressor(
            16,
            heads=kh.LearnedHeads(**FAST),
            random_state=1,
            scaling="none",
            query="given",
            activation="relu",
            pooling="mean",
        ).fit(sets, y)
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*(model.predict(sets) for model in models))


def test_fitted_heads_nest_and_share_out_their_means(rng):
    distribution = FittedHeads(rng.normal(size=(3, 4, 4)), scale=0.3)
    whole = distribution.sample(10, 3, seed=5)
    np.testing.assert_array_equal(distribution.sample(4, 3, seed=5, start=6), whole[6:])
    noise = kh.GaussianHeads(0.0, 0.3).sample(10, 3, seed=5)
    np.testing.assert_allclose(whole - noise, distribution.means_[np.arange(10) % 3], atol=1e-14)
    with pytest.raises(ValueError, match="fitted to tokens of dimension 3"):
        distribution.sample(2, 5, 0)


def test_no_steps_is_a_choice_among_identities(task):
    sets, y = task
    distribution = kh.LearnedHeads(max_iter=0).fit(sets, y)
    assert distribution.chosen in ("zero-mean", "identity")
    assert distribution.steps == 0
    assert distribution.history == ()


def test_few_samples_are_not_descended_on(task):
    sets, y = task
    assert kh.LearnedHeads(**FAST).fit(sets[:40], y[:40]).history == ()


@pytest.mark.parametrize(
    ("n", "gain", "learns"),
    [(80, 1.9, False), (80, 2.1, True), (310, 1.9, False), (310, 2.1, True)],
)
def test_learned_heads_are_kept_by_two_standard_errors(n, gain, learns, monkeypatch, seed):
    def gains(start, view, split, base):
        return descended(start, view, split, base, error=0.5, gain=gain, standard_error=1.0)

    tell_descents(monkeypatch, gains)
    sets = kh.targets.sphere_sets(n, n_keys=2, dim=2, seed=seed)
    distribution = kh.LearnedHeads(**FAST).fit(sets, kh.targets.Correlation(2, 2)(sets))
    assert distribution.steps == (1 if learns else 0)
    assert distribution.reason.startswith("nothing learned by more than 2") is not learns


def tell_descents(monkeypatch, result):
    """Let every descent come to what a function of its start says, at once."""

    class ToldDescent(RunningDescent):
        def __init__(self, start, split_view, base, incumbent):
            self.descended = result(start, split_view.view, split_view.split, base)

        def go_on(self, share):
            pass

        def stop(self):
            pass

    monkeypatch.setattr("keyhole.attention.search.RunningDescent", ToldDescent)


def descended(start, view, split, base, error, gain, standard_error, best_step=1):
    """A descent that reached a held-out error, with so much gain, from 1.0 without learning."""
    matrices = view.plan.start(base, view.task, start)
    *hops, means = matrices
    reached = FittedHeads(means, 0.25, hops_=tuple(hops), steps=best_step)
    n_held_out = sum(int(mask.sum()) for mask in split.masks)
    return Descended(
        start=start,
        view=view,
        matrices=matrices,
        history=(Step(0, 1.0, 1.0), Step(best_step, error, error)),
        errors=np.full(n_held_out, error),
        gain=gain,
        standard_error=standard_error,
        distributions=[reached] * len(split.masks),
        alpha=1.0,
    )


def test_verbose_says_what_was_tried(task, capsys):
    sets, y = task
    distribution = kh.LearnedHeads(hops="auto", max_iter=6, verbose=True).fit(sets, y)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("1 hop: held-out error")
    assert lines[1].startswith("2 hops: held-out error")
    assert lines[-1] == distribution.reason


@pytest.mark.parametrize("activation", ["relu", "softmax"])
@pytest.mark.parametrize("n_means", [1, 3])
def test_estimators_fit_the_heads_first(activation, n_means, task):
    sets, y = task
    distribution = kh.LearnedHeads(n_means=n_means, **FAST)
    model = kh.AttentionRegressor(
        16,
        heads=distribution,
        activation=activation,
        random_state=0,
        scaling="none",
        query="given",
        pooling="mean",
    ).fit(sets, y)
    assert model.heads is distribution, "the parameter is left alone"
    assert isinstance(model.heads_, FittedHeads)
    np.testing.assert_array_equal(model.layer_.heads.block(0, 16), model.heads_.sample(16, 3, 0))
    assert model.heads_.reason


def test_infinite_heads_take_learned_heads(task):
    sets, y = task
    model = kh.AttentionRegressor(
        math.inf,
        heads=kh.LearnedHeads(n_means=2, **FAST),
        random_state=0,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ).fit(sets, y)
    assert np.isfinite(model.predict(sets)).all()


def test_learning_that_gained_nothing_says_so(rng, capsys):
    """y is noise: no heads are better than others."""
    sets = kh.SetBatch(rng.normal(size=(80, 3, 2)), query=rng.normal(size=(80, 2)))
    y = rng.normal(size=80)
    model = kh.AttentionRegressor(
        16, heads=kh.LearnedHeads(max_iter=5), random_state=0, verbose=True
    )
    summary = model.fit(sets, y).summary()
    assert model.heads_.chosen != "learned"
    words = "Learning the heads gained nothing: predictions are those of heads without learning"
    assert words in summary
    assert words in capsys.readouterr().out


def test_learning_that_gained_says_nothing_of_the_kind(task):
    sets, y = task
    model = kh.AttentionRegressor(16, heads=kh.LearnedHeads(**FAST), random_state=0).fit(sets, y)
    assert model.heads_.chosen == "learned"
    assert "gained nothing" not in model.summary()


def test_the_held_out_part_is_made_of_runs():
    (mask,) = held_out_parts(1000, 0.2, seed=1)
    assert mask.sum() == 200
    assert (np.diff(mask.reshape(100, 10), axis=1) == 0).all()
    assert held_out_parts(90, 0.2, seed=1)[0].sum() == 18
    np.testing.assert_array_equal(
        [mask.sum() for mask in held_out_parts(7, 1 / 7, seed=1, turns=7)], 1
    )


def test_groups_are_held_out_whole(rng):
    groups = rng.integers(30, size=300)
    (mask,) = held_out_parts(300, 0.2, seed=0, groups=groups)
    assert not set(groups[mask]) & set(groups[~mask])
    assert 0.15 < mask.mean() < 0.35
    (one_of_three,) = held_out_parts(9, 0.9, seed=0, groups=np.repeat([0, 1, 2], 3))
    assert one_of_three.sum() == 3, "two are left"
    assert held_out_parts(6, 0.5, seed=0, groups=np.repeat([0, 1], 3), turns=2) == []
    turns = held_out_parts(300, 0.2, seed=0, groups=groups, turns=5)
    np.testing.assert_array_equal(sum(t.astype(int) for t in turns), 1, "each sample once")
    assert all(not set(groups[t]) & set(groups[~t]) for t in turns)


@pytest.mark.parametrize("n_heads", [12, 60, math.inf])
def test_estimators_leave_groups_out(n_heads, task):
    sets, y = task
    groups = np.array(list("abcde"))[
        np.repeat([0, 1, 2, 3, 4, 2], [20, 20, 17, 2, 20, 1])
    ]  # sizes differ
    model = paper_regressor(n_heads, alpha=[0.01, 1.0], random_state=0).fit(sets, y, groups=groups)
    plain = paper_regressor(n_heads, alpha=model.alpha_, random_state=0).fit(sets, y)
    np.testing.assert_allclose(model.predict(sets), plain.predict(sets), atol=1e-8)
    for group in "abcde":
        others = groups != group
        refit = paper_regressor(n_heads, alpha=model.alpha_, random_state=0).fit(
            sets[others], y[others]
        )
        np.testing.assert_allclose(
            model.loo_predictions_[~others], refit.predict(sets[~others]), atol=1e-8
        )
    np.testing.assert_allclose(model.loo_error_, np.mean((y - model.loo_predictions_) ** 2))
    assert model.alpha_ == model.selection_.alphas[np.argmin(model.selection_.errors)]


def test_scales_of_coordinates(rng):
    """The answer is at the key whose first coordinate meets the query's; heads should keep out of
    the other seven.
    """
    keys, query = rng.normal(size=(400, 5, 8)), rng.normal(size=(400, 8))
    sets = kh.SetBatch(keys / 2, query / 2)
    best = (query[:, :1] * keys[:, :, 0]).argmax(axis=1)
    y = keys[np.arange(400), best, 0]
    heads = kh.LearnedHeads(n_means=1, hops=1, scale=0.5, max_iter=40)
    distribution = heads.fit(sets[:300], y[:300], activation="softmax")
    assert distribution.chosen == "learned"
    assert distribution.query_scales_[0] > 1.3 * np.median(distribution.query_scales_), (
        "the coordinate that matters"
    )
    assert distribution.key_scales_[0] > 1.3 * np.median(distribution.key_scales_)
    heads = distribution.sample(4000, 8, seed=1) - distribution.means_[0]
    measured = heads.std(axis=0) / (
        distribution.scale * np.outer(distribution.query_scales_, distribution.key_scales_)
    )
    np.testing.assert_allclose(measured, 1.0, rtol=0.1)

    # infinitely many heads have one scale
    infinite = kh.AttentionRegressor(
        math.inf,
        kh.LearnedHeads(**FAST),
        random_state=0,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ).fit(sets[:100], y[:100])
    assert infinite.heads_.query_scales_ is None
    with pytest.raises(ValueError, match="noise of one scale"):
        kh.AttentionRegressor(
            math.inf, distribution, scaling="none", query="given", activation="relu", pooling="mean"
        ).fit(sets, y)


def test_weights_of_zero_and_wrong_groups(task):
    sets, y = task
    groups = np.arange(80) // 4
    weights = (np.arange(80) >= 8).astype(float)
    distribution = kh.LearnedHeads(**FAST)
    found = kh.AttentionRegressor(
        16,
        distribution,
        random_state=0,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ).fit(sets, y, weights, groups=groups)
    expected = kh.AttentionRegressor(
        16,
        distribution,
        random_state=0,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ).fit(sets[8:], y[8:], groups=groups[8:])
    np.testing.assert_allclose(found.predict(sets), expected.predict(sets), atol=1e-7)
    with pytest.raises(ValueError, match="at least two groups"):
        paper_regressor(16).fit(sets, y, groups=np.zeros(80))
    with pytest.raises(ValueError, match="`groups` must have one entry per set"):
        paper_regressor(16).fit(sets, y, groups=np.arange(3))


def test_siblings_do_not_fool_the_penalty(rng):
    """Copies with a little noise: leave-one-out believes what leaving groups out does not."""
    families = rng.normal(size=(40, 3))
    groups = np.repeat(np.arange(40), 4)
    sets = kh.SetBatch((families[groups] + 0.01 * rng.normal(size=(160, 3)))[:, None, :])
    y = rng.normal(size=40)[groups]  # a family's own number: nothing to learn
    plain = paper_regressor(50, random_state=0).fit(sets, y)
    grouped = paper_regressor(50, random_state=0).fit(sets, y, groups=groups)
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
        ({"scale": 0.0}, "`scale` must be larger than 0"),
        ({"validation_fraction": 1.5}, "`validation_fraction` must be a share"),
        ({"max_iter": -1}, "`max_iter` must be at least 0"),
    ],
)
def test_wrong_parameters_are_named(wrong, message, task):
    with pytest.raises(ValueError, match=message):
        kh.LearnedHeads(**wrong).fit(*task)


def test_step_has_no_gradient(task, monkeypatch):
    monkeypatch.setattr(
        "keyhole.attention.learned.learn", lambda *_: pytest.fail("long work before the check")
    )
    with pytest.raises(ValueError, match="`activation` must be one of 'relu', 'softmax'"):
        kh.LearnedHeads(**FAST).fit(*task, activation="step")
    monkeypatch.undo()
    assert kh.LearnedHeads(max_iter=0).fit(*task, activation="step").steps == 0


@pytest.mark.parametrize("distribution", [kh.LearnedHeads(max_iter=0), kh.IdentityHeads(n_heads=4)])
def test_heads_are_learned_with_seed_zero_and_relu_unless_told(distribution, task):
    told = distribution.fit(*task, seed=0, activation="relu", fit_intercept=True)
    assert distribution.fit(*task).reason == told.reason
    assert distribution.fit(*task, seed=1).reason != told.reason


def test_identity_heads_keep_the_first_pair_in_doubt(rng):
    sets = kh.targets.sphere_sets(60, n_keys=3, dim=3, seed=0)
    distribution = kh.IdentityHeads(strengths=(2.0, 2.0, 2.0)).fit(sets, rng.normal(size=60))
    assert (distribution.strength, distribution.scale) == (2.0, 0.5)
    with pytest.raises(ValueError, match="`strengths` must be a sequence"):
        kh.IdentityHeads(strengths=3.0).fit(sets, rng.normal(size=60))
    with pytest.raises(ValueError, match=r"`scales\[0\]` must be larger than 0"):
        kh.IdentityHeads(scales=(0.0,)).fit(sets, rng.normal(size=60))


def test_names_must_fit():
    distribution = FittedHeads(np.eye(4)[None, :2], 0.5)  # queries of one coordinate, keys of three
    assert distribution.strongest_pairs(["a", "b", "c"], 2, query_names=["q"]) == [
        ("q", "a", 1.0),
        ("1", "b", 1.0),
    ]
    signed = FittedHeads(np.array([[[1.0, -3.0], [2.0, 0.0]]]), 0.5)
    assert signed.strongest_pairs(["a"], 3) == [("a", "1", -3.0), ("1", "a", 2.0), ("a", "a", 1.0)]
    for names, asked, words in (
        (["a"], ["q"], "`names` must name the 3 coordinates of a token: got 1 names"),
        (
            ["a", "b", "c"],
            ["q", "r"],
            "`query_names` must name the 1 coordinates of a query: got 2 names",
        ),
        (
            ["a", "b", "c"],
            None,
            "`query_names` must name the 1 coordinates of a token: got 3 names",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            distribution.strongest_pairs(names, query_names=asked)


def test_learned_heads_say_what_they_were_fitted_to():
    for rows, given, words in (
        (4, (2,), "tokens of dimension 3, and its heads are 4 × 4: got dim 2"),
        (4, (3, 2), "tokens of dimension 3, and its heads are 4 × 4: got dim 3 and query_dim 2"),
        (
            2,
            (3,),
            "queries of dimension 1 and keys of dimension 3, and its heads are 2 × 4: got dim 3",
        ),
    ):
        with pytest.raises(ValueError, match=f"this head distribution was fitted to {words}"):
            FittedHeads(np.zeros((1, rows, 4)), 0.5).components(*given)


def test_threads_change_no_bit(task, monkeypatch):
    sets, y = task
    found = []
    for threads in ("1", "3"):
        monkeypatch.setenv("NUMBA_NUM_THREADS", threads)
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        found.append(kh.LearnedHeads(**FAST).fit(sets, y, activation="softmax").means_)
    np.testing.assert_array_equal(*found)


# ---- the descent, step by step -------------------------------------------------------------------


def plan_of(n=100, dim=2, seed=3, meant_for=None, settings=None, **options):
    sets = kh.SetBatch(np.full((n, 1, dim), 0.5), np.ones((n, dim)))
    task = Task(sets, np.zeros((n, 1)), None, "relu", True)
    return kh.LearnedHeads(**options).plan(
        task, seed, meant_for, None, settings or DescentSettings()
    )


def test_the_seven_options_and_their_documented_defaults():
    assert kh.LearnedHeads().get_params() == {
        "n_means": 2,
        "hops": "auto",
        "patterns": 1,
        "scale": 0.25,
        "max_iter": 300,
        "validation_fraction": 0.2,
        "verbose": False,
    }
    plan = plan_of()
    assert (plan.n_means, plan.scale, plan.steps, plan.patterns) == (2, 0.25, 300, 1)
    assert (plan.hops, plan.ages, plan.validation) == ((1, 2, 3), None, 0.2)
    assert plan.scales() == [0.5, 0.25, 0.1]
    assert plan_of(scale=0.1).scales() == [0.5, 0.1], "each once"


def test_the_rate_is_steady_and_falls_at_the_end():
    settings = DescentSettings(rate=0.05, steady_share=0.6, last_rate=0.1)
    rates = [settings.rate_at(count, 100) for count in (0, 60, 80, 100, 150)]
    np.testing.assert_allclose(rates, [0.05, 0.05, 0.0275, 0.005, 0.005])


@pytest.mark.parametrize(
    ("n", "options", "meant_for", "heads"),
    [
        (10, {"hops": 1}, None, (16, 16)),  # never fewer than 16
        (100, {"hops": 1}, None, (34, 34)),  # as many features as samples, rounded up
        (100, {"hops": 1}, 100, (34, 100)),  # judged with as many as the layer will have
        (100, {"hops": 1}, 1000, (34, 134)),  # or four times as many features as samples
        (10, {"hops": 1}, 1000, (16, 32)),
        (5000, {"hops": 1}, 10, (200, 200)),
        (10, {"hops": 1, "n_means": 40}, None, (40, 40)),
        (10, {"hops": 2}, None, (8, 8)),
        (900, {"hops": 3}, None, (116, 116)),  # 1/√3 of the samples
    ],
)
def test_heads_of_a_step_follow_the_samples(n, options, meant_for, heads):
    plan = plan_of(n, meant_for=meant_for, **options)
    assert (*plan.heads_per_step.values(), plan.judge_heads) == heads


def test_several_means_start_a_little_apart(rng):
    base = FittedHeads(rng.normal(size=(1, 3, 3)), 0.5)
    one = Task(
        kh.SetBatch(np.ones((1, 1, 2)), np.ones((1, 2))), np.zeros((1, 1)), None, "relu", True
    )
    alone = plan_of(n_means=1).start(base, one, Start(1))
    np.testing.assert_array_equal(alone, [base.means_])
    own = standard_normals(3, 9, 3 + 1).reshape(3, 3, 3)
    found = plan_of(n_means=3).start(base, one, Start(1))
    np.testing.assert_allclose(found, [base.means_ + 0.02 * own], rtol=1e-13)


def textbook_adam(rate, gradients):
    """Where Adam goes along these gradients, from zero."""
    first = second = place = 0.0
    for t, gradient in enumerate(gradients, start=1):
        first = 0.9 * first + (1 - 0.9) * gradient
        second = 0.99 * second + (1 - 0.99) * gradient**2
        size = np.sqrt(second / (1 - 0.99**t))
        place = place - rate * (first / (1 - 0.9**t)) / (size + 1e-4 * size.max() + 1e-12)
    return place


def test_adam_is_the_textbook_one(rng):
    gradients = rng.normal(size=(4, 3)) * 10.0 ** rng.uniform(-8, 8, size=3)
    adam = Adam()
    moved = sum(adam.move(gradient, 0.3) for gradient in gradients)
    np.testing.assert_allclose(moved, textbook_adam(0.3, gradients), rtol=1e-12)
    assert (Adam().move(np.zeros(2), 0.3) == 0).all(), "nowhere to go"
    # what is zero but for rounding hardly moves beside what is not
    moved = Adam().move(np.array([1.0, 1e-8]), 0.3)
    np.testing.assert_allclose(moved, [-0.3, -3e-5], rtol=1e-3)


@pytest.mark.parametrize(("learn_scales", "hops"), [(True, 1), (False, 1), (True, 2)])
def test_a_descent_is_adam_on_fresh_heads_and_fresh_samples(learn_scales, hops, task, rng):
    sets, y = task
    weights = rng.uniform(0.5, 2.0, 80)
    settings = DescentSettings(
        rate=0.05,
        steady_share=0.5,
        last_rate=0.2,
        shrinkage=0.4,
        max_samples=30,
        heads_per_step=6,
        learn_scales=learn_scales,
    )
    plan = plan_of(80, 3, seed=5, settings=settings, scale=0.3, hops=hops, max_iter=7)
    whole = Task.of(sets, y[:, None], weights, "relu", True)
    rows = 4 if hops == 1 else 7
    start = [*([rng.normal(size=(1, 4, 4))] if hops == 2 else []), rng.normal(size=(2, rows, 4))]
    descent = HeadDescent(HostSamples(whole), np.arange(80), start, 0.7, plan)
    matrices, scales, log_alpha = [m.copy() for m in start], np.zeros(rows + 4), math.log(0.7)
    averages, average_scales = [np.zeros_like(m) for m in start], np.zeros(rows + 4)
    adams, of_scales, of_alpha = [Adam() for _ in start], Adam(), Adam()
    for count in range(7):
        drawn = np.random.default_rng([5, count]).standard_normal((6, rows, 4), dtype=np.float32)
        noise = (
            0.3
            * drawn
            * (np.exp(scales[:rows])[:, None] * np.exp(scales[rows:])).astype(np.float32)
        )
        part = whole.at_most(30 if hops == 1 else 21, 5 + count)
        assert len(part) in (30, 21)
        *inner, means = matrices
        options = {"scales": learn_scales, "hops": inner}
        rate = settings.rate_at(count, 7)
        found = gradient_in_heads(part, means, noise, math.exp(log_alpha), **options)
        assert descent.step() == found.error
        share = max(0.2, 1 / (count + 1))  # the mean of all steps so far, later of about five
        for i, gradient in enumerate([*found.hops, found.means]):
            matrices[i] += adams[i].move(gradient + 2 * 0.4 * (matrices[i] - start[i]), rate)
            averages[i] += share * (matrices[i] - averages[i])
        if learn_scales:
            scales += of_scales.move(found.scales, rate)
            average_scales += share * (scales - average_scales)
        log_alpha += float(of_alpha.move(np.array(found.log_alpha), 0.1))
        for mine, theirs in zip(matrices, descent.matrices, strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=1e-9)
        assert descent.log_alpha == pytest.approx(log_alpha, rel=1e-9)
    distribution = descent.distribution(steps=7)
    assert (distribution.scale, distribution.steps, distribution.hops) == (0.3, 7, hops)
    for mine, theirs in zip(averages, [*distribution.hops_, distribution.means_], strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-9)
    if not learn_scales:
        assert distribution.query_scales_ is None
    else:
        found_scales = np.concatenate([distribution.query_scales_, distribution.key_scales_])
        np.testing.assert_allclose(found_scales, np.exp(average_scales), rtol=1e-9)
    again = HeadDescent(HostSamples(whole), np.arange(80), start, 0.7, plan, distribution)
    np.testing.assert_array_equal(again.matrices[-1], distribution.means_)
    assert again.anchors[-1] is start[-1]
    assert again.steps_before == 7, "the schedule goes on"


def test_a_penalty_that_float32_cannot_carry_is_raised(task, monkeypatch):
    sets, y = task
    whole = Task.of(sets, y[:, None], None, "relu", True)
    tried = []

    def refuse(part, means, noise, alpha, scales, hops):
        tried.append(alpha)
        raise np.linalg.LinAlgError

    monkeypatch.setattr("keyhole.attention.descent.gradient_in_heads", refuse)
    with pytest.raises(
        ValueError, match=r"not finite in float32, so a head distribution cannot be descended on"
    ):
        HeadDescent(
            HostSamples(whole), np.arange(80), [np.zeros((1, 4, 4))], 1e-20, plan_of(80, 3)
        ).step()
    np.testing.assert_allclose(tried, 1e-20 * np.exp(np.arange(60)), rtol=1e-9)


def counting(n_samples, seed):
    """Sets of 12 symbols out of 8 as one-hot keys; the query is a symbol, the output how often it
    occurs.
    """
    rng = np.random.default_rng(seed)
    keys = rng.integers(8, size=(n_samples, 12))
    query = rng.integers(8, size=n_samples)
    sets = kh.SetBatch(np.eye(8)[keys], query=np.eye(8)[query])
    return sets, (keys == query[:, None]).sum(axis=1).astype(float)


@pytest.mark.parametrize("alpha", [1e-30, 1e-12, 1e-6])
@pytest.mark.parametrize("grouped", [False, True])
def test_learned_heads_are_judged_at_a_penalty_that_float32_carries(alpha, grouped):
    """Without noise a descent may end at any penalty: of 256 features that repeat each other none
    is too small.
    """
    sets, y = counting(200, seed=0)
    groups = np.arange(200) // 2 if grouped else None
    weights = np.linspace(0.1, 10.0, 200)
    whole = Task.of(sets, y[:, None], weights, "linear", True, groups)
    seen, unseen = whole.take(np.arange(150)), whole.take(np.arange(150, 200))
    found = judge(seen, kh.GaussianHeads(1.0), 256, 0, unseen, alpha)
    assert found.alpha >= alpha
    assert found.loo.mean() < 1e-4
    assert found.held_out.mean() < 1e-4


@pytest.mark.parametrize("alpha", [1e-30, 1e-6])
def test_a_device_judges_at_a_penalty_that_float32_carries(alpha):
    pytest.importorskip(
        "torch", reason="head distributions are learned on a device where torch is installed"
    )
    from keyhole.attention.torch_heads import DeviceSamples

    sets, y = counting(200, seed=0)
    whole = Task.of(sets, y[:, None], np.linspace(0.1, 10.0, 200), "linear", True)
    distribution = FittedHeads(np.eye(9)[None], 0.5)
    heads = distribution.sample(256, 8, 0).astype(np.float32)
    found = DeviceSamples(whole, DEVICE).judge(
        distribution,
        np.arange(150),
        n_heads=256,
        seed=0,
        heads=heads,
        unseen=np.arange(150, 200),
        alpha=alpha,
    )
    assert found.alpha >= alpha
    assert found.loo.mean() < 1e-4
    assert found.held_out.mean() < 1e-4


def test_a_device_says_that_features_overflow(task):
    pytest.importorskip(
        "torch", reason="head distributions are learned on a device where torch is installed"
    )
    from keyhole.attention.torch_heads import DeviceSamples

    sets, y = task
    whole = Task.of(sets, y[:, None], None, "exp", True)
    samples = DeviceSamples(whole, DEVICE)
    heads = np.full((7, whole.batch.query_dim + 1, whole.batch.dim + 1), 1e4)
    with pytest.raises(ValueError, match=r"features and kernels must.*Scale the tokens down"):
        samples.judge(kh.GaussianHeads(), np.arange(60), n_heads=7, seed=0, heads=heads)


@pytest.mark.parametrize("alpha", [None, 0.03])
@pytest.mark.parametrize("with_groups", [False, True])
@pytest.mark.parametrize("with_hop", [False, True])
def test_a_device_judges_as_the_host_does(task, rng, alpha, with_groups, with_hop):
    pytest.importorskip(
        "torch", reason="head distributions are learned on a device where torch is installed"
    )
    from keyhole.attention.torch_heads import DeviceSamples

    sets, y = task
    weights = rng.uniform(0.5, 2.0, 80)
    groups = np.arange(80) // 3 if with_groups else None
    outputs = np.stack([y + 3.0, y**2], axis=1)
    whole = Task.of(sets, outputs, weights, "softmax", True, groups)
    dim, query_dim = whole.batch.dim, whole.batch.query_dim
    distribution = FittedHeads(rng.normal(size=(2, query_dim + 1, dim + 1)), 0.5)
    if with_hop:
        distribution = FittedHeads(
            rng.normal(size=(2, query_dim + dim + 1, dim + 1)),
            0.5,
            hops_=(rng.normal(size=(1, query_dim + 1, dim + 1)),),
        )
    settings = {"n_heads": 7, "seed": 3, "unseen": np.arange(60, 80), "alpha": alpha}
    host = HostSamples(whole).judge(distribution, np.arange(60), **settings)
    device = DeviceSamples(whole, DEVICE).judge(distribution, np.arange(60), **settings)
    assert device.alpha == pytest.approx(host.alpha, rel=1e-2)
    assert device.spread == pytest.approx(host.spread, rel=1e-4)
    np.testing.assert_allclose(device.loo, host.loo, rtol=1e-2, atol=1e-4)
    np.testing.assert_allclose(device.held_out, host.held_out, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("n_samples", [600, 1000])
@pytest.mark.parametrize("seed_of_data", [0, 1, 2])
def test_counting_without_noise_is_learned(n_samples, seed_of_data):
    sets, y = counting(n_samples, seed_of_data)
    model = kh.AttentionRegressor(heads=kh.LearnedHeads(hops=1), random_state=0).fit(sets, y)
    assert model.loo_error_ < 1e-6 * y.var()


@pytest.mark.parametrize("with_groups", [False, True])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_a_distribution_is_judged_by_a_fit_of_its_heads(with_groups, fit_intercept, task, rng):
    sets, y = task
    y = y + 3.0
    weights, groups = rng.uniform(0.5, 2.0, 80), np.arange(80) // 2 if with_groups else None
    whole = Task.of(sets, np.stack([y, y**2], axis=1), weights, "relu", fit_intercept, groups)
    seen, unseen = whole.take(np.arange(60)), whole.take(np.arange(60, 80))
    found = judge(seen, kh.GaussianHeads(1.0), 5, 2, unseen)
    options = {
        "alpha": found.alpha,
        "fit_intercept": fit_intercept,
        "random_state": 2,
    }
    model = paper_regressor(5, heads=kh.GaussianHeads(1.0), **options)
    model.fit(seen.batch, seen.columns, seen.weights, groups=seen.groups)
    left_out = np.square(seen.columns - model.loo_predictions_).mean(axis=1)
    np.testing.assert_allclose(found.loo, left_out, rtol=2e-2, atol=2e-3)
    ahead = np.square(unseen.columns - model.predict(unseen.batch)).mean(axis=1)
    np.testing.assert_allclose(found.held_out, ahead, rtol=2e-2, atol=2e-3)
    assert judge(seen, kh.GaussianHeads(1.0), 5, 2).held_out.size == 0


def test_a_task_is_centred_scaled_and_without_samples_of_no_weight(task, rng):
    sets, y = task
    weights = np.where(np.arange(80) % 4, rng.uniform(0.5, 2.0, 80), 0.0)
    kept = weights > 0
    columns = np.stack([y, 2 * y + 7], axis=1)
    found = Task.of(sets, columns, weights, "relu", True, np.arange(80))
    assert found.groups.tolist() == np.flatnonzero(kept).tolist()
    np.testing.assert_array_equal(found.batch.tokens, sets[kept].tokens)
    np.testing.assert_allclose(
        np.average(found.columns, axis=0, weights=found.weights), 0.0, atol=1e-12
    )
    assert np.average(
        np.square(found.columns).mean(axis=1), weights=found.weights
    ) == pytest.approx(1.0)
    np.testing.assert_allclose(found.columns[:, 1], 2 * found.columns[:, 0], atol=1e-9)
    plain = Task.of(sets, columns, None, "relu", False)
    assert len(plain) == 80
    np.testing.assert_allclose(
        plain.columns, columns / np.sqrt(np.square(columns).mean()), rtol=1e-12
    )
    assert (Task.of(sets, np.ones((80, 1)), None, "relu", True).columns == 0).all(), (
        "nothing to scale"
    )
    part = found.at_most(20, 1)
    assert part.groups.tolist() == sorted(part.groups) != found.at_most(20, 2).groups.tolist()
    assert found.at_most(len(found), 1) is found


# ---- the search, with descents that are told what to find ----------------------------------------


class Told:
    """Descents that reach the held-out errors that they are told, one for every check."""

    def __init__(self, monkeypatch, errors):
        self.errors = errors
        monkeypatch.setattr("keyhole.attention.search.HeadDescent", self.descent)
        monkeypatch.setattr("keyhole.attention.descent.LearningPlan.judge_of", self.judge_of)

    def descent(self, samples, rows, start, alpha, plan):
        return Followed()

    def judge_of(self, samples, seen, unseen):
        def judge_heads(distribution, alpha):
            error = self.errors[-(-distribution.steps // 5)]
            spread = np.resize([-0.5, 0.5], len(unseen))
            return Judgement(np.full(len(seen), 0.25), error + spread, 1.0)

        return judge_heads


class Followed:
    """A descent that counts its steps."""

    alpha = 1.0
    count = 0

    def step(self):
        self.count += 1

    def distribution(self, steps=0):
        return FittedHeads(np.zeros((1, 4, 4)), 0.5, steps=steps)


def descent_that_finds(
    monkeypatch, task, errors, max_iter, parts=1, weights=None, groups=None, rounds=(1.0,)
):
    """What comes of a descent with these held-out errors, the first of them without learning."""
    told = Told(monkeypatch, errors)
    whole = Task.of(task[0], task[1][:, None], weights, "relu", True, groups)
    plan = plan_of(80, 3, hops=1, max_iter=max_iter)
    view = TaskView.of(whole, plan, ignores_ages=False)
    masks = [np.arange(80) % 5 == part for part in range(parts)]
    held_out = [np.flatnonzero(mask) for mask in masks]
    seen = [np.flatnonzero(~mask) for mask in masks]
    judged = np.concatenate(held_out)
    split = Split(
        masks=masks,
        fitted=seen,
        judged=held_out,
        standard_errors=1,
        weights=None if weights is None else whole.weights[judged],
        groups=None if groups is None else whole.groups[judged],
    )
    base = FittedHeads(np.zeros((1, 4, 4)), 0.5)
    incumbent = []
    for fitted_rows, judged_rows in zip(seen, held_out, strict=True):
        errors_before = errors[0] + np.resize([-1.0, 1.0], len(judged_rows))
        incumbent.append(Judgement(np.full(len(fitted_rows), 0.5), errors_before, 1.0))
    assert told.errors
    running = RunningDescent(Start(1), SplitView.of(view, split), base, incumbent)
    for share in rounds:
        running.go_on(share)
    return running.descended


def test_a_descent_passes_a_plateau(monkeypatch, task):
    """It is run to its end: the held-out error rises for ten checks, and then falls."""
    errors = [2.0, *[2.1] * 10, 1.0, 0.5, 0.2, 0.1, 0.1]
    found = descent_that_finds(monkeypatch, task, errors, max_iter=75)
    assert [step.step for step in found.history] == list(range(0, 76, 5))
    np.testing.assert_allclose([step.held_out_error for step in found.history], errors)
    assert found.best.step == 70, "the first of its error"
    assert found.gain == pytest.approx(1.9)
    assert found.standard_error == pytest.approx(0.5 / math.sqrt(16))
    assert found.distributions[0].steps == 70


def test_a_descent_that_diverges_ends(monkeypatch, task):
    errors = [2.0, 2.2, 3.2, 3.4, 0.1, 0.1]
    found = descent_that_finds(monkeypatch, task, errors, max_iter=25)
    assert [step.step for step in found.history] == [0, 5, 10, 15], "1.5 times 2.2 is exceeded"
    assert (found.gain, found.best.step) == (0.0, 0)


def test_a_descent_that_solved_the_task_ends_once_it_hardly_gains(monkeypatch, task):
    # 0.019 is below 2 %; 0.008 is less than 0.8 times that, and 0.0079 is not
    errors = [2.0, 1.0, 1.0, 0.019, 0.008, 0.0079, 0.0001]
    found = descent_that_finds(monkeypatch, task, errors, max_iter=30)
    assert [step.step for step in found.history] == [0, 5, 10, 15, 20, 25]
    assert found.best.step == 25


def test_a_descent_goes_on_where_the_task_was_solved_without_learning(monkeypatch, task):
    """It may begin above what is there without learning, and end far below it."""
    errors = [0.01, 0.5, 0.3, 0.1, 0.05, 0.001]
    found = descent_that_finds(monkeypatch, task, errors, max_iter=25)
    assert found.best.step == 25


def test_a_descent_is_checked_at_its_last_step(monkeypatch, task):
    found = descent_that_finds(monkeypatch, task, [2.0, 1.9, 1.8, 1.7], max_iter=12)
    assert [step.step for step in found.history] == [0, 5, 10, 12]
    assert found.gain == pytest.approx(0.3)


def test_a_descent_in_rounds_is_the_same_as_in_one_go(monkeypatch, task):
    errors = [2.0, 1.9, 2.1, 1.5, 1.7, 1.6]
    at_once = descent_that_finds(monkeypatch, task, errors, max_iter=25)
    in_rounds = descent_that_finds(monkeypatch, task, errors, max_iter=25, rounds=(0.2, 0.5, 1.0))
    assert in_rounds.history == at_once.history
    assert in_rounds.best.step == 15
    # a round ends with the first check at or after its share of the steps
    part = descent_that_finds(monkeypatch, task, errors, max_iter=25, rounds=(0.41,))
    assert [step.step for step in part.history] == [0, 5, 10, 15]


def race(monkeypatch, errors_of, rounds=(0.2, 0.4, 1.0)):
    """The results of a race in which every start has one held-out error for each round."""

    class ToldDescent:
        def __init__(self, start, split_view, base, incumbent):
            self.start = start
            self.view = split_view.view
            self.split = split_view.split
            self.base = base
            self.go_on(0.0)

        def go_on(self, share):
            error = errors_of[self.start][(0.0, *rounds).index(share)]
            best_step = round(100 * share)
            self.descended = descended(
                self.start, self.view, self.split, self.base, error, 0.0, 0.0, best_step
            )

        def stop(self):
            pass

        @property
        def has_solved(self):
            return self.descended.best.held_out_error <= 0.02

    monkeypatch.setattr("keyhole.attention.search.RunningDescent", ToldDescent)
    sets = kh.targets.sphere_sets(60, n_keys=2, dim=2, seed=0)
    whole = Task.of(sets, kh.targets.Correlation(2, 2)(sets)[:, None], None, "relu", True)
    plan = replace(plan_of(60), starts=tuple(errors_of))
    view = TaskView.of(whole, plan, ignores_ages=False)
    split = Split.of(whole, plan)
    base = FittedHeads(np.zeros((1, 3, 3)), 0.5)
    return race_from_all_starts(whole, view, plan, split, base, rounds)


def test_the_better_half_of_the_descents_goes_on(monkeypatch):
    """One that is behind after a few steps may win, if it is not among the worse half."""
    errors_of = {
        Start(1): [1.0, 0.9, 0.8, 0.7],
        Start(2): [1.0, 0.7, 0.3, 0.1],
        Start(3): [1.0, 0.5, 0.5, 0.5],
        Start(2, CHAIN): [1.0, 0.6, 0.4, 0.4],
        Start(3, CHAIN): [1.0, 0.95, 0.03, 0.03],
    }
    results = race(monkeypatch, errors_of)
    assert [result.start for result in results] == list(errors_of)
    assert [result.history[-1].step for result in results] == [20, 100, 40, 100, 20]
    assert [result.finished for result in results] == [False, True, False, True, False]


def test_two_descents_at_least_are_run_to_their_end(monkeypatch):
    errors_of = {Start(1): [1.0, 0.9, 0.8, 0.1], Start(2): [1.0, 0.5, 0.4, 0.3]}
    assert all(result.finished for result in race(monkeypatch, errors_of))


def test_a_descent_that_has_solved_the_task_goes_on_alone(monkeypatch):
    errors_of = {
        Start(1): [1.0, 0.9, 0.5, 0.1],
        Start(2): [1.0, 0.01, 0.005, 0.001],
        Start(3): [1.0, 0.0, 0.0, 0.0],
    }
    results = race(monkeypatch, errors_of)
    assert [result.start.hops for result in results] == [1, 2]
    assert [result.finished for result in results] == [False, True]
    assert results[1].best.held_out_error == 0.001


def test_of_two_that_begin_together_the_second_has_not_begun_if_the_first_solves(monkeypatch):
    errors_of = {
        Start(1): [1.0, 0.9, 0.5, 0.1],
        Start(2): [1.0, 0.8, 0.5, 0.1],
        Start(3): [1.0, 0.01, 0.005, 0.001],
        Start(2, CHAIN): [1.0, 0.001, 0.0, 0.0],
    }
    results = race(monkeypatch, errors_of)
    assert [result.start for result in results] == [Start(1), Start(2), Start(3)]


def test_weights_groups_and_all_parts_count_in_a_check(monkeypatch, task, rng):
    weights = rng.uniform(0.5, 2.0, 80)
    groups = np.arange(80) // 4
    found = descent_that_finds(
        monkeypatch, task, [2.0, 1.5], max_iter=5, parts=5, weights=weights, groups=groups
    )
    rows = np.concatenate([np.flatnonzero(np.arange(80) % 5 == part) for part in range(5)])
    before = 2.0 + np.tile(np.resize([-1.0, 1.0], 16), 5)
    after = 1.5 + np.tile(np.resize([-0.5, 0.5], 16), 5)
    gain, standard_error = improvement(before, after, weights[rows], groups[rows])
    assert (found.gain, found.standard_error) == pytest.approx((gain, standard_error))
    assert len(found.distributions) == 5


def test_every_number_of_hops_is_tried_from_several_starts():
    names = [start.name for start in starts_of(plan_of())]
    assert names == [
        "1 hop",
        "2 hops",
        "3 hops",
        "2 hops that move on",
        "3 hops that move on",
    ]
    assert starts_of(plan_of(hops=1)) == [Start(1)]


def test_no_further_start_is_tried_once_a_task_is_solved(monkeypatch, seed):
    starts = []

    def solves_with_two_hops(start, view, split, base):
        starts.append(start)
        error = 0.01 if start.hops == 2 else 0.5
        return descended(
            start, view, split, base, error=error, gain=1.0 - error, standard_error=0.1
        )

    tell_descents(monkeypatch, solves_with_two_hops)
    sets = kh.targets.sphere_sets(60, n_keys=2, dim=2, seed=seed)
    distribution = kh.LearnedHeads(max_iter=6).fit(sets, kh.targets.Correlation(2, 2)(sets))
    assert starts == [Start(1), Start(2)]
    assert distribution.hops == 2
    assert "tried: 1 hop 0.5" in distribution.reason


def reached(start, errors):
    """A descent whose best check had these held-out errors."""
    whole = Task.of(
        kh.SetBatch(np.ones((2, 1, 1)), np.ones((2, 1))), np.eye(2)[:, :1], None, "relu", True
    )
    mean = float(np.mean(errors))
    return Descended(
        start=start,
        view=TaskView.of(whole, plan_of(2, 1), ignores_ages=False),
        matrices=[],
        history=(Step(1, mean, mean),),
        errors=np.asarray(errors),
        gain=0.0,
        standard_error=0.0,
        distributions=[],
        alpha=1.0,
    )


@pytest.mark.parametrize(
    ("errors", "chosen"),
    [
        ({1: 1.0, 2: 0.5, 3: 0.2}, 3),
        ({1: 1.0, 2: 0.5, 3: 0.5}, 2),
        ({1: 1.0, 2: 0.99, 3: 0.98}, 1),
        ({1: 1.0, 2: 1.1, 3: 0.5}, 3),
    ],
)
def test_more_hops_need_more_than_a_standard_error(errors, chosen):
    """Ties go to fewer hops; two hops that fail say nothing of three."""
    split = Split(masks=[], fitted=[], judged=[], standard_errors=1, weights=None, groups=None)
    descents = []
    for hops, error in errors.items():
        spread = 0.2 * hops * np.resize([-1.0, 1.0], 100)
        descents.append(reached(Start(hops), error + spread))
    assert best_of_fewest_hops(descents, split).start.hops == chosen


def test_of_one_number_of_hops_the_best_start_is_kept():
    split = Split(masks=[], fitted=[], judged=[], standard_errors=1, weights=None, groups=None)
    first = reached(Start(2), np.full(50, 0.5))
    better = reached(Start(2, CHAIN), np.full(50, 0.1))
    assert best_of_fewest_hops([first, better], split) is better


# ---- the choice without learning -----------------------------------------------------------------


def chosen_from(monkeypatch, losses, weights=None, groups=None):
    """What is chosen of c = 0, 1 and scale 0.5, 0.2 where the leave-one-out errors of each are
    these.
    """
    sets = kh.SetBatch(np.ones((4, 1, 1)), np.ones((4, 1)))
    whole = Task(sets, np.zeros((4, 1)), weights, "relu", True, groups)

    def told(task, distribution, *, n_heads, seed, **no_held_out_samples):
        assert (n_heads, seed) == (6, 9)
        return Judgement(
            np.array(losses[distribution.mean, distribution.scale]),
            np.zeros(0),
            distribution.mean + distribution.scale,
        )

    monkeypatch.setattr("keyhole.attention.descent.judge", told)
    rows = np.arange(len(whole))
    return choose_identity(HostSamples(whole), rows, [0.0, 1.0], [0.5, 0.2], 6, 9)


def test_another_pair_is_chosen_beyond_a_standard_error_only(monkeypatch):
    first = [1.0, 1.0, 1.0, 1.0]
    losses = {
        (0.0, 0.5): first,
        (1.0, 0.5): [0.9] * 4,
        (0.0, 0.2): [0.8] * 4,
        (1.0, 0.2): [0.2, 0.2, 1.0, 1.0],
    }
    distribution = chosen_from(monkeypatch, losses)
    assert (distribution.strength, distribution.scale, distribution.chosen) == (
        1.0,
        0.2,
        "identity",
    )
    np.testing.assert_array_equal(distribution.means_, [[[1.0, 0.0], [0.0, 0.0]]])
    assert distribution.reason == "leave-one-out error 0.6 of the variance, 1 for c = 0, scale 0.5"
    losses[1.0, 0.2] = [9.0] * 4
    distribution = chosen_from(monkeypatch, losses)
    assert (distribution.strength, distribution.scale, distribution.chosen) == (
        0.0,
        0.2,
        "zero-mean",
    )
    # a gain of 0.4 with a standard error of 0.3, or of 0.42 where the samples come in pairs
    losses = dict.fromkeys(losses, first)
    losses[0.0, 0.2] = [0.0, 0.0, 1.2, 1.2]
    assert chosen_from(monkeypatch, losses).scale == 0.2
    assert chosen_from(monkeypatch, losses, groups=np.array([0, 0, 1, 1])).scale == 0.5
    losses[0.0, 0.2] = [0.25, 0.25, 1.25, 1.25]  # a gain of 1/4, and an error of 1/4
    assert chosen_from(monkeypatch, losses).scale == 0.5
    # weights: what is better for the light samples only is worse
    losses[0.0, 0.2] = [0.0, 0.0, 1.2, 1.2]
    weights = np.array([1.0, 1.0, 10.0, 10.0])
    assert chosen_from(monkeypatch, losses, weights).scale == 0.5


def test_the_choice_is_made_with_documented_numbers():
    documented = {
        "strengths": (0.0, 1.0, 3.0, 10.0, 30.0),
        "scales": (0.5,),
        "n_heads": 128,
        "max_samples": 1000,
    }
    assert kh.IdentityHeads().get_params() == {**documented, "pairs": None}


def test_a_part_of_the_samples_is_enough_to_choose(task):
    sets, y = task
    distribution = kh.IdentityHeads(max_samples=30, n_heads=7).fit(sets, y, seed=4)
    whole = Task.of(sets, y[:, None], None, "relu", True)
    part = whole.drawn(np.arange(80), 30, 4)
    chosen = choose_identity(HostSamples(whole), part, [0.0, 1.0, 3.0, 10.0, 30.0], [0.5], 7, 4)
    assert distribution.reason == chosen.reason


def test_without_a_query_one_strength_stands_for_all(rng, monkeypatch):
    sets, y = bags_without_query(rng)
    samples = HostSamples(Task.of(sets, y[:, None], None, "relu", True))
    rows = np.arange(len(y))
    judged = [
        samples.judge(kh.GaussianHeads(strength, 0.5), rows, n_heads=8, seed=1).loo
        for strength in (0.0, 1.0, 30.0)
    ]
    np.testing.assert_array_equal(judged[1], judged[0])
    np.testing.assert_array_equal(judged[2], judged[0])

    distributions = []
    judge = HostSamples.judge

    def counted(self, distribution, *arguments, **options):
        distributions.append(distribution)
        return judge(self, distribution, *arguments, **options)

    monkeypatch.setattr(HostSamples, "judge", counted)
    chosen = choose_identity(samples, rows, [0.0, 1.0, 3.0], [0.5, 0.25], 8, 1)
    assert len(distributions) == 2
    assert chosen.strength == 0.0


def test_every_sample_is_held_out_in_turn_where_there_are_few(seed):
    held_out = []
    for n in (50, 299, 300):
        sets = kh.targets.sphere_sets(n, n_keys=2, dim=2, seed=seed)
        whole = Task.of(sets, kh.targets.Correlation(2, 2)(sets)[:, None], None, "relu", True)
        held_out.append(Split.of(whole, plan_of(n)))
    assert [sum(int(mask.sum()) for mask in split.masks) for split in held_out] == [50, 299, 60]
    assert [len(split.masks) for split in held_out] == [5, 5, 1]
    assert [split.standard_errors for split in held_out] == [2, 2, 1]


def test_few_samples_descend_anew_with_all_of_them(monkeypatch, task):
    """The descent on all samples takes the steps of the best check, from where the search began."""
    sets, y = task
    seen = {}

    def gains(start, view, split, base):
        seen["view"] = view
        seen["descended"] = descended(start, view, split, base, 0.5, 0.5, 0.1, best_step=3)
        return seen["descended"]

    tell_descents(monkeypatch, gains)
    distribution = kh.LearnedHeads(**FAST).fit(sets, y, seed=1)
    assert (distribution.steps, distribution.chosen) == (3, "learned")
    assert distribution.history == seen["descended"].history
    assert distribution.reason == (
        "1 hop: held-out error 0.5 of the variance, less by 0.5 ± 0.1 than without learning, in 3 "
        "steps"
    )
    view = seen["view"]
    rows = np.arange(len(view.task))
    descent = HeadDescent(view.samples, rows, seen["descended"].matrices, 1.0, view.plan)
    for _ in range(3):
        descent.step()
    np.testing.assert_array_equal(distribution.means_, descent.distribution().means_)


def test_many_samples_go_on_from_the_heads_that_a_part_of_them_found(monkeypatch, seed):
    sets = kh.targets.sphere_sets(310, n_keys=2, dim=2, seed=seed)
    y = kh.targets.Correlation(2, 2)(sets)
    steps = []

    def gains(start, view, split, base):
        return descended(start, view, split, base, 0.5, 0.5, 0.1, best_step=8)

    def step(descent):
        steps.append((len(descent.rows), descent.steps_before))

    tell_descents(monkeypatch, gains)
    monkeypatch.setattr("keyhole.attention.search.HeadDescent.step", step)
    assert kh.LearnedHeads(**FAST).fit(sets, y).steps == 8
    assert steps == [(310, 8), (310, 8)], "a quarter of the steps, with all samples"


def test_a_gradient_is_in_the_means_alone_unless_scales_are_asked_for(task, rng):
    whole = Task.of(task[0], task[1][:, None], None, "relu", True)
    assert (
        gradient_in_heads(whole, np.zeros((1, 4, 4)), rng.normal(size=(5, 4, 4)), 1.0).scales
        is None
    )


# ---- large sets ----------------------------------------------------------------------------------


def bags_without_query(rng, n=60, n_keys=(5, 40), dim=3):
    keys = [rng.normal(size=(int(rng.integers(*n_keys)), dim)) for _ in range(n)]
    y = np.array([key.max(axis=0)[0] for key in keys])
    return kh.SetBatch(keys), y


def test_a_step_sees_fresh_keys_of_large_sets(rng):
    sets, y = bags_without_query(rng)
    task = Task.of(sets, y[:, None], None, "relu", True)
    heads = kh.LearnedHeads(hops=1)
    plan = heads.plan(task, 0, None, None, DescentSettings(max_keys=10))
    first, second = (plan.with_keys_of_step(task, count).batch.sets for count in (0, 1))
    np.testing.assert_array_equal(first.lengths, np.minimum(sets.lengths, 10))
    assert (first.tokens != second.tokens).any()
    # every key it sees is one of the set, and all keys of small sets are seen
    for i, one in enumerate(first):
        rows = {tuple(row) for row in sets.keys_of(i)}
        assert {tuple(row) for row in one.tokens} <= rows
        if sets.lengths[i] <= 10:
            np.testing.assert_array_equal(one.tokens, sets.keys_of(i))
    # over many steps each key of a set is seen about as often as every other
    seen = np.mean([plan.keys_of_step(np.array([25]), count) for count in range(600)], axis=0)
    np.testing.assert_allclose(seen, 10 / 25, atol=0.12)


def test_sums_over_keys_are_not_thinned(rng):
    sets, y = bags_without_query(rng)
    task = Task.of(sets.pooled("sum"), y[:, None], None, "relu", True)
    plan = kh.LearnedHeads(hops=1).plan(task, 0, None, None, DescentSettings(max_keys=10))
    assert plan.with_keys_of_step(task, 0) is task


def test_without_a_query_the_last_rows_are_learned_and_nothing_else(rng):
    """The constant query [0; √2] meets no other row: those stay where they start."""
    sets, y = bags_without_query(rng)
    fitted = kh.LearnedHeads(max_iter=10).fit(sets, y, activation="softmax")
    assert fitted.chosen == "learned"
    assert fitted.means_.shape == (2, 4, 4)
    assert abs(fitted.means_[:, -1]).max() > 0.1
    np.testing.assert_array_equal(fitted.query_scales_[:-1], 1.0)


@pytest.mark.parametrize("activation", ["relu", "softmax"])
def test_without_a_query_the_gradient_is_that_in_the_last_rows(rng, activation):
    sets, y = bags_without_query(rng)
    task = Task.of(sets, y[:, None], None, activation, True)
    means = rng.normal(size=(2, 4, 4))
    noise = 0.3 * rng.normal(size=(6, 4, 4)).astype(np.float32)
    whole = gradient_in_heads(task, means, noise, 0.1, dtype="float64", scales=True)
    last = gradient_in_heads(task, means[:, -1:], noise[:, -1:], 0.1, dtype="float64", scales=True)
    assert last.error == pytest.approx(whole.error, rel=1e-9)
    np.testing.assert_allclose(last.means[:, 0], whole.means[:, -1], rtol=1e-6, atol=1e-12)


def test_a_device_sees_the_same_keys_of_large_sets(rng):
    pytest.importorskip("torch")
    from keyhole.attention.torch_heads import DeviceSamples

    sets, y = bags_without_query(rng)
    task = Task.of(sets, y[:, None], None, "softmax", True)
    plan = kh.LearnedHeads(hops=1).plan(task, 0, None, None, DescentSettings(max_keys=10))
    means = rng.normal(size=(2, 1, 4))
    noise = 0.3 * rng.normal(size=(6, 1, 4)).astype(np.float32)
    rows = np.arange(7, 51)
    on_host = HostSamples(task).part(rows, plan, 3)
    on_device = DeviceSamples(task, DEVICE).part(rows, plan, 3)
    host = on_host.gradient_in_heads(means, noise.copy(), 0.1)
    device = on_device.gradient_in_heads(means, noise.copy(), 0.1)
    assert device.error == pytest.approx(host.error, rel=1e-4)
    np.testing.assert_allclose(device.means, host.means, rtol=1e-3, atol=1e-5)


def test_automatic_heads_count_the_fits_of_held_out_parts(rng, monkeypatch):
    """Below 300 samples learned heads take five further fits, so that each has fewer heads."""
    sets, _ = bags_without_query(rng)
    rows = np.arange(60)
    one_fit = costs.fit_seconds(60, sets.n_tokens, 3, 512, has_query=False)
    monkeypatch.setattr(costs, "AUTO_SECONDS", 4 * one_fit)
    spec = LayerSpec(heads=kh.GaussianHeads(), activation="softmax", query="given")
    assert costs.choose_n_heads(spec, sets, rows) == 512
    assert kh.LearnedHeads().n_held_out_parts(300) == 1
    assert kh.LearnedHeads().n_held_out_parts(60) == 5
    assert costs.choose_n_heads(replace(spec, heads=kh.LearnedHeads()), sets, rows) < 512


@pytest.mark.parametrize("group_sizes", [(150, 150), (290, 5, 5), (100, 100, 100)])
@pytest.mark.parametrize("heads", [None, kh.LearnedHeads(max_iter=5)])
def test_few_groups_or_one_large_one_are_learned_from(heads, group_sizes):
    groups = np.repeat(np.arange(len(group_sizes)), group_sizes)
    sets = kh.targets.sphere_sets(300, n_keys=3, dim=2, seed=0)
    y = kh.targets.Correlation(1, dim=2)(sets)
    model = kh.AttentionRegressor(heads=heads, random_state=0).fit(sets, y, groups=groups)
    assert np.isfinite(model.loo_error_)
    if heads is not None and len(group_sizes) == 2:
        assert "of two groups none can be held out" in model.heads_.reason


@pytest.mark.parametrize("group_sizes", [(30, 30), (50, 5, 5), (20, 20, 20)])
def test_few_samples_of_few_groups_are_learned_from(group_sizes):
    groups = np.repeat(np.arange(len(group_sizes)), group_sizes)
    sets = kh.targets.sphere_sets(60, n_keys=3, dim=2, seed=0)
    y = kh.targets.Correlation(1, dim=2)(sets)
    heads = kh.LearnedHeads(max_iter=5)
    model = kh.AttentionRegressor(heads=heads, random_state=0).fit(sets, y, groups=groups)
    assert np.isfinite(model.loo_error_)


@pytest.mark.parametrize("heads", [kh.IdentityHeads(), kh.LearnedHeads(hops=1, max_iter=5)])
def test_groups_of_a_direct_fit_may_be_names_and_must_be_there(heads):
    sets = kh.targets.sphere_sets(60, n_keys=3, dim=2, seed=0)
    y = kh.targets.Correlation(1, dim=2)(sets)
    numbers = np.arange(60) // 6
    names = np.array([f"story {number}" for number in numbers], dtype=object)
    by_number = heads.fit(sets, y, groups=numbers)
    by_name = heads.fit(sets, y, groups=names)
    np.testing.assert_array_equal(by_name.means_, by_number.means_)

    with pytest.raises(ValueError, match=r"`groups` must.*sample 20 has None \(40 in all\)"):
        heads.fit(sets, y, groups=[*names[:20], *[None] * 40])
    with pytest.raises(ValueError, match=r"`groups` must.*sample 0 has nan"):
        heads.fit(sets, y, groups=np.r_[np.nan, np.arange(59.0)])
    with pytest.raises(ValueError, match=r"`groups` must have one entry per set"):
        heads.fit(sets, y, groups=names[:10])
