"""What can one attention layer learn from this data? Measured, within a time budget, and said in plain words."""

from keyhole.lab.lens.findings import Answer, Findings, LensConfig
from keyhole.lab.lens.look import lens, look

__all__ = ["Answer", "Findings", "LensConfig", "lens", "look"]
