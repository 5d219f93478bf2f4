"""Gestures of unequal length: ten movements of a hand, 29 to 361 steps each.

    pip download aeon --no-deps && unzip aeon-*.whl -d aeon
    folder=aeon/aeon/datasets/data/PickupGestureWiimoteZ
    python benchmarks/example_gestures.py $folder/PickupGestureWiimoteZ_{TRAIN,TEST}.ts

A series is a set of windows that know when they were. The baseline is the nearest neighbour
under dynamic time warping within a band, chosen on the training part as all else is. Series
are few, so the split is drawn anew ten times.
"""

import sys

import numba
import numpy as np
from sklearn.model_selection import StratifiedShuffleSplit

import keyhole as kh


@numba.njit
def warped(a, b, band):
    cost = np.full((len(a) + 1, len(b) + 1), np.inf)
    cost[0, 0], reach = 0.0, int(band * max(len(a), len(b))) + len(b) // len(a) + 1
    for i in range(len(a)):
        centre = i * len(b) // len(a)
        for j in range(max(0, centre - reach), min(len(b), centre + reach + 1)):
            cost[i + 1, j + 1] = (a[i] - b[j]) ** 2 + min(
                cost[i, j], cost[i, j + 1], cost[i + 1, j]
            )
    return cost[-1, -1]


def neighbour(series, labels, train, test):
    def wrong(band):
        far = [
            [warped(series[i], series[j], band) if i != j else np.inf for j in train] for i in train
        ]
        return np.mean(labels[train][np.argmin(far, axis=1)] != labels[train])

    band = min((0.05, 0.1, 0.2, 1.0), key=wrong)
    return labels[train][
        [np.argmin([warped(series[i], series[j], band) for j in train]) for i in test]
    ]


def attention(series, labels, train, test):
    models = []
    for width in (1, 5, 15):  # chosen by leave-one-out on the training part, like all else
        cut = kh.tokens.windows(series, width, split=False)
        sets = kh.SetBatch([np.column_stack([keys, np.linspace(0, 1, len(keys))]) for keys in cut])
        models.append(
            (kh.AttentionClassifier(random_state=0).fit(sets[train], labels[train]), sets[test])
        )
    model, new = min(models, key=lambda pair: pair[0].selection_.score)
    return model.predict(new)


def main(train, test, repeats=10):
    parts = [kh.datasets.load_uea(path) for path in (train, test)]
    series = [
        keys[:, 0] for part in parts for keys in np.split(part.sets.tokens, part.sets.offsets[1:-1])
    ]
    labels = np.concatenate([part.target for part in parts])
    splits = list(
        StratifiedShuffleSplit(repeats, test_size=0.5, random_state=0).split(labels, labels)
    )
    for name, predict in {"nearest neighbour, warped": neighbour, "attention": attention}.items():
        right = np.array(
            [100 * np.mean(predict(series, labels, a, b) == labels[b]) for a, b in splits]
        )
        print(f"{name:28}{right.mean():6.1f} % ± {right.std(ddof=1) / repeats**0.5:.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
