"""Where a layer is computed: NumPy on the host, or torch on a device."""

from __future__ import annotations

from typing import Any

SHARE_OF_SETS = 4
"""A device holds sets that take 1/SHARE_OF_SETS of its free memory in float64."""


def pick_device(device: Any, sets: Any) -> str | None:
    """The device to compute on: None is NumPy, on the host.

    ``device=None`` is the device of the sets, "auto" the first GPU, if there is one.
    """
    if device is None:
        chosen: str | None = sets.device
        return chosen
    from keyhole._tensors import check_device, gpu_or_none

    if device == "auto":
        return gpu_or_none()
    return str(check_device(device))


def placed(samples: Any, device: str | None) -> Any:
    """The samples where they are computed: they move there once."""
    if device is None:
        return samples.numpy()
    from keyhole._tensors import free_bytes, is_on

    if is_on(device, samples.sets.stored):
        return samples
    needed = samples.sets.n_tokens * samples.dim * 8
    room = free_bytes(device) // SHARE_OF_SETS
    if needed > room:
        raise MemoryError(
            f"the sets take {needed / 2**30:.1f} GiB in float64, and {device} has room for "
            f"{room / 2**30:.1f}. Use device=None, fewer samples, or fit_batches."
        )
    return samples.to(device)
