"""Read the user's examples, and count their tokens as the exported training script does."""

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os.path import expanduser
from pathlib import Path
from typing import Any

from autotune.catalog.models import reach_hub
from autotune.core.errors import EnvironmentProblem, StorageError, UsageError, did_you_mean
from autotune.core.files import refuse_special_files
from autotune.core.images import Picture
from autotune.core.installed import missing
from autotune.core.objective import Objective
from autotune.core.train_config import TrainConfig
from autotune.problem.image_files import flat, pictures_of, text_of
from autotune.problem.images import Pictured, num_image_tokens, representative_examples
from autotune.problem.length_distribution import Lengths
from autotune.problem.workload import Workload
from autotune.trainer.examples import (
    Encoder,
    describe,
    label_names,
    label_of,
    note_unread,
)
from autotune.trainer.forms import (
    CHATS,
    FORMS,
    PROMPT_COLUMNS,
    Chat,
    Plain,
    adapt,
    is_untrained,
    join_parts,
    parse_image_row,
    parse_row,
    texts_of,
)
from autotune.trainer.forms import COLUMNS as FORM_COLUMNS
from autotune.trainer.reading import (
    READERS,
    BadDataset,
    BrokenLine,
    Located,
    MissingFile,
    find_files,
    is_on_hub,
    read_rows,
)
from autotune.trainer.token_cache import CannotKeep, read_about, read_ends, tokenise

COLUMNS = {
    Objective.DPO: "chosen and rejected, and prompt unless both answers begin with the prompt",
    Objective.KTO: "prompt, completion and label, or pairs of chosen and rejected",
    Objective.REWARD: "chosen and rejected",
    Objective.CLASSIFICATION: "text and label",
    Objective.GRPO: "prompt",
}
# Some datasets store the prompt in a column with one of these names. TRL does not read these
# columns.
PROMPTS = ("question", "query", "instructions", "problem", "input", "context", *CHATS)
PAIR = ("chosen", "rejected", "label")
# The user gets a note if at least this share of the tokens is cut off.
WORTH_A_NOTE = 0.01
# The user gets a note if the mean length of the examples is above or below the mean length in the
# study by at least this factor, because the measured speed may then not hold.
OTHER_LENGTHS = 1.5
BYTES_PER_TOKEN = 4.0  # in UTF-8; for English text, today's tokenizers have 3.5 to 4.5
# No tokenizer makes more tokens of a text than it has bytes. A chat template adds less than these
# numbers: its own system prompt, and the marks around each message.
TEMPLATE_TOKENS, MESSAGE_TOKENS = 512, 16


def dataset_lengths(
    path: Path,
    tokenizer: str | None,
    *,
    split: str | None = None,
    loss_on: str | None = None,
    objective: Objective = Objective.SFT,
    say: Callable[[str], None] = lambda text: None,
) -> Lengths:
    """Return the length of each example in tokens.

    `tokenizer` is a directory with a tokenizer, which counts the tokens. If `tokenizer` is None,
    tokens are estimated from the number of bytes. For next-token prediction, the tokens are also
    cached (`token_cache`) for a later training on the same files. If an example is a pair of
    answers, its length is the length of the prompt with the longer answer. `say` gets progress
    messages.

    Raises:
        UsageError: if a row has an unknown form. The message names the row.
        EnvironmentProblem: if a required package is missing.
        StorageError: if the tokens cannot be stored.
    """
    say(f"reading {path.name}")
    if objective is not Objective.SFT:
        with dataset_errors():
            loaded = _load(tokenizer) if tokenizer else None
            return _lengths_for(objective, path, loaded, split, say)
    with dataset_errors():
        if tokenizer is None:
            return _estimate_lengths(path, split, loss_on, say)
        loaded_tokenizer = _load(tokenizer)
        folder = tokenise(path, loaded_tokenizer, split=split, loss_on=loss_on, say=say)

    about = read_about(folder)
    ends = read_ends(folder)
    lengths = (max(1, end - start) for start, end in zip([0, *ends], ends, strict=False))
    return Lengths.of(lengths, "counted", _share(about["trained"], about["tokens"]))


def has_images(path: Path, split: str | None) -> bool:
    """Return whether a row of the dataset refers to an image."""
    with dataset_errors():
        return any(parse_image_row(where, row)[1] for where, row in read_rows(path, split))


def image_lengths(
    path: Path,
    tokenizer: str | None,
    picture: Callable[[int, int], Picture],
    *,
    split: str | None = None,
    loss_on: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Lengths, tuple[Pictured, ...], int]:
    """Return the lengths of examples, typical images for each length, and the last image position.

    The last image position is the largest number of tokens from a row's start to an image's end.
    `picture` returns the output of the model's image processor for an image of a given width and
    height. Raises the errors of `dataset_lengths`, and UsageError for an unreadable image.
    """
    say(f"reading {path.name}")
    pictures: list[tuple[Picture, ...]] = []
    prefixes: list[Located] = []  # the text before the last image, of each row with images
    folder = path if path.is_dir() else path.parent

    def texts() -> Iterator[Located]:
        for where, row in read_rows(path, split):
            form, references = parse_image_row(where, row)
            pictures.append(pictures_of(where, references, folder, picture))
            if references and isinstance(form, Chat):
                prefixes.append((where, text_of(form, whole=False)))
            yield where, text_of(form) if isinstance(form, Chat) else row

    # `rows` has two numbers for each row: its text tokens, and the tokens to train on.
    # `prefix_tokens` has the number of tokens in each prefix.
    with dataset_errors():
        if tokenizer is None:
            sizes = [_bytes(where, flat(parse_row(where, row)), loss_on) for where, row in texts()]
            rows = [
                (round(sum(size) / BYTES_PER_TOKEN), size[1] / BYTES_PER_TOKEN) for size in sizes
            ]
            prefix_tokens = [
                sum(_bytes(where, flat(parse_row(where, row)), "all")) / BYTES_PER_TOKEN
                for where, row in prefixes
            ]
        else:
            loaded_tokenizer = _load(tokenizer)
            encoder = Encoder(loaded_tokenizer, loss_on, parts=True)
            rows = [
                (len(tokens), float(sum(token >= 0 for token in tokens)))
                for tokens in encoder.encode(texts())
            ]
            _say_notes(encoder, path, len(rows), say)
            prefix_encoder = Encoder(loaded_tokenizer, "all", parts=True)
            prefix_tokens = [len(tokens) for tokens in prefix_encoder.encode(prefixes)]
        if not rows:
            raise BadDataset(f"{path} has no examples")

    lengths = [
        max(1, text + num_image_tokens(images))
        for (text, _), images in zip(rows, pictures, strict=True)
    ]
    trained = sum(share for _, share in rows)
    if not trained:
        raise UsageError("--dataset: it has no tokens to train on", remedy="give --loss-on all")
    distribution = Lengths.of(
        lengths, "counted" if tokenizer else "characters", min(trained / sum(lengths), 1.0)
    )

    # The text before and the text after an image are tokenised separately, which may add one token
    # for each image.
    with_images = [row for row in pictures if row]
    ends = [
        round(text) + num_image_tokens(row) + len(row)
        for text, row in zip(prefix_tokens, with_images, strict=True)
    ]
    return (
        distribution,
        representative_examples(zip(lengths, pictures, strict=True)),
        max(ends, default=0),
    )


def tokenised_per_s(
    path: Path,
    tokenizer: str,
    *,
    split: str | None = None,
    loss_on: str | None = None,
    seconds: float = 1.0,
) -> float | None:
    """Return the number of examples per second that this process reads and tokenises.

    The measurement lasts `seconds`. The result is None for a dataset without rows.

    Raises the same errors as `dataset_lengths`.
    """
    with dataset_errors():
        encoder = Encoder(_load(tokenizer), loss_on)
        began = time.perf_counter()
        number = 0

        for _ in encoder.encode(read_rows(path, split)):
            number += 1
            if time.perf_counter() - began >= seconds:
                break
        return number / (time.perf_counter() - began) if number else None


@contextmanager
def dataset_errors() -> Iterator[None]:
    """Convert errors that occur while a dataset is read to errors that tell the user a remedy."""
    try:
        yield
    except BadDataset as error:
        remedy = f"give a file or folder of examples with {FORMS}, in UTF-8"
        if isinstance(error, BrokenLine):
            remedy = "correct this line, or remove it"
        if isinstance(error, MissingFile):
            remedy = _where_to_look(error.path)
        raise UsageError(f"--dataset: {error}", remedy=remedy) from None
    except CannotKeep as error:
        raise StorageError(
            f"--dataset: {error}", remedy="make room there, or check that the folder can be written"
        ) from None
    except ImportError as error:
        raise missing(error, "counting tokens") or EnvironmentProblem(
            f"--dataset: {error}", remedy="or give a file of JSON lines, or --lengths FILE"
        ) from None


def _where_to_look(path: Path) -> str:
    """Return a remedy for a path without a file: its start, and the files that exist there."""
    start = "" if path.is_absolute() else f"the path starts at {Path.cwd()}; "
    folder = path.parent
    if not folder.is_dir():
        return f"{start}there is no folder {folder}: correct the path, or create the file"
    names = sorted(one.name for one in folder.iterdir() if one.suffix.lower() in READERS)
    near = did_you_mean(path.name, names)
    others = f", such as {', '.join(names[:3])}" if names and not near else ""
    return f"{start}correct the name{near or others}"


def _lengths_for(
    objective: Objective,
    path: Path,
    tokenizer: Any,
    split: str | None,
    say: Callable[[str], None],
) -> Lengths:
    """Return the length of each example's longest row, for an objective other than SFT."""
    if objective is Objective.CLASSIFICATION:
        label_names(read_rows(path, split))
    texts = list[Located]()  # all rows of all examples
    sizes = list[int]()  # the number of rows of each example
    for where, row in read_rows(path, split):
        try:
            examples = rows_of(objective, row)
        except ValueError as error:
            raise BadDataset(f"{where}: {error}") from None
        for example in examples:
            texts += [(where, one) for one in example]
            sizes.append(len(example))
    if not texts:
        raise BadDataset(f"{path} has no examples")

    # `rows` has two numbers for each row: its number of tokens, and the share of these tokens to
    # train on.
    if tokenizer is None:
        byte_counts = [_bytes(where, parse_row(where, row), None) for where, row in texts]
        rows = [
            (round(sum(size) / BYTES_PER_TOKEN), size[1] / (sum(size) or 1)) for size in byte_counts
        ]
    else:
        encoder = Encoder(tokenizer, None)
        rows = [
            (len(tokens), sum(token >= 0 for token in tokens) / (len(tokens) or 1))
            for tokens in encoder.encode(texts)
        ]
        _say_notes(encoder, path, len(rows), say)

    most = None
    if tokenizer is None:
        most = max(_most_tokens(parse_row(where, row)) for where, row in texts)
    remaining = iter(rows)
    longest = [max(itertools.islice(remaining, size)) for size in sizes]
    share = sum(length * trained for length, trained in longest) / (
        sum(length for length, _ in longest) or 1
    )
    lengths = (max(1, length) for length, _ in longest)
    return Lengths.of(lengths, "counted" if tokenizer else "characters", share, most)


def _say_notes(encoder: Encoder, path: Path, number: int, say: Callable[[str], None]) -> None:
    """Warn the user about texts in these examples that the chat template leaves out."""
    for note in encoder.describe_notes(number):
        say(f"warning: {path.name}: {note}")


def rows_of(objective: Objective, row: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Convert a row of the dataset to examples, each a list of rows for next-token prediction.

    Raises ValueError for a row without the columns that the objective needs.
    """
    columns = {name: value for name, value in row.items() if value is not None}
    if objective is Objective.CLASSIFICATION:
        label_of(columns)
        return [[{"text": columns["text"]}]]
    if objective.generates:
        _require(objective, columns, "prompt")
        prompt = columns["prompt"]
        return [[{"text": prompt} if isinstance(prompt, str) else {"messages": prompt}]]
    if objective is Objective.KTO and "completion" in columns:
        _require(objective, columns, "prompt", "label")
        return [[_answer_row(columns, columns["completion"])]]

    _require(objective, columns, "chosen", "rejected")
    answers = [columns["chosen"], columns["rejected"]]
    has_prompt = "prompt" in columns or "instruction" in columns
    if not has_prompt:
        _require_prompt_in(answers, columns)
    if not has_prompt and all(isinstance(answer, str) for answer in answers):
        prompt = os.path.commonprefix(answers)  # noqa: RUF071 (TRL uses it for texts too)
        columns["prompt"] = prompt
        answers = [answer[len(prompt) :] for answer in answers]

    pair = [_answer_row(columns, answer) for answer in answers]
    # For KTO, each answer of a pair is an example, as in TRL.
    return [[one] for one in pair] if objective is Objective.KTO else [pair]


def _require(objective: Objective, columns: dict[str, Any], *names: str) -> None:
    if any(name not in columns for name in names):
        found = ", ".join(columns) or "none"
        raise ValueError(f"{objective} needs {COLUMNS[objective]}; the example's columns: {found}")


def _require_prompt_in(answers: list[Any], columns: dict[str, Any]) -> None:
    """Raise ValueError if the answers lack the prompt and an ignored column seems to contain it."""
    if any(isinstance(answer, list) and len(answer) > 1 for answer in answers):
        return  # the answers are whole conversations, which contain the prompt
    for name in PROMPTS:
        value = columns.get(name)
        if value and not (isinstance(value, str) and value.strip() in str(answers[0])):
            raise ValueError(
                f"its column {name} is not read beside chosen: rename {name} to prompt"
            )


def _answer_row(columns: dict[str, Any], answer: Any) -> dict[str, Any]:
    """Make a row for next-token prediction from an answer and the prompt in `columns`.

    If an answer is a list of messages, it must contain the prompt, unless the prompt is a list of
    messages too.
    """
    beside: dict[str, Any] = {
        name: columns[name] for name in ("system", "tools") if name in columns
    }
    others = {name: value for name, value in columns.items() if name not in (*FORM_COLUMNS, *PAIR)}
    prompt = columns.get("prompt")
    if isinstance(answer, str) and "instruction" in columns and not prompt:
        parts = {name: columns[name] for name in PROMPT_COLUMNS if name in columns}
        return {**others, **parts, **beside, "output": answer}
    if prompt and isinstance(prompt, str) is isinstance(answer, str):
        return {**others, **beside, "prompt": prompt, "completion": answer}
    if not isinstance(answer, str):
        if prompt and not any(prompt.strip() in text for text in _contents(answer)):
            raise ValueError(
                "the prompt's text is not in the example's messages: add the prompt as a message"
            )
        return {**others, **beside, "messages": answer}
    if prompt:
        raise ValueError(
            "the example's answers are text, but its prompt is not: give both in the same form"
        )
    if beside:
        raise ValueError(f"its column {next(iter(beside))} needs a prompt in a separate column")
    return {**others, "text": answer}


def _contents(messages: Any) -> list[str]:
    """Return the texts in a list of messages, or an empty list for any other value."""
    made = messages if isinstance(messages, list) else []
    contents = [one.get("content") or one.get("value") for one in made if isinstance(one, dict)]
    return [content for content in contents if isinstance(content, str)]


def form_of(path: Path, split: str | None, objective: Objective = Objective.SFT) -> str:
    """Return the form of a dataset, which its first row determines.

    The form is messages, conversations, prompt_completion, chat_completion, alpaca or text. For an
    objective other than SFT, the form is `unknown`, and the file is not read.
    """
    if objective is not Objective.SFT:
        return "unknown"
    with dataset_errors():
        first = next(read_rows(path, split), None)
        if first is None:
            raise BadDataset(f"{path} has no examples")
        form = parse_row(*first)

    columns = {name for name, value in first[1].items() if value is not None}
    if not isinstance(form, Chat):
        return "text" if form.prompt is None else "prompt_completion"
    chat = next((name for name in ("messages", "conversations") if name in columns), None)
    return chat or ("chat_completion" if "prompt" in columns else "alpaca")


def full_path(dataset: str) -> str:
    """Return the absolute path of a dataset, or its unchanged name on the Hub."""
    path = Path(expanduser(dataset))
    return dataset if is_on_hub(path) else str(path.absolute())


def files_of(dataset: str, split: str | None) -> tuple[str, ...]:
    """Return the paths of a dataset's files, or () if the dataset is on the Hub or missing."""
    path = Path(dataset)
    if is_on_hub(path):
        return ()
    with suppress(BadDataset, OSError):
        return tuple(map(str, find_files(path, split)))
    return ()


def chat_template_in(folder: str) -> str | None:
    """Return the chat template of the tokenizer in a directory, or None if it has none."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        if (file := Path(folder) / "chat_template.jinja").is_file():
            return file.read_text(encoding="utf-8")
        text = (Path(folder) / "tokenizer_config.json").read_text(encoding="utf-8")
        template = json.loads(text).get("chat_template")
        if isinstance(template, list):  # several templates, each with its name
            template = {one["name"]: one["template"] for one in template}.get("default")
        return template if isinstance(template, str) else None
    return None


def check_exists(path: Path, split: str | None) -> None:
    """Raise UsageError if the dataset does not exist."""
    with dataset_errors():
        find_files(path, split)


def check_examples(
    path: Path,
    split: str | None,
    tokenizer: str | None,
    workload: Workload,
    config: TrainConfig,
) -> list[str]:
    """Check that a configuration can be trained on these examples, and compare their lengths.

    Every row is read. `tokenizer` is a directory with the tokenizer that counts the tokens; without
    it, the tokens are estimated. Returns notes for the user on the lengths. Raises the errors of
    `dataset_lengths`.
    """
    if workload.pictured:
        with dataset_errors():
            for where, row in read_rows(path, split):
                parse_image_row(where, row)
        return []
    lengths = dataset_lengths(
        path, tokenizer, split=split, loss_on=workload.loss_on, objective=workload.objective
    )
    return _length_notes(lengths, workload, config.seq_len)


def _length_notes(lengths: Lengths, workload: Workload, seq_len: int) -> list[str]:
    """Return notes on examples that are cut off, or whose lengths differ from the study's."""
    notes = []
    cut = 1 - lengths.tokens_within(seq_len) / (lengths.mean * lengths.number)
    if cut >= WORTH_A_NOTE:
        notes.append(
            f"note: {lengths.longer(seq_len):.0%} of the examples are longer than {seq_len:,}"
            f" tokens (seq_len): {cut:.0%} of all tokens will be cut off"
        )
    ratio = lengths.mean / workload.lengths.mean
    if max(ratio, 1 / ratio) >= OTHER_LENGTHS:
        notes.append(
            f"note: the examples have {lengths.mean:,.0f} tokens on average, and the study's"
            f" examples had {workload.lengths.mean:,.0f}: the study's results may not hold"
        )
    return notes


def _load(directory: str) -> Any:
    from transformers import AutoTokenizer

    refuse_special_files(Path(directory))
    try:
        if not Path(directory).is_dir():
            reach_hub(directory, "tokenizer_config.json", "tokenizer.json", "tokenizer.model")
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # the tokenizer's library raises many types of errors
        raise UsageError(
            f"the tokenizer in {directory} cannot be loaded: {_first_line(error)}",
            remedy="put tokenizer.json and tokenizer_config.json of the model there,"
            " or estimate without --tokenizer",
        ) from None


def _estimate_lengths(
    path: Path, split: str | None, loss_on: str | None, say: Callable[[str], None]
) -> Lengths:
    notes = Counter[str]()
    lengths = []
    total = 0
    trained = 0
    most = 0
    for where, row in read_rows(path, split):
        form = parse_row(where, row)
        most = max(most, _most_tokens(form))
        note_unread(notes, form, _text(form))
        context_bytes, trained_bytes = _bytes(where, form, loss_on)
        lengths.append(max(1, round((context_bytes + trained_bytes) / BYTES_PER_TOKEN)))
        total = total + context_bytes + trained_bytes
        trained = trained + trained_bytes
    if not lengths:
        raise BadDataset(f"{path} has no examples")
    for note in describe(notes, len(lengths)):
        say(f"warning: {path.name}: {note}")
    return Lengths.of(lengths, "characters", _share(trained, total), most)


def _most_tokens(form: Plain | Chat) -> int:
    """Return a number of tokens that an example does not exceed with any tokenizer and template."""
    if isinstance(form, Plain):
        return len(_text(form).encode(errors="replace")) + TEMPLATE_TOKENS
    # As JSON, a message also has the names in its tool calls. Templates may indent the tools.
    text = json.dumps(form.messages, ensure_ascii=False, default=str)
    tools = json.dumps(form.tools, ensure_ascii=False, indent=4) if form.tools else ""
    size = len((text + tools).encode(errors="replace"))
    return size + TEMPLATE_TOKENS + MESSAGE_TOKENS * len(form.messages)


def _text(form: Plain | Chat) -> str:
    """Return all texts of an example, without a chat template."""
    if isinstance(form, Plain):
        return (form.prompt or "") + form.completion
    return "\n".join(text for message in form.messages for _, text in texts_of(message))


def _bytes(where: str, form: Any, loss_on: str | None) -> tuple[int, int]:
    """Return the number of an example's bytes outside the loss, and the number inside the loss."""
    try:
        if not isinstance(form, Chat):
            prompt = (form.prompt or "").encode()
            completion = form.completion.encode()
            if loss_on == "all":
                return 0, len(prompt + completion)
            return len(prompt), len(completion)
        adapted = enumerate(adapt(form.messages, ""), 1)
        messages = [join_parts(one, number) for number, one in adapted]
        texts = [one["role"] + "".join(text for _, text in texts_of(one)) for one in messages]
        sizes = [len(text.encode()) for text in texts]
    except UnicodeEncodeError:
        raise BadDataset(
            f"{where}: its text has half of a surrogate pair, which is not a character"
        ) from None
    except ValueError as error:
        raise BadDataset(f"{where}: {error}") from None

    trained_flags = [one["role"] == "assistant" and not is_untrained(one) for one in form.messages]
    if loss_on == "completion" or (loss_on is None and form.completion is not None):
        first = len(sizes) - 1 if form.completion is None else form.completion
        trained_flags = [index >= first for index in range(len(sizes))]

    trained = sum(
        size
        for size, is_trained in zip(sizes, trained_flags, strict=True)
        if is_trained or loss_on == "all"
    )
    return sum(sizes) - trained, trained


def _share(trained: int, tokens: int) -> float:
    if not trained:
        raise UsageError("--dataset: it has no tokens to train on", remedy="give --loss-on all")
    return trained / tokens


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
