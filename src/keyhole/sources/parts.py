"""A Parquet file that is made part by part, survives interruption, and appears when it is complete."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any


class PartedFile:
    """Parts in a folder beside the file, joined when all are there; parts made earlier by the same job are kept.

    Parameters
    ----------
    path : path
        The file to make. Never seen half-written.
    job : dict
        What the parts are made from, in words and numbers: parts of another job are not mixed with.
    overwrite : bool
        Whether an existing file may be replaced, and parts of another job thrown away.
    """

    def __init__(self, path: Any, job: dict[str, Any], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.folder = self.path.with_name(self.path.name + ".parts")
        note = self.folder / "job.json"
        if self.path.exists() and not overwrite:
            raise FileExistsError(f"{self.path} exists. Choose another name, or pass --overwrite.")
        if self.folder.exists():
            known = json.loads(note.read_text()) if note.exists() else None
            if known == job:
                return
            if known is not None and not overwrite:
                changed = ", ".join(sorted(key for key in {*known, *job} if known.get(key) != job.get(key)))
                raise ValueError(
                    f"{self.folder} holds parts of another run: {changed} changed since. Run it as before to go on, "
                    "or pass --overwrite to start over."
                )
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        _write_text(note, json.dumps(job, indent=1, sort_keys=True))

    def done(self) -> set[int]:
        """Numbers of the parts that are there."""
        return {int(file.stem.removeprefix("part-")) for file in self.folder.glob("part-*.parquet")}

    def write(self, number: int, table: Any) -> None:
        """Write one part; it appears under its name when it is complete."""
        import pyarrow.parquet as pq

        name = self.folder / f"part-{number:08d}.parquet"
        draft = name.with_suffix(".draft")
        pq.write_table(table, draft)
        os.replace(draft, name)

    def join(self, numbers: list[int]) -> int:
        """Join the parts into the file, one row group each, and remove them; return the number of rows."""
        import pyarrow.parquet as pq

        draft = self.folder / "joined.draft"
        rows, writer = 0, None
        for number in numbers:
            table = pq.read_table(self.folder / f"part-{number:08d}.parquet")
            if writer is None:
                writer = pq.ParquetWriter(draft, table.schema)
            writer.write_table(table)
            rows += table.num_rows
        if writer is None:
            raise ValueError("there are no parts to join: the input has no rows.")
        writer.close()
        os.replace(draft, self.path)
        shutil.rmtree(self.folder)
        return rows


def _write_text(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    os.replace(draft, path)


def predictions_table(columns: dict[str, Any]) -> Any:
    """An Arrow table of some columns: arrays, or lists of Arrow arrays that follow each other."""
    import pyarrow as pa

    return pa.table({name: pa.chunked_array(v) if isinstance(v, list) else pa.array(v) for name, v in columns.items()})
