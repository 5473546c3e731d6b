"""How the speed of one card converts to another: the value that a study keeps. `prediction.transfer` computes it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTransfer:
    """How many times as fast the target multiplies and moves bytes as the source.

    `fp8` is the same of products in 8 bits, None where one of the cards has none, and `host` of the hosts, None unless
    both were calibrated. `error` is the standard deviation of the logarithm of the device's speed, and `profiled_error`
    the same where a profile tells what the device does. `basis` counts the measurements on the target that it rests on.
    """

    products: float
    bytes: float
    error: float
    fp8: float | None = None
    host: float | None = None
    profiled_error: float | None = None
    basis: int = 0

    def ratio(self, share: float) -> float:
        """The speed of the target over that of the source, for work of which this share of its time is in products."""
        return 1 / (share / self.products + (1 - share) / self.bytes)
