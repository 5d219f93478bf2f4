"""Batches of sets from files, read in parts: Parquet and Arrow."""

from keyhole.sources.batch import Batch, as_batch
from keyhole.sources.parquet import ParquetSets, as_source, write_parquet

__all__ = ["Batch", "ParquetSets", "as_batch", "as_source", "write_parquet"]
