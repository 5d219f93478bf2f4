"""Selection of keys: which keys are kept, what the model does with the others, and when."""

import math

import numpy as np
import pytest
from exports import padded
from sklearn.metrics import roc_auc_score

import keyhole as kh
from keyhole import choose as chooser
from keyhole.export.constants import LayerConstants, predict_with
from keyhole.key_selection import scoring_samples, select_keys, strongest_keys
from keyhole.spec import LayerSpec
from keyhole.training import TrainingSet


@pytest.fixture
def needles(rng):
    """Bags of 40 keys from four clusters, each bag with shares of its own.

    Of class 1 the first two keys are from a fifth cluster. The shares vary so much that the mean of
    a bag says little about two keys of forty.
    """
    n_bags = 90
    labels = np.arange(n_bags) % 2
    centres = 2.0 * np.eye(5, 12)
    cluster = np.stack([rng.choice(4, 40, p=rng.dirichlet(np.full(4, 0.5))) for _ in labels])
    cluster[labels == 1, :2] = 4
    return kh.SetBatch(centres[cluster] + 0.4 * rng.normal(size=(n_bags, 40, 12))), labels


def classifier(**settings):
    """A classifier of which nothing is open, unless it is named."""
    chosen = {
        "n_heads": 16,
        "heads": kh.GaussianHeads(),
        "activation": "relu",
        "pooling": "mean",
        "scaling": "none",
        "query": "given",
        "loss": "squared_error",
        "random_state": 0,
    }
    return kh.AttentionClassifier(**{**chosen, **settings})


def test_the_keys_that_differ_most_from_the_mean_of_their_set_are_kept():
    """On either side: for an output, and against it."""
    parts = np.array([1.0, 1.1, 5.0, 0.9, -4.0, 2.0, 2.0, 2.1])[:, None]
    kept = strongest_keys(parts, np.array([0, 5, 8]), n_keys=2)
    np.testing.assert_array_equal(np.flatnonzero(kept), [2, 4, 5, 7])


def test_of_several_outputs_the_largest_difference_counts():
    parts = np.array([[0.0, 9.0], [0.0, 0.0], [0.0, 0.0], [8.0, 0.0]])
    kept = strongest_keys(parts, np.array([0, 4]), n_keys=2)
    np.testing.assert_array_equal(kept, [True, False, False, True])


def test_of_keys_that_differ_by_rounding_alone_the_first_are_kept():
    """Two keys are equally far from their mean, whatever the last bit says."""
    parts = np.array([1.0, 3.0 + 1e-14, 2.0, 2.0 + 1e-15, 2.0 - 1e-15])[:, None]
    kept = strongest_keys(parts, np.array([0, 2, 5]), n_keys=1)
    np.testing.assert_array_equal(kept, [True, False, True, False, False])


def test_a_selection_that_is_clearly_worse_is_given_up_after_the_first_folds(seed, monkeypatch):
    """Every key of 40 matters alike, so that 8 of them say little about their sum."""
    rng = np.random.default_rng([71, seed])
    sets = kh.SetBatch(rng.normal(size=(120, 40, 2)) + rng.normal(size=(120, 1, 2)))
    y = np.add.reduceat(sets.tokens[:, 0], sets.offsets[:-1])
    selecting_fits = []
    fit = chooser.fit

    def counted_fit(spec, data, **more):
        if spec.selects_keys:
            selecting_fits.append(len(data))
        return fit(spec, data, **more)

    monkeypatch.setattr(chooser, "fit", counted_fit)
    regressor = kh.AttentionRegressor(16, kh.GaussianHeads(), activation="relu", random_state=0)
    model = regressor.set_params(query="given", pooling="mean").fit(sets, y)
    assert model.key_selection_ is None
    assert 1 <= len(selecting_fits) < 5
    assert model.candidates_[-1].held_out == "first folds"


def test_the_keys_that_matter_are_kept(needles):
    sets, labels = needles
    model = classifier(keys=4).fit(sets[:60], labels[:60])
    kept = model.key_selection_.kept_keys(sets[60:]).reshape(30, 40)
    assert (kept.sum(axis=1) == 4).all()
    assert kept[labels[60:] == 1, :2].mean() > 0.8


def test_exchanging_the_classes_selects_the_same_keys(needles):
    sets, labels = needles
    one = classifier(keys=4).fit(sets, labels)
    other = classifier(keys=4).fit(sets, 1 - labels)
    np.testing.assert_array_equal(
        one.key_selection_.kept_keys(sets), other.key_selection_.kept_keys(sets)
    )


def test_no_sample_has_a_say_in_which_of_its_keys_are_kept(needles):
    """With another output of one sample, its own keys stay the same; those of others need not."""
    sets, labels = needles
    outputs = (2.0 * labels - 1)[:, None]
    changed = outputs.copy()
    changed[0] *= -1
    one = select_keys(LayerSpec(keys=4), TrainingSet(sets, outputs))
    other = select_keys(LayerSpec(keys=4), TrainingSet(sets, changed))
    np.testing.assert_array_equal(one.data.samples[0].tokens, other.data.samples[0].tokens)

    # the layer for new samples has seen the output, and must not judge the sample
    scored = [
        selected.selection.layer.contributions(
            scoring_samples(selected.selection.standard, sets[:1])
        )
        for selected in (one, other)
    ]
    assert np.abs(scored[0] - scored[1]).max() > 0.01 * np.abs(scored[0]).max()


def test_dropped_keys_contribute_nothing_and_the_others_add_up(needles):
    sets, labels = needles
    model = classifier(keys=4).fit(sets, labels)
    parts = model.contributions(sets)
    kept = model.key_selection_.kept_keys(sets)
    assert not np.concatenate(parts)[~kept].any()
    totals = [part.sum() for part in parts] + model.intercept_
    np.testing.assert_allclose(totals, model.decision_function(sets), atol=1e-12)


def test_the_model_is_the_one_that_is_fitted_to_the_selected_keys(needles):
    """Predictions, and leave-one-out of the training samples, of a plain model on those keys."""
    sets, labels = needles
    model = classifier(keys=4).fit(sets, labels)
    spec = model.layer_spec(sets)
    selected = select_keys(spec, TrainingSet(sets, (2.0 * labels - 1)[:, None])).data.samples
    plain = classifier(keys="all").fit(selected, labels)
    np.testing.assert_allclose(model.loo_decision_, plain.loo_decision_, atol=1e-10)
    seen = model.key_selection_.apply(sets)
    np.testing.assert_allclose(
        model.decision_function(sets), plain.decision_function(seen), atol=1e-10
    )
    np.testing.assert_allclose(model.predict_std(sets), plain.predict_std(seen), atol=1e-8)
    np.testing.assert_array_equal(model.predict_set(sets), plain.predict_set(seen))


def test_intervals_of_a_regressor_with_selected_keys(needles, rng):
    """They cover, and are narrower than those of a layer that sees all keys."""
    sets, labels = needles
    y = labels + 0.1 * rng.normal(size=90)
    widths = {}
    for keys in (4, "all"):
        model = kh.AttentionRegressor(
            64,
            kh.GaussianHeads(),
            scaling="none",
            query="given",
            pooling="mean",
            keys=keys,
            random_state=0,
        )
        model.fit(sets[:60], y[:60])
        low, high = model.predict_interval(sets[60:], coverage=0.9).T
        widths[keys] = (high - low).mean()
        assert ((low <= y[60:]) & (y[60:] <= high)).mean() > 0.7
    assert widths[4] < widths["all"]


@pytest.mark.parametrize("keep", ["all", "predict"])
def test_a_saved_model_selects_the_same_keys(needles, tmp_path, keep):
    sets, labels = needles
    model = classifier(keys=4).fit(sets, labels)
    kh.save(model, tmp_path / "model", keep=keep)
    loaded = kh.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict_proba(sets), model.predict_proba(sets))
    np.testing.assert_array_equal(
        np.concatenate(loaded.contributions(sets)), np.concatenate(model.contributions(sets))
    )
    if keep == "all":
        np.testing.assert_array_equal(loaded.predict_set(sets), model.predict_set(sets))


def test_automatic_keys_are_selected_where_folds_say_so(needles, monkeypatch):
    """A gain beyond doubt, and every other setting is chosen anew for the keys that are seen."""
    monkeypatch.setattr("keyhole.choose.improvement", lambda *_losses: (math.inf, 0.0))
    sets, labels = needles
    model = classifier(keys="auto", scaling="auto").fit(sets, labels)
    assert model.chosen_params_["keys"] == chooser.SELECTED_KEYS
    tried = [(c.scaling, c.keys, c.held_out) for c in model.candidates_]
    scaling = tried[3][0]
    assert tried == [
        ("none", "all", "samples"),
        ("sphere", "all", "samples"),
        ("standard", "all", "samples"),
        (scaling, "all", "folds"),
        (scaling, 8, "folds"),
        ("none", 8, "samples"),
        ("sphere", 8, "samples"),
        ("standard", 8, "samples"),
    ]
    assert "8 keys of each set" in model.summary()

    # frozen, nothing is chosen again, and the fit is the same
    twin = classifier().set_params(**model.chosen_params_).fit(sets, labels)
    assert twin.candidates_ == ()
    np.testing.assert_allclose(twin.predict_proba(sets), model.predict_proba(sets), atol=1e-12)


def test_automatic_keys_are_all_where_nothing_is_gained(rng):
    """Every key says the same, so that dropping some loses."""
    labels = np.arange(60) % 2
    sets = kh.SetBatch(rng.normal(size=(60, 40, 3)) + 0.5 * labels[:, None, None])
    model = classifier(keys="auto", scaling="auto").fit(sets, labels)
    assert model.key_selection_ is None
    assert [c.keys for c in model.candidates_ if "folds" in c.held_out] == ["all", 8]


def test_what_is_named_is_not_overridden(needles):
    sets, labels = needles
    model = classifier(keys="all", scaling="auto").fit(sets, labels)
    assert model.key_selection_ is None
    assert {c.keys for c in model.candidates_} == {"all"}
    # the paper's layer leaves nothing else open, and sees every key
    assert classifier(keys="auto").fit(sets, labels).key_selection_ is None


def test_small_sets_are_left_alone(rng):
    sets = kh.SetBatch(rng.normal(size=(60, 20, 3)))
    model = classifier(keys="auto", scaling="auto").fit(sets, np.arange(60) % 2)
    assert {c.keys for c in model.candidates_} == {"all"}


@pytest.mark.parametrize("has_query", [False, True])
def test_a_torch_module_selects_the_same_keys(needles, rng, has_query):
    """Sets of different sizes, padded with NaN; some have fewer keys than are kept."""
    torch = pytest.importorskip("torch")
    sets, labels = needles
    keys = [sets[i].tokens[: 3 + i % 38] for i in range(len(sets))]
    query = rng.normal(size=(90, 5)) if has_query else None
    ragged = kh.SetBatch(keys, query)
    model = classifier(keys=4).fit(ragged, labels)
    padded_keys, mask = padded(ragged)
    inputs = {"query": torch.tensor(query)} if has_query else {}
    outputs = model.to_torch()(torch.tensor(padded_keys), torch.tensor(mask), **inputs)
    expected = model.decision_function(ragged)
    np.testing.assert_allclose(outputs.detach(), expected, atol=1e-9 * np.abs(expected).max())


def test_the_prediction_in_plain_numpy_selects_the_same_keys(needles):
    sets, labels = needles
    model = classifier(keys=4).fit(sets, labels)
    constants = LayerConstants.of(model, "a test")
    scores = [predict_with(constants, sets[i].tokens)[0] for i in range(10)]
    np.testing.assert_allclose(scores, model.decision_function(sets[:10]), atol=1e-9)


def test_batches_and_few_samples_are_refused(needles):
    sets, labels = needles
    with pytest.raises(AttributeError, match="keys=4, a selection of keys"):
        classifier(keys=4).partial_fit(sets, labels, classes=[0, 1])
    with pytest.raises(ValueError, match="takes 3 samples"):
        classifier(keys=4).fit(sets[:2], labels[:2])
    with pytest.raises(ValueError, match="'keys' parameter"):
        classifier(keys=0).fit(sets, labels)


@pytest.mark.slow
def test_needles_in_large_bags_are_found_by_default_settings(seed):
    """Bags of 200 to 600 keys of twenty clusters; one in seventy of a positive bag is of another.

    With keys="all" the AUC is about .6.
    """
    rng = np.random.default_rng(seed)
    labels = np.arange(240) % 2
    centres = rng.normal(size=(21, 128))
    centres[20] = 0.6 * centres[20] + 0.4 * centres[0]
    bags = []
    for label in labels:
        size = int(rng.integers(200, 600))
        cluster = rng.choice(20, size, p=rng.dirichlet(np.full(20, 0.7)))
        if label == 1:
            cluster[: size // 70] = 20
        keys = centres[cluster] + 0.7 * rng.normal(size=(size, 128))
        bags.append(keys + 0.15 * rng.normal(size=128))
    model = kh.AttentionClassifier(random_state=0).fit(bags[:160], labels[:160])
    assert roc_auc_score(labels[160:], model.decision_function(bags[160:])) > 0.98
