"""Ten minutes of everything in one process, and its resident memory over time:
`python benchmarks/soak.py`.

Each round fits, predicts, streams, saves and loads models, and asks the explorer for views over
HTTP on the loopback address, some of them from clients that leave or send half a request. Settings
are drawn from fixed lists, and all of them are visited once before the clock starts, so that caches
are full: what grows afterwards is a leak.

    SECONDS=600 python benchmarks/soak.py        # or --seconds 600; writes out/soak/soak.csv

It exits with 1 where memory, threads or open files have grown.
"""

from __future__ import annotations

import argparse
import csv
import gc
import http.client
import itertools
import json
import math
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlencode

import numpy as np

import keyhole as kh

N_SAMPLES = 300
DIMENSIONS = (3, 6)
TARGETS = ("corr * token", "token^2 - 0.5 * query", "rotated(0.5) * token", "rotated(0.5)^6")
TOKEN_DIMENSIONS = ("4", "8")
MEANS = ("0", "0.5", "1")
VIEWS = ("curves", "needs", "surface", "spectrum", "heads", "rotation")

SHARE, MEBIBYTES = 0.05, 24.0
"""How much the last quarter may hold more than the second: this share, or so many MiB."""


@dataclass(frozen=True)
class Sample:
    """What the process holds at one time."""

    seconds: float
    rounds: int
    resident_mib: float
    n_threads: int
    n_files: int


def sample(start: float, rounds: int) -> Sample:
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return Sample(
        seconds=time.monotonic() - start,
        rounds=rounds,
        resident_mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        n_threads=threading.active_count(),
        n_files=len(os.listdir("/proc/self/fd")),
    )


# ---- models --------------------------------------------------------------------------------------


def draw_sets(rng: np.random.Generator, dim: int) -> tuple[kh.SetBatch, np.ndarray, np.ndarray]:
    """Sets with a query, a number to learn and a label."""
    keys = rng.standard_normal((N_SAMPLES, 5, dim))
    query = rng.standard_normal((N_SAMPLES, dim))
    scores = np.einsum("nd,nkd->nk", query, keys)
    y = (scores * keys[:, :, 0]).mean(axis=1)
    return kh.SetBatch(keys, query=query), y, y > 0


def fit_and_predict(rng: np.random.Generator, dim: int) -> None:
    sets, y, labels = draw_sets(rng, dim)
    regressor = kh.AttentionRegressor(n_heads=16, random_state=0).fit(sets, y)
    classifier = kh.AttentionClassifier(n_heads=16, random_state=0).fit(sets, labels)
    exact = kh.AttentionRegressor(n_heads=math.inf, random_state=0).fit(sets, y)
    assert np.isfinite(regressor.predict(sets)).all()
    assert np.isfinite(classifier.predict_proba(sets)).all()
    assert np.isfinite(exact.predict(sets)).all()


def stream(rng: np.random.Generator, dim: int) -> None:
    model = kh.AttentionRegressor(n_heads=16, random_state=0)
    for _ in range(4):
        sets, y, _ = draw_sets(rng, dim)
        model.partial_fit(sets, y)
    bad = np.full(N_SAMPLES, np.inf)
    with suppress(ValueError):  # a batch that is refused
        model.partial_fit(sets, bad)
    assert np.isfinite(model.predict(sets)).all()


def save_and_load(rng: np.random.Generator, dim: int, folder: Path) -> None:
    sets, y, _ = draw_sets(rng, dim)
    model = kh.AttentionRegressor(n_heads=16, random_state=0).partial_fit(sets, y)
    path = folder / "model.safetensors"
    kh.save(model, path, overwrite=True)
    loaded = kh.load(path)
    np.testing.assert_array_equal(loaded.predict(sets), model.predict(sets))
    loaded.partial_fit(sets, y)


# ---- the explorer --------------------------------------------------------------------------------


class Page:
    """Asks the explorer for views, as a browser does, and as nobody should."""

    def __init__(self, port: int, token: str) -> None:
        self.port = port
        self.token = token

    def ask_for_any_view(self, rng: np.random.Generator) -> None:
        choices = [str(rng.choice(values)) for values in (VIEWS, TARGETS, TOKEN_DIMENSIONS, MEANS)]
        self.ask_for_view(rng, *choices)

    def ask_for_view(
        self, rng: np.random.Generator, view: str, target: str, dim: str, mean: str
    ) -> None:
        settings = {
            "view": view,
            "target": target,
            "d": dim,
            "c": mean,
            "n": str(rng.integers(10, 10_000)),
            "ridge": f"{10 ** rng.uniform(-8, 0):.3g}",
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            # twice, as a page does that waits for what is being computed
            for _ in range(2):
                connection.request("GET", f"/{self.token}/view?{urlencode(settings)}")
                response = connection.getresponse()
                answer = json.loads(response.read())
                assert response.status == 200, answer
                if not answer["pending"]:
                    break
        finally:
            connection.close()

    def send_half(self) -> None:
        """A client that begins an upload and leaves, and one that never finishes its request."""
        head = f"Host: 127.0.0.1:{self.port}\r\n"
        for text in (
            f"POST /{self.token}/data?name=x.csv HTTP/1.1\r\n{head}Content-Length: 1000\r\n\r\na,b",
            f"GET /{self.token}/view HTTP/1.1\r\n{head}",
        ):
            with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
                connection.sendall(text.encode())

    def be_refused(self) -> None:
        """A state that makes no sense, and a token that is none."""
        for path, expected in ((f"/{self.token}/view?d=nan", 422), ("/x/view", 403)):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            try:
                connection.request("GET", path)
                status = connection.getresponse().status
                assert status == expected, status
            finally:
                connection.close()


# ---- the run -------------------------------------------------------------------------------------


def soak(seconds: float, n_samples: int) -> list[Sample]:
    """Rounds until the time is over; memory at so many times."""
    from keyhole.lab.explore.server import ExploreServer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = ExploreServer(folder / "store")
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.server.started:
            time.sleep(0.01)
        page = Page(server.port, server.token)
        try:
            return _rounds(seconds, n_samples, folder, page)
        finally:
            server.stop()
            thread.join(30)


def _rounds(seconds: float, n_samples: int, folder: Path, page: Page) -> list[Sample]:
    rng = np.random.default_rng(0)
    _warm_up(rng, folder, page)
    start = time.monotonic()
    samples = [sample(start, 0)]
    rounds = 0
    while samples[-1].seconds < seconds:
        dim = int(rng.choice(DIMENSIONS))
        fit_and_predict(rng, dim)
        stream(rng, dim)
        save_and_load(rng, dim, folder)
        page.ask_for_any_view(rng)
        page.send_half()
        page.be_refused()
        rounds += 1
        # a line now and then
        if time.monotonic() - start >= len(samples) * seconds / n_samples:
            samples.append(sample(start, rounds))
            latest = samples[-1]
            print(
                f"{latest.seconds:7.0f} s {latest.rounds:7d} rounds {latest.resident_mib:8.0f} MiB "
                f"{latest.n_threads:4d} threads {latest.n_files:4d} files",
                flush=True,
            )
    return samples


def _warm_up(rng: np.random.Generator, folder: Path, page: Page) -> None:
    """Everything once: loops are compiled, and caches fill."""
    start = time.monotonic()
    for dim in DIMENSIONS:
        fit_and_predict(rng, dim)
        stream(rng, dim)
        save_and_load(rng, dim, folder)
    settings = list(itertools.product(VIEWS, TARGETS, TOKEN_DIMENSIONS, MEANS))
    for view, target, dim_text, mean in settings:
        page.ask_for_view(rng, view, target, dim_text, mean)
    print(f"warm after {len(settings)} views and {time.monotonic() - start:.0f} s", flush=True)


def growth(samples: list[Sample]) -> list[str]:
    """What has grown from the second quarter of a run to its last."""
    quarter = max(len(samples) // 4, 1)
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]

    def middle(part: list[Sample], field: str) -> float:
        return float(np.median([getattr(entry, field) for entry in part]))

    found = []
    before, after = middle(early, "resident_mib"), middle(late, "resident_mib")
    if after - before > max(SHARE * before, MEBIBYTES):
        found.append(f"resident memory grew from {before:.0f} to {after:.0f} MiB")
    for field, name in (("n_threads", "threads"), ("n_files", "open files")):
        before, after = middle(early, field), middle(late, field)
        if after - before > 4:
            found.append(f"{name} grew from {before:.0f} to {after:.0f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SECONDS", "600")))
    parser.add_argument("--samples", type=int, default=40, help="how often memory is looked at")
    parser.add_argument("--out", type=Path, default=Path("out/soak"))
    arguments = parser.parse_args()
    samples = soak(arguments.seconds, arguments.samples)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "soak.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(asdict(samples[0])))
        writer.writeheader()
        writer.writerows(asdict(entry) for entry in samples)
    found = growth(samples)
    first = samples[len(samples) // 4]
    last = samples[-1]
    print(
        f"{last.rounds} rounds in {last.seconds:.0f} s: {first.resident_mib:.0f} MiB after "
        f"{first.seconds:.0f} s, {last.resident_mib:.0f} MiB at the end; "
        + ("; ".join(found) or "memory is flat")
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
