"""Parameters in a model file are checked when it is loaded: what loads can be fitted anew."""

import json
import math
import warnings

import numpy as np
import pytest
from sklearn.base import clone

import keyhole as kh
from keyhole.attention.heads import FittedHeads
from keyhole.packing import Packer, read_container, write_container

MODELS = {
    "regressor": lambda: kh.AttentionRegressor(4, random_state=0),
    "classifier": lambda: kh.AttentionClassifier(4, random_state=0),
    "identity": lambda: kh.AttentionRegressor(4, kh.IdentityHeads(n_heads=4), random_state=0),
    "learned": lambda: kh.AttentionRegressor(
        4, kh.LearnedHeads(max_iter=1, hops=1), random_state=0
    ),
    "norm ball": lambda: kh.NormBallRegressor(
        4, group_radius=1.0, ball_radius=1.0, tol=0.1, random_state=0
    ),
    "norm ball of classes": lambda: kh.NormBallClassifier(
        4, group_radius=1.0, ball_radius=1.0, tol=0.1, random_state=0
    ),
    "features": lambda: kh.AttentionFeatures(4, random_state=0),
}

JUNK = {
    "an array": np.array([1.0, 2.0]),
    "an array of one": np.array([True]),
    "an empty array": np.zeros(0),
    "a matrix": np.eye(2),
    "text": "bogus",
    "a list": [1, "two"],
    "a list of lists": [[1.0], [2.0, 3.0]],
    "a dict": {"a": 1},
    "not a number": math.nan,
    "infinity": math.inf,
    "negative": -1,
    "half": 0.5,
    "nothing": None,
    "true": True,
}


@pytest.fixture
def samples(rng):
    sets = kh.SetBatch(rng.normal(size=(16, 2, 2)), rng.normal(size=(16, 2)))
    return sets, sets.query[:, 0] + 0.1 * rng.normal(size=16)


def fitted(model, samples):
    sets, y = samples
    if hasattr(model, "classes_") or hasattr(model, "predict_proba"):
        y = y > np.median(y)
    return model.fit(sets, y)


def places(document):
    """Where parameters stand in a document: those of the estimator, and those of its head
    distribution.
    """
    for name, value in document["parameters"].items():
        yield ("parameters", name)
        if isinstance(value, dict) and "object" in value:
            for inner in value["with"]:
                yield ("parameters", name, "with", inner)


def with_junk(path, where, junk):
    """The same file with another value of one parameter."""
    document, arrays = read_container(path)
    packer = Packer()
    packer.arrays = dict(arrays)
    place = document
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = json.loads(json.dumps(packer.pack(junk, "junk")))
    changed = path.with_suffix(".changed")
    write_container(changed, document, packer.arrays, overwrite=True)
    return changed


@pytest.mark.parametrize("name", MODELS)
def test_what_loads_can_be_fitted_anew(name, samples, tmp_path):
    path = tmp_path / "model.keyhole"
    kh.save(fitted(MODELS[name](), samples), path)
    document, _ = read_container(path)
    loaded = 0
    checked = list(places(document))
    if name in ("identity", "learned"):  # all else is that of the regressor
        checked = [
            where for where in checked if where[:2] == ("parameters", "heads") and len(where) > 2
        ]
    for where in checked:
        for what, junk in JUNK.items():
            changed = with_junk(path, where, junk)
            try:
                model = kh.load(changed)
            except ValueError as error:
                assert "save the model anew" in str(error), (where, what)  # noqa: PT017
                continue
            loaded += 1
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    fitted(clone(model), samples)
            except (ValueError, TypeError, RuntimeError, MemoryError) as error:
                # a rule of ours about these samples, in our words: it names the parameter
                assert where[-1] in str(error) or "`" in str(error), (where, what, str(error))  # noqa: PT017
    assert loaded > 0


@pytest.mark.parametrize("junk", [np.array([True, False]), np.array([]), "no", 0.5, None])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "features"])
def test_an_intercept_is_there_or_not(name, junk, samples, tmp_path):
    model = MODELS[name]()
    with pytest.raises(
        (TypeError, ValueError), match=r"'fit_intercept' parameter .* must be an instance of 'bool'"
    ):
        fitted(clone(model).set_params(fit_intercept=junk), samples)
    kh.save(fitted(model, samples), tmp_path / "model.keyhole")
    changed = with_junk(tmp_path / "model.keyhole", ("parameters", "fit_intercept"), junk)
    with pytest.raises(
        ValueError, match=r"a parameter that no fit takes.*'fit_intercept' parameter"
    ):
        kh.load(changed)


@pytest.mark.parametrize("flag", [True, False, np.True_, np.False_])
def test_flags_may_be_those_of_numpy(flag, samples):
    model = fitted(kh.AttentionRegressor(4, fit_intercept=flag, random_state=0), samples)
    assert (model.intercept_ != 0.0) == bool(flag)


@pytest.mark.parametrize("n_heads", [math.inf, 10])
@pytest.mark.parametrize("query", ["given", "mean"])
@pytest.mark.parametrize("queries", [True, False], ids=["queries", "no queries"])
def test_hops_are_saved_whether_or_not_sets_have_a_query(
    n_heads, query, queries, samples, rng, tmp_path
):
    sets, y = samples
    if not queries:
        sets = sets.with_query(None)
    distribution = FittedHeads(np.zeros((1, 5, 3)), 0.5, hops_=(rng.normal(size=(1, 3, 3)),))
    model = kh.AttentionRegressor(n_heads, distribution, query=query, random_state=0).fit(sets, y)
    kh.save(model, tmp_path / "model.keyhole")
    loaded = kh.load(tmp_path / "model.keyhole")
    np.testing.assert_array_equal(loaded.predict(sets), model.predict(sets))
    np.testing.assert_array_equal(loaded.predict_interval(sets), model.predict_interval(sets))
