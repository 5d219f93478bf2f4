"""What goes in: sets with a query, samples of several sets, tokens, files and public data sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keyhole._lazy import lazy_names

# loaded on first use: files need Arrow, and sets do not
_MODULES = {
    "SetBatch": "sets",
    "SetGroups": "sets",
    "concatenate": "sets",
    "Dataset": "layout",
    "ParquetSets": "reader",
    "read_table": "reader",
    "write_parquet": "writer",
}
__all__ = list(_MODULES)

if TYPE_CHECKING:
    from keyhole.data.layout import Dataset as Dataset
    from keyhole.data.reader import ParquetSets as ParquetSets
    from keyhole.data.reader import read_table as read_table
    from keyhole.data.sets import SetBatch as SetBatch
    from keyhole.data.sets import SetGroups as SetGroups
    from keyhole.data.sets import concatenate as concatenate
    from keyhole.data.writer import write_parquet as write_parquet


__getattr__, __dir__ = lazy_names("keyhole.data", _MODULES)
