"""Does the lens keep its word? `python benchmarks/lens_honest.py --data DIR [--seeds 8] [--out
FILE.csv]`.

Real data is cut: some sets are given, the rest is hidden. From the given ones the lens forecasts
the error that it would show with twice as many, with an interval of 90 %, and says whether more
data helps. Then as many again are uncovered, and what came is compared with what was said: how many
intervals hold the error that came, and how many "yes" came true, as the lens measures it (folds of
twice the sets), and on sets that nobody had seen where 100 are left. The constants of the forecast
were chosen on tables of scikit-learn, made-up targets, and other cuts of these data.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import keyhole as kh
from keyhole.data import Dataset
from keyhole.lab.lens.choice import make_choice
from keyhole.lab.lens.findings import HeldOutCurve, LensConfig, forecast
from keyhole.lab.lens.fits import (
    Gram,
    held_out_losses,
    learning_curve,
    linear_gram,
    make_gram,
    mlp_gram,
    pooled_numbers,
)
from keyhole.lab.lens.look import WIDTH
from keyhole.lab.lens.problem import LensProblem, make_folds, pose

MOST = 1200  # sets of one data set
MIN_UNSEEN = 100


def read(data: Path, *parts: str) -> Any:
    path = data.joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(
            f"{path.name} is missing: expected it at {path}. Give the folder with --data."
        )
    return np.load(path, allow_pickle=False)


def bags(*parts: str) -> Callable[[Path], Dataset]:
    def load(data: Path) -> Dataset:
        file = read(data, *parts)
        return Dataset(kh.SetBatch(np.split(file["X"].astype(float), file["ptr"][1:-1])), file["y"])

    return load


def atoms(data: Path) -> Dataset:
    file = read(data, "qm7", "qm7.npz")
    kinds = file["X"][:, :1] == np.unique(file["X"][:, 0])
    tokens = np.column_stack([kinds, file["X"][:, 1:]]).astype(float)
    return Dataset(kh.SetBatch(np.split(tokens, file["ptr"][1:-1])), file["y"])


def stories(data: Path) -> Dataset:
    file = read(data, "babi", "qa01.npz")
    table = file["sentence_table"]
    words = np.zeros((len(table), int(table.max()) + 1))
    np.put_along_axis(words, table.astype(int), 1.0, axis=1)
    keys = [words[story, 1:] for story in np.split(file["X_sent"], file["ptr"][1:-1])]
    return Dataset(
        kh.SetBatch(kh.tokens.with_ages(keys, 4), words[file["query_sent"], 1:]), file["y"]
    )


DATA: dict[str, tuple[Callable[[Path], Dataset], str, tuple[int, ...]]] = {
    "musk1": (bags("musk1", "musk1.npz"), "classification", (40, 43, 46)),
    "elephant": (bags("elephant", "elephant.npz"), "classification", (50, 70, 100)),
    "japanese_vowels": (
        bags("japanese_vowels", "JapaneseVowels.npz"),
        "classification",
        (60, 120, 240),
    ),
    "digits": (lambda _: kh.datasets.load_data("digits"), "classification", (60, 130, 300, 500)),
    "qm7": (atoms, "regression", (60, 130, 300, 500)),
    "babi qa01": (stories, "classification", (60, 130, 300, 500)),
}


def grams(problem: LensProblem, config: LensConfig) -> dict[str, Gram]:
    """An attention layer of infinitely many heads, and two learners on pooled input."""
    rule = make_choice(problem, config).rule
    numbers = [
        pooled_numbers(problem.sets, statistics=many, pooling="mean") for many in (False, True)
    ]
    return {
        "zero-mean attention, infinite heads": make_gram(
            rule.apply(problem.sets), kh.GaussianHeads(), math.inf, config
        ),
        "mean pool, ridge": linear_gram(numbers[0]),
        "pooled statistics, MLP": mlp_gram(numbers[1], WIDTH, 0),
    }


def part_of(gram: Gram, problem: LensProblem, rows: np.ndarray) -> tuple[Gram, LensProblem]:
    labels = None if problem.labels is None else problem.labels[rows]
    folds, _ = make_folds(len(rows), labels, None, None, None)
    some = replace(problem, columns=problem.columns[rows], labels=labels, folds=folds)
    return Gram(np.ascontiguousarray(gram.matrix[np.ix_(rows, rows)]), gram.rounding), some


def at_the_end(gram: Gram, problem: LensProblem) -> np.ndarray:
    return np.concatenate([held_out_losses(gram, problem, *fold) for fold in problem.folds])


def tries(name: str, data: Path, seeds: int) -> Iterator[dict[str, Any]]:
    load, kind, sizes = DATA[name]
    config = LensConfig(kind)
    problem = pose(load(data), kind, MOST, 0)
    for learner, gram in grams(problem, config).items():
        for n, seed in ((n, seed) for n in sizes for seed in range(seeds)):
            rows = np.random.default_rng([seed, n, 15]).permutation(len(problem))
            began = time.perf_counter()
            given = part_of(gram, problem, rows[:n])
            smaller, losses = learning_curve(*given, seed)
            curve = (*losses, at_the_end(*given))
            said = forecast(
                HeldOutCurve(learner, "", (*smaller, given[1].trained_on(n)), curve), seed
            )
            seconds = time.perf_counter() - began
            assert said is not None
            came = float(at_the_end(*part_of(gram, problem, rows[: 2 * n])).mean())
            unseen = rows[2 * n :]
            found = {"now": math.nan, "later": math.nan}
            if len(unseen) >= MIN_UNSEEN:
                for when, size in (("now", n), ("later", 2 * n)):
                    found[when] = float(held_out_losses(gram, problem, rows[:size], unseen).mean())
            yield {
                "data": name,
                "learner": learner,
                "n": n,
                "seed": seed,
                "now": said.now,
                "low": said.low,
                "middle": said.middle,
                "high": said.high,
                "says": said.says,
                "came": came,
                "unseen_now": found["now"],
                "unseen_later": found["later"],
                "seconds": round(seconds, 3),
            }


def report(rows: list[dict[str, Any]]) -> str:
    lines = [
        (
            "| data | forecasts | 90 % intervals that held | said yes | yes came true | on unseen "
            "sets | seconds each |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for name in (*dict.fromkeys(row["data"] for row in rows), "all"):
        some = [row for row in rows if name in (row["data"], "all")]
        held = [row["low"] <= row["came"] <= row["high"] for row in some]
        yes = [row for row in some if row["says"] == "yes"]
        true = [row["came"] < row["now"] for row in yes]
        fresh = [
            row["unseen_later"] < row["unseen_now"]
            for row in yes
            if not math.isnan(row["unseen_now"])
        ]
        share = f"{100 * np.mean(held):.1f} %"
        seconds = np.median([row["seconds"] for row in some])
        counts = f"{sum(true)} of {len(true)} | {sum(fresh)} of {len(fresh)}"
        lines.append(f"| {name} | {len(some)} | {share} | {len(yes)} | {counts} | {seconds:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("KEYHOLE_DATA", ".")))
    parser.add_argument("--only", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.only:
        began = time.perf_counter()
        rows += tries(name, args.data, args.seeds)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        if args.out is not None:
            with args.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
    print(report(rows))


if __name__ == "__main__":
    main()
