"""The example card for demo-3m on a processor: it gives a demonstration a memory limit and a cost.

No such card is sold, so every place that shows its memory or price calls it an example.
"""

from dataclasses import dataclass

from autotune.catalog.devices import DeviceSpec
from autotune.catalog.models import ModelSpec
from autotune.catalog.prices import EXAMPLE, Price


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleCard:
    """GiB for tensors and reserve, in addition to the libraries' memory, and USD per hour."""

    memory_gib: float
    usd_per_hour: float

    def price(self, device: str) -> Price:
        """Return its price, for the catalogue name of the device that represents it."""
        return Price(
            provider=EXAMPLE,
            device=device,
            usd_per_hour=self.usd_per_hour,
            quotable=False,
            source="made up for demonstrations",
        )


# On two processors, 8 rows of 256 tokens take 0.17 GiB without checkpointing, and 16 rows 0.34 GiB.
_OF_MODELS = {"demo-3m": ExampleCard(memory_gib=0.3, usd_per_hour=0.60)}


def example_card(model: ModelSpec, device: DeviceSpec) -> ExampleCard | None:
    """Return the example card that `device` represents with `model`.

    The result is None for a GPU, and for every published model.
    """
    return _OF_MODELS.get(model.name) if device.kind == "cpu" else None
