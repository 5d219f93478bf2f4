"""Parquet files of sets, and files that are made in parts: none is ever seen half-written."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keyhole._files import behind_links, create_draft, replace_file, write_whole
from keyhole.data.batches import Batch, as_batch
from keyhole.data.outputs import OutputFormat, table_writer
from keyhole.data.reader import check_file_name, reading, validated
from keyhole.data.sets import SetBatch


def write_parquet(
    path: Any,
    batches: Iterable[Any],
    *,
    row_group_size: int | None = None,
    extra: dict[str, Any] | None = None,
) -> int:
    """Write batches, (X, y) or sets alone, to a Parquet file.

    With columns keys, query, extras, y and weight.

    The file appears under its name when it is complete. It is not compressed: random numbers would
    not shrink.

    Parameters
    ----------
    path : path
    batches : iterable
        X SetBatches of one dimension; y (n,) or (n, outputs); all with the same columns.
    row_group_size : int, optional
        Rows of a row group; by default each batch is one.
    extra : dict of arrays, optional
        Further columns, rows in order over all batches.

    Returns
    -------
    int
        Rows written.
    """
    path = Path(path)
    check_file_name(path)
    rows = 0

    def write(draft: Path) -> None:
        nonlocal rows
        with contextlib.ExitStack() as stack:
            writer = None
            for item in batches:
                table = sets_table(as_batch(item), extra or {}, rows)
                # the first batch says which columns there are
                if writer is None:
                    writer = stack.enter_context(
                        pq.ParquetWriter(
                            draft,
                            table.schema,
                            compression="none",
                            use_dictionary=False,
                            write_statistics=False,
                        )
                    )
                writer.write_table(table, row_group_size=row_group_size or table.num_rows)
                rows += table.num_rows
            if writer is None:
                raise ValueError("`batches` must give at least one batch: got none.")

    write_whole(write, path)
    return rows


def sets_table(
    batch: Batch, extra: Mapping[str, Any] = MappingProxyType({}), start: int = 0
) -> Any:
    """A batch as an Arrow table with columns keys, query, extras, y and weight.

    Rows of further columns, from ``start`` on, are appended.
    """
    # sets: keys as lists of tokens, query and extras as vectors
    sets: SetBatch = batch.sets
    tokens = _vectors(sets.tokens)
    columns = {"keys": pa.LargeListArray.from_arrays(pa.array(sets.offsets), tokens)}
    if sets.query is not None:
        columns["query"] = _vectors(sets.query)
    if sets.extras is not None:
        columns["extras"] = _vectors(sets.extras)

    # target and weights: numbers or texts, or one vector of outputs per row
    for name, values in (("y", batch.y), ("weight", batch.weights)):
        if values is None:
            continue
        array = np.ascontiguousarray(values)
        if np.ndim(values) == 1:
            columns[name] = pa.array(array)
        else:
            columns[name] = _vectors(array)
    for name, values in extra.items():
        columns[name] = pa.array(values[start : start + len(sets)])
    return pa.table(columns)


def _vectors(rows: np.ndarray) -> Any:
    """The rows of a matrix as an Arrow column of lists of one length."""
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])


MAKER = "keyhole predict"
OURS = re.compile(r"part-\d{8}\.parquet|(part-\d{8}|joined|job)\.\d+\.draft|job\.json|lock")
"""Names of what we put into the folder of parts: nothing else in it is ever removed."""


PREDICTED = ("prediction", "probability_")  # how columns begin that a model made


class PartedFile:
    """Parts in a folder beside the file, joined when all are there.

    Parts made earlier by the same job are kept.

    Making one looks and refuses, and touches nothing; ``with`` takes the folder for this run alone.
    ``job`` says what the parts are made from, in words and numbers; with ``overwrite`` an existing
    file, or parts of another job, may go. Parts are Parquet; ``file_format`` is that of the file
    which they are joined into. A symbolic link is followed, and the folder is beside the file that
    it leads to. A file that is replaced keeps its mode, and where others may not read it, they may
    not read the folder either.

    Why not one file that is renamed at the end: on one core, 100,000 plain predictions of 256 heads
    take a second, but with ``--interval`` some 90 s (2,000 training samples), by the exact kernel
    54 s and with both 390 s (1,000 training samples): rates of 100 to 500 samples, extrapolated.
    An interrupted run of these goes on instead of starting over.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        job: dict[str, Any],
        *,
        overwrite: bool = False,
        file_format: OutputFormat = "parquet",
    ) -> None:
        self.path = behind_links(Path(path))
        self.file_format = file_format
        self.folder = self.path.with_name(self.path.name + ".parts")
        self.job = json.loads(json.dumps(job))  # as it will read back: tuples are lists
        self.overwrite = overwrite
        self._lock: int | None = None
        check_file_name(self.path)
        if self.path.is_dir():
            raise ValueError(
                f"the output must name a file: {self.path} is a folder. Add a file name to it."
            )
        self._refuse_to_replace()
        self._refuse_another_job()

    def __enter__(self) -> PartedFile:
        try:
            self.folder.mkdir(mode=self._folder_mode(), parents=True, exist_ok=True)
            self._lock = _locked(self.folder / "lock", self.path)
        except OSError as error:
            raise OSError(
                f"{self.folder} cannot be written: {error.strerror}. Choose another place."
            ) from None
        try:
            # again, both: another run may have ended before the folder was ours
            self._refuse_to_replace()
            if self._refuse_another_job() != self.job:
                self._clear()
                note = {"made by": MAKER, "job": self.job}
                with self._draft(self.folder / "job.json") as draft:
                    draft.write_text(json.dumps(note, indent=1, sort_keys=True), encoding="utf-8")
        except BaseException:
            if os.listdir(self.folder) == ["lock"]:
                self._remove()
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _folder_mode(self) -> int:
        """The mode of the folder of parts: private where the file to be replaced is."""
        is_private = self.path.exists() and not self.path.stat().st_mode & 0o077
        return 0o700 if is_private else 0o777

    def _refuse_to_replace(self) -> None:
        if self.path.exists() and not self.overwrite:
            raise FileExistsError(f"{self.path} exists. Choose another name, or pass --overwrite.")

    def _refuse_another_job(self) -> Any:
        """The job of the parts that are there, None if there are none."""
        earlier = self._earlier_job()
        if earlier is not None and earlier != self.job and not self.overwrite:
            names = {*earlier, *self.job}
            changed = sorted(name for name in names if earlier.get(name) != self.job.get(name))
            raise ValueError(
                f"{self.folder} holds parts of another run: {', '.join(changed)} changed since. "
                "Run it as before to go on, or pass --overwrite to start over."
            )
        return earlier

    def _earlier_job(self) -> Any:
        """What the note in the folder says.

        Raise unless the folder is ours, or there is none, or nothing in it.
        """
        foreign = ValueError(
            f"the folder {self.folder} is needed for parts of the output, and what is there was "
            "not made by keyhole. Move it away, or choose another output."
        )
        try:
            note = json.loads((self.folder / "job.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            if not self.folder.exists():
                return None
            # a run that was killed before it wrote its note leaves no more than this
            names = os.listdir(self.folder)
            if all(name == "lock" or re.fullmatch(r"job\.\d+\.draft", name) for name in names):
                return None
            raise foreign from None
        except (NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
            if not self.folder.parent.is_dir():
                return None  # the path leads through a file: making the folder will say so
            raise foreign from None
        is_ours = isinstance(note, dict) and note.get("made by") == MAKER
        if not is_ours or not isinstance(note.get("job"), dict):
            raise foreign
        return note["job"]

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}.parquet"

    def _clear(self, *, keep: Sequence[str] = ("lock",)) -> None:
        """Remove what is ours from the folder; the note last but one, the lock last."""
        ours = []
        for name in os.listdir(self.folder):
            if OURS.fullmatch(name) and name not in keep:
                ours.append(name)
        for name in sorted(ours, key=lambda name: (name == "lock", name == "job.json")):
            (self.folder / name).unlink(missing_ok=True)

    def _remove(self) -> None:
        self._clear(keep=())
        with contextlib.suppress(OSError):  # somebody put something into it: that stays
            self.folder.rmdir()

    @contextmanager
    def _draft(self, name: Path, target: Path | None = None) -> Iterator[Path]:
        """A file to write that takes its name once it is complete.

        It leaves nothing if it cannot be completed.
        """
        draft = self.folder / f"{name.stem}.{os.getpid()}.draft"
        place = target or name
        try:
            draft.unlink(missing_ok=True)  # of a process of the same number that was killed
            create_draft(draft, place)
            yield draft
            # on the disk before it has its name: a crash leaves no name without content
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
            if target is not None:
                self._refuse_to_replace()
            replace_file(draft, place)
        except FileExistsError:
            raise
        except OSError as error:
            raise OSError(
                f"{self.path} cannot be written: {error.strerror or error}. What is done is kept "
                f"in {self.folder}: make room, and run the same command to go on."
            ) from None
        except pa.ArrowException as error:
            raise ValueError(
                "every column must have a type that Parquet can store: "
                f"{str(error).strip()[:200]}. Leave it out."
            ) from None
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()

    def done(self, rows: Sequence[int]) -> set[int]:
        """Numbers of the parts that are there, read, and have their number of rows.

        The others are to be made again.
        """
        numbers = set()
        for number, expected_rows in enumerate(rows):
            part = self._part(number)
            with contextlib.suppress(ValueError, OSError), reading(part):
                if pq.read_metadata(part).num_rows == expected_rows:
                    numbers.add(number)
        return numbers

    def write(self, number: int, table: Any) -> None:
        """Write one part; it appears under its name when it is complete."""
        with self._draft(self._part(number)) as draft:
            pq.write_table(table, draft, write_page_checksum=True)

    def join(self, numbers: Sequence[int]) -> int:
        """Join the parts into the file, of Parquet one row group each, and remove them.

        Return the number of rows.
        """
        rows = 0
        with self._draft(Path("joined"), self.path) as draft, contextlib.ExitStack() as stack:
            writer = None
            schema = None
            for number in numbers:
                table = self._read(number, schema)
                # the first part says which columns there are
                if writer is None:
                    schema = table.schema
                    writer = stack.enter_context(table_writer(draft, schema, self.file_format))
                writer.write_table(table)
                rows += table.num_rows
            if writer is None:
                raise ValueError("there are no parts to join: the input has no rows.")
        self._remove()
        return rows

    def _read(self, number: int, schema: Any) -> Any:
        """A part, read in full.

        One that is damaged is removed, for the next run to make it again.
        """
        part = self._part(number)
        try:
            return _checked_part(part, schema)
        except ValueError as error:
            part.unlink(missing_ok=True)
            raise ValueError(
                f"{error} This part was removed: run the same command to make it again."
            ) from None


def _checked_part(part: Path, schema: Any) -> Any:
    """The table of a part; ValueError unless it is whole, finite and, if given, of the schema."""
    # page checksums are verified: a part may have lain on the disk for days
    with reading(part):
        table = pq.read_table(part, page_checksum_verification=True)
        rows = pq.read_metadata(part).num_rows
    if table.num_rows != rows:
        raise ValueError(
            f"a part has the rows it says: {part.name!r} has {table.num_rows} of {rows}."
        )
    if schema is not None and table.schema != schema:
        raise ValueError(
            f"parts must have the same columns: {part.name!r} has other columns than the first."
        )
    # predictions are finite: anything else is damage
    columns = validated(table, part).columns
    for name, column in zip(table.column_names, columns, strict=True):
        is_prediction = name.startswith(PREDICTED) and pa.types.is_floating(column.type)
        if is_prediction and not np.isfinite(column.to_numpy()).all():
            raise ValueError(f"predictions are finite: column {name!r} of {part.name!r} is not.")
    return table


def _locked(path: Path, output: Path) -> int | None:
    """Lock a file until it is closed, at the latest when the process ends.

    None where there are no locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    busy = ValueError(
        f"one run writes an output at a time: another run is writing {output}. Wait for it, or "
        "choose another output."
    )
    # the lock belongs to the open file: it goes when the process does, however it ends
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file), os.stat(path)):
            raise busy  # it ended, and took the file with it, while we waited
    except (BlockingIOError, FileNotFoundError):
        os.close(file)
        raise busy from None
    except ValueError:
        os.close(file)
        raise
    except OSError:  # a file system without locks: drafts of two processes still have two names
        os.close(file)
        return None
    return file


def predictions_table(columns: dict[str, Any]) -> Any:
    """An Arrow table of some columns: arrays, or lists of Arrow arrays that follow each other."""
    arrow_columns = {}
    for name, values in columns.items():
        if isinstance(values, list):
            arrow_columns[name] = pa.chunked_array(values)
        else:
            arrow_columns[name] = pa.array(values)
    return pa.table(arrow_columns)
