"""Large sets: time, memory and accuracy, against gated-attention MIL and mean pooling in one run.

    python benchmarks/large_sets.py cpu [--quick]     100 bags × ~1,560 keys × 384 float32
    python benchmarks/large_sets.py disk [--quick]    50 bags × 10,000 keys × 1,024 float32 in files
    python benchmarks/large_sets.py keys [--quick]    contributions of one bag of 50,000 keys × 384
    python benchmarks/large_sets.py auc [--quick] [--only METHOD]    at 1 % of signal keys
    python benchmarks/large_sets.py device DEVICE [--quick]      times and a profile on cuda or cpu

Times are process times, which other processes on the machine do not change, and are given in units
of two matrix products (tokens × 512 heads, and back) of the same precision in the same run; on a
device they are wall times. Memory is the resident set beyond what it was before the fit.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import keyhole as kh

N_HEADS = 512
FIXED = {
    "n_heads": N_HEADS,
    "heads": kh.GaussianHeads(),
    "activation": "relu",
    "pooling": "mean",
    "scaling": "standard",
    "query": "given",
    "keys": "all",
    "loss": "squared_error",
    "random_state": 0,
}


def resident_megabytes() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def measured(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Process seconds, megabytes beyond those before, and the result of some work."""
    before = resident_megabytes()
    peak = before
    is_done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.01):
            peak = max(peak, resident_megabytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.process_time()
    result = work()
    seconds = time.process_time() - start
    is_done.set()
    watcher.join()
    return seconds, peak - before, result


def product_seconds(sets: kh.SetBatch, dtype: str, n_bags: int = 20) -> float:
    """The two products of every bag with 512 heads, from those of some of them."""
    weights = np.random.default_rng(0).standard_normal((sets.dim, N_HEADS)).astype(dtype)
    bags = [sets.keys_of(i).astype(dtype) for i in range(min(n_bags, len(sets)))]
    start = time.process_time()
    for keys in bags:
        scores = keys @ weights
        scores.T @ keys
    seconds = time.process_time() - start
    return seconds * sets.n_tokens / sum(len(keys) for keys in bags)


def warm_up(dim: int, **settings: Any) -> None:
    """Compile what is compiled, on a few small bags."""
    few = kh.datasets.make_bags(12, 300, dim)
    kh.AttentionClassifier(**settings).fit(few.sets, few.target)


def cpu(quick: bool) -> None:
    """Fits in memory."""
    n_bags = 20 if quick else 100
    bags = kh.datasets.make_bags(n_bags, (1040, 2080), 384, 0.02)
    print(f"{bags.sets}, {bags.sets.nbytes / 1e6:.0f} MB")
    print("  setting                              products   fit    ratio  memory  leave-one-out")
    rows = {
        "fixed, float64": FIXED,
        "fixed, float32": {**FIXED, "dtype": "float32"},
        "fixed, sphere": {**FIXED, "scaling": "sphere"},
        "fixed, mean of keys as query": {**FIXED, "query": "mean"},
        "default, heads=GaussianHeads()": {"heads": kh.GaussianHeads(), "random_state": 0},
    }
    for name, settings in rows.items():
        dtype = settings.get("dtype", "float64")
        warm_up(384, **settings)
        products = product_seconds(bags.sets, dtype)
        model = kh.AttentionClassifier(**settings)
        seconds, megabytes, _ = measured(lambda model=model: model.fit(bags.sets, bags.target))
        print(
            f"  {name:34}{products:9.2f} s{seconds:8.2f} s{seconds / products:7.2f}"
            f"{megabytes:6.0f} MB{model.loo_error_:12.5f}",
            flush=True,
        )


def disk(quick: bool) -> None:
    """A fit of files that are read as they are needed."""
    n_bags, n_keys, dim = (10, 2000, 1024) if quick else (50, 10_000, 1024)
    rng = np.random.default_rng(0)
    warm_up(dim, **FIXED)
    with tempfile.TemporaryDirectory() as folder:
        labels = {}
        for i in range(n_bags):
            keys = rng.standard_normal((n_keys, dim), dtype=np.float32)
            keys[: n_keys // 100, 0] += 3 * (i % 2)
            np.save(Path(folder, f"bag{i:03d}.npy"), keys)
            labels[f"bag{i:03d}"] = i % 2
        start = time.process_time()
        for name in labels:
            np.load(Path(folder, f"{name}.npy")).sum()
        reading = time.process_time() - start
        bags = kh.read_bags(folder, labels)
        products = product_seconds(bags.sets, "float64", n_bags=2)
        model = kh.AttentionClassifier(**FIXED)
        seconds, megabytes, _ = measured(lambda: model.fit(bags.sets, bags.target))
    print(f"{n_bags} files of {n_keys} × {dim} float32, {bags.sets.nbytes / 1e9:.2f} GB")
    print(f"  reading {reading:.1f} s, products {products:.1f} s, fit {seconds:.1f} s:")
    print(f"  {seconds / max(reading, products):.2f} times the larger, {megabytes:.0f} MB")


def keys(quick: bool) -> None:
    """Contributions of one very large bag."""
    n_keys = 5000 if quick else 50_000
    bags = kh.datasets.make_bags(40, 300, 384, 0.05)
    model = kh.AttentionClassifier(**FIXED).fit(bags.sets, bags.target)
    large = kh.datasets.make_bags(1, n_keys, 384, 0.01, positive=1.0)
    model.contributions(bags.sets[:1])
    seconds, megabytes, _ = measured(lambda: model.contributions(large.sets))
    print(f"contributions of {n_keys} keys × 384: {seconds:.2f} s, {megabytes:.0f} MB")


# ---- accuracy ------------------------------------------------------------------------------------


def gated_attention(train: Any, train_y: Any, test: Any, device: str, max_epochs: int) -> Any:
    """Scores of gated-attention MIL (Ilse et al. 2018), with early stopping on a sixth held out."""
    import torch

    torch.manual_seed(0)

    class Gated(torch.nn.Module):
        def __init__(self, dim: int, width: int = 128) -> None:
            super().__init__()
            self.embed = torch.nn.Sequential(torch.nn.Linear(dim, width), torch.nn.ReLU())
            self.tanh = torch.nn.Linear(width, 64)
            self.gate = torch.nn.Linear(width, 64)
            self.weigh = torch.nn.Linear(64, 1)
            self.score = torch.nn.Linear(width, 1)

        def forward(self, keys: Any) -> Any:
            hidden = self.embed(keys)
            logits = self.weigh(torch.tanh(self.tanh(hidden)) * torch.sigmoid(self.gate(hidden)))
            return self.score((torch.softmax(logits, dim=0) * hidden).sum(dim=0))

    def tensors(sets: Any) -> list[Any]:
        return [torch.tensor(sets.keys_of(i), device=device) for i in range(len(sets))]

    bags = tensors(train)
    labels = torch.tensor(train_y, dtype=torch.float32, device=device)
    order = np.random.default_rng(0).permutation(len(bags))
    held_out, rest = order[: len(bags) // 6], order[len(bags) // 6 :]
    model = Gated(train.dim).to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-4, weight_decay=1e-5)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    best, best_state, patience = np.inf, model.state_dict(), 0
    for epoch in range(max_epochs):
        model.train()
        for i in np.random.default_rng(epoch).permutation(rest):
            optimiser.zero_grad()
            loss_of(model(bags[i])[0], labels[i]).backward()
            optimiser.step()
        model.eval()
        with torch.no_grad():
            loss = float(sum(loss_of(model(bags[i])[0], labels[i]) for i in held_out))
        patience += 1
        if loss < best:
            best, patience = loss, 0
            best_state = {name: value.clone() for name, value in model.state_dict().items()}
        if patience >= 10:
            break
    model.load_state_dict(best_state)
    with torch.no_grad():
        return np.array([float(model(bag)[0]) for bag in tensors(test)])


def mean_pooling(train: Any, train_y: Any, test: Any) -> Any:
    """Scores of a logistic regression on the means of the keys."""

    def means(sets: Any) -> np.ndarray:
        return np.array([sets.keys_of(i).mean(axis=0) for i in range(len(sets))])

    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=2000))
    return model.fit(means(train), train_y).decision_function(means(test))


def auc(quick: bool, device: str, only: str | None) -> None:
    """Needles: accuracy on new bags, and time of a fit; of one method if ``only`` names it."""
    n_keys, dim, n_each = ((250, 350), 32, 60) if quick else ((1000, 2000), 768, 150)
    bags = kh.datasets.make_bags(2 * n_each, n_keys, dim, 0.01)
    train, test = bags.sets[:n_each], bags.sets[n_each:]
    y, test_y = bags.target[:n_each], bags.target[n_each:]
    where = None if device == "cpu" else device

    def attention(**settings: Any) -> Any:
        model = kh.AttentionClassifier(random_state=0, device=where, **settings)
        return model.fit(train, y).decision_function(test)

    methods = {
        "mean pooling, logistic": lambda: mean_pooling(train, y, test),
        "gated-attention MIL": lambda: gated_attention(train, y, test, device, 60),
        "keyhole, GaussianHeads()": lambda: attention(heads=kh.GaussianHeads()),
        "keyhole, LearnedHeads()": lambda: attention(heads=kh.LearnedHeads()),
        "keyhole, default settings": attention,
    }
    print(f"{n_each} bags to train, {n_each} to test, 1 % signal keys: {train}")
    for name, method in methods.items():
        if only not in (None, name):
            continue
        began = time.perf_counter()
        cpu_began = time.process_time()
        scores = method()
        wall = time.perf_counter() - began
        spent = time.process_time() - cpu_began
        area = roc_auc_score(test_y, scores)
        print(f"  {name:28} AUC {area:.3f}   {spent:7.1f} s of process, {wall:7.1f} s", flush=True)


def on_device(device: str, quick: bool) -> None:
    """Fit, predict and contributions on a device, with the profile of the fit."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    n_keys, dim, n_bags = ((60, 90), 32, 40) if quick else ((2900, 5900), 768, 150)
    bags = kh.datasets.make_bags(2 * n_bags, n_keys, dim, 0.005)
    train, test = bags.sets[:n_bags], bags.sets[n_bags:]
    model = kh.AttentionClassifier(
        heads=kh.GaussianHeads(), device=device, dtype="float32", random_state=0
    )
    few = kh.datasets.make_bags(12, 50, dim)
    model.fit(few.sets, few.target).predict(few.sets)
    activities = [ProfilerActivity.CPU]
    if device.startswith("cuda"):
        activities.append(ProfilerActivity.CUDA)

    def synchronised(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - start

    print(f"{train} on {device}")
    fit = synchronised(lambda: model.fit(train, bags.target[:n_bags]))
    predict = synchronised(lambda: model.predict(test))
    contributions = synchronised(lambda: model.contributions(test))
    print(f"  fit {fit:.2f} s, predict {predict:.2f} s, contributions {contributions:.2f} s")
    with profile(activities=activities) as trace:
        fit = synchronised(lambda: model.fit(train, bags.target[:n_bags]))
    events = trace.key_averages()
    # kernels and copies; operators of torch repeat the time of the kernels that they launch
    on_device = [event for event in events if "CUDA" in str(event.device_type)]
    busy = sum(event.self_device_time_total for event in on_device) / 1e6
    print(f"  under the profiler a fit takes {fit:.2f} s, and the device is busy for {busy:.2f} s")
    key = "self_device_time_total" if device.startswith("cuda") else "self_cpu_time_total"
    print(events.table(sort_by=key, row_limit=12, max_name_column_width=40))


def main() -> None:
    """One part of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("cpu", "disk", "keys", "auc", "device"))
    parser.add_argument("device", nargs="?", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a small form of it")
    parser.add_argument("--only", help="one method of auc, by its name in the table")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.part == "device":
        on_device(options.device, options.quick)
    elif options.part == "auc":
        auc(options.quick, options.device, options.only)
    else:
        {"cpu": cpu, "disk": disk, "keys": keys}[options.part](options.quick)


if __name__ == "__main__":
    main()
