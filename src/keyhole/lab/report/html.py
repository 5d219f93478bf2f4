"""A report as one HTML file that needs no network, with charts and rows beside it."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any, Literal, NamedTuple

from keyhole._files import write_whole
from keyhole.lab.report.document import (
    Chart,
    HeatMap,
    Report,
    Row,
    Section,
    Series,
    State,
    Table,
    Verdict,
    csv_bytes,
)
from keyhole.lab.report.plotly_figures import figure_of
from keyhole.lab.report.words import (
    as_html,
    as_json,
    as_plain,
    column,
    is_numeric,
    number,
    safe_names,
)

__all__ = [
    "as_json",
    "asset",
    "check_lab",
    "fragment",
    "is_numeric",
    "library",
    "number",
    "one_page",
    "page_of",
    "write_chart",
    "write_report",
]

Block = Chart | HeatMap | Table

_SIGNS: dict[State, str] = {
    "holds": "✓",
    "partly": "◐",
    "does not show": "✕",
    "not sure": "?",
    "not tested": "–",
    "information": "i",
}

_POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; script-src '
    "'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' file: data: blob:; font-src "
    'data:">'
)


class Placed(NamedTuple):
    """A block with the name of its files, and where its rows are."""

    block: Block
    name: str
    rows_are: Literal["beside", "inside", "elsewhere"]
    """In files beside the page, inside it, or nowhere."""


def check_lab(what: str = "a report") -> None:
    """Refuse, before any work, where the libraries that draw are missing."""
    for library_name in ("plotly", "matplotlib"):
        if find_spec(library_name) is None:
            raise ImportError(
                f"{what} needs {library_name}, which is not installed here. Install keyhole with "
                "its extra `lab` (pip install 'keyhole-ml[lab]', or in a clone '.[lab]')."
            )


# ---------------------------------------------------------------- files


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write ``report.html`` into ``folder``; it comes first.

    With ``charts/NAME.svg`` and ``.csv`` beside it; of tables the rows only. Each file appears
    whole or not at all; equal reports give equal bytes. Text may use ``f_{1,2}``, ``d^{2}`` and
    backquotes; anything else is shown as it stands.
    """
    check_lab()
    placed = _place(report, "beside")
    chart_paths = []
    for blocks in placed:
        for item in blocks:
            chart_paths += _write_block(item.block, folder / "charts", item.name)
    # the page last: whoever sees it also sees what it links to
    page = write_whole(_page(report, placed).encode(), folder / "report.html")
    return [page, *chart_paths]


def write_chart(chart: Chart | HeatMap, folder: Path) -> list[Path]:
    """Write one chart as ``NAME.svg``, and its rows as ``NAME.csv``."""
    check_lab("a chart")
    return _write_block(chart, folder, chart.name)


def _write_block(block: Block, folder: Path, name: str) -> list[Path]:
    """The picture of a block (a table has none) and its rows."""
    paths = []
    if not isinstance(block, Table):
        # matplotlib is imported when something is drawn
        from keyhole.lab.report.pictures import svg_of

        paths.append(write_whole(svg_of(block), folder / f"{name}.svg"))
    paths.append(write_whole(csv_bytes(rows_behind(block)), folder / f"{name}.csv"))
    return paths


def one_page(report: Report) -> str:
    """The report as one HTML file that carries the rows of its charts and tables as CSV."""
    check_lab()
    return _page(report, _place(report, "inside"))


def fragment(blocks: Sequence[Block]) -> dict[str, Any]:
    """Blocks for a page that is there already: their HTML, and the figures of their charts."""
    names = safe_names([block.name for block in blocks])
    placed = [Placed(block, name, "elsewhere") for block, name in zip(blocks, names, strict=True)]
    return {"html": "\n".join(_blocks(placed)), "charts": _figures([placed])}


def rows_behind(block: Block) -> list[Row]:
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
        {"series": series.name, "x": x, "y": y, "low": bar_low, "high": bar_high}
        for x, y, bar_low, bar_high in zip(series.x, series.y, low, high, strict=True)
    ]


def _place(report: Report, rows_are: Literal["beside", "inside"]) -> list[list[Placed]]:
    """Every block of every section with a name that no other has."""
    blocks = [block for section in report.sections for block in section.blocks]
    names = iter(safe_names([block.name for block in blocks]))
    return [
        [Placed(block, next(names), rows_are) for block in section.blocks]
        for section in report.sections
    ]


# ---------------------------------------------------------------- the page


def _page(report: Report, placed: Sequence[Sequence[Placed]]) -> str:
    """The whole page: contents, sections, provenance, and the figures that its script draws."""
    # every section, and the line of the contents that leads to it
    anchors = safe_names([section.slug for section in report.sections])
    contents = []
    sections = []
    numbered = enumerate(zip(report.sections, anchors, placed, strict=True), start=1)
    for k, (section, anchor, blocks) in numbered:
        badge = "" if section.verdict is None else _badge(section.verdict)
        entry = f'<span class="k">{k}</span><span>{as_html(section.title)}</span>{badge}'
        contents.append(f'<li><a href="#{anchor}">{entry}</a></li>')
        sections.append(_section(section, anchor, k, blocks))

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

    # what the browser needs: style, chart library, all figures, and the script that draws them
    head = f"{_POLICY}\n<style>\n{asset('report.css')}\n</style>"
    data = as_json({"charts": _figures(placed)})
    scripts = (
        f"<script>\n{library()}\n</script>\n"
        f'<script type="application/json" id="keyhole:data">{data}</script>\n'
        f"<script>\n{asset('report.js')}\n</script>"
    )
    return page_of("page", as_plain(report.title), head, header, body, scripts)


def page_of(kind: str, title: str, head: str, header: str, body: str, scripts: str) -> str:
    """A page around a body; all but the title is HTML."""
    return Template(asset("report.html")).substitute(
        kind=kind, title=escape(title), head=head, header=header, body=body, scripts=scripts
    )


def asset(name: str) -> str:
    """A file of the report's page."""
    return resources.files("keyhole.lab.report").joinpath(name).read_text(encoding="utf-8")


def library() -> str:
    """The chart library, as it may stand in a script element."""
    from plotly.offline import get_plotlyjs

    # inside a script element only these two could end or confuse it; in JavaScript the backslash
    # changes nothing
    return str(get_plotlyjs()).replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _figures(placed: Sequence[Sequence[Placed]]) -> dict[str, Any]:
    """The figures of all charts and heat maps by name."""
    return {
        item.name: figure_of(item.block)
        for blocks in placed
        for item in blocks
        if not isinstance(item.block, Table)
    }


def _tally(sections: Sequence[Section]) -> str:
    """How many verdicts there are of each state, in the order of the signs."""
    states = Counter(section.verdict.state for section in sections if section.verdict is not None)
    return "".join(
        f'<span class="tally" data-state="{state}"><b>{states[state]}</b> {state}</span>'
        for state in _SIGNS
        if state in states
    )


def _section(section: Section, anchor: str, k: int, blocks: Sequence[Placed]) -> str:
    """A section: number and title, claim, verdict, paragraphs, blocks, rule and settings."""
    parts = [
        f'<section id="{anchor}">',
        f'<h2><span class="k">{k}</span>{as_html(section.title)}</h2>',
        _labelled("claim", "Claim", section.claim),
    ]
    if section.verdict is not None:
        parts.append(_verdict(section.verdict))
    parts += [f"<p>{as_html(paragraph)}</p>" for paragraph in section.text]
    parts += _blocks(blocks)
    parts.append(_labelled("settings", "When the claim holds", section.rule))
    parts.append(_labelled("settings", "Our settings", section.settings))
    parts.append("</section>")
    return "\n".join(part for part in parts if part)


def _labelled(css_class: str, label: str, text: str) -> str:
    """A paragraph under a label, or nothing."""
    if not text:
        return ""
    return f'<p class="{css_class}"><span class="label">{label}</span>{as_html(text)}</p>'


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


def _blocks(blocks: Sequence[Placed]) -> Iterator[str]:
    """Neighbouring charts share a grid; tables stand alone."""
    for kind, group in groupby(blocks, key=lambda item: type(item.block)):
        items = list(group)
        if kind is Table:
            yield from (_table(item) for item in items)
        else:
            figures = "\n".join(_figure(item) for item in items)
            count = min(len(items), 4)
            yield f'<div class="grid" data-count="{count}">\n{figures}\n</div>'


def _figure(item: Placed) -> str:
    """The place where the script draws a chart or heat map, with caption, note and links."""
    block = item.block
    assert not isinstance(block, Table)
    kind = "map" if isinstance(block, HeatMap) else "curves"
    # without scripts, a page with files beside it shows the picture among them
    label = escape(as_plain(f"{block.title}: {block.y_label} against {block.x_label}"))
    picture = ""
    if item.rows_are == "beside":
        picture = f'<noscript><img src="charts/{item.name}.svg" alt="{label}"></noscript>'
    return (
        f"<figure><figcaption>{as_html(block.title)}</figcaption>"
        f'<div class="plot {kind}" data-chart="{item.name}" role="img" '
        f'aria-label="{label}">{picture}</div>{_note(block.note)}{_links(item)}</figure>'
    )


def _table(item: Placed) -> str:
    """A table with a column for every key that any row has, in the order of appearance."""
    block = item.block
    assert isinstance(block, Table)
    headings = []
    columns = []
    for key in dict.fromkeys(key for row in block.rows for key in row):
        values = [row.get(key) for row in block.rows]
        css_class = ' class="n"' if is_numeric(values) else ""
        headings.append(f"<th{css_class} scope=col>{as_html(key)}</th>")
        columns.append([f"<td{css_class}>{as_html(text)}</td>" for text in column(values)])
    inside = "<p>No rows.</p>"
    if headings:
        body = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in zip(*columns, strict=True))
        head = f"<thead><tr>{''.join(headings)}</tr></thead>"
        inside = f"<table>{head}<tbody>\n{body}\n</tbody></table>"
    return (
        f'<figure class="table"><figcaption>{as_html(block.title)}</figcaption>'
        f'<div class="scroll" tabindex="0">{inside}</div>{_note(block.note)}'
        f"{_links(item)}</figure>"
    )


def _note(note: str) -> str:
    """The note below a block, or nothing."""
    return f'<p class="note">{as_html(note)}</p>' if note else ""


def _links(item: Placed) -> str:
    """Links to the files of a block, or to its rows inside the page."""
    if item.rows_are == "elsewhere":
        return ""
    if item.rows_are == "inside":
        content = base64.b64encode(csv_bytes(rows_behind(item.block))).decode()
        link = f'<a download="{item.name}.csv" href="data:text/csv;base64,{content}">CSV</a>'
        return f'<p class="links">{link}</p>'
    suffixes = ["csv"] if isinstance(item.block, Table) else ["svg", "csv"]
    links = [f'<a href="charts/{item.name}.{suffix}">{suffix.upper()}</a>' for suffix in suffixes]
    return f'<p class="links">{" ".join(links)}</p>'
