"""Views of `keyhole explore` for these pages: HTML files that need no server, and charts as SVG.

`python docs/views.py FIGURES VIEWS` measures the points (half a minute) and writes
FIGURES/explore*.svg with their rows as CSV, and VIEWS/*.html.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import parse_qsl

from keyhole.lab.explore.fits import Results
from keyhole.lab.explore.server import saved_page
from keyhole.lab.explore.state import ExploreState
from keyhole.lab.explore.views import runs_of_view, show
from keyhole.lab.report.document import Chart
from keyhole.lab.report.html import write_chart

SHOWN = {
    "explore": ("", "curves"),
    "explore-heads": ("view=heads", "heads"),
    "explore-learned": ("view=spectrum", "learned"),
}
"""Name of the picture: the address of the view, and which of its charts."""


def main(figures: Path, views: Path) -> None:
    """Write them all; what is measured is kept in a folder that goes."""
    with TemporaryDirectory() as folder:
        write(figures, views, Results(Path(folder)))


def write(figures: Path, views: Path, results: Results) -> None:
    """Measure what is missing, and write charts and pages."""
    for name, (address, which) in SHOWN.items():
        state = ExploreState.read(dict(parse_qsl(address)))
        for run in results.missing(runs_of_view(state)):
            results.keep(run, run.errors())
        view = show(state, results)
        [chart] = [
            block for block in view.blocks if isinstance(block, Chart) and block.name == which
        ]
        for path in write_chart(chart, figures):
            if path.suffix == ".png":
                path.unlink()
            else:
                path.rename(figures / f"{name}{path.suffix}")
        views.mkdir(parents=True, exist_ok=True)
        (views / f"{state.view}.html").write_text(saved_page(state, view), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
