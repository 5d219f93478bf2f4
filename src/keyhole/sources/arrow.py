"""Arrow data from files, the one door: opened here, validated in full here, and every error names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AGAIN = "fetch or write it again"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever Arrow says of a file that does not read into a ValueError that names the file.

    A file that is not there, or that we may not read, stays an OSError.
    """
    import pyarrow as pa

    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    # an OverflowError is a size in a damaged header that no integer of ours holds
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, OverflowError) as error:
        raise ValueError(
            f"{path.name!r} must be a table in the format of its suffix: it does not read "
            f"({str(error).strip()[:300]}). It is damaged or of another format; {AGAIN}."
        ) from None


def validated(data: Any, path: Path, *, full: bool = True) -> Any:
    """Return a table or record batch once every offset, length and text in it has been looked at.

    Offsets that lead nowhere are memory that is not ours, and Arrow follows them unless it is asked to look first.
    Numbers themselves are not touched, so the cost is that of the offsets; none of them is read if not ``full``, which
    is enough to count rows.
    """
    import pyarrow as pa

    try:
        data.validate(full=full)
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(
            f"a table must hold together: {path.name!r} does not ({str(error).strip()[:200]}). It is damaged; {AGAIN}."
        ) from None
    return data


def column_names(schema: Any, path: Path) -> list[str]:
    """Names of the columns; a ValueError if they are not text."""
    with reading(path):
        return list(schema.names)


def check_file_name(path: Path) -> None:
    """Raise unless the name of a file is text: Arrow opens no other."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"names of files must be text in UTF-8: got {path.name!r}. Rename it.") from None


def read_arrow(path: Path, suffix: str) -> Any:
    """A whole file as a validated Arrow table: CSV, TSV, Parquet, or Arrow as a file or a stream."""
    check_file_name(path)
    with reading(path):
        table = _read(path, suffix)
    column_names(table.schema, path)
    return validated(table, path)


def _read(path: Path, suffix: str) -> Any:
    import pyarrow as pa

    if suffix in (".csv", ".tsv"):
        from pyarrow import csv

        return csv.read_csv(path, parse_options=csv.ParseOptions(delimiter="\t" if suffix == ".tsv" else ","))
    if suffix in (".parquet", ".pq"):
        from pyarrow import parquet

        return parquet.read_table(path)
    with pa.OSFile(str(path), "rb") as source:
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()
