"""No settings: what is chosen, by what, and that Python, batches and the command line agree on
it.
"""

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
from layers import token_losses
from paper import paper_regressor
from sklearn.exceptions import NotFittedError

import keyhole as kh
from keyhole import choose as chooser
from keyhole import costs
from keyhole.cli.fit import fit as fit_command
from keyhole.costs import AUTO_HEADS, AUTO_SECONDS, choose_n_heads, fit_seconds
from keyhole.data.tokens import ADDS_FEATURES
from keyhole.estimators import batches
from keyhole.ridge.problem import N_ALPHAS
from keyhole.spec import LayerSpec
from keyhole.training import TrainingSet


def best_rule(model):
    """The scaling and the query of least loss, under the pooling and the activation tried first."""
    losses = token_losses(model)
    return min(losses, key=losses.get)


@pytest.fixture
def bags(rng):
    return kh.SetBatch([100 * rng.normal(size=(rng.integers(1, 6), 3)) for _ in range(60)])


def first_sign(bags):
    return np.where(np.add.reduceat(bags.tokens[:, 0], bags.offsets[:-1]) > 0, "up", "down")


def test_no_settings_is_every_setting_automatic(bags):
    y = np.abs(bags.tokens[bags.offsets[:-1], 0])
    model = kh.AttentionRegressor(random_state=0).fit(bags, y)
    named = kh.AttentionRegressor(
        "auto",
        None,
        activation="auto",
        pooling="auto",
        scaling="auto",
        query="auto",
        random_state=0,
    ).fit(bags, y)
    np.testing.assert_array_equal(model.predict(bags), named.predict(bags))
    assert model.candidates_ == named.candidates_


def never_better(*_losses):
    """No gain, and a standard error of one: nothing is ever clearly better."""
    return 0.0, 1.0


def always_better(*_losses):
    """A gain, and no standard error: everything is clearly better than what came before."""
    return math.inf, 0.0


def test_what_is_tried_in_which_order(bags, monkeypatch):
    """Every stage varies one setting of the best so far; without a doubt removed, of the first."""
    monkeypatch.setattr("keyhole.choose.improvement", never_better)
    y = np.abs(bags.tokens[bags.offsets[:-1], 0])
    model = kh.AttentionRegressor(16, heads=kh.GaussianHeads(), random_state=0).fit(bags, y)
    tried = [(c.activation, c.pooling, c.scaling, c.query) for c in model.candidates_]
    first_scaling = tried[3][2]
    scaling = model.tokens_.scaling
    query = model.tokens_.query
    others = [other for other in ("none", "sphere", "standard") if other != first_scaling]
    assert tried == [
        # scalings
        ("relu", "mean", "none", "given"),
        ("relu", "mean", "sphere", "given"),
        ("relu", "mean", "standard", "given"),
        # poolings; sums under every scaling
        ("relu", "mean+size", first_scaling, "given"),
        ("relu", "mean+statistics", first_scaling, "given"),
        ("relu", "sum", "none", "given"),
        ("relu", "sum", "sphere", "given"),
        ("relu", "sum", "standard", "given"),
        # queries; the mean of the keys under every scaling
        ("relu", "mean", first_scaling, "mean"),
        ("relu", "mean", others[0], "mean"),
        ("relu", "mean", others[1], "mean"),
        ("relu", "mean", scaling, "each"),
        # the activation
        ("softmax", "mean", scaling, query),
    ]
    assert model.layer_.activation == "relu"
    assert model.tokens_.pooling == "mean"
    assert query in ("given", "mean"), "the mean need only have less loss"


def test_heads_under_softmax_are_tried_at_growing_scales(bags, monkeypatch):
    """And with a mean where there is a query; a mean of zero is the first of each stage."""
    monkeypatch.setattr("keyhole.choose.improvement", never_better)
    y = np.abs(bags.tokens[bags.offsets[:-1], 0])
    sets = bags.with_query(np.ones((60, 3)))
    model = kh.AttentionRegressor(16, scaling="standard", random_state=0).fit(sets, y)
    relu = [c.heads for c in model.candidates_ if c.activation == "relu" and c.pooling == "mean"]
    softmax = [c.heads for c in model.candidates_ if c.activation == "softmax"]

    # multiples grow until one is no better than the one before
    assert relu[0] == kh.GaussianHeads()
    strengths = [heads.mean for heads in relu[1:]]
    assert strengths == list(chooser.STRENGTHS[: len(strengths)])
    scales = [heads.scale for heads in softmax if np.all(heads.mean == 0.0)]
    assert scales == list(chooser.SOFTMAX_SCALES[: len(scales)])
    assert len(scales) >= 2
    assert softmax[-1] == chooser.DRAWN_STRENGTHS
    assert model.heads_ == kh.GaussianHeads()


def test_what_is_clearly_better_replaces_the_simpler_setting(bags, monkeypatch):
    monkeypatch.setattr("keyhole.choose.improvement", always_better)
    y = np.abs(bags.tokens[bags.offsets[:-1], 0])
    model = kh.AttentionRegressor(16, random_state=0).fit(bags, y)
    assert model.layer_.activation == "softmax"
    # a softmax averages by itself: it has the number of keys beside it in the place of sums
    assert model.tokens_.pooling == "mean+size"


def test_sums_are_found_where_the_target_is_one(bags):
    y = np.add.reduceat(np.square(bags.tokens).sum(axis=1), bags.offsets[:-1])
    model = kh.AttentionRegressor(random_state=0).fit(bags, y)
    assert model.tokens_.pooling in ("sum", "mean+size")


def test_the_mean_of_the_keys_is_tried_as_a_query_under_every_scaling(seed):
    """A product of means needs the lengths of tokens, and without a query no scaling is better."""
    rng = np.random.default_rng([61, seed])
    clouds = [rng.normal(size=(rng.integers(5, 40), 3)) for _ in range(500)]
    y = np.array([cloud[:, 0].mean() * cloud[:, 1].mean() for cloud in clouds])
    model = kh.AttentionRegressor(random_state=0).fit(clouds[:300], y[:300])
    assert model.score(clouds[300:], y[300:]) > 0.9


def test_settings_are_chosen_for_the_penalty_that_was_given(rng):
    """A draft of half of the samples has half of the penalty."""
    y = rng.normal(size=(40, 1))
    samples = kh.SetBatch(rng.normal(size=(40, 3, 2)))
    data = TrainingSet(samples=samples, outputs=y)
    spec = LayerSpec(alphas=np.array([0.3, 2.0]))
    np.testing.assert_allclose(chooser.draft_penalties(spec, data, data[:20]), [0.15, 1.0])
    assert chooser.draft_penalties(LayerSpec(), data, data) is None


def test_sets_of_one_size_have_no_sums_to_try(rng):
    x = rng.normal(size=(40, 4, 2))
    model = kh.AttentionRegressor(8, random_state=0).fit(x, np.square(x).max(axis=(1, 2)))
    # statistics of the keys differ between sets of one size, sums and sizes do not
    assert {candidate.pooling for candidate in model.candidates_} == {"mean", "mean+statistics"}
    singles = kh.AttentionRegressor(8, random_state=0).fit(x[:, :1], np.abs(x[:, 0, 0]))
    assert {candidate.pooling for candidate in singles.candidates_} == {"mean"}


@pytest.mark.parametrize("open_setting", ["activation", "pooling", "scaling", "query"])
def test_a_setting_that_was_given_is_the_only_one_tried(open_setting, bags):
    given = {"activation": "step", "pooling": "sum", "scaling": "sphere", "query": "mean"}
    given.pop(open_setting)
    y = np.abs(bags.tokens[bags.offsets[:-1], 0])
    model = kh.AttentionRegressor(8, kh.GaussianHeads(), random_state=0, **given).fit(bags, y)
    assert len(model.candidates_) > 1
    for name, value in given.items():
        assert {getattr(candidate, name) for candidate in model.candidates_} == {value}


def test_few_keys_take_the_exact_kernel(bags):
    y = np.abs(bags.tokens[bags.offsets[:-1], 0])
    model = kh.AttentionRegressor(activation="relu", pooling="mean", random_state=0).fit(bags, y)
    assert model.n_heads_ == math.inf
    assert model.solver_ == "kernel"


def test_a_query_that_points_at_keys_makes_the_heads_lean_on_the_identity(seed):
    sets = kh.targets.sphere_sets(120, n_keys=3, dim=6, seed=seed)
    y = np.exp(6 * np.einsum("nd,nkd->nk", sets.query, sets.tokens.reshape(120, 3, 6))).mean(axis=1)
    assert kh.AttentionRegressor(random_state=0).fit(sets, y).heads_.mean > 0
    noise = np.random.default_rng(seed).normal(size=120)
    model = kh.AttentionRegressor(random_state=0, heads=kh.GaussianHeads()).fit(sets, noise)
    assert model.heads_ == kh.GaussianHeads(), "a head distribution that was named is kept"


def test_what_all_samples_chose_by_is_not_fitted_again(bags, monkeypatch):
    counted = []
    honest_fit = chooser.fit

    def counting_fit(spec, data, **options):
        counted.append(len(data))
        return honest_fit(spec, data, **options)

    monkeypatch.setattr(chooser, "fit", counting_fit)
    model = kh.AttentionClassifier(math.inf, kh.GaussianHeads(), random_state=0).fit(
        bags, first_sign(bags)
    )
    n_fits = len(model.candidates_)
    if model.tokens_.pooling in ADDS_FEATURES:
        n_fits += 1  # the scale of features that are made of the keys is chosen last
    assert counted == [60] * n_fits


def test_drafts_are_coarse_and_a_fit_that_is_kept_is_not(bags, monkeypatch):
    drafts = []
    honest_fit = chooser.fit

    def noting_fit(spec, data, **options):
        drafts.append(options.get("draft"))
        return honest_fit(spec, data, **options)

    monkeypatch.setattr(chooser, "fit", noting_fit)
    y = first_sign(bags)

    # the exact kernel of all samples is kept, unless the scale of an extra is still to be chosen
    model = kh.AttentionClassifier(
        math.inf, kh.GaussianHeads(), pooling="mean", random_state=0, loss="squared_error"
    )
    model.fit(bags, y)
    assert len(model.selection_.alphas) == N_ALPHAS
    assert drafts == [math.isfinite(candidate.n_heads) for candidate in model.candidates_]
    drafts.clear()
    model.set_params(pooling="mean+size").fit(bags, y)
    assert drafts == [True] * len(model.candidates_) + [None]

    # fewer heads than those of the fit are never kept
    drafts.clear()
    model.set_params(n_heads=100, pooling="auto").fit(bags, y)
    assert len(model.selection_.alphas) == N_ALPHAS
    assert drafts == [True] * len(model.candidates_) + [None]


@pytest.mark.parametrize(
    ("n", "n_keys", "dim", "kernel"),
    [(80, 5, 166, True), (2000, 40, 17, False), (50_000, 5, 10, False)],
)
def test_the_kernel_is_taken_where_it_is_predicted_to_be_cheaper(n, n_keys, dim, kernel):
    sizes = n, n * n_keys, dim
    seconds = {m: fit_seconds(*sizes, m, has_query=True) for m in (math.inf, AUTO_HEADS)}
    assert (seconds[math.inf] <= seconds[AUTO_HEADS]) == kernel


@pytest.mark.parametrize(
    "options",
    [{"activation": "softmax"}, {"heads": kh.QueryKeyHeads(2)}, {"solver": "cg", "alpha": 1.0}],
)
def test_heads_are_finite_where_there_is_no_kernel(bags, options):
    model = kh.AttentionRegressor(random_state=0, scaling="standard", **options).fit(
        bags, bags.lengths.astype(float)
    )
    assert model.n_heads_ == AUTO_HEADS


def test_heads_are_fewer_where_a_fit_would_take_long():
    """Sizes of the film ratings in the gallery: 512 heads would take half an hour of one
    core.
    """
    tokens, query = (
        np.broadcast_to(np.zeros(d), (n, d)) for n, d in ((77_000 * 43, 23), (77_000, 22))
    )  # no memory
    many = kh.SetBatch._from_flat(tokens, np.arange(0, 77_000 * 43 + 1, 43), query)
    spec = LayerSpec(activation="softmax")
    rows = np.arange(77_000)
    heads = choose_n_heads(spec, many, rows)
    assert heads == 128
    assert fit_seconds(77_000, 77_000 * 43, 23, heads, has_query=True) <= AUTO_SECONDS
    assert fit_seconds(77_000, 77_000 * 43, 23, 2 * heads, has_query=True) > AUTO_SECONDS
    assert choose_n_heads(replace(spec, solver="cg"), many, rows) == AUTO_HEADS
    assert choose_n_heads(replace(spec, device="cuda"), many, rows) == AUTO_HEADS


def test_batches_without_settings_settle_on_the_first_samples_and_tell(bags, monkeypatch):
    monkeypatch.setattr(batches, "MAX_FEATURES", 40)
    monkeypatch.setattr(batches, "MIN_AUTO_HEADS", 10)
    y = first_sign(bags)
    whole = kh.AttentionClassifier(random_state=0).fit_batches([(bags, y)])
    parts = kh.AttentionClassifier(random_state=0)
    for rows in np.split(np.arange(60), 6):
        parts.partial_fit(bags[rows], y[rows], classes=["down", "up"])
    parts.solve()
    assert parts.n_heads_ == whole.n_heads_ == 10
    assert (parts.tokens_.scaling, parts.tokens_.query) == (
        whole.tokens_.scaling,
        whole.tokens_.query,
    )
    assert parts.candidates_ == whole.candidates_ != ()
    settled = parts.tokens_.scaling, parts.tokens_.query
    parts.partial_fit(bags[:30], y[:30])
    assert parts.decision_function(bags).shape == (60,)
    assert (parts.tokens_.scaling, parts.tokens_.query) == settled
    assert whole.score(bags, y) > 0.9


def test_few_samples_choose_nothing(rng):
    sets = kh.SetBatch(rng.normal(size=(1, 3, 2)))
    model = kh.AttentionRegressor(alpha=1.0).fit(sets, [1.0])
    assert (model.tokens_.scaling, model.tokens_.query, model.candidates_) == (
        "none",
        "given",
        (),
    )


def test_a_long_fit_says_so_beforehand(bags, monkeypatch):
    monkeypatch.setattr(costs, "LONG_FIT_SECONDS", 0.0)
    with pytest.warns(
        UserWarning, match=r"this fit will take about \d+ s: the exact kernel .* 60 samples"
    ):
        paper_regressor(math.inf).fit(bags, bags.lengths)


def test_the_command_line_has_no_defaults_of_its_own():
    parameters = inspect.signature(fit_command).parameters
    for name in ("heads", "heads", "alpha", "activation", "pooling", "scaling", "make_query"):
        assert parameters[name].default is None


@pytest.mark.parametrize("where", ["keys", "query"])
def test_where_units_differ_tokens_are_standardised_unless_that_is_worse_beyond_doubt(
    where: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Years beside stars: the drafts of other scalings may win by luck, and then hear the years
    alone.
    """
    keys, query = rng.uniform(0, 5, (60, 4, 3)), rng.uniform(0, 5, (60, 3))
    (keys if where == "keys" else query)[..., 0] = 2000 + rng.normal(
        size=(60, 4) if where == "keys" else 60
    )
    y = keys[:, :, 1].mean(axis=1)
    monkeypatch.setattr(
        "keyhole.choose.improvement", lambda *_: (0.0, 1.0)
    )  # no doubt is ever removed
    options = {"n_heads": 8, "heads": kh.GaussianHeads(), "random_state": 0}
    assert (
        kh.AttentionRegressor(**options).fit(kh.SetBatch(keys, query), y).tokens_.scaling
        == "standard"
    )
    keys[..., 0], query[..., 0] = keys[..., 0] % 5, query[..., 0] % 5
    model = kh.AttentionRegressor(**options).fit(kh.SetBatch(keys, query), y)
    assert model.tokens_.scaling == best_rule(model)[0]


def test_softmax_heads_that_differ_in_what_they_compare(rng):
    """Four columns name the key that is asked for and four are noise: one multiple of the identity
    suits neither.
    """
    kind, asked, value = (
        rng.integers(0, 4, (240, 5)),
        rng.integers(0, 4, 240),
        rng.normal(size=(240, 5, 1)),
    )
    kind[:, 0] = asked
    keys = np.concatenate([np.eye(4)[kind], rng.normal(size=(240, 5, 4)), value], axis=2)
    sets = kh.SetBatch(
        keys, query=np.concatenate([np.eye(4)[asked], rng.normal(size=(240, 4))], axis=1)
    )
    y = np.ma.array(value[..., 0], mask=kind != asked[:, None]).mean(axis=1).data
    errors = {}
    for distribution in (None, kh.GaussianHeads(), kh.GaussianHeads(3.0)):
        model = kh.AttentionRegressor(
            64, distribution, activation="softmax", scaling="none", random_state=0
        ).fit(sets[:160], y[:160])
        errors[repr(model.heads_)] = np.mean(np.square(model.predict(sets[160:]) - y[160:]))
    chosen, *others = errors
    assert chosen == "GaussianHeads(mean=(0.3, 20.0), scale=0.1)"
    assert errors[chosen] < 0.8 * min(errors[other] for other in others)


@pytest.mark.parametrize(
    ("made", "defaults"),
    [
        (
            kh.LearnedHeads,
            {
                "n_means": 2,
                "hops": "auto",
                "patterns": 1,
                "scale": 0.25,
                "max_iter": 300,
                "validation_fraction": 0.2,
                "verbose": False,
            },
        ),
        (
            kh.IdentityHeads,
            {
                "strengths": (0.0, 1.0, 3.0, 10.0, 30.0),
                "scales": (0.5,),
                "n_heads": 128,
                "max_samples": 1000,
                "pairs": None,
            },
        ),
        (kh.GaussianHeads, {"mean": 0.0, "scale": 0.5, "pairs": None}),
    ],
)
def test_head_distributions_without_settings(made, defaults):
    """What a head distribution is unless told is a promise: a change belongs into CHANGELOG."""
    distribution = made()
    assert {name: getattr(distribution, name) for name in defaults} == defaults
    assert set(inspect.signature(made).parameters) == set(defaults)


def test_outputs_in_different_units_count_alike(rng):
    """The largest unit decided what was chosen for all: the third output had R² −0.38."""
    bags = kh.SetBatch([rng.normal(size=(int(rng.integers(3, 9)), 3)) for _ in range(150)])
    keys = np.split(bags.tokens, bags.offsets[1:-1])
    y = np.array([[key[:, 0].mean(), np.square(key[:, 1]).mean(), key[:, 2].max()] for key in keys])
    in_units = y * [1.0, 1000.0, 0.001]
    model = kh.AttentionRegressor(64, random_state=0).fit(bags, y)
    other = kh.AttentionRegressor(64, random_state=0).fit(bags, in_units)
    assert other.chosen_params_ == model.chosen_params_
    assert other.alpha_ == pytest.approx(model.alpha_)
    np.testing.assert_allclose(other.selection_.scores, model.selection_.scores, rtol=1e-6)
    residuals = in_units - other.loo_predictions_
    assert (residuals.var(axis=0) < 0.2 * in_units.var(axis=0)).all()
    assert other.loo_error_ == pytest.approx(np.square(residuals).mean())


def test_the_samples_that_choices_are_made_on_have_some_of_every_class(rng):
    """Of one in a hundred, five hundred samples would hold five."""
    n = 2000
    outputs = np.full((n, 1), -1.0)
    outputs[:20] = 1.0
    data = TrainingSet(kh.SetBatch(rng.normal(size=(n, 2, 2))), outputs)
    spec = LayerSpec(classifies=True)
    part = chooser.drawn_part(spec, data, rng.permutation(n), 500)
    is_rare = part.outputs[:, 0] > 0
    assert is_rare.sum() == 20
    assert np.average(is_rare, weights=part.weights) == pytest.approx(0.01)
    plain = chooser.drawn_part(replace(spec, classifies=False), data, np.arange(n), 500)
    assert plain.weights is None
    assert len(plain) == 500


def test_an_interrupted_fit_leaves_an_unfitted_estimator(bags, monkeypatch):
    """Also where there was a fit before: nothing of it is left to be mistaken for the new one."""
    y = np.abs(bags.tokens[bags.offsets[:-1], 0])
    model = kh.AttentionRegressor(16, random_state=0).fit(bags, y)
    honest_fit = chooser.fit
    drafts = []

    def interrupted_fit(spec, data, **options):
        drafts.append(spec)
        if len(drafts) == 3:
            raise KeyboardInterrupt
        return honest_fit(spec, data, **options)

    monkeypatch.setattr(chooser, "fit", interrupted_fit)
    with pytest.raises(KeyboardInterrupt):
        model.fit(bags, y)
    with pytest.raises(NotFittedError):
        model.predict(bags)
    monkeypatch.setattr(chooser, "fit", honest_fit)
    twin = kh.AttentionRegressor(16, random_state=0).fit(bags, y)
    np.testing.assert_array_equal(model.fit(bags, y).predict(bags), twin.predict(bags))
