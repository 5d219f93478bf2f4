"""Bags in files of their own: `read_bags`, which reads their keys when they are asked for.

A pathology slide comes as one file of patch embeddings, and a cohort as a folder of them beside a
table of labels. Such keys need not fit the memory: the sets that `read_bags` gives know where they
are, and every fit, prediction and explanation reads some megabytes of them at a time.
"""

from __future__ import annotations

import errno
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from jaxtyping import Float, Int

from keyhole._checks import check_choice, check_labels
from keyhole._files import refuse_special_file
from keyhole.data.arrays import offsets_of
from keyhole.data.batches import Batch
from keyhole.data.sets import SetBatch
from keyhole.data.sources import TokenSource

FEATURES = "features"
COORDINATES = "coords"
"""The names that keys and their coordinates usually have in files of several arrays."""

MOST_LISTED = 10
"""Names that a message lists."""


# ---- one file ------------------------------------------------------------------------------------
#
# A loader opens a file and gives its arrays by name. Each has a shape, a type, and rows that are
# read when they are asked for. Nothing in a file is ever executed.


@contextmanager
def _npy_arrays(path: Path, features: str, coordinates: str) -> Iterator[Mapping[str, Any]]:
    """One array, mapped into memory."""
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("it holds several arrays, and is an npz file by another name")
    yield {features: array}


@contextmanager
def _npz_arrays(path: Path, features: str, coordinates: str) -> Iterator[Mapping[str, Any]]:
    """Arrays of which each is unpacked whole."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        yield arrays


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a safetensors file."""

    stored: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.get_shape())

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.stored[:1].dtype)

    def __getitem__(self, rows: slice) -> np.ndarray:
        return np.asarray(self.stored[rows])


@contextmanager
def _safetensors_arrays(path: Path, features: str, coordinates: str) -> Iterator[Mapping[str, Any]]:
    """Tensors, whose rows are read."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        yield {name: _Tensor(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118


@dataclass(frozen=True)
class _ParquetColumns:
    """Columns of numbers side by side, or one column of lists, as the matrix that they are."""

    path: Path
    columns: list[str]

    @property
    def shape(self) -> tuple[int, ...]:
        return pq.read_metadata(self.path).num_rows, *self._first().shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._first().dtype

    def _first(self) -> np.ndarray:
        """The first row: lists say how long they are row by row, and that of the first must do."""
        with pq.ParquetFile(self.path) as file:
            return self._matrix(next(file.iter_batches(1, columns=self.columns)))

    def __getitem__(self, rows: slice) -> np.ndarray:
        with pq.ParquetFile(self.path) as file:
            return self._matrix(file.read(columns=self.columns))[rows]

    @staticmethod
    def _matrix(table: Any) -> np.ndarray:
        columns = []
        for column in table.columns:
            values = np.asarray(column)
            if values.dtype == object:
                values = np.stack(list(values))
            columns.append(values.reshape(len(values), -1))
        return np.concatenate(columns, axis=1)


@contextmanager
def _parquet_arrays(path: Path, features: str, coordinates: str) -> Iterator[Mapping[str, Any]]:
    """A row for each key: a column of lists, or a column for each coordinate.

    Columns whose names begin with that of the coordinates, such as coords_x, are where a key lies.
    """
    names = pq.read_schema(path).names
    places = [name for name in names if name.startswith(coordinates)]
    keys = [name for name in names if name not in places]
    arrays = {features: _ParquetColumns(path, [features] if features in keys else keys)}
    if places:
        arrays[coordinates] = _ParquetColumns(path, places)
    yield arrays


@contextmanager
def _hdf5_arrays(path: Path, features: str, coordinates: str) -> Iterator[Mapping[str, Any]]:
    """Data sets, through the optional h5py."""
    try:
        import h5py
    except ImportError:
        raise ImportError(
            f"an HDF5 file such as {path.name!r} is read by h5py, which is not installed. "
            "pip install 'keyhole-ml[hdf5]', or in a clone pip install '.[hdf5]'; or write the "
            "bags as .npy files."
        ) from None
    with h5py.File(path, "r") as file:
        yield file


FORMATS: dict[str, Callable[[Path, str, str], AbstractContextManager[Mapping[str, Any]]]] = {
    ".npy": _npy_arrays,
    ".npz": _npz_arrays,
    ".safetensors": _safetensors_arrays,
    ".parquet": _parquet_arrays,
    ".h5": _hdf5_arrays,
    ".hdf5": _hdf5_arrays,
}
"""The loader of each kind of file, by suffix."""


@dataclass(frozen=True)
class BagFile:
    """One bag: keys of a file, read row by row where its format allows it."""

    path: Path
    features: str
    coordinates_name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    has_coordinates: bool

    def _arrays(self) -> AbstractContextManager[Mapping[str, Any]]:
        load = FORMATS[self.path.suffix.lower()]
        return load(self.path, self.features, self.coordinates_name)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Keys ``start`` … ``stop − 1``, as they are stored."""
        with self._arrays() as arrays:
            return np.asarray(arrays[self.features][start:stop])

    def coordinates(self) -> np.ndarray:
        """Where the keys lie, one row each."""
        with self._arrays() as arrays:
            return np.asarray(arrays[self.coordinates_name][:])


def open_bag(path: Path, features: str, coordinates: str) -> BagFile:
    """A file as a bag, its header read and checked; an error names its path.

    An array of keys may have any name if it is alone.
    """
    try:
        refuse_special_file(path)
        if path.stat().st_size == 0:
            raise ValueError("it is empty")
        with FORMATS[path.suffix.lower()](path, features, coordinates) as arrays:
            names = list(arrays)
            if features not in names and len(names) == 1:
                features = names[0]
            keys = arrays[features]
            bag = BagFile(
                path=path,
                features=features,
                coordinates_name=coordinates,
                shape=tuple(keys.shape),
                dtype=np.dtype(keys.dtype),
                has_coordinates=coordinates in names,
            )
    except ImportError:
        raise
    except Exception as error:
        # an error of the disk has its own number, and keeps it
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise ValueError(
            f"every file of a bag must be readable: {str(path)!r} is not ({_short(error)}). Write "
            "it anew, or take it out of the folder."
        ) from None
    if len(bag.shape) != 2 or 0 in bag.shape:
        raise ValueError(
            "a bag must have shape (N, d), a row for each key, and at least one key: "
            f"{str(path)!r} has shape {bag.shape}. Write it anew, or take it out of the folder."
        )
    if bag.dtype.kind not in "fiu":
        raise ValueError(
            f"keys must be numbers: {str(path)!r} holds {bag.dtype}. Write them as float32."
        )
    return bag


def _short(error: Exception) -> str:
    """What an error says, in one line."""
    words = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, zipfile.BadZipFile):
        words = f"a damaged archive: {words}"
    return words[:200]


# ---- keys of all files ---------------------------------------------------------------------------


@dataclass(frozen=True)
class FileTokens(TokenSource):
    """The keys of files, end to end, read as they are asked for.

    Half precision and integers become float32 and float64; what is read must be finite.
    """

    paths: tuple[Path, ...] = field(repr=False)
    files: tuple[BagFile, ...] = field(repr=False)
    offsets: Int[np.ndarray, " o"] = field(repr=False)
    dim: int
    number: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, int]:
        """(t, d)."""
        return int(self.offsets[-1]), self.dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""
        return self.number

    @property
    def is_on_disk(self) -> bool:
        """Yes."""
        return True

    def rows(self, start: int, stop: int) -> Float[np.ndarray, "r d"]:
        """Rows as an array of their own, read from as many files as they lie in."""
        rows = np.empty((stop - start, self.dim), self.number)
        self.fill(start, stop, rows)
        return rows

    def fill(self, start: int, stop: int, out: Float[np.ndarray, "r d"]) -> None:
        """Write rows to an array, file by file."""
        first = int(np.searchsorted(self.offsets, start, side="right")) - 1
        place = start
        while place < stop:
            end = min(stop, int(self.offsets[first + 1]))
            before = int(self.offsets[first])
            out[place - start : end - start] = self._read(first, place - before, end - before)
            place = end
            first += 1

    def _read(self, number: int, start: int, stop: int) -> np.ndarray:
        """Some rows of one file, checked."""
        path = self.paths[number]
        try:
            keys = self.files[number].rows(start, stop)
        except Exception as error:
            raise ValueError(
                f"every file of a bag must be readable: {str(path)!r} is not ({_short(error)}). "
                "Was it changed after read_bags? Write it anew."
            ) from None
        if keys.shape != (stop - start, self.dim):
            raise ValueError(
                f"a bag must stay as it was when read_bags read its header: {str(path)!r} has "
                f"{keys.shape[0]} rows of {keys.shape[1:]} where ({stop - start}, {self.dim}) were "
                "announced. Call read_bags again."
            )
        # NaN is the least and the largest number of what it is in; no array of booleans is needed
        if not (np.isfinite(keys.min()) and np.isfinite(keys.max())):
            row, column = np.argwhere(~np.isfinite(keys))[0]
            raise ValueError(
                f"keys must be finite: {str(path)!r} has {keys[row, column]} in row {start + row}, "
                f"column {column}. Repair the file, or take it out of the folder."
            )
        return keys


class FileCoordinates(Sequence[Any]):
    """Where the keys of each bag lie, read from its file as it is asked for."""

    def __init__(self, files: Sequence[BagFile]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return FileCoordinates(self._files[i])
        return np.asarray(self._files[i].coordinates(), dtype=np.float64)


@dataclass(frozen=True)
class BagFiles:
    """The bags of a folder, as `read_bags` returns them.

    Attributes
    ----------
    sets : SetBatch
        The bags. Their keys are on the disk, and are read when they are asked for.
    target : array (n,) or None
        The label of each bag.
    groups : array (n,) or None
        The group of each bag, such as a patient, whose bags are left out together.
    coordinates : sequence of n arrays (N_i, 2), or None
        Where each key lies, read when it is asked for; None unless every file says so.
    names : tuple of str
        The name of each bag: that of its file without its suffix.
    paths : tuple of Path
        The files.
    """

    sets: SetBatch
    target: np.ndarray | None = field(repr=False)
    groups: np.ndarray | None = field(repr=False)
    coordinates: FileCoordinates | None = field(repr=False)
    names: tuple[str, ...] = field(repr=False)
    paths: tuple[Path, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Batch]:
        """Batches of about 256 MB for ``fit_batches``, each in memory."""
        keys_at_once = max(1, 2**28 // (self.sets.dim * self.sets.dtype.itemsize))
        offsets = self.sets.offsets
        start = 0
        while start < len(self):
            stop = int(np.searchsorted(offsets, offsets[start] + keys_at_once, side="right")) - 1
            stop = min(max(stop, start + 1), len(self))
            rows = slice(start, stop)
            target = None if self.target is None else self.target[rows]
            yield Batch(self.sets[rows].loaded(), target)
            start = stop


def read_bags(
    folder: str | os.PathLike[str],
    labels: Any = None,
    *,
    bag: str = "bag",
    label: str = "label",
    group: str | None = None,
    features: str = FEATURES,
    coordinates: str = COORDINATES,
    unmatched: str = "error",
) -> BagFiles:
    """Read a folder with one file for each bag, without loading the keys.

    The headers of all files are read and compared, so that a file that is missing, empty, cut short
    or of another width or type is named here. Numbers are read later, when they are needed. The
    first pass of a fit names files with numbers that are not finite.

    Parameters
    ----------
    folder : str or Path
        Of .npy, .npz, .safetensors, .parquet, .h5 or .hdf5 files, all of one width and type. Files
        of other suffixes, and those whose name begins with a dot, do not count.
    labels : table, str or Path, mapping, or None
        A table with a row for each bag, of pandas, polars or Arrow, or a CSV or Parquet file of it;
        or a mapping from names to labels. None reads bags without labels.
    bag, label : str
        The columns of the name and of the label of a bag.
    group : str, optional
        The column of its group, such as a patient.
    features, coordinates : str
        What keys, and where they lie, are called in files of several arrays.
    unmatched : "error" or "drop"
        What happens to bags without labels and labels without bags: an error lists them, or they
        are left out with a warning that lists them.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import numpy as np
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> np.save(folder / "a.npy", np.ones((3, 2), np.float32))
    >>> np.save(folder / "b.npy", np.ones((5, 2), np.float32))
    >>> bags = read_bags(folder, {"a": "benign", "b": "tumour"})
    >>> bags.sets
    SetBatch(2 sets, 3–5 keys each (8 in all), dim 2, no query, float32, on disk)
    >>> bags.target.tolist()
    ['benign', 'tumour']
    """
    check_choice(unmatched, "unmatched", ("error", "drop"))
    paths = _bag_paths(Path(folder))
    names = [path.stem for path in paths]

    # labels, in the order of the files
    target = None
    groups = None
    if labels is not None:
        rows = _label_rows(labels, bag, label, group)
        kept = _matched(names, list(rows), unmatched)
        paths = [path for path in paths if path.stem in kept]
        names = [path.stem for path in paths]
        target = np.array([rows[name][0] for name in names])
        check_labels(target, label, "label")
        if group is not None:
            groups = np.array([rows[name][1] for name in names])

    # the headers of all files: one width and one type
    files = [open_bag(path, features, coordinates) for path in paths]
    for path, file in zip(paths, files, strict=True):
        if (file.shape[1], file.dtype) != (files[0].shape[1], files[0].dtype):
            raise ValueError(
                "all bags must have keys of one width and type: "
                f"{str(paths[0])!r} has {files[0].shape[1]} × {files[0].dtype} and "
                f"{str(path)!r} {file.shape[1]} × {file.dtype}. Write them alike."
            )
    lengths = np.array([file.shape[0] for file in files])
    is_narrow = files[0].dtype in (np.float16, np.float32)
    tokens = FileTokens(
        paths=tuple(paths),
        files=tuple(files),
        offsets=offsets_of(lengths),
        dim=int(files[0].shape[1]),
        number=np.dtype(np.float32 if is_narrow else np.float64),
    )
    have_coordinates = all(file.has_coordinates for file in files)
    return BagFiles(
        sets=SetBatch.from_source(tokens, lengths),
        target=target,
        groups=groups,
        coordinates=FileCoordinates(files) if have_coordinates else None,
        names=tuple(names),
        paths=tuple(paths),
    )


def _bag_paths(folder: Path) -> list[Path]:
    """The files of bags in a folder, by name."""
    if not folder.is_dir():
        raise NotADirectoryError(
            f"`folder` must be a folder of bags, one file each: {str(folder)!r} is none. Check the "
            "name."
        )
    paths = []
    for path in sorted(folder.iterdir()):
        is_bag = path.suffix.lower() in FORMATS and not path.name.startswith(".")
        if is_bag and not path.is_dir():
            paths.append(path)
    if not paths:
        raise ValueError(
            f"`folder` must hold bags, files that end in {', '.join(FORMATS)}: {str(folder)!r} "
            "holds none."
        )
    seen: dict[str, Path] = {}
    for path in paths:
        if path.stem in seen:
            raise ValueError(
                f"every bag must have a name of its own: {seen[path.stem].name!r} and "
                f"{path.name!r} have the same. Rename one, or take it out of the folder."
            )
        seen[path.stem] = path
    return paths


def _label_rows(labels: Any, bag: str, label: str, group: str | None) -> dict[str, tuple[Any, Any]]:
    """Label and group by the name of the bag."""
    if isinstance(labels, Mapping):
        if group is not None:
            raise ValueError(
                f"group={group!r} names a column of a table: `labels` is a mapping. Pass a table, "
                "or the groups to fit."
            )
        return {str(name): (value, None) for name, value in labels.items()}

    # a table with the columns that were named
    from keyhole.data.frames import table_in_memory, table_of

    if isinstance(labels, (str, os.PathLike)):
        path = Path(labels)
        refuse_special_file(path)
        table = table_in_memory(path.read_bytes(), path.name)
    else:
        table = table_of(labels, "labels")
    wanted = [bag, label] if group is None else [bag, label, group]
    for name in wanted:
        if name not in table.column_names:
            raise ValueError(
                f"the table of labels must have a column {name!r}: it has "
                f"{', '.join(map(repr, table.column_names[:MOST_LISTED]))}. Name the columns with "
                "bag=, label= and group=."
            )
    columns = [table.column(name).to_pylist() for name in wanted]

    # one row for each bag, none of it missing; names may be written with the suffix of the file
    rows: dict[str, tuple[Any, Any]] = {}
    for number, row in enumerate(zip(*columns, strict=True)):
        if any(value is None for value in row):
            empty = wanted[row.index(None)]
            raise ValueError(
                f"Missing value in column {empty!r} (row {number} of the table of labels). Fill it "
                "in, or leave the row out."
            )
        name = str(row[0])
        if Path(name).suffix.lower() in FORMATS:
            name = Path(name).stem
        if name in rows:
            raise ValueError(
                f"the table of labels must have one row for each bag: {name!r} has several (the "
                f"second is row {number}). Leave all but one out."
            )
        rows[name] = (row[1], row[2] if group is not None else None)
    return rows


def _matched(bags: Sequence[str], labels: Sequence[str], unmatched: str) -> set[str]:
    """The names that have both a file and a label; all others are listed."""
    without_label = sorted(set(bags) - set(labels))
    without_bag = sorted(set(labels) - set(bags))
    matched = set(bags) & set(labels)
    if not without_label and not without_bag:
        return matched
    words = []
    if without_label:
        words.append(f"bags without a label: {_listed(without_label)}")
    if without_bag:
        words.append(f"labels without a bag: {_listed(without_bag)}")
    evidence = "; ".join(words)
    if unmatched == "error" or not matched:
        raise ValueError(
            f"every bag must have a label, and every label a bag: {evidence}. Complete them, or "
            "pass unmatched='drop' to leave these out."
        )
    warnings.warn(f"left out: {evidence}.", stacklevel=3)
    return matched


def _listed(names: Sequence[str]) -> str:
    """How many names there are, and the first of them."""
    first = ", ".join(map(repr, names[:MOST_LISTED]))
    more = ", …" if len(names) > MOST_LISTED else ""
    return f"{len(names)} ({first}{more})"
