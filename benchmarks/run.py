"""Every hot path beside its rivals, in one run: `make bench`, or
`run.py --only ridge --size small`.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import platform
from pathlib import Path

import harness

BENCHES = ("features", "kernels", "ridge", "fit", "norm_ball", "explore")
SIZES = ("small", "paper")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", choices=BENCHES, action="append", help="one hot path; may be repeated"
    )
    parser.add_argument("--size", choices=SIZES, action="append", help="one size; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    arguments = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {harness.threads()} threads; ceilings "
        "measured in this run:"
    )
    print(f"  matrix product  {harness.gemm_rate('float64') / 1e9:6.0f} GFLOP/s float64")
    print(f"                  {harness.gemm_rate('float32') / 1e9:6.0f} GFLOP/s float32")
    print(f"  memory copy     {harness.copy_bandwidth() / 1e9:6.1f} GB/s read plus written")
    rows = []
    for name in arguments.only or BENCHES:
        for size in arguments.size or SIZES:
            print(f"\n{name}, {size}")
            print(harness.header())
            for row in importlib.import_module(f"bench_{name}").run(size):
                rows.append({"bench": name, "size": size, **row})
                print(harness.line(row), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "bench.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        fields = ["bench", "size", "name", "seconds", "ratio", "peak_mib", "ceiling_share", "note"]
        writer = csv.DictWriter(file, fieldnames=fields)
        writer.writeheader()
        writer.writerows(rows)
    print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
