"""Sets that occur many times: default fits on discrete data, with and without `groups=`.

    python benchmarks/duplicates.py

A sample is a row, so that groups of one sample each must change nothing. Leave-one-out of data in
which most sets are there many times must say what new samples lose.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
from sklearn.metrics import log_loss

import keyhole as kh


def draw_token(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One binary number; the label is 1 with probability .8 or .2."""
    x = rng.integers(0, 2, (n, 1, 1)).astype(float)
    probability = np.where(x[:, 0, 0] > 0, 0.8, 0.2)
    return x, (rng.random(n) < probability).astype(int)


def draw_columns(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Four binary columns as one row; two of them move the log-odds."""
    x = rng.integers(0, 2, (n, 1, 4)).astype(float)
    log_odds = 2.0 * x[:, 0, 0] - 3.0 * x[:, 0, 1] + 0.5
    return x, (rng.random(n) < 1.0 / (1.0 + np.exp(-log_odds))).astype(int)


def draw_baskets(n: int, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """One to three of four items; the label depends on the first two."""
    baskets = []
    labels = []
    for _ in range(n):
        items = rng.choice(4, size=rng.integers(1, 4), replace=False)
        log_odds = 2.0 * (0 in items) - 2.5 * (1 in items) + 0.3
        baskets.append(np.eye(4)[items])
        labels.append(int(rng.random() < 1.0 / (1.0 + np.exp(-log_odds))))
    return baskets, np.array(labels)


DATA = {"token": draw_token, "columns": draw_columns, "baskets": draw_baskets}


def main() -> None:
    """Print one row for each kind of data, size and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[400, 2000])
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()

    print("data      n     seed  test   with groups  reported")
    for name, n, seed in itertools.product(DATA, options.sizes, range(options.seeds)):
        rng = np.random.default_rng(seed)
        x, y = DATA[name](n, rng)
        x_test, y_test = DATA[name](20_000, rng)
        model = kh.AttentionClassifier(random_state=0).fit(x, y)
        grouped = kh.AttentionClassifier(random_state=0).fit(x, y, groups=np.arange(n))
        loss = log_loss(y_test, model.predict_proba(x_test))
        loss_of_grouped = log_loss(y_test, grouped.predict_proba(x_test))
        row = f"{name:8}  {n:<5} {seed:<4}  {loss:.4f} {loss_of_grouped:.4f}"
        print(f"{row}       {model.held_out_loss_:.4f}", flush=True)


if __name__ == "__main__":
    main()
