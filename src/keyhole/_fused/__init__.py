"""Compiled inner loops, each imported by the function that needs it, so that numba is loaded on first use."""
