"""
A predicted learning curve beside your own
==========================================

Theory predicts the test error of a layer before any training, from the spectrum of its
kernel. We put the prediction beside fitted layers, and do the same for data whose
spectrum is unknown.
"""

# %%
# A target of the theory
# ----------------------
# The mean over keys of the product ⟨x₀,xᵢ⟩⟨β,xᵢ⟩; query and keys are uniform on the
# sphere.
import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import keyhole as kh

DIM, N_KEYS, RIDGE = 6, 4, 1e-4
target = kh.targets.Correlation(1, dim=DIM)
pool = kh.targets.sphere_sets(2000, n_keys=N_KEYS, dim=DIM, seed=0)
test = kh.targets.sphere_sets(1000, n_keys=N_KEYS, dim=DIM, seed=1)
variance = target(test).var()

# %%
# One sample: its query, then its keys.
pd.DataFrame(np.vstack([pool[0].query, pool[0].tokens])).round(2)

# %%
# Predict, then measure
# ---------------------
sizes = np.array([50, 100, 200, 400, 800])
predicted = {
    n_heads: kh.theory.learning_curve(
        target, sizes, n_keys=N_KEYS, ridge=RIDGE, n_heads=n_heads
    )
    for n_heads in (20, math.inf)
}


def measured_error(n, n_heads, seed):
    """Squared error of a fit of n samples on the test sets."""
    rows = np.random.default_rng(seed).permutation(len(pool))[:n]
    model = kh.AttentionRegressor(
        n_heads,
        kh.GaussianHeads(),
        alpha=n * RIDGE,
        activation="relu",
        pooling="mean",
        scaling="none",
        query="given",
        fit_intercept=False,
        random_state=seed,
    )
    model.fit(pool[rows], target(pool[rows]))
    return np.mean((model.predict(test) - target(test)) ** 2)


figure, ax = plt.subplots(figsize=(6, 3.6), layout="constrained")
for n_heads, colour in ((20, "tab:orange"), (math.inf, "tab:blue")):
    label = "infinitely many heads" if math.isinf(n_heads) else f"{n_heads} heads"
    ax.plot(
        sizes, predicted[n_heads] / variance, color=colour, label=f"{label}, predicted"
    )
    errors = np.array(
        [[measured_error(n, n_heads, seed) for seed in range(4)] for n in sizes]
    )
    ax.errorbar(
        sizes,
        errors.mean(axis=1) / variance,
        yerr=errors.std(axis=1) / 2 / variance,
        fmt="o",
        color=colour,
        label=f"{label}, measured",
    )
    ratio = predicted[n_heads] / errors.mean(axis=1)
    print(f"{label}: predicted over measured {ratio.round(2)}")
ax.set(
    xscale="log", yscale="log", xlabel="training sets n", ylabel="test error / variance"
)
ax.minorticks_off()
ax.set_xticks(sizes, sizes)
ax.set_yticks([0.2, 0.5, 1.0], ["0.2", "0.5", "1"])
ax.legend()
plt.show()

# %%
# Your own data
# -------------
# For data of an unknown distribution the eigenvalues of its Gram matrix stand for the
# spectrum. ``empirical_curve`` predicts from a sample what smaller samples would give.
digits = kh.datasets.load_digits_sets()
rows = np.flatnonzero(np.isin(digits.target, (3, 8)))
sets, y = digits.sets[rows], np.where(digits.target[rows] == 3, 1.0, -1.0)
gram = kh.attention_kernel(sets)
curve_sizes = np.array([20, 40, 80])
curve = kh.theory.empirical_curve(gram, y - y.mean(), curve_sizes, ridge=1e-3)
own = []
for n in curve_sizes:
    errors = []
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(len(y))
        fit, new = order[:n], order[n:]
        weights = np.linalg.solve(
            gram[np.ix_(fit, fit)] + n * 1e-3 * np.eye(n), y[fit] - y.mean()
        )
        errors.append(
            np.mean((gram[np.ix_(new, fit)] @ weights - y[new] + y.mean()) ** 2)
        )
    own.append(np.mean(errors))
print(
    pd.DataFrame({"n": curve_sizes, "predicted": curve.error, "measured": own}).round(3)
)

# %%
# A baseline for the first target: the same theory for an MLP on the flattened input.
mlp = kh.theory.learning_curve(target, sizes, n_keys=N_KEYS, ridge=RIDGE, model="mlp")
print("MLP, predicted error / variance:", (mlp / variance).round(2))

# %%
# What to change for your data
# ----------------------------
# ``keyhole lens DATA`` draws the learning curve of your data with a forecast. Change
# ``target`` to ``keyhole.theory.notation.parse_target("corr^2 * token", dim=6).target``
# for other polynomials.
