"""Full covariance by the average outer product of gradients:
`python benchmarks/agop.py --data DIR --out FILE`.

Recursive feature machines give the noise of heads W = U + A G B the metrics A² ∝ Σ ∇f ∇fᵀ in the
queries, and B² in the keys, f being the ridge fit with the last metrics: diagonal, or full. Errors,
in units of the variance, are those of the fifth of the training stories that is held out; multiples
of the scale are chosen by leave-one-out.
"""

from __future__ import annotations

import argparse
import csv
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from real import BABI, babi

import keyhole as kh
from keyhole.attention.descent import DescentSettings, HostSamples
from keyhole.attention.features import FeatureTrace
from keyhole.attention.head_error import Task, held_out_parts, judge, ridge_values
from keyhole.attention.heads import head_normals
from keyhole.attention.search import choose_identity

N_HEADS, ROUNDS, FACTORS = 64, 3, (0.3, 1.0, 3.0)


def outer_products(task: Task, heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Σ ∇f ∇fᵀ over samples and outputs, in the queries and, through the scores, in the keys."""
    trace = FeatureTrace.of(task.batch.sets, heads, task.activation)
    features = trace.features()
    features -= features.mean(axis=0)
    outcomes = task.outcomes(np.arange(len(task)))
    dual, *_ = ridge_values(features @ features.T, outcomes, None)
    values = (features.T @ dual).astype(np.float32).T.reshape(-1, *heads.shape[::2])
    projected = (trace.queries @ trace.wide).reshape(len(task), *heads.shape[::2])
    of_query, of_key = np.zeros(2 * heads.shape[1:2]), np.zeros(2 * heads.shape[2:])
    for own in values:
        for (rows, keys), weights in zip(trace.stacks, trace.scores, strict=True):
            slopes = np.einsum("me,bke->bmk", own, keys)
            slopes = weights * (slopes - (weights * slopes).sum(axis=2, keepdims=True))
            in_keys = (slopes.transpose(0, 2, 1) @ projected[rows]).reshape(-1, heads.shape[2])
            in_query = np.einsum("bme,mfe->bf", slopes @ keys, heads, optimize=True)
            of_key += in_keys.T @ in_keys
            of_query += in_query.T @ in_query
    return of_query, of_key


def root(metric: np.ndarray, *, diagonal: bool) -> np.ndarray:
    """The square root, of mean square 1 on the diagonal of its square."""
    found, turn = np.linalg.eigh(np.diag(np.diag(metric)) if diagonal else metric)
    half = (turn * np.sqrt(np.maximum(found, 0))) @ turn.T
    return half * np.sqrt(len(half) / np.square(half).sum())


def trial(data: Path, name: str, seed: int) -> list[list[Any]]:
    """Rows (task, seed, head distribution, rounds, leave-one-out error, held-out error)."""
    problem = babi(data, name)
    train, _ = next(problem.splits(0))
    y, groups = problem.y[train], problem.groups[train]
    columns = np.where(y[:, None] == np.unique(y), 1.0, -1.0)
    (held,) = held_out_parts(len(train), 0.2, 100 + seed, groups)
    whole = Task.of(problem.X[train].astype("float32"), columns, None, "softmax", True, groups)
    seen, unseen = whole.take(np.flatnonzero(~held)), whole.take(np.flatnonzero(held))
    noise = head_normals(N_HEADS, seen.batch.dim, seed, seen.batch.query_dim).astype(np.float32)
    rows = []

    def judged(
        distribution: Any, what: str, rounds: int, left: np.ndarray | None = None, right: Any = None
    ) -> np.ndarray:
        best = None
        for factor in (1.0,) if distribution.query_scales_ is not None else FACTORS:
            drawn = (
                noise
                if left is None
                else np.einsum("ij,mjk,kl->mil", left, noise, right, optimize=True)
            )
            heads = distribution.around(factor * drawn).astype(np.float32)
            found = judge(seen, distribution, N_HEADS, seed, unseen, heads=heads)
            if best is None or found.loo.mean() < best[0].loo.mean():
                best = found, heads
        rows.append(
            [
                name,
                seed,
                what,
                rounds,
                f"{best[0].loo.mean():.4f}",
                f"{best[0].held_out.mean():.4f}",
            ]
        )
        return best[1]

    few = seen.drawn(np.arange(len(seen)), 400, seed)
    identity = choose_identity(
        HostSamples(seen), few, [0.0, 1.0, 3.0], [0.5, 0.25, 0.1], N_HEADS, seed
    )
    given = {"activation": "softmax", "groups": seen.groups, "seed": seed, "n_heads": N_HEADS}
    means, scales = (
        kh.LearnedHeads(hops=1)
        .learn(
            seen.batch,
            seen.columns,
            settings=DescentSettings(learn_scales=learn_scales),
            **given,
        )
        .heads
        for learn_scales in (False, True)
    )
    judged(scales, "means and scales learned", 0)
    for distribution, what in ((identity, "nothing learned"), (means, "means learned")):
        start = judged(distribution, what, 0)
        for kind in ("diagonal", "full"):
            heads = start
            for rounds in range(1, ROUNDS + 1):
                metrics = [
                    root(metric, diagonal=kind == "diagonal")
                    for metric in outer_products(seen, heads)
                ]
                heads = judged(distribution, f"{what}, {kind} metric", rounds, *metrics)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("KEYHOLE_DATA"))
    parser.add_argument(
        "--only", nargs="+", default=["qa01", *BABI[4:]], choices=BABI, metavar="NAME"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with (
        args.out.open("w", newline="") as file,
        ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool,
    ):
        writer = csv.writer(file)
        writer.writerow(["data", "seed", "heads", "rounds", "leave-one-out", "held out"])
        jobs = [(args.data, name, seed) for seed in range(args.seeds) for name in args.only]
        for rows in pool.map(trial, *zip(*jobs, strict=True)):
            writer.writerows(rows)
            file.flush()
            print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
