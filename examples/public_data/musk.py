"""
Molecules that smell of musk
============================

92 molecules, each a bag of the shapes it takes; a molecule smells of musk if one of its
shapes does. The bag is labelled, its shapes are not. It needs the file ``musk1.csv``.
"""

# %%
# The data
# --------
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from loaders import data_path
from sklearn.linear_model import LogisticRegressionCV
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import keyhole as kh

data = kh.datasets.load_bags(data_path("musk1.csv"), bag=1, label=0)
print(data.sets)

# %%
# One sample as a table: the first coordinates of the shapes of one molecule.
print(pd.DataFrame(data.sets[[0]].tokens).iloc[:, :6])

# %%
# Fit and score
# -------------
split = train_test_split(
    data.sets, data.target, test_size=0.3, stratify=data.target, random_state=0
)
X_train, X_test, y_train, y_test = split
model = kh.AttentionClassifier(random_state=0).fit(X_train, y_train)
print(f"accuracy: {model.score(X_test, y_test):.3f}")

# %%
# A baseline: logistic regression on mean, spread and extremes of each coordinate.


def aggregates(batch):
    shapes = np.split(batch.tokens, batch.offsets[1:-1])
    statistics = (np.mean, np.std, np.min, np.max)
    return np.array(
        [np.concatenate([f(keys, axis=0) for f in statistics]) for keys in shapes]
    )


logistic = LogisticRegressionCV(
    Cs=5,
    l1_ratios=(0,),
    use_legacy_attributes=False,
    scoring="neg_log_loss",
    max_iter=2000,
)
baseline = make_pipeline(StandardScaler(), logistic).fit(aggregates(X_train), y_train)
print(
    f"accuracy of logistic regression: {baseline.score(aggregates(X_test), y_test):.3f}"
)

# %%
# Which shape?
# ------------
parts = model.contributions(X_test)
figure, ax = plt.subplots(figsize=(7, 2.8), layout="constrained")
for place, (part, label) in enumerate(zip(parts, y_test, strict=True)):
    colour = "tab:red" if label == model.classes_[1] else "0.6"
    ax.scatter(np.full(len(part), place), part, s=10, color=colour)
ax.set(xlabel="molecule (red: musk)", ylabel="contribution of each shape")
plt.show()

# %%
# What to change for your data
# ----------------------------
# ``load_bags`` takes the columns of bag and label; ``kh.read_table`` reads any other
# table. 28 test bags say little: ``benchmarks/example_bags.py`` repeats ten folds three
# times.
