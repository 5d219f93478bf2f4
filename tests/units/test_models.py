"""Saved models: the same to the last bit, refused with a message when anything about the file is wrong."""

import copy
import json
import math
import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import keyhole as kh
from keyhole.attention.heads import FittedHeads
from keyhole.data.sets import SetGroups
from keyhole.models import Schema, _check_record, read_container, read_model, write_container

DIM = 3
N_RANDOM = 25


def sets_of(rng, n=40, query=True, dtype=np.float64):
    keys = [rng.normal(size=(rng.integers(1, 5), DIM)).astype(dtype) for _ in range(n)]
    return kh.SetBatch(keys, rng.normal(size=(n, DIM)).astype(dtype) if query else None)


LAWS = {
    "none": None,
    "zero": kh.GaussianHeads(scale=0.3),
    "identity": kh.GaussianHeads(mean=2.0),
    "array": kh.GaussianHeads(mean=np.arange(16.0).reshape(4, 4) / 8),
    "product": kh.QueryKeyHeads(rank=2),
    "chosen": kh.IdentityHeads(n_heads=4),
    "learned": kh.LearnedHeads(n_means=2, steps=5, n_heads=4),
}


def assert_same(model, path, *batches):
    kh.save(model, path)
    loaded = kh.load(path)
    assert set(vars(loaded)) == set(vars(model))
    for name, value in vars(model).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(getattr(loaded, name), value, equal_nan=value.dtype.kind == "f"), name
            assert getattr(loaded, name).dtype == value.dtype
    for batch in batches:
        for method in ("predict", "decision_function", "predict_proba", "transform"):
            if hasattr(model, method):
                before, after = getattr(model, method)(batch), getattr(loaded, method)(batch)
                assert before.dtype == after.dtype
                assert np.array_equal(before, after), method
    return loaded


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("heads", [7, math.inf])
def test_regressors_are_the_same_to_the_last_bit(law, heads, rng, tmp_path):
    if heads == math.inf and law == "product":
        pytest.skip("no kernel in closed form")
    train, test = sets_of(rng, 60), sets_of(rng)
    model = kh.AttentionRegressor(heads, law=LAWS[law], random_state=3, scaling="none", query="given").fit(
        train, rng.normal(size=(60, 2))
    )
    loaded = assert_same(model, tmp_path / "m", test)
    assert loaded.get_params().keys() == model.get_params().keys()
    assert loaded.law == LAWS[law]


def test_scales_of_coordinates_are_kept(rng, tmp_path):
    train, test = sets_of(rng, 60), sets_of(rng)
    width = train.dim + 1
    scales = {"query_scales_": rng.uniform(0.5, 2.0, width), "key_scales_": rng.uniform(0.5, 2.0, width)}
    law = FittedHeads(rng.normal(size=(2, width, width)), 0.3, **scales)
    model = kh.AttentionRegressor(7, law=law, random_state=3, scaling="none", query="given").fit(
        train, rng.normal(size=60)
    )
    loaded = assert_same(model, tmp_path / "m", test)
    np.testing.assert_array_equal(loaded.law_.key_scales_, law.key_scales_)
    for wrong in ({"key_scales_": None}, {"query_scales_": np.zeros(width)}, {"key_scales_": np.full(width, np.nan)}):
        with pytest.raises(ValueError, match="scales"):
            _check_record("FittedHeads", replace(law, **wrong))


@pytest.mark.parametrize(
    "labels", [np.array(["no", "yes", "häh?"]), np.array([3, -5]), np.array([True, False]), np.array([0.0, 1.0, 9.0]),
               np.array(["a", "b"], dtype=object), np.array([1, 2, 3], dtype=np.uint8)],
    ids=lambda a: str(a.dtype),
)  # fmt: skip
@pytest.mark.parametrize("heads", [5, math.inf])
def test_classifiers_keep_their_labels(labels, heads, rng, tmp_path):
    train, test = sets_of(rng, query=False), sets_of(rng, query=False)
    y = labels[np.arange(40) % len(labels)]
    model = kh.AttentionClassifier(heads, random_state=0, law=kh.GaussianHeads(), scaling="none", query="given").fit(
        train, y
    )
    loaded = assert_same(model, tmp_path / "m", test)
    assert loaded.classes_.dtype == labels.dtype
    assert loaded.temperature_ == model.temperature_


@pytest.mark.parametrize("scaling", ["none", "sphere", "standard", "auto"])
@pytest.mark.parametrize(("query", "pooling"), [("mean", "mean"), ("each", "sum")])
def test_token_rules_travel_with_the_model(scaling, query, pooling, rng, tmp_path):
    train, y = sets_of(rng, query=False), rng.normal(size=40)
    for heads in (6, math.inf):
        model = kh.AttentionRegressor(
            heads, scaling=scaling, query=query, pooling=pooling, random_state=0, law=kh.GaussianHeads()
        )
        assert_same(model.fit(train, y), tmp_path / f"{heads}", sets_of(rng, query=False))


def test_groups_and_single_precision(rng, tmp_path):
    sets = sets_of(rng, 40, dtype=np.float32)
    groups = SetGroups(sets, [1, 3] * 10)
    for heads in (6, math.inf):
        model = kh.AttentionRegressor(
            heads, dtype="float32", pooling="sum", random_state=0, law=kh.GaussianHeads(), scaling="none", query="given"
        )
        assert_same(model.fit(groups, rng.normal(size=20)), tmp_path / f"{heads}", groups)


@pytest.mark.parametrize("law", ["none", "array", "product"])
def test_norm_balls_and_features(law, rng, tmp_path):
    train, test = sets_of(rng), sets_of(rng)
    options = {"n_heads": 8, "law": LAWS[law], "random_state": np.random.default_rng(0)}
    ball = {"group_radius": 5.0, "ball_radius": 2.0, "tol": 0.1}
    y = rng.normal(size=40)
    assert_same(kh.NormBallRegressor(**options, **ball).fit(train, y), tmp_path / "1", test)
    assert_same(kh.NormBallRegressor(**options, **ball).fit(train, y[:, None]), tmp_path / "2", test)
    assert_same(kh.NormBallClassifier(**options, **ball).fit(train, y > 0), tmp_path / "3", test)
    three = np.array(["a", "b", "c"])[np.arange(40) % 3]
    assert_same(kh.NormBallClassifier(**options, **ball).fit(train, three), tmp_path / "4", test)
    assert_same(kh.AttentionFeatures(**options).fit(train), tmp_path / "5", test)


@pytest.fixture
def saved(rng, tmp_path):
    model = kh.AttentionClassifier(4, random_state=0, law=kh.GaussianHeads(), scaling="none", query="given").fit(
        sets_of(rng), np.array(["a", "b"])[np.arange(40) % 2]
    )
    kh.save(model, tmp_path / "model", schema=Schema(DIM, True, ("x", "y", "z"), "label", (("set", "id"),)))
    return tmp_path / "model"


def test_schema_is_kept_and_checked(saved, rng):
    found = read_model(saved)
    assert found.schema == Schema(DIM, True, ("x", "y", "z"), "label", (("set", "id"),))
    found.schema.check(sets_of(rng), ("x", "y", "z"))
    with pytest.raises(ValueError, match=r"coordinate 2 was 'z' and is 'w'.*Choose the columns x, y, z"):
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

    with pytest.raises(ValueError, match=r"law is a Own.*kh.GaussianHeads"):
        kh.save(kh.AttentionFeatures(3, law=Own(), random_state=0).fit(sets_of(rng)), tmp_path / "m")
    with pytest.raises(ValueError, match="must be fitted"):
        kh.save(kh.AttentionFeatures(3), tmp_path / "m")
    with pytest.raises(TypeError, match="one of keyhole's"):
        kh.save(object(), tmp_path / "m")
    assert os.listdir(tmp_path) == []


def rewrite(path, change):
    """Change the document and give the file a digest that fits, as somebody with bad intentions would."""
    document, arrays = read_container(path)
    change(document, arrays)
    write_container(path, document, arrays, overwrite=True)


def poke(where, value):
    def change(document, arrays):
        for key in where[:-1]:
            document = document[key]
        document[where[-1]] = value

    return change


HEADS = ("layer", "with", "heads", "with")


@pytest.mark.parametrize(
    "change",
    [
        poke(("estimator",), "os.system"),
        poke(("estimator",), "__class__"),
        poke(("parameters", "n_jobs"), 3),
        poke(("parameters", "law"), {"object": "Popen", "with": {"args": {"list": ["touch", "owned"]}}}),
        poke(("parameters", "law"), {"object": "GaussianHeads", "with": {"__class__": 3}}),
        poke(("fitted", "__class__"), 3),
        poke(("fitted", "predict"), 3),
        poke(("fitted", "n_features_in_"), 10**15),
        poke(("fitted", "n_features_in_"), "3"),
        poke(("fitted", "classes_"), {"strings": ["a"], "shape": [1], "as": "text"}),
        poke(("fitted", "tokens_"), None),
        poke((*HEADS, "n_heads"), 10**15),
        poke((*HEADS, "dim"), 10**9),
        poke((*HEADS, "seed"), -1),
        poke((*HEADS, "law"), {"object": "QueryKeyHeads", "with": {"rank": 10**12}}),
        poke((*HEADS, "law"), {"object": "GaussianHeads", "with": {"mean": "eval(1)"}}),
        poke(("layer", "with", "activation"), "exec"),
        poke(("layer", "with", "values"), {"array": "77", "turned": False}),
        poke(("layer",), {"list": []}),
        poke(("layer",), []),
        poke(("schema",), None),
        poke(("fitted",), {"number": "9" * 400}),
    ],
)
def test_a_crafted_file_is_refused(saved, change):
    rewrite(saved, change)
    with pytest.raises(ValueError, match=r"model file describes an estimator.*'model' has .*save the model anew"):
        kh.load(saved)


def test_a_long_text_among_short_ones_asks_for_no_more_memory_than_the_file_fills(saved, rng, tmp_path):
    """NumPy makes all texts of an array as wide as the longest: width × count, 2 GB here out of a few hundred kB."""
    texts = {"strings": ["x" * 50_000, *"ab" * 5_000], "shape": [10_001], "as": "text"}
    for wide in (
        texts,
        {"dict": [[k, {**texts, "strings": texts["strings"][::20], "shape": [501]}] for k in "abcdefg"]},
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


@pytest.mark.parametrize(
    ("active", "words"),
    [
        ([0, 0], "no increasing"), ([1, 0], "no increasing"), ([-1, 0], "do not exist"), ([0, 3], "do not exist"),
        ([3], "do not exist"), ([[0], [1]], "no increasing"), ([0.0, 1.0], "no increasing"), ([0], "not active"),
        ([], "not active"), ([True, True], "no increasing"),
    ],
)  # fmt: skip
def test_active_heads_must_be_those_that_have_values(active, words, rng, tmp_path):
    kh.save(model_of("ball", rng)[0], tmp_path / "m")

    def change(document, arrays):
        values = document["layer"]["values"]["array"]
        arrays[values] = np.ones((3, DIM + 1, 3)) * np.array([1.0, 1.0, 0.0])[:, None, None]
        arrays["active"] = np.array(active, dtype=None if active else np.int64)
        document["layer"]["active"] = {"array": "active", "turned": False}

    rewrite(tmp_path / "m", change)
    with pytest.raises(ValueError, match=words):
        kh.load(tmp_path / "m")
    active[:] = [0, 1]
    rewrite(tmp_path / "m", change)
    assert kh.load(tmp_path / "m").layer_.values.shape == (2, DIM + 1, 3)


@pytest.mark.parametrize(
    ("where", "junk"),
    [
        (("fitted", "law_", "with", "mean"), "no number"),
        (("fitted", "law_", "with", "scale"), -1.0),
        (("fitted", "intercept_"), "3"),
        (("fitted", "intercept_"), 3.0),
        (("fitted", "temperature_"), {"number": "nan"}),
        (("fitted", "temperature_"), -1.0),
        (("fitted", "tokens_", "with", "pooling"), "median"),
        (("fitted", "alpha_"), None),
        (("fitted", "alphas_"), "x"),
        (("fitted", "loo_errors_"), {"strings": [], "shape": [0], "as": "text"}),
        (("fitted", "solver_"), "kernel"),
        (("fitted", "selection_"), 3),
        (("fitted", "loo_decision_"), None),
        (("fitted", "classes_"), {"strings": ["b", "a"], "shape": [2], "as": "text"}),
        (("fitted", "classes_"), {"strings": ["a", "a"], "shape": [2], "as": "text"}),
        (("fitted", "n_features_in_"), 0),
        (("fitted", "n_features_in_"), True),
        ((*HEADS, "law", "with", "mean"), {"number": "nan"}),
        ((*HEADS, "law"), {"object": "LearnedHeads", "with": {}}),
        ((*HEADS, "law"), {"object": "GaussianHeads", "with": {"mean": 2.0}}),  # law_ says otherwise
        ((*HEADS, "dim"), 2),
        (("layer", "with", "dtype"), "int8"),
        (("layer", "with", "intercept"), 3.0),
    ],
)  # fmt: skip
def test_every_field_is_checked_at_load(saved, where, junk):
    rewrite(saved, poke(where, junk))
    with pytest.raises(ValueError, match=r"(?s)model file describes an estimator.*'model' has .*save the model anew"):
        kh.load(saved)


def test_a_small_file_does_not_ask_for_a_large_matrix(rng, tmp_path):
    kh.save(kh.AttentionFeatures(3, random_state=0).fit(sets_of(rng)), tmp_path / "m")
    rewrite(tmp_path / "m", poke(("fitted", "n_features_in_"), 10**8))
    rewrite(tmp_path / "m", poke(("layer", "with", "dim"), 10**8))  # one head would take 80 petabytes
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
        "absurd shape": with_header({**header, first: {**header[first], "shape": [2**40, 2**40]}}, data),
        "negative offset": with_header({**header, first: {**header[first], "data_offsets": [-8, 0]}}, data),
        "unknown type": with_header({**header, first: {**header[first], "dtype": "O"}}, data),
        "no tensors": with_header({"__metadata__": header["__metadata__"]}, b""),
        "more data": with_header(header, data + b"12345678"),
    }
    for name, content in cases.items():
        path = tmp_path / name.replace(" ", "_")
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged, or was not written by kh.save"):
            kh.load(path)
    header["__metadata__"]["version"] = "2"
    saved.write_bytes(with_header(header, data))
    with pytest.raises(ValueError, match=r"version 1 .*'model' has version '2'.*newer"):
        kh.load(saved)
    save_file({"w": np.zeros(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="format is 'keyhole-model'"):
        kh.load(tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="is a folder"):
        kh.load(tmp_path)
    with pytest.raises(OSError, match="nowhere"):
        kh.load(tmp_path / "nowhere")


def test_every_truncation_and_flip_is_noticed(saved, rng):
    """No prefix of a file and no file with one byte changed is a model."""
    whole = saved.read_bytes()
    cuts = np.unique(np.concatenate([np.arange(0, 40), rng.integers(0, len(whole), 100)]))
    for cut in cuts:
        saved.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="model"):
            kh.load(saved)
    harmless = 0
    for place in rng.integers(0, len(whole), 250):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        saved.write_bytes(changed)
        try:
            kh.load(saved)
            harmless += 1  # a blank of the padding, say
        except ValueError as error:
            assert len(str(error)) > 40  # noqa: PT017
    assert harmless < 15


JUNK = [
    None, True, -1, 0, 3, 10**15, 1e300, 2.5, "x" * 50, "mean", [], {}, [3], {"array": "0", "turned": True},
    {"array": "1", "turned": False}, {"number": "nan"}, {"number": "inf"}, {"list": [1]}, {"tuple": ["a", "b"]},
    {"strings": ["a", "b"], "shape": [2], "as": "text"}, {"strings": ["b", "a", "c"], "shape": [3], "as": "object"},
    {"object": "SetBatch", "with": {}}, {"object": "FittedHeads", "with": {"means_": 1}},
    {"object": "GaussianHeads", "with": {"mean": "no number"}}, {"object": "GaussianHeads", "with": {"scale": 0.0}},
    {"object": "GaussianHeads", "with": {"mean": {"number": "nan"}}}, {"object": "QueryKeyHeads", "with": {"rank": 2}},
    {"object": "QueryKeyHeads", "with": {"rank": 2, "scale": None}}, {"object": "IdentityHeads", "with": {}},
    {"object": "TokenRule", "with": {"scaling": "none", "query": "each", "pooling": "sum"}},
    {"object": "TokenRule", "with": {"scaling": "standard", "query": "given", "pooling": "mean"}},
]  # fmt: skip
"""What a piece of a document is replaced by."""


def model_of(kind, rng):
    """A small fitted model of each kind that a file may hold."""
    sets, y = sets_of(rng, 12), rng.normal(size=12)
    words = np.array(["a", "b", "c"])[np.arange(12) % 3]
    ball = {"group_radius": 5.0, "ball_radius": 2.0, "tol": 0.1, "random_state": 0}
    if kind == "groups":
        groups = SetGroups(sets, [1, 3, 2] * 2)
        return kh.AttentionRegressor(
            math.inf, pooling="sum", random_state=0, law=kh.GaussianHeads(), scaling="none", query="given"
        ).fit(groups, y[:6]), groups
    model = {
        "finite": lambda: kh.AttentionRegressor(
            3, scaling="standard", random_state=0, law=kh.GaussianHeads(), query="given"
        ).fit(sets, y[:, None]),
        "kernel": lambda: kh.AttentionClassifier(
            math.inf, query="each", random_state=0, law=kh.GaussianHeads(), scaling="none"
        ).fit(sets, words),
        "learned": lambda: kh.AttentionClassifier(
            3, law=LAWS["chosen"], random_state=0, scaling="none", query="given"
        ).fit(sets, words != "a"),
        "ball": lambda: kh.NormBallClassifier(3, **ball).fit(sets, words),
        "streamed": lambda: kh.AttentionClassifier(
            3, random_state=0, law=kh.GaussianHeads(), scaling="none", query="given"
        ).partial_fit(sets, words, classes=["a", "b", "c"]),
        "features": lambda: kh.AttentionFeatures(3, law=LAWS["array"], random_state=0).fit(sets),
    }[kind]()
    return model, sets


@pytest.mark.parametrize("kind", ["finite", "kernel", "learned", "groups", "ball", "streamed", "features"])
def test_what_loads_also_predicts(kind, rng, tmp_path):
    """A document with a piece of it replaced is refused when it is loaded, or it predicts: never later, never else."""
    path = tmp_path / "m"
    model, sets = model_of(kind, rng)
    kh.save(model, path)
    document, arrays = read_container(path)
    places = list(walk(document))
    for _ in range(N_RANDOM):
        where, junk = places[rng.integers(len(places))], JUNK[rng.integers(len(JUNK))]
        changed = copy.deepcopy(document)
        poke(where, junk)(changed, arrays)
        write_container(path, changed, arrays, overwrite=True)
        check_refused_or_right(path, sets, f"{where} = {junk!r}")


def check_refused_or_right(path, sets, what):
    try:
        model = kh.load(path)
    except ValueError as error:
        assert "save the model anew" in str(error)  # noqa: PT017
        return
    for method in ("predict", "decision_function", "predict_proba", "transform"):
        if hasattr(model, method):
            try:
                answer = getattr(model, method)(sets)
            except Exception as error:
                raise AssertionError(f"{method} of a model that loaded with {what}") from error
            assert len(answer) == len(sets), what
            assert answer.dtype.kind in "OU" or np.isfinite(answer).all(), what
    repr(model)


def walk(value, path=()):
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
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
        sets, y, parts = SetGroups(sets, [1, 2] * 20), y[:40], [slice(0, 20), slice(20, 33), slice(33, 40)]
    estimator, options = kh.AttentionRegressor, {}
    if kind == "outputs":
        y = np.column_stack([y, np.cos(y)])
    if "classes" in kind:
        estimator = kh.AttentionClassifier
        y = np.array(["a", "b", "c"])[np.digitize(y, [0.0] if kind == "two classes" else [-0.5, 0.5])]
        options = {"classes": np.unique(y)}
    whole = estimator(4, random_state=0).partial_fit(sets, y, **options)
    model = estimator(4, random_state=0)
    if first == "fit_batches":
        model.fit_batches([(sets[parts[0]], y[parts[0]])], **options)
    else:
        model.partial_fit(sets[parts[0]], y[parts[0]], **options)
    for k, part in enumerate(parts[1:]):
        model = assert_same(model, tmp_path / str(k), sets)
        model.partial_fit(sets[part], y[part])
    assert model.n_samples_seen_ == len(sets)
    np.testing.assert_allclose(model.alpha_, whole.alpha_, rtol=1e-9)
    scores = "decision_function" if "classes" in kind else "predict"
    found, wanted = getattr(model, scores)(sets), getattr(whole, scores)(sets)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9 * np.abs(wanted).max())
    if "classes" in kind:
        np.testing.assert_allclose(model.predict_proba(sets), whole.predict_proba(sets), rtol=0, atol=1e-7)


def test_the_lean_file_predicts_and_refuses_to_go_on(rng, tmp_path):
    sets, y, _ = parts_of(rng)
    model = kh.AttentionRegressor(8, random_state=0, law=kh.GaussianHeads(), scaling="none", query="given").partial_fit(
        sets, y
    )
    kh.save(model, tmp_path / "all")
    kh.save(model, tmp_path / "lean", keep="predict")
    lean = kh.load(tmp_path / "lean")
    assert np.array_equal(lean.predict(sets), model.predict(sets))
    assert (tmp_path / "lean").stat().st_size < 0.5 * (tmp_path / "all").stat().st_size
    with pytest.raises(ValueError, match=r"saved with keep='predict': .*60 samples .*keep='all'"):
        lean.partial_fit(sets, y)
    assert lean.n_samples_seen_ == 60
    assert lean.fit_batches([(sets, y)]).n_samples_seen_ == 60  # a new start is no continuation
    fitted = kh.AttentionRegressor(3, random_state=0, law=kh.GaussianHeads(), scaling="none", query="given").fit(
        sets, y
    )
    kh.save(fitted, tmp_path / "fitted", keep="predict")
    assert not hasattr(kh.load(tmp_path / "fitted"), "loo_predictions_")
    with pytest.raises(ValueError, match="`keep` must be one of 'all', 'predict': got 'some'"):
        kh.save(model, tmp_path / "m", keep="some")


def test_what_could_not_be_loaded_is_not_saved(rng, tmp_path):
    model = kh.AttentionClassifier(4, random_state=0, law=kh.GaussianHeads(), scaling="none", query="given").fit(
        sets_of(rng), np.arange(40) % 2
    )
    model.temperature_ = math.nan
    with pytest.raises(ValueError, match=r"saved only if it can be loaded.*temperature_"):
        kh.save(model, tmp_path / "m")
    assert os.listdir(tmp_path) == []


SUMS = ("stream", "with", "moments", "with")
KEPT = ("stream", "with", "kept", "with")


@pytest.mark.parametrize(
    ("where", "junk"),
    [
        ((*SUMS, "gram"), lambda a: a * np.nan),
        ((*SUMS, "gram"), lambda a: -a),
        ((*SUMS, "gram"), lambda a: a[:-1]),
        ((*SUMS, "gram"), lambda a: np.where(np.arange(len(a)) == 1, 1e9, a)),
        ((*SUMS, "cross"), lambda a: a[:, :0]),
        ((*SUMS, "cross"), lambda a: a * np.inf),
        ((*SUMS, "squares"), lambda a: -1.0 - a),
        ((*SUMS, "means"), lambda a: a[1:]),
        ((*SUMS, "count"), -1),
        ((*SUMS, "count"), 10**6),
        ((*SUMS, "weight"), {"number": "nan"}),
        ((*SUMS, "y_size"), -1.0),
        ((*SUMS, "rounding"), 0.0),
        ((*SUMS, "fit_intercept"), False),
        ((*KEPT, "hashes"), lambda a: a[::-1]),
        ((*KEPT, "columns"), lambda a: a + 1),
        ((*KEPT, "weights"), lambda a: -a),
        ((*KEPT, "limit"), 3),
        ((*KEPT, "sets"), None),
        (("stream",), {"list": []}),
        (("fitted", "n_samples_seen_"), 1),
    ],
)  # fmt: skip
def test_every_sum_is_checked_at_load(where, junk, rng, tmp_path):
    sets, y, _ = parts_of(rng)
    kh.save(
        kh.AttentionClassifier(4, random_state=0, law=kh.GaussianHeads(), scaling="none", query="given").partial_fit(
            sets, y > 0, classes=[False, True]
        ),
        tmp_path / "model",
    )

    def change(document, arrays):
        place = document
        for key in where[:-1]:
            place = place[key]
        if callable(junk):
            key = place[where[-1]]["array"]
            with np.errstate(invalid="ignore"):
                arrays[key] = np.ascontiguousarray(junk(arrays[key]))
        else:
            place[where[-1]] = junk

    rewrite(tmp_path / "model", change)
    with pytest.raises(ValueError, match=r"(?s)model file describes an estimator.*'model' has .*save the model anew"):
        kh.load(tmp_path / "model")


@pytest.mark.parametrize("n_heads", [4, math.inf])
@pytest.mark.parametrize("estimator", [kh.AttentionRegressor, kh.AttentionClassifier])
def test_a_model_fitted_on_a_device_is_saved_and_predicts_without_it(n_heads, estimator, rng, tmp_path):
    pytest.importorskip("torch")
    sets, y, _ = parts_of(rng)
    model = estimator(n_heads, alpha=0.1, random_state=0, device="cpu").fit(
        sets, y if estimator is kh.AttentionRegressor else y > 0
    )
    kh.save(model, tmp_path / "m")
    loaded = kh.load(tmp_path / "m")
    assert loaded.device == "cpu"
    assert model.layer_.device == "cpu"
    assert loaded.layer_.device is None
    scores = "predict" if estimator is kh.AttentionRegressor else "decision_function"
    np.testing.assert_allclose(getattr(loaded, scores)(sets), getattr(model, scores)(sets), rtol=0, atol=1e-9)


def test_the_file_is_plain_safetensors(saved):
    arrays = load_file(saved)
    assert all(array.dtype.kind in "fiub" for array in arrays.values())
