"""
Contributions: which pixels say that this is a three?
=====================================================

A digit is the set of its inked pixels: row, column and ink. The score of every class is
a sum over pixels, so that each pixel has a part in it. The data ships with
scikit-learn.
"""

# %%
# The data
# --------
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import keyhole as kh

digits = kh.datasets.load_digits_sets(position="plain")
train, test = np.arange(600), np.arange(1000, 1400)
print(digits.sets)

# %%
# One sample as a table: the first pixels of a three.
sample = digits.sets[[1032]]
pd.DataFrame(sample.tokens, columns=digits.names).head().round(2)

# %%
# Fit and score
# -------------
# One layer, so that the pixels decide and not statistics of them.
layer = kh.AttentionClassifier(
    100,
    kh.GaussianHeads(),
    activation="relu",
    pooling="mean",
    scaling="standard",
    query="given",
    random_state=0,
)
model = layer.fit(digits.sets[train], digits.target[train])
print(f"accuracy: {model.score(digits.sets[test], digits.target[test]):.3f}")

# %%
# A baseline: logistic regression on mean, spread and extremes of the pixels of each
# digit.


def aggregates(batch):
    pixels = np.split(batch.tokens, batch.offsets[1:-1])
    statistics = (np.mean, np.std, np.min, np.max)
    return np.array(
        [np.concatenate([f(p, axis=0) for f in statistics]) for p in pixels]
    )


baseline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
baseline.fit(aggregates(digits.sets[train]), digits.target[train])
accuracy = baseline.score(aggregates(digits.sets[test]), digits.target[test])
print(f"accuracy of logistic regression on aggregates: {accuracy:.3f}")

# %%
# Contributions
# -------------
# ``contributions`` returns a row per pixel and a column per class. The difference of
# the two best classes says why the first one won. What is left, the intercepts, is
# shared equally among the pixels.
rows = [1032, 1026, 1003]
figure, axes = plt.subplots(1, 3, figsize=(8, 3), layout="constrained")
for ax, row in zip(axes, rows, strict=True):
    batch = digits.sets[[row]]
    [parts], [rest] = model.contributions(batch, return_rest=True)
    scores = model.decision_function(batch)[0]
    first, second = np.argsort(scores)[::-1][:2]
    lead = parts[:, first] - parts[:, second]
    lead = lead + (rest[first] - rest[second]) / len(lead)
    limit = np.abs(lead).max()
    pixels = ax.scatter(
        batch.tokens[:, 1],
        -batch.tokens[:, 0],
        c=lead,
        cmap="RdBu",
        vmin=-limit,
        vmax=limit,
        marker="s",
        s=180,
        edgecolor="0.6",
    )
    ax.set_title(
        f"{model.classes_[first]} (blue) before {model.classes_[second]} (red)"
    )
    ax.set_aspect("equal")
    ax.axis("off")
plt.show()

# %%
# All parts together are the prediction, up to rounding:
[parts], [rest] = model.contributions(sample, return_rest=True)
difference = parts.sum(axis=0) + rest - model.decision_function(sample)[0]
print(f"largest difference: {np.abs(difference).max():.1e}")

# %%
# What to change for your data
# ----------------------------
# Contributions are shares of this prediction, and no causes. With ``pooling="sum"`` and
# ReLU they are exactly what the prediction loses when a key is taken away.
