"""What the working set of the norm ball buys: a fit on the groups that matter against one on all.

    python benchmarks/ball_working_set.py [n] [heads]

Both fits minimise the same loss over the same ball, from zero, until the relative duality gap is
1e-3. A memory budget of 0 for the solver's copy leaves it no working set: every product is then
taken with all groups. CPU seconds, the best of three runs taken in turns. "in memory" is a design
that is an array, "streamed" one whose features are computed again for every product.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np

import keyhole as kh
from keyhole._array import MEMORY_BUDGET
from keyhole.ball.design import DenseDesign, StreamedDesign
from keyhole.ball.norm_ball import BallSetup
from keyhole.ball.projection import NormBall

DIM = 8
N_KEYS = 10
GROUP_RADIUS = 30.0
DELTA = 0.05
TOL = 1e-3
REPEATS = 3


def targets_of(sets: kh.SetBatch, loss: str) -> np.ndarray:
    """A correlation of unit variance with heavy-tailed noise, or its sign for losses of labels."""
    signal = kh.targets.Correlation(1, DIM)(sets)
    noise = 0.3 * np.random.default_rng(1).standard_t(3, len(sets))
    y = signal / signal.std() + noise
    if loss in ("logistic", "hinge"):
        return np.where(y > np.median(y), 1.0, -1.0)[:, None]
    return y[:, None]


def fit_seconds(setup: BallSetup, n_heads: int) -> tuple[float, str]:
    """CPU seconds of one fit at the radii of the theory's ratio, and what it reached."""
    ball = NormBall(GROUP_RADIUS, GROUP_RADIUS / np.sqrt(DELTA * n_heads))
    start = time.process_time()
    solution = setup.minimise(ball, setup.zeros, TOL, 20_000)
    seconds = time.process_time() - start
    active = int(solution.values.reshape(n_heads, -1).any(axis=1).sum())
    return seconds, f"{active} of {n_heads} heads active, gap {solution.relative_gap:.0e}"


def compare(name: str, setup: BallSetup, n_heads: int) -> None:
    """Print one row: seconds with the working set, seconds without, their ratio."""
    variants = {"with": setup, "without": replace(setup, memory_budget=0)}
    best = dict.fromkeys(variants, np.inf)
    note = ""
    for _ in range(REPEATS):
        for variant, problem in variants.items():
            seconds, note = fit_seconds(problem, n_heads)
            best[variant] = min(best[variant], seconds)
    ratio = best["without"] / best["with"]
    print(
        f"{name:24}{best['with']:8.2f} s{best['without']:8.2f} s{ratio:7.1f}×  {note}",
        flush=True,
    )


def main(n: int, n_heads: int) -> None:
    """One row per loss for a design in memory, and one for a streamed design."""
    sets = kh.targets.sphere_sets(n, n_keys=N_KEYS, dim=DIM, seed=0)
    heads = kh.GaussianHeads().sample(n_heads, DIM, 0)

    def columns(groups: np.ndarray) -> np.ndarray:
        return kh.attention_features(sets, heads[groups]) * np.sqrt(len(groups))

    in_memory = DenseDesign(columns(np.arange(n_heads)), DIM + 1)
    streamed = StreamedDesign(columns, n, n_heads, DIM + 1)
    cases = [("in memory", in_memory, loss) for loss in ("huber", "logistic", "absolute", "hinge")]
    cases += [("streamed", streamed, "logistic")]
    print(f"n = {n}, M = {n_heads}, d = {DIM}, group radius {GROUP_RADIUS:g}")
    for place, design, loss in cases:
        setup = BallSetup(
            design=design,
            targets=targets_of(sets, loss),
            weights=np.full(n, 1 / n),
            loss=loss,
            group_size=DIM + 1,
            fit_intercept=True,
            dtype=np.dtype(np.float64),
            memory_budget=MEMORY_BUDGET,
        )
        compare(f"{loss}, {place}", setup, n_heads)


if __name__ == "__main__":
    n_samples = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    main(n_samples, int(sys.argv[2]) if len(sys.argv) > 2 else 500)
