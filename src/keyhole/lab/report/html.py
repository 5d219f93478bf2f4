"""One HTML file out of a report, and beside it every chart as SVG, PNG and CSV.

No network needed to read it.
"""

from __future__ import annotations

import base64
import html
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    KNOWN["attention"],
    KNOWN["biased"],
    KNOWN["kernel"],
    KNOWN["ridge"],
    KNOWN["ball"],
    KNOWN["mlp"],
    Ink(light="#5b4fc4", dark="#a9a1ff", marker="pentagon"),
    Ink(light="#8c4a1f", dark="#d69a72", marker="star"),
    Ink(light="#c2185b", dark="#ff80ab", marker="triangle"),
    Ink(light="#4d6b00", dark="#b3d05a", marker="down"),
)


def role_of(series: Series) -> str:
    """The role of a curve; a curve without one goes by its name."""
    return series.role or series.name


def inks_of(report: Report) -> dict[str, Ink]:
    """The ink of every role in the report, in the order in which the roles appear.

    A role in `KNOWN` has its ink there. The others take the spare inks in turn, and first those
    spare inks that no known role of the report uses.
    """
    # every role once, in the order of its first curve
    roles: list[str] = []
    for section in report.sections:
        for block in section.blocks:
            if isinstance(block, Chart):
                roles += [role_of(series) for series in block.series]
    roles = list(dict.fromkeys(roles))

    # spare inks that would repeat a known role's colour come last
    used_colours = {KNOWN[role].light for role in roles if role in KNOWN}
    unused = [ink for ink in SPARE if ink.light not in used_colours]
    repeated = [ink for ink in SPARE if ink.light in used_colours]
    spare = itertools.cycle([*unused, *repeated])

    inks = {}
    for role in roles:
        if role in KNOWN:
            inks[role] = KNOWN[role]
        else:
            inks[role] = next(spare)
    return inks


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
    # what is no number, or not finite
    if value is None:
        return "–"
    if isinstance(value, (str, bool)):
        return str(value)
    if isinstance(value, float) and math.isnan(value):
        return "–"
    if value == math.inf:
        return "∞"
    if value == -math.inf:
        return "−∞"

    # whole numbers are written in full, with a comma between thousands
    if isinstance(value, int) and abs(value) < 10**9:
        return f"{value:,}".replace("-", "−")

    # others in significant digits; Python's "e-05" becomes "×10⁻⁵"
    text = f"{value:.{digits}g}"
    if "e" in text:
        mantissa, _, power = text.partition("e")
        text = f"{mantissa}×10{str(int(power)).translate(_SUPERSCRIPT)}"
    if text.startswith("-"):
        text = "−" + text[1:]
    return text


def column(values: Sequence[Scalar]) -> list[str]:
    """The cells of a table's column.

    With as many decimals in each row where that loses nothing, so that they align.

    >>> column([0.5, 12.25, None])
    ['0.50', '12.25', '–']
    >>> column([1e-7, 3.0])
    ['10⁻⁷', '3']
    """
    finite = [v for v in values if isinstance(v, float) and math.isfinite(v)]
    sizes = [abs(v) for v in finite if v != 0]
    if not sizes or any(isinstance(v, int) for v in values):
        return [number(v) for v in values]

    # four significant digits of the largest number fix the decimals of the column
    largest = max(sizes)
    smallest = min(sizes)
    decimals = min(6, max(0, 3 - math.floor(math.log10(largest))))

    # numbers too large to read, or too small for these decimals, are written as powers of ten;
    # a mantissa of one is left away
    loses_digits = smallest < 10.0 ** (1 - decimals) / 5
    if largest >= 1e6 or loses_digits:
        return [re.sub(r"^(−?)1×", r"\1", number(v)) for v in values]

    cells = []
    for value in values:
        if isinstance(value, float) and math.isfinite(value):
            cells.append(f"{value:,.{decimals}f}".replace("-", "−"))
        else:
            cells.append(number(value))
    return cells


def is_numeric(values: Sequence[Scalar]) -> bool:
    """Whether a column holds numbers (or nothing), and so is set flush right."""
    has_number = any(isinstance(v, (int, float)) for v in values)
    has_text = any(isinstance(v, str) for v in values)
    return has_number and not has_text


def _shifted(escaped: str) -> str:
    """Set ``_{…}`` as a subscript and ``^{…}`` as a superscript."""
    tags = {"_": "sub", "^": "sup"}
    return _SHIFTED.sub(lambda m: f"<{tags[m[1]]}>{m[2]}</{tags[m[1]]}>", escaped)


def _finite(value: Any) -> Any:
    """The same value in JSON's types, with None for every number that is not finite."""
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
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
        # letters, digits and underscores only, and not too many
        stem = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:80]
        if not stem:
            stem = "unnamed"

        # the first free of stem, stem-2, stem-3, …
        candidate = stem
        suffix = 1
        while candidate.casefold() in taken:
            suffix += 1
            candidate = f"{stem}-{suffix}"
        taken.add(candidate.casefold())
        safe.append(candidate)
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
    """One row per point of a curve; the ends of the bars are empty where it has none."""
    no_bars = [None] * len(series.x)
    low = no_bars if series.low is None else series.low
    high = no_bars if series.high is None else series.high
    return [
        {
            "series": series.name,
            "look": series.look,
            "x": x,
            "y": y,
            "low": bar_low,
            "high": bar_high,
        }
        for x, y, bar_low, bar_high in zip(series.x, series.y, low, high, strict=True)
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
    # with a centre, the colours reach equally far on both sides: to the most distant number
    reach = None
    if block.centre is not None:
        finite = [v for row in block.values for v in row if math.isfinite(v)]
        distances = [abs(v - block.centre) for v in finite]
        reach = max(distances, default=1.0)
        if reach == 0:
            reach = 1.0

    # the cells show words where there are any, else short numbers; the pointer shows all digits
    if block.words is None:
        texts = _short(block.values)
        full_texts: Sequence[Sequence[str]] = [[number(v) for v in row] for row in block.values]
    else:
        texts = [[as_chart_text(words) for words in row] for row in block.words]
        full_texts = block.words

    # the words under the pointer name row and column in full
    x_label = as_chart_text(block.x_label)
    y_label = as_chart_text(block.y_label)
    column_names = [as_chart_text(name) for name in block.columns]
    row_names = [as_chart_text(name) for name in block.index]
    hover = []
    for row_name, row_texts in zip(row_names, full_texts, strict=True):
        hover.append(
            [
                f"{y_label} {row_name}, {x_label} {column_name}<br><b>{as_chart_text(text)}</b>"
                for column_name, text in zip(column_names, row_texts, strict=True)
            ]
        )

    return {
        "kind": "map",
        "x_label": x_label,
        "y_label": y_label,
        "columns": [as_chart_text(_cut(name)) for name in block.columns],
        "index": [as_chart_text(_cut(name)) for name in block.index],
        "values": [list(row) for row in block.values],
        "texts": texts,
        "hover": hover,
        "line": list(block.line),
        "points": [[column, row, as_chart_text(text)] for column, row, text in block.points],
        "centre": block.centre,
        "reach": reach,
    }


def _cut(name: str, longest: int = 24) -> str:
    """A name that leaves room for the chart it stands beside.

    The words under the pointer have it in full.
    """
    if len(name) <= longest:
        return name
    return name[: longest - 1] + "…"


def _short(values: Sequence[Sequence[float]]) -> list[list[str]]:
    """Numbers short enough for a cell.

    Two digits of the largest, and as many decimals everywhere.
    """
    largest = max((abs(v) for row in values for v in row if math.isfinite(v)), default=0.0)
    needs_powers = largest != 0 and not 1e-3 <= largest < 1e5
    if needs_powers:
        return [[number(v, 2) for v in row] for row in values]

    decimals = 0
    if largest != 0:
        decimals = max(0, 1 - math.floor(math.log10(largest)))

    def cell(value: float) -> str:
        if not math.isfinite(value):
            return ""
        return f"{value:.{decimals}f}".replace("-", "−")

    return [[cell(value) for value in row] for row in values]


def legend_key(series: Series, chart: Chart) -> tuple[str, str, str]:
    """What switches a curve on and off: name, role and look.

    A band goes with a curve of its name, if there is one.
    """
    name = series.name
    role = role_of(series)
    if series.look == "band":
        for other in chart.series:
            is_its_curve = other.name == name and role_of(other) == role
            if is_its_curve and other.look != "band":
                return name, role, other.look
    return name, role, series.look


def _series_data(series: Series, chart: Chart) -> dict[str, Any]:
    """A curve as plain data."""
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
    """What the pointer shows at point k of a curve."""
    if chart.names:
        place = as_chart_text(chart.names[int(series.x[k])])
    else:
        place = number(series.x[k], 5)
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
    """A block, the name of its files, and where its links find the rows behind it.

    "beside": in CSV files beside the page; "inside": in the page itself; "elsewhere": the page
    around it has links of its own, so the block has none.
    """

    block: Chart | HeatMap | Table
    name: str
    rows_are: Literal["beside", "inside", "elsewhere"]


def check_lab(what: str = "a report") -> None:
    """Raise ImportError where the packages that draw are not installed.

    Its message is a line that says what to do.
    """
    missing = [name for name in ("matplotlib", "plotly") if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"{what} needs {' and '.join(missing)}: pip install 'keyhole-ml[lab]', or in a clone "
            "pip install '.[lab]'."
        )


def _place(report: Report, rows_are: Literal["beside", "inside"]) -> list[list[_Placed]]:
    """The blocks of each section, under names that differ in the whole report."""
    names = iter(
        safe_names([block.name for section in report.sections for block in section.blocks])
    )
    return [
        [_Placed(block=block, name=next(names), rows_are=rows_are) for block in section.blocks]
        for section in report.sections
    ]


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write ``report.html`` into ``folder``; it comes first.

    With ``charts/NAME.svg``, ``.png`` and ``.csv`` beside it.

    Tables have their rows as CSV only. Each file appears whole or not at all; equal reports give
    equal bytes. Text may use ``f_{1,2}``, ``d^{2}`` and backquotes; anything else is shown as it
    stands.
    """
    check_lab()
    inks = inks_of(report)
    placed = _place(report, "beside")
    chart_paths = []
    for blocks in placed:
        for item in blocks:
            for suffix, content in _files(item, inks).items():
                path = folder / "charts" / f"{item.name}.{suffix}"
                chart_paths.append(write_whole(content, path))
    # the page last: whoever sees it also sees what it links to
    page = write_whole(_page(report, placed, inks).encode(), folder / "report.html")
    return [page, *chart_paths]


def one_page(report: Report) -> str:
    """The report as one HTML file.

    It carries the rows behind its charts and tables, as CSV to be taken out.
    """
    check_lab()
    return _page(report, _place(report, "inside"), inks_of(report))


def fragment(blocks: Sequence[Chart | HeatMap | Table]) -> dict[str, Any]:
    """Blocks for a page that is there already.

    Their HTML, the data of their charts, and the inks of these.
    """
    inks = _inks_of_blocks(blocks)
    names = safe_names([block.name for block in blocks])
    placed = [
        _Placed(block=block, name=name, rows_are="elsewhere")
        for block, name in zip(blocks, names, strict=True)
    ]
    return {
        "html": "\n".join(_blocks(placed, inks)),
        "charts": _data([placed]),
        "inks": _ink_data(inks),
    }


def write_chart(chart: Chart, folder: Path) -> list[Path]:
    """Write one chart as ``NAME.svg`` and ``.png``, and its rows as ``NAME.csv``."""
    check_lab("a chart")
    item = _Placed(block=chart, name=chart.name, rows_are="beside")
    files = _files(item, _inks_of_blocks([chart]))
    return [
        write_whole(content, folder / f"{chart.name}.{suffix}") for suffix, content in files.items()
    ]


def _inks_of_blocks(blocks: Sequence[Chart | HeatMap | Table]) -> dict[str, Ink]:
    """The inks of blocks that stand in no report."""
    section = Section(slug="", title="", claim="", blocks=blocks)
    return inks_of(Report(title="", lead="", sections=[section]))


def _ink_data(inks: dict[str, Ink]) -> dict[str, list[str]]:
    """Inks as plain data for the page's script."""
    return {role: [ink.light, ink.dark, ink.marker] for role, ink in inks.items()}


def _files(item: _Placed, inks: dict[str, Ink]) -> dict[str, bytes]:
    """The content of a block's files by suffix: pictures (a table has none) and rows."""
    files: dict[str, bytes] = {}
    if isinstance(item.block, Chart):
        style = {role: (ink.light, ink.marker) for role, ink in inks.items()}
        files.update(draw_chart(item.block, style))
    elif isinstance(item.block, HeatMap):
        files.update(draw_heat_map(item.block))
    files["csv"] = csv_bytes(rows_behind(item.block))
    return files


def _page(report: Report, placed: Sequence[Sequence[_Placed]], inks: dict[str, Ink]) -> str:
    """The whole page: contents, sections, provenance, and the data that its script draws."""
    # every section, and the line of the contents that leads to it
    anchors = safe_names([section.slug for section in report.sections])
    contents = []
    sections = []
    numbered = enumerate(zip(report.sections, anchors, placed, strict=True), start=1)
    for k, (section, anchor, blocks) in numbered:
        badge = "" if section.verdict is None else _badge(section.verdict)
        entry = f'<span class="k">{k}</span><span>{as_html(section.title)}</span>{badge}'
        contents.append(f'<li><a href="#{anchor}">{entry}</a></li>')
        sections.append(_section(section, anchor, k, blocks, inks))

    # what the reader sees
    listed = "\n".join(contents)
    navigation = f'<nav aria-label="Contents">\n<ol>\n{listed}\n</ol>\n</nav>\n<main>'
    footer = (
        "</main>\n<footer>\n<h2>Where this comes from</h2>\n"
        f"{_definitions(report.provenance)}\n</footer>"
    )
    body = "\n".join([navigation, *sections, footer])
    header = (
        f'<h1>{as_html(report.title)}</h1>\n<p class="lead">{as_html(report.lead)}</p>\n'
        f'<p class="tallies">{_tally(report.sections)}</p>'
    )

    # what the browser needs: style, chart library, the data of all charts, and our script
    head = f"{_POLICY}\n<style>\n{asset('report.css')}\n</style>"
    data = as_json({"inks": _ink_data(inks), "charts": _data(placed)})
    scripts = (
        f"<script>\n{library()}\n</script>\n"
        f'<script type="application/json" id="keyhole:data">{data}</script>\n'
        f"<script>\n{asset('report.js')}\n</script>"
    )
    return page_of("page", as_plain(report.title), head, header, body, scripts)


_POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; script-src '
    "'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' file: data: blob:; font-src "
    'data:">'
)


def page_of(kind: str, title: str, head: str, header: str, body: str, scripts: str) -> str:
    """A page around a body; all but the title is HTML."""
    return Template(asset("report.html")).substitute(
        kind=kind, title=escape(title), head=head, header=header, body=body, scripts=scripts
    )


def _data(placed: Sequence[Sequence[_Placed]]) -> dict[str, Any]:
    """The data of all charts and heat maps by name."""
    data = {}
    for blocks in placed:
        for item in blocks:
            if isinstance(item.block, Chart):
                data[item.name] = chart_data(item.block)
            elif isinstance(item.block, HeatMap):
                data[item.name] = heat_map_data(item.block)
    return data


def _tally(sections: Sequence[Section]) -> str:
    """How many verdicts there are of each state, in the order of the signs."""
    states: Counter[str] = Counter()
    for section in sections:
        if section.verdict is not None:
            states[section.verdict.state] += 1
    tallies = []
    for state in _SIGNS:
        count = states[state]
        if count > 0:
            tallies.append(
                f'<span class="tally" data-state="{state}"><b>{count}</b> {state}</span>'
            )
    return "".join(tallies)


def _section(
    section: Section, anchor: str, k: int, blocks: Sequence[_Placed], inks: dict[str, Ink]
) -> str:
    """A section: number and title, claim, verdict, paragraphs, blocks, settings."""
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
            '<p class="settings"><span class="label">Our settings</span>'
            f"{as_html(section.settings)}</p>"
        )
    parts.append("</section>")
    return "\n".join(parts)


def _verdict(verdict: Verdict) -> str:
    """The box of a verdict: badge, sentence, numbers."""
    inside = f"{_badge(verdict)}<p>{as_html(verdict.sentence)}</p>{_definitions(verdict.numbers)}"
    return f'<div class="verdict" data-state="{verdict.state}">{inside}</div>'


def _badge(verdict: Verdict) -> str:
    """The state of a verdict as a sign and a word."""
    return (
        f'<span class="badge" data-state="{verdict.state}">'
        f'<span class="sign" aria-hidden="true">{_SIGNS[verdict.state]}</span>'
        f'<span class="state">{verdict.state}</span></span>'
    )


def _definitions(pairs: Mapping[str, str]) -> str:
    """A list of names with their values, or nothing."""
    if not pairs:
        return ""
    items = [
        f"<div><dt>{as_html(key)}</dt><dd>{as_html(value)}</dd></div>"
        for key, value in pairs.items()
    ]
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
    """One button per curve of the charts; the first curve of a key stands for the others."""
    curves: dict[tuple[str, str, str], Series] = {}
    for item in items:
        if not isinstance(item.block, Chart):
            continue
        for series in item.block.series:
            key = legend_key(series, item.block)
            # a band that goes with a curve has no button
            goes_with_a_curve = key[2] != series.look
            if not goes_with_a_curve:
                curves.setdefault(key, series)
    buttons = [
        _legend_button(series, inks[role_of(series)]) for series in curves.values() if series.name
    ]
    if not buttons:
        return ""
    return f'<div class="legend">{"".join(buttons)}</div>'


def _legend_button(series: Series, ink: Ink) -> str:
    """A button that shows or hides the curves of one key, with a small picture of them."""
    key = escape(as_json([series.name, role_of(series), series.look]))
    attributes = (
        f'data-look="{series.look}" data-marker="{ink.marker}" '
        f'style="--light:{ink.light};--dark:{ink.dark}"'
    )
    swatch = (
        f'<svg class="swatch" {attributes} viewBox="0 0 26 12" aria-hidden="true">'
        f"{_swatch(series.look, ink.marker)}</svg>"
    )
    return (
        f'<button type="button" aria-pressed="true" data-key="{key}" title="Show or hide">'
        f"{swatch}{as_html(series.name)}</button>"
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
    """The small picture of a curve: an area, a stroke, or a stroke with a marker."""
    if look == "band":
        return '<rect class="area" x="1" y="1" width="24" height="10"/>'
    stroke = '<path class="stroke" d="M0 6H26"/>'
    if look == "points":
        return stroke + _MARKERS[marker]
    return stroke


def _figure(item: _Placed) -> str:
    """The place where the script draws a chart or heat map, with caption, note and links."""
    block = item.block
    assert not isinstance(block, Table)

    # a heat map is as high as its rows need
    if isinstance(block, HeatMap):
        kind = "map"
        height = f' style="--rows:{len(block.index)}"'
    else:
        kind = "curves"
        height = ""

    # without scripts, a page with files beside it shows the picture among them
    label = escape(as_plain(f"{block.title}: {block.y_label} against {block.x_label}"))
    picture = ""
    if item.rows_are == "beside":
        picture = f'<noscript><img src="charts/{item.name}.svg" alt="{label}"></noscript>'

    return (
        f"<figure><figcaption>{as_html(block.title)}</figcaption>"
        f'<div class="plot {kind}" data-chart="{item.name}" role="img" '
        f'aria-label="{label}"{height}>{picture}</div>{_note(block.note)}{_links(item)}</figure>'
    )


def _table(item: _Placed) -> str:
    """A table with a column for every key that any row has, in the order of appearance."""
    block = item.block
    assert isinstance(block, Table)

    # format column by column, so that numbers align
    keys = list(dict.fromkeys(key for row in block.rows for key in row))
    headings = []
    columns = []
    for key in keys:
        values = [row.get(key) for row in block.rows]
        css_class = ' class="n"' if is_numeric(values) else ""
        headings.append(f"<th{css_class} scope=col>{as_html(key)}</th>")
        columns.append([f"<td{css_class}>{as_html(text)}</td>" for text in column(values)])

    if keys:
        body = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in zip(*columns, strict=True))
        head = f"<thead><tr>{''.join(headings)}</tr></thead>"
        inside = f"<table>{head}<tbody>\n{body}\n</tbody></table>"
    else:
        inside = "<p>No rows.</p>"
    return (
        f'<figure class="table"><figcaption>{as_html(block.title)}</figcaption>'
        f'<div class="scroll" tabindex="0">{inside}</div>{_note(block.note)}{_links(item)}</figure>'
    )


def _note(note: str) -> str:
    """The note below a block, or nothing."""
    if not note:
        return ""
    return f'<p class="note">{as_html(note)}</p>'


def _links(item: _Placed) -> str:
    """Links to the files of a block, or to its rows inside the page."""
    if item.rows_are == "elsewhere":
        return ""
    if item.rows_are == "inside":
        content = base64.b64encode(csv_bytes(rows_behind(item.block))).decode()
        return (
            f'<p class="links"><a download="{item.name}.csv" '
            f'href="data:text/csv;base64,{content}">CSV</a></p>'
        )
    suffixes = ["csv"]
    if not isinstance(item.block, Table):
        suffixes = ["svg", "png", "csv"]
    links = [f'<a href="charts/{item.name}.{suffix}">{suffix.upper()}</a>' for suffix in suffixes]
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
