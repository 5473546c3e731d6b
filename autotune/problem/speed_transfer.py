"""SpeedTransfer: the factors that convert a speed to another card, computed by `transfer`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTransfer:
    """The speed of the target relative to the source, for matrix products and for moving bytes.

    `fp8` is the factor of 8-bit products, or None if a card has no fp8. `host` is the factor of the
    hosts, or None unless both were calibrated. `error` is the standard deviation of the logarithm
    of the device's speed, and `profiled_error` is its value if a profile shows the device's work.
    `basis` is the number of measurements on the target behind the factors.
    """

    products: float
    bytes: float
    error: float
    fp8: float | None = None
    host: float | None = None
    profiled_error: float | None = None
    basis: int = 0

    def ratio(self, share: float) -> float:
        """Return the target's speed over the source's, if products take `share` of the time."""
        return 1 / (share / self.products + (1 - share) / self.bytes)
