"""Molecules: atomisation energies from the positions of atoms.

    python benchmarks/example_molecules.py qm7.npz

The file has X (charge and position of every atom), ptr and y; a folder of .xyz files will do.

Each atom asks the others how far they are. An energy is a sum over atoms, so a molecule is a
group of sets, one per atom, whose answers add up. The baselines are ridges on the same numbers
without attention: atoms of each element, and pairs of elements at each distance.
"""

import sys

import numpy as np
from sklearn.linear_model import RidgeCV

import keyhole as kh


def total(numbers, offsets):
    return np.add.reduceat(numbers, offsets[:-1])


def main(path, train=2000, test=1000, n_heads=24):
    data = kh.datasets.load_molecules(path)
    chosen = np.random.default_rng(0).permutation(len(data.target))[: train + test]
    molecules, energy = data.sets[chosen], data.target[chosen]
    n_elements = sum(" at " not in name for name in data.names)
    atoms = molecules.sets.query[:, :n_elements].astype(float)
    around = total(
        molecules.sets.tokens.astype(float), molecules.sets.offsets
    )  # what each atom has around it
    pairs = (atoms[:, :, None] * around[:, None, :]).reshape(len(atoms), -1)
    tables = {
        "counts of elements, ridge": total(atoms, molecules.set_offsets),
        "pairs by distance, ridge": total(pairs, molecules.set_offsets),
    }
    errors = {}
    for name, table in tables.items():
        model = RidgeCV(np.geomspace(1e-6, 1e3, 19)).fit(table[:train], energy[:train])
        errors[name] = np.abs(model.predict(table[train:]) - energy[train:])
    layer = kh.AttentionRegressor(
        n_heads,
        heads=kh.GaussianHeads(),
        scaling="none",
        query="given",
        activation="relu",
        pooling="sum",
        random_state=0,
    )
    layer.fit(molecules[:train], energy[:train])
    errors[f"attention, {n_heads} heads"] = np.abs(
        layer.predict(molecules[train:]) - energy[train:]
    )
    print(
        f"{train} molecules to learn from, {len(energy) - train} to predict; mean absolute error:"
    )
    for name, error in errors.items():
        print(f"{name:28}{error.mean():7.2f} ± {error.std() / len(error) ** 0.5:.2f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
