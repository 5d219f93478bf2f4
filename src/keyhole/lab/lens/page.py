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


def report_of(findings: Findings) -> Report:
    """The whole report."""
    says = "; ".join(
        f"{a.question.rstrip('?').lower()}: {a.says}" for a in findings.answers.values()
    )
    lead = f"What one attention layer can learn from {findings.description}. In short — {says}."
    provenance = {
        "keyhole": __version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "predicted seconds": f"{findings.cost:.0f} of {findings.config.budget:.0f}",
        "seed": str(findings.config.seed),
        "settings": findings.settings,
    }
    sections = [
        _learners(findings),
        _query(findings),
        _data(findings),
        _heads(findings),
        _spectrum(findings),
    ]
    if findings.examples:
        sections.append(_keys(findings))
    if findings.distribution is not None:
        sections.append(_head_distribution(findings))
    title = findings.description.partition(":")[0].partition(",")[0]
    return Report(f"A look at {title or 'your data'}", lead, sections, provenance)


def _verdict(answer: LensAnswer) -> Verdict:
    return Verdict(_STATES[answer.says], answer.sentence, answer.numbers)


def _forecast(answer: LensAnswer) -> Verdict:
    """More of something is neither good nor bad: a piece of information."""
    state: Any = "not tested" if answer.says == "not tested" else "information"
    return Verdict(state, answer.sentence, answer.numbers)


def _learners(findings: Findings) -> Section:
    """Does attention pay? The errors of all learners, best first."""
    rows = findings.table
    order = sorted(
        (m for m in findings.learners if m.losses and m.family != "constant"), key=findings.error_of
    )

    # one series of bars per family, at the places of its learners
    families = {"attention": ("attention", "attention"), "pooled": ("pooled input", "mlp")}
    series = []
    for family, (name, role) in families.items():
        places = [k for k, m in enumerate(order) if m.family == family]
        errors = [100 * order[k].error for k in places]
        spreads = [100 * order[k].uncertainty for k in places]
        series.append(bars(name, places, errors, spreads, role, floor=0.0))
    names = [m.name for m in order]
    if names:
        names[0] = f"★ {names[0]}"
    note = "Bars are one standard error; ★ is the best. All see the same folds."
    if any(m.size < findings.n_used for m in order):
        note += (
            " An expensive learner has fewer sets; answers compare learners on the sets that "
            "both were given."
        )
    chart = Chart(
        "learners",
        "Held-out error, best first",
        "learner",
        f"error, % ({findings.measure})",
        series,
        rows=rows,
        note=note,
        names=names,
    )
    table = Table("learners_table", "The same in numbers", rows, note=" ".join(findings.skipped))
    return Section(
        "attention",
        "Does attention pay?",
        "Attention weighs the keys of a set before it adds them up; a learner on pooled input adds "
        "them up first.",
        [chart, table] if order else [table],
        _verdict(findings.answers["attention"]),
        findings.settings,
    )


def _query(findings: Findings) -> Section:
    """Does the query matter? The errors with and without it."""
    rows: list[dict[str, Any]] = [
        {
            "sets": m.name,
            "error, %": 100 * m.error,
            "±": 100 * m.uncertainty,
            "folds": len(m.losses),
        }
        for m in findings.query
    ]
    blocks = [Table("query", "Error with the query and without it", rows)] if rows else []
    claim = (
        "If the query matters, taking it away, or giving each set that of another, makes the error "
        "larger."
    )
    return Section(
        "query", "Does the query matter?", claim, blocks, _verdict(findings.answers["query"])
    )


def _curve_series(curve: HeldOutCurve) -> Series:
    """The points of a learning curve with their standard errors, in per cent."""
    means = [100 * float(x.mean()) for x in curve.losses]
    errors = [100 * float(x.std(ddof=1) / np.sqrt(len(x))) for x in curve.losses]
    return bars(curve.name, list(curve.sizes), means, errors, _chart_role(curve.role), floor=0.0)


def _chart_role(role: str) -> str:
    """The role of a curve or spectrum in a chart: pooled input has the colour of the MLP."""
    return "mlp" if role == "pooled" else role


def _predicted_series(curve: HeldOutCurve) -> list[Series]:
    """What theory says at the same sizes, in per cent."""
    if not curve.predicted:
        return []
    errors = [100 * error for error in curve.predicted]
    name = f"{curve.name}, by theory"
    role = _chart_role(curve.role)
    return [Series(name, list(curve.sizes), errors, look="thin", role=role)]


def _forecast_series(curve: HeldOutCurve, seed: int) -> list[Series]:
    """The forecast for twice the sets: a dashed line and a band; nothing from too few points."""
    ahead = forecast(curve, seed)
    if ahead is None:
        return []
    name = f"{curve.name}, forecast"
    sizes = [curve.sizes[-1], ahead.n_train]
    now = 100 * ahead.now
    middle = [now, 100 * ahead.middle]
    low = [now, 100 * ahead.low]
    high = [now, 100 * ahead.high]
    line = Series(name, sizes, middle, look="dashed", role="prediction")
    band = Series(name, sizes, middle, low, high, look="band", role="prediction")
    return [line, band]


def _data(findings: Findings) -> Section:
    """Would more data help? Learning curves, and the forecast of the first."""
    series = [_curve_series(curve) for curve in findings.curves]
    for curve in findings.curves:
        series += _predicted_series(curve)
    for curve in findings.curves[:1]:
        if curve.role != "pooled":
            series += _forecast_series(curve, findings.config.seed)
    blocks = []
    if series:
        chart = Chart(
            "learning_curve",
            "Error against training sets",
            "training sets n",
            f"error, % ({findings.measure})",
            series,
            x_log=True,
            note=(
                "Bars are one standard error; the band is where nine forecasts in ten come true. "
                "Thin: theory, from the Gram matrix of all samples, at the best penalty."
            ),
        )
        blocks.append(chart)
    claim = (
        "Where the curve still falls, more sets would help; the next doubling gains a little less "
        "than the last."
    )
    return Section(
        "data", "Would more data help?", claim, blocks, _forecast(findings.answers["data"])
    )


def _heads(findings: Findings) -> Section:
    """Would more heads help? The error against their number."""
    finite = sorted(
        (m for m in findings.heads if m.losses and math.isfinite(m.heads)), key=lambda m: m.heads
    )
    blocks: list[Chart] = []
    if finite:
        counts = [m.heads for m in finite]
        errors = [100 * m.error for m in finite]
        spreads = [100 * m.uncertainty for m in finite]
        series = [bars("finite heads", counts, errors, spreads, "attention", floor=0.0)]

        # infinitely many heads are a mark, on the folds that the finite ones have
        common = set(finite[0].losses)
        marks = {}
        for m in findings.heads:
            if math.isinf(m.heads) and common <= set(m.losses):
                losses = np.concatenate([m.losses[k] for k in common])
                marks[m.name] = 100 * float(losses.mean())
        chart = Chart(
            "heads",
            "Error against the number of heads",
            "heads M",
            f"error, % ({findings.measure})",
            series,
            x_log=True,
            marks=marks,
            note="The heads of one draw, the first M of them; the head distribution that did best.",
        )
        blocks.append(chart)
    claim = (
        "Random heads approach their kernel as their number grows; where the error no longer "
        "falls, they are enough."
    )
    return Section(
        "heads", "Would more heads help?", claim, blocks, _forecast(findings.answers["heads"])
    )


def reach(spectrum: TargetLoading, share: float) -> int:
    """Directions that hold so much of the target's power."""
    return int(np.searchsorted(np.cumsum(spectrum.power), share) + 1)


def _spectrum(findings: Findings) -> Section:
    """How the target loads on the kernels, and their eigenvalues."""
    if not findings.spectra:
        verdict = Verdict("not tested", "The budget left nothing for a spectrum.")
        return Section("spectrum", "What the kernel finds easy", "", verdict=verdict)

    # the two charts, at directions that are equally far apart on a logarithmic axis
    n = len(findings.spectra[0].power)
    points = np.unique(np.geomspace(1, n, 60).astype(int))
    powers: list[Series] = []
    values: list[Series] = []
    directions = points.tolist()
    for spectrum in findings.spectra:
        role = _chart_role(spectrum.role)
        power = np.cumsum(spectrum.power)[points - 1].tolist()
        powers.append(Series(spectrum.name, directions, power, look="line", role=role))
        shares = np.maximum(spectrum.eigenvalues / spectrum.eigenvalues.sum(), 1e-12)
        value = shares[points - 1].tolist()
        values.append(Series(spectrum.name, directions, value, look="line", role=role))
    chance = Series(
        "a target of noise", directions, (points / n).tolist(), look="thin", role="null"
    )
    charts = [
        Chart("power", "How the target loads on the kernel", "directions, strongest first",
              "share of the target's power", [*powers, chance], x_log=True),
        Chart("eigenvalues", "Spectrum on this data", "direction", "share of the trace", values,
              x_log=True, y_log=True),
    ]  # fmt: skip

    # the best attention in words
    first = findings.spectra[0]
    half = reach(first, 0.5)
    nine_tenths = reach(first, 0.9)
    sentence = (
        f"With {first.name}, half of the target's power lies in the first {half} of {n} directions "
        f"and nine tenths in the first {nine_tenths}; noise would need {n // 2} and "
        f"{round(0.9 * n)}."
    )
    claim = (
        "Ridge learns the strong directions of its kernel first. A target that lies in few of them "
        "is learned from few sets."
    )
    numbers = {
        f"{x.name}: half, nine tenths": f"{reach(x, 0.5)}, {reach(x, 0.9)}"
        for x in findings.spectra
    }
    verdict = Verdict("information", sentence, numbers)
    return Section("spectrum", "What the kernel finds easy", claim, charts, verdict)


MAX_KEYS_SHOWN = 3  # of a sample that is taken apart
MAX_COORDINATES_SHOWN = 4


def _keys(findings: Findings) -> Section:
    """The samples that were taken apart: their strongest keys, and what each adds."""
    if findings.config.kind == "regression":
        right = "close"
        wrong = "far off"
        which = "the layer predicted best and worst"
        adds = "the prediction"
    else:
        right = "right"
        wrong = "wrong"
        which = "the layer was surest of, rightly and wrongly"
        adds = "the score of the class that was said"
    rows: list[dict[str, Any]] = []
    for example in findings.examples:
        dim = example.keys.shape[1]
        names = list(findings.names)
        if len(names) != dim:
            names = [f"x{j}" for j in range(dim)]
        strongest = np.argsort(-np.abs(example.parts))[:MAX_KEYS_SHOWN]
        for k in strongest:
            row: dict[str, Any] = {
                "sample": example.row,
                "was": right if example.right else wrong,
                "truth": example.truth,
                "said": example.said,
                "key": f"{k + 1} of {len(example.parts)}",
                "adds": float(example.parts[k]),
            }
            # the first coordinates of the key
            for name, number in zip(names[:MAX_COORDINATES_SHOWN], example.keys[k], strict=False):
                row[name] = float(number)
            rows.append(row)
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


def _head_distribution(findings: Findings) -> Section:
    """The mean of the learned head distribution, and its strongest pairs."""
    distribution = findings.distribution
    mean = np.asarray(distribution.means_[0])
    dim = len(mean) - 1
    names = list(findings.names)
    if len(names) != dim:
        names = [str(k) for k in range(dim)]
    names.append("1")  # the constant coordinate
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
