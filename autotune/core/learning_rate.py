"""Learning rates that others use, for who has no weights or examples to find one with (`autotune learn`).

They hold for any rank: adapters are scaled by a constant over the rank (`TrainConfig.lora_alpha`), with which the best
rate hardly depends on it (Schulman et al., LoRA Without Regret, 2025).
"""

from autotune.core.objective import Objective

# QLoRA (Dettmers et al., 2023, table 9) has half of the usual rate for 33B and 65B, at every rank.
LARGE = 20e9  # parameters
_USUAL = {"lora": 2e-4, "full": 1e-5}
# As in the heads of TRL 1.16's scripts. There KTO has one rate for both methods.
_BY_TRL = {
    (Objective.DPO, "lora"): 5e-6,
    (Objective.DPO, "full"): 5e-7,
    (Objective.KTO, "lora"): 5e-7,
    (Objective.KTO, "full"): 5e-7,
    (Objective.REWARD, "lora"): 1e-4,  # the default of its RewardConfig
}


def default_learning_rate(
    method: str, objective: Objective = Objective.SFT, params: int | None = None
) -> float:
    """The usual rate of a method, lora or full, for a model of so many parameters; None counts as few."""
    if (rate := _BY_TRL.get((objective, method))) is not None:
        return rate
    return _USUAL[method] / 2 if method == "lora" and (params or 0) >= LARGE else _USUAL[method]
