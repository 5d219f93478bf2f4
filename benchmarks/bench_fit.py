"""Whole fits: making the features included, against scikit-learn on features that are ready;
memory; first use.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial

import harness
import numpy as np

import keyhole as kh

SIZES = {"paper": {"n": 4000, "M": 1000}, "small": {"n": 400, "M": 1000}}
ALPHAS = np.geomspace(1e-4, 1e3, 20)


def run(size: str) -> Iterator[harness.Row]:
    n, n_heads = SIZES[size]["n"], SIZES[size]["M"]
    train = kh.targets.sphere_sets(n, n_keys=16, dim=16, seed=0)
    test = kh.targets.sphere_sets(500, n_keys=16, dim=16, seed=1)
    y = kh.targets.TokenPower(2, 16)(train) + 0.05 * np.random.default_rng(0).standard_normal(n)
    yield from path_rows(train, test, y, n_heads)
    yield from fixed_rows(train, test, y, n_heads)
    if size == "paper":
        yield memory_row()
    else:
        yield from first_use_rows()


def path_rows(
    train: kh.SetBatch, test: kh.SetBatch, y: np.ndarray, n_heads: int
) -> list[harness.Row]:
    """Twenty penalties with leave-one-out."""
    from sklearn.linear_model import RidgeCV

    heads = kh.GaussianHeads().sample(n_heads, 16, 0)
    ready, ready_test = kh.attention_features(train, heads), kh.attention_features(test, heads)
    models = {
        "float64": kh.AttentionRegressor(
            n_heads,
            alpha=ALPHAS,
            random_state=0,
            heads=kh.GaussianHeads(),
            scaling="none",
            query="given",
            activation="relu",
            pooling="mean",
        ),
        "float32": kh.AttentionRegressor(
            n_heads,
            alpha=ALPHAS,
            random_state=0,
            dtype="float32",
            heads=kh.GaussianHeads(),
            scaling="none",
            query="given",
            activation="relu",
            pooling="mean",
        ),
    }
    rival = RidgeCV(alphas=ALPHAS)
    seconds = harness.interleaved_seconds(
        {
            **{name: partial(model.fit, train, y) for name, model in models.items()},
            "RidgeCV": partial(rival.fit, ready, y),
        },
        repeat=2 if len(y) > 1000 else 5,
    )
    expected = rival.predict(ready_test)
    rows = []
    for name, model in models.items():
        error = np.abs(model.predict(test) - expected).max() / np.std(expected)
        assert model.alpha_ == rival.alpha_ or name == "float32", (model.alpha_, rival.alpha_)
        peak = harness.peak_mib(partial(model.fit, train, y))
        rows.append(
            harness.row(
                f"20 penalties, features included, {name}",
                seconds[name],
                seconds["RidgeCV"] / seconds[name],
                peak,
                gram_flops(len(y), ready.shape[1]) / seconds[name] / harness.gemm_rate(name),
                f"alpha {model.alpha_:.3g}; predictions off by {error:.1e} of their spread",
            )
        )
    return [*rows, harness.row("  RidgeCV on ready features, float64", seconds["RidgeCV"])]


def fixed_rows(
    train: kh.SetBatch, test: kh.SetBatch, y: np.ndarray, n_heads: int
) -> list[harness.Row]:
    """One fixed penalty, leave-one-out error included."""
    from sklearn.linear_model import Ridge

    heads = kh.GaussianHeads().sample(n_heads, 16, 0)
    rows = []
    for dtype in ("float64", "float32"):
        ready = kh.attention_features(train, heads, dtype=dtype)
        ready_test = kh.attention_features(test, heads, dtype=dtype)
        model = kh.AttentionRegressor(
            n_heads,
            alpha=1.0,
            random_state=0,
            dtype=dtype,
            heads=kh.GaussianHeads(),
            scaling="none",
            query="given",
            activation="relu",
            pooling="mean",
        )
        rival = Ridge(alpha=1.0)
        target = y.astype(dtype)
        seconds = harness.interleaved_seconds(
            {"ours": partial(model.fit, train, y), "Ridge": partial(rival.fit, ready, target)},
            repeat=3 if len(y) > 1000 else 10,
        )
        error = np.abs(model.predict(test) - rival.predict(ready_test)).max() / np.std(
            model.predict(test)
        )
        assert error < (1e-8 if dtype == "float64" else 1e-2), error
        rows.append(
            harness.row(
                f"one penalty, features included, {dtype}",
                seconds["ours"],
                seconds["Ridge"] / seconds["ours"],
                harness.peak_mib(partial(model.fit, train, y)),
                gram_flops(len(y), ready.shape[1]) / seconds["ours"] / harness.gemm_rate(dtype),
                f"predictions off by {error:.1e} of their spread",
            )
        )
        rows.append(harness.row(f"  Ridge on ready features, {dtype}", seconds["Ridge"]))
    return rows


def gram_flops(n: int, p: int) -> float:
    """Operations no dual solver can do without: half of ΦΦᵀ."""
    return float(n) * n * p


MEMORY = """
import resource, time, numpy as np, keyhole as kh
X = kh.targets.sphere_sets(20_000, n_keys=16, dim=16, seed=0)
y = kh.targets.TokenPower(2, 16)(X)
start = time.perf_counter()
model = kh.AttentionRegressor(2000, alpha=1.0, random_state=0).fit(X, y)
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(seconds, peak, model.solver_, model.loo_error_)
"""


def memory_row() -> harness.Row:
    """A fit whose features alone would take 5.4 GB, in a process of its own."""
    seconds, peak, solver, loo = _python(MEMORY).split()
    note = (
        f"peak resident size of the whole process; Gram matrix 3052 MiB; {solver}, LOO error "
        f"{float(loo):.2e}"
    )
    return harness.row(
        "n = 20,000, M = 2000, one penalty, float64", float(seconds), None, float(peak), None, note
    )


FIRST_USE = """
import time
start = time.perf_counter()
import numpy as np, keyhole as kh
X = kh.targets.sphere_sets(200, n_keys=5, dim=4, seed=0); y = X.query[:, 0]
def fit():
    begin = time.perf_counter()
    kh.AttentionRegressor(32, random_state=0).fit(X, y).predict(X)
    kh.AttentionRegressor(float("inf"), heads=kh.GaussianHeads(mean=1.0)).fit(X, y).predict(X)
    return time.perf_counter() - begin
first = fit(); print(time.perf_counter() - start, first, fit())
"""


def first_use_rows() -> list[harness.Row]:
    """The first fit of a process: on a machine that never ran keyhole, then with compiled loops
    cached.
    """
    with tempfile.TemporaryDirectory() as folder:
        cold = [float(v) for v in _python(FIRST_USE, NUMBA_CACHE_DIR=folder).split()]
        warm = [float(v) for v in _python(FIRST_USE, NUMBA_CACHE_DIR=folder).split()]
    note = "finite and infinite heads, fit and predict; import {:.2f} s on top"
    return [
        harness.row("first fit ever, loops compiled", cold[1], note=note.format(cold[0] - cold[1])),
        harness.row(
            "first fit of a process, loops cached", warm[1], note=note.format(warm[0] - warm[1])
        ),
        harness.row("second fit of that process", warm[2]),
    ]


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    for size in SIZES:
        print(harness.header())
        for result in run(size):
            print(harness.line(result))
