"""What a training is for: it decides the head of the model, the rows that an example has, and the loop that trains."""

from enum import StrEnum

# Why what people ask for is not among them.
NOT_OFFERED = {
    "grpo": "its answers are generated while it trains, which no probe does",
    "ppo": "its answers are generated while it trains, which no probe does",
    "rloo": "its answers are generated while it trains, which no probe does",
    "embedding": "it contrasts each text with all others of a batch, which no probe does",
    "embeddings": "it contrasts each text with all others of a batch, which no probe does",
}


class Objective(StrEnum):
    """Each is probed through the trainer that people use for it: TRL's, or transformers' for classification."""

    SFT = "sft"  # the next token
    DPO = "dpo"  # pairs of a chosen and a rejected answer, beside what the untrained model says of them
    KTO = "kto"  # answers that are wanted or not, beside what the untrained model says of them
    REWARD = "reward"  # pairs as of DPO, for a score that is higher for the chosen one
    CLASSIFICATION = "classification"  # texts with a label

    @property
    def trainers(self) -> tuple[str, ...]:
        """What can train for it, the usual one first."""
        if self is Objective.SFT:
            return ("transformers", "trl")
        return ("transformers",) if self is Objective.CLASSIFICATION else ("trl",)

    @property
    def rows_per_example(self) -> int:
        """The rows that an example has in a micro batch."""
        return 2 if self in (Objective.DPO, Objective.REWARD) else 1

    @property
    def num_labels(self) -> int | None:
        """The values that a head gives for a row; None where it gives one for each token of the vocabulary.

        Two stand for any number of classes: next to the hidden size all are small.
        """
        return {Objective.REWARD: 1, Objective.CLASSIFICATION: 2}.get(self)

    @property
    def has_reference(self) -> bool:
        """Whether the untrained model computes too: a copy in full fine-tuning, else the model without its adapters."""
        return self in (Objective.DPO, Objective.KTO)

    @property
    def passes(self) -> tuple[int, int]:
        """Forward passes without gradients in each micro batch: of the trained model, and of the untrained one.

        KTO asks both about the answers to other prompts too.
        """
        return {Objective.DPO: (0, 1), Objective.KTO: (1, 2)}.get(self, (0, 0))
