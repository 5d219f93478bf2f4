"""What attention layers can learn from some data: learners side by side, and answers in words.

Every row of the table is a learner, measured on the same held-out folds. Answers are paired
differences between rows, sample by sample, so that they cannot say anything but what the table
says.
"""

from __future__ import annotations

import html
import importlib.util
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from keyhole._checks import check_choice, check_float_array, check_no_mask, check_seed
from keyhole._files import write_whole
from keyhole.data.statistics import set_statistics
from keyhole.estimators.attention import AttentionClassifier, AttentionRegressor
from keyhole.estimators.classes import TASKS, likely_task
from keyhole.estimators.report import MemberRow
from keyhole.estimators.validation import as_samples

N_FOLDS = 5
CLEAR = 2.0
"""Standard errors by which a difference is clear."""

LEAST_SHARE = 0.03
"""Share of the error that a difference must have to be worth a word."""

FEW_HEADS = 32
"""Heads that are compared with as many as default settings take."""

CONSTANT = "a constant guess"
LINEAR = "pooled statistics, linear"
LIGHTGBM = "pooled statistics, LightGBM"
DEFAULT = "default settings"
WITHOUT_HEADS = "default settings without attention"
WITHOUT_QUERY = "default settings without the query"
HALF = "default settings, half the samples"
FEW = f"default settings with {FEW_HEADS} heads"


@dataclass(frozen=True)
class Row:
    """A learner, its loss on every held-out sample, and how to get it.

    Attributes
    ----------
    name : str
    losses : array (n,)
        Squared errors in units of the variance of the target, or log-losses; NaN for samples that
        were not held out.
    error : float
        Their mean: for classes the share of wrong labels is ``wrong``.
    standard_error : float
    wrong : float or None
        Share of wrong labels.
    auc : float or None
        Area under the curve, for two classes.
    code : str
        The Python that fits it, the name of a baseline, or empty where nobody would start from it.
    """

    name: str
    losses: Float[np.ndarray, " n"] = field(repr=False)
    error: float
    standard_error: float
    wrong: float | None = None
    auc: float | None = None
    code: str = ""


@dataclass(frozen=True)
class Answer:
    """A question, what the rows say, and the sentence with the numbers."""

    question: str
    says: str
    sentence: str


@dataclass(frozen=True)
class Findings:
    """What `lens` found; it prints as the table and the answers.

    Attributes
    ----------
    kind : "regression" or "classification"
    description : str
        The data, in words.
    rows : tuple of Row
        Every learner, the best first.
    answers : dict of Answer
        By "attention", "query", "samples", "heads" and "settings".
    members : tuple of MemberRow
        The layers that default settings fit to all samples.
    recommendation : str
        How to get the best row: Python, or the name of a baseline.
    """

    kind: str
    description: str
    rows: tuple[Row, ...]
    answers: dict[str, Answer]
    members: tuple[MemberRow, ...]
    recommendation: str

    @property
    def measure(self) -> str:
        """What the errors are."""
        if self.kind == "classification":
            return "log-loss of held-out samples"
        return "squared error of held-out samples, as a share of the variance of the target"

    @property
    def table(self) -> list[dict[str, Any]]:
        """The rows as dictionaries, the best first."""
        table = []
        for row in self.rows:
            cells: dict[str, Any] = {
                "learner": row.name,
                "error": row.error,
                "±": row.standard_error,
            }
            if self.kind == "regression":
                cells["R²"] = 1.0 - row.error
            else:
                cells["wrong"] = row.wrong
                if row.auc is not None:
                    cells["AUC"] = row.auc
            table.append(cells)
        return table

    def __str__(self) -> str:
        lines = [f"{self.description}; {self.kind}", f"{self.measure}:", ""]
        for row in self.rows:
            extra = ""
            if row.wrong is not None:
                extra = f"  {row.wrong:6.1%} wrong"
            if row.auc is not None:
                extra += f"  AUC {row.auc:.3f}"
            lines.append(f"  {row.error:8.4f} ± {row.standard_error:.4f}{extra}  {row.name}")
        lines.append("")
        lines += [f"{answer.question} {answer.sentence}" for answer in self.answers.values()]
        lines += ["", f"Start from {self.recommendation}"]
        return "\n".join(lines)

    def as_data(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {
            "kind": self.kind,
            "description": self.description,
            "measure": self.measure,
            "table": self.table,
            "answers": {
                name: {"question": a.question, "says": a.says, "sentence": a.sentence}
                for name, a in self.answers.items()
            },
            "members": [
                {"name": m.name, "weight": m.weight, "loss": m.loss, "alpha": m.alpha}
                for m in self.members
            ],
            "recommendation": self.recommendation,
        }

    def save(self, folder: str | Path, *, overwrite: bool = False) -> list[Path]:
        """Write the report as one HTML page, and the data beside it; return both paths."""
        folder = Path(folder)
        page = folder / "report.html"
        if page.exists() and not overwrite:
            raise FileExistsError(
                f"{page} is there already: pass another folder, or overwrite=True."
            )
        write_whole(report_page(self).encode(), page, overwrite=overwrite)
        data = folder / "report.json"
        write_whole(json.dumps(self.as_data(), indent=1).encode(), data)
        return [page, data]


def lens(
    X: Any,
    y: Any = None,
    *,
    task: str = "auto",
    groups: Any = None,
    time: Any = None,
    split: Any = None,
    seed: int = 0,
    tell: Callable[[str], None] | None = None,
) -> Findings:
    """What attention layers can learn from these sets: learners side by side, and answers.

    Parameters
    ----------
    X : SetBatch, SetGroups, or tokens as the estimators take them; or a Dataset
        A Dataset brings its own target, groups, time and split.
    y : array (n,)
        Numbers or labels.
    task : "auto", "regression" or "classification"
        "auto" takes text, booleans, and few different whole numbers for classes.
    groups : array (n,), optional
        Samples of one group are held out together.
    time : array (n,) of numbers, optional
        The later half is held out in five parts, each predicted from all that came before it.
    split : array (n,) of 0 and 1, optional
        Where given, the samples of 1 are held out.
    seed : int
    tell : function of a sentence, optional
        Called with what is being fitted.

    Returns
    -------
    Findings
        With ``table``, ``answers``, ``members`` and ``save(folder)``.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(120, n_keys=4, dim=3, seed=0)
    >>> found = kh.lens(sets, kh.targets.Correlation(1, dim=3)(sets))
    >>> found.answers["attention"].says, found.answers["query"].says
    ('yes', 'yes')
    """
    problem = _Problem.of(X, y, task=task, groups=groups, time=time, split=split, seed=seed)
    say = tell if tell is not None else _silent
    rows = list(_measured(problem, say))
    ordered = sorted(rows, key=lambda row: row.error)
    say("fitting default settings to all samples")
    model = problem.estimator().fit(problem.samples, problem.target, groups=problem.groups)
    answers = _answers(problem, {row.name: row for row in rows})
    return Findings(
        kind=problem.kind,
        description=problem.description,
        rows=tuple(ordered),
        answers=answers,
        members=tuple(model.members_),
        recommendation=_best_to_start_from(ordered).code,
    )


@dataclass(frozen=True)
class _Problem:
    """Samples, target and folds."""

    samples: Any
    target: np.ndarray
    kind: str
    groups: np.ndarray | None
    folds: list[tuple[Int[np.ndarray, " r"], Int[np.ndarray, " h"]]]
    seed: int

    @classmethod
    def of(
        cls, X: Any, y: Any, *, task: str, groups: Any, time: Any, split: Any, seed: int
    ) -> _Problem:
        """Check everything; a dataset brings what is not given."""
        if hasattr(X, "sets") and hasattr(X, "schema"):
            dataset = X
            samples = dataset.sets
            y = dataset.target if y is None else y
            groups = dataset.groups if groups is None else groups
            time = dataset.time if time is None else time
            split = dataset.split if split is None else split
        else:
            samples = as_samples(AttentionRegressor(), X, reset=True)
        n = len(samples)
        for name, values in {"y": y, "split": split, "groups": groups, "time": time}.items():
            check_no_mask(values, name)
        target = np.asarray(y)
        if y is None or target.ndim != 1 or len(target) != n:
            raise ValueError(
                f"`y` must have one number or label for each of the {n} samples: got "
                f"{'none' if y is None else f'shape {target.shape}'}."
            )
        kind = check_choice(task, "task", TASKS)
        if kind == "auto":
            kind = likely_task(target)
        if kind == "regression":
            if target.dtype.kind in "UO":
                raise ValueError(
                    "task='regression' needs a target of numbers: got labels such as "
                    f"{target[0]!r:.40}."
                )
            target = target.astype(np.float64)
        groups = _per_sample(groups, "groups", n)
        time = _per_sample(time, "time", n)
        split = _per_sample(split, "split", n)
        seed = check_seed(seed)
        folds = _folds(target, kind, groups, time, split, seed)
        return cls(samples, target, kind, groups, folds, seed)

    @property
    def description(self) -> str:
        """The data in words."""
        sizes = self.samples.token_counts
        words = (
            f"{len(self.samples)} samples of {int(np.median(sizes))} rows (median), "
            f"{self.samples.dim} coordinates"
        )
        if self.samples.sets.query is not None:
            words += f", a query of {self.samples.query_dim}"
        if self.samples.extras is not None:
            words += f", {self.samples.extras.shape[1]} sample-level features"
        return words

    def estimator(self, **params: Any) -> Any:
        """Default settings with some of them given."""
        kind = AttentionClassifier if self.kind == "classification" else AttentionRegressor
        return kind(random_state=self.seed, **params)

    def code(self, params: dict[str, Any]) -> str:
        """The Python of an estimator with these settings."""
        if params.get("pooling") in ("statistics", "extras"):
            # layers without heads have no other settings
            params = {name: params[name] for name in ("pooling", "mlp") if name in params}
        name = "AttentionClassifier" if self.kind == "classification" else "AttentionRegressor"
        arguments = ", ".join(f"{key}={_written(value)}" for key, value in params.items())
        return f"kh.{name}({arguments})"

    def row(self, name: str, predictions: np.ndarray, code: str = "") -> Row:
        """A row from predictions of all samples: numbers, or log-probabilities of the classes."""
        held_out = np.unique(np.concatenate([test for _, test in self.folds]))
        losses = np.full(len(self.target), np.nan)
        wrong = None
        auc = None
        if self.kind == "regression":
            variance = float(np.var(self.target[held_out])) or 1.0
            losses[held_out] = np.square(self.target - predictions)[held_out] / variance
        else:
            classes, labels = np.unique(self.target, return_inverse=True)
            logs = predictions[held_out]
            losses[held_out] = -logs[np.arange(len(held_out)), labels[held_out]]
            wrong = float((logs.argmax(axis=1) != labels[held_out]).mean())
            if len(classes) == 2 and len(np.unique(labels[held_out])) == 2:
                auc = float(roc_auc_score(labels[held_out], logs[:, 1] - logs[:, 0]))
        error, standard_error = self.mean_and_error(losses)
        return Row(
            name=name,
            losses=losses,
            error=error,
            standard_error=standard_error,
            wrong=wrong,
            auc=auc,
            code=code,
        )

    def mean_and_error(self, losses: Float[np.ndarray, " n"]) -> tuple[float, float]:
        """The mean over held-out samples, and its standard error over samples or groups."""
        is_known = np.isfinite(losses)
        values = losses[is_known]
        if self.groups is not None:
            _, number = np.unique(self.groups[is_known], return_inverse=True)
            values = np.bincount(number, weights=values) / np.bincount(number)
        spread = float(values.std(ddof=1)) if len(values) > 1 else math.inf
        return float(losses[is_known].mean()), spread / math.sqrt(len(values))


def _per_sample(values: Any, name: str, n: int) -> np.ndarray | None:
    """One value for each sample, or None."""
    if values is None:
        return None
    array = np.asarray(values)
    if array.shape != (n,):
        raise ValueError(
            f"`{name}` must have one entry for each of the {n} samples: got shape {array.shape}."
        )
    return array


def _folds(
    target: np.ndarray,
    kind: str,
    groups: np.ndarray | None,
    time: np.ndarray | None,
    split: np.ndarray | None,
    seed: int,
) -> list[tuple[Int[np.ndarray, " r"], Int[np.ndarray, " h"]]]:
    """Training and held-out samples: of a split, of time, of groups, or five folds."""
    n = len(target)
    if split is not None:
        if not np.isin(split, (0, 1)).all() or len(np.unique(split)) < 2:
            raise ValueError(
                "`split` must be 0 (train) or 1 (test) for every sample, and have both."
            )
        return [(np.flatnonzero(split == 0), np.flatnonzero(split == 1))]
    if time is not None:
        moments = check_float_array(time, "time").astype(np.float64)
        order = np.argsort(moments, kind="stable")
        parts = np.array_split(order[n // 2 :], N_FOLDS)
        folds = []
        for part in parts:
            before = np.flatnonzero(moments < moments[part].min())
            if len(before) and len(part):
                folds.append((before, np.sort(part)))
        if not folds:
            raise ValueError("`time` must differ between samples: nothing comes before anything.")
        return folds
    labels = None
    if kind == "classification":
        _, labels = np.unique(target, return_inverse=True)
        if np.bincount(labels).min() < N_FOLDS:
            labels = None
    splitter: Any
    if groups is None and labels is not None:
        splitter = StratifiedKFold(N_FOLDS, shuffle=True, random_state=seed)
    elif groups is None:
        splitter = KFold(N_FOLDS, shuffle=True, random_state=seed)
    elif labels is not None:
        splitter = StratifiedGroupKFold(N_FOLDS, shuffle=True, random_state=seed)
    else:
        splitter = GroupKFold(N_FOLDS)
    return list(splitter.split(np.zeros(n), labels, groups))


def _measured(problem: _Problem, say: Callable[[str], None]) -> Iterator[Row]:
    """Every learner on the same folds."""
    for name, predict in _baselines(problem):
        say(f"fitting {name}")
        yield problem.row(name, _out_of_fold(problem, predict), code=name)

    # default settings, and every layer of theirs by itself: both from the same fits
    say(f"fitting {DEFAULT}")
    yield from _rows_of_default(problem)

    variants: list[tuple[str, dict[str, Any], Any]] = []
    if problem.samples.sets.query is not None:
        variants.append((WITHOUT_QUERY, {}, _without_query))
    if problem.samples.sets.n_tokens < 10**6:
        variants.append((FEW, {"n_heads": FEW_HEADS}, None))
    for name, params, change in variants:
        say(f"fitting {name}")
        code = problem.code(params)
        if change is not None:
            code += ", and samples without their query"
        predictions = _out_of_fold(problem, _fit_predict(problem, params, change))
        yield problem.row(name, predictions, code)
    say(f"fitting {HALF}")
    yield problem.row(HALF, _out_of_fold(problem, _fit_predict(problem, {}, None, share=0.5)))


def _out_of_fold(
    problem: _Problem,
    predict: Callable[[Int[np.ndarray, " r"], Int[np.ndarray, " h"]], np.ndarray],
) -> np.ndarray:
    """Predictions of every held-out sample."""
    total: np.ndarray | None = None
    for train, test in problem.folds:
        predicted = predict(train, test)
        if total is None:
            total = np.full((len(problem.target), *predicted.shape[1:]), np.nan)
        total[test] = predicted
    assert total is not None
    return total


def _fit_predict(
    problem: _Problem, params: dict[str, Any], change: Any, share: float = 1.0
) -> Callable[[Int[np.ndarray, " r"], Int[np.ndarray, " h"]], np.ndarray]:
    """A function that fits an estimator to a training part and predicts a held-out one."""

    def predict(train: Int[np.ndarray, " r"], test: Int[np.ndarray, " h"]) -> np.ndarray:
        samples = problem.samples if change is None else change(problem.samples)
        rows = train
        if share < 1:
            rng = np.random.default_rng(problem.seed)
            rows = np.sort(rng.permutation(train)[: max(2, round(share * len(train)))])
        model = _fitted(problem, problem.estimator(**params), samples, rows)
        return _prediction(problem, model, samples[test])

    return predict


def _fitted(problem: _Problem, model: Any, samples: Any, rows: Int[np.ndarray, " r"]) -> Any:
    """An estimator, fitted to some samples."""
    groups = None if problem.groups is None else problem.groups[rows]
    if groups is not None and len(np.unique(groups)) < 2:
        groups = None
    return model.fit(samples[rows], problem.target[rows], groups=groups)


def _prediction(problem: _Problem, model: Any, samples: Any) -> np.ndarray:
    """Numbers, or log-probabilities of all classes of the target."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if problem.kind == "regression":
            return np.asarray(model.predict(samples))
        return _of_all_classes(problem, model.classes_, model.predict_log_proba(samples))


def _of_all_classes(
    problem: _Problem, classes: np.ndarray, logs: Float[np.ndarray, "m c"]
) -> Float[np.ndarray, "m k"]:
    """Log-probabilities of all classes; one that the training part lacked is very improbable."""
    everything = np.unique(problem.target)
    full = np.full((len(logs), len(everything)), math.log(1e-6))
    full[:, np.searchsorted(everything, classes)] = logs
    return full


def _rows_of_default(problem: _Problem) -> Iterator[Row]:
    """Default settings, those without attention, and each layer by itself, from the same fits."""
    from keyhole.fit.combine import combine, single
    from keyhole.fit.samples import TrainingSet

    classifies = problem.kind == "classification"
    predictions: dict[str, np.ndarray] = {}
    params: dict[str, dict[str, Any]] = {}

    def put(name: str, test: Int[np.ndarray, " h"], values: np.ndarray) -> None:
        if name not in predictions:
            predictions[name] = np.full((len(problem.target), *values.shape[1:]), np.nan)
        predictions[name][test] = values

    for train, test in problem.folds:
        model = _fitted(problem, problem.estimator(), problem.samples, train)
        new = problem.samples[test]
        put(DEFAULT, test, _prediction(problem, model, new))
        data: TrainingSet = model._training
        tried = model.combination_.tried
        plain = [member for member in tried if not member.settings.has_heads]
        if plain:
            without = combine(plain, data, classifies=classifies)
            values = _values_of(problem, model, without, without.predict(new))
            put(WITHOUT_HEADS, test, values)
        for member, row in zip(tried, _in_order(model, tried), strict=True):
            alone = single(member, data, classifies=classifies)
            put(member.name, test, _values_of(problem, model, alone, alone.predict(new)))
            params[member.name] = row.params
    for name, values in predictions.items():
        if name == DEFAULT:
            code = problem.code({})
        elif name == WITHOUT_HEADS:
            code = problem.code({"pooling": "statistics"})
        else:
            code = problem.code(params[name])
        # a layer that was not tried in every fold has no row
        held_out = np.concatenate([test for _, test in problem.folds])
        if np.isfinite(values[held_out]).all():
            yield problem.row(name, values, code)


def _in_order(model: Any, tried: Sequence[Any]) -> list[MemberRow]:
    """The rows of the members' table in the order in which members were tried."""
    by_name = {row.name: row for row in model.members_}
    return [by_name[member.name] for member in tried]


def _values_of(
    problem: _Problem, model: Any, combination: Any, scores: Float[np.ndarray, "m t"]
) -> np.ndarray:
    """Numbers, or log-probabilities, from the scores of a combination."""
    from keyhole.estimators.uncertainty import log_probabilities_of

    if problem.kind == "regression":
        return scores[:, 0]
    return _of_all_classes(problem, model.classes_, log_probabilities_of(combination, scores))


def _baselines(
    problem: _Problem,
) -> list[tuple[str, Callable[[Int[np.ndarray, " r"], Int[np.ndarray, " h"]], np.ndarray]]]:
    """A constant, and learners of tables on statistics of the rows."""
    columns = set_statistics(problem.samples)
    if problem.samples.sets.query is not None and len(problem.samples.sets) == len(columns):
        columns = np.hstack([columns, np.asarray(problem.samples.sets.numpy().query)])
    if problem.samples.extras is not None:
        columns = np.hstack([columns, problem.samples.extras])
    target = problem.target

    def constant(train: Int[np.ndarray, " r"], test: Int[np.ndarray, " h"]) -> np.ndarray:
        if problem.kind == "regression":
            return np.full(len(test), target[train].mean())
        classes, counts = np.unique(target[train], return_counts=True)
        logs = np.log((counts + 1) / (counts.sum() + len(counts)))
        return _of_all_classes(problem, classes, np.tile(logs, (len(test), 1)))

    def table_learner(model: Any) -> Any:
        def predict(train: Int[np.ndarray, " r"], test: Int[np.ndarray, " h"]) -> np.ndarray:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fitted = model().fit(columns[train], target[train])
                if problem.kind == "regression":
                    return np.asarray(fitted.predict(columns[test]))
                probabilities = np.clip(fitted.predict_proba(columns[test]), 1e-6, 1.0)
                return _of_all_classes(problem, fitted.classes_, np.log(probabilities))

        return predict

    def linear() -> Any:
        if problem.kind == "regression":
            return make_pipeline(StandardScaler(), RidgeCV(np.geomspace(1e-3, 1e5, 17)))
        return make_pipeline(StandardScaler(), LogisticRegressionCV(Cs=8, max_iter=1000, cv=3))

    learners = [(CONSTANT, constant), (LINEAR, table_learner(linear))]
    if importlib.util.find_spec("lightgbm") is not None:

        def boosted() -> Any:
            from lightgbm import LGBMClassifier, LGBMRegressor

            kind = LGBMRegressor if problem.kind == "regression" else LGBMClassifier
            return kind(verbose=-1, random_state=problem.seed, n_jobs=1)

        learners.append((LIGHTGBM, table_learner(boosted)))
    return learners


def _without_query(samples: Any) -> Any:
    """The same samples without their queries."""
    return samples.with_sets(samples.sets.with_query(None))


# ---- answers


def _answers(problem: _Problem, rows: dict[str, Row]) -> dict[str, Answer]:
    """The questions, answered by paired differences of rows."""
    default = rows[DEFAULT]
    answers = {}
    pooled = [rows[name] for name in (CONSTANT, LINEAR, LIGHTGBM, WITHOUT_HEADS) if name in rows]
    best_pooled = min(pooled, key=lambda row: row.error)
    answers["attention"] = _compared(
        problem, "Does attention pay?", best_pooled, default, gain_says="yes", loss_says="no"
    )
    if WITHOUT_QUERY in rows:
        answers["query"] = _compared(
            problem,
            "Does the query matter?",
            rows[WITHOUT_QUERY],
            default,
            gain_says="yes",
            loss_says="no",
        )
    answers["samples"] = _compared(
        problem, "Would more samples help?", rows[HALF], default, gain_says="yes", loss_says="no"
    )
    if FEW in rows:
        answers["heads"] = _compared(
            problem,
            f"Do more than {FEW_HEADS} heads help?",
            rows[FEW],
            default,
            gain_says="yes",
            loss_says="no",
        )
    best = _best_to_start_from(rows.values())
    answers["settings"] = Answer(
        question="Which settings to start from?",
        says=best.name,
        sentence=f"The best row is {best.name!r}: {best.error:.4g} ± {best.standard_error:.2g}.",
    )
    return answers


def _best_to_start_from(rows: Iterable[Row]) -> Row:
    """The best row, whatever it is; only less data is nothing to start from."""
    return min((row for row in rows if row.code), key=lambda row: row.error)


def _compared(
    problem: _Problem, question: str, before: Row, after: Row, *, gain_says: str, loss_says: str
) -> Answer:
    """Whether one row is better than another, by paired differences."""
    gain, standard_error = problem.mean_and_error(before.losses - after.losses)
    is_large = gain > LEAST_SHARE * abs(before.error)
    if gain > CLEAR * standard_error and is_large:
        says = gain_says
    elif gain > standard_error and is_large:
        says = "perhaps"
    else:
        says = loss_says
    sentence = (
        f"{says.capitalize()}: {after.error:.4g} with {after.name}, {before.error:.4g} with "
        f"{before.name}, a difference of {gain:.2g} ± {standard_error:.1g}."
    )
    return Answer(question=question, says=says, sentence=sentence)


def _written(value: Any) -> str:
    """A setting as Python."""
    if isinstance(value, float) and math.isinf(value):
        return "math.inf"
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    if isinstance(value, (str, int, float)) or value is None:
        return repr(value)
    return f"kh.{value!r}"


def _silent(words: str) -> None:
    """Say nothing."""


# ---- report


def report_page(findings: Findings) -> str:
    """The findings as one HTML page with a chart of all rows."""
    import plotly.graph_objects as go
    import plotly.io

    rows = findings.rows[::-1]
    chart = go.Figure(
        go.Bar(
            x=[row.error for row in rows],
            y=[row.name for row in rows],
            error_x={"array": [2 * row.standard_error for row in rows]},
            orientation="h",
        )
    )
    chart.update_layout(
        xaxis_title=findings.measure,
        height=120 + 26 * len(rows),
        margin={"l": 10, "r": 10, "t": 10, "b": 40},
        yaxis={"automargin": True},
    )
    picture = plotly.io.to_html(chart, include_plotlyjs=True, full_html=False)
    answers = "".join(
        f"<h2>{html.escape(answer.question)}</h2><p>{html.escape(answer.sentence)}</p>"
        for answer in findings.answers.values()
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<title>keyhole lens</title><style>body{font:16px/1.5 system-ui;max-width:60rem;"
        "margin:2rem auto;padding:0 1rem}h2{font-size:1.1rem;margin-bottom:0}code{background:#eee;"
        "padding:.1em .3em}</style></head><body>"
        f"<h1>{html.escape(findings.description)}; {findings.kind}</h1>"
        f"{picture}{answers}"
        f"<h2>Start from</h2><p><code>{html.escape(findings.recommendation)}</code></p>"
        "</body></html>"
    )
