"""Rows to files: CSV that is written whole or not at all, and Markdown tables for the documentation."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def write_csv(rows: Sequence[Row], path: Path) -> Path:
    """Write rows as CSV, six digits each, through a partial file: a reader never meets half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    partial.replace(path)
    return path


def write_text(text: str, path: Path) -> Path:
    """Write text through a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


def markdown(rows: Sequence[Row]) -> str:
    """Rows of text as a Markdown table.

    Examples
    --------
    >>> print(markdown([{"d": "4", "cells": "10"}]))
    | d | cells |
    |---|---|
    | 4 | 10 |
    """
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([str(row[key]) for key in head] for row in rows)]
    return "\n".join("|" + "|".join(line) + "|" if line[0] == "---" else f"| {' | '.join(line)} |" for line in lines)
