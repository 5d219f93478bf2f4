"""Findings as a report: a section per question, with the chart that answers it."""

from __future__ import annotations

import math
import platform
from typing import Any

import numpy as np

from keyhole import __version__
from keyhole.lab.lens.findings import Findings, HeldOutCurve, LensAnswer, TargetLoading, forecast
from keyhole.lab.report.document import (
    Chart,
    HeatMap,
    Report,
    Section,
    Series,
    Table,
    Verdict,
    bars,
)

_STATES: dict[str, Any] = {
    "yes": "holds", "perhaps": "partly", "no": "does not show", "not tested": "not tested",
}  # fmt: skip
LARGEST_MAP = 40  # coordinates up to which the mean of a learned head distribution is drawn


def report_of(found: Findings) -> Report:
    """The whole report."""
    says = "; ".join(f"{a.question.rstrip('?').lower()}: {a.says}" for a in found.answers.values())
    lead = f"What one attention layer can learn from {found.description}. In short — {says}."
    provenance = {
        "keyhole": __version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "predicted seconds": f"{found.cost:.0f} of {found.config.budget:.0f}",
        "seed": str(found.config.seed),
        "settings": found.settings,
    }
    sections = [_learners(found), _query(found), _data(found), _heads(found), _spectrum(found)]
    if found.examples:
        sections.append(_keys(found))
    if found.distribution is not None:
        sections.append(_law(found))
    title = found.description.partition(":")[0].partition(",")[0]
    return Report(f"A look at {title or 'your data'}", lead, sections, provenance)


def _verdict(answer: LensAnswer) -> Verdict:
    return Verdict(_STATES[answer.says], answer.sentence, answer.numbers)


def _forecast(answer: LensAnswer) -> Verdict:
    """More of something is neither good nor bad: a piece of information."""
    state: Any = "not tested" if answer.says == "not tested" else "information"
    return Verdict(state, answer.sentence, answer.numbers)


def _learners(found: Findings) -> Section:
    rows = found.table
    order = sorted(
        (m for m in found.learners if m.losses and m.family != "constant"), key=found.error_of
    )
    families = {"attention": ("attention", "attention"), "pooled": ("pooled input", "mlp")}
    series = []
    for family, (name, role) in families.items():
        places = [k for k, m in enumerate(order) if m.family == family]
        errors, spreads = (
            [100 * order[k].error for k in places],
            [100 * order[k].uncertainty for k in places],
        )
        series.append(bars(name, places, errors, spreads, role, floor=0.0))
    names = [f"★ {m.name}" if k == 0 else m.name for k, m in enumerate(order)]
    note = "Bars are one standard error; ★ is the best. All see the same folds."
    if any(m.size < found.n_used for m in order):
        note += (
            " A dear learner has fewer sets; answers compare learners on the sets that both were "
            "given."
        )
    chart = Chart(
        "learners",
        "Held-out error, best first",
        "learner",
        f"error, % ({found.measure})",
        series,
        rows=rows,
        note=note,
        names=names,
    )
    table = Table("learners_table", "The same in numbers", rows, note=" ".join(found.skipped))
    return Section(
        "attention",
        "Does attention pay?",
        "Attention weighs the keys of a set before it adds them up; a learner on pooled input adds "
        "them up first.",
        [chart, table] if order else [table],
        _verdict(found.answers["attention"]),
        found.settings,
    )


def _query(found: Findings) -> Section:
    rows: list[dict[str, Any]] = [
        {
            "sets": m.name,
            "error, %": 100 * m.error,
            "±": 100 * m.uncertainty,
            "folds": len(m.losses),
        }
        for m in found.query
    ]
    blocks = [Table("query", "Error with the query and without it", rows)] if rows else []
    claim = (
        "If the query matters, taking it away, or giving each set that of another, makes the error "
        "larger."
    )
    return Section(
        "query", "Does the query matter?", claim, blocks, _verdict(found.answers["query"])
    )


def _curve_series(curve: HeldOutCurve, role: str) -> Series:
    means = [100 * float(x.mean()) for x in curve.losses]
    errors = [100 * float(x.std(ddof=1) / np.sqrt(len(x))) for x in curve.losses]
    return bars(curve.name, list(curve.sizes), means, errors, role, floor=0.0)


def _data(found: Findings) -> Section:
    series = [_curve_series(c, "mlp" if c.role == "pooled" else c.role) for c in found.curves]
    for curve in found.curves[:1]:
        if curve.role != "pooled" and (ahead := forecast(curve, found.config.seed)) is not None:
            ends, name = [curve.sizes[-1], ahead.n_train], f"{curve.name}, forecast"
            now, low, middle, high = (
                100 * x for x in (ahead.now, ahead.low, ahead.middle, ahead.high)
            )
            series.append(Series(name, ends, [now, middle], look="dashed", role="prediction"))
            series.append(
                Series(
                    name,
                    ends,
                    [now, middle],
                    [now, low],
                    [now, high],
                    look="band",
                    role="prediction",
                )
            )
    blocks = (
        [
            Chart(
                "learning_curve",
                "Error against training sets",
                "training sets n",
                f"error, % ({found.measure})",
                series,
                x_log=True,
                note=(
                    "Bars are one standard error; the band is where nine forecasts in ten come "
                    "true."
                ),
            )
        ]
        if series
        else []
    )
    claim = (
        "Where the curve still falls, more sets would help; the next doubling gains a little less "
        "than the last."
    )
    return Section("data", "Would more data help?", claim, blocks, _forecast(found.answers["data"]))


def _heads(found: Findings) -> Section:
    finite = sorted(
        (m for m in found.heads if m.losses and math.isfinite(m.heads)), key=lambda m: m.heads
    )
    blocks: list[Chart] = []
    if finite:
        errors, spreads = [100 * m.error for m in finite], [100 * m.uncertainty for m in finite]
        series = [
            bars("finite heads", [m.heads for m in finite], errors, spreads, "attention", floor=0.0)
        ]
        common = set(finite[0].losses)
        exact = [m for m in found.heads if math.isinf(m.heads) and common <= set(m.losses)]
        marks = {
            m.name: 100 * float(np.concatenate([m.losses[k] for k in common]).mean()) for m in exact
        }
        blocks = [
            Chart(
                "heads",
                "Error against the number of heads",
                "heads M",
                f"error, % ({found.measure})",
                series,
                x_log=True,
                marks=marks,
                note=(
                    "The heads of one draw, the first M of them; the head distribution that did "
                    "best."
                ),
            )
        ]
    claim = (
        "Random heads approach their kernel as their number grows; where the error no longer "
        "falls, they are enough."
    )
    return Section(
        "heads", "Would more heads help?", claim, blocks, _forecast(found.answers["heads"])
    )


def reach(spectrum: TargetLoading, share: float) -> int:
    """Directions that hold so much of the target's power."""
    return int(np.searchsorted(np.cumsum(spectrum.power), share) + 1)


def _spectrum(found: Findings) -> Section:
    if not found.spectra:
        verdict = Verdict("not tested", "The budget left nothing for a spectrum.")
        return Section("spectrum", "What the kernel finds easy", "", verdict=verdict)
    n = len(found.spectra[0].power)
    points = np.unique(np.geomspace(1, n, 60).astype(int))
    powers: list[Series] = []
    values: list[Series] = []
    for s in found.spectra:
        role, shares = "mlp" if s.role == "pooled" else s.role, s.eigenvalues / s.eigenvalues.sum()
        for drawn, y in ((powers, np.cumsum(s.power)), (values, np.maximum(shares, 1e-12))):
            drawn.append(
                Series(s.name, points.tolist(), y[points - 1].tolist(), look="line", role=role)
            )
    chance = Series(
        "a target of noise", points.tolist(), (points / n).tolist(), look="thin", role="null"
    )
    charts = [
        Chart("power", "How the target loads on the kernel", "directions, strongest first",
              "share of the target's power", [*powers, chance], x_log=True),
        Chart("eigenvalues", "Spectrum on this data", "direction", "share of the trace", values,
              x_log=True, y_log=True),
    ]  # fmt: skip
    s = found.spectra[0]
    half, most = reach(s, 0.5), reach(s, 0.9)
    sentence = (
        f"With {s.name}, half of the target's power lies in the first {half} of {n} directions and "
        f"nine tenths in the first {most}; noise would need {n // 2} and {round(0.9 * n)}."
    )
    claim = (
        "Ridge learns the strong directions of its kernel first. A target that lies in few of them "
        "is learned from few sets."
    )
    numbers = {
        f"{x.name}: half, nine tenths": f"{reach(x, 0.5)}, {reach(x, 0.9)}" for x in found.spectra
    }
    verdict = Verdict("information", sentence, numbers)
    return Section("spectrum", "What the kernel finds easy", claim, charts, verdict)


MAX_KEYS_SHOWN = 3  # of a sample that is taken apart
MAX_COORDINATES_SHOWN = 4


def _keys(found: Findings) -> Section:
    rows: list[dict[str, Any]] = []
    words = ("close", "far off") if found.config.kind == "regression" else ("right", "wrong")
    for one in found.examples:
        most = np.argsort(-np.abs(one.parts))[:MAX_KEYS_SHOWN]
        names = (
            found.names
            if len(found.names) == one.keys.shape[1]
            else [f"x{j}" for j in range(one.keys.shape[1])]
        )
        about = {
            "sample": one.row,
            "was": words[not one.right],
            "truth": one.truth,
            "said": one.said,
        }
        for k in most:
            numbers = dict(
                zip(names[:MAX_COORDINATES_SHOWN], map(float, one.keys[k]), strict=False)
            )
            rows.append(
                {
                    **about,
                    "key": f"{k + 1} of {len(one.parts)}",
                    "adds": float(one.parts[k]),
                    **numbers,
                }
            )
    which, adds = (
        "the layer was surest of, rightly and wrongly",
        "the score of the class that was said",
    )
    if found.config.kind == "regression":
        which, adds = "the layer predicted best and worst", "the prediction"
    note = (
        f"The {MAX_KEYS_SHOWN} keys of each that add most to {adds}, for or against it; samples "
        "count from 0."
    )
    table = Table("keys", f"Held-out samples that {which}", rows, note=note)
    claim = (
        "A layer is a sum over keys, so that a prediction comes apart exactly. The parts say how "
        "this layer made it, and nothing about causes."
    )
    return Section("keys", "Which keys did it?", claim, [table])


def _law(found: Findings) -> Section:
    distribution = found.distribution
    mean = np.asarray(distribution.means_[0])
    names = (
        [*found.names, "1"]
        if len(found.names) == len(mean) - 1
        else [str(k) for k in range(len(mean) - 1)] + ["1"]
    )
    blocks: list[HeatMap | Table] = []
    if len(mean) <= LARGEST_MAP and mean.any():
        blocks.append(
            HeatMap(
                "heads",
                "Mean of the heads",
                "key",
                "query",
                names,
                names,
                mean.tolist(),
                centre=0.0,
                note="The score of a key is the query's row times the key's column, plus chance.",
            )
        )
    pairs = [
        {"query": query, "key": key, "entry of the mean": value}
        for query, key, value in distribution.strongest_pairs(names[:-1], 10)
        if value != 0
    ]
    if pairs:
        blocks.append(Table("pairs", "Its strongest pairs", pairs))
    sentence = (
        f"The training part of the first fold spoke for {distribution.chosen} heads: "
        f"{distribution.reason}."
    )
    claim = (
        "A head distribution can be learned: where heads should look on average, the heads "
        "themselves staying random."
    )
    return Section(
        "heads",
        "The head distribution that was learned",
        claim,
        blocks,
        Verdict("information", sentence),
    )
