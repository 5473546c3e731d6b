"""SpeedTransfer: factors from `prediction.transfer` that convert a speed to another card."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTransfer:
    """The target card's speed divided by the source card's speed, for each kind of work.

    `products` is the factor for matrix products, and `bytes` is the factor for memory traffic.
    `attention` is the factor for attention, or None if it is the factor for products. `fp8` is the
    factor for matrix products in fp8, or None if one of the cards has no fp8. `host` is the factor
    for the hosts' speeds, or None if one of the hosts was not calibrated. `error` is the standard
    deviation of the logarithm of the converted speed. If a profile says how the device's time is
    divided between kinds of work, `profiled_error` replaces `error`. `basis` is the number of
    measurements on the target card that corrected the factors.
    """

    products: float
    bytes: float
    error: float
    attention: float | None = None
    fp8: float | None = None
    host: float | None = None
    profiled_error: float | None = None
    basis: int = 0

    def ratio(self, share: float) -> float:
        """Return (target speed) / (source speed).

        `share` is the share of the source's time that matrix products take.
        """
        return 1 / (share / self.products + (1 - share) / self.bytes)
