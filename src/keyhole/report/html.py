"""One HTML file out of a report, and beside it every chart as SVG, PNG and CSV. No network, nothing to install to read.

The page carries its data as JSON; `report.js` draws it with plotly.js, which the Python package plotly brings along.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

from keyhole._files import write_whole
from keyhole.plotting import draw_chart, draw_heat_map
from keyhole.report.charts import chart_data, heat_map_data, legend_key
from keyhole.report.document import Chart, HeatMap, Report, Section, Series, Table, Verdict
from keyhole.report.files import csv_bytes, rows_behind, safe_names
from keyhole.report.palette import Ink, inks_of, role_of
from keyhole.report.words import as_html, as_json, as_plain, column, is_numeric, number

# a sign for each state besides its colour
_SIGNS = {"holds": "✓", "partly": "◐", "does not show": "✕", "not tested": "○", "information": "i"}


@dataclass(frozen=True)
class _Placed:
    """A block with the name its files have."""

    block: Chart | HeatMap | Table
    name: str

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ("csv",) if isinstance(self.block, Table) else ("svg", "png", "csv")


def check_lab(what: str = "a report") -> None:
    """Raise ImportError, in a line that says what to do, where the packages that draw are not installed."""
    missing = [name for name in ("matplotlib", "plotly") if find_spec(name) is None]
    if missing:
        raise ImportError(f"{what} needs {' and '.join(missing)}: pip install 'keyhole[lab]'.")


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write ``report.html`` into ``folder``, and ``charts/NAME.svg``, ``.png`` and ``.csv`` beside it.

    Tables have their rows as CSV only. Each file appears whole or not at all; equal reports give equal bytes.

    Parameters
    ----------
    report : Report
        What to write. Text may use ``f_{1,2}``, ``d^{2}`` and backquotes; anything else is shown as it stands.
    folder : Path
        Where to; made if it is not there.

    Returns
    -------
    list of Path
        The files written, ``report.html`` first.

    Examples
    --------
    >>> import tempfile
    >>> table = Table("sizes", "Sizes", [{"d": 4, "n": 100}])
    >>> section = Section("first", "A claim", "Small is beautiful.", [table], Verdict("holds", "It is."))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [str(path.relative_to(folder)) for path in write_report(Report("Title", "", [section]), Path(folder))]
    ['report.html', 'charts/sizes.csv']
    """
    check_lab()
    inks = inks_of(report)
    names = iter(safe_names([block.name for section in report.sections for block in section.blocks]))
    placed = [[_Placed(block, next(names)) for block in section.blocks] for section in report.sections]
    written = []
    for item in (item for blocks in placed for item in blocks):
        for suffix, content in _files(item, inks).items():
            written.append(write_whole(content, folder / "charts" / f"{item.name}.{suffix}"))
    # the page last: whoever finds it finds what it links to
    page = write_whole(_page(report, placed, inks).encode(), folder / "report.html")
    return [page, *written]


def write_chart(chart: Chart, folder: Path) -> list[Path]:
    """Write one chart as ``NAME.svg`` and ``.png``, and its rows as ``NAME.csv``."""
    check_lab("a chart")
    inks = inks_of(Report("", "", [Section("", "", "", [chart])]))
    files = _files(_Placed(chart, chart.name), inks)
    return [write_whole(content, folder / f"{chart.name}.{suffix}") for suffix, content in files.items()]


def _files(item: _Placed, inks: dict[str, Ink]) -> dict[str, bytes]:
    pictures: dict[str, bytes] = {}
    if isinstance(item.block, Chart):
        _check_lengths(item.block)
        style = {role: (ink.light, ink.marker) for role, ink in inks.items()}
        pictures = draw_chart(item.block, style)
    elif isinstance(item.block, HeatMap):
        _check_shape(item.block)
        pictures = draw_heat_map(item.block)
    return {**pictures, "csv": csv_bytes(rows_behind(item.block))}


def _page(report: Report, placed: Sequence[Sequence[_Placed]], inks: dict[str, Ink]) -> str:
    anchors = safe_names([section.slug for section in report.sections])
    sections = [
        _section(section, anchor, k, blocks, inks)
        for k, (section, anchor, blocks) in enumerate(zip(report.sections, anchors, placed, strict=True), 1)
    ]
    return Template(_asset("report.html")).substitute(
        title=escape(as_plain(report.title)),
        heading=as_html(report.title),
        lead=as_html(report.lead),
        tally=_tally(report.sections),
        contents="\n".join(_content(s, a, k) for k, (s, a) in enumerate(zip(report.sections, anchors, strict=True), 1)),
        sections="\n".join(sections),
        provenance=_definitions(report.provenance),
        data=as_json({"inks": {r: [i.light, i.dark, i.marker] for r, i in inks.items()}, "charts": _data(placed)}),
        css=_asset("report.css"),
        js=_asset("report.js"),
        library=_library(),
    )


def _data(placed: Sequence[Sequence[_Placed]]) -> dict[str, Any]:
    return {
        item.name: chart_data(item.block) if isinstance(item.block, Chart) else heat_map_data(item.block)
        for blocks in placed
        for item in blocks
        if not isinstance(item.block, Table)
    }


def _content(section: Section, anchor: str, k: int) -> str:
    badge = "" if section.verdict is None else _badge(section.verdict)
    return f'<li><a href="#{anchor}"><span class="k">{k}</span><span>{as_html(section.title)}</span>{badge}</a></li>'


def _tally(sections: Sequence[Section]) -> str:
    """How many verdicts there are of each state, in the order of the signs."""
    states: list[str] = [section.verdict.state for section in sections if section.verdict is not None]
    counts = ((state, states.count(state)) for state in _SIGNS)
    return "".join(
        f'<span class="tally" data-state="{state}"><b>{count}</b> {state}</span>' for state, count in counts if count
    )


def _section(section: Section, anchor: str, k: int, blocks: Sequence[_Placed], inks: dict[str, Ink]) -> str:
    parts = [f'<section id="{anchor}">', f'<h2><span class="k">{k}</span>{as_html(section.title)}</h2>']
    if section.claim:
        parts.append(f'<p class="claim"><span class="label">Claim</span>{as_html(section.claim)}</p>')
    if section.verdict is not None:
        parts.append(_verdict(section.verdict))
    parts += [f"<p>{as_html(paragraph)}</p>" for paragraph in section.text]
    parts += _blocks(blocks, inks)
    if section.settings:
        parts.append(f'<p class="settings"><span class="label">Our settings</span>{as_html(section.settings)}</p>')
    return "\n".join([*parts, "</section>"])


def _verdict(verdict: Verdict) -> str:
    numbers = _definitions(verdict.numbers)
    return (
        f'<div class="verdict" data-state="{verdict.state}">{_badge(verdict)}'
        f"<p>{as_html(verdict.sentence)}</p>{numbers}</div>"
    )


def _badge(verdict: Verdict) -> str:
    sign = f'<span class="sign" aria-hidden="true">{_SIGNS[verdict.state]}</span>'
    return f'<span class="badge" data-state="{verdict.state}">{sign}<span class="state">{verdict.state}</span></span>'


def _definitions(pairs: Any) -> str:
    if not pairs:
        return ""
    items = (f"<div><dt>{as_html(key)}</dt><dd>{as_html(value)}</dd></div>" for key, value in pairs.items())
    return f"<dl>{''.join(items)}</dl>"


def _blocks(blocks: Sequence[_Placed], inks: dict[str, Ink]) -> Iterator[str]:
    """Neighbouring charts share a grid and one legend; heat maps and tables stand alone or in a grid of their own."""
    for kind, group in groupby(blocks, key=lambda item: type(item.block)):
        items = list(group)
        if kind is Table:
            yield from (_table(item) for item in items)
            continue
        legend = _legend(items, inks)
        figures = "\n".join(_figure(item) for item in items)
        count = min(len(items), 4)
        yield f'<div class="group">{legend}<div class="grid" data-count="{count}">\n{figures}\n</div></div>'


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
    look = f'data-look="{series.look}" data-marker="{ink.marker}" style="--light:{ink.light};--dark:{ink.dark}"'
    key = escape(as_json([series.name, role_of(series), series.look]))
    return (
        f'<button type="button" aria-pressed="true" data-key="{key}" title="Show or hide">'
        f'<svg class="swatch" {look} viewBox="0 0 26 12" aria-hidden="true">{_swatch(series.look, ink.marker)}</svg>'
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
    return (
        f"<figure><figcaption>{as_html(block.title)}</figcaption>"
        f'<div class="plot {kind}" data-chart="{item.name}" role="img" aria-label="{label}"{height}>'
        f'<noscript><img src="charts/{item.name}.svg" alt="{label}"></noscript></div>'
        f"{_note(block.note)}{_links(item)}</figure>"
    )


def _table(item: _Placed) -> str:
    block = item.block
    assert isinstance(block, Table)
    keys = list(dict.fromkeys(key for row in block.rows for key in row))
    columns = {key: [row.get(key) for row in block.rows] for key in keys}
    classes = {key: ' class="n"' if is_numeric(values) else "" for key, values in columns.items()}
    head = "".join(f"<th{classes[key]} scope=col>{as_html(key)}</th>" for key in keys)
    cells = [[f"<td{classes[key]}>{as_html(text)}</td>" for text in column(columns[key])] for key in keys]
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in zip(*cells, strict=True))
    inside = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>" if keys else "<p>No rows.</p>"
    return (
        f'<figure class="table"><figcaption>{as_html(block.title)}</figcaption>'
        f'<div class="scroll" tabindex="0">{inside}</div>{_note(block.note)}{_links(item)}</figure>'
    )


def _note(note: str) -> str:
    return f'<p class="note">{as_html(note)}</p>' if note else ""


def _links(item: _Placed) -> str:
    links = (f'<a href="charts/{item.name}.{suffix}">{suffix.upper()}</a>' for suffix in item.suffixes)
    return f'<p class="links">{" ".join(links)}</p>'


def _check_lengths(chart: Chart) -> None:
    for series in chart.series:
        lengths = {
            name: len(values)
            for name in ("x", "y", "low", "high", "hover")
            if (values := getattr(series, name)) is not None
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"every part of a series must be as long as its x: series {series.name!r} of chart {chart.name!r} has "
                f"{', '.join(f'{count} {name}' for name, count in lengths.items())}. Leave out what is not there."
            )


def _check_shape(block: HeatMap) -> None:
    widths = {len(row) for row in block.values} or {len(block.columns)}
    if len(block.values) != len(block.index) or widths != {len(block.columns)}:
        raise ValueError(
            f"`values` of a heat map must have a row per index and a number per column: heat map {block.name!r} has "
            f"{len(block.index)} x {len(block.columns)} names and {len(block.values)} rows of "
            f"{number(min(widths))} to {number(max(widths))} numbers. Fill gaps with NaN."
        )


def _asset(name: str) -> str:
    return resources.files("keyhole.report").joinpath(name).read_text(encoding="utf-8")


def _library() -> str:
    from plotly.offline import get_plotlyjs

    # inside a script element only these two could end or confuse it; in JavaScript the backslash changes nothing
    return str(get_plotlyjs()).replace("</script", "<\\/script").replace("<!--", "<\\!--")
