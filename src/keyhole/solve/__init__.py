"""Convex problems on features or Gram matrices, with exact leave-one-out.

Nothing here knows of sets or heads.
"""
