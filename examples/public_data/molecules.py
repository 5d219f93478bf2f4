"""
Energies of molecules
=====================

Atomisation energies from the positions of atoms. Each atom is a query that asks the
others how far they are; a molecule is the group of its atoms. It needs the file
``qm7.npz``.
"""

# %%
# The data
# --------
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from loaders import data_path
from sklearn.linear_model import RidgeCV

import keyhole as kh

data = kh.datasets.load_molecules(data_path("qm7.npz"))
n = len(data.target)
order = np.random.default_rng(0).permutation(n)[:3000]
n_train = 2 * len(order) // 3
train, test = order[:n_train], order[n_train:]
print(data.sets)

# %%
# One sample: for each atom of a molecule, the number of neighbours.
molecule = data.sets[[0]]
print(pd.DataFrame({"neighbours of each atom": molecule.sets.lengths}))

# %%
# Fit and score
# -------------
# An energy is a sum over atoms, hence ``pooling="sum"``.
model = kh.AttentionRegressor(
    n_heads=24,
    heads=kh.GaussianHeads(),
    activation="relu",
    scaling="none",
    query="given",
    pooling="sum",
    random_state=0,
)
model.fit(data.sets[train], data.target[train])
errors = np.abs(model.predict(data.sets[test]) - data.target[test])
print(f"attention: mean absolute error {errors.mean():.2f}")

# %%
# A baseline: ridge on the number of atoms of each element.
n_elements = sum(" at " not in name for name in data.names)


def element_counts(molecules):
    atoms = molecules.sets.query[:, :n_elements].astype(float)
    return np.add.reduceat(atoms, molecules.set_offsets[:-1])


ridge = RidgeCV(np.geomspace(1e-6, 1e3, 19))
ridge.fit(element_counts(data.sets[train]), data.target[train])
baseline = np.abs(ridge.predict(element_counts(data.sets[test])) - data.target[test])
print(f"counts of elements: mean absolute error {baseline.mean():.2f}")

# %%
figure, ax = plt.subplots(figsize=(4, 3.6), layout="constrained")
ax.scatter(data.target[test], model.predict(data.sets[test]), s=4)
ax.set(xlabel="energy", ylabel="prediction")
plt.show()

# %%
# What to change for your data
# ----------------------------
# ``kh.SetGroups`` makes samples of several sets from any data.
# ``benchmarks/example_molecules.py`` has a stronger baseline, pairs by distance.
