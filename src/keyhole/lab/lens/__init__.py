"""What one attention layer can learn from this data.

Measured, within a time budget, and said in plain words.
"""

from keyhole.lab.lens.findings import Findings, LensAnswer, LensConfig
from keyhole.lab.lens.look import lens, look

__all__ = ["Findings", "LensAnswer", "LensConfig", "lens", "look"]
