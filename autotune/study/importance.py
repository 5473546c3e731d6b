"""How much each knob mattered in a study, by PED-ANOVA."""

import warnings
from collections.abc import Iterable
from typing import Any

import optuna
from optuna.trial import FrozenTrial

ENOUGH_TRIALS = 20  # with a value


def importances(trials: Iterable[FrozenTrial]) -> dict[str, float]:
    """Of each knob that was varied, or nothing where there are too few trials to say.

    What was pruned as slow counts with its extrapolated value: Optuna alone looks at complete trials only. The rank is
    left out: it is held while sampling, so that it goes with what was good and not the other way round.
    """
    tried: dict[str, list[Any]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = optuna.create_study(direction="maximize")
        for trial in trials:
            values = [trial.value] if trial.value is not None else [*trial.intermediate_values.values()][-1:]
            for value in values:
                known.add_trial(
                    optuna.trial.create_trial(params=trial.params, distributions=trial.distributions, value=value)
                )
                for name, chosen in trial.params.items():
                    tried.setdefault(name, []).append(chosen)
        told = [name for name, all_ in tried.items() if len(all_) >= ENOUGH_TRIALS and len(set(all_)) > 1]
        return dict(optuna.importance.get_param_importances(known, params=[one for one in told if one != "lora_rank"]))
