"""Does a learned head distribution harm where zero-mean heads are right?
`python benchmarks/no_harm.py [--repeats 5]`.

Targets of token functions and of the query alone, sphere distribution, noise of a third of the
target's deviation: the ratio of the test error with a fitted head distribution to that with
zero-mean heads, the same heads and samples, over repeats; last that of `hops="auto"` to one look.
"""

from __future__ import annotations

import argparse

import numpy as np

import keyhole as kh

DIM, KEYS, HEADS = 6, 6, 128
TARGETS = {
    "mean of <b,x>": kh.targets.TokenPower(1, dim=DIM),
    "mean of <b,x>^2": kh.targets.TokenPower(2, dim=DIM),
    "<b,x0>^2": kh.targets.QueryPower(2, dim=DIM),
}


def errors(target: kh.targets.TokenPower, n: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    train, test = (
        kh.targets.sphere_sets(size, KEYS, DIM, seed=2 * seed + k)
        for k, size in enumerate((n, 1000))
    )
    truth = target(test)
    y = target(train) + 0.33 * truth.std() * rng.standard_normal(n)
    found = []
    for distribution in (
        kh.GaussianHeads(),
        kh.IdentityHeads(),
        kh.LearnedHeads(hops=1),
        kh.LearnedHeads(),
    ):
        model = kh.AttentionRegressor(
            HEADS,
            distribution,
            random_state=seed,
            scaling="none",
            query="given",
            activation="relu",
            pooling="mean",
        ).fit(train, y)
        found.append(float(np.mean((model.predict(test) - truth) ** 2)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, nargs="+", default=[90, 400])
    args = parser.parse_args()
    heads = "".join(f"{name:>18}" for name in ("identity/zero", "learned/zero", "auto/learned"))
    print(f"{'target':18}{'n':>6}{heads}   (ratio of mean errors ± standard error)")
    for name, target in TARGETS.items():
        for n in args.samples:
            table = np.array([errors(target, n, seed) for seed in range(args.repeats)])
            before = table[:, [0, 0, 2]]
            ratios = table[:, 1:].mean(axis=0) / before.mean(axis=0)
            spread = (table[:, 1:] / before).std(axis=0, ddof=1) / np.sqrt(args.repeats)
            cells = "".join(f"{r:10.3f} ± {s:.3f}" for r, s in zip(ratios, spread, strict=True))
            print(f"{name:18}{n:6}{cells}", flush=True)


if __name__ == "__main__":
    main()
