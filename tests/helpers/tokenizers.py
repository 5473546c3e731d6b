"""Small tokenizers, made by the tests."""

import random
from pathlib import Path
from typing import Any

WORDS = (
    "the model answers a question about weather in Paris and then another one with numbers 12"
    " 34 user assistant"
)
SPECIAL = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<start_of_turn>",
    ),
    *(
        "<end_of_turn>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|end|>",
        "<think>",
        "</think>",
        "[INST]",
        "[/INST]",
    ),
)
# Jinja as in the models' own templates.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n"
    "' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def template(name: str) -> str:
    """A chat template that TRL ships: llama3, qwen3, gemma and others."""
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(
        encoding="utf-8"
    )


def byte_level(chat_template: str | None = None, eos: str = "</s>") -> Any:
    """A tokenizer of byte pairs, like those of Llama 3 and Qwen, with a few hundred merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    made.decoder = decoders.ByteLevel()
    chosen = random.Random(0)
    corpus = [" ".join(chosen.choices(WORDS.split(), k=40)) for _ in range(100)]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(dict.fromkeys(["<s>", eos, *SPECIAL])),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token=eos)
    fast.chat_template = chat_template
    return fast
