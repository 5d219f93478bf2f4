"""Approximate leave-one-out of a logistic last layer against real refits.

    python benchmarks/logistic_loo.py [--seeds 5] [--samples 200]

Bags whose label a maximum decides, once evenly and once for one in twenty, under 64 heads with
statistics of the keys. At each of a few penalties every sample is left out by a refit. Printed:
the mean log-loss of the refits, that of the approximation and of the fit itself, and the root mean
square differences of logits, all over seeds.
"""

import argparse

import numpy as np

import keyhole as kh
from keyhole.solve.newton import fit_newton
from keyhole.solve.problem import RidgeFit, RidgeProblem
from keyhole.solve.spectral import Spectrum


def features_of(bags: list[np.ndarray]) -> np.ndarray:
    """Attention features of 64 heads, beside mean and extremes of the keys, all standardised."""
    sets = kh.SetBatch(bags)
    features = kh.AttentionFeatures(64, kh.GaussianHeads(), random_state=0).fit_transform(sets)
    statistics = [np.concatenate([b.mean(axis=0), b.min(axis=0), b.max(axis=0)]) for b in bags]
    extras = np.array(statistics)
    extras = (extras - extras.mean(axis=0)) / extras.std(axis=0)
    return np.concatenate([features, extras], axis=1)


def draw(seed: int, n: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    bags = [rng.normal(size=(int(rng.integers(3, 10)), 3)) for _ in range(n)]
    score = np.array([bag[:, 0].max() for bag in bags]) + 0.3 * rng.normal(size=n)
    return features_of(bags), np.where(score > np.quantile(score, 1 - share), 1.0, -1.0)[:, None]


def log_loss(y: np.ndarray, logits: np.ndarray) -> float:
    return float(np.logaddexp(0.0, -y * logits).mean())


def fit_logistic(gram: np.ndarray, y: np.ndarray, alpha: float) -> RidgeFit:
    """Logistic regression on a Gram matrix at one penalty."""
    problem = RidgeProblem.of(y, [alpha], criterion="log_loss")
    return fit_newton(Spectrum.of_gram(gram.copy(), problem))


def compare(seed: int, n: int, share: float, alpha: float) -> list[float]:
    """Log-losses of refits, approximation and fit; differences of the last two to the refits."""
    features, y = draw(seed, n, share)
    gram = features @ features.T
    fit = fit_logistic(gram, y, alpha)
    fitted = gram @ fit.coef[:, 0] + fit.intercept[0]
    approximate = y[:, 0] - fit.left_out[:, 0]
    refitted = np.empty(n)
    for i in range(n):
        rest = np.flatnonzero(np.arange(n) != i)
        without = fit_logistic(gram[np.ix_(rest, rest)], y[rest], alpha)
        refitted[i] = gram[i, rest] @ without.coef[:, 0] + without.intercept[0]
    losses = [log_loss(y[:, 0], logits) for logits in (refitted, approximate, fitted)]
    differences = [
        float(np.sqrt(np.mean(np.square(logits - refitted)))) for logits in (approximate, fitted)
    ]
    return losses + differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=200)
    arguments = parser.parse_args()
    print(f"{'share':>6} {'alpha':>6} {'refits':>8} {'approx.':>8} {'fit':>8}   rms to refits")
    for share in (0.5, 0.05):
        for alpha in (100.0, 10.0, 1.0, 0.1):
            rows = [compare(s, arguments.samples, share, alpha) for s in range(arguments.seeds)]
            refits, approximate, fitted, error, change = np.mean(rows, axis=0)
            print(
                f"{share:6} {alpha:6g} {refits:8.4f} {approximate:8.4f} {fitted:8.4f}   "
                f"approximation {error:.3f}, fit {change:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
