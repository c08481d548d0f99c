"""Least squares for the cost of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Quadratic:
    """y = a + b n + c n^2: what a request costs however short it is, what each token costs, and what attention adds."""

    a: float
    b: float
    c: float
    r_squared: float
    """Share of the variance that it explains; 1 is all."""

    def at(self, n: float) -> float:
        """The value for n."""
        return self.a + self.b * n + self.c * n * n

    @classmethod
    def fit(cls, n: Sequence[float], y: Sequence[float]) -> Quadratic | None:
        """None with fewer than three different n, which determine no parabola.

        Residuals count relative to y: times grow a hundredfold over the range, and so does their noise.
        """
        if len(set(n)) < 3:
            return None
        x, values = np.asarray(n, float), np.asarray(y, float)
        weights = 1.0 / np.maximum(values, 1e-12)
        # Scaled columns: n^2 would otherwise dwarf the others in the conditioning.
        scale = x.max()
        columns = np.stack([np.ones_like(x), x / scale, (x / scale) ** 2], axis=1)
        solution, *_ = np.linalg.lstsq(columns * weights[:, None], values * weights, rcond=None)
        a, b, c = float(solution[0]), float(solution[1] / scale), float(solution[2] / scale**2)
        spread = float(((values - values.mean()) ** 2).sum())
        left = float(((values - columns @ solution) ** 2).sum())
        return cls(a=a, b=b, c=c, r_squared=1.0 - left / spread if spread > 0 else 1.0)
