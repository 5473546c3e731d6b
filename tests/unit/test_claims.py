"""`docs/claims.md`: every number in it follows from a stored result, a data sheet or an estimate
made here.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from autotune.api import compare
from autotune.catalog import resolve_device
from autotune.problem.study_spec import make_spec
from tests.unit.test_benchmarks import RESULTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
# What the page says, with the group of `claims` that it says it of.
SAID = [
    (
        "nf4_search_table",
        "In each of {pairs} pairs, an nf4 base reserved less memory than one in bf16:"
        " {memory_max_percent:.0f} to"
        " {memory_min_less:.0%} less, {memory_median_less:.0%} in the median.",
    ),
    (
        "nf4_large",
        "with at least 4,096 tokens in a micro batch, {memory_max_percent:.0f} to"
        " {memory_min_less:.0%}.",
    ),
    (
        "nf4_large",
        "{speed_median:.2f} times the speed in the median ({speed_min:.2f} to {speed_max:.2f}),"
        " because each",
    ),
    (
        "cudnn_reference_levers",
        "{speed_median:.2f} times the speed of torch's choice in the median of {pairs} pairs (at"
        " most",
    ),
    ("cudnn_reference_levers", "pairs (at most {speed_max:.3f})"),
    (
        "adamw_8bit_full",
        "reached {speed_min:.3f} times the speed of torch's fused AdamW with both models",
    ),
    (
        "adamw_8bit_full",
        "reached {speed_max:.3f} times the speed of torch's fused AdamW with both models",
    ),
    (
        "adamw_8bit_full",
        "and reserved {memory_max_percent:.0f} to {memory_min_less:.0%} less memory. With LoRA",
    ),
    (
        "adamw_8bit_lora",
        "it reached {speed_min:.3f} to {speed_max:.3f} times the speed, and saved"
        " {memory_median_less:.0%} of the memory",
    ),
    (
        "adamw_8bit_large",
        "In {pairs} pairs of the search table with at least 4,096 tokens in a micro batch, 8-bit"
        " AdamW reached {speed_median:.2f} times",
    ),
    (
        "adamw_8bit_large",
        "the speed in the median ({speed_min:.2f} to {speed_max:.2f}). Each optimizer",
    ),
    (
        "liger_reference_levers",
        "Liger's kernels alone: {speed_min:.2f} to {speed_max:.2f} times the speed",
    ),
    ("together_lora", "together: {speed_max:.2f} times with LoRA (Mistral-7B)"),
    ("together_full", "and {speed_min:.2f} to {speed_max:.2f} times in full fine-tuning"),
    (
        "together_reference_levers",
        "for {memory_min:.1f} to {memory_max:.1f} times the memory. `autotune run`",
    ),
    ("checkpointing_full", "{speed_min:.2f} times the speed with both models, for"),
    ("checkpointing_full", "{speed_max:.2f} times the speed with both models, for"),
    (
        "checkpointing_full",
        "for {memory_max_percent:.0f} to {memory_min_less:.0%} less memory. Refuted",
    ),
    (
        "checkpointing_lora",
        "with LoRA: {speed_min:.2f} to {speed_max:.2f} times the speed, for"
        " {memory_max_percent:.0f} to"
        " {memory_min_less:.0%} less memory",
    ),
    (
        "checkpointing_large",
        "In {pairs} pairs of the search table with at least 4,096 tokens in a micro batch,",
    ),
    (
        "checkpointing_large",
        "reached {speed_median:.2f} times the speed in the median ({speed_min:.2f} to",
    ),
    ("checkpointing_large", "in the median ({speed_min:.2f} to {speed_max:.2f})."),
    (
        "packing_against_seq_len_packing",
        "packed sequences trained {speed_max:.2f} times as many useful tokens/s",
    ),
    (
        "packing_against_lengths_real_data",
        "On another dataset, packed sequences trained {speed_max:.2f} times as many as sequences"
        " padded to one of four",
    ),
    (
        "packing_against_longest_real_data",
        "On this second dataset, packed sequences trained {speed_max:.2f} times as many as"
        " sequences padded to the longest of",
    ),
    (
        "micro_batch_2_search_table",
        "multiplied the speed by {speed_median:.2f} from 1 to 2 sequences",
    ),
    ("micro_batch_4_search_table", "{speed_median:.2f} from 2 to 4"),
    ("micro_batch_8_search_table", "{speed_median:.2f} from 4 to 8"),
    (
        "micro_batch_16_search_table",
        "and {speed_median:.2f} from 8 to 16. The last doubling took {memory_median:.2f} times the"
        " memory",
    ),
    (
        "micro_batch_1_to_4_reference_levers",
        "With sequences of 2,048 tokens, a micro batch of four reached {speed_min:.2f} to"
        " {speed_max:.2f} times",
    ),
    (
        "micro_batch_4_to_8_reference_levers",
        "Eight reached {speed_min:.3f} to {speed_max:.3f} times the speed of four, for"
        " {memory_min:.1f} to {memory_max:.1f} times",
    ),
    (
        "rank_64_warm_vs_cold",
        "rank 64 reached {speed_max:.3f} times the speed of rank 16 (Mistral-7B, 6 sequences of"
        " 1,024 tokens), with {memory_max:.2f} times the allocated memory",
    ),
    ("compile_full", "compiled layers reached {speed_min:.2f} times the speed with both models"),
    ("compile_full", "compiled layers reached {speed_max:.2f} times the speed with both models"),
    ("compile_lora", "gain more: {speed_min:.2f} to {speed_max:.2f} times"),
    (
        "compile_large",
        "In {pairs} pairs of the search table with at least 4,096 tokens in a micro batch, compiled"
        " layers reached {speed_median:.2f}"
        " times the speed in the median ({speed_min:.2f} to {speed_max:.2f}).",
    ),
    ("compile_search_table", "In all {pairs} pairs, they reached {speed_median:.2f} times: with"),
]
# Numbers that say what something is, and not how much was measured of it.
NAMES = (
    r"Llama 3\.1 8B|Mistral-7B\w*|FlashAttention 2|RTX [45]090|H[12]00|8-bit|in 4 bits|in 32"
    r" bits|nf4|bf16|80% of cases"
    r"|4-bit|sequences of 512 tokens|from \d+ to \d+(?= sequences|,| and)|for ranks 8 and 16"
    r"|rank 64 reached"
)


def words(text: str) -> str:
    return " ".join(text.split()).replace(" %", "%")


def values(group: str) -> dict[str, Any]:
    """The summary of a group; `..._less` and, in percent, `..._percent` are by how much a ratio is
    below 1.
    """
    found = RESULTS["claims"]["summary"][group]
    less = {f"{key}_less": 1 - value for key, value in found.items()}
    return found | less | {f"{key}_percent": 100 * (1 - value) for key, value in found.items()}


@pytest.mark.parametrize(("group", "said"), SAID)
def test_the_page_says_what_was_measured(group: str, said: str) -> None:
    assert said.format(**values(group)) in words(PAGE)


def test_every_doubling_was_faster() -> None:
    groups = [values(f"micro_batch_{size}_search_table") for size in (2, 4, 8, 16)]
    assert all(group["speed_min"] > 1 for group in groups)
    assert f"was faster in all {sum(group['pairs'] for group in groups)} pairs" in words(PAGE)


def published() -> str:
    """What the page says of LLaMA-Factory's table."""
    spec = make_spec(Path("llamafactory-llama-2-7b"), {})
    without, with_it = (case.published.tokens_per_s for case in spec.configs[:2] if case.published)
    assert without and with_it
    said = f"published {without:,.0f} tokens/s without FlashAttention 2 and {with_it:,.0f} with it,"
    return f"{said} {with_it / without:.2f} times the speed"


def estimated() -> list[str]:
    """What the page says of cards that were not measured: their data sheets, and what is estimated
    from these.
    """
    cards = ("rtx-5090", "rtx-4090", "h100")
    peaks = [resolve_device(card).bf16_tflops for card in cards]
    (group,) = compare("mistral-7b", cards, space="qlora").groups
    speeds = {card.device.name: card.best for card in group.cards}
    best = [speeds[resolve_device(card).name] for card in cards]
    intervals = [(one.tokens_per_s, *one.interval) for one in best if one and one.interval]
    (rtx_5090, low, high), rtx_4090, h100 = intervals
    return [
        "as {} TFLOP/s for the RTX 5090, {} for the RTX 4090 and {:.0f} for the H100 SXM".format(
            *peaks
        ),
        f"{rtx_5090:,.0f} tokens/s on an RTX 5090 (80% of cases in {low:,.0f} to {high:,.0f})",
        "{:,.0f} on an RTX 4090 ({:,.0f} to {:,.0f})".format(*rtx_4090),
        "{:,.0f} on an H100 ({:,.0f} to {:,.0f})".format(*h100),
    ]


def test_every_number_is_held() -> None:
    """What is left of the page without headings, table, code and the claims themselves has no
    number of its own.
    """
    kept = [line for line in PAGE.splitlines() if not line.startswith(("#", "|", ">"))]
    text = re.sub(r"`[^`]*`", "", words("\n".join(kept)))
    doubled = sum(values(f"micro_batch_{size}_search_table")["pairs"] for size in (2, 4, 8, 16))
    held = [said.format(**values(group)) for group, said in SAID]
    held += [published(), *estimated(), f"faster in all {doubled} pairs"]
    numbers = [(found.start(), found.end()) for found in re.finditer(r"\d[\d,.]*\d|\d", text)]
    covered = [
        (found.start(), found.end())
        for part in (*(re.escape(re.sub(r"`[^`]*`", "", said)) for said in held), NAMES)
        for found in re.finditer(part, text)
    ]
    bare = [
        text[first - 30 : last + 30] for first, last in numbers if not within(first, last, covered)
    ]
    assert bare == []
    assert all(re.sub(r"`[^`]*`", "", said) in text for said in held)


def within(first: int, last: int, spans: list[tuple[int, int]]) -> bool:
    return any(begin <= first and last <= end for begin, end in spans)
