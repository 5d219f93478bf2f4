"""The pictures and tables of docs/benchmarks/gallery.md: `python benchmarks/gallery.py NAME
[ARGUMENT …] [--out docs/figures]`.

Runs examples/NAME.py with its arguments, keeps what it prints, and draws the table it ends with.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

EXAMPLES = Path(__file__).parents[1] / "examples"
ROW = re.compile(r"^(\S.*?)\s{2,}([\d.]+) (% )?± ([\d.]+)", flags=re.MULTILINE)


def draw(shown: str, path: Path) -> None:
    """Bars with their standard errors, attention in a colour of its own."""
    rows = [(name, float(score), float(error)) for name, score, _, error in ROW.findall(shown)]
    matplotlib.rcParams["svg.hashsalt"] = path.stem
    figure = Figure(figsize=(6.4, 0.5 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, (name, score, error) in enumerate(reversed(rows)):
        colour = "#e45756" if name.startswith("attention") else "#9aa5b1"
        axes.barh(
            place, score, xerr=error, color=colour, height=0.62, error_kw={"ecolor": "#57606a"}
        )
        axes.annotate(
            f" {score:g}", (score + error, place), va="center", color="#57606a", fontsize=9
        )
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
    command = [sys.executable, str(EXAMPLES / f"{args.name}.py"), *args.arguments]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(shown)
    (args.out / f"example-{args.name}.txt").write_text(shown)
    draw(shown, args.out / f"example-{args.name}.svg")


if __name__ == "__main__":
    main()
