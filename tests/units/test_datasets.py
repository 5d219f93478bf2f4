"""Loaders of public formats: what they read, and what they say of files that are something else."""

import io
import tarfile
import zipfile

import numpy as np
import pytest

from keyhole.data.datasets import (
    load_babi,
    load_bags,
    load_data,
    load_digits_sets,
    load_molecules,
    load_uea,
    molecule_sets,
)
from keyhole.data.layout import TableOptions

STORY = (
    "1 Mary moved to the bathroom.\n2 John went to the hallway.\n3 Where is Mary? \tbathroom\t1\n"
    "4 Daniel went back to the hallway.\n5 Where is Daniel?\thallway\t4\n"
    "1 Sandra left.\n2 Where is Sandra?\toutside\t1\n"
)
SERIES = (
    "# words\n@problemName Tiny\n@univariate false\n@classLabel true a "
    "b\n@data\n1,2,3:4,5,6:a\n7,8:9,?:b\n"
)
BAGS = "bag,f1,f2,class\na,1,2,0\nb,3,4,0\na,5,6,1\n"


def test_digits_are_their_inked_pixels():
    from sklearn.datasets import load_digits

    data, plain = load_digits_sets(), load_digits_sets("plain")
    images, labels = load_digits(return_X_y=True)
    assert np.array_equal(data.target, labels)
    assert np.array_equal(data.sets.lengths, (images > 0).sum(axis=1))
    assert len(data.names) == data.sets.dim == 17
    assert plain.sets.dim == len(plain.names) == 3
    # nothing is lost: the set says where the ink is
    pixels = plain.sets[7].tokens
    image = np.zeros((8, 8))
    rows, columns = np.rint(pixels[:, :2].T * 3.5 + 3.5).astype(int)
    image[rows, columns] = pixels[:, 2] * 16
    assert np.array_equal(image.ravel(), images[7])


@pytest.fixture
def babi(tmp_path):
    files = {}
    for folder in ("en", "en-10k"):
        for task in (1, 10):
            for part in ("train", "test"):
                files[f"tasks/{folder}/qa{task}_facts_{part}.txt"] = (
                    STORY if part == "train" else STORY[:120] + "\n"
                )
    files["tasks/en/qa1_facts_test.txt"] = "1 Mary went home.\n2 Where is Mary?\thome\t1\n"
    with tarfile.open(tmp_path / "babi.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("tasks/en/qa1_evil_train.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with zipfile.ZipFile(tmp_path / "babi.zip", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr("../../outside.txt", "x")
    for name, text in files.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize("name", ["babi.tar.gz", "babi.zip", "folder"])
def test_babi(babi, name):
    before = sorted(babi.rglob("*"))
    data = load_babi(babi / name, task=1)
    assert data.target.tolist() == ["bathroom", "hallway", "outside", "home"]
    assert data.split.tolist() == [0, 0, 0, 1]
    assert data.sets.lengths.tolist() == [3, 4, 2, 2]  # sentences, and the empty token
    assert "mary" in data.names
    assert "mary=" in data.names
    assert len(data.names) == data.sets.dim
    # Mary is shared between the first sentence of the first story and its question
    assert data.sets[0].tokens[0, data.names.index("mary=")] > 0
    assert data.sets[0].tokens[1, data.names.index("john=")] == 0
    assert sorted(babi.rglob("*")) == before  # nothing is unpacked
    with pytest.raises(FileNotFoundError, match="task 3 needs a file qa3_"):
        load_babi(babi / name, task=3)
    with pytest.raises(ValueError, match="'en', 'en-10k'"):
        load_babi(babi / name, task=1, folder="hn")


def test_babi_makes_the_tokens_of_the_shared_tasks(babi):
    from keyhole.data.datasets import words_of

    assert words_of("The hallway is north of Bob's garden.") == (
        "the",
        "hallway",
        "is",
        "north",
        "of",
        "bob's",
        "garden",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello\n", r"a number and a sentence: line 1 of 'qa1_x_train.txt' is 'hello'"),
        ("1 Mary left.\n", r"has questions"),
        ("1 Where?\t\t1\n", r"an answer after a tab: line 1"),
    ],
)
def test_babi_errors(text, words, tmp_path):
    (tmp_path / "qa1_x_train.txt").write_text(text)
    with pytest.raises(ValueError, match=words):
        load_babi(tmp_path)


def test_molecules_are_the_neighbourhoods_of_their_atoms(tmp_path):
    X = np.array(
        [[8, 0, 0, 0], [1, 0.76, 0.59, 0], [1, -0.76, 0.59, 0], [6, 0, 0, 0], [8, 1.2, 0, 0]]
    )
    np.savez(tmp_path / "two.npz", X=X, ptr=[0, 3, 5], y=[-1.5, 7.25])
    data = load_molecules(tmp_path / "two.npz", n_radial=5)
    assert data.target.tolist() == [-1.5, 7.25]
    assert data.sets.counts.tolist() == [3, 2]
    assert data.names[:3] == ("H", "C", "O")
    assert data.sets.dim == len(data.names) == 3 * 6
    assert data.sets.sets.query[0, :3].tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"X": np.zeros((2, 4))}, "need arrays 'X' and 'ptr'"),
        ({"X": np.zeros((2, 3)), "ptr": [0, 2]}, r"'X' must hold charge and position"),
        ({"X": np.zeros((2, 4)), "ptr": [0, 2]}, "between 1 and 118: got 0"),
        ({"X": np.ones((2, 4)), "ptr": [0, 2, 2]}, "molecule 1 of 'ptr' has none"),
        ({"X": np.ones((2, 4)), "ptr": [0, 2], "y": [1.0, 2.0]}, "one number per molecule"),
    ],
)
def test_wrong_molecules_are_refused(arrays, words, tmp_path):
    np.savez(tmp_path / "m.npz", **arrays)
    with pytest.raises(ValueError, match=words):
        load_molecules(tmp_path / "m.npz")


def test_molecules_do_not_change_when_moved(rng, tmp_path):
    charges, ptr = np.array([8, 1, 1]), np.array([0, 3])
    positions = rng.normal(size=(3, 3))
    turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    before = molecule_sets(charges, positions, ptr).sets
    after = molecule_sets(charges, positions @ turn + 5, ptr).sets
    assert np.allclose(before.tokens, after.tokens, atol=1e-5)


def test_bags(tmp_path):
    path = tmp_path / "bags.csv"
    path.write_text(BAGS)
    data = load_bags(path, bag="bag", label="class")
    assert data.target.tolist() == [1, 0]
    assert data.sets[0].tokens.tolist() == [[1, 2], [5, 6]]
    assert data.names == ("f1", "f2")
    path.write_text("MUSK-a,a1,1,2,1.\nMUSK-a,a2,3,4,1.\nNON-b,b1,5,6,0.\n")  # as UCI has it
    data = load_bags(path, skip=[1])
    assert data.target.tolist() == [1, 0]
    for text, options, words in (
        ("", {}, "a line per instance"),
        ("a,1,2\nb,1\n", {}, "'bags.csv' has 2 lines of .2, 3. cells"),
        ("a,x,2,1\nb,3,2,1\n", {}, "column 'x1' of instance 0 is 'x'"),
        (BAGS, {"bag": "sack"}, "got 'sack', the file has 'bag'"),
        (BAGS, {"label": 9}, "got 9 of 4 columns"),
        (BAGS, {"label": 0}, "must be different columns"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            load_bags(path, **options)


def test_series(tmp_path):
    (tmp_path / "Tiny_TRAIN.ts").write_text(SERIES)
    (tmp_path / "Tiny_TEST.ts").write_text(SERIES.replace("1,2,3:4,5,6:a", "1:2:b"))
    data = load_uea(tmp_path)
    assert data.split.tolist() == [0, 0, 1, 1]
    assert data.target.tolist() == ["a", "b", "b", "b"]
    assert data.sets[0].tokens.tolist() == [[1, 4, 0], [2, 5, 0.5], [3, 6, 1]]
    assert data.sets[1].tokens.tolist() == [[7, 9, 0]]  # the step with a gap is left out
    assert load_uea(tmp_path / "Tiny_TRAIN.ts", time=False).sets.dim == 2
    regression = (
        SERIES.replace("@classLabel true a b", "@targetLabel true")
        .replace(":a", ":0.5")
        .replace(":b", ":2")
    )
    (tmp_path / "r.ts").write_text(regression)
    assert load_data(str(tmp_path / "r.ts")).target.tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "begin with @"),
        ("1,2:a\n", "begin with @"),
        ("@data\n1,2:1\n", "equally long.*line 2"),
        ("@data\n1,x\n", "numbers with commas.*line 2"),
        ("@timestamps true\n@data\n1\n", "without time stamps"),
        ("@targetlabel true\n@data\n1:x\n", "targets must be numbers"),
        ("@data\ninf\n", "must be finite"),
        ("@classlabel true a\n@data\na\n", "there must be one"),
    ],
)
def test_series_errors(text, words, tmp_path):
    (tmp_path / "t.ts").write_text(text)
    with pytest.raises(ValueError, match=words):
        load_uea(tmp_path / "t.ts")


def test_load_data_by_name_or_suffix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(load_data("digits")) == 1797
    with pytest.raises(
        FileNotFoundError, match="'nothing' is neither a file nor data that comes with keyhole"
    ):
        load_data("nothing")
    with pytest.raises(
        ValueError, match="only tables have columns to choose: 'digits' takes no keys"
    ):
        load_data("digits", options=TableOptions(keys="a"))
    (tmp_path / "a.xlsx").write_text("")
    with pytest.raises(ValueError, match="read by its suffix"):
        load_data("a.xlsx")


def test_every_option_of_a_table_reaches_its_reader(tmp_path):
    """The weights as well, which no command asks for."""
    table = "set,day,x,z,age,loss,share\n"
    table += "a,1,1.0,2.0,30,0.5,2.0\na,1,3.0,4.0,30,0.5,2.0\nb,2,5.0,6.0,40,1.5,1.0\n"
    path = tmp_path / "table.csv"
    path.write_text(table)
    options = TableOptions(
        keys="x,z", target="loss", extras="age", set_id="set", weight="share", time="day"
    )

    data = load_data(str(path), options=options)

    assert data.names == ("x", "z")
    assert data.target.tolist() == [0.5, 1.5]
    assert data.sets.extras.tolist() == [[30.0], [40.0]]
    assert data.weights.tolist() == [2.0, 1.0]
    assert data.time is not None
