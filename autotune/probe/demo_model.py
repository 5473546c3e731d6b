"""Trains the demo model, a toy, on a CPU in a few seconds, and writes it with its tokenizer.

`python -m autotune.probe.demo_model FOLDER` reads the keyword arguments of a transformers config
from stdin, and writes the model to FOLDER. The training texts are questions about the modules of
this package, and the modules' docstrings are the answers. The trained model writes words of this
package in the form of an answer, but the answers make no sense. The seed and the number of threads
are fixed, so the same version of the package with the same torch makes the same weights.
"""

import ast
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from autotune.trainer.model_builder import config_of

PAD, START, END = "<|pad|>", "<|start|>", "<|end|>"  # tokens 0, 1 and 2, as in the config
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
ABOUT = """\
# demo-3m, a toy

autotune trained this model on this machine in a few seconds, on the docstrings of autotune's code.
The model writes words in the form of an answer, but knows no facts. It serves to check that
training, saving and resuming work.
"""
THREADS = 2
STEPS = 100
ROWS = 8  # rows of a step
TOKENS = 64  # tokens of a row
RATE = 5e-3


def conversations() -> list[list[dict[str, str]]]:
    """Return a question for each module of this package, and the module's purpose as the answer."""
    package = Path(__file__).parents[1]
    made = []
    for file in sorted(package.rglob("*.py")):
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        answer = " ".join(text.split("\n\n")[0].split())
        name = file.stem.replace("_", " ")
        question = {"role": "user", "content": f"What does the file {name} do?"}
        made.append([question, {"role": "assistant", "content": answer}])
    return made


def make_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that was trained on these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=START, eos_token=END
    )
    made.chat_template = TEMPLATE
    return made


def make(folder: Path, config: dict[str, Any], steps: int = STEPS) -> float:
    """Train the model, write it to `folder`, and return the loss of the last step."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    examples = conversations()
    texts = [message["content"] for example in examples for message in example]
    tokenizer = make_tokenizer(texts, config["vocab_size"])

    # All examples, in random order, are joined into one long text, which is cut into rows without
    # padding.
    order = torch.randperm(len(examples)).tolist()
    rendered = [tokenizer.apply_chat_template(examples[i], tokenize=False) for i in order]
    tokens = torch.tensor(tokenizer("".join(rendered), add_special_tokens=False)["input_ids"])
    rows = tokens[: len(tokens) // TOKENS * TOKENS].view(-1, TOKENS)

    model = AutoModelForCausalLM.from_config(config_of(config), dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    loss = torch.tensor(0.0)
    for step in range(steps):
        batch = rows[torch.arange(step * ROWS, (step + 1) * ROWS) % len(rows)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(ABOUT, encoding="utf-8")
    return float(loss.detach())


if __name__ == "__main__":
    make(Path(sys.argv[1]), json.load(sys.stdin))
