"""Streams: random sequences of `partial_fit`, refused batches, files, pickles and threads.

Whatever happens on the way, the model is the one that a single fit of the accepted samples gives.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import samples as draw
from cases import Case, Format, after_reading
from samples import DifferenceError, Samples

import keyhole as kh
from keyhole._checks import NoPenaltyError

STEPS = {
    "add": 10,
    "bad": 6,
    "threads": 3,
    "ask": 3,
    "pickle": 2,
    "copy": 1,
    "save": 3,
    "lean file": 1,
    "restart": 1,
}
"""What may happen to a stream, and how often each is drawn."""

FAULTS = (
    "huge tokens",
    "huge tokens",
    "huge tokens",
    "huge y",
    "missing tokens",
    "missing y",
    "outputs",
    "dimension",
    "weights",
    "length",
    "labels",
)
"""What may be wrong with a batch."""

MAY_BE_FITTED = ("huge tokens", "huge y")
"""Faults that some settings cope with: tokens on the sphere may have any length."""

HUGE = 1e200
LARGE_BATCH = 600
"""Two batches of this size are more than a stream gathers before it adds them to its sums."""


# ---------------------------------------------------------------- the cases


def stream_base(rng: Random) -> dict[str, Any]:
    settings = draw.draw_settings(
        rng,
        heads=("gaussian", "gaussian", "biased", "query-key", "auto"),
        scaling=("none", "none", "sphere", "standard", "auto"),
        query=("given", "given", "mean", "each", "auto"),
        units=(1.0, 1.0, 1e-3, 1e3),
    )
    return {"settings": settings, "steps": [first_step(rng)]}


def first_step(rng: Random) -> dict[str, Any]:
    return {"do": "add", "n": rng.randint(4, 9), "part": rng.getrandbits(20), "reuse": False}


def stream_mutate(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
    """Append a step."""
    step: dict[str, Any] = {"do": rng.choices(list(STEPS), list(STEPS.values()))[0]}
    step["part"] = rng.getrandbits(20)
    sizes = (1, 2, 5, 5, 9)
    match step["do"]:
        case "add":
            step["n"] = rng.choice((*sizes, LARGE_BATCH))
            step["reuse"] = rng.random() < 0.4
        case "bad":
            step["n"] = rng.choice((*sizes, LARGE_BATCH))
            step["fault"] = rng.choice(FAULTS)
        case "threads":
            step["n"] = rng.choice(sizes)
            step["count"] = rng.choice((2, 4, 8))
        case "restart":
            step["n"] = rng.randint(5, 12)
            step["batches"] = rng.randint(1, 3)
    return {**state, "steps": [*state["steps"], step]}


def stream_finish(rng: Random, state: dict[str, Any]) -> Case:
    return Case("stream", "stream", {}, state)


STREAM = Format(
    share=4.5,
    base=stream_base,
    mutate=stream_mutate,
    finish=stream_finish,
    fewest=2,
    most=9,
    simpler=draw.simpler_settings,
)


# ---------------------------------------------------------------- the run


@dataclass
class Stream:
    """A model that is fitted step by step, and what it should know."""

    settings: dict[str, Any]
    folder: Path
    model: Any = None
    accepted: list[Samples] = field(default_factory=list)
    settled_after: int | None = None
    """Batches after which what is automatic was settled, None if it is not yet."""
    accepted_faults: list[str] = field(default_factory=list)
    files: int = 0

    def __post_init__(self) -> None:
        self.model = draw.make_estimator(self.settings)
        self.new = draw.draw_samples(self.settings, 6, 2**20).sets

    @property
    def has_choices(self) -> bool:
        """Whether something is learned from the first samples, and then kept."""
        automatic = "auto" in (self.settings["query"], self.settings["heads"])
        return automatic or self.settings["scaling"] in ("standard", "auto")

    def run(self, step: dict[str, Any]) -> None:
        """Take one step."""
        if step["do"] == "add":
            self.add(step)
        elif step["do"] == "bad":
            self.add_bad(step)
        elif step["do"] == "restart":
            self.restart(step)
        elif self.accepted:
            self.use(step)

    def use(self, step: dict[str, Any]) -> None:
        """Take a step that needs some samples."""
        match step["do"]:
            case "threads":
                self.predict_in_threads(step)
            case "ask":
                self.predict()
            case "pickle":
                self.settle()
                self.model = pickle.loads(pickle.dumps(self.model))
            case "copy":
                self.settle()
                self.model = draw.copied(self.model)
            case "save":
                self.save()
            case "lean file":
                self.save_lean()

    # ---- samples

    def put(self, model: Any, part: Samples) -> None:
        """One call of `partial_fit`."""
        if draw.is_classification(self.settings):
            classes = draw.class_names(self.settings)
            model.partial_fit(part.sets, part.y, classes=classes, sample_weight=part.weights)
        else:
            model.partial_fit(part.sets, part.y, sample_weight=part.weights)

    def size(self, step: dict[str, Any]) -> int:
        """Samples of a batch; a large one might settle choices at a moment that nobody sees."""
        return 9 if self.has_choices and step["n"] == LARGE_BATCH else step["n"]

    def add(self, step: dict[str, Any]) -> None:
        part = draw.draw_samples(self.settings, self.size(step), step["part"])
        own = part.independent()
        with after_reading():
            self.put(self.model, part)
        self.accepted.append(own)
        if step["reuse"]:
            draw.overwrite(part)
        self.check_count()

    def check_count(self) -> None:
        count = sum(len(part) for part in self.accepted)
        if self.model.n_samples_seen_ != count:
            seen = self.model.n_samples_seen_
            raise DifferenceError(f"n_samples_seen_ is {seen} after {count} accepted samples")

    def add_bad(self, step: dict[str, Any]) -> None:
        """A batch with a fault is refused, and nothing else happens; or it counts like others."""
        fault = step["fault"]
        if fault in ("outputs", "dimension") and not self.accepted:
            return
        if fault == "labels" and not draw.is_classification(self.settings):
            return
        if fault in ("missing y", "outputs", "huge y") and draw.is_classification(self.settings):
            return
        part = with_fault(self.settings, self.size(step), step["part"], fault)
        _, refusal = draw.attempt(lambda: self.put(self.model, part))
        if refusal is None:
            if fault not in MAY_BE_FITTED:
                raise DifferenceError(f"a batch with a fault in {fault} is accepted")
            self.accepted.append(part)
            self.accepted_faults.append(fault)
        if self.accepted:
            self.check_count()

    def restart(self, step: dict[str, Any]) -> None:
        """`fit_batches` forgets what was, and `partial_fit` goes on from it."""
        part = draw.draw_samples(self.settings, step["n"], step["part"])
        cuts = np.array_split(np.arange(len(part)), step["batches"])
        batches = [part.rows(rows) for rows in cuts]
        items = [(batch.sets, batch.y, batch.weights) for batch in batches]
        classes = None
        if draw.is_classification(self.settings):
            classes = draw.class_names(self.settings)
        source = iter(items) if step["part"] % 2 else items
        fit_batches = self.model.fit_batches
        _, refusal = draw.attempt(lambda: fit_batches(source, classes=classes, selection="gcv"))
        if refusal is not None:
            # samples that cannot be fitted at all: begin with a new model
            self.model = draw.make_estimator(self.settings)
            self.accepted, self.settled_after, self.accepted_faults = [], None, []
            return
        self.accepted = batches
        self.settled_after = len(batches)
        self.accepted_faults = []
        self.check_count()

    # ---- uses

    def predict(self) -> np.ndarray | None:
        """Predictions of the new samples; None where a single fit refuses these samples too."""
        if self.settled_after is None:
            self.settled_after = len(self.accepted)
        values, refusal = draw.attempt(lambda: draw.scores(self.model, self.new))
        if refusal is not None:
            self.check_refusal(refusal)
        return values

    def settle(self) -> None:
        """Settle what is automatic now: files and pickles may do so, or not."""
        if self.has_choices and self.settled_after is None:
            self.predict()

    def check_refusal(self, refusal: BaseException) -> None:
        """Predictions may be refused only for samples that a single fit refuses as well.

        A batch with a fault must not have been accepted if it is the reason. Penalties that are too
        small for all samples together are none: with a larger one the stream goes on.
        """
        lacks_penalty = isinstance(refusal, NoPenaltyError)
        if self.accepted_faults and not lacks_penalty:
            raise DifferenceError(
                f"partial_fit accepted a batch with {self.accepted_faults[0]}, and predict now "
                f"refuses all {sum(map(len, self.accepted))} samples: {refusal}"
            )
        _, other = draw.attempt(self.reference)
        if other is None:
            raise DifferenceError(f"predict refuses samples that one fit does not: {refusal}")

    def predict_in_threads(self, step: dict[str, Any]) -> None:
        """New samples, and the first predictions after them from several threads at once."""
        part = draw.draw_samples(self.settings, step["n"], step["part"])
        with after_reading():
            self.put(self.model, part.independent())
        self.accepted.append(part)
        if self.settled_after is None:
            self.settled_after = len(self.accepted)
        _, refusal = draw.attempt(self.reference)
        if refusal is not None:
            return
        results = draw.in_threads(lambda: draw.scores(self.model, self.new), step["count"])
        last = draw.scores(self.model, self.new)
        for values in results:
            scale = draw.scale_of(part.y)
            draw.compare("predictions of threads", values, last, scale=scale, share=1e-9)

    def save(self) -> None:
        """Go on with what a file holds."""
        before = self.predict()
        if before is None:
            return
        self.files += 1
        path = self.folder / f"model {self.files}.keyhole"
        with after_reading():
            kh.save(self.model, path)
            self.model = kh.load(path)
        after = self.predict()
        draw.compare("predictions after load", after, before, scale=0.0, share=1e-12)

    def save_lean(self) -> None:
        """A file without sums predicts, and refuses to go on."""
        before = self.predict()
        if before is None:
            return
        self.files += 1
        path = self.folder / f"model {self.files}.keyhole"
        with after_reading():
            kh.save(self.model, path, keep="predict")
            lean = kh.load(path)
        part = draw.draw_samples(self.settings, 2, 3)
        _, refusal = draw.attempt(lambda: self.put(lean, part))
        if refusal is None:
            raise DifferenceError("a model saved with keep='predict' goes on with partial_fit")
        after = draw.scores(lean, self.new)
        draw.compare("predictions of a lean file", after, before, scale=0.0, share=1e-12)

    # ---- the comparison

    def reference(self) -> Any:
        """The model that one fit of the accepted samples gives."""
        model = draw.make_estimator(self.settings)
        if not self.has_choices:
            return self.fit_at_once(model, self.accepted)
        # what is settled on the first samples and kept: give these first, all together
        first = self.accepted[: self.settled_after]
        rest = self.accepted[len(first) :]
        self.put(model, draw.joined(first))
        draw.scores(model, self.new)
        if rest:
            self.put(model, draw.joined(rest))
        draw.scores(model, self.new)
        return model

    def fit_at_once(self, model: Any, parts: list[Samples]) -> Any:
        whole = draw.joined(parts)
        classes = None
        if draw.is_classification(self.settings):
            classes = draw.class_names(self.settings)
        batch = (whole.sets, whole.y, whole.weights)
        return model.fit_batches([batch], classes=classes, selection="gcv")

    def check(self) -> None:
        """Compare the model with one fit of the accepted samples."""
        if not self.accepted:
            return
        got = self.predict()
        if got is None:
            return
        reference, refusal = draw.attempt(self.reference)
        if refusal is not None:
            raise DifferenceError(f"a stream predicts from samples that one fit refuses: {refusal}")
        whole = draw.joined(self.accepted)
        scale = draw.scale_of(whole.y)
        share = draw.share_allowed(reference)
        if self.other_penalty(reference):
            return
        wanted = draw.scores(reference, self.new)
        draw.compare("predictions of stream and one fit", got, wanted, scale=scale, share=share)
        self.check_intervals(reference, scale, share)
        if not self.has_choices and self.settings["alpha"] == "fixed":
            self.check_fit(whole, got, scale, share)

    def other_penalty(self, reference: Any) -> bool:
        """Whether another penalty was chosen, as good within rounding; raise if it is not."""
        losses = draw.penalty_losses(reference)
        chosen = int(np.argmin(np.abs(np.log(reference.selection_.alphas / self.model.alpha_))))
        best = int(np.flatnonzero(reference.selection_.alphas == reference.alpha_)[0])
        if chosen == best:
            return False
        if draw.are_as_good(reference, chosen, best):
            return True
        raise DifferenceError(
            f"penalties of stream and one fit differ: {self.model.alpha_:.4g} of loss "
            f"{losses[chosen]:.6g} against {reference.alpha_:.4g} of loss {losses[best]:.6g}"
        )

    def check_intervals(self, reference: Any, scale: float, share: float) -> None:
        """Probabilities and intervals come from samples that are kept: the same ones."""
        with after_reading():
            if draw.is_classification(self.settings):
                got = self.model.predict_proba(self.new)
                wanted = reference.predict_proba(self.new)
                name = "probabilities of stream and one fit"
                # a temperature is found to a tolerance of its own
                draw.compare(name, got, wanted, scale=1.0, share=max(1e-4, 100 * share))
            else:
                got = self.model.predict_interval(self.new)
                wanted = reference.predict_interval(self.new)
                name = "intervals of stream and one fit"
                draw.compare(name, got, wanted, scale=scale, share=100 * share)

    def check_fit(self, whole: Samples, got: np.ndarray, scale: float, share: float) -> None:
        """At a fixed penalty `fit` is the same as well."""
        if whole.weights is not None and not whole.weights.any():
            return
        if draw.is_classification(self.settings):
            names = whole.y if whole.weights is None else whole.y[whole.weights > 0]
            if len(np.unique(names)) < len(draw.class_names(self.settings)):
                return
        model = draw.make_estimator(self.settings)
        model.fit(whole.sets, whole.y, sample_weight=whole.weights)
        wanted = draw.scores(model, self.new)
        draw.compare("predictions of stream and fit", got, wanted, scale=scale, share=share)


def with_fault(settings: dict[str, Any], n: int, part: int, fault: str) -> Samples:
    """A batch that has something wrong with it."""
    good = draw.draw_samples(settings, n, part)
    sets, y, weights = good.sets, good.y, good.weights
    match fault:
        case "huge tokens":
            sets = sets.with_sets(sets.sets.mapped(lambda tokens: tokens * HUGE))
        case "huge y":
            y = y * HUGE
        case "missing tokens":
            sets = np.full((n, 3, settings["dim"]), np.nan)
        case "missing y":
            y = y.copy()
            y[0] = np.nan
        case "outputs":
            y = np.zeros((n, 3))
        case "dimension":
            other = draw.draw_samples({**settings, "dim": settings["dim"] + 1}, n, part)
            sets = other.sets
        case "weights":
            weights = np.full(n, -1.0) if part % 2 else np.full(n, np.nan)
        case "length":
            y = np.concatenate([y, y])
        case "labels":
            y = np.full(n, "oak")
    return Samples(sets=sets, y=y, weights=weights, arrays={})


def read_stream(folder: Path, options: dict[str, Any]) -> None:
    """Run a sequence."""
    stream = Stream(settings=options["settings"], folder=folder)
    for step in options["steps"]:
        stream.run(step)
    stream.check()
