"""Compiled inner loops. The only rooms that import numba; imported on first use, so that `import keyhole` is quick.

Loops are serial and release the GIL: `_array.run_threads` spreads tiles of work over threads.
"""
