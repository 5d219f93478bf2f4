"""
Pipelines and grid search
=========================

Sets go through scikit-learn's tools as tables do. We compare default settings with a
grid search, and put attention features in front of another estimator. The data is
generated.
"""

# %%
# The data
# --------
# The answer is the first coordinate of the key that is most like the query.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.svm import SVR

import keyhole as kh

rng = np.random.default_rng(0)
keys = rng.normal(size=(400, 5, 3))
query = rng.normal(size=(400, 3))
best = np.einsum("nd,nkd->nk", query, keys).argmax(axis=1)
y = keys[np.arange(400), best, 0]
X = kh.SetBatch(keys, query)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)

# %%
# One sample: the keys, and beside them their inner product with the query.
table = pd.DataFrame(keys[0], columns=["x", "y", "z"])
table["with the query"] = keys[0] @ query[0]
table.round(2)

# %%
# Default settings
# ----------------
# They try activations, means of the heads, scalings and more by leave-one-out.
default = kh.AttentionRegressor(random_state=0).fit(X_train, y_train)
print(f"default settings: R² {default.score(X_test, y_test):.3f}")

# %%
# A baseline: ridge on the mean of the keys beside the query.


def pooled(batch):
    means = np.add.reduceat(batch.tokens, batch.offsets[:-1]) / batch.lengths[:, None]
    return np.hstack([means, batch.query])


ridge = RidgeCV(np.geomspace(1e-3, 1e3, 13)).fit(pooled(X_train), y_train)
print(f"ridge on the mean of the keys: R² {ridge.score(pooled(X_test), y_test):.3f}")

# %%
# Grid search
# -----------
# Fix what you do not search: otherwise every fit combines several layers.
fixed = kh.AttentionRegressor(
    128,
    activation="softmax",
    scaling="none",
    pooling="mean",
    query="given",
    random_state=0,
)
grid = {
    "heads": [
        kh.GaussianHeads(mean, scale) for mean in (1, 3, 10) for scale in (0.1, 0.5)
    ]
}
search = GridSearchCV(fixed, grid, cv=3).fit(X_train, y_train)
print(f"grid search: R² {search.score(X_test, y_test):.3f}")
print(search.best_params_)

# %%
scores = pd.DataFrame(search.cv_results_)[
    ["param_heads", "mean_test_score", "std_test_score"]
]
figure, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
places = np.arange(len(scores))
ax.errorbar(
    scores["mean_test_score"], places, xerr=scores["std_test_score"], fmt="o", capsize=3
)
ax.set_yticks(places, [str(heads) for heads in scores["param_heads"]])
ax.set_xlabel("R², three folds")
plt.show()

# %%
# Pipelines
# ---------
# Functions of ``kh.tokens`` become steps, and ``AttentionFeatures`` makes a table for
# any estimator.
similarity = FunctionTransformer(kh.tokens.with_similarity, kw_args={"measure": "dot"})
pipeline = make_pipeline(similarity, search.best_estimator_).fit(X_train, y_train)
print(f"with similarities as coordinates: R² {pipeline.score(X_test, y_test):.3f}")

features = kh.AttentionFeatures(
    32, heads=search.best_params_["heads"], activation="softmax", random_state=0
)
machine = make_pipeline(features, SVR(kernel="linear", C=100)).fit(X_train, y_train)
print(f"support vectors on attention features: R² {machine.score(X_test, y_test):.3f}")

# %%
# What to change for your data
# ----------------------------
# Start with default settings. Search over what they do not choose, such as how tokens
# are made.
