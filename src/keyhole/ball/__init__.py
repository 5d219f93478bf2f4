"""Convex losses over the norm ball. Nothing here knows of sets or heads."""
