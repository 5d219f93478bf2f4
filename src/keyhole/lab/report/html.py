"""One HTML file out of a report, and beside it every chart as SVG, PNG and CSV.

No network needed to read it.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from importlib import resources
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any, Literal

from keyhole._files import write_whole
from keyhole.lab.plots import draw_chart, draw_heat_map
from keyhole.lab.report.document import (
    Chart,
    HeatMap,
    Report,
    Row,
    Scalar,
    Section,
    Series,
    Table,
    Verdict,
    csv_bytes,
)


@dataclass(frozen=True)
class Ink:
    """How a role is drawn: its colour and marker.

    A colour on light and on dark ground, and a marker for eyes that mix colours up.
    """

    light: str
    dark: str
    marker: str


# Okabe and Ito's colours, which people with any common colour blindness tell apart; the dark ones
# are lighter twins.
KNOWN: dict[str, Ink] = {
    "attention": Ink("#0072b2", "#5ab4f0", "circle"),
    "biased": Ink("#d55e00", "#ff9350", "square"),
    "mlp": Ink("#66707c", "#a3adba", "triangle"),
    "kernel": Ink("#009e73", "#3fd0a4", "diamond"),
    "ridge": Ink("#b0578d", "#e59ac6", "down"),
    "ball": Ink("#c98a00", "#f2bd4b", "cross"),
    "softmax": Ink("#3a9bd9", "#8fd0ff", "pentagon"),
    "prediction": Ink("#1f2937", "#e5e7eb", "circle"),
    "oracle": Ink("#8a929c", "#8a929c", "circle"),
    "null": Ink("#8a929c", "#8a929c", "circle"),
}
SPARE = (
    *(KNOWN[role] for role in ("attention", "biased", "kernel", "ridge", "ball", "mlp")),
    Ink("#5b4fc4", "#a9a1ff", "pentagon"),
    Ink("#8c4a1f", "#d69a72", "star"),
)


def role_of(series: Series) -> str:
    """The role of a curve; a curve without one goes by its name."""
    return series.role or series.name


def inks_of(report: Report) -> dict[str, Ink]:
    """The ink of every role in the report.

    Known roles have theirs, others take the spare ones as they appear.

    Those spare inks come first that no known role in the report uses.
    """
    charts = (
        block for section in report.sections for block in section.blocks if isinstance(block, Chart)
    )
    roles = list(dict.fromkeys(role_of(series) for chart in charts for series in chart.series))
    taken = {KNOWN[role].light for role in roles if role in KNOWN}
    free = [ink for ink in SPARE if ink.light not in taken] + [
        ink for ink in SPARE if ink.light in taken
    ]
    unknown = [role for role in roles if role not in KNOWN]
    given = {role: free[k % len(free)] for k, role in enumerate(unknown)}
    return {role: KNOWN.get(role) or given[role] for role in roles}


_SHIFTED = re.compile(r"([_^])\{([^{}<>]{1,40})\}")
_CODE = re.compile(r"`([^`]+)`")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def as_html(text: str) -> str:
    """Escape for HTML, then set subscripts, superscripts and code.

    >>> as_html("f_{1,2} < `n`")
    'f<sub>1,2</sub> &lt; <code>n</code>'
    """
    return _CODE.sub(r"<code>\1</code>", _shifted(html.escape(text)))


@lru_cache(maxsize=4096)  # a name stands under every point of its curve
def as_chart_text(text: str) -> str:
    """The same for the chart library, whose labels know some tags.

    It has no code, so backquotes go.

    >>> as_chart_text("f_{2} & <b>")
    'f<sub>2</sub> &amp; &lt;b&gt;'
    """
    # quotes stay: the library shows entities of quotes as they are written
    return _shifted(html.escape(_CODE.sub(r"\1", text), quote=False))


def as_plain(text: str) -> str:
    """Without any marks, for places that know none.

    >>> as_plain("f_{1,2} and d^{2}, `n`")
    'f1,2 and d2, n'
    """
    return _CODE.sub(r"\1", _SHIFTED.sub(r"\2", text))


def as_json(value: Any) -> str:
    r"""JSON that may stand in a script element.

    Numbers that are not finite become null, and no tag can be closed.

    >>> as_json({"a": [1.5, float("nan")], "b": "</script>"})
    '{"a":[1.5,null],"b":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def number(value: Scalar, digits: int = 4) -> str:
    """A number for reading, to so many significant digits.

    Text is left as it is and what is missing is a dash.

    >>> [number(v) for v in (12345, 0.000012345, 2.0, float("nan"), None, "x", 1234567.8)]
    ['12,345', '1.234×10⁻⁵', '2', '–', '–', 'x', '1.235×10⁶']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, (str, bool)):
        return str(value)
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if isinstance(value, int) and abs(value) < 10**9:
        return f"{value:,}".replace("-", "−")
    text = f"{value:.{digits}g}"
    if "e" in text:
        mantissa, _, power = text.partition("e")
        text = f"{mantissa}×10{str(int(power)).translate(_SUPERSCRIPT)}"
    return text.replace("-", "−", 1) if text.startswith("-") else text


def column(values: Sequence[Scalar]) -> list[str]:
    """The cells of a table's column.

    With as many decimals in each row where that loses nothing, so that they align.

    >>> column([0.5, 12.25, None])
    ['0.50', '12.25', '–']
    >>> column([1e-7, 3.0])
    ['10⁻⁷', '3']
    """
    floats = [v for v in values if isinstance(v, float) and math.isfinite(v)]
    sizes = [abs(v) for v in floats if v != 0]
    if not sizes or any(isinstance(v, int) for v in values):
        return [number(v) for v in values]
    decimals = min(6, max(0, 3 - math.floor(math.log10(max(sizes)))))
    if max(sizes) >= 1e6 or min(sizes) < 10.0 ** (1 - decimals) / 5:
        return [re.sub(r"^(−?)1×", r"\1", number(v)) for v in values]
    return [
        f"{v:,.{decimals}f}".replace("-", "−")
        if isinstance(v, float) and math.isfinite(v)
        else number(v)
        for v in values
    ]


def is_numeric(values: Sequence[Scalar]) -> bool:
    """Whether a column holds numbers (or nothing), and so is set flush right."""
    return any(isinstance(v, (int, float)) for v in values) and not any(
        isinstance(v, str) for v in values
    )


def _shifted(escaped: str) -> str:
    tags = {"_": "sub", "^": "sup"}
    return _SHIFTED.sub(lambda m: f"<{tags[m[1]]}>{m[2]}</{tags[m[1]]}>", escaped)


def _finite(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def safe_names(names: Sequence[str]) -> list[str]:
    """Names fit for files and anchors, all different also where case does not count.

    A name that is fit already and alone stays as it is.

    >>> safe_names(["f_{1,2}", "../../etc", "a", "A", ""])
    ['f_-1-2', 'etc', 'a', 'A-2', 'unnamed']
    """
    taken: set[str] = set()
    safe = []
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:80] or "unnamed"
        choice, k = stem, 1
        while choice.casefold() in taken:
            k += 1
            choice = f"{stem}-{k}"
        taken.add(choice.casefold())
        safe.append(choice)
    return safe


def rows_behind(block: Chart | HeatMap | Table) -> list[Row]:
    """The rows that drew a block: those it brings, else one per point or cell."""
    if block.rows:
        return list(block.rows)
    if isinstance(block, Chart):
        return [row for series in block.series for row in _points(series)]
    if isinstance(block, HeatMap):
        return [
            {"row": row, "column": name, "value": value}
            for row, values in zip(block.index, block.values, strict=True)
            for name, value in zip(block.columns, values, strict=True)
        ]
    return []


def _points(series: Series) -> list[Row]:
    empty = [None] * len(series.x)
    low = empty if series.low is None else series.low
    high = empty if series.high is None else series.high
    return [
        {"series": series.name, "look": series.look, "x": x, "y": y, "low": a, "high": b}
        for x, y, a, b in zip(series.x, series.y, low, high, strict=True)
    ]


# painted in this order, so that measured points lie on top
_ORDER = ("band", "thin", "dashed", "line", "points")


def chart_data(chart: Chart) -> dict[str, Any]:
    """A chart as plain data."""
    ordered = sorted(chart.series, key=lambda series: _ORDER.index(series.look))
    return {
        "kind": "curves",
        "x_label": as_chart_text(chart.x_label),
        "y_label": as_chart_text(chart.y_label),
        "x_log": chart.x_log,
        "y_log": chart.y_log,
        "series": [_series_data(series, chart) for series in ordered],
        "marks": [[as_chart_text(_cut(name, 40)), level] for name, level in chart.marks.items()],
        "names": [as_chart_text(_cut(name, 40)) for name in chart.names],
    }


def heat_map_data(block: HeatMap) -> dict[str, Any]:
    """A heat map as plain data; `reach` is how far the colours go on either side of the centre."""
    numbers = [v for row in block.values for v in row if math.isfinite(v)]
    centre = block.centre
    reach = (
        max((abs(v - centre) for v in numbers), default=1.0) or 1.0 if centre is not None else None
    )
    columns, index = (
        [as_chart_text(c) for c in block.columns],
        [as_chart_text(i) for i in block.index],
    )
    short_columns, short_index = (
        [as_chart_text(_cut(n)) for n in names] for names in (block.columns, block.index)
    )
    x, y = as_chart_text(block.x_label), as_chart_text(block.y_label)
    words = (
        [[number(v) for v in row] for row in block.values] if block.words is None else block.words
    )
    return {
        "kind": "map",
        "x_label": x,
        "y_label": y,
        "columns": short_columns,
        "index": short_index,
        "values": [list(row) for row in block.values],
        "texts": _short(block.values)
        if block.words is None
        else [[as_chart_text(w) for w in row] for row in words],
        "hover": [
            [
                f"{y} {row}, {x} {name}<br><b>{as_chart_text(w)}</b>"
                for name, w in zip(columns, said, strict=True)
            ]
            for row, said in zip(index, words, strict=True)
        ],
        "line": list(block.line),
        "points": [[column, row, as_chart_text(text)] for column, row, text in block.points],
        "centre": centre,
        "reach": reach,
    }


def _cut(name: str, most: int = 24) -> str:
    """A name that leaves room for the chart it stands beside.

    The words under the pointer have it in full.
    """
    return name if len(name) <= most else name[: most - 1] + "…"


def _short(values: Sequence[Sequence[float]]) -> list[list[str]]:
    """Numbers short enough for a cell.

    Two digits of the largest, and as many decimals everywhere.
    """
    largest = max((abs(v) for row in values for v in row if math.isfinite(v)), default=0.0)
    if largest and not 1e-3 <= largest < 1e5:
        return [[number(v, 2) for v in row] for row in values]
    decimals = max(0, 1 - math.floor(math.log10(largest))) if largest else 0
    return [
        [f"{v:.{decimals}f}".replace("-", "−") if math.isfinite(v) else "" for v in row]
        for row in values
    ]


def legend_key(series: Series, chart: Chart) -> tuple[str, str, str]:
    """What switches a curve on and off: name, role and look.

    A band goes with a curve of its name, if there is one.
    """
    others = (
        s.look
        for s in chart.series
        if s.look != "band" and (s.name, role_of(s)) == (series.name, role_of(series))
    )
    look = next(others, series.look) if series.look == "band" else series.look
    return series.name, role_of(series), look


def _series_data(series: Series, chart: Chart) -> dict[str, Any]:
    return {
        "key": list(legend_key(series, chart)),
        "role": role_of(series),
        "look": series.look,
        "x": list(series.x),
        "y": list(series.y),
        "low": None if series.low is None else list(series.low),
        "high": None if series.high is None else list(series.high),
        "hover": [_words(series, chart, k) for k in range(len(series.x))],
    }


def _words(series: Series, chart: Chart, k: int) -> str:
    place = as_chart_text(chart.names[int(series.x[k])]) if chart.names else number(series.x[k], 5)
    lines = [
        f"<b>{as_chart_text(series.name)}</b>",
        f"{as_chart_text(chart.x_label)}: {place}",
        f"{as_chart_text(chart.y_label)}: {number(series.y[k])}",
    ]
    if series.low is not None and series.high is not None:
        lines.append(f"from {number(series.low[k], 3)} to {number(series.high[k], 3)}")
    if series.hover is not None and series.hover[k]:
        lines.append(as_chart_text(series.hover[k]))
    return "<br>".join(lines)


# a sign for each state besides its colour
_SIGNS = {"holds": "✓", "partly": "◐", "does not show": "✕", "not tested": "○", "information": "i"}


@dataclass(frozen=True)
class _Placed:
    """A block with the name its files have."""

    block: Chart | HeatMap | Table
    name: str
    rows_are: Literal["beside", "inside", "elsewhere"] = (
        "beside"  # the page, where its links find the rows as CSV
    )


def check_lab(what: str = "a report") -> None:
    """Raise ImportError where the packages that draw are not installed.

    Its message is a line that says what to do.
    """
    missing = [name for name in ("matplotlib", "plotly") if find_spec(name) is None]
    if missing:
        raise ImportError(f"{what} needs {' and '.join(missing)}: pip install 'keyhole[lab]'.")


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write ``report.html`` into ``folder``; it comes first.

    With ``charts/NAME.svg``, ``.png`` and ``.csv`` beside it.

    Tables have their rows as CSV only. Each file appears whole or not at all; equal reports give
    equal bytes. Text may use ``f_{1,2}``, ``d^{2}`` and backquotes; anything else is shown as it
    stands.
    """
    check_lab()
    inks = inks_of(report)
    names = iter(
        safe_names([block.name for section in report.sections for block in section.blocks])
    )
    placed = [
        [_Placed(block, next(names)) for block in section.blocks] for section in report.sections
    ]
    written = []
    for item in (item for blocks in placed for item in blocks):
        for suffix, content in _files(item, inks).items():
            written.append(write_whole(content, folder / "charts" / f"{item.name}.{suffix}"))
    # the page last: whoever finds it finds what it links to
    page = write_whole(_page(report, placed, inks).encode(), folder / "report.html")
    return [page, *written]


def one_page(report: Report) -> str:
    """The report as one HTML file.

    It carries the rows behind its charts and tables, as CSV to be taken out.
    """
    check_lab()
    names = iter(
        safe_names([block.name for section in report.sections for block in section.blocks])
    )
    placed = [
        [_Placed(block, next(names), "inside") for block in section.blocks]
        for section in report.sections
    ]
    return _page(report, placed, inks_of(report))


def fragment(blocks: Sequence[Chart | HeatMap | Table]) -> dict[str, Any]:
    """Blocks for a page that is there already.

    Their HTML, the data of their charts, and the inks of these.
    """
    inks = inks_of(Report("", "", [Section("", "", "", blocks)]))
    placed = [
        _Placed(block, name, "elsewhere")
        for block, name in zip(blocks, safe_names([b.name for b in blocks]), strict=True)
    ]
    return {
        "html": "\n".join(_blocks(placed, inks)),
        "charts": _data([placed]),
        "inks": {role: [ink.light, ink.dark, ink.marker] for role, ink in inks.items()},
    }


def write_chart(chart: Chart, folder: Path) -> list[Path]:
    """Write one chart as ``NAME.svg`` and ``.png``, and its rows as ``NAME.csv``."""
    check_lab("a chart")
    inks = inks_of(Report("", "", [Section("", "", "", [chart])]))
    files = _files(_Placed(chart, chart.name), inks)
    return [
        write_whole(content, folder / f"{chart.name}.{suffix}") for suffix, content in files.items()
    ]


def _files(item: _Placed, inks: dict[str, Ink]) -> dict[str, bytes]:
    pictures: dict[str, bytes] = {}
    if isinstance(item.block, Chart):
        style = {role: (ink.light, ink.marker) for role, ink in inks.items()}
        pictures = draw_chart(item.block, style)
    elif isinstance(item.block, HeatMap):
        pictures = draw_heat_map(item.block)
    return {**pictures, "csv": csv_bytes(rows_behind(item.block))}


def _page(report: Report, placed: Sequence[Sequence[_Placed]], inks: dict[str, Ink]) -> str:
    anchors = safe_names([section.slug for section in report.sections])
    contents, sections = [], []
    for k, (section, anchor, blocks) in enumerate(
        zip(report.sections, anchors, placed, strict=True), 1
    ):
        badge = "" if section.verdict is None else _badge(section.verdict)
        words = f'<span class="k">{k}</span><span>{as_html(section.title)}</span>{badge}'
        contents.append(f'<li><a href="#{anchor}">{words}</a></li>')
        sections.append(_section(section, anchor, k, blocks, inks))
    listed = "\n".join(contents)
    body = [
        f'<nav aria-label="Contents">\n<ol>\n{listed}\n</ol>\n</nav>\n<main>',
        *sections,
        (
            "</main>\n<footer>\n<h2>Where this comes "
            f"from</h2>\n{_definitions(report.provenance)}\n</footer>"
        ),
    ]
    data = {
        "inks": {r: [i.light, i.dark, i.marker] for r, i in inks.items()},
        "charts": _data(placed),
    }
    header = f'<h1>{as_html(report.title)}</h1>\n<p class="lead">{as_html(report.lead)}</p>\n'
    header += f'<p class="tallies">{_tally(report.sections)}</p>'
    head = f"{_POLICY}\n<style>\n{asset('report.css')}\n</style>"
    scripts = (
        f'<script>\n{library()}\n</script>\n<script type="application/json" '
        f'id="keyhole:data">{as_json(data)}'
    )
    scripts += f"</script>\n<script>\n{asset('report.js')}\n</script>"
    return page_of("page", as_plain(report.title), head, header, "\n".join(body), scripts)


_POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; script-src '
    "'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' file: data: blob:; font-src "
    'data:">'
)


def page_of(kind: str, title: str, head: str, header: str, body: str, scripts: str) -> str:
    """A page around a body; all but the title is HTML."""
    parts = {"kind": kind, "head": head, "header": header, "body": body, "scripts": scripts}
    return Template(asset("report.html")).substitute(title=escape(title), **parts)


def _data(placed: Sequence[Sequence[_Placed]]) -> dict[str, Any]:
    return {
        item.name: chart_data(item.block)
        if isinstance(item.block, Chart)
        else heat_map_data(item.block)
        for blocks in placed
        for item in blocks
        if not isinstance(item.block, Table)
    }


def _tally(sections: Sequence[Section]) -> str:
    """How many verdicts there are of each state, in the order of the signs."""
    states: list[str] = [
        section.verdict.state for section in sections if section.verdict is not None
    ]
    counts = ((state, states.count(state)) for state in _SIGNS)
    return "".join(
        f'<span class="tally" data-state="{state}"><b>{count}</b> {state}</span>'
        for state, count in counts
        if count
    )


def _section(
    section: Section, anchor: str, k: int, blocks: Sequence[_Placed], inks: dict[str, Ink]
) -> str:
    parts = [
        f'<section id="{anchor}">',
        f'<h2><span class="k">{k}</span>{as_html(section.title)}</h2>',
    ]
    if section.claim:
        parts.append(
            f'<p class="claim"><span class="label">Claim</span>{as_html(section.claim)}</p>'
        )
    if section.verdict is not None:
        parts.append(_verdict(section.verdict))
    parts += [f"<p>{as_html(paragraph)}</p>" for paragraph in section.text]
    parts += _blocks(blocks, inks)
    if section.settings:
        parts.append(
            '<p class="settings"><span class="label">Our '
            f"settings</span>{as_html(section.settings)}</p>"
        )
    return "\n".join([*parts, "</section>"])


def _verdict(verdict: Verdict) -> str:
    words = f"{_badge(verdict)}<p>{as_html(verdict.sentence)}</p>{_definitions(verdict.numbers)}"
    return f'<div class="verdict" data-state="{verdict.state}">{words}</div>'


def _badge(verdict: Verdict) -> str:
    sign = f'<span class="sign" aria-hidden="true">{_SIGNS[verdict.state]}</span>'
    return (
        f'<span class="badge" data-state="{verdict.state}">{sign}<span '
        f'class="state">{verdict.state}</span></span>'
    )


def _definitions(pairs: Any) -> str:
    if not pairs:
        return ""
    items = (
        f"<div><dt>{as_html(key)}</dt><dd>{as_html(value)}</dd></div>"
        for key, value in pairs.items()
    )
    return f"<dl>{''.join(items)}</dl>"


def _blocks(blocks: Sequence[_Placed], inks: dict[str, Ink]) -> Iterator[str]:
    """Neighbouring charts share a grid and one legend.

    Heat maps and tables stand alone or in a grid of their own.
    """
    for kind, group in groupby(blocks, key=lambda item: type(item.block)):
        items = list(group)
        if kind is Table:
            yield from (_table(item) for item in items)
            continue
        legend = _legend(items, inks)
        figures = "\n".join(_figure(item) for item in items)
        count = min(len(items), 4)
        yield (
            f'<div class="group">{legend}<div class="grid" '
            f'data-count="{count}">\n{figures}\n</div></div>'
        )


def _legend(items: Sequence[_Placed], inks: dict[str, Ink]) -> str:
    charts = [item.block for item in items if isinstance(item.block, Chart)]
    keys: dict[tuple[str, str, str], Series] = {}
    for chart in charts:
        for one in chart.series:
            if legend_key(one, chart)[2] == one.look:
                keys.setdefault(legend_key(one, chart), one)
    buttons = "".join(_legend_key(one, inks[role_of(one)]) for one in keys.values() if one.name)
    return f'<div class="legend">{buttons}</div>' if buttons else ""


def _legend_key(series: Series, ink: Ink) -> str:
    look = (
        f'data-look="{series.look}" data-marker="{ink.marker}" '
        f'style="--light:{ink.light};--dark:{ink.dark}"'
    )
    key = escape(as_json([series.name, role_of(series), series.look]))
    return (
        f'<button type="button" aria-pressed="true" data-key="{key}" title="Show or hide"><svg '
        f'class="swatch" {look} viewBox="0 0 26 12" '
        f'aria-hidden="true">{_swatch(series.look, ink.marker)}</svg>'
        f"{as_html(series.name)}</button>"
    )


_MARKERS = {
    "circle": '<circle cx="13" cy="6" r="3.4"/>',
    "square": '<rect x="9.8" y="2.8" width="6.4" height="6.4"/>',
    "triangle": '<path d="M13 1.8 17 9H9Z"/>',
    "down": '<path d="M13 10.2 17 3H9Z"/>',
    "diamond": '<path d="M13 1.4 17.2 6 13 10.6 8.8 6Z"/>',
    "cross": '<path d="M11.6 2h2.8v2.6H17v2.8h-2.6V10h-2.8V7.4H9V4.6h2.6Z"/>',
    "pentagon": '<path d="M13 1.8 17 4.9 15.5 9.6h-5L9 4.9Z"/>',
    "star": '<path d="m13 1.2 1.3 3.2 3.4.2-2.6 2.2.9 3.4-3-1.9-3 1.9.9-3.4-2.6-2.2 3.4-.2Z"/>',
}


def _swatch(look: str, marker: str) -> str:
    if look == "band":
        return '<rect class="area" x="1" y="1" width="24" height="10"/>'
    return '<path class="stroke" d="M0 6H26"/>' + (_MARKERS[marker] if look == "points" else "")


def _figure(item: _Placed) -> str:
    block = item.block
    assert not isinstance(block, Table)
    kind = "map" if isinstance(block, HeatMap) else "curves"
    label = escape(as_plain(f"{block.title}: {block.y_label} against {block.x_label}"))
    height = f' style="--rows:{len(block.index)}"' if isinstance(block, HeatMap) else ""
    picture = (
        ""
        if item.rows_are != "beside"
        else f'<noscript><img src="charts/{item.name}.svg" alt="{label}"></noscript>'
    )
    return (
        f'<figure><figcaption>{as_html(block.title)}</figcaption><div class="plot {kind}" '
        f'data-chart="{item.name}" role="img" '
        f'aria-label="{label}"{height}>{picture}</div>{_note(block.note)}{_links(item)}</figure>'
    )


def _table(item: _Placed) -> str:
    block = item.block
    assert isinstance(block, Table)
    keys = list(dict.fromkeys(key for row in block.rows for key in row))
    columns = {key: [row.get(key) for row in block.rows] for key in keys}
    classes = {key: ' class="n"' if is_numeric(values) else "" for key, values in columns.items()}
    head = "".join(f"<th{classes[key]} scope=col>{as_html(key)}</th>" for key in keys)
    cells = [
        [f"<td{classes[key]}>{as_html(text)}</td>" for text in column(columns[key])] for key in keys
    ]
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in zip(*cells, strict=True))
    inside = (
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
        if keys
        else "<p>No rows.</p>"
    )
    return (
        f'<figure class="table"><figcaption>{as_html(block.title)}</figcaption>'
        f'<div class="scroll" tabindex="0">{inside}</div>{_note(block.note)}{_links(item)}</figure>'
    )


def _note(note: str) -> str:
    return f'<p class="note">{as_html(note)}</p>' if note else ""


def _links(item: _Placed) -> str:
    if item.rows_are == "elsewhere":
        return ""
    if item.rows_are == "inside":
        content = base64.b64encode(csv_bytes(rows_behind(item.block))).decode()
        return (
            f'<p class="links"><a download="{item.name}.csv" '
            f'href="data:text/csv;base64,{content}">CSV</a></p>'
        )
    suffixes = ("csv",) if isinstance(item.block, Table) else ("svg", "png", "csv")
    links = (f'<a href="charts/{item.name}.{suffix}">{suffix.upper()}</a>' for suffix in suffixes)
    return f'<p class="links">{" ".join(links)}</p>'


def asset(name: str) -> str:
    """A file of the report's page."""
    return resources.files("keyhole.lab.report").joinpath(name).read_text(encoding="utf-8")


def library() -> str:
    """The chart library, as it may stand in a script element."""
    from plotly.offline import get_plotlyjs

    # inside a script element only these two could end or confuse it; in JavaScript the backslash
    # changes nothing
    return str(get_plotlyjs()).replace("</script", "<\\/script").replace("<!--", "<\\!--")
