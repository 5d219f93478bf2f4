"""Solvers that know nothing of sets or heads."""
