"""Tables of sets: Parquet and Arrow with list columns, CSV with one row per token, npz."""

from keyhole.tables.dataset import Dataset
from keyhole.tables.read import SUFFIXES, read_table

__all__ = ["SUFFIXES", "Dataset", "read_table"]
