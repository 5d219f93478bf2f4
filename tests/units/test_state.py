"""`save` and `load`: every kind of model comes back; only whole files of ours are read."""

import json
import math
import struct

import numpy as np
import pytest
from exported import CONFIGURATIONS, Configuration, hopping_heads, layer
from hypothesis import given, settings
from hypothesis import strategies as st

import keyhole as kh
from keyhole._model_file import flattened, restored, write_container
from keyhole.data.schema import Schema
from keyhole.state import SCHEMA, check_tree, estimator_of, read_model, state_of

pytestmark = pytest.mark.filterwarnings(
    "ignore::keyhole.estimators.attention.ClippedWarning",
    "ignore::keyhole.estimators.uncertainty.PlainJackknifeWarning",
)


class Heads:
    """A head distribution that keyhole does not know."""

    def sample(self, n_heads, dim, seed, *, start=0):
        heads = np.random.default_rng(seed).normal(size=(start + n_heads, dim + 1, dim + 1))
        return heads[start:]


def attention(name):
    """A model of `exported.CONFIGURATIONS`, and new samples."""
    configuration = CONFIGURATIONS[name]
    return configuration.fitted(), configuration.new_samples()[0]


def fitted(estimator, *, y=None, query=3, n=60):
    """An estimator fitted to sets with queries, and new samples."""
    configuration = Configuration(query=query)
    samples = configuration.samples(n, 6, seed=0)
    target = samples.tokens[samples.offsets[:-1], 0]
    if y is not None:
        target = y(target)
    return estimator.fit(samples, target), configuration.samples(10, 6, seed=1)


def one(**more):
    return layer(random_state=0) | more


MODELS = {
    "default": lambda: attention("default, number; plain"),
    "default with extras": lambda: attention("default, two numbers; groups, extras"),
    "default classes": lambda: attention("default, three labels; groups, extras"),
    "exact": lambda: attention("relu, exact; query"),
    "second kernel": lambda: attention("relu, exact, then MLP; query"),
    "landmarks": lambda: attention("landmarks, then MLP; query"),
    "statistics": lambda: attention("statistics, MLP only; query of its own, extras"),
    "every row a query": lambda: attention("query each, exact; plain"),
    "log-loss": lambda: attention("labels; query"),
    "one penalty": lambda: fitted(kh.AttentionRegressor(**one(alpha=1.0))),
    "one penalty, exact": lambda: fitted(kh.AttentionRegressor(**one(alpha=1.0, n_heads=math.inf))),
    "penalties": lambda: fitted(kh.AttentionRegressor(**one(alpha=np.array([0.1, 1.0])))),
    "hops": lambda: fitted(kh.AttentionRegressor(**one(heads=hopping_heads()))),
    "heads of one's own": lambda: fitted(kh.AttentionRegressor(**one(heads=Heads()))),
    "the same, no query": lambda: fitted(kh.AttentionRegressor(**one(heads=Heads())), query=0),
    "float32": lambda: fitted(kh.AttentionRegressor(**one(dtype=np.float32))),
    "a generator": lambda: fitted(
        kh.AttentionRegressor(**one(random_state=np.random.default_rng(5)))
    ),
    "weights of classes": lambda: fitted(
        kh.AttentionClassifier(**one(class_weight={False: 1.0, True: 3.0})), y=lambda y: y > 0
    ),
    "many samples": lambda: fitted(
        kh.AttentionRegressor(random_state=0, n_heads=8, heads=kh.GaussianHeads()), n=310
    ),
    "features": lambda: fitted(kh.AttentionFeatures(8, random_state=0)),
    "ball": lambda: fitted(kh.NormBallRegressor(8, group_radius=1.0, random_state=0)),
    "ball of classes": lambda: fitted(
        kh.NormBallClassifier(8, group_radius=1.0, random_state=0),
        y=lambda y: np.digitize(y, [0, 1]),
    ),
}


@pytest.fixture(scope="module")
def models():
    """Models by name, each fitted once."""
    made = {}

    def model(name):
        if name not in made:
            made[name] = MODELS[name]()
        return made[name]

    return model


def outputs(model, samples):
    for method in ("predict_proba", "predict", "transform"):
        if hasattr(model, method):
            return getattr(model, method)(samples)
    raise AssertionError(model)


def saved_and_loaded(model, path, **options):
    kh.save(model, path, overwrite=True, **options)
    return kh.load(path)


@pytest.mark.parametrize("keep", ["all", "predict"])
@pytest.mark.parametrize("name", MODELS)
def test_predictions_come_back_to_the_last_bit(models, name, keep, tmp_path):
    model, samples = models(name)
    again = saved_and_loaded(model, tmp_path / "model", keep=keep)
    np.testing.assert_array_equal(outputs(again, samples), outputs(model, samples))


@pytest.mark.parametrize("name", MODELS)
def test_everything_that_a_fit_stores_comes_back(models, name, tmp_path):
    model, _ = models(name)
    again = saved_and_loaded(model, tmp_path / "model")
    assert vars(again).keys() == vars(model).keys()
    for attribute in ("held_out_predictions_", "values_", "intercept_", "classes_", "alpha_"):
        if hasattr(model, attribute):
            np.testing.assert_array_equal(getattr(again, attribute), getattr(model, attribute))
    if hasattr(model, "summary"):
        assert again.summary() == model.summary()
        assert str(again.members_) == str(model.members_)


@pytest.mark.parametrize("name", ["exact", "log-loss", "one penalty, exact", "many samples"])
def test_leave_one_out_fits_travel_with_the_model(models, name, tmp_path):
    model, samples = models(name)
    again = saved_and_loaded(model, tmp_path / "model")
    assert again.interval_method == model.interval_method == "jackknife+"
    np.testing.assert_array_equal(again.novelty(samples), model.novelty(samples))
    if hasattr(model, "predict_interval"):
        intervals = model.predict_interval(samples)
        np.testing.assert_array_equal(again.predict_interval(samples), intervals)
    else:
        np.testing.assert_array_equal(again.predict_set(samples), model.predict_set(samples))


@pytest.mark.parametrize(
    ("name", "method"),
    [("exact", "jackknife"), ("many samples", "jackknife"), ("default", "held-out")],
)
def test_a_lean_file_has_errors_and_no_outputs(models, name, method, tmp_path):
    model, samples = models(name)
    again = saved_and_loaded(model, tmp_path / "model", keep="predict")
    assert again.interval_method == method
    assert again.predict_interval(samples).shape == (len(samples), 2)
    assert not hasattr(again, "held_out_predictions_")
    with pytest.raises(ValueError, match="Use fit, and save with keep='all'"):
        again.novelty(samples)


def test_a_lean_file_of_drawn_heads_holds_no_training_sample(models):
    tree = state_of(models("hops")[0], "predict")["attention"]
    assert tree["training"] is None
    assert tree["members"][0]["factors"] == []
    assert len(tree["embeddings"][0]["train"]["tokens"]) == 0


def test_members_that_share_their_kernel_share_an_embedding(models):
    tree = state_of(models("default")[0])["attention"]
    numbers = [member["embedding"] for member in tree["members"]]
    assert len(tree["embeddings"]) == len(set(numbers))
    assert sorted(set(numbers)) == list(range(len(tree["embeddings"])))


@pytest.mark.parametrize("n_batches", [2, 24])
def test_batches_go_on_where_they_stopped(n_batches, tmp_path):
    """Before the layers are settled, and after."""
    configuration = Configuration()

    def batch(number):
        sets = configuration.samples(100, 6, seed=number)
        return sets, sets.tokens[sets.offsets[:-1], 0]

    whole = kh.AttentionRegressor(n_heads=8, random_state=0)
    for number in range(n_batches):
        whole.partial_fit(*batch(number))
    again = saved_and_loaded(whole, tmp_path / "model")
    for model in (whole, again):
        model.partial_fit(*batch(n_batches))
    new, _ = batch(99)
    np.testing.assert_array_equal(again.predict(new), whole.predict(new))

    lean = saved_and_loaded(whole, tmp_path / "lean", keep="predict")
    np.testing.assert_array_equal(lean.predict(new), whole.predict(new))
    with pytest.raises(ValueError, match="saved with keep='predict'"):
        lean.partial_fit(*batch(3))


def test_a_schema_travels_with_the_model(models, tmp_path):
    model, _ = models("the same, no query")
    schema = Schema(3, False, ("a", "b", "c"), "y", (("keys", ("a", "b", "c")),))
    kh.save(model, tmp_path / "model", schema=schema)
    assert read_model(tmp_path / "model").schema == schema
    assert kh.load(tmp_path / "model", return_schema=True)[1] == schema


# ---- what is refused -----------------------------------------------------------------------------


def test_a_file_is_replaced_only_if_asked(models, tmp_path):
    model, _ = models("hops")
    kh.save(model, tmp_path / "model")
    before = (tmp_path / "model").read_bytes()
    with pytest.raises(ValueError, match="not replaced unless asked"):
        kh.save(models("float32")[0], tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == before
    with pytest.raises(ValueError, match="must name a file"):
        kh.save(model, tmp_path)


def test_what_is_no_fitted_estimator_of_ours_is_refused(tmp_path):
    from sklearn.linear_model import Ridge

    with pytest.raises(TypeError, match="must be one of keyhole's"):
        kh.save(Ridge(), tmp_path / "model")
    with pytest.raises(ValueError, match="must be fitted before it is saved"):
        kh.save(kh.AttentionRegressor(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_loaded_again_is_not_written(tmp_path):
    model, _ = MODELS["hops"]()
    model.note_ = object()
    with pytest.raises(ValueError, match=r"saved only if it can be loaded again.*note_"):
        kh.save(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def content(models, tmp_path_factory):
    """The bytes of a model file."""
    path = tmp_path_factory.mktemp("whole") / "model"
    kh.save(models("second kernel")[0], path)
    return path.read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_in_words(content, tmp_path_factory, data):
    """A byte changed, cut off, or put in, wherever it is."""
    place = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["change", "cut", "insert"]))
    if kind == "change":
        byte = content[place] ^ data.draw(st.integers(1, 255))
        damaged = content[:place] + bytes([byte]) + content[place + 1 :]
    elif kind == "cut":
        damaged = content[:place]
    else:
        damaged = content[:place] + data.draw(st.binary(min_size=1, max_size=9)) + content[place:]
    path = tmp_path_factory.mktemp("damaged") / "model"
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"'model' (cannot be read as a model|has version)"):
        kh.load(path)


@pytest.mark.parametrize(
    "foreign",
    [b"", b"PK\x03\x04", b"\x80\x04K\x01.", struct.pack("<Q", 2) + b"{}", b"set,x\n1,2\n" * 50],
)
def test_a_foreign_file_is_refused_in_words(foreign, tmp_path):
    (tmp_path / "model").write_bytes(foreign)
    with pytest.raises(ValueError, match="'model' cannot be read as a model"):
        kh.load(tmp_path / "model")


def test_a_folder_and_a_file_of_another_version_are_refused(content, tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        kh.load(tmp_path)
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] |= {"version": "4", "keyhole": "9.0.0"}
    text = json.dumps(header).encode()
    (tmp_path / "model").write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    with pytest.raises(ValueError, match=r"has version '4' of keyhole 9\.0\.0"):
        kh.load(tmp_path / "model")


def changed(tree, way, value):
    """A tree with another value at a place."""
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    first, *rest = way
    copy[first] = changed(copy[first], rest, value) if rest else value
    return copy


@pytest.mark.parametrize(
    ("way", "value", "words"),
    [
        (["estimator"], "Ridge", "estimator 'Ridge', which is none of"),
        (["attention", "options", "seed"], -1, "seed that is no count"),
        (["attention", "members"], [], "no members"),
        (["attention", "members", 0, "coef"], np.zeros((5, 1)), "5 coefficients"),
        (["attention", "members", 0, "coef"], np.full((60, 1), np.nan), "not finite"),
        (["attention", "members", 0, "coef"], np.zeros((60, 2)), "where 2 was expected"),
        (["attention", "members", 0, "embedding"], 7, "list index out of range"),
        (["attention", "members", 0, "path", "best"], 99, "penalty that was not tried"),
        (["attention", "embeddings", 0, "rule", "scaling"], "log", "scaling 'log'"),
        (["attention", "embeddings", 0, "rule", "centre"], np.zeros(4), "where 3 was expected"),
        (["attention", "embeddings", 0, "settings", "n_heads"], 0, "0 heads"),
        (["attention", "embeddings", 0, "settings", "heads"], kh.LearnedHeads(), "no heads"),
        (["attention", "training", "samples", "offsets"], np.array([0, 3]), "offsets that do not"),
        (["attention", "extra"], 1, "other entries"),
        (["parameters", "n_heads"], "many", "n_heads"),
        (["fitted", "predict"], 1, "a fitted attribute 'predict'"),
        (["fitted", "n_features_in_"], 4, r"of shape \(3,\), where 4 was expected"),
    ],
)
def test_a_file_made_by_hand_is_compared_with_the_schema(models, way, value, words, tmp_path):
    tree = changed(state_of(models("second kernel")[0]), way, value)
    arrays = {}
    write_container(tmp_path / "model", flattened(tree, "", arrays), arrays, overwrite=False)
    with pytest.raises(ValueError, match=words):
        kh.load(tmp_path / "model")


def test_a_tree_survives_being_flattened():
    tree = {
        "numbers": [1, 2.5, math.inf, None, True],
        "array": np.arange(6.0).reshape(2, 3),
        "texts": np.array(["a", "b"]),
        "weights": {0: 1.0, 1: 2.0},
        "heads": kh.GaussianHeads(mean=np.eye(3)),
        "count": kh.Landmarks(3),
        "pair": (1, "two"),
    }
    arrays = {}
    again = restored(json.loads(json.dumps(flattened(tree, "", arrays))), "", arrays)
    assert sorted(arrays) == ["array", "heads.mean"]
    np.testing.assert_equal(again.pop("array"), tree.pop("array"))
    np.testing.assert_equal(again.pop("texts"), tree.pop("texts"))
    assert again == tree


def test_every_state_is_as_the_schema_says(models):
    for name in MODELS:
        tree = state_of(models(name)[0])
        check_tree(tree, SCHEMA, "", {}, {})
        assert type(estimator_of(tree).estimator) is type(models(name)[0])
