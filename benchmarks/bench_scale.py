"""Data that does not fit into memory: Parquet against arrays, and Dask.

    python benchmarks/bench_scale.py [--sets 20000] [--heads 64] [--only stream dask]
    python benchmarks/bench_scale.py --full

``--full`` is what docs/benchmarks/scale.md shows: a quiet machine, two cores, some ten minutes.
Every measurement is a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import keyhole as kh
from keyhole.data import ParquetSets, write_parquet

FULL = {"sets": 1_000_000, "heads": 256, "dask_sets": 80_000}
GROUP = 10_000
"""Sets of a row group."""
PAPER_LAYER = {
    "heads": kh.GaussianHeads(),
    "scaling": "none",
    "query": "given",
    "activation": "relu",
    "pooling": "mean",
    "random_state": 0,
    "dtype": "float32",
}


def write_sets(path: Path, n_sets: int, n_keys: int, dim: int) -> None:
    """Write sets on the sphere a row group at a time: float32, noise of a tenth."""
    if path.exists():
        return
    target = kh.targets.TokenPower(2, dim)
    rng = np.random.default_rng(0)

    def batches() -> Iterator[tuple[kh.SetBatch, np.ndarray]]:
        for start in range(0, n_sets, GROUP):
            count = min(GROUP, n_sets - start)
            sets = kh.targets.sphere_sets(count, n_keys, dim, seed=start)
            yield sets.astype(np.float32), target(sets) + 0.1 * rng.standard_normal(count)

    write_parquet(path, batches())


def load_loops() -> None:
    """Compiled loops are loaded, or compiled, before anything is timed."""
    sets = kh.targets.sphere_sets(100, 16, 16, seed=0).astype(np.float32)
    kh.AttentionRegressor(8, **PAPER_LAYER).fit_batches([(sets, sets.query[:, 0])]).predict(sets)


def measure_fit(model: Any, fit: Callable[[], Any], batches: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of a fit and of predictions for all batches, and the peak of this process."""
    start = time.perf_counter()
    fit()
    fitted = time.perf_counter()
    for X, _ in batches():
        model.predict(X)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"fit": fitted - start, "predict": done - fitted, "peak": peak}


def from_memory(folder: Path, n_sets: int, n_heads: int) -> dict[str, Any]:
    """The same batches, all of them in memory."""
    batches = list(ParquetSets(folder / "sets.parquet"))
    load_loops()
    model = kh.AttentionRegressor(n_heads, **PAPER_LAYER)
    return measure_fit(model, lambda: model.fit_batches(batches), lambda: batches)


def from_parquet(folder: Path, n_sets: int, n_heads: int) -> dict[str, Any]:
    source = ParquetSets(folder / "sets.parquet")
    load_loops()
    model = kh.AttentionRegressor(n_heads, **PAPER_LAYER)
    return measure_fit(model, lambda: model.fit_batches(source), lambda: source)


def by_dask(folder: Path, n_sets: int, n_heads: int) -> dict[str, Any]:
    """A fit dominated by features, on one process and on two, one thread each."""
    import distributed

    from keyhole.distributed import fit_dask

    source = ParquetSets(folder / "long.parquet")
    model = kh.AttentionRegressor(256, alpha=1.0, **PAPER_LAYER)
    seconds = {}
    for n_workers in (1, 2):
        with (
            distributed.LocalCluster(
                n_workers=n_workers, threads_per_worker=1, dashboard_address=":0"
            ) as cluster,
            distributed.Client(cluster) as client,
        ):
            client.wait_for_workers(n_workers)
            times = []
            for _ in range(2):  # the first loads the compiled loops in every worker
                start = time.perf_counter()
                fit_dask(model, source, client, selection="gcv", partitions=32)
                times.append(time.perf_counter() - start)
        seconds[str(n_workers)] = min(times)
    return seconds


MEASUREMENTS = {"memory": from_memory, "parquet": from_parquet, "dask": by_dask}


def in_own_process(name: str, folder: Path, n_sets: int, n_heads: int) -> dict[str, Any]:
    arguments = ["--child", name, "--folder", folder, "--sets", n_sets, "--heads", n_heads]
    done = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"the measurement {name!r} failed")
    return json.loads(done.stdout.splitlines()[-1])


def stream(folder: Path, n_sets: int, n_heads: int) -> None:
    """Fits and predictions from memory and from Parquet."""
    write_sets(folder / "sets.parquet", n_sets, 16, 16)
    print(f"n = {n_sets:,}, d = N = 16, M = {n_heads}, float32")
    for name in ("memory", "parquet"):
        result = in_own_process(name, folder, n_sets, n_heads)
        for what in ("fit", "predict"):
            rate = n_sets / result[what]
            print(f"  {what} from {name}: {result[what]:.1f} s, {rate:,.0f} sets/s", flush=True)
        print(f"  peak {result['peak']:,.0f} MiB")


def dask(folder: Path, n_sets: int) -> None:
    write_sets(folder / "long.parquet", n_sets, 1024, 4)
    print(f"Dask, n = {n_sets:,}, d = 4, N = 1024, M = 256")
    seconds = in_own_process("dask", folder, n_sets, 256)
    for n_workers, spent in seconds.items():
        ratio = seconds["1"] / spent
        print(f"  {n_workers} processes of one thread: {spent:.1f} s, {ratio:.2f}× one process")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=20_000)
    parser.add_argument("--heads", type=int, default=64, help="heads of the streamed fit")
    parser.add_argument("--dask-sets", type=int, default=4000)
    parser.add_argument("--full", action="store_true", help=f"the sizes of the page: {FULL}")
    parser.add_argument("--only", choices=("stream", "dask"), nargs="+", default=["stream", "dask"])
    parser.add_argument("--folder", type=Path, help="where data is kept, so it is written once")
    parser.add_argument("--child", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.full:
        vars(options).update(FULL)
    if options.child:
        measurement = MEASUREMENTS[options.child]
        print(json.dumps(measurement(options.folder, options.sets, options.heads)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{os.cpu_count()} cores")
        if "stream" in options.only:
            stream(folder, options.sets, options.heads)
        if "dask" in options.only:
            dask(folder, options.dask_sets)


if __name__ == "__main__":
    main()
