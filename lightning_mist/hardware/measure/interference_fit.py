"""Finding a machine's coefficients from a few measured times.

Coefficients ``a`` are those that a normal prior and the measurements ``t_i`` make most likely:

    minimise over 0 <= a <= 1:   sum_i rho((T_i(a) / t_i - 1) / NOISE) + sum_k ((a_k - prior_k) / PRIOR_SPREAD)^2

with ``T_i`` the model's time and ``rho`` SciPy's ``soft_l1``, which grows like a square up to about 1 and like a line
beyond, so that a disturbed measurement pulls no harder than a good one. A coefficient that nothing was measured of
keeps the prior's value. The prior is what machines of this kind do
(:mod:`lightning_mist.hardware.catalog.interference_kinds`).
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from lightning_mist.hardware.profile import CHANNELS, COEFFICIENTS, Interference, seconds_together, speed_table

NOISE = 0.05
"""Relative error that a time of the best coefficients has: 0.03 to 0.06 on three machines (the record
``interference``, rows of kind "own")."""

PRIOR_SPREAD = 0.24
"""How far a machine's coefficients lie from those of its kind: root mean square over three machines that the kind was
fitted without (the record, row of kind "prior_spread")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrentTimes:
    """Measured times of loads that ran together.

    Attributes:
        loads: Seconds that each load takes alone; channels (in the order of ``CHANNELS``) times measurements.
        seconds: Seconds until all of them were done, positive.
        across_nodes: Whether the network's group spanned several nodes.
    """

    loads: NDArray[np.float64]
    seconds: NDArray[np.float64]
    across_nodes: NDArray[np.bool_]

    def __post_init__(self) -> None:
        """Check the shapes."""
        count = len(self.seconds)
        if self.loads.shape != (len(CHANNELS), count) or self.across_nodes.shape != (count,):
            raise ValueError(
                f"loads of shape {self.loads.shape} and {self.across_nodes.shape[0]} groups for {count} times: "
                f"there is a row of loads for each of {len(CHANNELS)} channels, and a column for each time"
            )

    def pick(self, index: NDArray[np.integer] | NDArray[np.bool_]) -> "ConcurrentTimes":
        """Some of the measurements, by position or mask."""
        return ConcurrentTimes(
            loads=self.loads[:, index], seconds=self.seconds[index], across_nodes=self.across_nodes[index]
        )


def predicted_seconds(times: ConcurrentTimes, interference: Interference | None) -> NDArray[np.float64]:
    """What the model says that each of the measurements takes."""
    inside = seconds_together(times.loads, speed_table(interference, False))
    across = seconds_together(times.loads, speed_table(interference, True))
    return np.where(times.across_nodes, across, inside)


def relative_errors(times: ConcurrentTimes, interference: Interference | None) -> NDArray[np.float64]:
    """Predicted over measured times, less one."""
    errors: NDArray[np.float64] = predicted_seconds(times, interference) / times.seconds - 1.0
    return errors


def fit_interference(times: ConcurrentTimes, prior: Interference, source: str) -> Interference:
    """The machine's coefficients.

    Args:
        prior: What machines of its kind do.

    Returns:
        The coefficients; their spread is the mean relative error of the measured times, 0 if there are none.
    """
    start = vector_of(prior)

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        errors = relative_errors(times, of_vector(values, prior)) / NOISE
        # With rho the loss, soft_l1 of r is about |r| for large r: written out, as the prior's terms stay squares.
        robust = np.sign(errors) * np.sqrt(2.0 * (np.sqrt(1.0 + errors**2) - 1.0))
        return np.concatenate([robust, (values - start) / PRIOR_SPREAD])

    # Not on a bound, where the solver could not start.
    found = least_squares(residuals, np.clip(start, 0.02, 0.98), bounds=(0.0, 1.0))
    fitted = of_vector(found.x, replace(prior, source=source, spread=0.0))
    if not len(times.seconds):
        return fitted
    return replace(fitted, spread=float(np.abs(relative_errors(times, fitted)).mean()))


def vector_of(interference: Interference) -> NDArray[np.float64]:
    """The coefficients in the order of ``COEFFICIENTS``."""
    return np.array([getattr(interference, name) for name in COEFFICIENTS])


def of_vector(values: NDArray[np.float64], like: Interference) -> Interference:
    """The same machine with other coefficients; they are cut to [0, 1], which rounding may leave."""
    cut = {name: float(value) for name, value in zip(COEFFICIENTS, np.clip(values, 0.0, 1.0), strict=True)}
    return Interference(**cut, source=like.source, spread=like.spread)
