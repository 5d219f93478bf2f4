"""Soak of examples/service.py: many requests from many clients, some of them malformed.

    python benchmarks/soak_service.py --requests 10000 --clients 16

prints how many requests got which status, those that did not get the one expected, requests per
second, and the memory of the service while it runs.
"""

import argparse
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

import keyhole as kh

SERVICE = Path(__file__).parents[1] / "examples" / "service.py"
MALFORMED = [
    b"no json",
    b"[]",
    b'[{"set": 1, "x": 2.0}]',
    b'[{"set": 1, "x": 2.0, "colour": "mauve"}]',
    b'[{"set": 1, "x": null, "colour": "red"}]',
]


def save_model(path: Path) -> None:
    """A model of 200 sets of tokens with a number and a colour."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "set": np.repeat(np.arange(200), 4),
            "x": rng.normal(size=800),
            "colour": rng.choice(["blue", "red"], 800),
        }
    )
    table["target"] = table.groupby("set")["x"].transform("max")
    data = kh.read_table(table)
    model = kh.AttentionRegressor(64, random_state=0).fit(data.sets, data.target)
    kh.save(model, path, schema=data.schema)


def resident_mebibytes(process_id: int) -> float:
    """Memory that a process has in use, from /proc."""
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def client(port: int, n_requests: int, seed: int, statuses: Counter) -> None:
    """Send requests over one connection; every tenth is malformed."""
    rng = np.random.default_rng(seed)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    for number in range(n_requests):
        if number % 10 == 9:
            body = MALFORMED[rng.integers(len(MALFORMED))]
            expected = 422
        else:
            colours = rng.choice(["blue", "red"], 3).tolist()
            xs = rng.normal(size=3).tolist()
            rows = [{"set": 7, "x": x, "colour": c} for x, c in zip(xs, colours, strict=True)]
            body = json.dumps(rows).encode()
            expected = 200
        connection.request("POST", "/score", body)
        response = connection.getresponse()
        answer = json.loads(response.read())
        is_right = response.status == expected and ("error" in answer) == (expected == 422)
        statuses[response.status, "right" if is_right else "WRONG"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        save_model(Path(folder) / "model")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, str(SERVICE), f"{folder}/model", "--port", str(port)]
        service = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until_up(port)
            soak(service.pid, port, arguments.requests, arguments.clients)
        finally:
            service.terminate()
            service.wait()


def wait_until_up(port: int) -> None:
    """Return once the service takes connections."""
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("the service did not start within a minute")


def soak(process_id: int, port: int, n_requests: int, n_clients: int) -> None:
    """All requests, from all clients at once; memory at every tenth of the way."""
    statuses: Counter = Counter()
    threads = [
        threading.Thread(target=client, args=(port, n_requests // n_clients, seed, statuses))
        for seed in range(n_clients)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    reported = 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        done = sum(statuses.values())
        if done >= reported:
            memory = resident_mebibytes(process_id)
            print(f"{done:6d} requests: {memory:.0f} MiB", flush=True)
            reported += n_requests // 10
    seconds = time.perf_counter() - start
    done = sum(statuses.values())
    print(f"{done} requests in {seconds:.0f} s, {done / seconds:.0f} a second")
    print(f"memory at the end: {resident_mebibytes(process_id):.0f} MiB")
    for (status, verdict), count in sorted(statuses.items()):
        print(f"status {status}, {verdict}: {count}")


if __name__ == "__main__":
    main()
