"""Bayesian regressions with effects of persons, small enough to be fitted exactly.

Coefficients have Gaussian priors whose scales are shared by blocks of columns (plain effects,
bends, persons). The scales are those of the greatest evidence, found without gradients by Nelder
and Mead's method; the evidence of the logistic one is Laplace's approximation (MacKay 1992). So a
block that explains nothing gets a scale near 0 and costs nothing on held-out data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import scipy  # reads its parts when they are first used

# Points of the Gauss-Hermite rule that averages over what is not known.
_POINTS = 31
_STEPS = 50
_SCALES = (1e-3, 30.0)


@dataclasses.dataclass(frozen=True)
class Posterior:
    """Coefficients that are approximately Gaussian given the data."""

    # [columns] and [columns, columns].
    mean: np.ndarray
    covariance: np.ndarray
    # Prior scale of each block of columns.
    scales: tuple[float, ...]
    # Standard deviation of the noise of a linear regression; 1 for a logistic one, which has none.
    noise: float = 1.0

    def linear(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance [n] of rows [n, columns] times the coefficients."""
        return rows @ self.mean, np.einsum("nc,cd,nd->n", rows, self.covariance, rows)


def fit_logistic(rows: np.ndarray, labels: np.ndarray, blocks: Sequence[int]) -> Posterior:
    """A logistic regression.

    rows: [n, columns], the first column is the constant. labels: [n] of 0 and 1. blocks: [columns],
    the block of each column; -1 for the constant, whose prior is wide.
    """

    def solve(scales: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        precision = 1 / _spread(scales, blocks) ** 2
        mean = np.zeros(rows.shape[1])
        value = _log_joint(rows, labels, mean, precision)
        hessian = np.diag(precision)
        for _ in range(_STEPS):
            chances = scipy.special.expit(rows @ mean)
            gradient = rows.T @ (labels - chances) - precision * mean
            hessian = (rows.T * (chances * (1 - chances))) @ rows + np.diag(precision)
            step = np.linalg.solve(hessian, gradient)
            # the function is concave, but a whole Newton step may overshoot
            size = 1.0
            while (new := _log_joint(rows, labels, mean + size * step, precision)) < value - 1e-9:
                size /= 2
                if size < 1e-6:
                    break
            mean = mean + size * step
            if abs(new - value) < 1e-9:
                break
            value = new
        evidence = value + 0.5 * np.log(precision).sum() - 0.5 * np.linalg.slogdet(hessian)[1]
        return evidence, mean, np.linalg.inv(hessian)

    scales = _best_scales(lambda s: solve(s)[0], blocks)
    _, mean, covariance = solve(scales)
    return Posterior(mean, covariance, tuple(map(float, scales)))


def fit_linear(rows: np.ndarray, values: np.ndarray, blocks: Sequence[int]) -> Posterior:
    """A linear regression with Gaussian noise, arguments as ``fit_logistic``; values: [n]."""

    def solve(scales: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        noise = scales[-1]
        precision = 1 / _spread(scales[:-1], blocks) ** 2
        hessian = rows.T @ rows / noise**2 + np.diag(precision)
        mean = np.linalg.solve(hessian, rows.T @ values / noise**2)
        residual = ((values - rows @ mean) ** 2).sum() / noise**2
        evidence = -0.5 * (residual + (precision * mean**2).sum())
        evidence -= len(values) * np.log(noise)
        evidence += 0.5 * np.log(precision).sum() - 0.5 * np.linalg.slogdet(hessian)[1]
        return evidence, mean, np.linalg.inv(hessian)

    scales = _best_scales(lambda s: solve(s)[0], [*blocks, max(blocks) + 1])
    _, mean, covariance = solve(scales)
    return Posterior(mean, covariance, tuple(map(float, scales[:-1])), float(scales[-1]))


def mean_chance(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """The average of the logistic function over Gaussians: chances [n]."""
    points, weights = np.polynomial.hermite_e.hermegauss(_POINTS)
    at = mean[:, None] + np.sqrt(variance)[:, None] * points
    return scipy.special.expit(at) @ (weights / weights.sum())


def _spread(scales: np.ndarray, blocks: Sequence[int]) -> np.ndarray:
    """The prior scale of each column."""
    wide = np.append(scales, 10.0)  # block -1 is the constant
    return wide[np.asarray(blocks)]


def _log_joint(rows, labels, mean, precision) -> float:
    scores = rows @ mean
    chances = scipy.special.log_expit(np.where(labels > 0, scores, -scores))
    return float(chances.sum() - 0.5 * (precision * mean**2).sum())


def _best_scales(evidence: Callable[[np.ndarray], float], blocks: Sequence[int]) -> np.ndarray:
    """The scales of the greatest evidence, one a block."""
    count = max(blocks) + 1
    if not count:
        return np.zeros(0)
    low, high = np.log(_SCALES)
    found = scipy.optimize.minimize(
        lambda logs: -evidence(np.exp(np.clip(logs, low, high))),
        np.log(np.full(count, 0.5)),
        method="Nelder-Mead",
        options=dict(xatol=0.02, fatol=0.01, maxiter=200),
    )
    return np.exp(np.clip(found.x, low, high))
