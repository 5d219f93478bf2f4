"""The GPU beside its ceilings and rivals, every number checked in the run that gives it.

    PYTHONPATH=src python benchmarks/bench_gpu.py [--out out/gpu] [--only gram features ridge]
        [--size full|quick]

d = N = 16, tokens on the sphere, drawn afresh from --seed. Rivals are the formulas as one would
write them in torch, in float32: eager, and through torch.compile. Times are medians of runs between
CUDA events. Errors are relative, on entries drawn at random, against plain torch in float64; memory
that results will land in is filled with NaN before.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

import keyhole as kh
from keyhole._array import block_size, set_blocks
from keyhole._tensors import as_tensor
from keyhole.attention import dispatch
from keyhole.attention import torch_loops as plain
from keyhole.attention import triton_loops as fused

N_KEYS = DIM = 16
Row = dict[str, Any]
ROWS: list[Row] = []


def report(name: str, milliseconds: float | None = None, **figures: Any) -> None:
    ROWS.append({"name": name, "ms": milliseconds, **figures})
    shown = "" if milliseconds is None else f"{milliseconds:10.3f} ms"
    rest = "  ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()
    )
    print(f"  {name:58}{shown:>14}  {rest}", flush=True)


FAILURES: list[str] = []


def require(holds: bool, what: str) -> None:
    """Go on after a failed check, so that one call shows all of them; the exit code tells."""
    if not holds:
        FAILURES.append(what)
        print(f"  FAILED: {what}", flush=True)


def median_ms(
    work: Callable[[], Any], repeat: int = 15, warm: int = 2, *, waited_for: bool = False
) -> float:
    """Median time between two events around ``work``: calls in a queue, or each waited for, its
    host time included.
    """
    for _ in range(warm):
        work()
    torch.cuda.synchronize()
    pairs = []
    for _ in range(repeat):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        pairs.append((start, stop))
        if waited_for:
            stop.synchronize()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in pairs)


def poison(n: int, m: int, dtype: torch.dtype = torch.float32) -> None:
    """Leave NaN in the memory that the allocator will hand out next."""
    torch.full((n, m), math.nan, dtype=dtype, device="cuda")


def sphere(n: int, seed: int) -> kh.SetBatch:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    tokens = torch.randn(
        n, 1 + N_KEYS, DIM, device="cuda", generator=generator, dtype=torch.float64
    )
    return kh.SetBatch.from_tokens((tokens / tokens.norm(dim=-1, keepdim=True)).float())


# --- ceilings -------------------------------------------------------------------------------------


@triton.jit
def multiply_add_kernel(out, steps, SIZE: tl.constexpr):
    x = tl.arange(0, SIZE).to(tl.float32) + tl.program_id(0)
    for _ in range(steps):
        for _ in tl.static_range(64):
            x = x * 0.999 + 0.5
    tl.store(out + tl.program_id(0) * SIZE + tl.arange(0, SIZE), x)


@triton.jit
def root_kernel(out, steps, SIZE: tl.constexpr):
    x = tl.arange(0, SIZE).to(tl.float32) + tl.program_id(0)
    for _ in range(steps):
        for _ in tl.static_range(64):
            x = tl.sqrt(x)
    tl.store(out + tl.program_id(0) * SIZE + tl.arange(0, SIZE), x)


def ceilings() -> dict[str, float]:
    print("ceilings")
    found: dict[str, float] = {}
    a = torch.randn(2**28, device="cuda")
    b = torch.empty_like(a)
    found["copy"] = 2 * a.nbytes / median_ms(lambda: b.copy_(a)) / 1e9
    found["write"] = a.nbytes / median_ms(lambda: b.fill_(1.5)) / 1e9
    report("copy, read plus written", TBps=found["copy"])
    report("write", TBps=found["write"])
    for dtype in (torch.float64, torch.float32, torch.float16):
        a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
        found[str(dtype)] = 2 * 8192**3 / median_ms(lambda a=a: a @ a, repeat=7) / 1e9
        report(f"matrix product {dtype}".replace("torch.", ""), TFLOPs=found[str(dtype)])
    grid, steps, size = 132 * 32, 200, 1024
    out = torch.empty(grid * size, device="cuda")
    for name, kernel in (("multiply-add", multiply_add_kernel), ("root", root_kernel)):
        work = grid * size * steps * 64
        found[name] = (
            work
            / median_ms(lambda k=kernel: k[(grid,)](out, steps, SIZE=size, num_warps=4), repeat=5)
            / 1e9
        )
        report(f"float32 {name} instructions", T_per_s=found[name])
    return found


# --- rivals ---------------------------------------------------------------------------------------


def broadcast_block(
    query: Any, unit: Any, weight: Any, queries: Any, units: Any, weights: Any
) -> torch.Tensor:
    """Rows of K for zero mean: unit queries (b, D), unit keys (b·N, D) and weights against those of
    all sets.
    """
    b, n = len(query), len(queries)
    cosine = (unit @ units.T).view(b, N_KEYS, n, N_KEYS)
    rho = ((query @ queries.T)[:, None, :, None] * cosine).clamp(-1, 1)
    kappa = (torch.sqrt(1 - rho * rho) + (torch.pi - torch.arccos(rho)) * rho) / (2 * torch.pi)
    return (kappa * cosine * weight.view(b, N_KEYS, 1, 1) * weights.view(1, 1, n, N_KEYS)).sum(
        dim=(1, 3)
    )


def broadcast_gram(
    block: Callable[..., torch.Tensor], batch: kh.SetBatch, size: int = 128
) -> torch.Tensor:
    query, keys = batch.extended_query(), batch.extended_keys()
    query_norm, norm = query.norm(dim=-1, keepdim=True), keys.norm(dim=-1)
    weight = 0.5 * query_norm.repeat_interleave(N_KEYS, dim=0)[:, 0] * norm**2 / N_KEYS
    query, unit = query / query_norm, keys / norm[:, None]
    out = torch.empty(len(batch), len(batch), device="cuda")
    for start in range(0, len(batch), size):
        sets, tokens = slice(start, start + size), slice(start * N_KEYS, (start + size) * N_KEYS)
        out[sets] = block(query[sets], unit[tokens], weight[tokens], query, unit, weight)
    return out


def einsum_features(batch: kh.SetBatch, heads: torch.Tensor) -> torch.Tensor:
    query, keys = batch.extended_query(), batch.extended_keys().view(len(batch), N_KEYS, -1)
    scores = torch.einsum("nme,nke->nmk", torch.einsum("nd,mde->nme", query, heads), keys)
    features = torch.einsum("nmk,nke->nme", torch.relu(scores), keys)
    return (features / (N_KEYS * math.sqrt(len(heads)))).reshape(len(batch), -1)


# --- ours -----------------------------------------------------------------------------------------


def gram_entries(
    panel: plain.TensorPanel, rows: torch.Tensor, columns: torch.Tensor, biased: bool
) -> torch.Tensor:
    """K[rows[e], columns[e]] for the ReLU, in float64: what the fused kernel is held against."""
    result = torch.zeros(len(rows), dtype=torch.float64, device=panel.unit.device)
    first, lengths = (as_tensor(x, rows) for x in (panel.offsets[:-1], np.diff(panel.offsets)))
    sizes = lengths[rows] * lengths[columns]
    ends = torch.cumsum(sizes, 0).cpu().numpy()
    wide = panel.unit.shape[1] * 4 + 40
    for part in set_blocks(np.concatenate([[0], ends]), block_size(8 * wide, 2**32)):
        row, column, size = rows[part], columns[part], sizes[part]
        entry = torch.repeat_interleave(torch.arange(len(row), device=row.device), size)
        within = torch.arange(len(entry), device=row.device) - (torch.cumsum(size, 0) - size)[entry]
        width = lengths[column][entry]
        i = first[row][entry] + torch.div(within, width, rounding_mode="floor")
        j = first[column][entry] + within % width
        cosine = (panel.unit[i] * panel.unit[j]).sum(dim=1)
        query = (panel.query[row] * panel.query[column]).sum(dim=1)[entry]
        rho = (cosine * query).clamp(-1.0, 1.0)
        gap = (1.0 - rho.abs()).clamp(min=0.0)
        moment = plain.relu_arc(rho, gap)
        if biased:
            moment = plain.rectified_moment(1, panel.shift[i], panel.shift[j], rho, gap)
        values = moment * cosine * panel.weight[i] * panel.weight[j]
        # sums of runs by differences of a running total would cancel; a padded sum is exact and
        # repeatable
        result[part] = torch.segment_reduce(
            values, "sum", lengths=torch.bincount(entry, minlength=len(row))
        )
    return result


def exact_entries(
    batch: kh.SetBatch, distribution: kh.GaussianHeads, count: int
) -> tuple[torch.Tensor, ...]:
    panel = plain.prepare_panel(
        batch.tokens, batch.offsets, batch.query, *distribution.moments(DIM), "relu"
    )
    rows, columns = torch.randint(0, len(batch), (2, count), device="cuda")
    rows[:100] = columns[:100]  # some of the diagonal
    return rows, columns, gram_entries(panel, rows, columns, bool(distribution.mean))


def check_gram(matrix: torch.Tensor, batch: kh.SetBatch, distribution: kh.GaussianHeads) -> float:
    rows, columns, exact = exact_entries(batch, distribution, 20000)
    require(bool(torch.isfinite(matrix).all()), "every entry is written")
    require(torch.equal(matrix, matrix.T), "exactly symmetric")
    return float(((matrix[rows, columns].double() - exact) / exact).abs().max())


def bench_gram(n: int, ceiling: dict[str, float], seed: int) -> None:
    print(f"exact Gram matrix, n = {n}, d = N = 16, float32")
    batch = sphere(n, seed)
    pairs = (n * N_KEYS) ** 2 / 2
    eager = median_ms(lambda: broadcast_gram(broadcast_block, batch), repeat=3, warm=1)
    whole = broadcast_gram(broadcast_block, batch)
    rows, columns, exact = exact_entries(batch, kh.GaussianHeads(), 20000)
    error = float(((whole[rows, columns].double() - exact) / exact).abs().max())
    report("zero mean, torch eager broadcast", eager, error=error)
    block = torch.compile(broadcast_block, dynamic=False)
    compiled = median_ms(lambda: broadcast_gram(block, batch), repeat=5, warm=2)
    report("zero mean, torch.compile of it", compiled, ratio=eager / compiled)
    del whole
    ours = {}
    for name, distribution in (
        ("zero mean", kh.GaussianHeads()),
        ("around a mean", kh.GaussianHeads(mean=1.0)),
    ):
        poison(n, n)
        error = check_gram(kh.attention_kernel(batch, None, distribution), batch, distribution)
        require(error <= 1e-6, f"{name}: error {error:.3g} at most 1e-6")
        ours[name] = median_ms(
            lambda distribution=distribution: kh.attention_kernel(batch, None, distribution)
        )
        alone, nodes = kernel_alone(batch, distribution)
        figures: Row = {"error": error, "kernel_ms": alone, "ns_per_pair": 1e6 * ours[name] / pairs}
        if name == "zero mean":
            # 14 float32 instructions and one root per pair of keys, and 96 products on the tensor
            # cores
            arithmetic = 1e-9 * pairs * 15 / ceiling["multiply-add"]
            figures |= {"eager": eager / ours[name], "compile": compiled / ours[name]}
            figures |= {
                "arithmetic_share": arithmetic / ours[name],
                "arithmetic_share_kernel": arithmetic / alone,
            }
        else:
            roots = 1e-9 * pairs * 6 / ceiling["root"]
            figures |= {"over_zero_mean": ours[name] / ours["zero mean"], "nodes": nodes}
            figures |= {"special_function_share_kernel": roots / alone}
        report(f"{name}, fused", ours[name], **figures)
    if n >= 4096:
        part = batch[:1024]
        report(
            "zero mean, plain torch float64, n = 1024",
            median_ms(lambda: kh.attention_kernel(part.astype("float64")), repeat=3),
        )
        report(
            "around a mean, plain torch float64, n = 1024",
            median_ms(
                lambda: kh.attention_kernel(
                    part.astype("float64"), None, kh.GaussianHeads(mean=1.0)
                ),
                repeat=2,
            ),
        )
    bench_shapes(n, seed)


def kernel_alone(batch: kh.SetBatch, distribution: kh.GaussianHeads) -> tuple[float, int | None]:
    """The kernel without preparation and without entries done again."""
    mean, scale = distribution.moments(DIM)
    panel = plain.prepare_panel(batch.tokens, batch.offsets, batch.query, mean, scale, "relu")
    left, right = (
        fused.operand(panel, right=side, biased=mean is not None) for side in (False, True)
    )
    nodes = None if mean is None else fused.choose_nodes(panel, panel)
    out = torch.empty(len(batch), len(batch), device="cuda")
    tiling = fused.Tiling()
    return median_ms(
        lambda: fused.launch(left, right, out, symmetric=True, tiling=tiling, nodes=nodes)
    ), nodes


def bench_shapes(n: int, seed: int) -> None:
    """Ragged sets of the same number of keys, sets without a query, and K that goes to the host."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 2 * N_KEYS, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = sphere(-(-offsets[-1] // N_KEYS), seed + 1).tokens[: offsets[-1]]
    ragged = kh.SetBatch._from_flat(tokens, offsets, sphere(n, seed + 2).query)
    alone = kh.SetBatch(sphere(n, seed + 3).tokens.view(n, N_KEYS, DIM))
    for name, batch in (("1–31 keys", ragged), ("no query", alone)):
        for distribution in (kh.GaussianHeads(), kh.GaussianHeads(mean=1.0)):
            poison(n, n)
            error = check_gram(kh.attention_kernel(batch, None, distribution), batch, distribution)
            require(error <= 1e-6, f"{name}: error {error:.3g} at most 1e-6")
            report(
                f"{name}, {'around a' if distribution.mean else 'zero'} mean, fused",
                median_ms(
                    lambda b=batch, w=distribution: kh.attention_kernel(b, None, w), repeat=5
                ),
                error=error,
                ns_per_pair=1e6
                * median_ms(
                    lambda b=batch, w=distribution: kh.attention_kernel(b, None, w), repeat=3
                )
                / (batch.offsets[-1] ** 2 / 2),
            )
    host = torch.empty(n, n)
    report(
        "no query, zero mean, streamed to host memory",
        median_ms(
            lambda: dispatch.attention_gram(alone, None, None, 0.5, "relu", 2**30, host),
            repeat=3,
            warm=1,
        ),
    )


def bench_features(n: int, n_heads: int, ceiling: dict[str, float], seed: int) -> None:
    print(f"features, n = {n}, M = {n_heads}, float32")
    batch = sphere(n, seed)
    heads = torch.randn(n_heads, DIM + 1, DIM + 1, device="cuda") / 2
    rivals = {
        "torch eager einsum": einsum_features,
        "torch.compile of it": torch.compile(einsum_features, dynamic=False),
    }
    times = {}
    for name, rival in rivals.items():
        try:
            times[name] = median_ms(lambda rival=rival: rival(batch, heads), repeat=25)
        except Exception as error:
            report(name, note=f"failed: {type(error).__name__}")
            continue
        report(
            name,
            times[name],
            waited_for=median_ms(lambda rival=rival: rival(batch, heads), waited_for=True),
        )
    poison(n, n_heads * (DIM + 1))
    ours = kh.attention_features(batch, heads)
    rows = torch.randint(0, n, (64,)).numpy()
    exact = kh.attention_features(batch[rows].astype("float64"), heads.double())
    error = float((ours[rows].double() - exact).abs().max() / exact.abs().max())
    require(error <= 1e-6, f"features: error {error:.3g} at most 1e-6")
    require(bool(torch.isfinite(ours).all()), "every feature is written")
    size = ours.nbytes
    del ours
    time_ours = median_ms(lambda: kh.attention_features(batch, heads), repeat=25)
    waited = median_ms(lambda: kh.attention_features(batch, heads), waited_for=True)
    ratios = {name.split()[0]: time / time_ours for name, time in times.items()}
    report(
        "fused",
        time_ours,
        error=error,
        **ratios,
        write_share=1e-9 * size / ceiling["write"] / time_ours,
    )
    report("fused, one call at a time", waited)


def bench_ridge(n: int, seed: int) -> None:
    print(
        f"exact kernel ridge with leave-one-out, n = {n}, one penalty, float32 kernel, float64 "
        "factorisation"
    )
    sets = sphere(n + 1, seed).numpy()
    generator = np.random.default_rng(seed)
    y = kh.targets.Correlation(2, dim=DIM)(sets) + 0.01 * generator.standard_normal(n + 1)
    options: Row = {"n_heads": math.inf, "alpha": 1.0, "device": "cuda", "dtype": "float32"}
    small = kh.AttentionRegressor(
        **{
            "n_heads": 512,
            "heads": kh.GaussianHeads(),
            "scaling": "none",
            "query": "given",
            "activation": "relu",
            "pooling": "mean",
            **options,
        }
    ).fit(sets[:1000], y[:1000])  # compile, and make handles
    host = kh.AttentionRegressor(
        **{
            "n_heads": 512,
            "heads": kh.GaussianHeads(),
            "scaling": "none",
            "query": "given",
            "activation": "relu",
            "pooling": "mean",
            **{**options, "device": None, "dtype": "float64"},
        }
    ).fit(sets[:1000], y[:1000])
    difference = np.abs(small.loo_predictions_ - host.loo_predictions_).max() / np.abs(y).max()
    report("n = 1000: leave-one-out against NumPy in float64", error=float(difference))
    torch.cuda.reset_peak_memory_stats()
    poison(n, n, torch.float64)
    start = time.perf_counter()
    model = kh.AttentionRegressor(
        **{
            "n_heads": 512,
            "heads": kh.GaussianHeads(),
            "scaling": "none",
            "query": "given",
            "activation": "relu",
            "pooling": "mean",
            **options,
        }
    ).fit(sets[:n], y[:n])
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30
    start = time.perf_counter()
    predicted = model.predict(sets[n:])
    predict_ms = 1e3 * (time.perf_counter() - start)
    # optimality: (K + alpha) a + b = y on some rows, the kernel in float64
    rows = generator.integers(0, n, 16)
    some = sets[rows].to("cuda").astype("float64")
    kernel = kh.attention_kernel(some, sets[:n].to("cuda").astype("float64")).cpu().numpy()
    dual = model.dual_coef_
    residual = (
        np.abs(kernel @ dual + model.alpha_ * dual[rows] + model.intercept_ - y[rows]).max()
        / np.abs(y).max()
    )
    report(
        "fit, from NumPy arrays to NumPy arrays",
        1e3 * seconds,
        loo_r2=1 - model.loo_error_ / y.var(),
        peak_GiB=peak,
    )
    report("  its optimality conditions, kernel in float64", error=float(residual))
    report(
        "  prediction of one set", predict_ms, error_of_it=float(abs(predicted[0] - y[n]) / y.std())
    )
    stages(sets[:n], y[:n])
    without = np.setdiff1d(np.arange(n), [7])
    refit = kh.AttentionRegressor(
        **{
            "n_heads": 512,
            "heads": kh.GaussianHeads(),
            "scaling": "none",
            "query": "given",
            "activation": "relu",
            "pooling": "mean",
            **options,
        }
    ).fit(sets[without], y[without])
    left_out = refit.predict(sets[7:8])[0]
    report(
        "  one set left out and refitted",
        error=float(abs(left_out - model.loo_predictions_[7]) / np.abs(y).max()),
    )
    require(residual < 1e-5, f"optimality: {residual:.3g} at most 1e-5")
    require(
        abs(left_out - model.loo_predictions_[7]) < 1e-5 * np.abs(y).max(),
        "leave-one-out is a refit",
    )


def stages(sets: kh.SetBatch, y: np.ndarray) -> None:
    """Where the time of a fit goes."""
    from keyhole.attention.kernels import tensor_kernel
    from keyhole.ridge.device import DeviceRidge, factorise_lower, inverse_diagonal, invert_lower
    from keyhole.ridge.problem import RidgeProblem

    def clock(name: str, work: Callable[[], Any], operations: float = 0.0) -> Any:
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        spent = time.perf_counter() - start
        report(
            f"  {name}",
            1e3 * spent,
            **({"TFLOPs": operations / spent / 1e12} if operations else {}),
        )
        return result

    n = len(sets)
    moved = sets.to("cuda")
    gram = clock(
        "Gram matrix, stored in float64",
        lambda: tensor_kernel(moved, None, "relu", "float64", 2**30),
    )
    problem = clock("intercept", lambda: DeviceRidge.of(gram, RidgeProblem.of(y[:, None])))
    problem.matrix.diagonal().add_(1.0)
    clock("Cholesky factor", lambda: factorise_lower(problem.matrix), n**3 / 3)
    clock("its inverse", lambda: invert_lower(problem.matrix), n**3 / 3)
    clock("leverages", lambda: inverse_diagonal(problem.matrix, problem.normal))


def bench_path(n: int, seed: int) -> None:
    print(f"a path of 30 penalties, n = {n}")
    sets = sphere(n, seed).numpy()
    y = kh.targets.Correlation(2, dim=DIM)(sets)
    start = time.perf_counter()
    model = kh.AttentionRegressor(
        n_heads=math.inf,
        device="cuda",
        dtype="float32",
        heads=kh.GaussianHeads(),
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ).fit(sets, y)
    report(
        "30 Cholesky factorisations, kernel included",
        1e3 * (time.perf_counter() - start),
        alpha=model.alpha_,
    )
    gram = kh.attention_kernel(sets.to("cuda")).double()
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.linalg.eigh(gram[: n // 2, : n // 2])
    torch.cuda.synchronize()
    report(f"one eigendecomposition at n = {n // 2}", 1e3 * (time.perf_counter() - start))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=["gram", "features", "ridge", "path"])
    parser.add_argument("--size", choices=("full", "quick"), default="full")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10000)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_gpu.py measures a CUDA device, and torch sees none here.")
    full = arguments.size == "full"
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"seed {arguments.seed}"
    )
    ceiling = ceilings()
    if "gram" in arguments.only:
        bench_gram(8192 if full else 1024, ceiling, arguments.seed)
    if "features" in arguments.only:
        bench_features(4000 if full else 500, 1000, ceiling, arguments.seed + 10)
    if "ridge" in arguments.only:
        bench_ridge(50_000 if full else 4000, arguments.seed + 20)
    if "path" in arguments.only:
        bench_path(16384 if full else 2048, arguments.seed + 30)
    write(arguments)


def write(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    figures = {**about, "seed": arguments.seed, "rows": ROWS}
    (arguments.out / "gpu.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    lines = ["| | ms | |", "|---|---|---|"]
    for row in ROWS:
        rest = ", ".join(
            f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in row.items()
            if k not in ("name", "ms")
        )
        lines.append(
            f"| {row['name'].strip()} | {'' if row['ms'] is None else format(row['ms'], '.2f')} | "
            f"{rest} |"
        )
    (arguments.out / "gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {arguments.out / 'gpu.json'} and gpu.md")
    if FAILURES:
        raise SystemExit(f"{len(FAILURES)} checks failed: {'; '.join(FAILURES)}")


if __name__ == "__main__":
    main()
