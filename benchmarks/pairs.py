"""Two work trees against each other, hot path by hot path, in interleaved pairs.

    python benchmarks/pairs.py OLD NEW [--rounds 9] [--only fit] [--device cuda]

Each tree runs in a process of its own, on the same inputs and through the public names alone; the
two take turns, the order swapped from pair to pair, so that a busy moment hits both alike. Printed
is the median over the pairs of new time / old time, with its 90 % interval (order statistics of the
median: no assumption about the noise).
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ALPHAS = np.geomspace(1e-4, 1e3, 20)
Work = Callable[[], Any]


def cases(device: str | None) -> dict[str, Callable[[], Work]]:
    """Name → setup, which returns the work that is timed. Runs inside a work tree."""
    import keyhole as kh

    paper = {
        "heads": kh.GaussianHeads(),
        "scaling": "none",
        "query": "given",
        "activation": "relu",
        "pooling": "mean",
    }

    def sets(n: int, ragged: bool = False) -> Any:
        if not ragged:
            return kh.targets.sphere_sets(n, n_keys=16, dim=16, seed=0)
        rng = np.random.default_rng(0)
        lengths = np.minimum(1 + rng.geometric(1 / 16, n), 128)
        return kh.SetBatch(
            [rng.standard_normal((k, 16)) / 4 for k in lengths], rng.standard_normal((n, 16)) / 4
        )

    def target(batch: Any) -> np.ndarray:
        return np.asarray(kh.targets.TokenPower(2, 16)(batch)) + 0.05 * np.random.default_rng(
            1
        ).standard_normal(len(batch))

    def gram(mean: float, n: int = 1000) -> Work:
        batch = sets(n)
        return lambda: kh.attention_kernel(batch, heads=kh.GaussianHeads(mean=mean))

    def features(dtype: str, ragged: bool = False, activation: str = "relu", n: int = 4000) -> Work:
        batch, heads = (
            sets(n, ragged).astype(dtype),
            kh.GaussianHeads().sample(1000, 16, 0).astype(dtype),
        )
        return lambda: kh.attention_features(batch, heads, activation)

    def fit(n: int, n_heads: float, **options: Any) -> Work:
        batch = sets(n)
        y = target(batch)
        return lambda: kh.AttentionRegressor(n_heads, random_state=0, **(paper | options)).fit(
            batch, y
        )

    def predict(n_heads: float, **options: Any) -> Work:
        batch, new = sets(500), sets(4000 if n_heads < math.inf else 1000)
        model = kh.AttentionRegressor(n_heads, alpha=1.0, random_state=0, **(paper | options))
        model.fit(batch, target(batch))
        return lambda: model.predict(new)

    def grouped() -> Work:
        batch = sets(1000)
        y, groups = target(batch), np.arange(1000) // 5
        return lambda: kh.AttentionRegressor(100, random_state=0, **paper).fit(
            batch, y, groups=groups
        )

    def streamed() -> Work:
        batch = sets(8000)
        y = target(batch)

        def work() -> None:
            model = kh.AttentionRegressor(60, alpha=1.0, random_state=0, **paper)
            for start in range(0, 8000, 1000):
                model.partial_fit(batch[start : start + 1000], y[start : start + 1000])

        return work

    def ball() -> Work:
        batch = sets(1000)
        y = target(batch)
        return lambda: kh.NormBallRegressor(
            200, group_radius=4.0, ball_radius=0.5, random_state=0
        ).fit(batch, y)

    def mlp() -> Work:
        batch, weights = (
            sets(4000),
            np.random.default_rng(0).standard_normal((2000, 17 * 16 + 1)) / 17,
        )
        return lambda: kh.mlp_features(batch, weights)

    def classes() -> Work:
        batch = sets(1500)
        y = (target(batch) * 30).astype(int) % 4
        model = kh.AttentionClassifier(200, random_state=0, **paper)
        model.set_params(loss="squared_error")
        if "criterion" in model.get_params():
            # trees of 0.2.0 chose penalties by a criterion of its own
            model.set_params(criterion="squared_error")
        return lambda: model.fit(batch, y)

    def learned() -> Work:
        batch = sets(300)
        y = target(batch)
        named = paper | {"heads": kh.LearnedHeads(max_iter=10, hops=1)}
        return lambda: kh.AttentionRegressor(32, random_state=0, **named).fit(batch, y)

    def curve() -> Work:
        wanted = kh.targets.Correlation(2, 64)
        return lambda: kh.theory.learning_curve(
            wanted, np.geomspace(10, 1e6, 40), n_keys=64, ridge=1e-6
        )

    def stored() -> Work:
        batch = sets(500)
        model = kh.AttentionRegressor(
            500,
            random_state=0,
            heads=kh.GaussianHeads(),
            scaling="none",
            query="given",
            activation="relu",
            pooling="mean",
        ).fit(batch, target(batch))
        path = Path(tempfile.mkdtemp()) / "model.keyhole"

        def work() -> None:
            path.unlink(missing_ok=True)
            kh.save(model, path)
            kh.load(path).predict(batch)

        return work

    if device is not None:
        on = {"device": device}
        large = sets(8192)
        onto = large.astype("float32").to(device)
        drawn = kh.GaussianHeads().sample(1000, 16, 0).astype("float32")

        def sync(work: Work) -> Work:
            import torch

            def timed() -> None:
                work()
                torch.cuda.synchronize()

            return timed

        return {
            "gram, 8192 sets, float32": lambda: sync(lambda: kh.attention_kernel(onto)),
            "gram around the identity": lambda: sync(
                lambda: kh.attention_kernel(onto, heads=kh.GaussianHeads(mean=1.0))
            ),
            "features, 1000 heads": lambda: sync(lambda: kh.attention_features(onto, drawn)),
            "fit, kernel, one penalty": lambda: fit(8192, math.inf, alpha=1.0, **on),
            "fit, kernel, 20 penalties": lambda: fit(4096, math.inf, alpha=ALPHAS, **on),
            "fit, 500 heads, 20 penalties": lambda: fit(4096, 500, alpha=ALPHAS, **on),
            "predict, 500 heads": lambda: predict(500, **on),
        }
    return {
        "gram, 1000 sets": lambda: gram(0.0),
        "gram around the identity": lambda: gram(1.0),
        "features, float32": lambda: features("float32"),
        "features, float64": lambda: features("float64", n=2000),
        "features, ragged, float32": lambda: features("float32", ragged=True),
        "features, softmax, float32": lambda: features("float32", activation="softmax", n=2000),
        "features of the mlp": mlp,
        "fit, dual, 20 penalties": lambda: fit(2500, 500, alpha=ALPHAS),
        "fit, dual, 20 penalties, float32": lambda: fit(2500, 500, alpha=ALPHAS, dtype="float32"),
        "fit, dual, one penalty": lambda: fit(2500, 500, alpha=1.0),
        "fit, primal, 20 penalties": lambda: fit(4000, 60, alpha=ALPHAS),
        "fit, kernel, automatic penalties": lambda: fit(1000, math.inf),
        "fit, small, automatic penalties": lambda: fit(200, 64),
        "fit, groups left out": grouped,
        "fit, classes": classes,
        "fit, norm ball": ball,
        "fit, learned head distribution": learned,
        "partial_fit, 8 batches": streamed,
        "predict, 500 heads": lambda: predict(500),
        "predict, kernel": lambda: predict(math.inf),
        "save, load and predict": stored,
        "learning curve, d = 64": curve,
    }


def serve(device: str | None) -> None:
    """A worker: reads names of cases, answers with seconds."""
    ready: dict[str, Work] = {}
    known = cases(device)
    print("\n".join(known), flush=True)
    print("", flush=True)
    for line in sys.stdin:
        name = line.rstrip("\n")
        if name not in ready:
            ready.clear()
            ready[name] = known[name]()
            ready[name]()
        start = time.perf_counter()
        ready[name]()
        print(time.perf_counter() - start, flush=True)


class Tree:
    """A work tree in a process of its own."""

    def __init__(self, path: Path, device: str | None) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(path.resolve() / "src"),
            "PYTHONUNBUFFERED": "1",
        }
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--serve",
            *(["--device", device] if device else []),
        ]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tempfile.gettempdir(),
        )
        self.names = list(iter(lambda: self._read().rstrip("\n"), ""))

    def seconds(self, name: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a work tree ended early: see its message above")
        return line


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Median and its 90 % interval from order statistics."""
    ordered, n = sorted(ratios), len(ratios)
    below, tail = 0, 0.5**n
    while below < n // 2 and tail < 0.05:
        below += 1
        tail += math.comb(n, below) * 0.5**n
    below = max(below - 1, 0)
    return float(np.median(ordered)), ordered[below], ordered[n - 1 - below]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", type=Path, help="OLD and NEW")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.device)
    if len(arguments.trees) != 2:
        parser.error("give two work trees: OLD and NEW")
    old, new = (Tree(path, arguments.device) for path in arguments.trees)
    names = [name for name in old.names if name in new.names and arguments.only in name]
    if not names:
        parser.error(f"no case contains {arguments.only!r}: there are {', '.join(old.names)}")
    rows = []
    print(
        f"{'':36}{'old':>10}{'new / old':>12}   90 % interval of the median over "
        f"{arguments.rounds} pairs"
    )
    for name in names:
        pairs = []
        for i in range(arguments.rounds):
            first, second = (old, new) if i % 2 == 0 else (new, old)
            times = {first: first.seconds(name)}
            times[second] = second.seconds(name)
            pairs.append((times[old], times[new]))
        middle, low, high = interval([b / a for a, b in pairs])
        before = float(np.median([a for a, _ in pairs]))
        rows.append(
            {"case": name, "old_seconds": before, "ratio": middle, "low": low, "high": high}
        )
        print(
            f"{name:36}{before * 1e3:8.1f} ms{middle:10.3f}     {low:.3f} to {high:.3f}", flush=True
        )
    if arguments.out:
        with arguments.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return None


if __name__ == "__main__":
    main()
