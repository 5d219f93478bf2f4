"""The pictures and tables of docs/benchmarks/examples.md: `python benchmarks/gallery.py NAME
[ARGUMENT …] [--out docs/figures]`.

Runs benchmarks/example_NAME.py with its arguments, keeps what it prints, and draws the table that
it ends with.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

HERE = Path(__file__).parent
ROW = re.compile(r"^(\S.*?)\s{2,}([\d.]+) (% )?± ([\d.]+)", flags=re.MULTILINE)


def draw(shown: str, path: Path) -> None:
    """Points with their standard errors, attention in a colour of its own.

    The axis does not begin at zero: the differences are what there is to see.
    """
    rows = [(name, float(score), float(error)) for name, score, _, error in ROW.findall(shown)]
    matplotlib.rcParams["svg.hashsalt"] = path.stem
    figure = Figure(figsize=(6.4, 0.5 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, (name, score, error) in enumerate(reversed(rows)):
        colour = "#e45756" if name.startswith("attention") else "#9aa5b1"
        axes.errorbar(score, place, xerr=error, fmt="o", color=colour, capsize=3)
        axes.annotate(
            f"  {score:g}", (score + error, place), va="center", color="#57606a", fontsize=9
        )
    axes.margins(x=0.15, y=0.25)
    axes.grid(axis="x", color="#d0d7de", lw=0.5)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in reversed(rows)])
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors="#57606a")
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"))
    args = parser.parse_args()
    command = [sys.executable, str(HERE / f"example_{args.name}.py"), *args.arguments]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(shown)
    (args.out / f"example-{args.name}.txt").write_text(shown)
    draw(shown, args.out / f"example-{args.name}.svg")


if __name__ == "__main__":
    main()
