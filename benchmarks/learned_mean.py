"""What a learned head distribution looks like: `python benchmarks/learned_mean.py --data DIR --out
docs/figures/learned_qa01`.

Fits the head distribution of bAbI qa01 on plain bags of words (no parts of the token that compare
it with the question), prints its strongest query–key pairs by name, and draws the mean and the
held-out error along the descent.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
from real import babi

import keyhole as kh
from keyhole.lab.report.document import HeatMap
from keyhole.lab.report.html import write_chart

SHOWN = 30
"""Coordinates shown on either side, those with the largest entries, in their order."""


def draw(mean: np.ndarray, names: list[str], path: Path, title: str) -> list[Path]:
    labels = [*names, "1"]
    rows, columns = (
        np.sort(np.argsort(-np.abs(mean).max(axis=axis), kind="stable")[:SHOWN]) for axis in (1, 0)
    )
    keys, queries = [labels[i] for i in columns], [labels[i] for i in rows]
    block = HeatMap(
        path.stem,
        title,
        "key",
        "query",
        keys,
        queries,
        mean[np.ix_(rows, columns)].tolist(),
        centre=0.0,
    )
    return write_chart(block, path.parent)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("KEYHOLE_DATA"), required=False)
    parser.add_argument("--task", default="qa01 softmax")
    parser.add_argument("--out", type=Path, default=Path("out/learned_qa01"))
    args = parser.parse_args()
    problem = babi(Path(args.data), args.task)
    train, test = next(problem.splits(0))
    model = kh.AttentionClassifier(
        256,
        kh.LearnedHeads(hops=1),
        activation="softmax",
        random_state=0,
        dtype="float32",
        scaling="none",
        query="given",
        criterion="squared_error",
        pooling="mean",
    )
    began = time.perf_counter()
    model.fit(problem.X[train], problem.y[train], groups=problem.groups[train])
    print(
        f"{time.perf_counter() - began:.1f} s; test accuracy "
        f"{model.score(problem.X[test], problem.y[test]):.3f}"
    )
    print(
        f"{model.layer_.heads.chosen} in {model.layer_.heads.steps} steps: "
        f"{model.layer_.heads.reason}"
    )
    for query, key, entry in model.heads_.strongest_pairs(problem.names, 12):
        print(f"  {query:12} → {key:12} {entry:6.2f}")
    for step in model.heads_.history:
        print(
            f"  step {step.step:4d}  leave-one-out {step.loo_error:.3f}  held out "
            f"{step.held_out_error:.3f}"
        )
    written = draw(
        model.heads_.means_[0], problem.names, args.out, f"The learned mean of bAbI {args.task}"
    )
    np.savetxt(args.out.with_suffix(".csv"), model.heads_.means_[0], delimiter=",", fmt="%.4f")
    print("wrote", ", ".join(str(path) for path in written))


if __name__ == "__main__":
    main()
