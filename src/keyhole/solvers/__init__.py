"""From prepared samples and heads to values.

The layers that predict, and the routes to their values.

solve.py chooses the route and has the direct ones; gradients.py has conjugate gradients. layers.py
has the layers of finitely and of infinitely many heads. What they compute with, NumPy or torch, is
chosen by `keyhole.attention.backends.backend_for`.
"""
