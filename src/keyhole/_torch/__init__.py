"""The same mathematics on torch tensors, wherever they live. torch is imported by the modules of this room alone.

Nothing here knows of SetBatch or of laws: keys come as a tensor of tokens with the offsets of the sets, laws as their
moments, heads as tensors. `gram` and `features` are plain torch; `triton_gram` and `triton_features` are fused kernels
for CUDA; `ridge` is Cholesky, in place and tile by tile.
"""

from __future__ import annotations

import sys
from typing import Any


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a torch tensor. Costs no import: without torch there are no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
