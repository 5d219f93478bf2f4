"""How fast the page of `keyhole explore` is answered, over HTTP: a hand on the sliders, every state
seen once. The theory is computed in a process of its own, so that only the clock is read.
"""

from __future__ import annotations

import http.client
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import harness
import numpy as np

from keyhole.attention.activations import POINTWISE

SLIDERS = {"n": (10, 1e5), "M": (1, 2000), "ridge": (1e-8, 1.0), "noise": (0.01, 2.0)}
"""What is dragged."""
LARGEST = {"d": 128, "N": 128, "c": 3.0}
"""Where the sliders of dimension, keys and mean end, which are changed now and then."""
FEW_DIMENSIONS = 8
"""Below, spectra of heads with a mean have many more levels: such answers have their own row."""
STEPS_PER_JUMP = 4
"""d, N and c are new in every such step."""


@dataclass(frozen=True)
class Answer:
    """How long one view took."""

    seconds: float
    is_new_setting: bool
    """Whether d, N and c were changed, so that spectra are computed anew."""
    dim: int


def run(size: str) -> Iterator[harness.Row]:
    from keyhole.lab.explore.server import ExploreServer

    n_steps = 120 if size == "small" else 480
    with tempfile.TemporaryDirectory() as folder:
        server = ExploreServer(Path(folder))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.server.started:
            time.sleep(0.01)
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        walks = [("curves", activation) for activation in POINTWISE]
        walks.append(("surface", "relu"))
        for seed, (view, activation) in enumerate(walks):
            answers = list(_walk(connection, server.token, view, activation, n_steps, seed))
            yield from _rows(f"{view} of {activation} heads", answers[STEPS_PER_JUMP:])
        connection.close()
        server.stop()
        thread.join()


def _rows(name: str, answers: list[Answer]) -> Iterator[harness.Row]:
    """One row for steps of a slider, and rows for a new d, N or c: of many dimensions, of few."""
    jumped = [answer for answer in answers if answer.is_new_setting]
    parts = {
        "dragging a slider": [answer for answer in answers if not answer.is_new_setting],
        f"a new d, N or c, d ≥ {FEW_DIMENSIONS}": [a for a in jumped if a.dim >= FEW_DIMENSIONS],
        f"the same, d < {FEW_DIMENSIONS}": [a for a in jumped if a.dim < FEW_DIMENSIONS],
    }
    for part, part_answers in parts.items():
        seconds = [answer.seconds for answer in part_answers]
        note = f"90 %: {1e3 * np.quantile(seconds, 0.9):.0f} ms, worst: {1e3 * max(seconds):.0f} ms"
        yield harness.row(f"{name}, {part}", float(np.median(seconds)), note=note)


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
        connection.request("GET", f"/{token}/view?{urlencode(state)}")
        answer = connection.getresponse()
        content = json.loads(answer.read())
        seconds = time.perf_counter() - start
        assert answer.status == 200, content
        yield Answer(seconds=seconds, is_new_setting=jump, dim=int(state["d"]))


if __name__ == "__main__":
    print(harness.header())
    for found in run("small"):
        print(harness.line(found))
    print(f"  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
