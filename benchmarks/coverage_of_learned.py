"""How often intervals of learned heads hold the outcome.

    python benchmarks/coverage_of_learned.py

Four tasks of the literature (`kh.targets`), noise of a tenth of the variance, nominal coverage
90 %. Beside the share that is inside stands the ratio of ``loo_error_`` to the error of new
samples: 1 is honest.
"""

from __future__ import annotations

import argparse

import numpy as np

import keyhole as kh

TASKS = {
    "position and meaning": (kh.targets.PositionAndMeaning(), 150),
    "two hops": (kh.targets.TwoHops(), 250),
    "nearest key": (kh.targets.NearestKey(), 300),
    "maximum": (kh.targets.Maximum(), 300),
}
N_TEST = 1000


def coverage(name: str, draw: int) -> tuple[float, float, bool]:
    """The share of new outcomes inside, the ratio of errors, and whether heads were learned."""
    task, n = TASKS[name]
    sets, y = task.draw(n + N_TEST, seed=draw)
    noise = np.random.default_rng([1, draw]).standard_normal(len(y))
    y = y + np.sqrt(0.1 * y.var()) * noise
    train, test = np.arange(n), np.arange(n, n + N_TEST)
    model = kh.AttentionRegressor(
        256, kh.LearnedHeads(), activation="softmax", scaling="none", random_state=draw
    )
    model.fit(sets[train], y[train])
    low, high = model.predict_interval(sets[test], 0.9).T
    inside = float(np.mean((low <= y[test]) & (y[test] <= high)))
    new_error = float(np.mean(np.square(y[test] - model.predict(sets[test]))))
    return inside, model.loo_error_ / new_error, model.heads_.chosen == "learned"


def main() -> None:
    """Print one row for each task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    options = parser.parse_args()
    for name in options.tasks:
        rows = np.array([coverage(name, draw) for draw in range(options.draws)], dtype=float)
        spread = 100 * rows[:, 0].std(ddof=1) / np.sqrt(len(rows)) if len(rows) > 1 else 0.0
        print(
            f"{name}: {100 * rows[:, 0].mean():.1f} ± {spread:.1f} % inside, loo_error_ / new "
            f"error {rows[:, 1].mean():.2f}, learned in {int(rows[:, 2].sum())} of {len(rows)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
