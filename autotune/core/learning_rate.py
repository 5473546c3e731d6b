"""Usual learning rates, for users who lack the weights or examples that `autotune learn` needs.

The learning rates apply to any LoRA rank. The output of an adapter is multiplied by a constant
divided by the rank (`TrainConfig.lora_alpha`). The best learning rate then hardly depends on the
rank (Schulman et al., LoRA Without Regret, 2025).
"""

from autotune.core.objective import Objective

# For models above this size, the learning rate is halved. QLoRA (Dettmers et al., 2023, table 9)
# halves the learning rate for 33B and 65B, at every rank.
LARGE = 20e9  # parameters
_USUAL = {"lora": 2e-4, "full": 1e-5}
# The learning rates for the demo model (demo-3m) with its trained weights. In 50 steps of 4 short
# examples, adapters with the usual learning rate changed no answer; with this learning rate, they
# learned the answer.
OF_DEMO = {"lora": 5e-3, "full": 1e-3}
# From the example commands in TRL 1.16's scripts. The script for KTO uses one rate for both
# methods.
_BY_TRL = {
    (Objective.DPO, "lora"): 5e-6,
    (Objective.DPO, "full"): 5e-7,
    (Objective.KTO, "lora"): 5e-7,
    (Objective.KTO, "full"): 5e-7,
    (Objective.REWARD, "lora"): 1e-4,  # the default of TRL's RewardConfig
}


def default_learning_rate(
    method: str, objective: Objective = Objective.SFT, params: int | None = None
) -> float:
    """Return the usual learning rate of a method, lora or full, for `params` model parameters."""
    if (rate := _BY_TRL.get((objective, method))) is not None:
        return rate
    if method == "lora" and (params or 0) >= LARGE:
        return _USUAL[method] / 2
    return _USUAL[method]
