"""Projects a study's winner to other cards and numbers of GPUs, when the study is summarized."""

from autotune.planning.more_gpus import project_gpu_counts
from autotune.planning.other_devices import estimate_other_devices
from autotune.study.selection import Selection
from autotune.study.summary import Projections, Recipe


def project_winner(selection: Selection, recipe: Recipe, headroom: float) -> Projections:
    """Return the winner's run on other cards and on other numbers of GPUs.

    `headroom` is the share of a card's memory that stays free.
    """
    return Projections(
        cards=estimate_other_devices(selection, recipe.winner, headroom),
        scaling=project_gpu_counts(recipe),
    )
