"""The objective of a training run.

The objective determines the model's head, the number of rows per example, and the training loop.
"""

from enum import StrEnum

# Objectives that users ask for but autotune does not support, each with the reason.
NOT_OFFERED = {
    "ppo": "it generates answers during training, which no probe does",
    "rloo": "it generates answers during training, which no probe does",
    "embedding": "it compares each text with all other texts of a batch, which no probe does",
    "embeddings": "it compares each text with all other texts of a batch, which no probe does",
}


class Objective(StrEnum):
    """The goal of a training run.

    Each objective is probed with its usual trainer by default: transformers' Trainer for SFT and
    classification, and TRL's trainers for the other objectives.
    """

    SFT = "sft"  # the model learns to predict the next token
    # The examples are pairs of a chosen and a rejected answer. The loss compares the trained model
    # with the untrained model.
    DPO = "dpo"
    # The examples are answers that are wanted or unwanted. The loss compares the trained model with
    # the untrained model.
    KTO = "kto"
    # The examples are pairs as in DPO; the model learns to give the chosen answer the higher score.
    REWARD = "reward"
    CLASSIFICATION = "classification"  # the examples are texts with a label
    # The examples are prompts. The model generates several answers to each prompt, and a function
    # scores them. `run` measures the phases of such a step, `plan` and `check` estimate memory.
    GRPO = "grpo"

    @property
    def trainers(self) -> tuple[str, ...]:
        """The trainers that support this objective, the usual trainer first."""
        if self is Objective.SFT:
            return ("transformers", "trl")
        return ("transformers",) if self is Objective.CLASSIFICATION else ("trl",)

    @property
    def generates(self) -> bool:
        """Whether the model generates the answers that it is trained on."""
        return self is Objective.GRPO

    @property
    def rows_per_example(self) -> int:
        """The number of rows for each example in a micro batch."""
        return 2 if self in (Objective.DPO, Objective.REWARD) else 1

    @property
    def num_labels(self) -> int | None:
        """The number of values that the head computes for a row.

        The number is None if the head computes a value for each token of the vocabulary.
        Classification is always probed with 2 labels, because the size of a classification head is
        negligible.
        """
        return {Objective.REWARD: 1, Objective.CLASSIFICATION: 2}.get(self)

    @property
    def has_reference(self) -> bool:
        """Whether each step also runs the untrained model (the reference model) on its examples.

        In full fine-tuning, the untrained model is a copy; with LoRA, it is the model without its
        adapters.
        """
        return self in (Objective.DPO, Objective.KTO)

    @property
    def passes(self) -> tuple[int, int]:
        """The numbers of forward passes without gradients in a micro batch, by model.

        The first number is for the trained model, the second for the untrained model.

        KTO also runs the trained and the untrained model on answers that belong to other prompts.
        """
        return {Objective.DPO: (0, 1), Objective.KTO: (1, 2)}.get(self, (0, 0))
