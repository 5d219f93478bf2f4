"""From prepared samples and heads to values.

The layers that predict, and the routes to their values.

solve.py chooses the route and has those of NumPy; gradients.py has conjugate gradients,
on_device.py torch. layers.py has the layers of finitely and of infinitely many heads.
"""
