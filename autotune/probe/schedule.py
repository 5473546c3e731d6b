"""Which kind of micro batch each step of a probe trains on: first a short one, then all kinds in turn."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.probe_types import ProbeRequest, Rung

# Where attention plans for each new length, a few such lengths show for how long: so many, fewer after these seconds.
NEW_LENGTHS, NEW_LENGTHS_S = 5, 6.0

Step = tuple[int, ...]  # for each micro batch of an optimizer step the index of its kind

# The first micro batch of a length takes up to this much longer on a GPU: libraries load kernels.
FIRST_S = 0.01
# The first of the longest may take more, since the memory of its activations is mapped then. The lead has one if more
# than this share of the micro batches are as long.
OFTEN = 0.05
# By this share the mean of a first round that counts may be too long for that: for a whole model, and for a few layers,
# whose times have an error of 2 % anyway. It is a bound: most kernels are there from the lead or from earlier probes.
WHOLE_ERROR, TRUNCATED_ERROR = 0.01, 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps of a probe: those of `lead`, then those of `round` over and over.

    The lead makes the optimizer state, with the shortest micro batch, and the longest if that is frequent. A round
    has each timed kind at least once. In each step the longest comes last, where the gradients of others are alive; a
    longest kind that is not timed ends the lead. In the order of a round, `weights` are what a micro batch counts in
    the mean over the run. They sum to 1. `uneven` is whether the kinds of a round have different lengths. By its
    tokens, the lead is as long as `lead_micros` average micro batches, and a round as `round_micros`. A first round
    whose micro batches take over `long_s` on average counts, although they may be the first of their length; it never
    does where attention has still to plan for each length. An evaluation passes over `evaluated`: the longest, which
    warms up, and each timed kind, or two of equal length.
    """

    lead: tuple[Step, ...]
    round: tuple[Step, ...]
    weights: tuple[float, ...]
    lead_micros: float
    round_micros: float
    evaluated: Step
    evaluated_micros: float
    uneven: bool
    long_s: float

    @classmethod
    def of(cls, request: ProbeRequest, *, planned: bool = False) -> "Schedule":
        """The schedule of a request, whose steps have `micro_steps` micro batches.

        `planned` says that attention which plans for each length has done so, in an earlier probe of the process.
        """
        kinds, each = request.kinds, request.micro_steps
        timed = [index for index, kind in enumerate(kinds) if kind.share > 0]
        num_steps = math.ceil(len(timed) / each)
        # What is left of the last step goes to the most frequent kinds, whose times count most.
        frequent = itertools.cycle(sorted(timed, key=lambda index: -kinds[index].share))
        slots = [*timed, *itertools.islice(frequent, num_steps * each - len(timed))]
        steps = [slots[begin : begin + each] for begin in range(0, len(slots), each)]
        rounds = tuple(tuple(sorted(step, key=lambda index: kinds[index].length)) for step in steps)
        longest = kinds.index(request.longest)
        lengths = {kinds[index].length for index in timed}
        total = sum(kinds[index].share for index in timed)
        if lengths == {kinds[longest].length}:
            lead: tuple[Step, ...] = rounds[:1]
        else:
            shortest = min(timed, key=lambda index: kinds[index].length)
            others = (shortest,) * (each - 1)
            lead = ((*others, longest if kinds[longest].share > OFTEN * total else shortest),)
            if longest not in timed:
                lead += ((*others, longest),)
        evaluated = (longest, *(timed if len(lengths) > 1 else timed[:2]))
        count = Counter(slots)
        weights = tuple(
            kinds[index].share / total / count[index] for step in rounds for index in step
        )
        mean = sum(kinds[index].share * kinds[index].length for index in timed) / total
        return cls(
            lead=lead,
            round=rounds,
            weights=weights,
            lead_micros=sum(kinds[index].length for step in lead for index in step) / mean,
            round_micros=sum(kinds[index].length for step in rounds for index in step) / mean,
            evaluated=evaluated,
            evaluated_micros=sum(kinds[index].length for index in evaluated) / mean,
            uneven=len(lengths) > 1,
            long_s=math.inf
            if request.plans_by_length and not planned
            else FIRST_S / (WHOLE_ERROR if request.depth is None else TRUNCATED_ERROR),
        )

    def at(self, step: int) -> Step:
        """The micro batches of a step, counted from 0."""
        if step < len(self.lead):
            return self.lead[step]
        return self.round[(step - len(self.lead)) % len(self.round)]

    def in_rounds(self, step: int) -> int:
        """How many whole rounds end with this step; 0 in the lead and inside a round."""
        rounds, rest = divmod(step + 1 - len(self.lead), len(self.round))
        return 0 if rest else max(rounds, 0)

    def first_counts(self, micro_s: float) -> bool:
        """Whether the first round is timed on a GPU where its micro batches take `micro_s` seconds on average."""
        return not self.uneven or micro_s > self.long_s

    def rounds_to_time(self, request: ProbeRequest, step_s: float, min_timed_s: float) -> int:
        """The number of whole rounds to time for `min_timed_s`, where a step takes `step_s` seconds on average."""
        enough = max(min_timed_s / step_s, request.min_timed_micros / request.micro_steps, 1)
        rounds = math.ceil(min(math.ceil(enough), request.max_timed_steps) / len(self.round))
        # In one round each length is timed once: only a second one shows by how much the host's pace varies.
        return max(rounds, 2) if self.uneven and request.rung is Rung.CONFIRM else rounds

    @property
    def num_kinds(self) -> int:
        """The number of kinds that are timed."""
        return len({index for step in self.round for index in step})

    def mean(self, values: Sequence[float]) -> float:
        """The mean over the run, from a value for each micro batch of a round."""
        return sum(weight * value for weight, value in zip(self.weights, values, strict=True))
