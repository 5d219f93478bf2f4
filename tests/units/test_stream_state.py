"""A stream is always in one state: a batch is added whole or not at all, and every reader sees one
state, whatever other threads do meanwhile."""

import copy
import io
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import joblib
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import keyhole as kh
from keyhole.data.tokens import TokenRule
from keyhole.estimators.states import lock_of
from keyhole.ridge.design import DesignMoments
from keyhole.streaming import KeptSamples, LayerRecipe

N_PART = 200
"""Samples of a batch: five of them are still held back, six are added to the sums."""


@pytest.fixture
def sets(rng):
    """1,400 sets with queries, pairs and extras: everything that a batch can carry."""
    return kh.SetBatch(
        rng.normal(size=(1400, 3, 2)),
        rng.normal(size=(1400, 2)),
        rng.normal(size=(1400, 1)),
        pairs=[(0, 1), (1, 0)],
    )


@pytest.fixture
def y(sets, rng):
    target = sets.query[:, 0] * sets.tokens[::3, 1] + sets.extras[:, 0]
    return target + 0.1 * rng.normal(size=len(sets))


@pytest.fixture
def model():
    return kh.AttentionRegressor(4, random_state=0)


def part(sets, y, number):
    rows = slice(number * N_PART, (number + 1) * N_PART)
    return sets[rows], y[rows]


def stream_of(model, sets, y, n_parts):
    for number in range(n_parts):
        model.partial_fit(*part(sets, y, number))
    return model


def changed(sets, *, tokens=None, extras=None, pairs="same"):
    """The same sets with other tokens, extras or pairs."""
    return kh.SetBatch(
        (sets.tokens if tokens is None else tokens).reshape(len(sets), 3, 2),
        sets.query,
        sets.extras if extras is None else extras,
        pairs=sets.pairs if pairs == "same" else pairs,
    )


BAD_BATCHES = {
    "tokens that overflow": lambda s, y: (changed(s, tokens=s.tokens * 1e200), y),
    "tokens whose squares overflow": lambda s, y: (changed(s, tokens=s.tokens * 1e60), y),
    "ten samples too large": lambda s, y: (
        changed(s, tokens=s.tokens * np.where(np.arange(len(s.tokens)) < 30, 1e200, 1.0)[:, None]),
        y,
    ),
    "outputs whose squares overflow": lambda s, y: (s, y * 1e200),
    "outputs that are not finite": lambda s, y: (s, y * np.nan),
    "weights whose products overflow": lambda s, y: (s, y, np.full(len(y), 1e300)),
    "other pairs": lambda s, y: (changed(s, pairs=[(0, 0)]), y),
    "no pairs": lambda s, y: (changed(s, pairs=None), y),
    "groups of sets": lambda s, y: (
        kh.SetGroups(s.with_extras(None), np.ones(len(s), int), s.extras),
        y,
    ),
    "two outputs": lambda s, y: (s, np.column_stack([y, y])),
    "other extras": lambda s, y: (changed(s, extras=np.zeros((len(s), 2))), y),
}


@pytest.mark.parametrize(
    ("name", "n_before"),
    [
        *[(name, n_before) for name in BAD_BATCHES for n_before in (4, 6)],
        ("tokens that overflow", 1),
        ("tokens that overflow", 5),
        ("other pairs", 5),
    ],
)
def test_a_refused_batch_leaves_no_trace(model, sets, y, name, n_before):
    model.set_params(scaling="none")  # on a sphere no token is too large
    bad = BAD_BATCHES[name](*part(sets, y, 6))
    reference = stream_of(clone(model), sets, y, n_before)
    stream_of(model, sets, y, n_before)
    with pytest.raises(ValueError, match=r"."):
        model.partial_fit(*bad)
    assert model.n_samples_seen_ == n_before * N_PART

    # the stream goes on as if the batch had never come
    reference.partial_fit(*part(sets, y, 5))
    model.partial_fit(*part(sets, y, 5))
    assert model.n_samples_seen_ == (n_before + 1) * N_PART
    np.testing.assert_array_equal(model.predict(sets[:50]), reference.predict(sets[:50]))
    assert model.stream_.sums.moments.count == (n_before + 1) * N_PART


@pytest.mark.parametrize("n_before", [4, 6])
def test_a_refused_batch_that_is_added_at_once_leaves_no_trace(model, sets, y, n_before):
    """1,100 samples are not held back: they fail while they are added, in the middle of a block."""
    model.set_params(scaling="none")
    reference = stream_of(clone(model), sets, y, n_before)
    stream_of(model, sets, y, n_before)
    scale = np.where(np.arange(3300) > 3000, 1e200, 1.0)[:, None]
    large = changed(sets[:1100], tokens=scale * sets[:1100].tokens)
    with pytest.raises(ValueError, match="overflow float64"):
        model.partial_fit(large, y[:1100])
    np.testing.assert_array_equal(model.predict(sets[:50]), reference.predict(sets[:50]))
    assert model.n_samples_seen_ == n_before * N_PART


@pytest.mark.parametrize("n_before", [4, 6])
def test_under_exp_a_batch_of_ordinary_size_may_overflow(sets, y, n_before):
    """exp(s) overflows at s = 710, which the sizes of tokens alone do not tell."""
    model = kh.AttentionRegressor(
        4, heads=kh.GaussianHeads(), activation="exp", random_state=0, scaling="none"
    )
    reference = stream_of(clone(model), sets, y, n_before)
    stream_of(model, sets, y, n_before)
    with pytest.raises(ValueError, match=r"overflow float64|squares below"):
        model.partial_fit(changed(sets[:100], tokens=2000 * sets[:100].tokens), y[:100])
    for stream in (model, reference):
        stream.partial_fit(*part(sets, y, 6))
    np.testing.assert_array_equal(model.predict(sets[:50]), reference.predict(sets[:50]))


def test_under_exp_tokens_that_are_standardised_together_may_overflow(sets, y):
    """A sample far from all others stays far from them in units of the joint deviation."""
    model = kh.AttentionRegressor(
        4,
        heads=kh.GaussianHeads(scale=1.0),
        activation="exp",
        scaling="standard",
        dtype="float32",
        random_state=0,
    )
    reference = stream_of(clone(model), sets, y, 2)
    stream_of(model, sets, y, 2)
    one = sets[:1]
    far_away = kh.SetBatch(
        1e200 * one.tokens.reshape(1, 3, 2), 1e200 * one.query, one.extras, pairs=one.pairs
    )
    with pytest.raises(ValueError, match=r"overflow|squares below"):
        model.partial_fit(far_away, y[:1])
    np.testing.assert_array_equal(model.predict(sets[:50]), reference.predict(sets[:50]))


@pytest.mark.parametrize("size", [200, 300])
def test_the_stream_of_the_report(rng, size):
    """Four batches of 200 sets, one with tokens × 1e200, 50 more: 850 are seen and are there."""
    tokens = rng.normal(size=(850, 5, 3))
    y = tokens[:, :, 0].mean(axis=1)
    model = kh.AttentionRegressor(8, random_state=0)
    for start in (0, 200, 400, 600):
        model.partial_fit(kh.SetBatch(tokens[start : start + 200]), y[start : start + 200])
    with pytest.raises(ValueError, match="overflow float64"):
        model.partial_fit(kh.SetBatch(1e200 * tokens[:size]), y[:size])
    model.partial_fit(kh.SetBatch(tokens[800:]), y[800:])
    model.predict(kh.SetBatch(tokens[:1]))
    assert (model.n_samples_seen_, model.stream_.sums.moments.count) == (850, 850)


@pytest.mark.parametrize("name", ["tokens that overflow", "outputs that are not finite"])
def test_a_refused_first_batch_leaves_the_model_as_it_was(model, sets, y, rng, name):
    bad = BAD_BATCHES[name](*part(sets, y, 0))
    before = dict(vars(model))
    with pytest.raises(ValueError, match=r"finite|NaN"):
        model.partial_fit(*bad)
    assert vars(model) == before
    with pytest.raises(NotFittedError):
        model.predict(sets)

    # so does one that would start over after a fit
    model.fit(sets[:60, ...], y[:60])
    predictions = model.predict(sets[:50])
    with pytest.warns(UserWarning, match="starts over"), pytest.raises(ValueError, match="finite"):
        model.partial_fit(kh.SetBatch(1e200 * rng.normal(size=(90, 2, 5))), np.zeros(90))
    np.testing.assert_array_equal(model.predict(sets[:50]), predictions)


def test_a_refused_first_batch_of_a_classifier_sets_no_classes(sets, y):
    model = kh.AttentionClassifier(4, random_state=0)
    with pytest.raises(ValueError, match="'maybe'"):
        model.partial_fit(sets[:2], ["no", "maybe"], classes=["no", "yes"])
    assert "classes_" not in vars(model)
    model.partial_fit(sets, np.where(y > 0, "maybe", "no"), classes=["maybe", "no"])
    assert model.classes_.tolist() == ["maybe", "no"]


PLACES = {
    "features": (LayerRecipe, "features"),
    "moments": (DesignMoments, "add_rows"),
    "samples kept": (KeptSamples, "put"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("n_before", [4, 5, 6])
def test_an_interrupt_leaves_no_trace(model, sets, y, place, n_before, monkeypatch):
    reference = stream_of(clone(model), sets, y, n_before)
    stream_of(model, sets, y, n_before)
    owner, method = PLACES[place]
    original = getattr(owner, method)

    def interrupted(self, *args, **kwargs):
        original(self, *args, **kwargs)  # the interrupt comes when the work is done
        raise KeyboardInterrupt

    # while a batch is added, or else while the model is solved
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.partial_fit(*part(sets, y, 6)).predict(sets[:5])

    if model.n_samples_seen_ > n_before * N_PART:
        reference.partial_fit(*part(sets, y, 6))
    for stream in (model, reference):
        stream.partial_fit(*part(sets, y, 5))
    np.testing.assert_array_equal(model.predict(sets[:50]), reference.predict(sets[:50]))
    assert model.n_samples_seen_ == reference.n_samples_seen_
    assert model.stream_.sums.moments.count == model.n_samples_seen_


def test_a_failed_solve_changes_nothing(model, sets, y, monkeypatch):
    """Extras are standardised among the sums by a solve: one that fails must not have done so."""
    reference = stream_of(clone(model), sets, y, 6)
    stream_of(model, sets, y, 6)
    with monkeypatch.context() as patch:
        patch.setattr(LayerRecipe, "fit", lambda *args: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                model.predict(sets[:5])
    np.testing.assert_array_equal(model.predict(sets[:50]), reference.predict(sets[:50]))


def test_a_failed_fit_in_batches_keeps_the_fit_before(model, sets, y):
    stream_of(model, sets, y, 6)
    predictions = model.predict(sets[:50])
    bad = BAD_BATCHES["tokens that overflow"](*part(sets, y, 6))
    with pytest.raises(ValueError, match="overflow float64"):
        model.fit_batches([part(sets, y, 0), bad])
    np.testing.assert_array_equal(model.predict(sets[:50]), predictions)
    assert model.n_samples_seen_ == 6 * N_PART


@pytest.mark.parametrize("method", ["partial_fit", "fit_batches"])
def test_samples_of_weight_zero_change_nothing(model, sets, y, rng, method):
    """Neither the choices on the first samples nor the sums notice them; all are counted as
    seen.
    """
    weights = rng.uniform(0.5, 2.0, len(sets)) * (rng.random(len(sets)) < 0.8)
    heard = np.flatnonzero(weights)
    batches = [(sets[i : i + 50], y[i : i + 50], weights[i : i + 50]) for i in range(0, 1400, 50)]
    without = [
        (sets[rows], y[rows], weights[rows]) for rows in np.split(heard, range(50, len(heard), 50))
    ]
    fits = []
    for parts in (batches, without):
        fit = clone(model)
        if method == "fit_batches":
            fit.fit_batches(parts)
        else:
            for samples in parts:
                fit.partial_fit(*samples)
        fits.append(fit)
    np.testing.assert_allclose(fits[0].predict(sets), fits[1].predict(sets), rtol=0, atol=1e-9)
    assert [fit.n_samples_seen_ for fit in fits] == [1400, len(heard)]
    assert fits[0].candidates_ == fits[1].candidates_


@pytest.mark.parametrize("sizes", [[13], [300], [900, 40], [1400]])
def test_choices_do_not_depend_on_the_sizes_of_batches(model, sets, y, sizes):
    """All that is automatic is settled on the first 1024 samples, wherever a batch ends."""
    reference = clone(model).fit_batches([(sets[:1024], y[:1024]), (sets[1024:], y[1024:])])
    batches = []
    start = 0
    while start < len(sets):
        stop = start + sizes[len(batches) % len(sizes)]
        batches.append((sets[start:stop], y[start:stop]))
        start = stop
    fit = model.fit_batches(batches)
    assert fit.candidates_ == reference.candidates_
    np.testing.assert_allclose(fit.predict(sets), reference.predict(sets), rtol=0, atol=1e-8)


def test_attributes_of_a_fit_before_are_forgotten(model, sets, y):
    """A kernel has dual coefficients and chose its own rule: a stream that starts over has
    neither.
    """
    model.set_params(n_heads="auto").fit(sets[:60], y[:60])
    assert "dual_coef_" in vars(model)
    model.set_params(n_heads=4)
    with pytest.warns(UserWarning, match="starts over"):
        model.partial_fit(sets, y)
    fresh = clone(model).partial_fit(sets, y)
    assert not hasattr(model, "dual_coef_")
    assert model.candidates_ == fresh.candidates_
    assert model.n_heads_ == fresh.n_heads_


def test_the_rule_for_tokens_is_that_of_the_layer(model, sets, y):
    """Each solve standardises extras anew: the attribute shows the rule of all samples so far."""
    stream_of(model, sets, y, 3).predict(sets[:1])
    other = changed(sets, extras=100 * sets.extras + 7)
    model.partial_fit(other[600:], y[600:])
    shown = model.solve().tokens_
    assert shown.extras_spread[0] * shown.extras_scale > 30  # the standard deviation


# Threads


def in_threads(work, n_threads=8):
    """Results of ``work()`` in threads that start together."""
    barrier = threading.Barrier(n_threads)

    def start(_):
        barrier.wait()
        return work()

    with ThreadPoolExecutor(n_threads) as pool:
        return list(pool.map(start, range(n_threads)))


def test_threads_that_predict_after_partial_fit_share_one_solve(model, sets, y, monkeypatch):
    reference = clone(model)
    solves = []
    original = LayerRecipe.fit

    def counted(self, *args, **kwargs):
        solves.append(threading.get_ident())
        return original(self, *args, **kwargs)

    for number in range(6):
        expected = reference.partial_fit(*part(sets, y, number)).predict(sets[:50])
        model.partial_fit(*part(sets, y, number))
        with monkeypatch.context() as patch:
            patch.setattr(LayerRecipe, "fit", counted)
            solves.clear()
            for predictions in in_threads(lambda: model.predict(sets[:50])):
                np.testing.assert_array_equal(predictions, expected)
        assert len(solves) == 1
        assert model.alpha_ == reference.alpha_


def test_predictions_while_samples_are_added_are_those_of_one_state(model, sets, y):
    n_parts = 7
    reference = clone(model)
    states = [
        reference.partial_fit(*part(sets, y, number)).predict(sets[:50])
        for number in range(n_parts)
    ]
    model.partial_fit(*part(sets, y, 0)).predict(sets[:1])  # settled on the same samples
    done = threading.Event()
    predictions = []

    def read():
        while not done.is_set():
            predictions.append(model.predict(sets[:50]))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for number in range(1, n_parts):
            model.partial_fit(*part(sets, y, number))
    finally:
        done.set()
        for reader in readers:
            reader.join()
    # the same up to rounding: batches are added to the sums in other portions
    for prediction in predictions:
        distances = [np.abs(prediction - state).max() for state in states]
        assert min(distances) < 1e-6, distances
    np.testing.assert_allclose(model.predict(sets[:50]), states[-1], rtol=0, atol=1e-6)


def test_threads_that_add_lose_nothing(model, sets, y):
    parts = iter([part(sets, y, number) for number in range(7)])
    taking = threading.Lock()

    def add():
        with taking:
            samples = next(parts)
        model.partial_fit(*samples)

    in_threads(add, n_threads=7)
    model.predict(sets[:1])
    assert model.n_samples_seen_ == 1400
    assert model.stream_.sums.moments.count == 1400


READERS = {
    "predict_proba": lambda model, sets: model.predict_proba(sets),
    "decision_function": lambda model, sets: model.decision_function(sets),
    "contributions": lambda model, sets: np.concatenate(model.contributions(sets)),
    "extras_contributions": lambda model, sets: model.extras_contributions(sets),
    "hop_weights": lambda model, sets: np.concatenate(
        [w.ravel() for w in model.hop_weights(sets)[0]]
    ),
    "predict_set": lambda model, sets: model.predict_set(sets, 0.5),
    "predict_interval": lambda model, sets: model.predict_interval(sets),
    "predict": lambda model, sets: model.predict(sets),
}


@pytest.mark.filterwarnings("ignore:.*plain jackknife")
@pytest.mark.parametrize("reader", READERS)
def test_a_batch_that_comes_during_a_prediction_does_not_show_in_it(sets, y, reader, monkeypatch):
    """The batch comes right after the rule for tokens was applied, before the layer is asked."""
    model = kh.AttentionClassifier(4, random_state=0)
    if reader == "predict_interval":
        model = kh.AttentionRegressor(4, random_state=0)
    else:
        y = np.where(y > np.median(y), "high", "low")
    options = {"classes": ["high", "low"]} if reader != "predict_interval" else {}
    model.partial_fit(sets[:300], y[:300], **options)
    wide = changed(sets, tokens=3 * sets.tokens, extras=100 * sets.extras)
    read = READERS[reader]
    expected = read(model, sets[:50])
    apply = TokenRule.apply
    came = []

    def interrupted(self, batch):
        ready = apply(self, batch)
        if not came:
            came.append(True)
            model.partial_fit(wide[300:], y[::-1][300:])
        return ready

    with monkeypatch.context() as patch:
        patch.setattr(TokenRule, "apply", interrupted)
        during = read(model, sets[:50])
    np.testing.assert_array_equal(during, expected)
    assert came
    if reader != "hop_weights":  # without looks it shows the heads, which were settled before
        assert (read(model, sets[:50]) != expected).any()


@pytest.mark.parametrize("how", ["pickle", "copy", "deepcopy", "joblib"])
@pytest.mark.parametrize("solved", [False, True])
def test_copies_of_a_stream_go_their_own_ways(model, sets, y, how, solved):
    stream_of(model, sets, y, 6)
    if solved:
        model.predict(sets[:1])
    if how == "joblib":
        file = io.BytesIO()
        joblib.dump(model, file)
        file.seek(0)
        twin = joblib.load(file)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        twin = getattr(copy, how)(model)
    expected = clone(model)
    stream_of(expected, sets, y, 6)
    np.testing.assert_array_equal(twin.predict(sets[:50]), expected.predict(sets[:50]))

    # what one of them takes in, the other does not see
    twin.partial_fit(*part(sets, y, 6))
    assert (twin.n_samples_seen_, model.n_samples_seen_) == (1400, 1200)
    np.testing.assert_array_equal(model.predict(sets[:50]), expected.predict(sets[:50]))
    expected.partial_fit(*part(sets, y, 6))
    np.testing.assert_array_equal(twin.predict(sets[:50]), expected.predict(sets[:50]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_does_not_wait_for_threads_it_does_not_have(model):
    held = threading.Event()
    done = threading.Event()

    def hold():
        with lock_of(model):
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if lock_of(model).acquire(timeout=5) else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
