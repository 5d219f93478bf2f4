"""Ridge with leave-one-out on ready features, against scikit-learn's RidgeCV and Ridge in the same
run.

    python benchmarks/bench_ridge.py [paper|small]

Both sides start from the same feature matrix and end with the values v. Ours includes making the
Gram matrix. Rivals take turns with ours and each keeps its best time, so that a busy moment hits
both alike.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import gemm_rate
from sklearn.linear_model import Ridge, RidgeCV

from keyhole.ridge.gram import ridge_gram
from keyhole.solve.matrices import add_outer
from keyhole.ridge.problem import RidgeProblem

SIZES = {"paper": (4000, 1000), "small": (400, 100)}
"""Samples and heads; d = N = 16, so 17 columns per head."""

FIXED = 0.1


def attention_features(
    n: int, n_heads: int, dim: int = 16, n_keys: int = 16
) -> tuple[np.ndarray, np.ndarray]:
    """ReLU attention features in float64 and outputs: what the solver meets in this library."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((n, 1 + n_keys, dim))
    tokens /= np.linalg.norm(tokens, axis=-1, keepdims=True)
    extended = np.concatenate([tokens, np.ones((n, 1 + n_keys, 1))], axis=-1)
    heads = 0.5 * rng.standard_normal((n_heads, dim + 1, dim + 1))
    features = np.empty((n, n_heads, dim + 1))
    for start in range(0, n, 200):
        query, keys = extended[start : start + 200, 0], extended[start : start + 200, 1:]
        directions = np.tensordot(query, heads, axes=(1, 1))
        scores = np.maximum(directions @ keys.transpose(0, 2, 1), 0)
        features[start : start + 200] = scores @ keys / (n_keys * np.sqrt(n_heads))
    overlap = np.einsum("nd,nkd->nk", tokens[:, 0], tokens[:, 1:])
    y = (overlap * tokens[:, 1:, 0]).mean(axis=1) + 0.01 * rng.standard_normal(n)
    return features.reshape(n, -1), y


def path_fit(features: np.ndarray, y: np.ndarray, alphas: np.ndarray) -> dict[str, Any]:
    """Twenty penalties with leave-one-out, Gram matrix included."""
    fit = ridge_gram(_gram(features), RidgeProblem.of(y[:, None], alphas), overwrite_gram=True)
    values = features.T @ fit.coef.astype(features.dtype)
    return {
        "alpha": fit.alpha,
        "values": values[:, 0],
        "loo": fit.left_out[:, 0],
        "loo_mse": fit.errors,
    }


def fixed_fit(features: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """One penalty with leave-one-out, Gram matrix included."""
    fit = ridge_gram(_gram(features), RidgeProblem.of(y[:, None], [FIXED]), overwrite_gram=True)
    values = features.T @ fit.coef.astype(features.dtype)
    return {"values": values[:, 0], "loo": fit.left_out[:, 0], "route": fit.route}


def _gram(features: np.ndarray) -> np.ndarray:
    width, n = 2048, len(features)
    gram = np.zeros((n, n), features.dtype, order="F")
    for start in range(0, features.shape[1], width):
        columns = features[:, start : start + width]
        add_outer(gram, columns - columns.mean(axis=0))
    return gram


def sklearn_path(features: np.ndarray, y: np.ndarray, alphas: np.ndarray) -> dict[str, Any]:
    model = RidgeCV(alphas=alphas, store_cv_results=True).fit(features, y.astype(features.dtype))
    return {"alpha": model.alpha_, "values": model.coef_, "loo_mse": model.cv_results_.mean(axis=0)}


def sklearn_fixed(features: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    return {"values": Ridge(alpha=FIXED).fit(features, y.astype(features.dtype)).coef_}


def peak_rss_of(call: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], float, float]:
    """Result, seconds, and MiB by which the resident size rose above where it stood
    (NaN off Linux).
    """
    try:
        with open("/proc/self/clear_refs", "w") as handle:
            handle.write("5")  # resets the high-water mark
        before = _status("VmRSS")
    except OSError:
        before = float("nan")
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    return result, seconds, (_status("VmHWM") - before if before == before else before)


def _status(key: str) -> float:
    with open("/proc/self/status") as handle:
        return next(int(line.split()[1]) / 1024 for line in handle if line.startswith(key))


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def run(size: str = "paper", repeats: int | None = None) -> list[dict[str, Any]]:
    """Rows with keys name, seconds, ratio (rival over ours), peak_mib, ceiling_share, note."""
    n, n_heads = SIZES[size]
    repeats = repeats or (2 if size == "paper" else 5)
    double, y = attention_features(n, n_heads)
    single = double.astype(np.float32)
    p = double.shape[1]
    alphas = np.geomspace(1e-4, 1e3, 20)
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "path float64": lambda: path_fit(double, y, alphas),
        "RidgeCV float64": lambda: sklearn_path(double, y, alphas),
        "path float32": lambda: path_fit(single, y, alphas),
        "RidgeCV float32": lambda: sklearn_path(single, y, alphas),
        "fixed float64": lambda: fixed_fit(double, y),
        "Ridge float64": lambda: sklearn_fixed(double, y),
        "fixed float32": lambda: fixed_fit(single, y),
        "Ridge float32": lambda: sklearn_fixed(single, y),
    }
    seconds = dict.fromkeys(calls, float("inf"))
    peak = dict.fromkeys(calls, 0.0)
    results: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        for name, call in calls.items():
            results[name], took, rise = peak_rss_of(call)
            seconds[name], peak[name] = min(seconds[name], took), max(peak[name], rise)
    notes = agreement(results)
    ceiling = {"float64": gemm_rate("float64"), "float32": gemm_rate("float32")}
    work = {"path": n * n * p + 8 * n**3 / 3, "fixed": n * n * p + 2 * n**3 / 3}
    rival = {"path": "RidgeCV float64", "fixed": "Ridge"}
    rows = []
    for name in calls:
        kind, dtype = name.split()
        row = {
            "name": f"ridge {name} n={n} p={p}",
            "seconds": seconds[name],
            "peak_mib": peak[name],
        }
        if kind in rival:
            other = rival[kind] if kind == "path" else f"Ridge {dtype}"
            row |= {
                "ratio": seconds[other] / seconds[name],
                "ceiling_share": work[kind] / seconds[name] / ceiling[dtype],
                "note": f"rival {other}; {notes[name]}",
            }
        else:
            row |= {
                "ratio": 1.0,
                "ceiling_share": float("nan"),
                "note": "rival on the ready features",
            }
        rows.append(row)
    return rows


def agreement(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Check every result against scikit-learn's in float64, and say how far each is off."""
    notes = {}
    wanted, fixed = results["RidgeCV float64"], results["Ridge float64"]
    for name in ("path float64", "path float32"):
        ours, allowed = results[name], (1e-8 if name.endswith("64") else 1e-2)
        assert ours["alpha"] == wanted["alpha"], (name, ours["alpha"], wanted["alpha"])
        off_loo = float(np.abs(ours["loo_mse"] / wanted["loo_mse"] - 1).max())
        off = relative(ours["values"], wanted["values"])
        assert max(off_loo, off) < allowed, (name, off_loo, off)
        notes[name] = (
            f"alpha {ours['alpha']:.2g}; off: values {off:.1e}, leave-one-out errors {off_loo:.1e}"
        )
    for name in ("fixed float64", "fixed float32"):
        ours, allowed = results[name], (1e-8 if name.endswith("64") else 1e-2)
        off = relative(ours["values"], fixed["values"])
        off_loo = relative(ours["loo"], results["fixed float64"]["loo"])
        assert max(off, off_loo) < allowed, (name, off, off_loo)
        assert ours["route"] == "cholesky"
        notes[name] = f"alpha {FIXED}; off: values {off:.1e}; leave-one-out included"
    return notes


if __name__ == "__main__":
    for row in run(sys.argv[1] if len(sys.argv) > 1 else "paper"):
        share = f"{100 * row['ceiling_share']:4.0f} % of GEMM"
        print(f"{row['name']:36s} {row['seconds']:8.3f} s  ratio {row['ratio']:5.2f}", end="  ")
        print(f"{row['peak_mib']:7.0f} MiB  {share}  {row['note']}")
