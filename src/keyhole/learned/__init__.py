"""Laws of W that are fitted to a training set: learn the law, keep the heads random."""

from keyhole.learned.fitted import FittedHeads, Step
from keyhole.learned.identity import IdentityHeads
from keyhole.learned.law import LearnedHeads

__all__ = ["FittedHeads", "IdentityHeads", "LearnedHeads", "Step"]
