"""The tables of docs/benchmarks/trust.md, from what the last runs left under out/.

python tests/trust.py      after make fuzz and make test-slow

A table whose run is missing stays as it is.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "trust.md"


def table(head: list[str], rows: list[list[Any]]) -> str:
    cells = [
        head,
        ["---", *("---:" for _ in head[1:])],
        *(
            [f"{c:,}" if isinstance(c, int) else str(c).replace("|", r"\|") for c in r]
            for r in rows
        ),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def fuzz(run: dict[str, Any]) -> str:
    """Two tables of one run: damaged files by format, and sequences of calls by kind."""
    # older runs had files only
    sequences = run.get("sequences", [])
    rows = sorted(run["formats"].items())
    files = [(name, row) for name, row in rows if name not in sequences]
    calls = [(name, row) for name, row in rows if name in sequences]
    parts = [fuzz_table("format", "read", files)]
    if calls:
        parts.append(fuzz_table("sequences of calls", "held", calls))
    cores = "one core" if run.get("workers") == 1 else "two cores"
    parts.append(
        f"`make fuzz SEED={run['seed']}`: {run['cases']:,} cases in {run['seconds']:.0f} s on "
        f"{cores}."
    )
    return "\n\n".join(parts)


def fuzz_table(kind: str, read: str, rows: list[tuple[str, dict[str, int]]]) -> str:
    """One row for each format or kind, and their sum; ``read`` names what went well."""
    columns = ["cases", "refused", "read", "findings"]
    cells: list[list[Any]] = []
    for name, row in rows:
        # two hyphens would become a dash outside code
        label = f"`{name}`" if name.startswith("--") else name
        cells.append([label, *(row.get(column, 0) for column in columns)])
    total = [sum(row[i] for row in cells) for i in range(1, 1 + len(columns))]
    cells.append(["**all**", *total])
    return table([kind, "cases", "refused", read, "findings"], cells)


def leave_one_out(run: dict[str, Any]) -> str:
    rows = [
        [r["route"], r["configurations"], r["compared"], f"{r['worst']:.2f}", r["bound"]]
        for r in run["routes"]
    ]
    words = (
        f"`make test-slow`, seed {run['seed']}: {run['configurations']:,} random configurations, "
        f"{run['compared']:,} numbers against refits in long doubles, {len(run['disagreements'])} "
        f"beyond the bound of a route ({run['left to rounding']:,} further draws left nothing to "
        "compare: rounding hides their leave-one-out)."
    )
    return (
        words
        + "\n\n"
        + table(["route", "configurations", "numbers", "worst share of the bound", "bound"], rows)
    )


def batches_of_one(run: dict[str, Any]) -> str:
    """How many configurations were compared in each way, and the worst of them."""
    rows = [[r["compared"], r["configurations"], f"{r['worst']:.2g}"] for r in run["rows"]]
    words = (
        f"`make test-slow`, seed {run['seed']}: {run['configurations']:,} random configurations, "
        "all within what is allowed."
    )
    return words + "\n\n" + table(["compared", "configurations", "worst share of it"], rows)


def environments() -> str:
    source = ast.parse((ROOT / "tests" / "contracts" / "test_environment.py").read_text())
    names = [
        n.name for n in source.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")
    ]
    return "\n".join(f"- {name.removeprefix('test_').replace('_', ' ')}" for name in names)


def fill(text: str, mark: str, content: str) -> str:
    head, begin, rest = text.partition(f"<!-- {mark}: begin -->\n")
    _, end, tail = rest.partition(f"<!-- {mark}: end -->")
    assert begin, f"{PAGE.name} has no place for {mark}"
    assert end, f"{PAGE.name} has no place for {mark}"
    return f"{head}{begin}{content}\n{end}{tail}"


def main() -> None:
    runs: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
        "fuzz": ("fuzz/table.json", fuzz),
        "properties": ("trust/leave_one_out.json", leave_one_out),
        "batches of one": ("trust/batches_of_one.json", batches_of_one),
    }
    text = fill(PAGE.read_text(), "environments", environments())
    for mark, (name, written) in runs.items():
        path = ROOT / "out" / name
        if path.exists():
            text = fill(text, mark, written(json.loads(path.read_text())))
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
