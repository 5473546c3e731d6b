"""Texts with labels: their order, their examples, their batches and their loss."""

from types import SimpleNamespace

import pytest
import torch

from autotune.trainer.examples import label_names
from autotune.trainer.labels import LabelEncoder, collate_labels, label_loss
from autotune.trainer.reading import BadDataset
from autotune.trainer.rows import num_targets


def located(*rows: tuple[object, object]) -> list[tuple[str, dict[str, object]]]:
    return [
        (f"row {index}", {"text": text, "label": label}) for index, (text, label) in enumerate(rows)
    ]


def test_labels_are_numbered_in_their_order() -> None:
    assert label_names(located(("a", "no"), ("b", "yes"), ("c", "no"), ("d", "maybe"))) == [
        "maybe",
        "no",
        "yes",
    ]
    assert label_names(located(("a", 10), ("b", 2), ("c", 2.0))) == [2, 10]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("a", 1), ("b", 1)], "at least two labels"),
        ([("a", 1), ("b", "x")], "some labels are numbers"),
        ([(None, 1)], "row 0: an example for classification needs text and label"),
        ([("a", 1.5)], "the label 1.5 is neither"),
    ],
)
def test_rows_without_labels_are_named(rows: list[tuple[object, object]], said: str) -> None:
    with pytest.raises(BadDataset, match=said):
        label_names(located(*rows))


def test_an_example_is_what_is_read_and_the_number_of_its_label_and_keeps_it_when_it_is_cut() -> (
    None
):
    def tokenizer(texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[10 + index for index in range(len(text))] for text in texts]}

    encoder = LabelEncoder(tokenizer, ["no", "yes"], 4)
    first, second = encoder.encode(located(("ab", "yes"), ("abcdef", "no")))
    assert first == [-11, -12, 1] and second == [-11, -12, -13, 0]
    assert num_targets(torch.tensor(second)) == 1
    assert LabelEncoder(tokenizer, ["no", "yes"], 5).key != encoder.key


@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_is_padded_with_the_models_own_token(masked: bool) -> None:
    rows = [[torch.tensor([-11, -12, -13, 1])], [torch.tensor([-11, 0])]]
    batch = collate_labels(rows, [], 7, masked=masked)
    assert batch["input_ids"].tolist() == [[10, 11, 12], [10, 7, 7]] and batch[
        "labels"
    ].tolist() == [1, 0]
    assert ("attention_mask" in batch) is masked


def test_the_loss_is_the_mean_over_all_rows_of_a_step() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([0, 0])
    each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    outputs = SimpleNamespace(logits=logits)
    assert label_loss(outputs, labels) == pytest.approx(float(each.mean()))
    assert label_loss(outputs, labels, 8) == pytest.approx(float(each.sum() / 8))
    assert label_loss(outputs, torch.tensor([0, -100])) == pytest.approx(float(each[0]))
