"""Bags in files: read when they are asked for, refused by name where they are wrong."""

import sys

import numpy as np
import pandas as pd
import pytest
from paper import paper_classifier
from safetensors.numpy import save_file
from sklearn.model_selection import cross_val_score

import keyhole as kh
from keyhole.data import bag_files


@pytest.fixture
def bags():
    """Twenty small bags, of which every other has signal keys."""
    return kh.datasets.make_bags(20, (20, 30), dim=3, share=0.3, random_state=1)


@pytest.fixture
def folder(tmp_path, bags):
    """The same bags as files of NumPy's, and a table of labels and patients."""
    for i, name in enumerate(bags.names):
        np.save(tmp_path / f"{name}.npy", bags.sets.keys_of(i))
    patients = [f"patient {i // 2}" for i in range(20)]
    table = pd.DataFrame({"bag": bags.names, "label": bags.target, "patient": patients})
    table.sample(frac=1, random_state=0).to_csv(tmp_path / "labels.csv", index=False)
    return tmp_path


def in_order_of(read, bags):
    """The rows of ``bags`` in the order in which files are read: by name."""
    return [bags.names.index(name) for name in read.names]


def test_bags_are_those_of_the_files(folder, bags):
    read = kh.read_bags(folder, folder / "labels.csv", group="patient")
    rows = in_order_of(read, bags)
    assert read.sets.is_on_disk
    np.testing.assert_array_equal(read.sets.tokens, bags.sets[rows].tokens)
    np.testing.assert_array_equal(read.target, bags.target[rows])
    assert read.groups.tolist() == [f"patient {row // 2}" for row in rows]
    assert read.coordinates is None


WRITERS = {
    "npz": lambda path, keys, places: np.savez(path, features=keys, coords=places),
    "safetensors": lambda path, keys, places: save_file({"features": keys, "coords": places}, path),
    "parquet": lambda path, keys, places: pd.DataFrame(
        {"features": list(keys), "coords_x": places[:, 0], "coords_y": places[:, 1]}
    ).to_parquet(path),
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_gives_keys_and_their_coordinates(tmp_path, bags, suffix):
    for i in range(4):
        keys, places = bags.sets.keys_of(i).copy(), bags.coordinates[i]
        WRITERS[suffix](tmp_path / f"{i}.{suffix}", keys, places)
    read = kh.read_bags(tmp_path)
    assert read.target is None
    np.testing.assert_array_equal(read.sets.tokens, bags.sets[:4].tokens)
    assert read.sets.dtype == np.float32
    for i in range(4):
        np.testing.assert_array_equal(read.coordinates[i], bags.coordinates[i])
    np.testing.assert_array_equal(read.sets[[2]].tokens, bags.sets[2].tokens)


@pytest.fixture
def h5py():
    return pytest.importorskip("h5py", reason="HDF5 is read by h5py")


def test_hdf5_is_read_as_slides_have_it(tmp_path, bags, h5py):
    """Compressed in chunks that end between rows which are asked for, beside other data sets."""
    for i in range(4):
        with h5py.File(tmp_path / f"slide {i}.h5", "w") as file:
            file.create_dataset(
                "features", data=bags.sets.keys_of(i), chunks=(7, 2), compression="gzip"
            )
            file["coords"] = bags.coordinates[i].astype(np.int64)
            file["magnification"] = 20
    read = kh.read_bags(tmp_path)
    assert read.sets.is_on_disk
    assert read.sets.dtype == np.float32
    np.testing.assert_array_equal(read.sets.tokens, bags.sets[:4].tokens)
    np.testing.assert_array_equal(read.sets[[2]].tokens, bags.sets[2].tokens)
    for i in range(4):
        np.testing.assert_array_equal(read.coordinates[i], bags.coordinates[i].astype(np.int64))


def test_a_data_set_of_hdf5_may_have_any_name_if_it_is_alone(tmp_path, h5py):
    keys = np.arange(6.0).reshape(3, 2).astype(np.float16)
    with h5py.File(tmp_path / "slide.hdf5", "w") as file:
        file["embeddings"] = keys
    read = kh.read_bags(tmp_path)
    np.testing.assert_array_equal(read.sets.tokens, keys)
    assert read.sets.dtype == np.float32  # half precision is widened
    assert read.coordinates is None


def test_a_fit_to_hdf5_is_the_fit_in_memory(tmp_path, bags, h5py):
    for i in range(20):
        with h5py.File(tmp_path / f"{i:02}.h5", "w") as file:
            file["features"] = bags.sets.keys_of(i)
    read = kh.read_bags(tmp_path, {f"{i:02}": bags.target[i] for i in range(20)})
    model = kh.AttentionClassifier(heads=kh.GaussianHeads(), random_state=0)
    from_files = model.fit(read.sets, read.target).decision_function(read.sets)
    in_memory = model.fit(bags.sets, bags.target).decision_function(bags.sets)
    np.testing.assert_allclose(from_files, in_memory, rtol=1e-9)


def write_group(h5py, path):
    """A group where a data set is expected."""
    with h5py.File(path, "w") as file:
        file["features/of/a/slide"] = np.ones((3, 2))


def write_other_names(h5py, path):
    with h5py.File(path, "w") as file:
        file["a"] = np.ones((3, 2))
        file["b"] = np.ones((3, 2))


def write_text(h5py, path):
    with h5py.File(path, "w") as file:
        file["features"] = np.full((3, 2), b"x")


def write_half(h5py, path):
    """A file that ends in the middle."""
    with h5py.File(path, "w") as file:
        file["features"] = np.ones((300, 20))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_group, "must be readable"),
        (write_other_names, "features"),
        (write_text, "must be numbers"),
        (write_half, "must be readable.*truncated"),
        (lambda _, path: path.write_bytes(b"no HDF5"), "must be readable"),
    ],
)
def test_a_wrong_hdf5_file_is_named(tmp_path, h5py, write, message):
    write(h5py, tmp_path / "slide.h5")
    with pytest.raises(ValueError, match=message) as caught:
        kh.read_bags(tmp_path)
    assert str(tmp_path / "slide.h5") in str(caught.value)


def test_hdf5_without_h5py_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "slide.h5").write_bytes(b"stands for a file")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"slide\.h5.*pip install 'keyhole-ml\[hdf5\]'"):
        kh.read_bags(tmp_path)


@pytest.mark.filterwarnings("ignore::keyhole.estimators.attention.ClippedWarning")
def test_a_fit_from_files_is_the_fit_in_memory(folder, bags):
    read = kh.read_bags(folder, folder / "labels.csv", group="patient")
    sets = bags.sets[in_order_of(read, bags)]
    model = kh.AttentionClassifier(heads=kh.GaussianHeads(), random_state=0)
    from_files = model.fit(read.sets, read.target).decision_function(read.sets)
    contributions = np.concatenate(model.contributions(read.sets))
    in_memory = model.fit(sets, read.target)
    np.testing.assert_allclose(from_files, in_memory.decision_function(sets), rtol=1e-9)
    np.testing.assert_allclose(
        contributions, np.concatenate(in_memory.contributions(sets)), rtol=1e-9, atol=1e-12
    )
    scores = cross_val_score(model, read.sets, read.target, cv=3)
    assert scores == pytest.approx(cross_val_score(model, sets, read.target, cv=3))


def test_files_are_fitted_in_batches(folder):
    read = kh.read_bags(folder, folder / "labels.csv")
    model = kh.AttentionClassifier(
        n_heads=4, heads=kh.GaussianHeads(), activation="relu", scaling="standard", random_state=0
    )
    model.fit_batches(read, classes=[0, 1])
    assert model.predict(read.sets).shape == (20,)


def test_a_model_fitted_to_files_is_saved_without_them(folder, tmp_path):
    read = kh.read_bags(folder, folder / "labels.csv")
    model = paper_classifier(8, random_state=0).fit(read.sets, read.target)
    with pytest.raises(ValueError, match="keep='predict'"):
        kh.save(model, tmp_path / "whole.keyhole")
    kh.save(model, tmp_path / "lean.keyhole", keep="predict")
    loaded = kh.load(tmp_path / "lean.keyhole")
    np.testing.assert_allclose(
        loaded.decision_function(read.sets), model.decision_function(read.sets), rtol=1e-9
    )


def write_bytes(content):
    return lambda path: path.write_bytes(content)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (write_bytes(b""), "it is empty"),
        (write_bytes(b"no array"), "must be readable"),
        (cut_short, "must be readable"),
        (lambda path: np.save(path, np.zeros((4, 5), np.float32)), "5 × float32"),
        (lambda path: np.save(path, np.zeros((4, 3))), "3 × float64"),
        (lambda path: np.save(path, np.zeros((0, 3), np.float32)), r"shape \(0, 3\)"),
        (lambda path: np.save(path, np.zeros(3, np.float32)), r"shape \(3,\)"),
        (lambda path: np.save(path, np.full((4, 3), "x")), "must be numbers"),
    ],
)
def test_a_wrong_file_is_named(folder, spoil, message):
    spoil(folder / "bag 13.npy")
    with pytest.raises(ValueError, match=message) as caught:
        kh.read_bags(folder, folder / "labels.csv")
    assert str(folder / "bag 13.npy") in str(caught.value)


@pytest.mark.parametrize("number", [np.nan, -np.inf])
def test_numbers_that_are_not_finite_are_named_before_the_work(folder, number, monkeypatch):
    keys = np.load(folder / "bag 7.npy")
    keys[4, 1] = number
    np.save(folder / "bag 7.npy", keys)
    read = kh.read_bags(folder, folder / "labels.csv")
    monkeypatch.setattr("keyhole.attention.features.TiledLayer.write", None)  # the work
    with pytest.raises(ValueError, match=r"bag 7\.npy.*row 4, column 1"):
        kh.AttentionClassifier(8, kh.GaussianHeads()).fit(read.sets, read.target)


def test_a_file_that_changes_after_its_header_was_read_is_named(folder):
    read = kh.read_bags(folder, folder / "labels.csv")
    np.save(folder / "bag 3.npy", np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"bag 3\.npy"):
        read.sets.statistics()


def test_bags_and_labels_without_each_other_are_listed(folder):
    table = pd.read_csv(folder / "labels.csv")
    table = table[table["bag"] != "bag 5"]
    table.loc[len(table) + 9] = ["bag 99", 1, "nobody"]
    with pytest.raises(ValueError, match=r"label: 1 .'bag 5'.*bag: 1 .'bag 99'"):
        kh.read_bags(folder, table)
    with pytest.warns(UserWarning, match="left out: bags without a label: 1"):
        read = kh.read_bags(folder, table, unmatched="drop")
    assert len(read) == 19


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ({"bag 1": 0}, {"group": "patient"}, "mapping"),
        (pd.DataFrame({"slide": ["bag 1"], "label": [0]}), {}, "column 'bag'.*'slide'"),
        (pd.DataFrame({"bag": ["bag 1", "bag 1"], "label": [0, 1]}), {}, "several"),
        (pd.DataFrame({"bag": ["bag 1", None], "label": [0, 1]}), {}, "Missing value.*row 1"),
    ],
)
def test_wrong_labels_are_refused(folder, labels, options, message):
    with pytest.raises(ValueError, match=message):
        kh.read_bags(folder, labels, **options)


def test_a_folder_must_hold_bags_of_different_names(tmp_path):
    with pytest.raises(NotADirectoryError, match="nowhere"):
        kh.read_bags(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds none"):
        kh.read_bags(tmp_path)
    np.save(tmp_path / "a.npy", np.ones((2, 2)))
    np.savez(tmp_path / "a.npz", np.ones((2, 2)))
    with pytest.raises(ValueError, match="the same"):
        kh.read_bags(tmp_path)


def test_names_in_the_table_may_have_the_suffix_of_the_file(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 2), np.float16))
    read = kh.read_bags(tmp_path, pd.DataFrame({"bag": ["a.npy"], "label": [1.5]}))
    assert read.names == ("a",)
    assert read.sets.dtype == np.float32  # half precision is widened


def test_every_format_has_a_reader():
    assert set(bag_files.FORMATS) == {".npy", ".npz", ".safetensors", ".parquet", ".h5", ".hdf5"}
