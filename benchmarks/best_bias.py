"""Which mean c of the heads needs fewest samples, over the power q of f_{2,q} and the dimension:
theory only.

    PYTHONPATH=src python benchmarks/best_bias.py --out docs/figures

Prints the table of docs/reference/formulas.md (samples for a tenth of Var f*, the fewest of each
row marked) and draws it: samples needed over c, one curve for every q, one panel for every
dimension. Means beyond 3 are tried one by one while the largest is the best; a row whose best mean
is the largest that theory computes is marked as ending at the edge. Writes best_bias.csv and
best_bias.svg.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import keyhole as kh
from keyhole.lab.cells import target_variance
from keyhole.theory import samples_needed
from keyhole.theory.targets import Correlation

SETS = ((4, 8), (8, 8), (16, 16), (64, 16), (512, 64))
FIRST_MEANS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
FURTHER_MEANS = (4.0, 6.0, 8.0)
MEANS = (*FIRST_MEANS, *FURTHER_MEANS)
POWERS = (1, 2, 3)
LEVEL = 0.1


def needed(dim: int, n_keys: int, q: int) -> list[int]:
    """Samples for the level, by mean; further means while the largest needs the fewest."""
    target = Correlation(q, dim)
    error = LEVEL * target_variance(target, n_keys)
    counts: list[int] = []
    for mean in MEANS:
        is_inside = len(counts) >= len(FIRST_MEANS) and counts[-1] > min(counts)
        if is_inside:
            break
        counts.append(samples_needed(target, n_keys, error, heads=kh.GaussianHeads(mean=mean)))
    return counts


def cell(count: int, counts: list[int]) -> str:
    """One cell of the table: the fewest samples are marked, and an optimum at the edge is named."""
    if count > min(counts):
        return short(count)
    if len(counts) == len(MEANS) and count == counts[-1]:
        return f"**{short(count)}** (edge)"
    return f"**{short(count)}**"


def short(number: int) -> str:
    return (
        f"{float(f'{number:.2g}'):.0f}"
        if number < 1000
        else f"{number:.1e}".replace("e+0", "e").replace("e+", "e")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/best_bias"))
    parser.add_argument("--settings", type=int, default=len(SETS), help="the first so many of d, N")
    arguments = parser.parse_args()
    folder = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    settings = SETS[: arguments.settings]
    rows = [(dim, n_keys, q, needed(dim, n_keys, q)) for dim, n_keys in settings for q in POWERS]
    print("| d, N | q |", " | ".join(f"c = {c:g}" for c in MEANS), "|")
    print("|---" * (2 + len(MEANS)) + "|")
    for dim, n_keys, q, counts in rows:
        cells = [cell(count, counts) for count in counts]
        cells += ["–"] * (len(MEANS) - len(counts))
        print(f"| {dim}, {n_keys} | {q} |", " | ".join(cells), "|")
    with (folder / "best_bias.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["d", "N", "q", "c", "samples"])
        writer.writerows(
            (d, k, q, c, n) for d, k, q, counts in rows for c, n in zip(MEANS, counts, strict=False)
        )

    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "keyhole"
    from matplotlib import pyplot as plt

    # five panels and a legend in two rows: numbers can be read at the width of a page
    figure, axes = plt.subplots(2, 3, figsize=(9, 5.6), layout="constrained")
    for axis, (dim, n_keys) in zip(axes.flat, SETS, strict=False):
        for d, k, q, counts in rows:
            if (d, k) == (dim, n_keys):
                [line] = axis.semilogy(
                    MEANS[: len(counts)], counts, marker="o", markersize=3, label=f"q = {q}"
                )
                best = counts.index(min(counts))
                axis.plot(
                    MEANS[best], counts[best], marker="*", markersize=11, color=line.get_color()
                )
        axis.set(title=f"d = {dim}, N = {n_keys}", xlabel="mean c")
    for axis in axes[:, 0]:
        axis.set_ylabel("samples for 10 % error")
    axes[-1, -1].axis("off")
    axes[-1, -1].legend(*axes[0, 0].get_legend_handles_labels(), loc="center")
    figure.savefig(folder / "best_bias.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
