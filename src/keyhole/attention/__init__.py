"""One attention layer: its scores, the laws of its heads, finite heads (features), infinitely many (kernels)."""
