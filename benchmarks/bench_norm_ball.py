"""Convex losses over the norm ball: against CVXPY and plain projected gradient.

    python benchmarks/bench_norm_ball.py [paper|small]

Every contestant gets the same features and the same target accuracy, a relative duality gap of
1e-4; what each reached is checked in the same run against a solution of gap 1e-8. CVXPY runs in a
process of its own with a limit of 12 GiB, and it and plain projected gradient with one of 90 s
(60 s for small); where they run out, the ratio is a lower bound, and the note says so.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from keyhole._array import MEMORY_BUDGET
from keyhole.ball.design import DenseDesign
from keyhole.ball.losses import LOSSES
from keyhole.ball.norm_ball import BallSetup
from keyhole.ball.projection import NormBall, group_norms
from keyhole.ball.risk import BallRisk

SIZES = {
    "paper": {"n": 2000, "repeat": 3, "limit": 90},
    "small": {"n": 200, "repeat": 5, "limit": 60},
}
N_HEADS, DIM, N_KEYS = 500, 16, 16
WIDTH = DIM + 1
TOL = 1e-4
RADII = {"both constraints bind": (30.0, 3.0), "only the group norm binds": (30.0, math.inf)}

MEMORY_LIMIT = 12 * 2**30


def attention_problem(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Features of random attention heads in the paper's scaling, and a target of heavy-tailed
    noise.

    Tokens uniform on the sphere, heads N(0, 1/4), target (1/N) Σ <β, x_i>² brought to unit
    variance, plus Student noise with 3 degrees of freedom: some residuals lie beyond Huber's
    corner.
    """
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((n, 1 + N_KEYS, DIM))
    tokens /= np.linalg.norm(tokens, axis=-1, keepdims=True)
    extended = np.concatenate([tokens, np.ones((n, 1 + N_KEYS, 1))], axis=-1)
    heads = 0.5 * rng.standard_normal((N_HEADS, WIDTH, WIDTH))
    features = np.empty((n, N_HEADS, WIDTH))
    for start in range(0, n, 200):
        query, keys = extended[start : start + 200, 0], extended[start : start + 200, 1:]
        scores = np.maximum(np.tensordot(query, heads, axes=(1, 1)) @ keys.transpose(0, 2, 1), 0)
        features[start : start + 200] = scores @ keys / N_KEYS
    clean = np.square(tokens[:, 1:, 0]).mean(axis=1)
    targets = (clean - clean.mean()) / clean.std() + 0.3 * rng.standard_t(3, n)
    return features.reshape(n, -1), targets


def projected_gradient(
    design: np.ndarray, targets: np.ndarray, radii: tuple[float, float], limit: float
) -> dict[str, Any]:
    """Projected gradient with the fixed step 1/L: no momentum, no restarts, no working set.

    It shares our losses, projection, best intercept and dual bound, so that only the iteration is
    compared.
    """
    n, p = design.shape
    problem = BallRisk(
        targets[:, None], np.full(n, 1 / n), LOSSES["huber"], NormBall(*radii), WIDTH, True
    )
    probe = np.random.default_rng(0).standard_normal(p)
    for _ in range(30):  # power iteration on the centred columns
        image = design @ (probe / np.linalg.norm(probe))
        image -= image.mean()
        probe = design.T @ image / n
    step = 1 / (1.02 * np.linalg.norm(probe))
    values, intercept = np.zeros((p, 1)), np.zeros(1)
    bound, start, n_iter = -math.inf, time.perf_counter(), 0
    while True:
        predictions = (design @ values[:, 0])[:, None]
        intercept, dual = problem.settle(predictions, intercept)
        gradient = (design.T @ (dual[:, 0] / n))[:, None]
        if n_iter % 5 == 0:
            objective = problem.primal(predictions, intercept)
            bound = max(
                bound,
                problem.dual(problem.feasible(dual), group_norms(gradient.reshape(-1, WIDTH))),
            )
            gap = (objective - bound) / objective
            if gap <= TOL or time.perf_counter() - start > limit:
                return {"objective": objective, "gap": gap, "n_iter": n_iter}
        moved = problem.ball.project((values - step * gradient).reshape(-1, WIDTH))
        values = moved.reshape(p, 1)
        n_iter += 1


CVXPY = """
import json, resource, sys, time
import cvxpy as cp, numpy as np
spec = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (spec["memory"], spec["memory"]))
features, targets = np.load(spec["features"]), np.load(spec["targets"])
n, p = features.shape
start = time.perf_counter()
values, intercept = cp.Variable((p // spec["width"], spec["width"])), cp.Variable()
residual = features @ cp.vec(values, order="C") + intercept - targets
limits = [cp.sum(cp.norm(values, 2, axis=1)) <= spec["group_radius"]]
if spec["ball_radius"] < 1e300:
    limits.append(cp.norm(values, "fro") <= spec["ball_radius"])
problem = cp.Problem(cp.Minimize(cp.sum(cp.huber(residual, 1)) / (2 * n)), limits)
accuracy = {
    "CLARABEL": {"tol_gap_rel": 1e-4, "tol_gap_abs": 1e-5, "tol_feas": 1e-6},
    "SCS": {"eps_rel": 1e-4, "eps_abs": 1e-5},
}[spec["solver"]]
problem.solve(solver=spec["solver"], **accuracy)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "value": float(problem.value), "peak": peak}))
"""


def cvxpy_fit(
    folder: Path, solver: str, radii: tuple[float, float], limit: float
) -> tuple[dict[str, float] | None, str]:
    """CVXPY's time, objective and peak memory, or None and what stopped it."""
    spec = {
        "features": str(folder / "features.npy"),
        "targets": str(folder / "targets.npy"),
        "width": WIDTH,
        "group_radius": radii[0],
        "ball_radius": min(radii[1], 1e301),
        "solver": solver,
        "memory": MEMORY_LIMIT,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", CVXPY, json.dumps(spec)],
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"stopped after {limit:.0f} s"
    if done.returncode:
        return None, f"failed ({(done.stderr.strip().splitlines() or ['killed'])[-1][:60]})"
    return json.loads(done.stdout.splitlines()[-1]), ""


def best_of(
    repeat: int, works: dict[str, Callable[[], Any]]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Best seconds and last result of each, taken in turns so that a busy moment hits all alike."""
    seconds, results = dict.fromkeys(works, math.inf), {}
    for _ in range(repeat):
        for name, work in works.items():
            start = time.perf_counter()
            results[name] = work()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds, results


def peak_mib(work: Callable[[], Any]) -> float:
    """Highest resident size while ``work`` runs over what it was before; sampled every 2 ms."""

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    before = highest = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return max(highest, resident()) - before


def row(name: str, seconds: float, ratio: float | None = None, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "seconds": seconds,
        "ratio": ratio,
        "peak_mib": None,
        "ceiling_share": None,
        "note": "",
    } | more


def product_seconds(design: np.ndarray) -> float:
    """One product with the design and one with its transpose: what any iteration on all heads must
    pay.
    """
    values, residuals = np.ones(design.shape[1], design.dtype), np.ones(len(design), design.dtype)
    return best_of(5, {"": lambda: (design @ values, design.T @ residuals)})[0][""]


def norm_ball_rows(design: np.ndarray, targets: np.ndarray, size: str) -> list[dict[str, Any]]:
    """Huber's loss over the norm ball: ours in two precisions, plain projected gradient, CVXPY."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "features.npy", design)
        np.save(folder / "targets.npy", targets)
        for label, radii in RADII.items():
            mine, seconds, best = our_rows(design, targets, size, label, radii)
            rows += mine
            rows.append(plain_row(design, targets, radii, SIZES[size]["limit"], seconds))
            rows += [
                cvxpy_row(folder, solver, radii, SIZES[size]["limit"], seconds, best)
                for solver in ("SCS", "CLARABEL")
            ]
    return rows


def our_rows(
    design: np.ndarray, targets: np.ndarray, size: str, label: str, radii: tuple[float, float]
) -> tuple[list[dict[str, Any]], float, float]:
    """Our rows, our seconds in float64, and the objective of a solution of gap 1e-8."""
    inputs = {"float64": design, "float32": design.astype(np.float32)}

    def fit(dtype: str, tol: float = TOL) -> Any:
        array, weights = inputs[dtype], np.full(len(targets), 1 / len(targets))
        problem = "huber", WIDTH, True, array.dtype, MEMORY_BUDGET
        setup = BallSetup(DenseDesign(array, WIDTH), targets[:, None], weights, *problem)
        return setup.minimise(NormBall(*radii), setup.zeros, tol, 20_000)

    best = fit("float64", 1e-8).certificate.objective
    seconds, fits = best_of(
        SIZES[size]["repeat"], {dtype: lambda d=dtype: fit(d) for dtype in inputs}
    )
    rows = []
    for dtype, found in fits.items():
        objective, gap = found.certificate.objective, found.certificate.gap
        off = objective / best - 1
        assert found.converged
        assert -1e-9 <= off <= 1.1 * TOL
        passes = seconds[dtype] / product_seconds(inputs[dtype])
        active = int((group_norms(found.values.reshape(N_HEADS, -1)) > 0).sum())
        note = (
            f"{found.n_iter} iterations in the time of {passes:.0f} on all heads, {active} of "
            f"{N_HEADS} heads active, gap {gap / objective:.0e}, off by {off:.0e}"
        )
        peak = peak_mib(lambda d=dtype: fit(d))
        rows.append(row(f"Huber, {label}, {dtype}", seconds[dtype], peak_mib=peak, note=note))
    return rows, seconds["float64"], best


def plain_row(
    design: np.ndarray, targets: np.ndarray, radii: tuple[float, float], limit: float, ours: float
) -> dict[str, Any]:
    """Plain projected gradient; one run, for it takes far longer than the noise of the clock."""
    start = time.perf_counter()
    plain = projected_gradient(design, targets, radii, limit)
    seconds = time.perf_counter() - start
    note = f"{plain['n_iter']} iterations, gap {plain['gap']:.0e}"
    if plain["gap"] > TOL:
        note = f"stopped after {limit:.0f} s: the ratio is a lower bound; {note}"
    return row("  plain projected gradient", seconds, seconds / ours, note=note)


def cvxpy_row(
    folder: Path, solver: str, radii: tuple[float, float], limit: float, ours: float, best: float
) -> dict[str, Any]:
    """CVXPY's row; its peak is that of its whole process."""
    result, why = cvxpy_fit(folder, solver, radii, limit)
    name = f"  CVXPY with {solver}"
    if result is None:
        return row(name, limit, limit / ours, note=f"{why}: the ratio is a lower bound")
    note = f"objective off by {result['value'] / best - 1:.0e}"
    return row(
        name, result["seconds"], result["seconds"] / ours, peak_mib=result["peak"], note=note
    )


def run(size: str) -> list[dict[str, Any]]:
    design, targets = attention_problem(SIZES[size]["n"])
    return norm_ball_rows(design, targets, size)


if __name__ == "__main__":
    for result in run(sys.argv[1] if len(sys.argv) > 1 else "small"):
        ratio = "" if result["ratio"] is None else f"{result['ratio']:.1f}×"
        peak = "" if result["peak_mib"] is None else f"{result['peak_mib']:.0f} MiB"
        print(
            f"{result['name']:46}{result['seconds']:9.3f} s{ratio:>9}{peak:>10}  {result['note']}",
            flush=True,
        )
