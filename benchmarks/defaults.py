"""Default settings on jobs that nobody tuned them on, beside what others get in the same run.

    python benchmarks/defaults.py [--seed 1] [--jobs NAME ...] [--size 1.0] [--out out/defaults]

Every job is drawn anew from its seed. `kh.AttentionRegressor()` and `kh.AttentionClassifier()` have
no settings but the seed of their heads. Baselines: LightGBM (scikit-learn's histogram boosting
where it is not installed), ridge or logistic regression on pooled statistics (mean, spread,
extremes, number of keys, query, extras), and DeepSets, a small network on sums over keys. The test
part is used once, to report. A line names the best baseline, and says by how many standard errors,
of the paired differences over test samples, the default settings are behind.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import keyhole as kh

# ------------------------------------------------------------------------------------------- jobs


@dataclass(frozen=True)
class Job:
    """Sets with a target, split into a training and a test part.

    ``metric`` is "r2", "auc", "ap" (average precision of a rare class) or "accuracy".
    """

    name: str
    sets: kh.SetBatch
    y: np.ndarray
    metric: str
    n_train: int
    groups: np.ndarray | None = None

    @property
    def is_regression(self) -> bool:
        return self.metric == "r2"


def clouds(rng: np.random.Generator, n: int) -> list[np.ndarray]:
    """Point clouds of 5 to 39 points in three dimensions."""
    return [rng.normal(size=(int(rng.integers(5, 40)), 3)) for _ in range(n)]


def cloud_job(name: str, n: int, of_cloud: Callable[[np.ndarray], float]) -> Callable[..., Job]:
    def make(rng: np.random.Generator, size: float) -> Job:
        count = int(n * size)
        sample = clouds(rng, count + 500)
        y = np.array([of_cloud(cloud) for cloud in sample])
        return Job(name, kh.SetBatch(sample), y, "r2", count)

    return make


def pair_energy(cloud: np.ndarray) -> float:
    """Σ over pairs of exp(−distance)."""
    distance = np.linalg.norm(cloud[:, None] - cloud[None], axis=2)
    return float(np.exp(-distance[np.triu_indices(len(cloud), 1)]).sum())


def radial_sum(cloud: np.ndarray) -> float:
    return float(np.exp(-np.linalg.norm(cloud, axis=1)).sum())


def spread(cloud: np.ndarray) -> float:
    return float(cloud[:, 0].std())


def count_in_ball(cloud: np.ndarray) -> float:
    return float((np.linalg.norm(cloud, axis=1) < 1.5).sum())


def median(cloud: np.ndarray) -> float:
    return float(np.median(cloud[:, 0]))


def second_largest(cloud: np.ndarray) -> float:
    return float(np.sort(cloud[:, 0])[-2])


def product_of_means(cloud: np.ndarray) -> float:
    return float(10 * cloud[:, 0].mean() * cloud[:, 1].mean())


def needles(rng: np.random.Generator, size: float) -> Job:
    """Bags of many keys, of which one in seventy belongs to one more cluster if the label is 1."""
    n = int(160 * size) + 100
    n_clusters, dim = 20, 128
    centres = rng.normal(size=(n_clusters + 1, dim))
    needle_centre = 0.6 * centres[n_clusters] + 0.4 * centres[0]
    labels = np.arange(n) % 2
    bags = []
    for label in labels:
        n_keys = int(rng.integers(200, 600))
        shares = rng.dirichlet(np.full(n_clusters, 0.7))
        keys = centres[rng.choice(n_clusters, n_keys, p=shares)]
        if label:
            keys[: max(1, n_keys // 70)] = needle_centre
        keys = keys + 0.7 * rng.normal(size=keys.shape) + 0.15 * rng.normal(size=dim)
        bags.append(keys.astype(np.float32))
    return Job("needles", kh.SetBatch(bags), labels, "auc", n - 100)


def rare(rng: np.random.Generator, size: float) -> Job:
    """A class of one in a hundred, which a maximum decides."""
    n = int(3000 * size)
    bags = [rng.normal(size=(int(rng.integers(3, 20)), 6)) for _ in range(n + 3000)]
    score = np.array([bag[:, 0].max() + 0.3 * bag[:, 1].mean() for bag in bags])
    score += 0.1 * rng.normal(size=len(score))
    y = (score > np.quantile(score, 0.99)).astype(int)
    return Job("rare class", kh.SetBatch(bags), y, "ap", n)


def ranking(rng: np.random.Generator, size: float) -> Job:
    """A candidate and a history: which of five candidates was taken."""
    n_items, dim, n_users = 2000, 16, int(400 * size)
    cluster = rng.integers(40, size=n_items)
    items = rng.normal(size=(40, dim))[cluster] + 0.6 * rng.normal(size=(n_items, dim))
    items /= np.linalg.norm(items, axis=1, keepdims=True)
    popularity = np.exp(rng.normal(size=n_items))
    popularity /= popularity.sum()
    histories, candidates, taken, users = [], [], [], []
    for user in range(n_users + 200):
        interests = rng.choice(40, size=int(rng.integers(2, 6)), replace=False)
        liking = np.isin(cluster, interests) * popularity
        liking = 0.8 * liking / liking.sum() + 0.2 * popularity
        history = items[rng.choice(n_items, size=int(rng.integers(5, 40)), p=liking)]
        offered = [rng.choice(n_items, p=liking), *rng.choice(n_items, size=4, p=popularity)]
        for position, item in enumerate(offered):
            histories.append(history)
            candidates.append(items[item])
            taken.append(int(position == 0))
            users.append(user)
    sets = kh.SetBatch(histories, np.array(candidates))
    return Job("ranking", sets, np.array(taken), "auc", 5 * n_users, np.array(users))


def paper_target(name: str, target: Any, n: int) -> Callable[..., Job]:
    """A target of the paper on random unit tokens with a query, and a little noise."""

    def make(rng: np.random.Generator, size: float) -> Job:
        count = int(n * size)
        seed = int(rng.integers(2**31))
        sets = kh.targets.sphere_sets(count + 500, n_keys=8, dim=target.dim, seed=seed)
        y = target(sets)
        y = y + 0.1 * y.std() * rng.normal(size=len(y))
        return Job(name, sets, y, "r2", count)

    return make


def nearest_key(rng: np.random.Generator, size: float) -> Job:
    """The value of the key that is most like the query."""
    n = int(1000 * size) + 500
    query = rng.normal(size=(n, 4))
    keys = rng.normal(size=(n, 10, 5))
    likeness = np.einsum("nd,nkd->nk", query, keys[:, :, :4])
    y = keys[np.arange(n), likeness.argmax(axis=1), 4]
    wide_query = np.concatenate([query, np.zeros((n, 1))], axis=1)
    return Job("nearest key", kh.SetBatch(keys, wide_query), y, "r2", n - 500)


def topics(rng: np.random.Generator, size: float) -> Job:
    """Documents of ten topics: bags of word vectors that share most words."""
    n = int(600 * size) + 500
    words = rng.normal(size=(300, 12))
    shares = rng.dirichlet(np.full(300, 0.3), size=10)
    labels = rng.integers(10, size=n)
    mixed = 0.3 * shares[labels] + 0.7 / 300
    documents = [words[rng.choice(300, int(rng.integers(20, 60)), p=p)] for p in mixed]
    return Job("topics", kh.SetBatch(documents), labels, "accuracy", n - 500)


def sparse_signal(rng: np.random.Generator, size: float) -> Job:
    """Three of sixty coordinates matter, through their means."""
    n = int(400 * size) + 500
    keys = rng.normal(size=(n, 6, 60)) + rng.normal(size=(n, 1, 60))
    mean = keys.mean(axis=1)
    y = mean[:, 0] + np.abs(mean[:, 1]) - mean[:, 2] + 0.2 * rng.normal(size=n)
    return Job("sparse signal", kh.SetBatch(keys), y, "r2", n - 500)


def mixed_units(rng: np.random.Generator, size: float) -> Job:
    """Tokens in dollars, years and shares; the target is a weighted mean of one of them."""
    n = int(600 * size) + 500
    bags, y = [], []
    for _ in range(n):
        n_keys = int(rng.integers(2, 15))
        price = np.exp(rng.normal(8, 1, size=n_keys))
        year = rng.integers(1990, 2020, size=n_keys).astype(float)
        share = rng.random(n_keys)
        bags.append(np.stack([price, year, share], axis=1))
        y.append(float(np.average(share, weights=year - 1980)))
    return Job("mixed units", kh.SetBatch(bags), np.array(y), "r2", n - 500)


def any_of(rng: np.random.Generator, size: float) -> Job:
    """Whether any key lies in a small region: the rule of multiple-instance learning."""
    n = int(600 * size) + 500
    bags = [rng.normal(size=(int(rng.integers(3, 12)), 4)) for _ in range(n)]
    centre = np.array([1.0, -1.0, 0.5, 0.0])
    y = np.array([(np.linalg.norm(bag - centre, axis=1) < 1.2).any() for bag in bags]).astype(int)
    return Job("any of the keys", kh.SetBatch(bags), y, "auc", n - 500)


def majority(rng: np.random.Generator, size: float) -> Job:
    """Which of three kinds most keys are."""
    n = int(600 * size) + 500
    centres = 1.5 * rng.normal(size=(3, 5))
    bags, y = [], []
    for _ in range(n):
        kind = rng.integers(3, size=int(rng.integers(5, 16)))
        bags.append(centres[kind] + rng.normal(size=(len(kind), 5)))
        y.append(int(np.bincount(kind, minlength=3).argmax()))
    return Job("majority", kh.SetBatch(bags), np.array(y), "accuracy", n - 500)


def set_size(rng: np.random.Generator, size: float) -> Job:
    """How many keys there are."""
    sample = clouds(rng, int(300 * size) + 500)
    y = np.array([float(len(cloud)) for cloud in sample])
    return Job("number of keys", kh.SetBatch(sample), y, "r2", len(sample) - 500)


def linear_mean(rng: np.random.Generator, size: float) -> Job:
    """A linear function of the mean key with much noise: nothing to gain over ridge."""
    n = int(300 * size) + 500
    keys = rng.normal(size=(n, 5, 10))
    direction = rng.normal(size=10)
    mean = keys.mean(axis=1) @ direction
    return Job(
        "linear mean", kh.SetBatch(keys), mean + mean.std() * rng.normal(size=n), "r2", n - 500
    )


def churn(rng: np.random.Generator, size: float) -> Job:
    """Customers who leave, from their transactions: categories, dates, missing values.

    The test part is later than the training part.
    """
    import pandas as pd

    n = int(1500 * size) + 1000
    categories = ["grocery", "fuel", "travel", "online", "restaurant", "rent", "health", "gifts"]
    transactions, customers = [], []
    for i in range(n):
        asof = pd.Timestamp("2024-06-01") + pd.Timedelta(days=int(rng.integers(0, 360)))
        count = int(rng.integers(3, 40))
        taste = rng.dirichlet(np.full(8, 0.6))
        days = np.sort(rng.integers(1, 150, size=count))[::-1]
        category = rng.choice(8, size=count, p=taste)
        amount = np.exp(rng.normal(3 + 0.9 * (category == 5), 0.8))
        channel = rng.choice(["web", "app", "store"], size=count, p=[0.3, 0.4, 0.3])
        refund = rng.random(count) < 0.06
        recent = days < 30
        tenure = rng.exponential(3)
        risk = 0.6 - np.log1p(recent.sum()) - 0.15 * tenure + 1.0 * (taste[3] > 0.4)
        risk += 1.8 * min((refund & recent & (channel == "web")).sum(), 1)
        risk -= 0.002 * amount[(category == 2) & (days < 60)].sum()
        for k in range(count):
            when = asof - pd.Timedelta(days=int(days[k]))
            value = round(-amount[k] if refund[k] else amount[k], 2)
            transactions.append((f"c{i}", when, categories[category[k]], value, channel[k]))
        left = int(rng.random() < 1 / (1 + np.exp(-1.5 * risk)))
        known_tenure = tenure if rng.random() > 0.1 else np.nan
        customers.append((f"c{i}", asof, known_tenure, left))
    tokens = pd.DataFrame(transactions, columns=["customer", "ts", "category", "amount", "channel"])
    tokens.loc[rng.random(len(tokens)) < 0.03, "amount"] = np.nan
    samples = pd.DataFrame(customers, columns=["customer", "asof", "tenure", "churn"])
    samples = samples.sort_values("asof", ignore_index=True)
    data = kh.read_table(
        samples,
        tokens=tokens,
        set_id="customer",
        target="churn",
        extras=["tenure"],
        reference_date="asof",
        missing="impute",
    )
    return Job("churn", data.sets, np.asarray(data.target), "auc", n - 1000)


JOBS: dict[str, Callable[[np.random.Generator, float], Job]] = {
    "pair energy": cloud_job("pair energy", 1000, pair_energy),
    "radial sum": cloud_job("radial sum", 1000, radial_sum),
    "largest coordinate": cloud_job("largest coordinate", 800, lambda c: float(c[:, 0].max())),
    "second largest": cloud_job("second largest", 800, second_largest),
    "spread": cloud_job("spread", 800, spread),
    "count in a ball": cloud_job("count in a ball", 800, count_in_ball),
    "median": cloud_job("median", 800, median),
    "product of means": cloud_job("product of means", 800, product_of_means),
    "number of keys": set_size,
    "linear mean": linear_mean,
    "mixed units": mixed_units,
    "sparse signal": sparse_signal,
    "any of the keys": any_of,
    "majority": majority,
    "topics": topics,
    "rare class": rare,
    "needles": needles,
    "ranking": ranking,
    "nearest key": nearest_key,
    "corr^3": paper_target("corr^3", kh.targets.Correlation(3, dim=5), 800),
    "token^2": paper_target("token^2", kh.targets.TokenPower(2, dim=6), 500),
    "churn": churn,
}

ORDER_STATISTIC = (
    "an order statistic: no sum over keys, and not among the statistics that are tried"
)
REASONS = {
    "second largest": ORDER_STATISTIC,
    "median": ORDER_STATISTIC,
    "count in a ball": "a step in the length of a key, which random heads meet by few directions",
    "any of the keys": "a step in a distance, then a maximum: DeepSets learns both",
    "majority": "needs a nonlinearity after pooling, which one layer does not have",
    "sparse signal": "3 of 60 coordinates matter: random heads weigh all alike, trees choose",
}
"""Why default settings are behind where they were seen to be."""

# ---------------------------------------------------------------------------------------- learners


def pooled(sets: kh.SetBatch) -> np.ndarray:
    """Mean, standard deviation, extremes and number of the keys, and the query."""
    tokens = sets.tokens.astype(np.float64)
    starts = sets.offsets[:-1]
    lengths = sets.lengths[:, None]
    mean = np.add.reduceat(tokens, starts, axis=0) / lengths
    square = np.add.reduceat(np.square(tokens), starts, axis=0) / lengths
    deviation = np.sqrt(np.maximum(square - np.square(mean), 0.0))
    low = np.minimum.reduceat(tokens, starts, axis=0)
    high = np.maximum.reduceat(tokens, starts, axis=0)
    parts = [mean, deviation, low, high, lengths]
    if sets.query is not None:
        parts.append(sets.query)
    if sets.extras is not None:
        parts.append(sets.extras)
    return np.concatenate(parts, axis=1)


def keyhole_scores(job: Job, train: slice, test: slice) -> np.ndarray:
    """Predictions, or probabilities of classes, with default settings."""
    groups = None if job.groups is None else job.groups[train]
    if job.is_regression:
        model = kh.AttentionRegressor(random_state=0).fit(
            job.sets[train], job.y[train], groups=groups
        )
        return model.predict(job.sets[test])
    model = kh.AttentionClassifier(random_state=0).fit(job.sets[train], job.y[train], groups=groups)
    return model.predict_proba(job.sets[test])


def linear_scores(job: Job, train: slice, test: slice) -> np.ndarray:
    """Ridge, or logistic regression, on pooled statistics."""
    table = pooled(job.sets)
    if job.is_regression:
        learner: Any = RidgeCV(np.geomspace(1e-3, 1e4, 15))
    else:
        learner = LogisticRegressionCV(Cs=5, cv=3, max_iter=1000)
    model = make_pipeline(StandardScaler(), learner).fit(table[train], job.y[train])
    return model.predict(table[test]) if job.is_regression else model.predict_proba(table[test])


def boosting_scores(job: Job, train: slice, test: slice) -> np.ndarray:
    """Gradient boosting on pooled statistics."""
    table = pooled(job.sets)
    try:
        import lightgbm

        kind = lightgbm.LGBMRegressor if job.is_regression else lightgbm.LGBMClassifier
        model: Any = kind(n_estimators=300, learning_rate=0.05, verbose=-1)
    except ImportError:
        model = (
            HistGradientBoostingRegressor()
            if job.is_regression
            else (HistGradientBoostingClassifier())
        )
    model.fit(table[train], job.y[train])
    return model.predict(table[test]) if job.is_regression else model.predict_proba(table[test])


def deep_sets_scores(job: Job, train: slice, test: slice, seed: int = 0) -> np.ndarray:
    """DeepSets: a network of each key, summed and averaged, then another network."""
    import torch

    torch.manual_seed(seed)
    sets = job.sets
    centre = sets.tokens[: sets.offsets[job.n_train]].mean(axis=0)
    deviation = sets.tokens[: sets.offsets[job.n_train]].std(axis=0) + 1e-9
    tokens = torch.tensor((sets.tokens - centre) / deviation, dtype=torch.float32)
    owner = torch.tensor(np.repeat(np.arange(len(sets)), sets.lengths))
    query = sets.query
    n_query = 0 if query is None else query.shape[1]
    if job.is_regression:
        location, scale = job.y[train].mean(), job.y[train].std()
        target = torch.tensor((job.y - location) / scale, dtype=torch.float32)
        n_outputs = 1
    else:
        classes, labels = np.unique(job.y, return_inverse=True)
        target = torch.tensor(labels)
        n_outputs = len(classes)
    width = 64
    of_key = torch.nn.Sequential(
        torch.nn.Linear(tokens.shape[1] + n_query, width), torch.nn.ReLU(),
        torch.nn.Linear(width, width), torch.nn.ReLU(),
    )  # fmt: skip
    of_set = torch.nn.Sequential(
        torch.nn.Linear(2 * width + n_query, width), torch.nn.ReLU(),
        torch.nn.Linear(width, n_outputs),
    )  # fmt: skip
    parameters = [*of_key.parameters(), *of_set.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=2e-3, weight_decay=1e-5)
    lengths = torch.tensor(sets.lengths, dtype=torch.float32)[:, None]
    queries = None if query is None else torch.tensor(query, dtype=torch.float32)

    def outputs(rows: np.ndarray) -> Any:
        is_chosen = np.zeros(len(sets), bool)
        is_chosen[rows] = True
        keys = np.flatnonzero(is_chosen[owner.numpy()])
        position = np.cumsum(is_chosen) - 1
        own = torch.tensor(position[owner.numpy()[keys]])
        inputs = tokens[keys]
        if queries is not None:
            inputs = torch.cat([inputs, queries[owner[keys]]], dim=1)
        total = torch.zeros(len(rows), width).index_add(0, own, of_key(inputs))
        count = lengths[rows]
        pooled_keys = [total / 20, total / count]
        if queries is not None:
            pooled_keys.append(queries[rows])
        return of_set(torch.cat(pooled_keys, dim=1))

    # the last tenth of the training part says when to stop
    n_fit = int(0.9 * job.n_train)
    generator = np.random.default_rng(seed)
    order = generator.permutation(job.n_train)
    fit_rows, held_rows = np.sort(order[:n_fit]), np.sort(order[n_fit:])
    loss_of = torch.nn.MSELoss() if job.is_regression else torch.nn.CrossEntropyLoss()

    def loss(rows: np.ndarray) -> Any:
        found = outputs(rows)
        return loss_of(found[:, 0] if job.is_regression else found, target[rows])

    best, best_state, patience = math.inf, None, 0
    for _ in range(200):
        for batch in np.array_split(generator.permutation(fit_rows), max(1, n_fit // 32)):
            optimiser.zero_grad()
            loss(np.sort(batch)).backward()
            optimiser.step()
        with torch.no_grad():
            held = float(loss(held_rows))
        patience += 1
        if held < best:
            best, patience = held, 0
            best_state = [parameter.detach().clone() for parameter in parameters]
        if patience == 15:
            break
    with torch.no_grad():
        for parameter, state in zip(parameters, best_state or parameters, strict=True):
            parameter.copy_(state)
        scores = outputs(np.arange(test.start, len(sets)))
    if job.is_regression:
        return scores[:, 0].numpy().astype(float) * scale + location
    return torch.softmax(scores, dim=1).numpy().astype(float)


LEARNERS: dict[str, Callable[[Job, slice, slice], np.ndarray]] = {
    "keyhole": keyhole_scores,
    "linear": linear_scores,
    "boosting": boosting_scores,
    "DeepSets": deep_sets_scores,
}

# ----------------------------------------------------------------------------------------- the run


def score(job: Job, truth: np.ndarray, scores: np.ndarray) -> float:
    """The metric of a job; larger is better."""
    if job.metric == "r2":
        return float(1 - np.mean(np.square(truth - scores)) / np.var(truth))
    if job.metric == "accuracy":
        return float((np.unique(job.y)[scores.argmax(axis=1)] == truth).mean())
    measure = roc_auc_score if job.metric == "auc" else average_precision_score
    return float(measure(truth, scores[:, 1]))


def behind(
    job: Job, truth: np.ndarray, ours: np.ndarray, theirs: np.ndarray
) -> tuple[float, float]:
    """By how much another learner is better, and the standard error of that, by 200 resamples."""
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(200):
        rows = rng.integers(len(truth), size=len(truth))
        if len(np.unique(truth[rows])) < 2:
            continue
        gains.append(score(job, truth[rows], theirs[rows]) - score(job, truth[rows], ours[rows]))
    return score(job, truth, theirs) - score(job, truth, ours), float(np.std(gains))


def run_job(name: str, seed: int, size: float) -> dict[str, Any]:
    """One row of the table."""
    rng = np.random.default_rng([seed, list(JOBS).index(name)])
    job = JOBS[name](rng, size)
    train, test = slice(0, job.n_train), slice(job.n_train, len(job.y))
    truth = job.y[test]
    found: dict[str, np.ndarray] = {}
    row: dict[str, Any] = {"job": name, "metric": job.metric, "n": job.n_train}
    for learner, scores_of in LEARNERS.items():
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[learner] = scores_of(job, train, test)
        row[learner] = score(job, truth, found[learner])
        row[f"{learner} seconds"] = time.perf_counter() - start
    best = max((name for name in LEARNERS if name != "keyhole"), key=lambda name: row[name])
    gap, error = behind(job, truth, found["keyhole"], found[best])
    ceiling_gap = 1 - row[best]
    loses = gap > 2 * error and gap > 0.03 * max(ceiling_gap, 1e-9)
    row |= {"best baseline": best, "gap": gap, "standard error": error, "loses": loses}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", type=float, default=1.0, help="factor on training samples")
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--out", type=Path, default=Path("out/defaults"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    print(f"{'job':20} {'metric':9}" + "".join(f"{name:>10}" for name in LEARNERS) + "   verdict")
    for name in arguments.jobs:
        row = run_job(name, arguments.seed, arguments.size)
        rows.append(row)
        verdict = f"behind {row['best baseline']} by {row['gap']:.3f} ± {row['standard error']:.3f}"
        if row["loses"] and name in REASONS:
            verdict += f" ({REASONS[name]})"
        if not row["loses"]:
            verdict = f"ok ({row['keyhole seconds']:.1f} s)"
        numbers = "".join(f"{row[learner]:10.3f}" for learner in LEARNERS)
        print(f"{name:20} {row['metric']:9}{numbers}   {verdict}", flush=True)
        with (arguments.out / "defaults.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    print(f"{sum(row['loses'] for row in rows)} of {len(rows)} jobs lost; seed {arguments.seed}")


if __name__ == "__main__":
    main()
