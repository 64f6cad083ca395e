"""Statistics of what is encoded."""

import math
from typing import NamedTuple


class Norms(NamedTuple):
    """Statistics taken in the same pass as the encoding; equal at any number of threads."""

    sum_of_squares: float
    """Of Δ alone, without what earlier rounds failed to send, in float64; back ends agree to rounding."""
    max_abs: float
    """Of Δ alone, the same on every back end."""
    finite: bool
    """False when what was to be sent, Δ + decay · residual, had a NaN or infinity. The other two mean nothing then,
    and what was written is zeros."""

    @property
    def l2(self) -> float:
        """L2 norm of Δ."""
        return math.sqrt(self.sum_of_squares)
