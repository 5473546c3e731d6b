"""How a training run is spread over GPUs. Today every run uses one."""

from dataclasses import dataclass

SHARDINGS = ("none",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The number of processes, one for each GPU, and what they share out: `none` gives each the whole model.

    Raises ValueError for what cannot run.
    """

    world_size: int = 1
    sharding: str = "none"

    def __post_init__(self) -> None:
        if isinstance(self.world_size, bool) or not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(f"world_size is a positive integer, not {self.world_size!r}")
        if self.sharding not in SHARDINGS:
            raise ValueError(f"sharding is one of {', '.join(SHARDINGS)}, not {self.sharding!r}")
