"""Which kind of micro batch each step of a probe trains on: first the longest, then all kinds in turn."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.probe_types import ProbeRequest

Step = tuple[int, ...]  # for each micro batch of an optimizer step the index of its kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps of a probe: those of `lead`, then those of `round` over and over.

    The lead has the longest micro batch at the end of a step, where the gradients of others are alive. A round has each
    kind that is timed at least once; in the order of a round, `weights` are what a micro batch counts in the mean over
    the run. They sum to 1. `uneven` is whether the kinds of a round have different lengths.
    """

    lead: tuple[Step, ...]
    round: tuple[Step, ...]
    weights: tuple[float, ...]
    uneven: bool

    @classmethod
    def of(cls, request: ProbeRequest) -> "Schedule":
        """The schedule of a request, whose steps have `micro_steps` micro batches."""
        kinds, each = request.kinds, request.micro_steps
        timed = [index for index, kind in enumerate(kinds) if kind.share > 0]
        num_steps = math.ceil(len(timed) / each)
        slots = [timed[index % len(timed)] for index in range(num_steps * each)]
        steps = [slots[begin : begin + each] for begin in range(0, len(slots), each)]
        rounds = tuple(tuple(sorted(step, key=lambda index: kinds[index].length)) for step in steps)
        longest = kinds.index(request.longest)
        lengths = {kinds[index].length for index in timed}
        if lengths == {kinds[longest].length}:
            lead: tuple[Step, ...] = rounds[:1]
        else:
            # The first step has no optimizer state: a longest batch that the rounds lack is trained on once more.
            first = (*rounds[0][: each - 1], longest)
            lead = (first,) if longest in timed else (first, first)
        count = Counter(slots)
        total = sum(kinds[index].share for index in timed)
        weights = tuple(kinds[index].share / total / count[index] for step in rounds for index in step)
        return cls(lead=lead, round=rounds, weights=weights, uneven=len(lengths) > 1)

    def at(self, step: int) -> Step:
        """The micro batches of a step, counted from 0."""
        if step < len(self.lead):
            return self.lead[step]
        return self.round[(step - len(self.lead)) % len(self.round)]

    def in_rounds(self, step: int) -> int:
        """How many whole rounds end with this step; 0 in the lead and inside a round."""
        rounds, rest = divmod(step + 1 - len(self.lead), len(self.round))
        return 0 if rest else max(rounds, 0)

    @property
    def num_kinds(self) -> int:
        """The number of kinds that are timed."""
        return len({index for step in self.round for index in step})

    def mean(self, values: Sequence[float]) -> float:
        """The mean over the run, from a value for each micro batch of a round."""
        return sum(weight * value for weight, value in zip(self.weights, values, strict=True))
