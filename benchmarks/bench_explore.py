"""How fast the page of `keyhole explore` is answered, over HTTP: a hand on the sliders, every state
seen once.

And, where Chromium is installed, how many frames a second the browser draws while a slider is
dragged.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import harness
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from chromium import chromium, find_chromium  # the browser of the tests

ALLOWED = {"curves": 0.030, "surface": 0.150}
"""Seconds at the median."""
SLIDERS = {"n": (10, 1e5), "M": (1, 2000), "ridge": (1e-8, 1.0), "noise": (0.01, 2.0)}
"""What is dragged; dimension, keys and mean are changed now and then."""


def run(size: str) -> Iterator[harness.Row]:
    from keyhole.lab.explore.server import ExploreServer

    with tempfile.TemporaryDirectory() as folder:
        server = ExploreServer(Path(folder) / "cells.sqlite")
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.server.started:
            time.sleep(0.01)
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        for view, allowed in ALLOWED.items():
            dragged, jumped = [], []
            for seconds, jump in _walk(
                connection, server.token, view, 60 if size == "small" else 300
            ):
                (jumped if jump else dragged).append(seconds)
            note = (
                f"90 %: {1e3 * np.quantile(dragged, 0.9):.0f} ms; {1e3 * allowed:.0f} ms asked for"
            )
            yield harness.row(f"{view}, dragging a slider", float(np.median(dragged)), note=note)
            note = f"worst: {max(jumped):.1f} s"
            yield harness.row(f"{view}, a new d, N or c", float(np.median(jumped)), note=note)
        connection.close()
        if find_chromium() is None:
            yield harness.row("frames", note="not measured: no Chromium")
        else:
            yield from _frames(server.address, 3.0 if size == "small" else 10.0)
        server.stop()
        thread.join()


DRAG = """new Promise((done) => {
  const slider = document.getElementById("ridge-slider"), times = [];
  const frame = (now) => {
    times.push(now);
    if (now - times[0] > %d) return done(times);
    slider.value = 500 + 400 * Math.sin((now - times[0]) / 700);
    slider.dispatchEvent(new Event("input"));
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""
"""A slider that moves with every frame, and the times of the frames."""


def _frames(address: str, seconds: float) -> Iterator[harness.Row]:
    with chromium() as new_page:
        page = new_page()
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=1280,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        for view in ALLOWED:
            page.call("Page.navigate", url=f"{address}?view={view}&c=0")
            page.wait("document.querySelector('#shown .plot svg.main-svg')")
            times = np.array(page.ask(DRAG % int(1000 * seconds)))
            gaps, per_second = np.diff(times), 1000 * (len(times) - 1) / (times[-1] - times[0])
            note = (
                f"{per_second:.0f} frames a second; 90 % of the gaps below "
                f"{np.quantile(gaps, 0.9):.0f} ms"
            )
            yield harness.row(
                f"{view}, a frame while dragging", float(np.median(gaps)) / 1000, note=note
            )


def _walk(
    connection: http.client.HTTPConnection, token: str, view: str, steps: int
) -> Iterator[tuple[float, bool]]:
    rng = np.random.default_rng(0)
    state = {"view": view, "target": "corr * token"}
    for step in range(steps):
        jump = step % 10 == 0
        if jump:
            state |= {
                "d": str(rng.integers(4, 65)),
                "N": str(rng.integers(1, 33)),
                "c": f"{rng.uniform(0, 2):.2f}",
            }
        else:
            name = str(rng.choice(list(SLIDERS)))
            low, high = SLIDERS[name]
            value = float(np.exp(rng.uniform(np.log(low), np.log(high))))
            state[name] = f"{value:.6g}" if name in ("ridge", "noise") else str(round(value))
        start = time.perf_counter()
        connection.request("GET", f"/{token}/view?{urlencode(state)}")
        answer = connection.getresponse()
        text = answer.read()
        yield time.perf_counter() - start, jump
        assert answer.status == 200, json.loads(text)


if __name__ == "__main__":
    print(harness.header())
    for found in run("small"):
        print(harness.line(found))
    print(f"  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
