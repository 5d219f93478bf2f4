"""How fast the page of `keyhole explore` is answered, over HTTP: a hand on the sliders, every state
seen once.

The learning curves are asked for under every pointwise activation, and beside the seconds on the
clock stands the process time of server and client together, which others on the machine do not move
much. And, where Chromium is installed, how many frames a second the browser draws while a slider is
dragged.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import harness
import numpy as np

from keyhole.attention.activations import POINTWISE

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from chromium import chromium, find_chromium  # the browser of the tests

ALLOWED = {"curves": 0.030, "surface": 0.150}
"""Seconds at the median."""
SLIDERS = {"n": (10, 1e5), "M": (1, 2000), "ridge": (1e-8, 1.0), "noise": (0.01, 2.0)}
"""What is dragged."""
LARGEST = {"d": 128, "N": 128, "c": 3.0}
"""Where the sliders of dimension, keys and mean end, which are changed now and then."""
FEW_DIMENSIONS = 8
"""Below, spectra of heads with a mean have many more levels: such answers have their own row."""
MEANS = (0.5, 1.0, 2.0, 3.0)
PLACES = 16
"""Means, changed a little, and places of the other sliders of every dimension below nine."""
STEPS_PER_JUMP = 4
"""d, N and c are new in every such step."""


def run(size: str) -> Iterator[harness.Row]:
    from keyhole.lab.explore.server import ExploreServer

    with tempfile.TemporaryDirectory() as folder:
        server = ExploreServer(Path(folder) / "cells.sqlite")
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.server.started:
            time.sleep(0.01)
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        n_steps = 120 if size == "small" else 480
        walks = [("curves", activation) for activation in POINTWISE]
        walks.append(("surface", "relu"))
        for seed, (view, activation) in enumerate(walks):
            answers = list(_walk(connection, server.token, view, activation, n_steps, seed))
            yield from _rows(f"{view} of {activation} heads", answers, ALLOWED[view])
        connection.close()
        if find_chromium() is None:
            yield harness.row("frames", math.nan, note="not measured: no Chromium")
        else:
            yield from _frames(server.address, 3.0 if size == "small" else 10.0)
        server.stop()
        thread.join()
    yield from _few_dimensions()


def _few_dimensions() -> Iterator[harness.Row]:
    """The theory of new places of all sliders below nine dimensions, without HTTP."""
    from keyhole.lab.explore import views

    def process_seconds(activation: str, dim: int, n_keys: int, mean: float) -> float:
        """For all curves of a page."""
        state = views.ExploreState.read(
            {
                "view": "curves",
                "target": "corr * token",
                "activation": activation,
                "d": str(dim),
                "N": str(n_keys),
                "c": f"{mean:.3f}",
                "ridge": f"{np.exp(rng.uniform(np.log(1e-8), 0)):.3g}",
                "M": str(round(float(np.exp(rng.uniform(0, np.log(2000)))))),
                "noise": f"{np.exp(rng.uniform(np.log(0.01), np.log(2))):.3g}",
            }
        )
        start = time.process_time()
        for ask in views._curve_asks(state):
            if ask.function == "learning_curve":
                views.answered(ask.question(state, state.sizes))
        return time.process_time() - start

    rng = np.random.default_rng(7)
    process_seconds("relu", 9, 3, 0.77)  # imports and the caches of all dimensions
    for activation in ("relu", "step", "linear", "square", "exp"):
        for dim in range(2, FEW_DIMENSIONS + 1):
            seconds = []
            for i in range(PLACES):
                mean = min(MEANS[i % len(MEANS)] + 0.01 * rng.uniform(-1, 1), LARGEST["c"])
                n_keys = int(rng.integers(1, 33))
                seconds.append(process_seconds(activation, dim, n_keys, mean))
            note = f"process time, worst: {1e3 * max(seconds):.0f} ms"
            name = f"theory of {activation} heads, d = {dim}"
            yield harness.row(name, float(np.median(seconds)), note=note)


def _rows(name: str, answers: list[Answer], allowed: float) -> Iterator[harness.Row]:
    """One row for steps of a slider, and rows for a new d, N or c: of many dimensions, of few."""
    dragged = [answer for answer in answers if not answer.is_new_setting]
    jumped = [answer for answer in answers if answer.is_new_setting]
    parts = {
        "dragging a slider": dragged,
        "a new d, N or c": jumped,
        f"the same, d ≥ {FEW_DIMENSIONS}": [a for a in jumped if a.dim >= FEW_DIMENSIONS],
        f"the same, d < {FEW_DIMENSIONS}": [a for a in jumped if a.dim < FEW_DIMENSIONS],
    }
    for part, part_answers in parts.items():
        process = [1e3 * answer.process_seconds for answer in part_answers]
        n_quick = sum(milliseconds <= 1e3 * allowed for milliseconds in process)
        note = (
            f"process time {np.median(process):.0f} ms, 90 %: {np.quantile(process, 0.9):.0f} ms, "
            f"worst: {max(process):.0f} ms; {n_quick} of {len(process)} within the "
            f"{1e3 * allowed:.0f} ms asked for"
        )
        median = float(np.median([answer.seconds for answer in part_answers]))
        yield harness.row(f"{name}, {part}", median, note=note)


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


@dataclass(frozen=True)
class Answer:
    """How long one view took."""

    seconds: float
    """On the clock, until the first answer."""
    process_seconds: float
    """Of server and client, which are threads of one process here, until nothing is pending."""
    is_new_setting: bool
    """Whether d, N and c were changed, so that spectra are computed anew."""
    dim: int
    """d."""


def _walk(
    connection: http.client.HTTPConnection,
    token: str,
    view: str,
    activation: str,
    steps: int,
    seed: int,
) -> Iterator[Answer]:
    # activations share the curves of the MLP: every walk has its own d and N
    rng = np.random.default_rng(seed)
    state = {"view": view, "target": "corr * token", "activation": activation}
    for step in range(steps):
        jump = step % STEPS_PER_JUMP == 0
        if jump:
            # any place of the sliders, of which those of d and N are logarithmic
            state |= {
                "d": str(round(LARGEST["d"] ** rng.uniform())),
                "N": str(round(LARGEST["N"] ** rng.uniform())),
                "c": f"{LARGEST['c'] * rng.uniform():.2f}",
            }
        else:
            name = str(rng.choice(list(SLIDERS)))
            low, high = SLIDERS[name]
            value = float(np.exp(rng.uniform(np.log(low), np.log(high))))
            state[name] = f"{value:.6g}" if name in ("ridge", "noise") else str(round(value))
        start = time.perf_counter()
        process_start = time.process_time()
        content = _ask(connection, token, state)
        seconds = time.perf_counter() - start
        # what a page asks for again counts as well, until nothing is pending
        while content["pending"]:
            time.sleep(0.01)
            content = _ask(connection, token, state)
        yield Answer(
            seconds=seconds,
            process_seconds=time.process_time() - process_start,
            is_new_setting=jump,
            dim=int(state["d"]),
        )


def _ask(
    connection: http.client.HTTPConnection, token: str, state: dict[str, str]
) -> dict[str, Any]:
    connection.request("GET", f"/{token}/view?{urlencode(state)}")
    answer = connection.getresponse()
    content = json.loads(answer.read())
    assert answer.status == 200, content
    return dict(content)


if __name__ == "__main__":
    print(harness.header())
    for found in run("small"):
        print(harness.line(found))
    print(f"  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
