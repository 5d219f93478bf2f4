"""
Gestures of unequal length
==========================

Ten movements of a hand, 29 to 361 steps each. A series is a set of windows that know
when they were. It needs the files ``PickupGestureWiimoteZ_TRAIN.ts`` and ``…_TEST.ts``.
"""

# %%
# The data
# --------
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from loaders import data_path
from sklearn.neighbors import KNeighborsClassifier

import keyhole as kh

train = kh.datasets.load_uea(data_path("PickupGestureWiimoteZ_TRAIN.ts"))
test = kh.datasets.load_uea(data_path("PickupGestureWiimoteZ_TEST.ts"))
print(train.sets)

# %%
# Tokens
# ------
# A key is a window of some steps, and its place in the series from 0 to 1.


def series_of(batch):
    return [steps[:, 0] for steps in np.split(batch.tokens, batch.offsets[1:-1])]


def windows_in_time(batch, width):
    windows = kh.tokens.windows(series_of(batch), width, split=False)
    timed = [np.column_stack([keys, np.linspace(0, 1, len(keys))]) for keys in windows]
    return kh.SetBatch(timed)


# %%
# One sample as a table:
print(pd.DataFrame(windows_in_time(train.sets, 5)[[0]].tokens).head().round(2))

# %%
# Fit and score
# -------------
# The width of a window is the one of least held-out loss on the training series.
models = {}
for width in (1, 5, 15):
    sets = windows_in_time(train.sets, width)
    models[width] = kh.AttentionClassifier(random_state=0).fit(sets, train.target)
width = min(models, key=lambda width: models[width].held_out_loss_)
model = models[width]
new = windows_in_time(test.sets, width)
print(f"attention, windows of {width}: accuracy {model.score(new, test.target):.3f}")

# %%
# A baseline: nearest neighbours on series that are stretched to one length.


def stretched(batch, length=60):
    grid = np.linspace(0, 1, length)
    return np.array(
        [np.interp(grid, np.linspace(0, 1, len(s)), s) for s in series_of(batch)]
    )


neighbours = KNeighborsClassifier(1).fit(stretched(train.sets), train.target)
accuracy = neighbours.score(stretched(test.sets), test.target)
print(f"nearest neighbour: accuracy {accuracy:.3f}")

# %%
# When did it happen?
# -------------------
# What each window adds to the score of the class that was predicted, along one series.
scores = np.atleast_2d(model.decision_function(new[[0]]).T).T
[parts] = model.contributions(new[[0]])
if parts.ndim == 2:
    parts = parts[:, scores[0].argmax()]
figure, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
steps = series_of(test.sets)[0]
ax.plot(np.linspace(0, 1, len(steps)), steps, color="0.6")
points = ax.scatter(
    np.linspace(0, 1, len(parts)),
    np.interp(np.linspace(0, 1, len(parts)), np.linspace(0, 1, len(steps)), steps),
    c=parts,
    cmap="RdBu_r",
    s=12,
)
figure.colorbar(points, label="contribution")
ax.set_xlabel("time")
plt.show()

# %%
# What to change for your data
# ----------------------------
# Series of several channels give windows of all of them. Where the order of events
# matters more than their time, put other clocks into the tokens.
# ``benchmarks/example_gestures.py`` compares with dynamic time warping over ten splits.
