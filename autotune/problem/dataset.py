"""The user's examples: their lengths in tokens. They are read by the code of the exported script."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.core.errors import EnvironmentProblem, StorageError, UsageError
from autotune.core.files import refuse_special_files
from autotune.core.images import Picture
from autotune.core.objective import Objective
from autotune.problem.image_files import flat, pictures_of, text_of
from autotune.problem.images import Pictured, pictured, taken
from autotune.problem.length_distribution import Lengths
from autotune.trainer.examples import FORMS, Chat, Encoder, label_names, label_of, parse_image_row, parse_row
from autotune.trainer.reading import BadDataset, Located, find_files, read_rows
from autotune.trainer.token_cache import CannotKeep, read_about, read_ends, tokenise

COLUMNS = {
    Objective.DPO: "chosen, rejected and, unless both begin with it, prompt",
    Objective.KTO: "prompt, completion and label, or pairs of chosen and rejected",
    Objective.REWARD: "chosen and rejected",
    Objective.CLASSIFICATION: "text and label",
}
BYTES_PER_TOKEN = 4.0  # bytes of UTF-8; English text has 3.5 to 4.5 with the vocabularies of today


def dataset_lengths(
    path: Path,
    tokenizer: str | None,
    *,
    split: str | None = None,
    loss_on: str | None = None,
    objective: Objective = Objective.SFT,
    say: Callable[[str], None] = lambda text: None,
) -> Lengths:
    """The length of each example in tokens: counted with the tokenizer of a directory, or estimated from its bytes.

    Counted tokens are kept (`token_cache`), so that a training on the same files does not make them again; those for
    other objectives than the next token are not. A pair of answers is as long as the longer one. `say` gets progress
    messages. Raises UsageError, which names a row of no known form, EnvironmentProblem where a package is
    needed and not installed, and StorageError where the tokens cannot be kept.
    """
    say(f"reading {path.name}")
    if objective is not Objective.SFT:
        with dataset_errors():
            return _lengths_for(objective, path, _load(tokenizer) if tokenizer else None, split)
    with dataset_errors():
        if tokenizer is None:
            return _estimated(path, split, loss_on)
        loaded = _load(tokenizer)
        folder = tokenise(path, loaded, split=split, loss_on=loss_on, say=say)
    about = read_about(folder)
    ends = read_ends(folder)
    lengths = (max(1, end - start) for start, end in zip([0, *ends], ends, strict=False))
    return Lengths.of(lengths, "counted", _share(about["trained"], about["tokens"]))


def image_lengths(
    path: Path,
    tokenizer: str | None,
    picture: Callable[[int, int], Picture],
    *,
    split: str | None = None,
    loss_on: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Lengths, tuple[Pictured, ...], int]:
    """The lengths of examples with their images, which images go with which length, and where the last image ends.

    The end is in tokens of its row, at most. `picture` says what a processor makes of an image of some width and
    height. Raises what `dataset_lengths` raises, and UsageError for an image that cannot be read.
    """
    say(f"reading {path.name}")
    pictures: list[tuple[Picture, ...]] = []
    before: list[Located] = []  # of each row with images, the text as far as the last one
    folder = path if path.is_dir() else path.parent

    def texts() -> Iterator[Located]:
        for where, row in read_rows(path, split):
            form, named = parse_image_row(where, row)
            pictures.append(pictures_of(where, named, folder, picture))
            if named and isinstance(form, Chat):
                before.append((where, text_of(form, whole=False)))
            yield where, text_of(form) if isinstance(form, Chat) else row

    with dataset_errors():
        if tokenizer is None:
            counted = [_bytes(where, flat(parse_row(where, row)), loss_on) for where, row in texts()]
            rows = [(round(sum(size) / BYTES_PER_TOKEN), size[1] / BYTES_PER_TOKEN) for size in counted]
            begun = [sum(_bytes(where, flat(parse_row(where, row)), "all")) / BYTES_PER_TOKEN for where, row in before]
        else:
            loaded = _load(tokenizer)
            encoded = Encoder(loaded, loss_on, parts=True).encode(texts())
            rows = [(len(tokens), float(sum(token >= 0 for token in tokens))) for tokens in encoded]
            begun = [len(tokens) for tokens in Encoder(loaded, "all", parts=True).encode(before)]
        if not rows:
            raise BadDataset(f"{path} has no rows")
    lengths = [max(1, text + taken(images)) for (text, _), images in zip(rows, pictures, strict=True)]
    trained = sum(share for _, share in rows)
    if not trained:
        raise UsageError("--dataset: none of its tokens would be trained on", remedy="give --loss-on all")
    distribution = Lengths.of(lengths, "counted" if tokenizer else "characters", min(trained / sum(lengths), 1.0))
    with_some = [row for row in pictures if row]
    # Words that an image parts may be a token more each than they are together.
    ends = [round(text) + taken(row) + len(row) for text, row in zip(begun, with_some, strict=True)]
    return distribution, pictured(zip(lengths, pictures, strict=True)), max(ends, default=0)


def tokenised_per_s(
    path: Path, tokenizer: str, *, split: str | None = None, loss_on: str | None = None, seconds: float = 1.0
) -> float | None:
    """Examples that this process reads and tokenises in a second, tried for so many. None of a dataset without rows.

    Raises what `dataset_lengths` raises.
    """
    with dataset_errors():
        encoder = Encoder(_load(tokenizer), loss_on)
        began, number = time.perf_counter(), 0
        for _ in encoder.encode(read_rows(path, split)):
            number += 1
            if time.perf_counter() - began >= seconds:
                break
        return number / (time.perf_counter() - began) if number else None


@contextmanager
def dataset_errors() -> Iterator[None]:
    """Turns what the reading code raises into errors with a remedy."""
    try:
        yield
    except BadDataset as error:
        raise UsageError(
            f"--dataset: {error}", remedy=f"give a file or folder of rows with {FORMS}, in UTF-8"
        ) from None
    except CannotKeep as error:
        raise StorageError(f"--dataset: {error}", remedy="make room there, or see whether it can be written") from None
    except ImportError as error:
        raise EnvironmentProblem(f"--dataset: {error}", remedy="or give JSON lines or --lengths FILE") from None


def _lengths_for(objective: Objective, path: Path, tokenizer: Any, split: str | None) -> Lengths:
    """The lengths of the examples for another objective: the longest of the rows that each has."""
    if objective is Objective.CLASSIFICATION:
        label_names(read_rows(path, split))
    texts, sizes = list[Located](), list[int]()  # the rows, and how many of them each example has
    for where, row in read_rows(path, split):
        try:
            examples = rows_of(objective, row)
        except (KeyError, TypeError) as error:
            raise BadDataset(f"{where}: {objective} needs {COLUMNS[objective]}: {error!r}") from None
        for example in examples:
            texts += [(where, one) for one in example]
            sizes.append(len(example))
    if not texts:
        raise BadDataset(f"{path} has no rows")
    if tokenizer is None:
        counted = [_bytes(where, parse_row(where, row), None) for where, row in texts]
        rows = [(round(sum(size) / BYTES_PER_TOKEN), size[1] / (sum(size) or 1)) for size in counted]
    else:
        encoded = Encoder(tokenizer, None).encode(texts)
        rows = [(len(tokens), sum(token >= 0 for token in tokens) / (len(tokens) or 1)) for tokens in encoded]
    remaining = iter(rows)
    longest = [max(itertools.islice(remaining, size)) for size in sizes]
    share = sum(length * trained for length, trained in longest) / (sum(length for length, _ in longest) or 1)
    lengths = (max(1, length) for length, _ in longest)
    return Lengths.of(lengths, "counted" if tokenizer else "characters", share)


def rows_of(objective: Objective, row: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The examples that a row of a dataset has, and the rows of each, as of a dataset for the next token.

    Raises KeyError and TypeError for a row without the columns that the objective needs.
    """
    columns = {name: value for name, value in row.items() if value is not None}
    if objective is Objective.CLASSIFICATION:
        label_of(columns)
        return [[{"text": columns["text"]}]]
    if objective is Objective.KTO and "completion" in columns:
        columns["label"]
        return [[{"prompt": columns["prompt"], "completion": columns["completion"]}]]
    answers = [columns["chosen"], columns["rejected"]]
    prompt = columns.get("prompt")
    if prompt is None and all(isinstance(answer, str) for answer in answers):
        prompt = os.path.commonprefix(answers)  # noqa: RUF071 (of texts, as TRL takes it)
        answers = [answer[len(prompt) :] for answer in answers]
    pair = [_answered(prompt, answer) for answer in answers]
    return [[one] for one in pair] if objective is Objective.KTO else [pair]  # as TRL takes pairs apart


def _answered(prompt: Any, answer: Any) -> dict[str, Any]:
    """A row of a prompt and an answer; messages have the prompt in them where that is given apart as text."""
    if prompt and isinstance(prompt, str) is isinstance(answer, str):
        return {"prompt": prompt, "completion": answer}
    return {"text": answer} if isinstance(answer, str) else {"messages": answer}


def form_of(path: Path, split: str | None, objective: Objective = Objective.SFT) -> str:
    """The form of the first row: messages, conversations, prompt_completion, chat_completion, alpaca or text.

    Of rows for another objective that is not asked: `unknown`.
    """
    if objective is not Objective.SFT:
        return "unknown"
    with dataset_errors():
        first = next(read_rows(path, split), None)
        if first is None:
            raise BadDataset(f"{path} has no rows")
        form = parse_row(*first)
    columns = {name for name, value in first[1].items() if value is not None}
    if not isinstance(form, Chat):
        return "text" if form.prompt is None else "prompt_completion"
    chat = next((name for name in ("messages", "conversations") if name in columns), None)
    return chat or ("chat_completion" if "prompt" in columns else "alpaca")


def check_exists(path: Path, split: str | None) -> None:
    """Raises UsageError where there is no such dataset."""
    with dataset_errors():
        find_files(path, split)


def _load(directory: str) -> Any:
    from transformers import AutoTokenizer

    refuse_special_files(Path(directory))
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # errors of many kinds, depending on the files
        raise UsageError(
            f"the tokenizer in {directory} cannot be loaded: {_first_line(error)}",
            remedy="put tokenizer.json and tokenizer_config.json of the model there, or estimate without --tokenizer",
        ) from None


def _estimated(path: Path, split: str | None, loss_on: str | None) -> Lengths:
    lengths, read, trained = [], 0, 0
    for where, row in read_rows(path, split):
        form = parse_row(where, row)
        before, after = _bytes(where, form, loss_on)
        lengths.append(max(1, round((before + after) / BYTES_PER_TOKEN)))
        read, trained = read + before + after, trained + after
    if not lengths:
        raise BadDataset(f"{path} has no rows")
    return Lengths.of(lengths, "characters", _share(trained, read))


def _bytes(where: str, form: Any, loss_on: str | None) -> tuple[int, int]:
    """The bytes of an example that are only read, and those that are trained on."""
    try:
        if not isinstance(form, Chat):
            prompt, completion = (form.prompt or "").encode(), form.completion.encode()
            return (0, len(prompt + completion)) if loss_on == "all" else (len(prompt), len(completion))
        sizes = [
            len(f"{one['role']}{one.get('content', '')}{one.get('tool_calls', '')}".encode()) for one in form.messages
        ]
    except UnicodeEncodeError:
        raise BadDataset(f"{where}: half of a surrogate pair is not a character") from None
    chosen = [message["role"] == "assistant" for message in form.messages]
    if loss_on == "completion" or (loss_on is None and form.completion is not None):
        first = len(sizes) - 1 if form.completion is None else form.completion
        chosen = [index >= first for index in range(len(sizes))]
    trained = sum(size for size, is_chosen in zip(sizes, chosen, strict=True) if is_chosen or loss_on == "all")
    return sum(sizes) - trained, trained


def _share(trained: int, tokens: int) -> float:
    if not trained:
        raise UsageError("--dataset: none of its tokens would be trained on", remedy="give --loss-on all")
    return trained / tokens


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
