"""Real sets, every method, one table: `python benchmarks/real.py --data DIR [--only qa01 …]
[--methods …]`.

Rows are appended to --out as they are measured; a second run skips what is there. Every choice
(penalty, scaling, query, head distribution) is made inside the training part. With --jobs J, J
processes of one thread each share the fits. The variable KEYHOLE_DEVICE says where attention layers
are fitted: "cuda", or NumPy unless it is set.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from baselines import FourierMean, MemoryNetwork, Network, Pooled
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold, StratifiedKFold

import keyhole as kh
from keyhole.attention.heads import FittedHeads
from keyhole.data.datasets import babi_tokens
from keyhole.data.sets import SetGroups

BABI = tuple(f"qa{k:02d}" for k in range(1, 11))
MEMN2N = dict(zip(BABI, (99.9, 91.8, 58.2, 95.6, 86.3, 92.1, 79.7, 88.3, 86.4, 90.3), strict=True))
FIELDS = ("data", "method", "seed", "fold", "size", "score", "seconds", "note")


Row = dict[str, str]


@dataclass(frozen=True)
class Problem:
    """Samples, targets, how to split them, and the options of an attention layer that suit this
    kind of data.
    """

    name: str
    X: Any
    y: np.ndarray
    splits: Callable[[int], Iterator[tuple[np.ndarray, np.ndarray]]]
    regression: bool = False
    options: dict[str, Any] | None = None
    names: tuple[str, ...] = ()
    groups: np.ndarray | None = None
    support: list[np.ndarray] | None = None
    """Which keys of each sample, its first ones, hold the answer; no model is told."""

    def score(self, truth: np.ndarray, found: np.ndarray) -> float:
        """Mean absolute error, or per cent right."""
        return float(
            np.abs(truth - found).mean() if self.regression else 100 * (truth == found).mean()
        )


def official(split: np.ndarray) -> Callable[[int], Iterator[tuple[np.ndarray, np.ndarray]]]:
    return lambda seed: iter([(np.flatnonzero(split == 0), np.flatnonzero(split == 1))])


def folds(y: np.ndarray, count: int, stratified: bool = True) -> Callable[[int], Iterator[Any]]:
    kind = StratifiedKFold if stratified else KFold
    return lambda seed: kind(count, shuffle=True, random_state=seed).split(np.zeros(len(y)), y)


def read(data: Path, *parts: str) -> Any:
    path = data.joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(
            f"{path.name} is missing: expected it at {path}. Give the folder with --data."
        )
    return np.load(path, allow_pickle=False)


def babi(data: Path, name: str) -> Problem:
    """Tokens and options are the same for all tasks; "qa01 plain" has bags of words and their age
    alone, and ReLU/N.
    """
    task, _, plain = name.partition(" ")
    file = read(data, "babi", f"{task}.npz")
    meta = json.loads(str(file["meta"]))
    stories = np.split(file["X_sent"], file["ptr"][1:-1])
    parts = {
        "plain": {"order": 0.0, "shared": 0.0, "ages": False, "empty": False},
        "softmax": {"order": 0.0, "shared": 0.0, "ages": False, "empty": False},
        "unshared": {"shared": 0.0},
        "smooth": {"newest": 40, "ages": False},
    }
    made = babi_tokens(
        file["sentence_table"], stories, file["query_sent"], meta["vocab"], **parts.get(plain, {})
    )
    options = {
        "n_heads": 256,
        "activation": "relu" if plain == "plain" else "softmax",
        "dtype": "float32",
    }
    last = file["line"][
        file["ptr"][1:] - 1
    ]  # lines of a story are numbered: a question with a lower one begins another
    story = np.cumsum(np.diff(last, prepend=0) <= 0)
    support = [
        marks[-80:] > 0 for marks in np.split(file["support"], file["ptr"][1:-1])
    ]  # the newest 80 are keys
    return Problem(
        name,
        made.sets,
        file["y"],
        official(file["split"]),
        False,
        options,
        made.names,
        story,
        support,
    )


def bags(data: Path, name: str) -> Problem:
    file = read(data, name, f"{name}.npz")
    X = kh.SetBatch(np.split(file["X"].astype(float), file["ptr"][1:-1]))
    options = {"n_heads": math.inf, "scaling": "auto", "query": "auto"}
    return Problem(name, X, file["y"], folds(file["y"], 10), options=options)


def japanese_vowels(data: Path, name: str) -> Problem:
    file = read(data, name, "JapaneseVowels.npz")
    tokens = np.column_stack([file["X"], file["t"]]).astype(float)
    X = kh.SetBatch(np.split(tokens, file["ptr"][1:-1]))
    options = {"n_heads": math.inf, "scaling": "auto", "query": "auto"}
    return Problem(name, X, file["y"], official(file["split"]), options=options)


def vowel_windows(data: Path, name: str) -> Problem:
    """The frames alone, without their time; or windows of three or five of them, by
    `kh.tokens.windows`.
    """
    file = read(data, "japanese_vowels", "JapaneseVowels.npz")
    frames = np.split(file["X"].astype(float), file["ptr"][1:-1])
    width = {"japanese_vowels windows 3": 3, "japanese_vowels windows 5": 5}.get(name)
    X = kh.SetBatch(frames if width is None else kh.tokens.windows(frames, width))
    return Problem(name, X, file["y"], official(file["split"]))


def story_words(data: Path, name: str) -> Problem:
    """Bags of words, the question as query of its own kind; then `kh.tokens.with_shared`, and
    `with_ages` of ten.
    """
    file = read(data, "babi", f"{name[:4]}.npz")
    table = file["sentence_table"]
    bags = np.zeros((len(table), int(table.max()) + 1))
    np.put_along_axis(bags, table.astype(int), 1.0, axis=1)
    bags, asked = bags[:, 1:], bags[file["query_sent"], 1:]
    keys = [bags[story] for story in np.split(file["X_sent"], file["ptr"][1:-1])]
    keys = kh.tokens.with_shared(keys, asked) if "shared" in name else keys
    keys = kh.tokens.with_ages(keys, 10) if "ages" in name else keys
    return Problem(name, kh.SetBatch(keys, asked), file["y"], official(file["split"]))


def digits(data: Path, name: str) -> Problem:
    """Pixels that are not blank: bumps for row and column, and the ink."""
    images, y = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16.0
    bump = np.exp(-0.5 * np.square(np.arange(8)[:, None] - np.arange(8)))
    bump /= np.linalg.norm(bump, axis=1, keepdims=True)
    keys = []
    for image in images:
        rows, columns = np.nonzero(image)
        ink = image[rows, columns][:, None]
        keys.append(np.concatenate([bump[rows], bump[columns], ink], axis=1))
    return Problem(
        name,
        kh.SetBatch(keys),
        y,
        folds(y, 5),
        options={"n_heads": 512, "scaling": "auto", "query": "auto", "dtype": "float32"},
    )


def qm7(data: Path, name: str) -> Problem:
    """A molecule is the group of the neighbourhoods of its atoms: query the atom, keys all others
    at their distance.
    """
    file = read(data, "qm7", "qm7.npz")
    X, options = molecules(file["X"].astype(float), file["ptr"]), {"n_heads": 24, "pooling": "sum"}
    y = file["y"].astype(float)
    return Problem(name, X, y, folds(y, 10, stratified=False), regression=True, options=options)


def molecules(atoms: np.ndarray, ptr: np.ndarray, n_radial: int = 12) -> SetGroups:
    """Keys: element × radial bumps of the distance to the query atom (the atom itself among them,
    at distance 0).
    """
    elements = np.array([1, 6, 7, 8, 16])
    hot = (atoms[:, :1] == elements).astype(np.float32)
    centres = np.linspace(0.8, 6.0, n_radial)
    keys, queries, counts = [], [], np.diff(ptr)
    for a, b in itertools.pairwise(ptr):
        apart = np.linalg.norm(atoms[a:b, None, 1:] - atoms[None, a:b, 1:], axis=2)
        radial = np.exp(
            -0.5 * np.square((apart[:, :, None] - centres) / (centres[1] - centres[0]))
        ).astype(np.float32)
        for i in range(b - a):
            pairs = (hot[a:b, :, None] * radial[i][:, None, :]).reshape(b - a, -1)
            keys.append(np.concatenate([hot[a:b], pairs], axis=1))
            queries.append(np.concatenate([hot[a + i], np.zeros(pairs.shape[1], np.float32)]))
    return SetGroups(kh.SetBatch(keys, np.array(queries)), counts)


DATA: dict[str, Callable[[Path, str], Problem]] = {
    **dict.fromkeys(BABI, babi),
    **dict.fromkeys(("qa01 plain", "qa01 softmax"), babi),
    **dict.fromkeys((f"{name} {kind}" for name in BABI for kind in ("unshared", "smooth")), babi),
    "digits": digits,
    "musk1": bags,
    "elephant": bags,
    "japanese_vowels": japanese_vowels,
    "qm7": qm7,
    **dict.fromkeys(
        (f"japanese_vowels {kind}" for kind in ("frames", "windows 3", "windows 5")), vowel_windows
    ),
    **dict.fromkeys(
        (
            f"{task} words{more}"
            for task in ("qa01", "qa06")
            for more in ("", " shared", " ages", " shared ages")
        ),
        story_words,
    ),
}


@cache
def load(name: str, data: Path) -> Problem:
    return DATA[name](data, name)


def attention(problem: Problem, seed: int, distribution: Any, **changes: Any) -> Any:
    kind = kh.AttentionRegressor if problem.regression else kh.AttentionClassifier
    plain = {
        "scaling": "none",
        "query": "given",
        "device": os.environ.get("KEYHOLE_DEVICE"),
    }
    return kind(
        heads=distribution, random_state=seed, **{**plain, **(problem.options or {}), **changes}
    )


def default_settings(problem: Problem, seed: int, heads: Any = None) -> Any:
    """The estimator without settings, but for a head distribution if one is given."""
    estimator = kh.AttentionClassifier
    if problem.regression:
        estimator = kh.AttentionRegressor
    return estimator(heads=heads, random_state=seed, device=os.environ.get("KEYHOLE_DEVICE"))


def nothing_learned(problem: Problem, seed: int) -> Any:
    """Default settings that do not try to learn heads: what trying costs, and whether it harms."""
    return default_settings(problem, seed, kh.GaussianHeads())


def papers_layer(problem: Problem, seed: int) -> Any:
    """512 zero-mean heads on tokens as they are, as the paper has it."""
    return attention(
        Problem("", None, problem.y, problem.splits, problem.regression),
        seed,
        kh.GaussianHeads(),
        n_heads=512,
    )


METHODS: dict[str, Callable[[Problem, int], Any]] = {
    "mean-pool logistic": lambda p, s: (
        None if p.regression else Pooled("logistic", "mean", p.regression, s)
    ),
    "mean-pool ridge": lambda p, s: Pooled("ridge", "mean", p.regression, s),
    "mean-pool RBF": lambda p, s: Pooled("rbf", "mean", p.regression, s),
    "statistics logistic": lambda p, s: (
        None if p.regression else Pooled("logistic", "statistics", p.regression, s)
    ),
    "statistics ridge": lambda p, s: Pooled("ridge", "statistics", p.regression, s),
    "statistics RBF": lambda p, s: Pooled("rbf", "statistics", p.regression, s),
    "statistics LightGBM": lambda p, s: Pooled("lightgbm", "statistics", p.regression, s),
    "Fourier mean ridge": lambda p, s: FourierMean(p.regression, s),
    "attention, zero mean": lambda p, s: attention(p, s, kh.GaussianHeads()),
    "default settings": default_settings,
    "nothing learned": nothing_learned,
    "paper's layer": papers_layer,
    "attention, one hop": lambda p, s: (
        None if p.regression else attention(p, s, kh.LearnedHeads(hops=1))
    ),
    "attention, learned": lambda p, s: None if p.regression else attention(p, s, kh.LearnedHeads()),
    "attention, 4 means": lambda p, s: (
        attention(p, s, kh.LearnedHeads(n_means=4)) if p.name in BABI else None
    ),
    "DeepSets": lambda p, s: Network("deepsets", p.regression, s),
    "attention MIL": lambda p, s: Network("mil", p.regression, s),
    "Set Transformer": lambda p, s: Network("transformer", p.regression, s),
    "memory network": lambda p, s: MemoryNetwork(s) if p.name in BABI else None,
}


@dataclass(frozen=True)
class Fit:
    """One method, fitted to one split of one data set."""

    data: str
    method: str
    seed: int
    fold: int


def fits(names: list[str], methods: list[str], seeds: int, data: Path) -> Iterator[Fit]:
    """What there is to do, by data set, seed and method; methods that do not apply are left out."""
    for name, seed in itertools.product(names, range(seeds)):
        problem = load(name, data)
        for method, (fold, _) in itertools.product(methods, enumerate(problem.splits(seed))):
            if METHODS[method](problem, seed) is not None:
                yield Fit(name, method, seed, fold)


@cache
def warm_up() -> None:
    """Load what the first fit of a process loads: compiled loops, and torch.

    It is in no one's time.
    """
    sets, codes = kh.targets.sphere_sets(60, 4, 3, seed=0), np.arange(60) % 2
    for n_heads, activation in ((8, "relu"), (8, "softmax"), (math.inf, "relu")):
        for dtype in ("float32", "float64"):
            options: dict[str, Any] = {"activation": activation, "dtype": dtype, "random_state": 0}
            kh.AttentionClassifier(
                n_heads, kh.GaussianHeads(), scaling="none", query="given", **options
            ).fit(sets, codes)
    Network("deepsets", False, 0, epochs=1).fit(sets, codes)
    if device := os.environ.get("KEYHOLE_DEVICE"):
        distribution = kh.LearnedHeads(max_iter=1, hops=1)
        kh.AttentionClassifier(
            8, distribution, activation="softmax", device=device, random_state=0
        ).fit(sets[:60], codes[:60])


def measure(fit: Fit, data: Path) -> Row:
    """Fit and predict on one split; the time is that of the fit."""
    warm_up()
    problem = load(fit.data, data)
    train, test = list(problem.splits(fit.seed))[fit.fold]
    model = METHODS[fit.method](problem, fit.seed)
    began = time.perf_counter()
    siblings = problem.groups is not None and isinstance(model, kh.AttentionClassifier)
    extra = {"groups": problem.groups[train]} if siblings else {}
    model.fit(problem.X[train], problem.y[train], **extra)
    seconds = round(time.perf_counter() - began, 2)
    found = model.predict(problem.X[test])
    score, note = round(problem.score(problem.y[test], found), 4), describe(model)
    if problem.support is not None and isinstance(getattr(model, "heads_", None), FittedHeads):
        shown = support_shown(
            model.hop_weights(problem.X[test]), [problem.support[i] for i in test]
        )
        note += f", support {100 * shown[found == problem.y[test]].mean():.1f}"
    values = (*vars(fit).values(), len(test), score, seconds, note)
    return dict(zip(FIELDS, (str(value) for value in values), strict=True))


def support_shown(weights: list[list[np.ndarray]], support: list[np.ndarray]) -> np.ndarray:
    """Whether the k keys of each sample that are heaviest in any pattern of any look are the k that
    are marked.
    """
    shown = []
    for i, marked in enumerate(support):
        heaviest = np.concatenate([look[i] for look in weights]).max(axis=0)[: len(marked)]
        shown.append(bool(marked[np.argsort(-heaviest, kind="stable")[: marked.sum()]].all()))
    return np.array(shown)


def describe(model: Any) -> str:
    """What an attention layer chose for itself."""
    if not hasattr(model, "tokens_"):
        return ""
    distribution = model.heads_
    heads = (
        f"M={model.n_heads_} c={distribution.mean:g}"
        if np.ndim(getattr(distribution, "mean", ())) == 0
        else ""
    )
    if heads:
        return f"{model.tokens_.scaling}/{model.tokens_.query} {heads}"
    chosen = (
        f"{distribution.chosen} c={distribution.strength:g} {distribution.steps} steps"
        if hasattr(distribution, "chosen")
        else ""
    )
    chosen += f" {distribution.hops} hops" if getattr(distribution, "hops_", ()) else ""
    return f"{model.tokens_.scaling}/{model.tokens_.query} {chosen}".strip()


def seed_scores(rows: list[Row], name: str, method: str) -> tuple[np.ndarray, float, str]:
    """The score of every seed, its folds weighed by their size; seconds per seed; what was chosen
    most often.
    """
    found = [row for row in rows if (row["data"], row["method"]) == (name, method)]
    scores, seconds = [], []
    for seed in sorted({row["seed"] for row in found}):
        part = [row for row in found if row["seed"] == seed]
        scores.append(
            np.average([float(r["score"]) for r in part], weights=[int(r["size"]) for r in part])
        )
        seconds.append(sum(float(r["seconds"]) for r in part))
    notes = [row["note"] for row in found] or [""]
    return np.array(scores), float(np.mean(seconds or [0.0])), max(set(notes), key=notes.count)


def report(rows: list[Row]) -> str:
    """Mean ± spread over seeds, and seconds per seed; the mean of the ten stories below them."""
    lines = []
    for name in dict.fromkeys(row["data"] for row in rows):
        lines.append(f"{name}" + (f"   (MemN2N {MEMN2N[name]})" if name in MEMN2N else ""))
        for method in METHODS:
            scores, seconds, note = seed_scores(rows, name, method)
            if len(scores):
                spread = f" ± {scores.std(ddof=1):.2f}" if len(scores) > 1 else ""
                lines.append(
                    f"  {method:24}{scores.mean():8.2f}{spread:9}{seconds:9.1f} s   {note}"
                )
    for method in METHODS:
        means = [seed_scores(rows, name, method)[0] for name in BABI]
        if all(len(scores) for scores in means):
            lines.append(
                f"mean over {BABI[0]}–{BABI[-1]}: "
                f"{method:24}{np.mean([s.mean() for s in means]):8.2f}"
            )
    return "\n".join(lines)


def measure_all(todo: Iterable[Fit], data: Path, jobs: int, seconds: float) -> Iterator[Row]:
    """Rows as they come; nothing new is started after ``seconds``."""
    began = time.perf_counter()
    rest = (fit for fit in todo if time.perf_counter() - began < seconds)
    if jobs == 1:
        yield from (measure(fit, data) for fit in rest)
        return
    for pool_of in ("OMP", "OPENBLAS", "MKL", "NUMBA"):  # read by the workers when they start
        os.environ[f"{pool_of}_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as workers:
        running: set[Future[Row]] = set()
        while True:
            running |= {
                workers.submit(measure, fit, data)
                for fit in itertools.islice(rest, jobs - len(running))
            }
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("KEYHOLE_DATA"))
    usual = [name for name in DATA if " " not in name or name in ("qa01 plain", "qa01 softmax")]
    parser.add_argument("--only", nargs="+", choices=list(DATA), default=usual, metavar="NAME")
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), help="parts of names of methods"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/real.csv"))
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="fits at a time; times are those of one thread if above 1",
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start nothing new after so long"
    )
    args = parser.parse_args()
    if args.data is None:
        sys.exit("Say where the data is: --data DIR, or the variable KEYHOLE_DATA.")
    chosen = [m for m in METHODS if any(part.lower() in m.lower() for part in args.methods)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows = list(csv.DictReader(args.out.open())) if args.out.exists() else []
    done = {tuple(row[k] for k in FIELDS[:4]) for row in rows}
    todo = (
        fit
        for fit in fits(args.only, chosen, args.seeds, args.data)
        if tuple(str(value) for value in vars(fit).values()) not in done
    )
    with args.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if not rows:
            writer.writeheader()
        for row in measure_all(todo, args.data, args.jobs, args.seconds):
            rows.append(row)
            writer.writerow(row)
            file.flush()
    print(report([row for row in rows if row["data"] in args.only]))


if __name__ == "__main__":
    main()
