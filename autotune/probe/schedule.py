"""Plans the order of a probe's micro batches: short ones to warm up, then each kind in turn.

Micro batches of the same kind have rows of the same length.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.probe_types import ProbeRequest, Rung

# cuDNN's attention makes an execution plan for each new row length. To measure the cost of a plan,
# a probe times at most NEW_LENGTHS new lengths, and starts none after NEW_LENGTHS_S seconds.
NEW_LENGTHS, NEW_LENGTHS_S = 5, 6.0

Step = tuple[int, ...]  # one optimizer step: the index of the kind of each micro batch

# On a GPU, the first micro batch of a length takes up to this many seconds longer, because
# libraries load kernels.
FIRST_S = 0.01
# The first micro batch of the longest kind may take even longer, because the memory for its
# activations is allocated then. If the longest kind makes up more than this fraction of the micro
# batches, the warm-up steps contain a micro batch of the longest kind.
OFTEN = 0.05
# The first round (one pass over all kinds) is timed if loading kernels (FIRST_S) may lengthen its
# micro batches by at most this fraction: WHOLE_ERROR for a whole model, TRUNCATED_ERROR for a few
# layers. Extrapolation from a few layers has an error of 2 % anyway. The real fractions are
# smaller, because warm-up steps or earlier probes have loaded most kernels.
WHOLE_ERROR, TRUNCATED_ERROR = 0.01, 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps of a probe: first the steps of `lead`, then the steps of `round` repeatedly.

    The lead warms up the device and creates the optimizer state. It trains on the shortest kind of
    micro batch. If the longest kind is frequent or is not timed, the lead ends with the longest
    kind. In GRPO, TRL mixes the rows of a step, so that this step has the longest kind only. A
    round has each timed kind at least once. The longest micro batch of a step comes last, so that
    its peak includes the gradients of the other micro batches.

    `weights` has a weight for each micro batch of a round. The weights sum to 1, and the weighted
    mean over a round estimates the mean over the full run. `uneven` says whether the kinds of a
    round have different lengths. `lead_micros` and `round_micros` are the tokens of the lead and of
    a round, divided by the tokens of an average micro batch.

    The first round is timed if its micro batches take more than `long_s` seconds on average, even
    if no earlier micro batch had their length. The first round is never timed if attention must
    still make an execution plan for each length. An evaluation runs the kinds in `evaluation`:
    first the longest, to warm up, then each timed kind. If all timed kinds have the same length, at
    most two of them run.
    """

    lead: tuple[Step, ...]
    round: tuple[Step, ...]
    weights: tuple[float, ...]
    lead_micros: float
    round_micros: float
    evaluation: Step
    evaluation_micros: float
    uneven: bool
    long_s: float

    @classmethod
    def plan(cls, request: ProbeRequest, *, planned: bool = False) -> "Schedule":
        """The schedule of a request, with `micro_steps` micro batches in each step.

        `planned` is True if attention's execution plans for all lengths exist already, from an
        earlier probe of this process.
        """
        kinds, each = request.kinds, request.micro_steps
        timed = [index for index, kind in enumerate(kinds) if kind.share > 0]
        num_steps = math.ceil(len(timed) / each)

        # If the last step has room, the most frequent kinds fill it, because their times have the
        # largest weights.
        frequent = itertools.cycle(sorted(timed, key=lambda index: -kinds[index].share))
        slots = [*timed, *itertools.islice(frequent, num_steps * each - len(timed))]
        steps = [slots[begin : begin + each] for begin in range(0, len(slots), each)]
        rounds = tuple(tuple(sorted(step, key=lambda index: kinds[index].length)) for step in steps)

        longest = kinds.index(request.longest)
        lengths = {kinds[index].length for index in timed}
        total = sum(kinds[index].share for index in timed)

        if longest in timed and lengths == {kinds[longest].length}:
            lead: tuple[Step, ...] = rounds[:1]
        else:
            shortest = min(timed, key=lambda index: kinds[index].length)
            others = (shortest,) * (each - 1)
            lead = ((*others, longest if kinds[longest].share > OFTEN * total else shortest),)
            if longest not in timed:
                alone = (longest,) * each
                lead += (alone if request.objective.generates else (*others, longest),)

        evaluation = (longest, *(timed if len(lengths) > 1 else timed[:2]))
        count = Counter(slots)
        weights = tuple(
            kinds[index].share / total / count[index] for step in rounds for index in step
        )
        mean = sum(kinds[index].share * kinds[index].length for index in timed) / total
        long_s = FIRST_S / (WHOLE_ERROR if request.depth is None else TRUNCATED_ERROR)
        if request.plans_by_length and not planned:
            long_s = math.inf

        return cls(
            lead=lead,
            round=rounds,
            weights=weights,
            lead_micros=sum(kinds[index].length for step in lead for index in step) / mean,
            round_micros=sum(kinds[index].length for step in rounds for index in step) / mean,
            evaluation=evaluation,
            evaluation_micros=sum(kinds[index].length for index in evaluation) / mean,
            uneven=len(lengths) > 1,
            long_s=long_s,
        )

    def micro_batches(self, step: int) -> Step:
        """The micro batches of a step. Steps are counted from 0."""
        if step < len(self.lead):
            return self.lead[step]
        return self.round[(step - len(self.lead)) % len(self.round)]

    def finished_rounds(self, step: int) -> int:
        """The number of rounds that are complete after this step, or 0 if no round ends with it."""
        rounds, rest = divmod(step + 1 - len(self.lead), len(self.round))
        return 0 if rest else max(rounds, 0)

    def first_counts(self, micro_s: float) -> bool:
        """Whether to time a GPU's first round, whose micro batches take `micro_s` on average."""
        return not self.uneven or micro_s > self.long_s

    def rounds_to_time(self, request: ProbeRequest, step_s: float, min_timed_s: float) -> int:
        """The number of whole rounds that take `min_timed_s` at `step_s` seconds per step."""
        enough = max(min_timed_s / step_s, request.min_timed_micros / request.micro_steps, 1)
        rounds = math.ceil(min(math.ceil(enough), request.max_timed_steps) / len(self.round))
        # One round times each row length only once. Only a second round shows how much the host's
        # speed varies.
        return max(rounds, 2) if self.uneven and request.rung is Rung.CONFIRM else rounds

    @property
    def num_kinds(self) -> int:
        """The number of different kinds of micro batch that are timed."""
        return len({index for step in self.round for index in step})

    def mean(self, values: Sequence[float]) -> float:
        """Estimate the full run's mean from one value for each micro batch of a round."""
        return sum(weight * value for weight, value in zip(self.weights, values, strict=True))
