"""Saved models: the same to the last bit, refused with a message when anything about the file is
wrong.
"""

import copy
import json
import math
import os
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from devices import DEVICE
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from paper import PAPER_LAYER, paper_classifier, paper_regressor
from safetensors.numpy import load_file, save_file

import keyhole as kh
from keyhole.attention.heads import FittedHeads
from keyhole.data.sets import SetGroups
from keyhole.models import Schema, read_model
from keyhole.packing import (
    FORMAT,
    VERSION,
    Packer,
    Unpacker,
    _digest,
    read_container,
    write_container,
)

DIM = 3
QUICK = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def sets_of(rng, n=40, query=True, dtype=np.float64):
    keys = [rng.normal(size=(rng.integers(1, 5), DIM)).astype(dtype) for _ in range(n)]
    return kh.SetBatch(keys, rng.normal(size=(n, DIM)).astype(dtype) if query else None)


DISTRIBUTIONS = {
    "none": None,
    "zero": kh.GaussianHeads(scale=0.3),
    "identity": kh.GaussianHeads(mean=2.0),
    "array": kh.GaussianHeads(mean=np.arange(16.0).reshape(4, 4) / 8),
    "product": kh.QueryKeyHeads(rank=2),
    "chosen": kh.IdentityHeads(n_heads=4),
    "learned": kh.LearnedHeads(n_means=2, max_iter=5, hops=1),
}


def assert_same(model, path, *batches):
    kh.save(model, path)
    loaded = kh.load(path)
    assert set(vars(loaded)) == set(vars(model))
    for name, value in vars(model).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(
                getattr(loaded, name), value, equal_nan=value.dtype.kind == "f"
            ), name
            assert getattr(loaded, name).dtype == value.dtype
    for batch in batches:
        for method in ("predict", "decision_function", "predict_proba", "transform"):
            if hasattr(model, method):
                before, after = getattr(model, method)(batch), getattr(loaded, method)(batch)
                assert before.dtype == after.dtype
                assert np.array_equal(before, after), method
    return loaded


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("heads", [7, math.inf])
def test_regressors_are_the_same_to_the_last_bit(distribution, heads, rng, tmp_path):
    if heads == math.inf and distribution == "product":
        pytest.skip("no kernel in closed form")
    train, test = sets_of(rng, 60), sets_of(rng)
    model = kh.AttentionRegressor(
        heads,
        heads=DISTRIBUTIONS[distribution],
        random_state=3,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ).fit(train, rng.normal(size=(60, 2)))
    loaded = assert_same(model, tmp_path / "m", test)
    assert loaded.get_params().keys() == model.get_params().keys()
    assert loaded.heads == DISTRIBUTIONS[distribution]


def test_scales_of_coordinates_are_kept(rng, tmp_path):
    train, test = sets_of(rng, 60), sets_of(rng)
    width = train.dim + 1
    distribution = FittedHeads(
        rng.normal(size=(2, width, width)),
        0.3,
        query_scales_=rng.uniform(0.5, 2.0, width),
        key_scales_=rng.uniform(0.5, 2.0, width),
    )
    model = paper_regressor(7, heads=distribution, random_state=3)
    loaded = assert_same(model.fit(train, rng.normal(size=60)), tmp_path / "m", test)
    np.testing.assert_array_equal(loaded.heads_.key_scales_, distribution.key_scales_)


@pytest.mark.parametrize(
    "labels",
    [
        np.array(["no", "yes", "häh?"]),
        np.array([3, -5]),
        np.array([True, False]),
        np.array([0.0, 1.0, 9.0]),
        np.array(["a", "b"], dtype=object),
        np.array([1, 2, 3], dtype=np.uint8),
    ],
    ids=lambda a: str(a.dtype),
)
@pytest.mark.parametrize("heads", [5, math.inf])
def test_classifiers_keep_their_labels(labels, heads, rng, tmp_path):
    train, test = sets_of(rng, query=False), sets_of(rng, query=False)
    y = labels[np.arange(40) % len(labels)]
    model = paper_classifier(heads, random_state=0).fit(train, y)
    loaded = assert_same(model, tmp_path / "m", test)
    assert loaded.classes_.dtype == labels.dtype
    assert loaded.temperature_ == model.temperature_


@pytest.mark.parametrize("scaling", ["none", "sphere", "standard", "auto"])
@pytest.mark.parametrize(("query", "pooling"), [("mean", "mean"), ("each", "sum")])
def test_token_rules_travel_with_the_model(scaling, query, pooling, rng, tmp_path):
    train, y = sets_of(rng, query=False), rng.normal(size=40)
    for heads in (6, math.inf):
        model = paper_regressor(
            heads, scaling=scaling, query=query, pooling=pooling, random_state=0
        )
        assert_same(model.fit(train, y), tmp_path / f"{heads}", sets_of(rng, query=False))


def test_groups_and_single_precision(rng, tmp_path):
    sets = sets_of(rng, 40, dtype=np.float32)
    groups = SetGroups(sets, [1, 3] * 10)
    for heads in (6, math.inf):
        model = paper_regressor(heads, dtype="float32", pooling="sum", random_state=0)
        assert_same(model.fit(groups, rng.normal(size=20)), tmp_path / f"{heads}", groups)


@pytest.mark.parametrize("distribution", ["none", "array", "product"])
def test_norm_balls_and_features(distribution, rng, tmp_path):
    train, test = sets_of(rng), sets_of(rng)
    options = {
        "n_heads": 8,
        "heads": DISTRIBUTIONS[distribution],
        "random_state": np.random.default_rng(0),
    }
    ball = {"group_radius": 5.0, "ball_radius": 2.0, "tol": 0.1}
    y = rng.normal(size=40)
    assert_same(kh.NormBallRegressor(**options, **ball).fit(train, y), tmp_path / "1", test)
    assert_same(
        kh.NormBallRegressor(**options, **ball).fit(train, y[:, None]), tmp_path / "2", test
    )
    assert_same(kh.NormBallClassifier(**options, **ball).fit(train, y > 0), tmp_path / "3", test)
    three = np.array(["a", "b", "c"])[np.arange(40) % 3]
    assert_same(kh.NormBallClassifier(**options, **ball).fit(train, three), tmp_path / "4", test)
    assert_same(kh.AttentionFeatures(**options).fit(train), tmp_path / "5", test)


@pytest.fixture
def saved(rng, tmp_path):
    model = paper_classifier(4, random_state=0).fit(
        sets_of(rng), np.array(["a", "b"])[np.arange(40) % 2]
    )
    kh.save(
        model,
        tmp_path / "model",
        schema=Schema(DIM, True, ("x", "y", "z"), "label", (("set", "id"),)),
    )
    return tmp_path / "model"


def test_schema_is_kept_and_checked(saved, rng):
    found = read_model(saved)
    assert found.schema == Schema(DIM, True, ("x", "y", "z"), "label", (("set", "id"),))
    found.schema.check(sets_of(rng), ("x", "y", "z"))
    with pytest.raises(
        ValueError, match=r"coordinate 2 was 'z' and is 'w'.*Choose the columns x, y, z"
    ):
        found.schema.check(sets_of(rng), ("x", "y", "w"))
    with pytest.raises(ValueError, match="with a query: got sets without"):
        found.schema.check(sets_of(rng, query=False))
    with pytest.raises(ValueError, match=r"3 coordinates.*got 2"):
        found.schema.check(kh.SetBatch(np.zeros((2, 2, 2))))
    with pytest.raises(ValueError, match="was fitted with queries"):
        found.estimator.predict(sets_of(rng, query=False))
    with pytest.raises(ValueError, match="expecting 3 features"):
        found.estimator.predict(kh.SetBatch(np.zeros((2, 2, 2)), np.zeros((2, 2))))


def test_nothing_is_replaced_unless_asked(saved, rng):
    before = saved.read_bytes()
    other = kh.AttentionFeatures(3, random_state=0).fit(sets_of(rng))
    with pytest.raises(ValueError, match=r"'model' exists.*overwrite=True"):
        kh.save(other, saved)
    assert saved.read_bytes() == before
    kh.save(other, saved, overwrite=True)
    assert isinstance(kh.load(saved), kh.AttentionFeatures)
    assert os.listdir(saved.parent) == ["model"]  # no partial files


def test_a_failed_save_leaves_nothing(rng, tmp_path):
    class Own(kh.GaussianHeads):
        pass

    with pytest.raises(ValueError, match=r"heads is a Own.*kh.GaussianHeads"):
        kh.save(
            kh.AttentionFeatures(3, heads=Own(), random_state=0).fit(sets_of(rng)), tmp_path / "m"
        )
    with pytest.raises(ValueError, match="must be fitted"):
        kh.save(kh.AttentionFeatures(3), tmp_path / "m")
    with pytest.raises(TypeError, match="one of keyhole's"):
        kh.save(object(), tmp_path / "m")
    assert os.listdir(tmp_path) == []


def rewrite(path, change):
    """Change the document and give the file a digest that fits, as somebody with bad intentions
    would.
    """
    document, arrays = read_container(path)
    change(document, arrays)
    write_container(path, document, arrays, overwrite=True)


def poke(where, value):
    def change(document, arrays):
        for key in where[:-1]:
            document = document[key]
        document[where[-1]] = value

    return change


# ------------------------------------------------------------------------------------------------
# files that somebody changed, with a digest that fits


HEADS = ("layer", "with", "heads", "with")


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("estimator",), "os.system"),
        (("estimator",), "__class__"),
        (("parameters", "n_jobs"), 3),
        (("parameters", "fit_intercept"), "no"),
        (
            ("parameters", "heads"),
            {"object": "Popen", "with": {"args": {"list": ["touch", "owned"]}}},
        ),
        (("parameters", "heads"), {"object": "GaussianHeads", "with": {"__class__": 3}}),
        (("fitted", "__class__"), 3),
        (("fitted", "predict"), 3),
        (("fitted", "layer_"), 3),
        (("fitted", "n_features_in_"), 10**15),
        (("fitted", "n_features_in_"), "3"),
        (("fitted", "n_query_features_in_"), 2),
        (("fitted", "n_extras_in_"), -1),
        (("fitted", "classes_"), {"strings": ["b", "a"], "shape": [2], "as": "text"}),
        (("fitted", "tokens_"), None),
        (("fitted", "temperature_"), -1.0),
        (("fitted", "intercept_"), 3.0),
        (("fitted", "selection_"), 3),
        ((*HEADS, "n_heads"), 10**15),
        ((*HEADS, "dim"), 10**9),
        ((*HEADS, "seed"), -1),
        ((*HEADS, "distribution"), {"object": "QueryKeyHeads", "with": {"rank": 10**12}}),
        ((*HEADS, "distribution"), {"object": "GaussianHeads", "with": {"mean": "eval(1)"}}),
        ((*HEADS, "distribution"), {"object": "LearnedHeads", "with": {}}),
        (("layer", "with", "activation"), "exec"),
        (("layer", "with", "dtype"), "int8"),
        (("layer", "with", "values"), {"array": "77", "turned": False}),
        (("layer",), {"list": []}),
        (("layer",), None),
        (("training",), {"list": []}),
        (("schema",), None),
        (("schema", "columns"), [["set", [1]]]),
        (("fitted",), {"number": "9" * 400}),
    ],
)
def test_a_crafted_file_is_refused(saved, where, value):
    rewrite(saved, poke(where, value))
    with pytest.raises(
        ValueError,
        match=r"(?s)model file describes an estimator.*'model' has .*save the model anew",
    ):
        kh.load(saved)


def test_heads_that_cannot_be_drawn_are_refused(saved):
    def change(document, _):
        for distribution in (
            document["layer"]["with"]["heads"]["with"]["distribution"],
            document["fitted"]["heads_"],
        ):
            distribution["with"]["scale"] = 1.7e308

    rewrite(saved, change)
    with pytest.raises(ValueError, match="heads that are not finite"), np.errstate(over="ignore"):
        kh.load(saved)


def test_a_long_text_among_short_ones_asks_for_no_more_memory_than_the_file_fills(
    saved, rng, tmp_path
):
    """NumPy makes all texts of an array as wide as the longest: width × count, 2 GB here out of a
    few hundred kB.
    """
    texts = {"strings": ["x" * 50_000, *"ab" * 5_000], "shape": [10_001], "as": "text"}
    for wide in (
        texts,
        {
            "dict": [
                [k, {**texts, "strings": texts["strings"][::20], "shape": [501]}] for k in "abcdefg"
            ]
        },
    ):
        rewrite(saved, poke(("fitted", "note_"), wide))
        tracemalloc.start()
        with pytest.raises(ValueError, match=r"'model' has text that grows by [\d,]+ bytes"):
            kh.load(saved)
        assert tracemalloc.get_traced_memory()[1] < 100e6 + 20 * saved.stat().st_size
        tracemalloc.stop()
    model = kh.AttentionFeatures(3, random_state=0).fit(sets_of(rng))
    model.note_ = np.array(texts["strings"][:400])
    with pytest.raises(ValueError, match=r"note_ takes up 80,000,000 because .*Shorten"):
        kh.save(model, tmp_path / "wide")
    model.note_ = np.array(texts["strings"][:400], dtype=object)
    kh.save(model, tmp_path / "objects")
    assert kh.load(tmp_path / "objects").note_[0] == "x" * 50_000


def test_a_small_file_does_not_ask_for_a_large_matrix(rng, tmp_path):
    kh.save(kh.AttentionFeatures(3, random_state=0).fit(sets_of(rng)), tmp_path / "m")
    rewrite(tmp_path / "m", poke(("fitted", "n_features_in_"), 10**8))
    rewrite(
        tmp_path / "m", poke(("layer", "with", "dim"), 10**8)
    )  # one head would take 80 petabytes
    assert kh.load(tmp_path / "m").n_features_in_ == 10**8
    with pytest.raises(ValueError, match="expecting 100000000 features"):
        kh.load(tmp_path / "m").transform(sets_of(rng))


def header_of(content):
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_other_files_are_refused(saved, tmp_path):
    header, data = header_of(saved.read_bytes())
    first = next(name for name in header if name != "__metadata__")
    cases = {
        "empty": b"",
        "short": b"\x01",
        "text": b"a,b,c\n1,2,3\n" * 10,
        "pickle": b"\x80\x04cos\nsystem\n(S'touch owned'\ntR." * 3,
        "huge header": (2**63).to_bytes(8, "little") + saved.read_bytes()[8:],
        "no JSON": with_header(b"{" * 50, data),
        "deep JSON": with_header(b"[" * 100_000, data),
        "a list": with_header([1, 2], data),
        "no metadata": with_header({first: header[first]}, data),
        "absurd shape": with_header(
            {**header, first: {**header[first], "shape": [2**40, 2**40]}}, data
        ),
        "negative offset": with_header(
            {**header, first: {**header[first], "data_offsets": [-8, 0]}}, data
        ),
        "unknown type": with_header({**header, first: {**header[first], "dtype": "O"}}, data),
        "no tensors": with_header({"__metadata__": header["__metadata__"]}, b""),
        "more data": with_header(header, data + b"12345678"),
    }
    for name, content in cases.items():
        path = tmp_path / name.replace(" ", "_")
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged, or was not written by kh.save"):
            kh.load(path)
    header["__metadata__"]["version"] = "3"
    saved.write_bytes(with_header(header, data))
    with pytest.raises(ValueError, match=r"reads version 2 .*'model' has version '3'"):
        kh.load(saved)
    save_file({"w": np.zeros(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="format is 'keyhole-model'"):
        kh.load(tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="is a folder"):
        kh.load(tmp_path)
    with pytest.raises(OSError, match="nowhere"):
        kh.load(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a small model file, and where damaged ones are written."""
    path = tmp_path_factory.mktemp("damaged") / "model"
    rng = np.random.default_rng(0)
    model = paper_classifier(2, random_state=0).fit(sets_of(rng, 8), np.arange(8) % 2)
    kh.save(model, path)
    return path.read_bytes(), path


@settings(QUICK, max_examples=200)
@given(
    damage=st.sampled_from(["changed", "cut off", "inserted", "repeated"]),
    place=st.integers(0, 10**6),
    piece=st.binary(min_size=1, max_size=8),
)
def test_a_damaged_file_is_refused_in_words(whole, damage, place, piece):
    """Bytes are changed, cut off, put in or repeated, anywhere."""
    content, path = whole
    start = place % len(content)
    end = start + len(piece)
    damaged = {
        "changed": content[:start] + piece + content[end:],
        "cut off": content[:start],
        "inserted": content[:start] + piece + content[start:],
        "repeated": content[:end] + content[start:],
    }[damage]
    assume(damaged.translate(None, b" ") != content.translate(None, b" "))  # padding of the header
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"model file|must match the digest"):
        kh.load(path)


@QUICK
@given(st.binary(max_size=200))
def test_a_foreign_file_is_refused_in_words(whole, content):
    _, path = whole
    path.write_bytes(content)
    with pytest.raises(ValueError, match="model file is safetensors"):
        kh.load(path)


JUNK = [
    None,
    True,
    -1,
    0,
    3,
    10**15,
    1e300,
    2.5,
    "x" * 50,
    "mean",
    [],
    {},
    [3],
    {"array": "0", "turned": True},
    {"array": "1", "turned": False},
    {"number": "nan"},
    {"number": "inf"},
    {"list": [1]},
    {"tuple": ["a", "b"]},
    {"strings": ["a", "b"], "shape": [2], "as": "text"},
    {"strings": ["b", "a", "c"], "shape": [3], "as": "object"},
    {"object": "SetBatch", "with": {}},
    {"object": "FittedHeads", "with": {"means_": 1}},
    {"object": "GaussianHeads", "with": {"mean": "no number"}},
    {"object": "GaussianHeads", "with": {"scale": 0.0}},
    {"object": "GaussianHeads", "with": {"mean": {"number": "nan"}}},
    {"object": "QueryKeyHeads", "with": {"rank": 2}},
    {"object": "QueryKeyHeads", "with": {"rank": 2, "scale": None}},
    {"object": "IdentityHeads", "with": {}},
    {"object": "TokenRule", "with": {"scaling": "none", "query": "each", "pooling": "sum"}},
    {"object": "TokenRule", "with": {"scaling": "standard", "query": "given", "pooling": "mean"}},
]
"""What a piece of a document is replaced by."""


def model_of(kind, rng):
    """A small fitted model of each kind that a file may hold."""
    sets, y = sets_of(rng, 12), rng.normal(size=12)
    words = np.array(["a", "b", "c"])[np.arange(12) % 3]
    ball = {"group_radius": 5.0, "ball_radius": 2.0, "tol": 0.1, "random_state": 0}
    if kind == "groups":
        groups = SetGroups(sets, [1, 3, 2] * 2)
        return paper_regressor(math.inf, pooling="sum", random_state=0).fit(groups, y[:6]), groups
    model = {
        "finite": lambda: paper_regressor(3, scaling="standard", random_state=0).fit(
            sets, y[:, None]
        ),
        "kernel": lambda: paper_classifier(math.inf, query="each", random_state=0).fit(sets, words),
        "learned": lambda: kh.AttentionClassifier(
            3,
            heads=DISTRIBUTIONS["chosen"],
            random_state=0,
            scaling="none",
            query="given",
            activation="relu",
            pooling="mean",
        ).fit(sets, words != "a"),
        "ball": lambda: kh.NormBallClassifier(3, **ball).fit(sets, words),
        "streamed": lambda: paper_classifier(3, random_state=0).partial_fit(
            sets, words, classes=["a", "b", "c"]
        ),
        "features": lambda: kh.AttentionFeatures(
            3, heads=DISTRIBUTIONS["array"], random_state=0
        ).fit(sets),
    }[kind]()
    return model, sets


KINDS = ["finite", "kernel", "learned", "groups", "ball", "streamed", "features"]


class Damaged:
    """Model files of every kind, as their description and arrays, and where changed ones go."""

    def __init__(self, folder):
        self.path = folder / "changed"
        self.files = {}
        for kind in KINDS:
            model, sets = model_of(kind, np.random.default_rng(0))
            kh.save(model, folder / kind)
            self.files[kind] = (*read_container(folder / kind), sets)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    return Damaged(tmp_path_factory.mktemp("models"))


WRONG_VALUES = st.one_of(
    st.sampled_from(JUNK),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
)


@settings(QUICK, max_examples=300)
@given(kind=st.sampled_from(KINDS), place=st.integers(0, 10**6), value=WRONG_VALUES)
def test_a_changed_description_is_refused_or_predicts(damaged, kind, place, value):
    """A piece of a description is replaced, with a digest that fits.

    The file is refused when it is loaded, or the model predicts finite numbers: never later, never
    else. (A transformer of other samples is as good a model: it names the samples it was fitted
    to.)
    """
    document, arrays, sets = damaged.files[kind]
    places = list(walk(document))
    where = places[place % len(places)]
    changed = copy.deepcopy(document)
    poke(where, value)(changed, arrays)
    write_container(damaged.path, changed, arrays, overwrite=True)
    try:
        model = kh.load(damaged.path)
    except ValueError as error:
        assert "save the model anew" in str(error)  # noqa: PT017
        return
    if isinstance(model, kh.AttentionFeatures) and model.n_extras_in_ > 0:
        with pytest.raises(ValueError, match=r"extras.* is expecting"):
            model.transform(sets)
        return
    for method in ("predict", "decision_function", "predict_proba", "transform"):
        if hasattr(model, method):
            with np.errstate(over="ignore"):  # numbers near 1e308
                result = getattr(model, method)(sets)
            assert len(result) == len(sets)
            assert result.dtype.kind in "OU" or np.isfinite(result).all()
    repr(model)


def walk(value, path=()):
    if path:
        yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield from walk(item, (*path, key))


def parts_of(rng, n=60):
    """Batches of sets with numbers and with labels, and all of them together."""
    sets, y = sets_of(rng, n), rng.normal(size=n)
    return sets, y, [slice(0, n // 2), slice(n // 2, n - 7), slice(n - 7, n)]


@pytest.mark.parametrize("kind", ["regressor", "outputs", "two classes", "three classes", "groups"])
@pytest.mark.parametrize("first", ["partial_fit", "fit_batches"])
def test_a_streamed_model_goes_on_after_loading_where_it_was(kind, first, rng, tmp_path):
    sets, y, parts = parts_of(rng)
    if kind == "groups":
        sets, y, parts = (
            SetGroups(sets, [1, 2] * 20),
            y[:40],
            [slice(0, 20), slice(20, 33), slice(33, 40)],
        )
    estimator, options = kh.AttentionRegressor, {}
    if kind == "outputs":
        y = np.column_stack([y, np.cos(y)])
    if "classes" in kind:
        estimator = kh.AttentionClassifier
        y = np.array(["a", "b", "c"])[
            np.digitize(y, [0.0] if kind == "two classes" else [-0.5, 0.5])
        ]
        options = {"classes": np.unique(y)}
    # named: what is automatic is settled by the first samples, which differ here
    named = {**PAPER_LAYER, "random_state": 0}
    whole = estimator(4, **named).partial_fit(sets, y, **options)
    model = estimator(4, **named)
    if first == "fit_batches":
        model.fit_batches([(sets[parts[0]], y[parts[0]])], **options)
    else:
        model.partial_fit(sets[parts[0]], y[parts[0]], **options)
    for k, part in enumerate(parts[1:]):
        model = assert_same(model, tmp_path / str(k), sets)
        model.partial_fit(sets[part], y[part])
    assert model.n_samples_seen_ == len(sets)
    np.testing.assert_allclose(model.solve().alpha_, whole.solve().alpha_, rtol=1e-9)
    scores = "decision_function" if "classes" in kind else "predict"
    found, wanted = getattr(model, scores)(sets), getattr(whole, scores)(sets)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9 * np.abs(wanted).max())
    if "classes" in kind:
        np.testing.assert_allclose(
            model.predict_proba(sets), whole.predict_proba(sets), rtol=0, atol=1e-7
        )


def test_the_lean_file_predicts_and_refuses_to_go_on(rng, tmp_path):
    sets, y, _ = parts_of(rng)
    model = paper_regressor(8, random_state=0).partial_fit(sets, y)
    kh.save(model, tmp_path / "all")
    kh.save(model, tmp_path / "lean", keep="predict")
    lean = kh.load(tmp_path / "lean")
    assert np.array_equal(lean.predict(sets), model.predict(sets))
    assert (tmp_path / "lean").stat().st_size < 0.5 * (tmp_path / "all").stat().st_size
    with pytest.raises(ValueError, match=r"saved with keep='predict': .*60 samples .*keep='all'"):
        lean.partial_fit(sets, y)
    assert lean.n_samples_seen_ == 60
    assert lean.fit_batches([(sets, y)]).n_samples_seen_ == 60  # a new start is no continuation
    fitted = paper_regressor(3, random_state=0).fit(sets, y)
    kh.save(fitted, tmp_path / "fitted", keep="predict")
    assert not hasattr(kh.load(tmp_path / "fitted"), "loo_predictions_")
    with pytest.raises(ValueError, match="`keep` must be one of 'all', 'predict': got 'some'"):
        kh.save(model, tmp_path / "m", keep="some")


def test_what_could_not_be_loaded_is_not_saved(rng, tmp_path):
    model = paper_classifier(4, random_state=0).fit(sets_of(rng), np.arange(40) % 2)
    model.temperature_ = math.nan
    with pytest.raises(ValueError, match=r"saved only if it can be loaded.*temperature_"):
        kh.save(model, tmp_path / "m")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("n_heads", [4, math.inf])
@pytest.mark.parametrize("estimator", [kh.AttentionRegressor, kh.AttentionClassifier])
def test_a_model_fitted_on_a_device_is_saved_and_predicts_without_it(
    n_heads, estimator, rng, tmp_path
):
    pytest.importorskip("torch")
    sets, y, _ = parts_of(rng)
    model = estimator(n_heads, alpha=0.1, random_state=0, device=DEVICE).fit(
        sets, y if estimator is kh.AttentionRegressor else y > 0
    )
    kh.save(model, tmp_path / "m")
    loaded = kh.load(tmp_path / "m")
    assert loaded.device == DEVICE
    assert model.layer_.device == DEVICE
    assert loaded.layer_.device is None
    scores = "predict" if estimator is kh.AttentionRegressor else "decision_function"
    np.testing.assert_allclose(
        getattr(loaded, scores)(sets), getattr(model, scores)(sets), rtol=0, atol=1e-9
    )


def test_the_file_is_plain_safetensors(saved):
    arrays = load_file(saved)
    assert all(array.dtype.kind in "fiub" for array in arrays.values())


VALUES = [
    None,
    True,
    "x",
    3,
    -(2**63),
    2**63,
    -(10**40),
    0.5,
    math.inf,
    -math.inf,
    [1, (2, "a")],
    {"a": 1, (1, 2): [None]},
    np.int32(3),
    np.bool_(True),
    np.float32(0.25),
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(3.0, dtype=">f8"),
    np.array([["a", "bcd"]]),
    np.array(["a", "bcd"], dtype=object),
    np.zeros((0, 2)),
    np.zeros(0, dtype=str),
    np.array(True),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_are_packed_and_unpacked(value):
    packer = Packer()
    described = json.loads(json.dumps(packer.pack(value, "it"), allow_nan=False))
    found = Unpacker(packer.arrays).unpack(described)
    if isinstance(value, (np.ndarray, np.generic)):
        assert np.array_equal(found, value)
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        assert value.ndim < 2 or found.flags.f_contiguous == value.flags.f_contiguous
    else:
        assert type(found) is type(value)
        assert found == value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array(["a", 3], dtype=object), "it is an array of object"),
        (np.zeros(2, complex), "it is an array of complex128"),
        ([0, {1}], r"it\[1\] is a set"),
        ({"k": {1}}, r"it\['k'\] is a set"),
    ],
)
def test_what_is_no_data_is_not_packed(value, words):
    with pytest.raises(ValueError, match=words):
        Packer().pack(value, "it")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "must be JSON"),
        (b"[1]", "must be a JSON object: 'm' has a list"),
        (b"[" * 10_000, "must be JSON"),
    ],
    ids=["broken", "a list", "deep"],
)
def test_a_description_with_a_good_digest_is_a_json_object(content, words, tmp_path):
    arrays = {"0": np.zeros(2)}
    text = content.decode()
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "document": text,
        "sha256": _digest(text, arrays),
    }
    save_file(arrays, tmp_path / "m", metadata)
    with pytest.raises(ValueError, match=words):
        read_container(tmp_path / "m")


@pytest.mark.parametrize(
    "name",
    [
        "heads_",
        "tokens_",
        "alpha_",
        "solver_",
        "selection_",
        "intercept_",
        "classes_",
        "temperature_",
        "n_features_in_",
        "has_query_",
    ],
)
def test_no_fitted_attribute_may_be_missing(name, saved):
    rewrite(saved, lambda document, _: document["fitted"].pop(name))
    with pytest.raises(ValueError, match=rf"'model' has .*{name.strip('_')}"):
        kh.load(saved)


def test_a_dtype_and_a_generator_are_stored_by_name_and_seed(rng, tmp_path):
    state = np.random.default_rng(5)
    model = kh.AttentionRegressor(3, dtype=np.float32, random_state=state).fit(
        sets_of(rng, 12), rng.normal(size=12)
    )
    kh.save(model, tmp_path / "m")
    loaded = kh.load(tmp_path / "m")
    assert loaded.dtype == "float32"
    assert loaded.random_state == model.layer_.heads.seed


@pytest.mark.parametrize("n_heads", [6, math.inf])
@pytest.mark.parametrize("in_groups", [False, True])
def test_pairs_of_coordinates_are_kept(n_heads, in_groups, rng, tmp_path):
    sets = kh.SetBatch(rng.normal(size=(40, 3, 2)), rng.normal(size=(40, 2)), pairs=[(0, 1)])
    samples = SetGroups(sets, np.ones(40, int)) if in_groups else sets
    model = kh.AttentionRegressor(n_heads, random_state=0).fit(samples, sets.query[:, 0])
    loaded = assert_same(model, tmp_path / "m", samples)
    assert loaded.training_.data.samples.sets.pairs == ((0, 1),)


@pytest.mark.parametrize("n_heads", [10, math.inf])
@pytest.mark.parametrize("has_query", [True, False])
def test_hops_are_kept(n_heads, has_query, rng, tmp_path):
    sets = sets_of(rng, 16, query=has_query)
    hops = (rng.normal(size=(1, DIM + 1, DIM + 1)),)
    distribution = FittedHeads(np.zeros((1, 2 * DIM + 1, DIM + 1)), 0.5, hops_=hops)
    model = kh.AttentionRegressor(n_heads, distribution, random_state=0)
    loaded = assert_same(model.fit(sets, rng.normal(size=16)), tmp_path / "m", sets)
    np.testing.assert_array_equal(loaded.predict_interval(sets), model.predict_interval(sets))


def test_a_file_of_a_newer_keyhole_names_the_one_to_install(saved):
    """Where its form is known and what it says is not: that is no damage."""

    def change(document, _):
        document["keyhole"] = "9.1.0"
        document["parameters"]["of_the_future"] = 1

    rewrite(saved, change)
    with pytest.raises(ValueError, match=r"written by keyhole 9\.1\.0.*Install keyhole 9\.1\.0"):
        kh.load(saved)


def test_a_model_is_loaded_with_the_schema_of_its_table(tmp_path):
    table = pa.table(
        {
            "basket": [1, 1, 2, 3, 3, 4],
            "price": [1.0, 2.0, 5.0, 3.0, 1.0, 4.0],
            "sum": [3.0, 3.0, 5.0, 4.0, 4.0, 4.0],
        }
    )
    data = kh.read_table(table, set_id="basket", target="sum")
    model = kh.AttentionRegressor(3, alpha=1.0, random_state=0).fit(data.sets, data.target)
    kh.save(model, tmp_path / "m", schema=data.schema)
    loaded, schema = kh.load(tmp_path / "m", return_schema=True)
    read_again = schema.read(table)
    np.testing.assert_array_equal(loaded.predict(read_again.sets), model.predict(data.sets))
