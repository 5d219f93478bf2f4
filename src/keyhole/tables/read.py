"""`read_table`: from a file to sets, whatever its format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from keyhole._checks import check_choice
from keyhole.sources.arrow import read_arrow
from keyhole.tables.arrays import read_npz
from keyhole.tables.dataset import Dataset
from keyhole.tables.lists import has_list_keys, read_lists
from keyhole.tables.long import Choice, read_long

SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".csv", ".tsv", ".npz")


def read_table(
    path: Any,
    *,
    keys: str | Sequence[str] | None = None,
    query: str | Sequence[str] | None = None,
    target: str | None = None,
    set_id: str | None = None,
    missing: str = "error",
) -> Dataset:
    r"""Read sets from Parquet, Arrow, CSV or npz; the suffix of the file says which.

    One row per set: keys in one column of lists of tokens, or in one column of lists per coordinate. One row per
    token (the only form of CSV): a column for the set, columns for the coordinates. In npz: ``keys`` (n, N, d), or
    ``X`` (tokens, d) with ``ptr`` (n + 1), and ``y``.

    Parameters
    ----------
    path : str or Path
    keys : column name or names, optional
        By default the column ``keys``, or all columns (of lists, of numbers) that serve no other purpose. Names in
        one string are parted by commas.
    query : column name or names, optional
        By default the column ``query``; with one row per token, the rows whose column ``role`` says "query".
    target : column name, optional
        By default the first of target, label, class, y. With one row per token it is the same in all rows of a set.
    set_id : column name, optional
        With one row per token, which set a row belongs to; by default the first of set, set_id, bag, bag_id, id,
        group.
    missing : "error" or "drop"
        What to do about a token with a gap (NaN or nothing): refuse the table, or drop the token; a set without any
        token left gets one of zeros. Gaps in queries and targets are always refused.

    Returns
    -------
    Dataset

    Examples
    --------
    >>> import pathlib, tempfile
    >>> rows = "set,x,y,target\na,1,2,yes\na,3,4,yes\nb,5,6,no\n"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "sets.csv")
    ...     _ = file.write_text(rows)
    ...     data = read_table(file, target="target")
    >>> data.sets
    SetBatch(2 sets, 1–2 keys each (3 in all), dim 2, no query, float64)
    >>> data.names, data.target.tolist()
    (('x', 'y'), ['yes', 'no'])
    """
    path = Path(path)
    check_choice(missing, "missing", ("error", "drop"))
    choice = Choice(_names(keys, "keys"), _names(query, "query"), target, set_id, missing)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(
            f"a table is read by its suffix, one of {', '.join(SUFFIXES)}: got {path.name!r}. Rename it, or convert it."
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path.name!r} is not there: no such file.")
    if suffix == ".npz":
        return read_npz(path, choice)
    table = read_arrow(path, suffix)
    try:
        return (read_lists if has_list_keys(table, choice) else read_long)(table, choice, path.name)
    except pa.ArrowException as error:
        raise ValueError(f"the columns of {path.name!r} must read as sets: {str(error)[:300]}.") from None


def _names(given: str | Sequence[str] | None, option: str) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = tuple(part.strip() for part in given.split(",")) if isinstance(given, str) else tuple(given)
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"`{option}` must name columns, each once: got {given!r}.")
    return names
