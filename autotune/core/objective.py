"""The objective of a training run.

It determines the model's head, the number of rows per example, and the training loop.
"""

from enum import StrEnum

# Objectives that users ask for, with the reason why each is missing.
NOT_OFFERED = {
    "grpo": "it generates answers during training, which no probe does",
    "ppo": "it generates answers during training, which no probe does",
    "rloo": "it generates answers during training, which no probe does",
    "embedding": "it compares each text with all other texts of a batch, which no probe does",
    "embeddings": "it compares each text with all other texts of a batch, which no probe does",
}


class Objective(StrEnum):
    """The goal of a training run.

    Each objective is probed with its usual trainer: TRL's, or transformers' for classification.
    """

    SFT = "sft"  # predicts the next token
    # Pairs of a chosen and a rejected answer, compared with the untrained model.
    DPO = "dpo"
    # Answers that are wanted or unwanted, compared with the untrained model.
    KTO = "kto"
    REWARD = "reward"  # pairs as in DPO; the chosen answer gets the higher score
    CLASSIFICATION = "classification"  # texts with a label

    @property
    def trainers(self) -> tuple[str, ...]:
        """The trainers for this objective, the usual one first."""
        if self is Objective.SFT:
            return ("transformers", "trl")
        return ("transformers",) if self is Objective.CLASSIFICATION else ("trl",)

    @property
    def rows_per_example(self) -> int:
        """The number of rows for each example in a micro batch."""
        return 2 if self in (Objective.DPO, Objective.REWARD) else 1

    @property
    def num_labels(self) -> int | None:
        """The number of values that the head computes for a row.

        It is None if the head computes a value for each token of the vocabulary. Two labels stand
        for any number of classes, because every such head is small compared with the hidden size.
        """
        return {Objective.REWARD: 1, Objective.CLASSIFICATION: 2}.get(self)

    @property
    def has_reference(self) -> bool:
        """Whether each step also evaluates the untrained model.

        In full fine-tuning, the untrained model is a copy; with LoRA, it is the model without its
        adapters.
        """
        return self in (Objective.DPO, Objective.KTO)

    @property
    def passes(self) -> tuple[int, int]:
        """The forward passes without gradients per micro batch: (trained model, untrained model).

        KTO evaluates both models on the answers to other prompts too.
        """
        return {Objective.DPO: (0, 1), Objective.KTO: (1, 2)}.get(self, (0, 0))
