"""The first part of a search: change one knob of the best configuration at a time.

Knobs affect speed nearly independently, so coordinate search from the baseline finds most of the
gain in a few probes. Optuna's sampler continues from there and finds gains that need several
changes at once. Learning knobs, which affect the trained model, keep their values, with three
exceptions. The precision is changed, because it changes speed as much as any knob. Matrix products
in fp8 are tried if the user allows them. An optimizer that needs less memory is tried if a larger
micro batch fits only with it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from autotune.core.knobs import KNOBS, SELECTIVE
from autotune.core.probe_types import Outcome
from autotune.core.train_config import TrainConfig
from autotune.problem.search_space import Knob, SearchSpace
from autotune.study.distributed import COORDINATE_TRIALS, SharedTrials
from autotune.study.evaluator import Evaluation
from autotune.study.formula_seeds import formula_seeds
from autotune.study.neighbours import (
    COMPILED,
    compiled_variants,
    grouped_variants,
    leaner_optimizer,
)
from autotune.study.optimizer import Proposal
from autotune.study.selection import Selection
from autotune.study.summary import TrialRecord

# The order of the knobs in each pass of the search. Attention comes first, because attention
# kernels that do not store the score matrix leave room for larger micro batches. Compilation takes
# seconds for each configuration. It comes late, so that only configurations with the best values of
# the earlier knobs are compiled. Quantisation and `fp8_products`, which may turn on matrix products
# in fp8, come last, because such products are faster only in compiled layers.
ORDER = (
    "attention",
    "loss",
    "packing",
    "checkpointing",
    "micro_batch_size",
    "precision",
    "packed_attention",
    "kernels",
    "compile",
    "lora_kernels",
    "cuda_graphs",
    "quantize_experts",
    "quantization",
    "fp8_products",
)
# If the best configuration is CPU-bound, FEEDS_GPU comes before HUNGRY: a larger micro batch gives
# the GPU more work for each kernel, and less recomputation would only take its memory.
FEEDS_GPU, HUNGRY = "micro_batch_size", "checkpointing"
# A change of one of these knobs (a move) frees memory and leaves the arithmetic unchanged. A later
# move may use the freed memory. So the search accepts a move of these knobs unless it makes the
# configuration slower by more than MIN_GAIN.
MAKES_ROOM = ("loss",)
TOO_LARGE = (Outcome.OOM, Outcome.REFUSED)
MIN_GAIN = 0.01  # the search accepts a move if the relative gain in score exceeds this


@dataclass(slots=True)
class CoordinateSearch:
    """Coordinate search in one study, among the configurations for `num_gpus` GPUs.

    The limit on trials without an improvement ignores the trials of this search. A move is a change
    of one knob. It is accepted or rejected according to the speed that truncated models, which have
    only a few layers, predict. After each pass over the knobs, whole models are measured, the most
    promising first. Until then, `_waiting` holds the unfinished trials with their predicted scores.
    """

    trials: SharedTrials
    num_gpus: int
    # The outcome of each tried configuration, by the configuration's digest.
    _tried: dict[str, Outcome] = field(default_factory=dict)
    _waiting: list[tuple[float, Proposal]] = field(default_factory=list)
    _seeds: list[TrainConfig] = field(default_factory=list)  # the best configurations by formula

    def run(self) -> None:
        """Try the configurations that formulas predict to be fastest (seeds), then change knobs.

        The search ends after a pass over all knobs without an improvement.

        Compiling one candidate takes as long as evaluating several uncompiled candidates. If time
        is short, and no other process compiles the code of the candidates after the seeds, the
        search therefore starts with uncompiled configurations.
        """
        self._tried = {row.config.digest: row.outcome for row in self.trials.rows}
        self._carry_over()

        if self.trials.may_compile_seeds():
            self._try_seeds()
        else:
            self._try_without_compiling()

        while (best := self._best()) is not None and not self.trials.is_done():
            num_tried = len(self._tried)
            self._pass_over_knobs(best)
            self._end_waiting()
            if len(self._tried) == num_tried or self._best() is best:
                return

    def _best(self) -> TrialRecord | None:
        return self.trials.best(self.num_gpus)

    def _carry_over(self) -> None:
        """If this GPU count has no result, start from the best configuration of another GPU count.

        The sharding strategies are tried in order until one fits. The whole model is measured if
        time allows, so that this GPU count has its own measurement.
        """
        best = self.trials.best()
        space = self.trials.task.space
        for way in space.choices("sharding"):
            if best is None or self._best() is not None or self.trials.is_done():
                return
            for config in smaller_batches(
                space, replace(best.config, num_gpus=self.num_gpus, sharding=way)
            ):
                chosen = space.clip(config)
                known = space.config(chosen).digest in self._tried
                if not known and not self.trials.is_done() and self._try(chosen)[1] > 0:
                    break  # it fits
            self._end_waiting()

    def _try_without_compiling(self) -> None:
        """Try uncompiled configurations: seeds, then variants of the best configuration.

        The variants first differ from the best configuration in one knob, then in several knobs.
        Stop when only the time to compile the best configuration is left, or as soon as the best
        configuration is one that was compiled in advance.
        """
        trials = self.trials
        self._try_seeds(compile="none")
        best = self._best()
        if best is None or best.config.compile == COMPILED or self._try_compiled_ahead():
            return

        self._pass_over_knobs(best, leave_out="compile")
        self._end_waiting(whole=False)
        best = self._best() or best
        if best.config.compile == COMPILED:
            return

        pinned = {
            knob.name: getattr(best.config, knob.name)
            for knob in trials.task.space.knobs
            if knob.kind == "learning" or knob.name == "num_gpus"
        }

        while trials.num_missing() > 2 and not trials.is_done():
            chosen = trials.pick_untried(
                keep_s=2 * trials.compiled_s(), **pinned | {"compile": "none"}
            )
            if chosen is None:
                break
            self._try(chosen)
            if self._try_compiled_ahead():
                break

    def _try_compiled_ahead(self) -> bool:
        """Try the seeds and the best configuration with compiled layers, if their code is compiled.

        Returns whether the best configuration now has compiled layers.
        """
        self._end_waiting(whole=False)
        trials = self.trials
        best = self._best()
        space = trials.task.space
        for config in compiled_variants(space, [*self._seeds, *([best.config] if best else [])]):
            if (
                config.digest not in self._tried
                and trials.is_compiled(config)
                and not trials.is_done()
            ):
                self._try(space.clip(config))
                self._end_waiting(whole=False)

        best = self._best()
        return best is not None and best.config.compile == COMPILED

    def _try_seeds(self, **changes: Any) -> None:
        """Try the configurations that formulas predict to be the fastest (seeds).

        `changes` replaces values of their knobs. If `changes` is given, only truncated models are
        measured, and the seeds end as soon as the best configuration is one that was compiled in
        advance.
        """
        best = self._best()
        task = self.trials.task
        if best:
            self._seeds = list(formula_seeds(task, best.config, best.limit_gib or 0.0))
        for config in self._seeds:
            if changes and self._try_compiled_ahead():
                return
            self._try_changed(config, **changes)
        if best and not self._seeds:
            self._seeds = self._try_grouped(**changes)
        self._end_waiting(whole=not changes)

    def _try_grouped(self, **changes: Any) -> list[TrainConfig]:
        """Try grouped products of a mixture's experts, with large micro batches first.

        Stop at the first configuration that fits, and return it as the only seed. No formula knows
        mixtures. Their adapters take much memory, so a micro batch that does not fit is tried with
        a leaner optimizer before a smaller micro batch is tried.
        """
        task = self.trials.task
        for config in grouped_variants(task.space, task.baselines):
            for variant in (config, *leaner_optimizer(task.space, config)):
                if self._try_changed(variant, **changes):
                    return [variant]
        return []

    def _try_changed(self, config: TrainConfig, **changes: Any) -> bool:
        """Try a configuration with these knob values, unless it was tried; return if it fits."""
        space = self.trials.task.space
        chosen = space.clip(replace(config, **changes))
        outcome = self._tried.get(space.config(chosen).digest)
        if outcome is not None or self.trials.is_done():
            return outcome is Outcome.OK
        return self._try(chosen)[1] > 0

    def _pass_over_knobs(self, best: TrialRecord, *, leave_out: str = "") -> None:
        """Change each knob in turn, except `leave_out`, and keep changes that improve the score.

        If `leave_out` is "compile", stop as soon as the best configuration is one that was compiled
        in advance.
        """
        space = self.trials.task.space
        current = best.config
        best_score = self.trials.score(best)

        if leave_out == "compile" and not set(space.choices("checkpointing")) <= set(SELECTIVE):
            # Selective checkpointing also needs compilation, so its values are left out, too.
            space, _ = space.narrow("checkpointing", lambda value: value not in SELECTIVE, "")

        for name in order_of_moves(self.trials.selection, best.config):
            if name == leave_out:
                continue
            factor = 1 - MIN_GAIN if name in MAKES_ROOM else 1 + MIN_GAIN
            while not self.trials.is_done():
                chosen = next_move(space, current, name, self._tried)
                if chosen is None:
                    break

                self.trials.moving = name, current
                config, score = self._try(chosen)
                if score > best_score * factor:
                    current = config
                    best_score = score
                if leave_out == "compile" and self._try_compiled_ahead():
                    self.trials.moving = None
                    return
        self.trials.moving = None

    def _try(self, chosen: dict[str, Any]) -> tuple[TrainConfig, float]:
        """Try one choice on truncated models; return its configuration and score.

        If the truncated models do not decide the trial, the trial waits for a probe of the whole
        model.
        """
        trials = self.trials
        proposal = trials.ask(chosen)
        if proposal is None:  # another worker is trying it
            config = trials.task.space.config(chosen)
            self._tried[config.digest] = Outcome.OK
            return config, 0.0

        trials.exempt.add(proposal.number)
        trials.optimizer.remember(COORDINATE_TRIALS, sorted(trials.exempt))
        config = proposal.config
        trials.on_begin(proposal.number, config)

        judgement = trials.evaluator.evaluate_low_fidelity(config, proposal.number)
        if judgement is None:  # the truncated models predict nothing
            judgement = trials.evaluator.evaluate(config, proposal.number)

        if isinstance(judgement, Evaluation):
            row = trials.record(proposal, judgement)
            self._tried[config.digest] = row.outcome
            return config, trials.score(row)

        predicted = trials.selection.predicted_speed(config, judgement)
        score = trials.task.score(config, predicted)
        self._tried[config.digest] = Outcome.OK
        self._waiting.append((score, proposal))
        trials.say(f"predicted {predicted:,.0f} tokens/s: {config.label()}")
        return config, score

    def _end_waiting(self, *, whole: bool = True) -> None:
        """End the waiting trials, the most promising first.

        If a trial can still win, its whole model is measured. If `whole` is False, or if a probe of
        the whole model would take too much time, the trial ends with its predicted speed instead.
        """
        waiting = sorted(self._waiting, key=lambda entry: entry[0], reverse=True)
        self._waiting = []
        for _, proposal in waiting:
            self.trials.evaluate(proposal, self.trials.selection.prune_reason, whole=whole)


def order_of_moves(selection: Selection, config: TrainConfig) -> tuple[str, ...]:
    """Return the knobs in the order in which coordinate search changes them."""
    if not selection.is_host_bound(config):
        return ORDER
    others = [name for name in ORDER if name != FEEDS_GPU]
    place = others.index(HUNGRY)
    return (*others[:place], FEEDS_GPU, *others[place:])


def next_move(
    space: SearchSpace, current: TrainConfig, name: str, tried: Mapping[str, Outcome]
) -> dict[str, Any] | None:
    """Return `current` with the next value of knob `name` to try, or None if no value is left.

    The result maps knobs to values. `tried` maps the digest of each tried configuration to its
    outcome.
    """
    knob = space.knob(name)
    for value in _faster_values(knob, current) if knob else ():
        moved = replace(current, **{name: value})
        # Some values fit only if another knob also changes. Packing or less recomputation may need
        # a smaller micro batch, and may be faster nevertheless. A larger micro batch may need an
        # optimizer with less state.
        shrinks = name in ("checkpointing", "packing")
        variants = smaller_batches(space, moved) if shrinks else iter([moved])
        if name == "micro_batch_size" and value > current.micro_batch_size:
            variants = chain(variants, leaner_optimizer(space, moved))
        fits = False
        for config in variants:
            chosen = space.clip(config)
            if getattr(space.config(chosen), name) != value or (
                not shrinks and space.config(chosen) != config
            ):
                # Given the values of the other knobs, this value has no effect, or it would need a
                # change of another knob, too.
                continue

            outcome = tried.get(space.config(chosen).digest)
            if outcome is None:
                return chosen
            if outcome not in TOO_LARGE:
                fits = True
                break
        if not fits:
            continue
        # The configuration with this value was tried and fits. For most knobs, the remaining values
        # are slower, so the search of this knob ends here. There are two exceptions. First, both a
        # larger and a smaller micro batch may be faster. Second, if less recomputation needed a
        # smaller micro batch, it may be faster to recompute a few more layers.
        if name != "micro_batch_size" and not (name == "checkpointing" and config != moved):
            return None
    return None


def _faster_values(knob: Knob, current: TrainConfig) -> list[Any]:
    """Return the knob's values that may be faster than its present value, the best guess first."""
    present = getattr(current, knob.name)
    values = knob.choices()
    if knob.name == "micro_batch_size":
        larger = sorted(value for value in values if value > present)
        smaller = sorted(value for value in values if value < present)
        return [*larger[:1], *smaller[-1:]]
    if knob.name == "quantization" and present != "none":
        # Another quantisation changes the base weights, so it would lead to another training
        # result.
        return []
    speed_rank = KNOBS[knob.name].speed_rank
    return sorted(
        (value for value in values if speed_rank(value) < speed_rank(present)), key=speed_rank
    )


def smaller_batches(space: SearchSpace, config: TrainConfig) -> Iterator[TrainConfig]:
    """Yield this configuration, and then copies of it with smaller and smaller micro batches."""
    yield config
    knob = space.knob("micro_batch_size")
    for size in sorted(knob.choices() if knob else (), reverse=True):
        if size < config.micro_batch_size:
            yield replace(config, micro_batch_size=size)
