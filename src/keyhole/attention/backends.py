"""Where a layer is computed: the one place where a backend is chosen.

`pick_device` turns the parameter ``device`` of an estimator into a device, and `backend_for` a
device into the backend that computes there. Everything else asks the backend, and never what the
device is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from keyhole.attention.descent import LearningPlan
    from keyhole.attention.head_error import HeadGradient, Judgement, Task
    from keyhole.attention.heads import HeadDistribution, HeadDraw
    from keyhole.data.sets import SampleBatch, SetBatch
    from keyhole.logistic.problem import LogisticProblem
    from keyhole.ridge.problem import RidgeFit, RidgeProblem


@runtime_checkable
class Backend(Protocol):
    """The operations of a layer, as one library computes them.

    "Where the batch lives" means NumPy arrays on the host, and tensors on a device.
    """

    @property
    def device(self) -> str | None:
        """Where it computes; None is NumPy, on the host."""
        ...

    @property
    def sums_in_float64(self) -> bool:
        """Whether ΦΦᵀ is summed in float64 whatever the precision of Φ: then Φ needs no centre."""
        ...

    @property
    def solves_by_rows(self) -> bool:
        """Whether it can solve without an n × n matrix: by ΦᵀΦ, or by conjugate gradients."""
        ...

    def placed(self, samples: Any) -> Any:
        """The same samples where it computes, if they fit there; elsewhere they are streamed."""
        ...

    def with_room_for(self, n: int) -> Backend:
        """Itself, or the host if it is too small for the n × n matrices of a solve."""
        ...

    # features of finitely many heads, and the kernel of infinitely many

    def features(self, batch: SampleBatch, heads: Any, activation: str, dtype: Any) -> Any:
        """Φ (n, M·D), where the batch lives, pooled over the sets of a sample."""
        ...

    def kernel(
        self,
        a: SetBatch,
        b: SetBatch | None,
        mean: np.ndarray | None,
        scale: float,
        activation: str,
        memory_budget: int,
    ) -> Any:
        """K (n, m) for heads of this mean and scale, where the batch lives."""
        ...

    # predictions

    def outputs(
        self,
        samples: SampleBatch,
        heads: HeadDraw,
        values: np.ndarray,
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
    ) -> np.ndarray:
        """Φ·values (n, t) for values (M, D, t)."""
        ...

    def contributions(
        self,
        samples: SampleBatch,
        heads: HeadDraw,
        values: np.ndarray,
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
    ) -> np.ndarray:
        """What every key adds to Φ·values (k, t), sample after sample."""
        ...

    def kernel_outputs(
        self,
        samples: SampleBatch,
        training_samples: SampleBatch,
        dual: np.ndarray,
        heads: HeadDistribution,
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
    ) -> np.ndarray:
        """K·dual (n, t), K being the kernel of samples and training samples."""
        ...

    # solving for values

    def products(
        self,
        batch: SampleBatch,
        heads: HeadDraw,
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
        centred_rows: np.ndarray | None,
    ) -> FeatureProducts:
        """Φ of training samples, as the two products with it that a dual fit takes.

        From every row of Φ the mean of some rows, ``centred_rows``, is taken, unless that is None.
        """
        ...

    def kernel_gram(
        self,
        batch: SampleBatch,
        extras: np.ndarray,
        heads: HeadDistribution,
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
    ) -> Any:
        """K + ZZᵀ (n, n) in float64, Z being the extras."""
        ...

    def kernel_rounding(self, dtype: str) -> float:
        """The unit of rounding of the arithmetic behind `kernel_gram`."""
        ...

    def ridge(
        self,
        gram: Any,
        problem: RidgeProblem,
        *,
        rounding: float,
        overwrite_gram: bool,
        keep_factor: bool,
        memory_budget: int,
    ) -> RidgeFit:
        """Ridge with leave-one-out on a Gram matrix that this backend made."""
        ...

    def logistic(self, gram: Any, problem: LogisticProblem, *, rounding: float) -> RidgeFit:
        """Logistic regression on a Gram matrix that this backend made, both triangles of it."""
        ...

    # learning a head distribution

    def descent_samples(self, task: Task) -> DescentSamples:
        """The samples of a task where head distributions of them are learned."""
        ...


@runtime_checkable
class FeatureProducts(Protocol):
    """The products with Φ that a dual fit takes: ΦΦᵀ + ZZᵀ and Φᵀa.

    Φ is made block by block of heads.
    """

    @property
    def rounding(self) -> float:
        """The unit of rounding of the arithmetic behind `gram`."""
        ...

    @property
    def centre(self) -> np.ndarray | None:
        """What was taken from every row of Φ; known once `gram` was called."""
        ...

    def gram(self, extras: np.ndarray, *, both_triangles: bool) -> Any:
        """ΦΦᵀ + ZZᵀ (n, n), Z being the extras; perhaps only the triangle that ridge reads."""
        ...

    def values(self, dual: np.ndarray) -> np.ndarray:
        """v = Φᵀa (M·D, t) in float64."""
        ...


@runtime_checkable
class DescentSamples(Protocol):
    """Training samples of which every step of a descent takes some, and every check some."""

    @property
    def task(self) -> Task:
        """The samples, with the options of the layer that will be fitted to them."""
        ...

    @property
    def steps_on_device(self) -> bool:
        """Whether torch computes the steps.

        Helper threads prepare them then, and descents take turns.
        """
        ...

    def part(self, rows: np.ndarray, plan: LearningPlan, count: int) -> DescentPart:
        """Some samples, as step number ``count`` of a plan sees them."""
        ...

    def judge(
        self,
        distribution: HeadDistribution,
        seen: np.ndarray,
        *,
        n_heads: int,
        seed: int,
        heads: np.ndarray | None = None,
        unseen: np.ndarray | None = None,
        alpha: float | None = None,
    ) -> Judgement:
        """The errors of heads of a distribution, by a fit to the samples that are ``seen``.

        The fit is at a penalty if one is given, and predicts the ``unseen``. ``heads`` are those
        of the head distribution under the seed, if they are drawn already.
        """
        ...


@runtime_checkable
class DescentPart(Protocol):
    """The samples of one step."""

    def gradient_in_heads(
        self,
        means: np.ndarray,
        noise: np.ndarray,
        alpha: float,
        *,
        scales: bool = False,
        hops: Sequence[np.ndarray] = (),
    ) -> HeadGradient:
        """The leave-one-out error of heads means + noise, and its gradient."""
        ...


def backend_for(device: str | None) -> Backend:
    """The backend that computes on a device: None is NumPy, on the host.

    A backend offers the operations of `Backend`:

    - features, kernel: Φ of finitely many heads, K of infinitely many;
    - outputs, contributions, kernel_outputs: predictions Φ·v and their parts, and K·a;
    - products, kernel_gram, ridge, logistic: ΦΦᵀ and Φᵀa, or K, and ridge or logistic regression
      on them;
    - descent_samples: the gradient and the errors of a head distribution.

    There are two. `HostBackend` is numba and LAPACK on NumPy arrays. `DeviceBackend` is torch on
    any device of torch's, with fused triton kernels on CUDA where there are any
    (attention/dispatch.py). torch is imported only here, for a device.

    To add one, write a class with these operations in attention/, return it here for its devices,
    and add such a device to tests/units/test_backends.py, which compares every operation with the
    host's.
    """
    if device is None:
        from keyhole.attention.host_backend import HostBackend

        return HostBackend()
    from keyhole.attention.torch_backend import DeviceBackend

    return DeviceBackend(device)


def pick_device(device: Any, batch: SetBatch) -> str | None:
    """The device to compute on: None is NumPy, on the host.

    ``device=None`` is the device of the batch, "auto" the first GPU, if there is one.
    """
    if device is None:
        return batch.device
    from keyhole._tensors import check_device, gpu_or_none

    if device == "auto":
        return gpu_or_none()
    return str(check_device(device))


def device_to_learn_on(samples: SampleBatch) -> str | None:
    """Where a head distribution is learned: on the device that holds the samples, or on the host.

    A device learns from samples of one averaged set only.
    """
    if samples.is_plain:
        return samples.device
    return None
