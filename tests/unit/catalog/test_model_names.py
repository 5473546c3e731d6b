"""Names that share the shape of a row, and names that only look as if they did."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.catalog import list_models, resolve_model
from autotune.catalog.model_names import MIRRORS, ModelNames
from autotune.catalog.models import _names, find_model_shape

ROWS = [
    {"name": "org/Model-7B", "aliases": ["model"]},
    {"name": "org/Model-7B-Long-2507", "aliases": []},
    {"name": "org/Nemo-Base-2407", "aliases": ["other/Twin-9B"]},
    {"name": "left/Same-1B-Base", "aliases": []},
    {"name": "right/Same-1B-it", "aliases": []},
]


@pytest.fixture
def no_hub(monkeypatch):
    """A Hub that must not be asked."""
    hub = pytest.importorskip("huggingface_hub")

    def refuse(*args, **kwargs):
        raise AssertionError("the Hub was asked")

    for name in ("try_to_load_from_cache", "get_hf_file_metadata", "hf_hub_download"):
        monkeypatch.setattr(hub, name, refuse)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("name", "row", "published"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct"),
        ("unsloth/Qwen2.5-7B-Instruct-bnb-4bit", "Qwen/Qwen2.5-7B", "unsloth/Qwen2.5-7B-Instruct"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B", "unsloth/Qwen3-8B"),
        (
            "unsloth/Meta-Llama-3.1-8B-Instruct-BNB-4bit",
            "meta-llama/Llama-3.1-8B",
            "unsloth/Meta-Llama-3.1-8B-Instruct",
        ),
        (
            "meta-llama/Meta-Llama-3-8B-Instruct",
            "meta-llama/Meta-Llama-3-8B",
            "meta-llama/Meta-Llama-3-8B-Instruct",
        ),
        (
            "NousResearch/Llama-2-7b-chat-hf",
            "meta-llama/Llama-2-7b-hf",
            "NousResearch/Llama-2-7b-chat-hf",
        ),
        (
            "mistralai/Mistral-7B-Instruct-v0.3",
            "mistralai/Mistral-7B-v0.3",
            "mistralai/Mistral-7B-Instruct-v0.3",
        ),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistralai/Mistral-Nemo-Base-2407", None),
        ("google/gemma-2-9b-it", "google/gemma-2-9b", "google/gemma-2-9b-it"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "meta-llama/Llama-3.1-8B", None),
        (
            "unsloth/DeepSeek-R1-Distill-Llama-8B-bnb-4bit",
            "meta-llama/Llama-3.1-8B",
            "unsloth/DeepSeek-R1-Distill-Llama-8B",
        ),
        ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.1-70B", None),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-7B", None),
        ("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-4B-Instruct-2507", None),
        (
            "unsloth/Qwen3-4B-Instruct-2507-bnb-4bit",
            "Qwen/Qwen3-4B-Instruct-2507",
            "unsloth/Qwen3-4B-Instruct-2507",
        ),
        ("unsloth/gemma-3-1b-it", "google/gemma-3-1b-pt", None),
        ("unsloth/gpt-oss-20b-BF16", "openai/gpt-oss-20b", None),
        ("allenai/Olmo-3-7B-Instruct", "allenai/Olmo-3-1025-7B", None),
        ("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-1124-7B", None),
        ("mistralai/Devstral-Small-2507", "mistralai/Devstral-Small-2505", None),
        ("CohereLabs/aya-expanse-8b", "CohereForAI/aya-expanse-8b", None),
        ("THUDM/GLM-4-9B-0414", "zai-org/GLM-4-9B-0414", None),
        ("ibm-granite/granite-4.0-h-tiny", "ibm-granite/granite-4.0-h-tiny-base", None),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1", None),
        ("google/gemma-3-12b-pt", "google/gemma-3-12b-it", None),
        (
            "unsloth/gemma-3-27b-it-unsloth-bnb-4bit",
            "google/gemma-3-27b-it",
            "unsloth/gemma-3-27b-it",
        ),
        ("unsloth/gemma-3n-E4B-it", "google/gemma-3n-E4B-it", None),
        ("google/gemma-4-31B", "google/gemma-4-31B-it", None),
        ("Qwen/Qwen3-VL-8B-Thinking", "Qwen/Qwen3-VL-8B-Instruct", None),
        (
            "unsloth/Qwen2-VL-7B-Instruct-unsloth-bnb-4bit",
            "Qwen/Qwen2-VL-7B-Instruct",
            "unsloth/Qwen2-VL-7B-Instruct",
        ),
        ("Qwen/Qwen3.6-27B", "Qwen/Qwen3.5-27B", None),
        ("Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-9B", None),
        ("mistralai/Magistral-Small-2507", "mistralai/Devstral-Small-2505", None),
        ("mistralai/Magistral-Small-2509", "mistralai/Mistral-Small-3.1-24B-Instruct-2503", None),
        ("mistralai/Ministral-3-8B-Base-2512", "mistralai/Ministral-3-8B-Instruct-2512", None),
        ("meta-llama/Llama-4-Scout-17B-16E", "meta-llama/Llama-4-Scout-17B-16E-Instruct", None),
        ("mlx-community/Qwen3-8B-4bit", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        (
            "hugging-quants/Meta-Llama-3.1-8B-Instruct-BNB-NF4",
            "meta-llama/Llama-3.1-8B",
            "meta-llama/Llama-3.1-8B",
        ),
        ("allenai/OLMo-2-1124-7B-SFT", "allenai/OLMo-2-1124-7B", None),
        ("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("llama-3.1-8b-instruct-bnb-4bit", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
    ],
)
def test_a_name_that_shares_a_shape(name, row, published):
    """The shape is the row's, offline; what a run loads is what was asked for, where that is a Hub
    id.
    """
    spec, known = resolve_model(name), resolve_model(row)
    assert (spec.config, spec.params, spec.digest) == (known.config, known.params, known.digest)
    assert spec.name == (published or name)
    found = find_model_shape(name)
    assert found is not None and found.name == row


@pytest.mark.parametrize(
    "name", ["somebody/Qwen2.5-7B-Instruct", "/models/Qwen2.5-7B-Instruct/", "a\\Qwen2.5-7B"]
)
def test_a_copy_of_any_organisation_or_in_any_folder_has_the_shape(name):
    """Another tool's file says what is trained: the shape of a copy is not asked of the Hub."""
    assert _names().find(name) is None
    found = find_model_shape(name)
    assert found is not None and found.name == "Qwen/Qwen2.5-7B"


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-VL-32B-Instruct",
        "Qwen/Qwen2.5-7B-Instruct-GGUF",
        "Qwen/Qwen2.5-7B-Instruct-AWQ",
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",
        "Qwen/Qwen2.5-7B-Instruct-1M",
        "Qwen/Qwen2.5-Math-RM-72B",
        "Qwen/Qwen2.5-Math-PRM-7B",
        "Qwen/Qwen3-Embedding-0.6B",
        "Qwen/Qwen3-Reranker-8B",
        "Qwen/Qwen3-8B-FP8",
        "Qwen/Qwen3Guard-Gen-8B",
        "meta-llama/Llama-Guard-3-8B",
        "meta-llama/Llama-3.1-8B-Instruct-evals",
        "meta-llama/Meta-Llama-3.1-405B-Instruct-FP8",
        "Skywork/Skywork-Reward-Llama-3.1-8B",
        "nvidia/Llama-3.1-Nemotron-70B-Reward-HF",
        "intfloat/e5-mistral-7b-instruct",
        "google/gemma-2-2b-jpn-it",
        "google/shieldgemma-2b",
        "google/recurrentgemma-2b-it",
        "google/paligemma-3b-pt-224",
        "google/codegemma-2b",
        "mistralai/Mathstral-7B-v0.1",
        "microsoft/Phi-3-vision-128k-instruct",
        "microsoft/Phi-4-multimodal-instruct",
        "zai-org/glm-4-9b-chat",  # code of its own
        "zai-org/GLM-4.5V",
        "Qwen/Qwen2.5-Math-7B",  # another context
        "ibm-granite/granite-speech-3.3-8b",
        "ibm-granite/granite-guardian-3.3-8b",
        "somebody/Qwen2.5-7B-Instruct",  # whose shape the Hub knows
        "Qwen/Llama-3.1-8B",
        "Qwen2.5-7B-Instruct-lora",
        "instruct",
        "-it",
        "mlx-community/Qwen3-8B-8bit-lora",
        "unsloth/Qwen3-8B-4bit",  # the width of a copy for MLX
        "/",
        "",
    ],
)
def test_a_name_that_only_looks_alike(name):
    assert _names().find(name) is None


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    ("spelling", "row"),
    [
        ("gemma-3-27b-it", "google/gemma-3-27b-it"),
        ("Gemma3-27B", "google/gemma-3-27b-it"),
        ("gemma3:27b", "google/gemma-3-27b-it"),
        ("Llama 3.1 8B Instruct", "meta-llama/Llama-3.1-8B"),
        ("Meta-Llama3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("llama3:8b", "meta-llama/Meta-Llama-3-8B"),
        ("Qwen3_8B", "Qwen/Qwen3-8B"),
        ("qwen2.5vl-7b", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("phi4", "microsoft/phi-4"),
        ("gpt2xl", "openai-community/gpt2-xl"),
    ],
)
def test_common_spellings(spelling, row):
    assert resolve_model(spelling) == resolve_model(row)


@pytest.mark.parametrize(
    "name",
    ["gemma-22b", "llama-27b", "llama-guard3-8b", "qwen25-7b", "same 1b", "it", "", " ", "1"],
)
def test_another_model_is_no_spelling(name):
    assert _names().find_respelled(name) is None
    assert ModelNames(ROWS).find_respelled(name) is None


def test_every_name_is_found_without_its_dashes():
    for name, row in _names().exact.items():
        spelled = re.sub(r"(?<=[a-z])-(?=[0-9])", " ", name)
        if "/" not in name and spelled != name:
            assert _names().find_respelled(spelled) == row, name


def test_the_rule_by_hand():
    names = ModelNames(ROWS)
    found = {
        "org/Model-7B": (0, "org/Model-7B"),
        "ORG/model-7b-INSTRUCT": (0, "ORG/model-7b-INSTRUCT"),
        "model": (0, None),
        "org/Model-7B-Instruct-2409": (0, "org/Model-7B-Instruct-2409"),
        # its own row, and not that of Model-7B-Long
        "unsloth/Model-7B-Long-2507": (1, "unsloth/Model-7B-Long-2507"),
        "org/Model-7B-Long-Instruct": (1, "org/Model-7B-Long-Instruct"),
        "org/Nemo-Instruct-2407": (2, "org/Nemo-Instruct-2407"),
        "other/Twin-9B-it": (2, "other/Twin-9B-it"),
        "left/Same-1B-Base": (3, "left/Same-1B-Base"),
        "right/Same-1B-it-bnb-4bit": (4, "right/Same-1B-it"),
    }
    for name, expected in found.items():
        match = names.find(name)
        assert match is not None and (match.row, match.published) == expected, name
    for name in (
        "left/Same-1B",
        "unsloth/Same-1B-chat",
        "other/Model-7Bx",
        "nobody/Model-7B",
        "org/Model-7B-bnb-8bit",
    ):
        assert names.find(name) is None, name
    anybody = names.find("nobody/Model-7B", any_organisation=True)
    assert anybody is not None and anybody.row == 0


def test_every_row_is_found_under_its_mirrors():
    for row, spec in enumerate(list_models()):
        for organisation in MIRRORS if "/" in spec.name else ():
            found = _names().find(f"{organisation}/{spec.short}")
            assert found is not None and found.row == row, spec.name


TUNED = ["-Instruct", "-it", "-chat", "-Base", "-hf", "-2410", "-pt"]


@given(
    st.sampled_from([spec for spec in list_models() if "/" in spec.name]),
    st.lists(st.sampled_from(TUNED), max_size=3),
)
def test_what_says_how_a_model_was_tuned_never_leads_to_another_size(spec, tuned):
    """Any such name of a row is that row, or, where rows differ by such words, no row: never one of
    another shape.
    """
    found = _names().find(spec.name + "".join(tuned))
    if found is not None:
        assert list_models()[found.row].params == spec.params


@given(
    st.sampled_from([spec for spec in list_models() if "/" in spec.name]),
    st.from_regex(r"-?[A-Za-z]{2,9}", fullmatch=True),
)
def test_any_other_word_leads_nowhere(spec, word):
    name = spec.name + word
    known = re.search(r"-(instruct|chat|base|it|pt|sft|dpo|hf|bf)$", name.lower())
    same = name.lower() in _names().exact
    assert known or same or _names().find(name) is None
