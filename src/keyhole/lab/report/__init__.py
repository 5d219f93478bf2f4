"""Reports a person enjoys reading: data in `document`, one HTML file out of `html`."""

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

__all__ = ["Chart", "HeatMap", "Report", "Section", "Series", "Table", "Verdict", "bars"]
