"""Trainings that Python programs and notebooks describe."""

import json
from dataclasses import replace
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from autotune.core.errors import UsageError
from autotune.planning.foreign_config import read_file
from autotune.planning.foreign_dataset import local_dataset
from autotune.planning.run_check import check
from autotune.report.values.check import ForeignConfig

QLORA = """
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

NAME = "mistralai/Mistral-7B-v0.1"
length: int = 2 * 1024

def main():
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        NAME, quantization_config=four_bits, dtype=torch.bfloat16, device_map={"": 0}
    )
    model = prepare_model_for_kbit_training(model)
    model.config.use_cache = False
    lora = LoraConfig(r=64, lora_alpha=128, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(model, lora)
    arguments = SFTConfig(
        output_dir=f"out/{NAME}",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8 // 2,
        max_length=length,
        bf16=torch.cuda.is_bf16_supported(),
        fp16=not torch.cuda.is_bf16_supported(),
        learning_rate=-(-2e-4),
    )
    trainer = SFTTrainer(model, arguments, train_dataset=load(), processing_class=None)
    trainer.train()

if __name__ == "__main__":
    main()
"""
QLORA_KEYS = {
    "model_name_or_path": "mistralai/Mistral-7B-v0.1",
    "dtype": "float32",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": True,
    "use_peft": True,
    "lora_r": 64,
    "lora_alpha": 128,
    "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj"],
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "max_length": 2048,
    "bf16": True,
    "fp16": False,
}
GRPO = """
trainer = trl.GRPOTrainer(
    model="Qwen/Qwen3-4B",
    reward_funcs=[reward],
    args=trl.GRPOConfig(
        num_generations=8, max_completion_length=512, use_vllm=True, vllm_mode="colocate",
        per_device_train_batch_size=8, model_init_kwargs={"dtype": "bfloat16"},
    ),
    train_dataset=data,
    peft_config=peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
)
"""
GRPO_KEYS = {
    "model_name_or_path": "Qwen/Qwen3-4B",
    "num_generations": 8,
    "max_completion_length": 512,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "per_device_train_batch_size": 8,
    "dtype": "bfloat16",
    "use_peft": True,
    "lora_r": 8,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": "all-linear",
}


def program(folder: Path, text: str, name: str = "train.py") -> ForeignConfig:
    file = folder / name
    file.write_text(dedent(text))
    return read_file(file)


def of_keys(folder: Path, keys: dict[str, Any]) -> ForeignConfig:
    file = folder / "train.yaml"
    file.write_text(json.dumps(keys))
    return read_file(file)


def sft(arguments: str = "", *, before: str = "", after: str = "", model: str = "'a/b'") -> str:
    """A program that trains with these arguments."""
    return f"{before}\nconfig = SFTConfig({arguments})\n{after}\nSFTTrainer({model}, args=config)"


@pytest.mark.parametrize(("text", "keys"), [(QLORA, QLORA_KEYS), (GRPO, GRPO_KEYS)])
def test_a_program_describes_the_same_run_as_a_file_with_its_values(
    tmp_path: Path, text: str, keys: dict[str, Any]
) -> None:
    ours, theirs = program(tmp_path, text), of_keys(tmp_path, keys)
    assert replace(ours, values={}) == replace(theirs, values={})


def test_a_notebook_is_read_without_its_commands(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["SFTTrainer(model='c/d')"]},
        {"cell_type": "code", "source": ["!pip install trl\n", "%env A=1\n", "length = 64"]},
        {"cell_type": "code", "source": sft("max_length=length").splitlines(keepends=True)},
    ]
    found = program(tmp_path, json.dumps({"cells": cells}), "train.ipynb")
    assert (found.model, found.config.seq_len) == ("a/b", 64)
    with pytest.raises(UsageError, match="is not a notebook"):
        program(tmp_path, "[]", "train.ipynb")


def test_a_notebook_of_marimo_is_read(tmp_path: Path) -> None:
    text = """
        import marimo
        app = marimo.App()

        @app.cell
        def _():
            length = 64
            model = FastLanguageModel.from_pretrained("a/b")
            return (length, model)

        @app.cell(hide_code=True)
        def _(length, model):
            model_1 = FastLanguageModel.get_peft_model(model, r=4)
            SFTTrainer(model_1, args=SFTConfig(max_length=length))
            return
    """
    found = program(tmp_path, text)
    assert (found.model, found.config.lora_rank, found.config.seq_len) == ("a/b", 4, 64)


def test_an_error_in_a_notebook_names_the_cell(tmp_path: Path) -> None:
    sources = [
        "%%bash\nif",
        "%%capture\n!a \\\n b\nc = 1",
        "not Python",
        sft("max_length=length()"),
    ]
    cells = [{"cell_type": "code", "source": [source]} for source in sources]
    with pytest.raises(UsageError, match=r"ipynb, code cell 4, line 2: max_length is computed"):
        program(tmp_path, json.dumps({"cells": cells}), "train.ipynb")


def test_a_condition_with_a_known_value_decides(tmp_path: Path) -> None:
    before = "small, length = True, 8\nif small:\n    length = 64\nelse:\n    length = 128"
    assert program(tmp_path, sft("max_length=length", before=before)).config.seq_len == 64
    without = before.replace("if small", "if not small")
    assert program(tmp_path, sft("max_length=length", before=without)).config.seq_len == 128


def test_a_name_has_its_last_value_before_its_use(tmp_path: Path) -> None:
    text = sft("max_length=length", before="length = 64\nlength = 2 * length", after="length = 8")
    assert program(tmp_path, text).config.seq_len == 128


def test_an_argument_of_a_function_hides_a_name_outside(tmp_path: Path) -> None:
    inside = indent(sft("max_length=length"), "    ")
    with pytest.raises(UsageError, match=r"train.py:3: max_length is computed"):
        program(tmp_path, f"length = 64\ndef train(length=8):{inside}")


FUNCTIONS = """
SIZES = {"length": 256, "rank": 4}

def load(name, length, four_bits=True):
    if four_bits:
        quantization = BitsAndBytesConfig(load_in_4bit=True)
    else:
        quantization = None
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=quantization)
    return prepare(model), AutoTokenizer.from_pretrained(name)

def prepare(base):
    base = prepare_model_for_kbit_training(base)
    return base

def adapters():
    return LoraConfig(r=SIZES["rank"])

def arguments(length):
    return SFTConfig(max_length=length)

def main():
    model, tokenizer = load(NAME, SIZES["length"])
    SFTTrainer(model, args=arguments(SIZES["length"]), peft_config=adapters())

NAME = "a/b"
main()
"""


def test_functions_of_the_program_are_followed(tmp_path: Path) -> None:
    found = program(tmp_path, FUNCTIONS)
    config = found.config
    assert (found.model, config.seq_len, config.lora_rank) == ("a/b", 256, 4)
    assert (config.quantization, config.checkpointing) == ("nf4", "full")
    whole = program(tmp_path, FUNCTIONS.replace('"])\n    SFT', '"], False)\n    SFT'))
    assert whole.config.quantization == "none"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("main()\n", "main()\nload('c/d', 1)\n"),  # a second call with other arguments
        ("NAME = ", "NAME = 'c/d'\nNAME = "),
        ("NAME = ", "def choose():\n    global NAME\n    NAME = 'c/d'\n\nNAME = "),
        ("    return prepare(model),", "    if length:\n        return 1, 2\n    return model,"),
        ("load(NAME, SIZES", "load(*NAME, SIZES"),
        ("    return base", "    return prepare(base)[base]"),
        ("def load(", "@job\ndef load("),
        ("def prepare(", "@cached\ndef prepare("),
    ],
)
def test_a_function_that_may_give_another_model_is_refused(
    tmp_path: Path, old: str, new: str
) -> None:
    assert FUNCTIONS.count(old) == 1 or old == "main()\n"
    text = new.join(FUNCTIONS.rsplit(old, 1))
    with pytest.raises(UsageError, match="the model is chosen when"):
        program(tmp_path, text)


@pytest.mark.parametrize(
    ("made", "length"),
    [
        ("settings = Settings()", 64),
        ("settings = Settings()\nSettings = Other", None),
        ("settings = Settings(length=2 * 64)", 128),
        ("settings = Settings(8)", None),
        ("settings = Settings(**more)", None),
        ("settings = Settings()\nsettings.length = 8", None),
        ("settings = Other()", None),
    ],
)
def test_the_settings_in_a_class_are_read(tmp_path: Path, made: str, length: int | None) -> None:
    classes = "@dataclass\nclass Settings:\n    length: int = 64\nclass Other(Settings):\n    pass"
    text = sft("max_length=settings.length", before=f"{classes}\n{made}")
    if length is None:
        with pytest.raises(UsageError, match="max_length is computed"):
            program(tmp_path, text)
    else:
        assert program(tmp_path, text).config.seq_len == length


def test_a_dictionary_that_the_program_changes_is_unknown(tmp_path: Path) -> None:
    for change in (
        "del sizes['length']",
        "sizes.pop('length')",
        "for size in (8, 16):\n    sizes['length'] = size",
        "if large():\n    sizes['length'] = 8",
        "def change():\n    sizes['length'] = 8\nchange()",
        "def change(sizes):\n    sizes.update(length=8)\nchange(sizes)",
    ):
        before = f"sizes = {{'length': 64}}\n{change}"
        with pytest.raises(UsageError, match="max_length is computed"):
            program(tmp_path, sft("max_length=sizes['length']", before=before))
        with pytest.raises(UsageError, match=r"SFTConfig gets arguments by \*\*"):
            program(tmp_path, sft("**sizes", before=before))


@pytest.mark.parametrize(
    "before",
    [
        "sizes = {'max_length': 64}\nsizes['max_length'] = 8",
        "sizes = dict(max_length=64)\nsizes.update(max_length=8)",
        "sizes = {'bf16': True}\nsizes.update({'max_length': 8})",
        "sizes = {'max_length': 64}\nsizes |= {'max_length': 8}",
        "common = dict(max_length=64)\nsizes = {**common, 'max_length': 8}",
        "common = dict(max_length=64)\nsizes = dict(common, max_length=8)",
        "common = dict(max_length=64)\nsizes = common | {'max_length': 8}",
        "short = True\nsizes = {}\nif short:\n    sizes['max_length'] = 8",
    ],
)
def test_changes_of_a_dictionary_are_followed(tmp_path: Path, before: str) -> None:
    assert program(tmp_path, sft("**sizes", before=before)).config.seq_len == 8


@pytest.mark.parametrize(
    "before",
    [
        "length = 64\nif large():\n    length = 128",
        "length = int(sys.argv[1])",
        "length, other = sizes()",
        "length = 64\nlength += 1",
        "for length in (64, 128):\n    pass",
        "try:\n    length = 64\nexcept KeyError:\n    length = 8",
        "",
    ],
)
def test_a_value_that_the_program_computes_is_refused_with_its_line(
    tmp_path: Path, before: str
) -> None:
    with pytest.raises(UsageError, match=r"train.py:\d+: max_length is computed when"):
        program(tmp_path, sft("max_length=length", before=before))
    # Whatever decides neither memory nor time may be computed.
    assert program(tmp_path, sft("output_dir=length, seed=length", before=before)).model == "a/b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            sft(after="config.output_dir = run()\nif few():\n    config.max_length = 8"),
            "train.py:5: max_length is changed after",
        ),
        (sft("**more"), "gets arguments by"),
        (sft() + "\nDPOTrainer('a/b')", "train.py:5: another trainer is called"),
        ("train(model)", "calls no trainer that is read"),
        ("SFTTrainer(args=SFTConfig())", "the trainer gets no model"),
        ("def broken(:", "train.py is not valid Python"),
        ("SFTTrainer('a/b', args=parser.parse())", "the arguments are made when"),
        (sft(model="make_model()"), "the model is chosen when"),
        (sft(model="AutoModel.from_pretrained(name)"), "the model is chosen when"),
        (sft(model="'a/b', peft_config=PrefixTuningConfig()"), "not a LoraConfig"),
        (sft(model="'a/b', peft_config=lora if small else None"), "not a LoraConfig"),
        (sft(model="M.from_pretrained('a/b', quantization_config=Mxfp4Config())"), "not a BitsAnd"),
        (sft("wrong_key=1"), "TRL 1.16 has no such key"),
    ],
)
def test_what_is_not_read_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        program(tmp_path, text)


def test_an_argument_that_is_always_changed_has_its_last_value(tmp_path: Path) -> None:
    changed = "config.max_length = 8\nif False:\n    config.max_length = 16"
    assert program(tmp_path, sft("max_length=64", after=changed)).config.seq_len == 8


def test_a_program_without_a_trainer_gets_advice(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        program(tmp_path, "print()")
    assert "pass the program" in (raised.value.remedy or "")


def test_arguments_that_are_not_counted_are_named(tmp_path: Path) -> None:
    model = "'a/b', data_collator=mine(), optimizers=None, eval_dataset=load()"
    assert program(tmp_path, sft(model=model)).ignored == "not counted: data_collator"


def test_a_model_on_several_gpus_and_its_recomputation_are_read(tmp_path: Path) -> None:
    load = "AutoModelForCausalLM.from_pretrained('a/b', device_map={}).to('cuda')"
    text = sft("gradient_checkpointing=False", model=load.format("'auto'"))
    split = program(tmp_path, text)
    whole = program(tmp_path, text.replace("'auto'", "{'': PartialState().process_index}"))
    assert [one.config.checkpointing for one in (split, whole)] == ["none", "none"]
    assert set(split.notes) - set(whole.notes)
    recomputed = program(tmp_path, text + "\nmodel.gradient_checkpointing_enable()")
    assert recomputed.config.checkpointing == "full"


def test_a_single_target_is_refused_only_as_a_pattern(tmp_path: Path) -> None:
    adapters = "'a/b', peft_config=LoraConfig(target_modules={})"
    listed = program(tmp_path, sft(model=adapters.format("['c_attn']")))
    assert listed.config.lora_targets == "c_attn"
    with pytest.raises(UsageError, match="takes 'c_attn' as a pattern"):
        program(tmp_path, sft(model=adapters.format("'c_attn'")))


def test_a_trainer_that_quantises_the_model_itself_is_read(tmp_path: Path) -> None:
    eight_bits = "BitsAndBytesConfig(load_in_8bit=True)"
    model = f"'a/b', quantization_config={eight_bits}, peft_config=LoraConfig()"
    assert program(tmp_path, sft(model=model)).config.quantization == "int8"


@pytest.mark.parametrize("is_named", [False, True])
def test_a_quantised_base_that_the_trainer_loads_is_read(tmp_path: Path, is_named: bool) -> None:
    made = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)"
    before = f"bnb = {made}\nkwargs = dict(quantization_config=bnb, dtype='bfloat16')"
    loading = "kwargs" if is_named else f"{{'quantization_config': {made}, 'dtype': 'bfloat16'}}"
    text = sft(
        before=before,
        arguments=f"model_init_kwargs={loading}",
        model="'a/b', peft_config=LoraConfig()",
    )
    assert program(tmp_path, text).config.quantization == "nf4"
    unknown = text.replace("'bfloat16'", "choose()")
    with pytest.raises(UsageError, match=r"model_init_kwargs\['dtype'\]"):
        program(tmp_path, unknown)


@pytest.mark.parametrize(
    ("dataset", "part"),
    [
        ("data['train'].shuffle(seed=1)", None),
        ("data['train'].train_test_split(0.1)['train']", "train_test_split"),
        ("data['train'].select(range(100)).shuffle()", "select"),
        ("load_dataset('json', data_files='train.jsonl', split='train[:50%]')", "split"),
        ("load_dataset('json', data_files='train.jsonl', split='train')", None),
    ],
)
def test_a_part_of_the_examples_is_named(tmp_path: Path, dataset: str, part: str | None) -> None:
    before = "data = load_dataset('json', data_files={'train': 'train.jsonl'})"
    text = sft(before=before, model=f"'a/b', train_dataset={dataset}")
    found = program(tmp_path, text)
    said = f"{part} (all examples are counted; --examples N)"
    assert (said in " ".join((found.ignored, *found.notes))) is (part is not None)


@pytest.mark.parametrize(
    ("dataset", "is_read"),
    [
        ("data", True),
        ("data['train']", True),
        ("data['train'].shuffle(seed=1).train_test_split(0.1)['train']", True),
        ("data.filter(short).shuffle()", False),
        ("data.map(change)", False),
        ("data, formatting_func=change", False),
        ("load_dataset(name, data_files=choose())", False),
        ("[]", False),
    ],
)
def test_the_file_of_examples_is_read_unless_the_program_changes_them(
    tmp_path: Path, dataset: str, is_read: bool
) -> None:
    examples = tmp_path / "train.jsonl"
    examples.write_text('{"text": "one"}\n')
    before = "data = load_dataset('json', data_files={'train': 'train.jsonl'})"
    text = sft(before=before, model=f"'a/b', train_dataset={dataset}")
    found = local_dataset(tmp_path / "train.py", program(tmp_path, text))
    assert found == (examples if is_read else None)


UNSLOTH = """
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Meta-Llama-3.1-8B", {load})
model = FastLanguageModel.get_peft_model(model, r=32, random_state=1, {adapters})
SFTTrainer(model, args=SFTConfig({arguments}))
"""


def test_unsloths_calls_are_read_with_its_defaults(tmp_path: Path) -> None:
    found = program(tmp_path, UNSLOTH.format(load="dtype=None", adapters="", arguments=""))
    config = found.config
    assert (config.quantization, config.double_quant, found.model) == (
        "nf4",
        True,
        "unsloth/Meta-Llama-3.1-8B",
    )
    assert (config.lora_rank, config.seq_len) == (32, 2048)
    assert config.checkpointing == "full" and config.lora_targets.count("_proj") == 7
    assert "Unsloth is not counted: the run needs less memory than estimated." in found.notes
    other = program(
        tmp_path,
        UNSLOTH.format(
            load="load_in_4bit=False, max_seq_length=512",
            adapters="use_gradient_checkpointing=False",
            arguments="max_length=256",
        ),
    ).config
    assert (other.quantization, other.checkpointing, other.seq_len) == ("none", "none", 256)


def test_the_arguments_of_transformers_keep_its_defaults(tmp_path: Path) -> None:
    usual = program(tmp_path, sft()).config
    plain = program(tmp_path, sft().replace("SFTConfig", "TrainingArguments")).config
    assert (usual.checkpointing, usual.precision) == ("full", "bf16_mixed")
    assert (plain.checkpointing, plain.precision) == ("none", "fp32")


def test_a_model_without_a_dtype_says_which_is_assumed(tmp_path: Path) -> None:
    load = "M.from_pretrained('a/b'{})"
    notes = [
        " ".join(program(tmp_path, sft(model=load.format(dtype))).notes)
        for dtype in ("", ", torch_dtype='auto'")
    ]
    assert ["gives no dtype" in note for note in notes] == [True, False]


def test_a_copy_of_the_model_that_trl_makes_itself_is_counted(tmp_path: Path) -> None:
    text = "DPOTrainer('a/b', ref_model=ref, args=DPOConfig(){})"
    assert program(tmp_path, text.format("")).ignored == ""
    adapted = program(tmp_path, text.format(", peft_config=LoraConfig()"))
    assert adapted.ignored == "not counted: ref_model"


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        ("torchrun --nproc-per-node=4 train.py --unused 1", 4),
        ("deepspeed --num_gpus 2 train.py", 2),
        ("CUDA_VISIBLE_DEVICES=0 python train.py", None),
        ("accelerate launch --config_file \\\n  fsdp.yaml train.py", 8),
    ],
)
def test_a_shell_script_that_starts_a_program_is_read(
    tmp_path: Path, command: str, gpus: int | None
) -> None:
    settings = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
    (tmp_path / "fsdp.yaml").write_text(settings)
    alone = program(tmp_path, GRPO)
    started = program(tmp_path, f"export A=1\n# python other.py\n{command}\n", "run.sh")
    assert (started.model, started.num_gpus) == (alone.model, gpus)
    assert ("fsdp" in started.values) is (gpus == 8)


def test_a_shell_script_without_a_training_is_refused(tmp_path: Path) -> None:
    for command in ("python absent.py", "echo train.py"):
        with pytest.raises(UsageError, match="starts no Python program beside it"):
            program(tmp_path, command, "run.sh")


def test_the_file_that_trls_command_names_is_read(tmp_path: Path) -> None:
    """An argument of the command wins over the file, as in TRL."""
    text = "model_name_or_path: Qwen/Qwen3-4B\nper_device_train_batch_size: 4\nmax_length: 512\n"
    (tmp_path / "run.yaml").write_text(text)
    command = "accelerate launch --num_processes 2 -m trl sft --config run.yaml --max_length 256"
    run = program(tmp_path, command, "run.sh")
    assert (run.model, run.num_gpus) == ("Qwen/Qwen3-4B", 2)
    assert (run.config.micro_batch_size, run.config.seq_len) == (4, 256)
    with pytest.raises(UsageError, match=r"run\.sh: there is no file 'absent\.yaml' \(--config\)"):
        program(tmp_path, "trl sft --config absent.yaml", "run.sh")
    with pytest.raises(UsageError, match="config: the script is not executed"):
        program(tmp_path, "trl sft --config $FILE", "run.sh")


def test_a_kind_of_training_that_is_not_read_from_accelerates_file_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: MEGATRON_LM\nnum_processes: 4\n")
    (tmp_path / "train.py").write_text(GRPO)
    with pytest.raises(UsageError, match=r"a\.yaml: distributed_type: 'MEGATRON_LM' is not supp"):
        program(tmp_path, "accelerate launch --config_file a.yaml train.py", "run.sh")


def test_accelerates_compilation_and_hosts_are_read_and_its_other_splits_refused(
    tmp_path: Path,
) -> None:
    def started(settings: str) -> ForeignConfig:
        (tmp_path / "train.py").write_text(GRPO)
        (tmp_path / "a.yaml").write_text(
            f"distributed_type: MULTI_GPU\nnum_processes: 4\n{settings}"
        )
        return program(tmp_path, "accelerate launch --config_file a.yaml train.py", "run.sh")

    plain = started("num_machines: 1\ndynamo_config: {dynamo_backend: 'NO'}\n")
    assert (plain.config.compile, plain.values.get("num_machines")) == ("none", None)
    found = started("num_machines: 2\ndynamo_config: {dynamo_backend: INDUCTOR}\n")
    assert found.config.compile != "none" and found.values["num_machines"] == 2
    started("parallelism_config: {parallelism_config_tp_size: 1}\n")
    (tmp_path / "train.py").write_text(sft(model="'Qwen/Qwen2.5-0.5B'"))
    (tmp_path / "a.yaml").write_text(
        "distributed_type: MULTI_GPU\nnum_processes: 4\nnum_machines: 2"
    )
    report = check(tmp_path / "run.sh", {"gpu": "h100"})
    assert any("each of 4 GPUs of several hosts" in note for note in report.notes)
    with pytest.raises(UsageError, match=r"a\.yaml: cp_size: 2 is not supported"):
        started("parallelism_config: {parallelism_config_cp_size: 2}\n")


@pytest.mark.parametrize(
    ("arguments", "rows", "is_changed"),
    [
        ("per_device_train_batch_size=1, num_generations=6", 6, True),
        (
            "per_device_train_batch_size=1, gradient_accumulation_steps=6, num_generations=6",
            1,
            False,
        ),
        ("per_device_train_batch_size=12, num_generations=6", 12, False),
    ],
)
def test_unsloth_changes_the_micro_batch_of_grpo(
    tmp_path: Path, arguments: str, rows: int, is_changed: bool
) -> None:
    text = UNSLOTH.replace("SFT", "GRPO").format(
        load="fast_inference=True, gpu_memory_utilization=0.6", adapters="", arguments=arguments
    )
    found = program(tmp_path, text)
    assert found.config.micro_batch_size == rows
    assert any("Unsloth then takes num_generations" in note for note in found.notes) is is_changed
    assert found.ignored == "not counted: fast_inference, gpu_memory_utilization"
    plain = program(tmp_path, text.replace("fast_inference=True", "fast_inference=False"))
    assert plain.ignored == ""


def test_a_model_that_unsloth_loads_for_images_is_read(tmp_path: Path) -> None:
    text = UNSLOTH.replace("FastLanguageModel", "FastVisionModel")
    adapters = "finetune_vision_layers=False"
    found = program(tmp_path, text.format(load="", adapters=adapters, arguments=""))
    assert found.config.quantization == "nf4" and found.ignored == ""
    assert any("Images, video and sound are not counted" in note for note in found.notes)


def test_calls_that_return_the_same_model_are_followed(tmp_path: Path) -> None:
    load = "accelerator.prepare_model(M.from_pretrained('a/b'))"
    assert program(tmp_path, sft(model=load)).model == "a/b"
    before = "model, tokenizer = setup_chat_format(M.from_pretrained('a/b'), tokenizer)"
    assert program(tmp_path, sft(before=before, model="model")).model == "a/b"


def test_flags_that_the_program_computes_are_refused(tmp_path: Path) -> None:
    for load, adapters, name in [
        ("full_finetuning=whole", "", "full_finetuning"),
        ("", "use_gradient_checkpointing=recomputes()", "use_gradient_checkpointing"),
    ]:
        with pytest.raises(UsageError, match=f"{name} is computed when"):
            program(tmp_path, UNSLOTH.format(load=load, adapters=adapters, arguments=""))
    kept = "use_gradient_checkpointing='unsloth'"
    found = program(tmp_path, UNSLOTH.format(load="", adapters=kept, arguments=""))
    assert found.config.checkpointing == "full"
    prepared = "prepare_model_for_kbit_training(M.from_pretrained('a/b'), {})"
    with pytest.raises(UsageError, match="use_gradient_checkpointing is computed when"):
        program(tmp_path, sft(model=prepared.format("use_gradient_checkpointing=args.some")))


def test_a_name_in_a_condition_is_not_the_programs_own(tmp_path: Path) -> None:
    before = "length = 64\nif Model.__name__ == 'large':\n    length = 128"
    with pytest.raises(UsageError, match="max_length is computed when"):
        program(tmp_path, sft("max_length=length", before=before))


@pytest.mark.parametrize(
    ("reward", "is_model"),
    [
        ("'org/reward'", True),
        ("[length, 'org/reward']", True),
        ("AutoModelForSequenceClassification.from_pretrained('org/reward')", True),
        ("[length, format]", False),
        ("length", False),
    ],
)
def test_a_reward_model_of_grpo_needs_memory_too(
    tmp_path: Path, reward: str, is_model: bool
) -> None:
    text = GRPO.replace("reward_funcs=[reward]", f"reward_funcs={reward}")
    assert program(tmp_path, text).needs_more is is_model


def test_four_bit_products_in_float32_are_named(tmp_path: Path) -> None:
    model = "M.from_pretrained('a/b', quantization_config=BitsAndBytesConfig(load_in_4bit=True{}))"
    adapters = ", peft_config=LoraConfig()"
    found = [
        program(tmp_path, sft(model=model.format(given) + adapters)).ignored
        for given in ("", ", bnb_4bit_compute_dtype=torch.bfloat16")
    ]
    assert [("float32, which is slower" in ignored) for ignored in found] == [True, False]
