"""What wide tokens cost: features of M heads as the dimension of tokens grows, with and without a
query.

    python benchmarks/bench_wide.py

Sets without a query see the last row of each W, so that MD numbers are drawn where D² a head would
be; the rival draws all of W and is given the constant query [0; 1] as one of its own, which is what
every fit did before.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

import keyhole as kh
from keyhole.attention.features import attention_features
from keyhole.attention.heads import HeadDraw

N_SETS, N_KEYS, N_HEADS = 100, 10, 512
DIMS = (16, 64, 166, 354, 708)


def seconds(sets: kh.SetBatch, dim: int) -> float:
    """The best of two runs: draw the heads, make the features."""
    times = []
    for _ in range(2):
        start = perf_counter()
        attention_features(
            sets, HeadDraw(kh.GaussianHeads(), N_HEADS, dim, seed=0), dtype="float32"
        )
        times.append(perf_counter() - start)
    return min(times)


def main() -> None:
    """Print one row for each dimension."""
    print(f"{N_SETS} sets of {N_KEYS} keys, {N_HEADS} heads, float32: seconds")
    print("     d  no query  constant query written out  exact kernel")
    for dim in DIMS:
        keys = np.random.default_rng(0).normal(size=(N_SETS, N_KEYS, dim)) / np.sqrt(dim)
        bare, asked = kh.SetBatch(keys), kh.SetBatch(keys, np.zeros((N_SETS, dim)))
        attention_features(
            bare[:1], HeadDraw(kh.GaussianHeads(), 8, dim, seed=0), dtype="float32"
        )  # compile
        start = perf_counter()
        kh.attention_kernel(bare)
        kernel = perf_counter() - start
        print(
            f"{dim:6d}  {seconds(bare, dim):8.3f}  {seconds(asked, dim):26.3f}  {kernel:12.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
