"""Files of data: what is written is read, and a file that is cut anywhere is refused in words."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import feather, parquet
from safetensors.numpy import save_file

import keyhole as kh

some = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
IDS = st.one_of(
    st.integers(0, 10**25).map(str),
    st.sampled_from(["007", "7", "1e3", "1000", "0x10", "true", "1.50", "é", "a b"]),
)
NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)


@some
@given(rows=st.lists(st.tuples(IDS, NUMBERS, NUMBERS), min_size=1, max_size=12))
def test_csv_ids_are_text_and_numbers_are_exact(rows, tmp_path):
    lines = [f"{name},{x!r},{y!r}" for name, x, y in rows]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["set,x,z", *lines]) + "\n", encoding="utf-8")
    data = kh.read_table(path, keys="x,z", target=())
    names = [name for name, _, _ in rows]
    assert data.ids.tolist() == list(dict.fromkeys(names))
    in_order = [row[1:] for name in dict.fromkeys(names) for row in rows if row[0] == name]
    np.testing.assert_array_equal(data.sets.tokens, np.array(in_order))


@st.composite
def batches(draw):
    """Sets of 1 to 4 keys, and a number for each."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    values = draw(st.lists(NUMBERS, min_size=2 * sum(lengths), max_size=2 * sum(lengths)))
    tokens = np.array(values).reshape(-1, 2)
    return kh.SetBatch.from_flat(tokens, lengths), np.arange(len(lengths)) / 3


def write_parquet(path, sets, y):
    kh.data.write_parquet(path, [(sets, y)], row_group_size=2)


def write_arrow(path, sets, y):
    keys = [sets.keys_of(i).tolist() for i in range(len(sets))]
    feather.write_feather(pa.table({"keys": keys, "y": y}), path, chunksize=2)


def write_npz(path, sets, y):
    np.savez(path, X=sets.tokens, ptr=sets.offsets, y=y)


WRITERS = {"parquet": write_parquet, "arrow": write_arrow, "npz": write_npz}


@pytest.mark.parametrize("suffix", WRITERS)
@some
@given(batch=batches(), share=st.floats(0, 1, exclude_max=True))
def test_tables_of_sets_are_read_whole_or_refused(suffix, batch, share, tmp_path):
    sets, y = batch
    path = tmp_path / f"t.{suffix}"
    path.unlink(missing_ok=True)
    WRITERS[suffix](path, sets, y)
    data = kh.read_table(path)
    np.testing.assert_array_equal(data.sets.tokens, sets.tokens)
    np.testing.assert_array_equal(data.sets.lengths, sets.lengths)
    np.testing.assert_array_equal(data.target, y)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=rf"t\.{suffix}"):
        kh.read_table(path)


def write_npy_bag(path, keys):
    np.save(path, keys)


def write_npz_bag(path, keys):
    np.savez(path, features=keys)


def write_safetensors_bag(path, keys):
    save_file({"features": keys}, path)


def write_parquet_bag(path, keys):
    parquet.write_table(pa.table({"a": keys[:, 0], "b": keys[:, 1]}), path)


def write_hdf5_bag(path, keys):
    with pytest.importorskip("h5py").File(path, "w") as file:
        file["features"] = keys


BAG_WRITERS = {
    "npy": write_npy_bag,
    "npz": write_npz_bag,
    "safetensors": write_safetensors_bag,
    "parquet": write_parquet_bag,
    "h5": write_hdf5_bag,
}


@pytest.mark.parametrize("suffix", BAG_WRITERS)
@some
@given(batch=batches(), share=st.floats(0, 0.9))
def test_bags_are_read_whole_or_refused_by_name(suffix, batch, share, tmp_path):
    sets, _ = batch
    for path in tmp_path.iterdir():
        path.unlink()
    for i in range(len(sets)):
        BAG_WRITERS[suffix](tmp_path / f"{i}.{suffix}", sets.keys_of(i).copy())
    np.testing.assert_array_equal(kh.read_bags(tmp_path).sets.tokens, sets.tokens)
    damaged = tmp_path / f"0.{suffix}"
    content = damaged.read_bytes()
    damaged.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=rf"0\.{suffix}"):
        kh.read_bags(tmp_path)
