"""The same samples in every storage give equal sets and an equal model."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from paper import paper_regressor

import keyhole as kh

SEEDS = range(34)
STORAGES = [
    "list",
    "SetBatch",
    "bags",
    "pandas",
    "polars",
    "arrow",
    "csv",
    "tsv",
    "parquet",
    "npz",
]


def drawn(seed):
    """Sets of 1 to 5 keys with two coordinates, and a number for each set."""
    rng = np.random.default_rng(seed)
    keys = [rng.normal(size=(rng.integers(1, 6), 2)) for _ in range(12)]
    return keys, np.array([part[:, 0].sum() for part in keys]) + 0.1 * rng.normal(size=12)


def long_frame(keys, y):
    """One row per token."""
    lengths = [len(part) for part in keys]
    tokens = np.concatenate(keys)
    columns = {"set": np.repeat(np.arange(len(keys)), lengths), "a": tokens[:, 0]}
    return pd.DataFrame({**columns, "b": tokens[:, 1], "y": np.repeat(y, lengths)})


def stored(storage, keys, y, folder):
    """Sets and targets that went through a storage."""
    frame = long_frame(keys, y)
    if storage == "list":
        return keys, y
    if storage == "SetBatch":
        return kh.SetBatch(keys), y
    if storage == "bags":
        for i, part in enumerate(keys):
            np.save(folder / f"{i:02}.npy", part)
        bags = kh.read_bags(folder, {f"{i:02}": value for i, value in enumerate(y)})
        return bags.sets, bags.target
    if storage == "npz":
        ptr = np.cumsum([0, *map(len, keys)])
        np.savez(folder / "t.npz", X=np.concatenate(keys), ptr=ptr, y=y)
        source = folder / "t.npz"
    elif storage == "pandas":
        source = frame
    elif storage == "polars":
        source = pytest.importorskip("polars").DataFrame(frame.to_dict("list"))
    elif storage == "arrow":
        source = pa.Table.from_pandas(frame, preserve_index=False)
    elif storage in ("csv", "tsv"):
        source = folder / f"t.{storage}"
        frame.to_csv(source, index=False, sep={"csv": ",", "tsv": "\t"}[storage])
    elif storage == "parquet":
        source = folder / "t.parquet"
        frame.to_parquet(source, row_group_size=7)
    else:
        raise ValueError(f"no such storage: {storage}")
    data = kh.read_table(source)
    return data.sets, data.target


@pytest.mark.parametrize("storage", STORAGES)
def test_every_storage_gives_the_same_sets_and_model(storage, tmp_path):
    for seed in SEEDS:
        keys, y = drawn(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        sets, target = stored(storage, keys, y, folder)
        batch = sets if isinstance(sets, kh.SetBatch) else kh.SetBatch(sets)
        np.testing.assert_array_equal(batch.tokens, np.concatenate(keys))
        np.testing.assert_array_equal(batch.lengths, [len(part) for part in keys])
        np.testing.assert_array_equal(target, y)
        expected = paper_regressor(3, alpha=0.1, random_state=0).fit(kh.SetBatch(keys), y)
        model = paper_regressor(3, alpha=0.1, random_state=0).fit(sets, target)
        np.testing.assert_array_equal(model.predict(keys), expected.predict(keys))


def test_a_storage_that_loses_a_digit_is_seen(tmp_path):
    """The comparison fails where a file is written with fewer digits."""
    keys, y = drawn(0)
    frame = long_frame(keys, y)
    frame.to_csv(tmp_path / "t.csv", index=False, float_format="%.6f")
    data = kh.read_table(tmp_path / "t.csv")
    assert not np.array_equal(data.sets.tokens, np.concatenate(keys))
