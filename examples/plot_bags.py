"""
Which part broke the lot?
=========================

A bag of instances has a label; its instances have none. We predict the label of new
bags, and find the instance that is to blame. The data is generated: a lot fails if one
of its parts is cracked.
"""

# %%
# The data
# --------
# A lot has 3 to 11 parts with two measurements each. A cracked part has large values of
# both.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

import keyhole as kh

rng = np.random.default_rng(0)
lots = [rng.normal(size=(rng.integers(3, 12), 2)) for _ in range(400)]
failed = np.arange(400) % 2
for lot in lots[1::2]:
    lot[0] = rng.normal(loc=3.0, scale=0.5, size=2)

X = kh.SetBatch(lots)
print(X)

# %%
# One sample as a table: lot 1 failed, because of its first part.
pd.DataFrame(lots[1], columns=["width", "depth"]).round(2)

# %%
# Fit and score
# -------------
# No setting is needed: a list of layers is fitted to the training lots, and combined.
X_train, X_test, y_train, y_test = train_test_split(X, failed, random_state=0)
model = kh.AttentionClassifier(random_state=0).fit(X_train, y_train)
print(f"accuracy on new lots: {model.score(X_test, y_test):.3f}")

# %%
# These layers were tried. Those of weight 0 are not part of the model.
print(model.summary())

# %%
# A baseline: logistic regression on the mean and the largest value of each measurement.


def aggregates(batch):
    parts = np.split(batch.tokens, batch.offsets[1:-1])
    return np.array(
        [np.concatenate([lot.mean(axis=0), lot.max(axis=0)]) for lot in parts]
    )


baseline = LogisticRegression().fit(aggregates(X_train), y_train)
accuracy = baseline.score(aggregates(X_test), y_test)
print(f"accuracy of logistic regression on aggregates: {accuracy:.3f}")

# %%
# Here the largest values tell nearly everything, so the baseline is about as good. But
# it cannot say which part is to blame.
#
# Which part mattered?
# --------------------
# The score of a lot is a sum over its parts. Red parts raise the score: they count
# towards failure.
rows = np.flatnonzero(y_test == 1)[:4]
contributions = model.contributions(X_test[rows])
figure, axes = plt.subplots(1, 4, figsize=(10, 2.6), sharey=True, layout="constrained")
for ax, row, parts in zip(axes, rows, contributions, strict=True):
    keys = X_test[[row]].tokens
    limit = max(np.abs(part).max() for part in contributions)
    ax.scatter(
        *keys.T, c=parts, cmap="RdBu_r", vmin=-limit, vmax=limit, edgecolor="0.5"
    )
    ax.set_xlabel("width")
axes[0].set_ylabel("depth")
figure.suptitle("four lots that failed; colour: what each part adds to the score")
plt.show()

# %%
# What to change for your data
# ----------------------------
# Read a table with ``kh.read_table(frame, set_id="lot", target="failed")``. For numbers
# use ``kh.AttentionRegressor``. If samples belong together, pass ``groups=`` to
# ``fit``.
