"""Measure the best configurations again at the end of a study, until the winner is certain.

Each measurement takes longer than a measurement of the search. The configurations are measured in
rounds: each round measures every configuration once, so that a slow drift of the machine's speed
affects all of them equally.
"""

from autotune.core.errors import Cancelled
from autotune.core.train_config import TrainConfig
from autotune.problem.performance import DISAGREEMENT
from autotune.study.distributed import SharedTrials
from autotune.study.numerics import REFERENCE

AGAIN = "measuring the finalists again"
# After this number of confirmations, a configuration is not measured again only because its
# measurements disagree, or because other processes disturbed them.
MAX_CONFIRMATIONS = 3


def confirm_finalists(trials: SharedTrials) -> None:
    """Measure the finalists and the baseline again; later rounds measure only possible winners.

    The likely winner and the baseline come first, because the budget may be used up before the
    other finalists are measured. A measurement that would not fit into the remaining time is
    skipped. If the likely winner fails, or if the speed that the search measured for an unconfirmed
    configuration exceeds the confirmed speeds, this other configuration becomes the likely winner
    and is measured next. At most `limits.finalists` configurations become the likely winner, one
    after another. A finalist that fails is replaced by the next best configuration. A full run also
    evaluates and saves checkpoints, so the winner's confirmation also evaluates and saves a
    checkpoint if time allows.
    """
    entries = trials.selection.finalists(trials.limits.finalists)
    likely = entries[:1]
    baseline = trials.selection.baseline()
    if baseline is not None and baseline not in likely:
        entries = [*likely, baseline, *(config for config in entries[1:] if config != baseline)]

    for round_ in range(1, trials.limits.rounds + 1):
        if not _run_round(trials, round_, entries, likely):
            return

    num_rounds = _settle_disagreements(trials, entries)
    _confirm_leader(trials, num_rounds)


def _run_round(
    trials: SharedTrials, round_: int, entries: list[TrainConfig], likely: list[TrainConfig]
) -> bool:
    """Measure each configuration in `entries` once; return False if the round was interrupted.

    After the first round, only configurations that may still win are measured. If a configuration
    fails, another configuration takes its place in `entries`. `likely` collects the configurations
    that became likely winners.
    """
    rounds = trials.limits.rounds
    waiting = [config for config in entries if round_ == 1 or trials.selection.may_win(config)]

    while waiting:
        config = waiting.pop(0)
        if not (trials.can_end(config) if config in likely else trials.affords(config)):
            trials.record_omission(
                "measuring the baseline with all layers"
                if config == trials.selection.baseline()
                else AGAIN
            )
            continue

        whole = round_ == rounds or config in likely
        confirmed = _confirm(trials, config, f"round {round_} of {rounds}", round_, whole=whole)
        if confirmed is None:
            return False

        if not confirmed:
            entries.remove(config)
            smaller = _smaller_baseline(trials, config)
            finalists = trials.selection.finalists(len(entries) + 1)
            next_best = [finalist for finalist in finalists if finalist not in entries][:1]
            entries += smaller or next_best
            waiting += smaller or next_best

        rival = trials.selection.rival()
        if rival is not None and len(likely) < trials.limits.finalists:
            entries += [rival] * (rival not in entries)
            likely.append(rival)
            waiting = [rival, *(other for other in waiting if other != rival)]
    return True


def _smaller_baseline(trials: SharedTrials, failed: TrainConfig) -> list[TrainConfig]:
    """Return the baseline with the next smaller micro batch that works, as a list.

    A baseline that was probed with only a few layers may fail with all layers. Returns an empty
    list if `failed` is not a baseline, if another baseline has a result, or if no smaller baseline
    works.
    """
    baselines = trials.task.baselines
    if failed not in baselines or trials.selection.baseline() is not None:
        return []

    for smaller in baselines[baselines.index(failed) + 1 :]:
        try:
            trials.selection.add_result(
                trials.evaluator.evaluate(smaller, None, spare_s=0.0).result
            )
        except Cancelled:
            break
        if trials.selection.baseline() is not None:
            return [smaller]
    return []


def _settle_disagreements(trials: SharedTrials, entries: list[TrainConfig]) -> int:
    """Measure each entry again while its measurements disagree, up to MAX_CONFIRMATIONS times.

    Returns the number of the last round.
    """
    round_ = trials.limits.rounds
    selection = trials.selection
    for config in entries:
        while (
            selection.disagreement(config) > DISAGREEMENT
            and selection.record(config).num_confirmations < MAX_CONFIRMATIONS
        ):
            round_ += 1
            if not _confirm(trials, config, "once more, since measurements disagree", round_):
                break
    return round_


def _confirm_leader(trials: SharedTrials, round_: int) -> None:
    """Measure the leader until it has enough confirmations, one of them with a saved checkpoint.

    The leader is the best configuration so far; it may change after each measurement. Two
    undisturbed confirmations, or MAX_CONFIRMATIONS, are enough.
    """
    while (leader := trials.selection.leader()) is not None:
        record = trials.selection.record(leader)
        enough = (
            len(record.confirmed) >= min(trials.limits.rounds, 2)
            or record.num_confirmations >= MAX_CONFIRMATIONS
        )
        if enough and leader in trials.evaluator.saved:
            return

        round_ += 1
        again = "once more, " if record.confirmed else ""
        if _confirm(trials, leader, f"{again}since it leads", round_, whole=True) is None:
            return


def _confirm(
    trials: SharedTrials, config: TrainConfig, why: str, round_: int, *, whole: bool = False
) -> bool | None:
    """Measure a configuration again and return whether it succeeded.

    Returns None if the user or the budget stopped the measurement.
    """
    selection = trials.selection
    confirmed = selection.record(config).confirmed

    if not (trials.affords(config) if confirmed else trials.can_end(config)):
        trials.record_omission(AGAIN)
        return None

    try:
        if not (trials.has_ended() or confirmed or _is_sound(trials, config)):
            return False
        if not trials.has_ended():
            trials.say(f"confirming, {why}: {config.label()}")
            micro_steps = trials.confirmed_micro_steps(config)
            return selection.add_confirmation(
                trials.evaluator.confirm(config, micro_steps, round_, whole=whole)
            )
    except Cancelled:
        pass

    trials.record_omission(AGAIN)
    return None


def _is_sound(trials: SharedTrials, config: TrainConfig) -> bool:
    """Whether a configuration's training losses agree with the losses of its reference.

    The reference is the same configuration in a trusted number format. If the weights are random,
    or if no time is left to measure the reference, the configuration is assumed to be sound.
    """
    selection = trials.selection
    reference = selection.missing_reference(config)
    if reference is not None and not trials.has_ended():
        trials.say(f"comparing the losses of {config.label()} with {REFERENCE}")
        selection.references[reference.digest] = trials.evaluator.reference(reference)

    reason = selection.distrust_reason(config)
    return reason is None or selection.add_confirmation(trials.evaluator.reject(config, reason))


def measure_close_calls(trials: SharedTrials) -> None:
    """Measure the whole model for each configuration whose extrapolated speed is close to the best.

    Stops when the time of the search is used up.
    """
    measured = set[TrainConfig]()
    while left := [config for config in trials.selection.close_calls() if config not in measured]:
        if trials.has_ended() or trials.is_spent():
            return

        measured.add(left[0])
        if not trials.evaluator.fits_into(trials.search_s(), left[0]):
            continue

        trials.say(f"measuring the whole model, close to the best: {left[0].label()}")
        try:
            trials.selection.add_result(trials.evaluator.evaluate(left[0], None).result)
        except Cancelled:
            return
