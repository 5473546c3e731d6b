"""A made-up GPU that sets a memory limit and a price if a user tries out demo-3m on a CPU.

No such card is sold, so every place that shows its memory or price calls it an example.
"""

from dataclasses import dataclass

from autotune.catalog.devices import DeviceSpec
from autotune.catalog.models import ModelSpec
from autotune.catalog.prices import EXAMPLE, Price


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleCard:
    """The memory and the price of the card.

    `memory_gib` limits the sum of the tensors and the safety margin (headroom). The memory that
    torch and other libraries take does not count.
    """

    memory_gib: float
    usd_per_hour: float

    def price(self, device: str) -> Price:
        """Return the example card's price. `device` is the device that the study really uses."""
        return Price(
            provider=EXAMPLE,
            device=device,
            usd_per_hour=self.usd_per_hour,
            quotable=False,
            source="made up for demonstrations",
        )


# With demo-3m on two CPU cores, 8 rows of 256 tokens take 0.17 GiB without activation
# checkpointing. 16 rows take 0.34 GiB, more than the example card has.
_OF_MODELS = {"demo-3m": ExampleCard(memory_gib=0.3, usd_per_hour=0.60)}


def example_card(model: ModelSpec, device: DeviceSpec) -> ExampleCard | None:
    """Return the example card for a study of `model` on `device`, or None.

    Only the model demo-3m on a CPU has an example card.
    """
    return _OF_MODELS.get(model.name) if device.kind == "cpu" else None
