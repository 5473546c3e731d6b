# autotune study h200-mistral-7b: mistralai/Mistral-7B-v0.3 on h200-sxm; Configuration: lora r64 16x1024 bf16_mixed ckpt-none adamw_torch_fused compiled chunked-loss, 2 micro batches a step
# Expect (measured): 1.9 s a step, 17,374 useful tokens/s, peak 92.7 GiB of 131.9 GiB; Full run: 10,000 examples, 1 epoch(s), 313 steps: 9 min 50 s (9 min 44 s to 9 min 56 s), $0.556
# Probed with transformers on NVIDIA H200, driver 580.159.04, CUDA 13.0; Fingerprint 4b243894ad88: python 3.12.3, accelerate 1.15.0, bitsandbytes 0.50.2, peft 0.21.0, torch 2.11.0, transformers 5.17.0
"""Rows to train on, as they were probed: one example to a row, or packed; padded on the right, no attention mask."""
import bisect, collections, json, math, pathlib, sys  # noqa: E401, I001

import torch

def read(path, tok, seq_len):
    """The examples of a JSON Lines file with text, prompt and completion, or messages, cut at `seq_len` tokens."""
    examples = []
    for number, line in filter(lambda one: one[1].strip(), enumerate(open(path, encoding="utf-8-sig"), 1)):
        try:
            row = {key: value for key, value in json.loads(line).items() if value is not None}
            chat = "messages" in row  # a chat template writes its own special tokens
            text = row["text"] if "text" in row else "" if chat else row["prompt"] + row["completion"]
            text = tok.apply_chat_template(row["messages"], tokenize=False) if chat else text + (tok.eos_token or "")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            sys.exit(f"{path}:{number}: needs text, prompt and completion, or messages: {error!r}")
        ids = tok(text, truncation=True, max_length=seq_len, add_special_tokens=not chat)["input_ids"]
        examples.append(torch.tensor(ids, dtype=torch.long))
    return examples

def read_lengths(path, seq_len):
    """The lengths of a file with one a line, cut at `seq_len`."""
    try:
        lengths = [min(int(line), seq_len) for line in pathlib.Path(path).read_text().split()]
    except ValueError as error:
        sys.exit(f"{path}: {error}")
    return lengths if lengths and min(lengths) > 0 else sys.exit(f"{path}: needs a length on each line, 1 or more")

def split(examples, seq_len, number, tokens):
    """What is trained on, cut at `seq_len`, and as rows the last `number` examples, which are not, cut at `tokens`."""
    kept = len(examples) - number
    if number < 0 or kept < 1 or (number and tokens < 2):
        sys.exit(f"{len(examples)} examples are there: {number} cannot be held out, cut at {tokens} tokens")
    # A single token predicts nothing, and has no loss.
    held_out = [[example[:tokens]] for example in examples[kept:] if len(example) > 1]
    return [example[:seq_len] for example in examples[:kept]], held_out

def pack(examples, seq_len):
    """Best-fit decreasing: the longest first, each into the fullest row that has room for it."""
    rooms, rows = [], collections.defaultdict(list)  # rooms: (-what is left, row), ascending
    for example in sorted(examples, key=len, reverse=True):
        place = bisect.bisect(rooms, (-len(example), math.inf)) - 1
        left, row = rooms.pop(place) if place >= 0 else (-seq_len, len(rows))
        rows[row].append(example)
        bisect.insort(rooms, (left + len(example), row))
    return list(rows.values())

def collate(rows, seq_len, packing):
    """A batch. Positions that begin anew keep packed examples apart; nothing is predicted across their seams."""
    seq_len = max(seq_len, *(sum(map(len, row)) for row in rows))  # longer only where examples are held out
    parts = [[*row, torch.zeros(seq_len - sum(map(len, row)), dtype=torch.long)] for row in rows]
    positions = torch.stack([torch.cat([torch.arange(len(part)) for part in row]) for row in parts])
    labels = torch.stack([torch.cat([*row[:-1], row[-1] - 100]) for row in parts]).masked_fill(positions == 0, -100)
    batch = {"input_ids": torch.stack([torch.cat(row) for row in parts]), "labels": labels}
    return batch | {"position_ids": positions} if packing else batch
