"""Data that does not fit: Parquet against memory, conjugate gradients, Dask, and how cost grows.

`bench_scale.py --sets 20000` takes a minute; `bench_scale.py --full` is what
docs/howto/out_of_core.md shows: a quiet machine, two cores, some 20 minutes. Every measurement is
a process of its own, and the last thing printed is the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
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
from keyhole.data.batches import Batch

FULL = {"sets": 1_000_000, "heads": 256, "cg_sets": 20_000, "cg_heads": 20_000, "dask_sets": 80_000}
GROUP = 10_000
"""Sets of a row group."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=20_000)
    parser.add_argument("--heads", type=int, default=64, help="heads of the streamed fit")
    parser.add_argument("--cg-sets", type=int, default=1500)
    parser.add_argument("--cg-heads", type=int, default=800)
    parser.add_argument("--dask-sets", type=int, default=2000)
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument(
        "--full", action="store_true", help=f"the sizes of the documentation: {FULL}"
    )
    parser.add_argument("--only", choices=tuple(PARTS), action="append")
    parser.add_argument("--loo", action="store_true", help="also the second pass of leave-one-out")
    parser.add_argument(
        "--folder", type=Path, help="where data is kept, so that it is written once"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.full:
        vars(given).update(FULL)
    if given.child:
        print(json.dumps(CHILDREN[given.child](given)))
        return
    with tempfile.TemporaryDirectory() as folder:
        given.folder = given.folder or Path(folder)
        given.folder.mkdir(parents=True, exist_ok=True)
        rows: list[list[str]] = []
        for name in given.only or PARTS:
            for row in PARTS[name](given):
                rows.append(row)
                print("  ".join(row), flush=True)
    print(f"\n{os.cpu_count()} cores, {thread_words()}, {given.dtype} features\n")
    print(markdown(["what", "size", "time", "rate", "peak memory", "check"], rows))


def thread_words() -> str:
    from keyhole._array import thread_count

    return f"{thread_count()} threads"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def child(name: str, given: argparse.Namespace, **environment: str) -> dict[str, Any]:
    """Run one measurement in a process of its own, so that its peak memory is its own."""
    names = ("sets", "heads", "cg_sets", "cg_heads", "dask_sets", "dtype", "folder")
    options = [word for n in names for word in (f"--{n.replace('_', '-')}", str(getattr(given, n)))]
    command = [sys.executable, __file__, *options, "--child", name]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def data_path(given: argparse.Namespace, sets: int | None = None, keys: int = 16) -> Path:
    return given.folder / f"sets-{sets or given.sets}-{keys}.parquet"


def make_data(path: Path, sets: int, keys: int = 16, dim: int = 16) -> None:
    """Write sets of the sphere distribution a row group at a time: float32, noise of a tenth."""
    if path.exists():
        return
    target, rng = kh.targets.TokenPower(2, dim), np.random.default_rng(0)

    def batches() -> Iterator[Batch]:
        for group in range(-(-sets // GROUP)):
            count = min(GROUP, sets - group * GROUP)
            batch = kh.targets.sphere_sets(count, keys, dim, seed=group)
            yield Batch(batch.astype(np.float32), target(batch) + 0.1 * rng.standard_normal(count))

    write_parquet(path, batches())


def estimator(given: argparse.Namespace, **options: Any) -> kh.AttentionRegressor:
    return kh.AttentionRegressor(
        given.heads,
        random_state=0,
        dtype=given.dtype,
        **{
            "heads": kh.GaussianHeads(),
            "scaling": "none",
            "query": "given",
            "activation": "relu",
            "pooling": "mean",
            **options,
        },
    )


def load_loops(given: argparse.Namespace) -> None:
    """Compiled loops are loaded, or compiled, before anything is timed."""
    batch = kh.targets.sphere_sets(100, 16, 16, seed=0)
    model = kh.AttentionRegressor(
        8,
        random_state=0,
        dtype=given.dtype,
        heads=kh.GaussianHeads(),
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ).partial_fit(batch, batch.query[:, 0])
    model.predict(batch)


def child_data(given: argparse.Namespace) -> dict[str, Any]:
    make_data(data_path(given), given.sets)
    return {}


def child_memory(given: argparse.Namespace) -> dict[str, Any]:
    """The same arithmetic on arrays in memory: fit, and predict."""
    batches = list(ParquetSets(data_path(given)))
    load_loops(given)
    model = estimator(given)
    start = time.perf_counter()
    model.fit_batches(batches, selection="gcv")
    fit = time.perf_counter() - start
    predict = predict_seconds(given, model, batches)
    np.save(given.folder / "memory.npy", np.concatenate(list(model.predict_batches(batches))))
    return {"fit": fit, "predict": predict, "peak": peak_mib(), "alpha": model.alpha_}


def predict_seconds(given: argparse.Namespace, model: Any, batches: Any) -> float:
    """Seconds to predict everything; the best of three for small sizes, where one moment of noise
    is all there is.
    """

    def predict() -> None:
        for _ in model.predict_batches(batches):
            pass

    return best_of(predict, repeat=1 if given.sets > 100_000 else 3)


def child_stream(given: argparse.Namespace) -> dict[str, Any]:
    """From Parquet, interrupted: the first half of the row groups, then the sums go to disk."""
    source = ParquetSets(data_path(given))
    load_loops(given)
    model, half = estimator(given), source.n_groups // 2
    start = time.perf_counter()
    for batch in source[:half]:
        model.partial_fit(*batch)
    seconds = time.perf_counter() - start
    (given.folder / "half.pickle").write_bytes(pickle.dumps((model, half)))
    return {"seconds": seconds, "peak": peak_mib()}


def child_resume(given: argparse.Namespace) -> dict[str, Any]:
    """The other half, in another process; then prediction from Parquet, row group by row group."""
    model, half = pickle.loads((given.folder / "half.pickle").read_bytes())
    source = ParquetSets(data_path(given))
    load_loops(given)
    start = time.perf_counter()
    for batch in source[half : source.n_groups]:
        model.partial_fit(*batch)
    alpha = model.alpha_  # solved for here
    seconds = time.perf_counter() - start
    expected = np.load(given.folder / "memory.npy", mmap_mode="r")
    predict, off, at = predict_seconds(given, model, source), 0.0, 0
    for part in model.predict_batches(source):
        off = max(off, float(np.abs(part - expected[at : at + len(part)]).max()))
        at += len(part)
    (given.folder / "model.pickle").write_bytes(pickle.dumps(model))
    spread = float(np.std(expected))
    return {
        "seconds": seconds,
        "predict": predict,
        "peak": peak_mib(),
        "alpha": alpha,
        "off": off / spread,
    }


def child_loo(given: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    model = estimator(given).fit_batches(ParquetSets(data_path(given)))
    return {"seconds": time.perf_counter() - start, "peak": peak_mib(), "error": model.loo_error_}


def stream_rows(given: argparse.Namespace) -> Iterator[list[str]]:
    child("data", given)
    memory, first, second = child("memory", given), child("stream", given), child("resume", given)
    size = f"n = {given.sets:,}, d = N = 16, M = {given.heads}"
    fit, peak = first["seconds"] + second["seconds"], max(first["peak"], second["peak"])
    yield row(
        "fit, arrays in memory",
        size,
        memory["fit"],
        rate(given.sets, memory["fit"]),
        memory["peak"],
        "",
    )
    check = (
        f"{memory['fit'] / fit:.0%} of the rate in memory; predictions off by {second['off']:.0e} "
        "of their spread"
    )
    yield row(
        "fit, Parquet, interrupted and resumed", size, fit, rate(given.sets, fit), peak, check
    )
    yield row(
        "predict, arrays in memory",
        size,
        memory["predict"],
        rate(given.sets, memory["predict"]),
        None,
        "",
    )
    check = f"{memory['predict'] / second['predict']:.0%} of the rate in memory"
    yield row(
        "predict, Parquet",
        size,
        second["predict"],
        rate(given.sets, second["predict"]),
        second["peak"],
        check,
    )
    if given.loo:
        both = child("loo", given)
        check = f"leave-one-out error {both['error']:.4g}"
        yield row(
            "fit, two passes",
            size,
            both["seconds"],
            rate(given.sets, both["seconds"]),
            both["peak"],
            check,
        )
    yield from arithmetic_rows(given, fit)


def arithmetic_rows(given: argparse.Namespace, fit: float) -> Iterator[list[str]]:
    """10⁹ sets by arithmetic: the rate of this run per core, times the cores of a cluster, at 85 %
    of linear.
    """
    from keyhole._array import thread_count

    each = given.sets / fit / thread_count()
    for cores in (64, 1024):
        seconds = 1e9 / (each * cores * 0.85)
        check = (
            "arithmetic, not measured: the streamed fit's rate per core, at an assumed 85 % of "
            "linear"
        )
        yield row(
            f"10⁹ sets on {cores} such cores",
            f"M = {given.heads}",
            seconds,
            rate(10**9, seconds),
            None,
            check,
        )


def child_cg(given: argparse.Namespace) -> dict[str, Any]:
    """Many heads by conjugate gradients, memory bounded."""
    train = kh.targets.sphere_sets(given.cg_sets, 16, 16, seed=0)
    y = kh.targets.TokenPower(2, 16)(train) + 0.1 * np.random.default_rng(0).standard_normal(
        given.cg_sets
    )
    test = kh.targets.sphere_sets(500, 16, 16, seed=1)
    small = kh.AttentionRegressor(
        64,
        alpha=1.0,
        random_state=0,
        dtype=given.dtype,
        solver="cg",
        heads=kh.GaussianHeads(),
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ).fit(train[:200], y[:200])
    del small
    model = kh.AttentionRegressor(
        given.cg_heads,
        alpha=1.0,
        random_state=0,
        dtype=given.dtype,
        solver="cg",
        heads=kh.GaussianHeads(),
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    )
    start = time.perf_counter()
    model.fit(train, y)
    seconds = time.perf_counter() - start
    np.save(given.folder / "cg.npy", model.predict(test))
    return {
        "seconds": seconds,
        "peak": peak_mib(),
        "residual": model.residual_,
        "n_iter": model.n_iter_,
    }


def child_direct(given: argparse.Namespace) -> dict[str, Any]:
    """The direct solve where both run."""
    train = kh.targets.sphere_sets(given.cg_sets, 16, 16, seed=0)
    y = kh.targets.TokenPower(2, 16)(train) + 0.1 * np.random.default_rng(0).standard_normal(
        given.cg_sets
    )
    test = kh.targets.sphere_sets(500, 16, 16, seed=1)
    start = time.perf_counter()
    model = kh.AttentionRegressor(
        given.cg_heads,
        alpha=1.0,
        random_state=0,
        dtype=given.dtype,
        solver="direct",
        heads=kh.GaussianHeads(),
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    )
    model.fit(train, y)
    seconds = time.perf_counter() - start
    found, direct = np.load(given.folder / "cg.npy"), model.predict(test)
    return {
        "seconds": seconds,
        "peak": peak_mib(),
        "off": float(np.abs(found - direct).max() / np.std(direct)),
    }


def cg_rows(given: argparse.Namespace) -> Iterator[list[str]]:
    """Small in both precisions beside the direct solve; then the size asked for, without it if that
    is large.
    """
    for sets, heads, dtype in dict.fromkeys(
        [
            (1500, 800, "float64"),
            (1500, 800, "float32"),
            (given.cg_sets, given.cg_heads, given.dtype),
        ]
    ):
        some = argparse.Namespace(
            **{**vars(given), "cg_sets": sets, "cg_heads": heads, "dtype": dtype}
        )
        size = f"n = {sets:,}, M = {heads:,}, D = 17, {dtype}"
        cg = child("cg", some)
        check = f"{cg['n_iter']} iterations, relative residual {cg['residual']:.0e}"
        if sets <= 4000:
            direct = child("direct", some)
            check += f"; predictions off the direct ones by {direct['off']:.0e} of their spread"
            yield row("direct", size, direct["seconds"], "", direct["peak"], "")
        yield row("conjugate gradients", size, cg["seconds"], "", cg["peak"], check)


def child_dask(given: argparse.Namespace) -> dict[str, Any]:
    """A fit dominated by features, one thread per worker, on one process and on two."""
    import distributed

    from keyhole.distributed import fit_dask

    path = data_path(given, given.dask_sets, 1024)
    make_long_sets(path, given.dask_sets)
    model = kh.AttentionRegressor(
        256,
        alpha=1.0,
        random_state=0,
        dtype=given.dtype,
        heads=kh.GaussianHeads(),
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    )
    answer: dict[str, Any] = {}
    for workers in (1, 2):
        options = {
            "n_workers": workers,
            "threads_per_worker": 1,
            "processes": True,
            "dashboard_address": ":0",
        }
        with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
            client.wait_for_workers(workers)
            best = math.inf
            for _ in range(3):  # the first loads the compiled loops in every worker
                start = time.perf_counter()
                fit_dask(model, ParquetSets(path), client, selection="gcv", partitions=32)
                best = min(best, time.perf_counter() - start)
        answer[str(workers)] = best
    return answer


def make_long_sets(path: Path, sets: int) -> None:
    """Sets of 1024 keys in R⁴, 32 row groups: with 256 heads their features cost five times their
    sums.
    """
    if path.exists():
        return
    size, target = -(-sets // 32), kh.targets.TokenPower(2, 4)
    made = (
        kh.targets.sphere_sets(min(size, sets - i), 1024, 4, seed=i) for i in range(0, sets, size)
    )
    write_parquet(path, (Batch(batch.astype(np.float32), target(batch)) for batch in made))


def dask_rows(given: argparse.Namespace) -> Iterator[list[str]]:
    found = child("dask", given, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    size = f"n = {given.dask_sets:,}, d = 4, N = 1024, M = 256"
    yield row(
        "Dask, one process of one thread",
        size,
        found["1"],
        rate(given.dask_sets, found["1"]),
        None,
        "",
    )
    check = f"{found['1'] / found['2']:.2f}× one process"
    yield row(
        "Dask, two processes of one thread",
        size,
        found["2"],
        rate(given.dask_sets, found["2"]),
        None,
        check,
    )


def child_slopes(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a summation at a base size and at twice each of n, N, d, M."""
    base = {"n": 4096, "N": 64, "d": 16, "M": 128}
    answer = {}
    for name in ("base", "n", "N", "d", "M"):
        size = {**base, **({name: 2 * base[name]} if name in base else {})}
        batch = kh.targets.sphere_sets(size["n"], size["N"], size["d"], seed=0).astype(given.dtype)
        model = kh.AttentionRegressor(
            size["M"],
            alpha=1.0,
            random_state=0,
            dtype=given.dtype,
            heads=kh.GaussianHeads(),
            scaling="none",
            query="given",
            activation="relu",
            pooling="mean",
        )
        recipe_of = model.partial_fit(batch[:64], np.zeros(64)).stream_.recipe
        answer[f"features {name}"] = best_of(
            lambda recipe=recipe_of, batch=batch: recipe.features(batch)
        )
        phi, y = recipe_of.features(batch), np.ones((size["n"], 1))
        sums = recipe_of.empty().moments
        answer[f"sums {name}"] = best_of(lambda sums=sums, phi=phi, y=y: sums.add_rows(phi, y))
    return answer


def best_of(work: Callable[[], Any], repeat: int = 5) -> float:
    from harness import best_seconds

    return best_seconds(work, repeat)


def slope_rows(given: argparse.Namespace) -> Iterator[list[str]]:
    found = child("slopes", given)
    formulas = {"features": "M (2D² + 4DN) a set", "sums": "p² = (MD)² a set"}
    for what, formula in formulas.items():
        base = found[f"{what} base"]
        slopes = ", ".join(
            f"{n}: {math.log2(found[f'{what} {n}'] / base):.2f}" for n in ("n", "N", "d", "M")
        )
        yield row(
            f"slopes of {what}",
            "n = 4096, N = 64, d = 16, M = 128",
            base,
            "",
            None,
            f"{formula}; {slopes}",
        )


def child_accuracy(given: argparse.Namespace) -> dict[str, Any]:
    """float32 features summed in float64, against float64 throughout: the sums, and the
    predictions.
    """
    batch = kh.targets.sphere_sets(20_000, 16, 16, seed=0)
    y = kh.targets.TokenPower(2, 16)(batch) + 0.1 * np.random.default_rng(0).standard_normal(20_000)
    found = {}
    start = time.perf_counter()
    for dtype in ("float64", "float32"):
        model = kh.AttentionRegressor(
            32,
            alpha=1.0,
            random_state=0,
            dtype=dtype,
            heads=kh.GaussianHeads(),
            scaling="none",
            query="given",
            activation="relu",
            pooling="mean",
        )
        for part in range(0, 20_000, 2000):
            model.partial_fit(batch[part : part + 2000], y[part : part + 2000])
        found[dtype] = (np.tril(model.stream_.sums.moments.gram), model.predict(batch[:1000]))
    seconds = time.perf_counter() - start
    (exact, direct), (gram, predictions) = found["float64"], found["float32"]
    whole = (
        kh.AttentionRegressor(
            32,
            alpha=1.0,
            random_state=0,
            heads=kh.GaussianHeads(),
            scaling="none",
            query="given",
            activation="relu",
            pooling="mean",
        )
        .fit(batch, y)
        .predict(batch[:1000])
    )
    largest = np.linalg.eigvalsh(exact)[-1]
    return {
        "seconds": seconds,
        "gram": float(np.linalg.norm(gram - exact, 2) / largest),
        "off": float(np.abs(predictions - direct).max() / np.std(direct)),
        "streamed": float(np.abs(direct - whole).max() / np.std(whole)),
    }


def accuracy_rows(given: argparse.Namespace) -> Iterator[list[str]]:
    found = child("accuracy", given)
    check = (
        f"float64 in ten batches against fit: predictions off by {found['streamed']:.0e} of their "
        f"spread; float32 features: sums off by {found['gram']:.0e} of λ_max, predictions by "
        f"{found['off']:.0e}"
    )
    yield row(
        "accuracy of sums", "n = 20,000, d = N = 16, M = 32", found["seconds"], "", None, check
    )


def row(
    what: str, size: str, seconds: float, speed: str, peak: float | None, check: str
) -> list[str]:
    return [what, size, clock(seconds), speed, "" if peak is None else f"{peak:,.0f} MiB", check]


def clock(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms"


def rate(sets: int, seconds: float) -> str:
    return f"{sets / seconds:,.0f} sets/s"


PARTS = {
    "stream": stream_rows,
    "cg": cg_rows,
    "dask": dask_rows,
    "accuracy": accuracy_rows,
    "slopes": slope_rows,
}
CHILDREN = {
    "data": child_data,
    "memory": child_memory,
    "stream": child_stream,
    "resume": child_resume,
    "loo": child_loo,
    "cg": child_cg,
    "direct": child_direct,
    "dask": child_dask,
    "accuracy": child_accuracy,
    "slopes": child_slopes,
}

if __name__ == "__main__":
    main()
