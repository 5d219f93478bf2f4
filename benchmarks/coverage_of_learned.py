"""How often intervals, and sets of labels, of learned heads hold the outcome.

    python benchmarks/coverage_of_learned.py
    python benchmarks/coverage_of_learned.py --leave-one-out --tasks position two-hops

The tasks of the literature (`kh.targets.TASKS`), noise of a tenth of the variance, nominal coverage
90 %. Beside the share that is inside stands the ratio of ``loo_error_`` to the error of new
samples: 1 is honest. With ``--leave-one-out`` the learned heads are fitted anew as if they had been
given: what intervals would be if a sample were left out of the values and not out of the heads.
"""

from __future__ import annotations

import argparse

import numpy as np

import keyhole as kh

N_TRAIN = {"position": 150, "two-hops": 250}
"""Training samples, where they are not `USUAL_N_TRAIN`: the sizes at which too few were inside
while intervals came from leave-one-out errors."""

USUAL_N_TRAIN = 300
N_TEST = 1000


def coverage(name: str, draw: int, leave_one_out: bool) -> tuple[float, float, bool]:
    """The share of new outcomes inside, the ratio of errors, and whether heads were learned."""
    task = kh.targets.TASKS[name]
    n = N_TRAIN.get(name, USUAL_N_TRAIN)
    sets, y = task.draw(n + N_TEST, seed=draw)
    noise = np.random.default_rng([1, draw]).standard_normal(len(y))
    y = y + np.sqrt(0.1 * y.var()) * noise
    train, test = np.arange(n), np.arange(n, n + N_TEST)
    model = kh.AttentionRegressor(
        256, kh.LearnedHeads(), activation="softmax", scaling="none", random_state=draw
    )
    model.fit(sets[train], y[train])
    is_learned = model.heads_.chosen == "learned"
    if leave_one_out:
        model.set_params(heads=model.heads_)
        model.fit(sets[train], y[train])
    low, high = model.predict_interval(sets[test], 0.9).T
    inside = float(np.mean((low <= y[test]) & (y[test] <= high)))
    new_error = float(np.mean(np.square(y[test] - model.predict(sets[test]))))
    return inside, model.loo_error_ / new_error, is_learned


def main() -> None:
    """Print one row for each task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", default=list(kh.targets.TASKS))
    parser.add_argument("--leave-one-out", action="store_true", help="learned heads as given")
    options = parser.parse_args()
    for name in options.tasks:
        rows = np.array(
            [coverage(name, draw, options.leave_one_out) for draw in range(options.draws)],
            dtype=float,
        )
        spread = 100 * rows[:, 0].std(ddof=1) / np.sqrt(len(rows)) if len(rows) > 1 else 0.0
        print(
            f"{name}: {100 * rows[:, 0].mean():.1f} ± {spread:.1f} % inside, loo_error_ / new "
            f"error {rows[:, 1].mean():.2f}, learned in {int(rows[:, 2].sum())} of {len(rows)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
