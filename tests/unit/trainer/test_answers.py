"""The prompt of --ask: by default the first example's; the most likely tokens answer it."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.trainer.answers import TOKENS, Prompt, first_prompt
from autotune.trainer.forms import Chat, Plain

CHAT = Chat(messages=[{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "2 + 2 = ", "completion": "4"}, "2 + 2 = "),
        ({"text": "one two three"}, "one two"),
        ({"text": " ".join(map(str, range(30)))}, "0 1 2 3 4 5 6 7"),
        (
            {
                "messages": [
                    {"role": "system", "content": "Be kind."},
                    {"role": "user", "content": "Who is it?"},
                    {"role": "assistant", "content": "Me."},
                ]
            },
            "Who is it?",
        ),
        ({"messages": [{"role": "assistant", "content": "Me."}]}, ""),
    ],
)
def test_the_first_example_gives_the_prompt(
    row: dict[str, Any], prompt: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + '\n{"text": "another"}')
    assert first_prompt(file, None) == prompt


class Tokenizer:
    """Each character is a token, and 0 ends an answer."""

    eos_token_id = 0
    chat_template: str | None = "yes"

    def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return f"<{messages[0]['content']}>"

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))


def model_of(answer: str) -> Any:
    """A model that answers with these characters, and keeps what it was given."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.given: list[str] = []

        def forward(self, input_ids: Any, use_cache: bool) -> Any:
            assert not self.training and not use_cache and not torch.is_grad_enabled()
            said = "".join(map(chr, input_ids[0].tolist()))
            self.given.append(said)
            place = len(self.given) - 1
            token = ord(answer[place]) if place < len(answer) else 0
            logits = torch.zeros(1, len(said), 128)
            logits[0, -1, token] = 1.0
            return SimpleNamespace(logits=logits)

    return Model()


@pytest.mark.parametrize(("example", "asked"), [(CHAT, "<hi>"), (Plain(completion="a"), "hi")])
def test_the_prompt_has_the_form_of_the_examples(example: Any, asked: str) -> None:
    model = model_of("yes ")
    model.train()
    assert Prompt("hi", Tokenizer(), example).answer(model, nullcontext()) == "yes"
    assert model.given[0] == asked and model.given[1] == asked + "y" and model.training


def test_an_answer_without_an_end_is_cut_off() -> None:
    answer = Prompt("hi", Tokenizer(), CHAT).answer(model_of("x" * 999), nullcontext())
    assert answer == "x" * TOKENS


def test_an_answer_has_text_even_from_a_model_that_would_end_at_once() -> None:
    import torch

    class Ending(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: Any, use_cache: bool) -> Any:
            logits = torch.zeros(*input_ids.shape, 128)
            logits[..., [0, ord("\n"), ord("y")]] = torch.tensor(
                [3.0, 2.0 if len(input_ids[0]) < 5 else 0.0, 1.0]
            )
            return SimpleNamespace(logits=logits)

    assert Prompt("hi", Tokenizer(), CHAT).answer(Ending(), nullcontext()) == "y"
