"""What can one attention layer learn from this data? Measured, within a time budget, and said in plain words."""

from keyhole.lens.findings import Answer, Findings, LensConfig
from keyhole.lens.run import look

__all__ = ["Answer", "Findings", "LensConfig", "look"]
