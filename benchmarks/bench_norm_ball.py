"""The norm ball against CVXPY: `kh.NormBallRegressor` with given radii, features included.

    python benchmarks/bench_norm_ball.py [paper|small]

CVXPY gets the features that the estimator made, ready, and is asked for the same accuracy, a
relative gap of 1e-4; its setting up of the problem counts, the making of features does not. What
each reached is compared with a solution of gap 1e-8 in the same run. CVXPY runs in a process of its
own, for at most 120 s and 12 GiB; where it runs out, the ratio is a lower bound, and the note says
so.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import keyhole as kh

SIZES = {"paper": 2000, "small": 200}
N_HEADS, DIM, N_KEYS = 500, 16, 16
TOL = 1e-4
RADII = {"both constraints bind": (30.0, 3.0), "only the group norm binds": (30.0, math.inf)}
TIME_LIMIT = 120.0
MEMORY_LIMIT = 12 * 2**30


def attention_problem(n: int) -> tuple[kh.SetBatch, np.ndarray]:
    """Tokens uniform on the sphere, and a target of unit variance with heavy-tailed noise.

    Student noise with 3 degrees of freedom: some residuals lie beyond Huber's corner.
    """
    sets = kh.targets.sphere_sets(n, n_keys=N_KEYS, dim=DIM, seed=0)
    clean = kh.targets.TokenPower(2, dim=DIM)(sets)
    noise = 0.3 * np.random.default_rng(0).standard_t(3, n)
    return sets, (clean - clean.mean()) / clean.std() + noise


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
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "value": float(problem.value)}))
"""


def cvxpy_fit(
    folder: Path, solver: str, radii: tuple[float, float]
) -> tuple[dict[str, float] | None, str]:
    """CVXPY's time and objective, or None and what stopped it."""
    spec = {
        "features": str(folder / "features.npy"),
        "targets": str(folder / "targets.npy"),
        "width": DIM + 1,
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
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"stopped after {TIME_LIMIT:.0f} s"
    if done.returncode:
        return None, f"failed ({(done.stderr.strip().splitlines() or ['killed'])[-1][:60]})"
    return json.loads(done.stdout.splitlines()[-1]), ""


def row(name: str, seconds: float, ratio: float | None, note: str) -> dict[str, Any]:
    """One line of the table of `benchmarks/run.py`."""
    return {
        "name": name,
        "seconds": seconds,
        "ratio": ratio,
        "peak_mib": None,
        "ceiling_share": None,
        "note": note,
    }


def estimator_of(radii: tuple[float, float], tol: float) -> kh.NormBallRegressor:
    """The estimator under test."""
    return kh.NormBallRegressor(
        N_HEADS, group_radius=radii[0], ball_radius=radii[1], tol=tol, random_state=0
    )


def run(size: str) -> list[dict[str, Any]]:
    """Ours, then CVXPY with two solvers, for each pair of radii."""
    sets, targets = attention_problem(SIZES[size])
    rows = []
    for label, radii in RADII.items():
        # compiles the features, and is what objectives are compared with
        exact = estimator_of(radii, 1e-8).fit(sets, targets)

        # ours: the best of three
        seconds = math.inf
        for _ in range(3):
            start = time.perf_counter()
            model = estimator_of(radii, TOL).fit(sets, targets)
            seconds = min(seconds, time.perf_counter() - start)
        note = (
            f"{model.n_iter_} iterations, {len(model.active_heads_)} of {N_HEADS} heads active, "
            f"gap {model.duality_gap_ / model.objective_:.0e}, "
            f"off by {model.objective_ / exact.objective_ - 1:.0e}"
        )
        rows.append(row(f"Huber, {label}", seconds, None, note))

        # CVXPY, on the same features
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            features = kh.attention_features(sets, model.layer_.heads) * math.sqrt(N_HEADS)
            np.save(folder / "features.npy", features)
            np.save(folder / "targets.npy", targets)
            for solver in ("SCS", "CLARABEL"):
                result, reason = cvxpy_fit(folder, solver, radii)
                if result is None:
                    ratio = TIME_LIMIT / seconds
                    note = f"{reason}: the ratio is a lower bound"
                    rows.append(row(f"  CVXPY with {solver}", TIME_LIMIT, ratio, note))
                else:
                    note = f"objective off by {result['value'] / exact.objective_ - 1:.0e}"
                    ratio = result["seconds"] / seconds
                    rows.append(row(f"  CVXPY with {solver}", result["seconds"], ratio, note))
    return rows


if __name__ == "__main__":
    for result in run(sys.argv[1] if len(sys.argv) > 1 else "small"):
        ratio = "" if result["ratio"] is None else f"{result['ratio']:.1f}×"
        print(f"{result['name']:46}{result['seconds']:9.3f} s{ratio:>9}  {result['note']}")
