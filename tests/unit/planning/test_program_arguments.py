"""Values that a program takes from its command line, its environment, and a script."""

from pathlib import Path

import pytest

from autotune.core.errors import UsageError
from autotune.planning.foreign_config import read_file
from autotune.report.values.check import ForeignConfig

ARGPARSE = """
import argparse

def options():
    parser = argparse.ArgumentParser(description="teach a model to cook")
    parser.add_argument("--base", "-b", default="Qwen/Qwen2.5-0.5B")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default="4")
    parser.add_argument("--epochs", type=float, required=True)
    parser.add_argument("--rank", dest="lora_rank", type=int, default=2 * 8)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--four_bit", action="store_true")
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--bf16", type=str2bool, default=True)
    parser.add_argument("--lr", type=float, default=1e-4)
    return parser.parse_args()

def train(args):
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    quantization = BitsAndBytesConfig(load_in_4bit=True) if args.four_bit else None
    model = AutoModelForCausalLM.from_pretrained(args.base, quantization_config=quantization)
    model = get_peft_model(model, LoraConfig(r=args.lora_rank, target_modules=args.targets))

    def cut(row):
        return tokenizer(row["text"], truncation=True, max_length=args.max_length)

    settings = TrainingArguments(
        per_device_train_batch_size=args.batch_size,
        num_train_epochs=EPOCHS,
        gradient_checkpointing=args.recompute,
        bf16=args.bf16,
        learning_rate=args.lr,
    )
    Trainer(model, settings, train_dataset=load_dataset("recipes")["train"].map(cut)).train()

if __name__ == "__main__":
    train(options())
"""
DATACLASSES = """
@dataclass
class Model:
    model_name_or_path: Optional[str] = field(default="facebook/opt-125m")
    use_lora: bool = False

@dataclass
class Arguments(transformers.TrainingArguments):
    cache_dir: Optional[str] = field(default=None)
    optim: str = field(default="adafactor", metadata={"help": "the optimizer"})
    model_max_length: int = field(default=256)
    targets: list[str] = field(default_factory=lambda: ["q_proj", "v_proj"])

def main():
    parser = transformers.HfArgumentParser((Model, Arguments))
    model_args, training_args = parser.parse_args_into_dataclasses()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path, cache_dir=training_args.cache_dir, dtype="auto"
    )
    if model_args.use_lora:
        model = get_peft_model(model, LoraConfig(target_modules=training_args.targets))
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        model_args.model_name_or_path, model_max_length=training_args.model_max_length
    )
    def encode(rows):
        return tokenizer(rows["text"], truncation=True, max_length=tokenizer.model_max_length)
    module = dict(train_dataset=load_dataset("a").map(encode), data_collator=default_data_collator)
    Trainer(model=model, args=training_args, **module).train()
"""
TRL_SCRIPT = """
if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=load_dataset(script_args.dataset_name)["train"],
        peft_config=get_peft_config(model_args),
    )
"""


def program(folder: Path, text: str, command: str = "") -> ForeignConfig:
    """Read a program, which a script starts if there is a command."""
    (folder / "train.py").write_text(text)
    if not command:
        return read_file(folder / "train.py")
    (folder / "run.sh").write_text(f"{command}\n")
    return read_file(folder / "run.sh")


def assumed(run: ForeignConfig) -> str:
    """The note about the defaults that are assumed."""
    return next((note for note in run.notes if "own defaults are assumed" in note), "")


def test_the_defaults_of_argparse_are_assumed_and_named(tmp_path: Path) -> None:
    found = program(tmp_path, ARGPARSE.replace("EPOCHS", "3"))
    config = found.config
    assert (found.model, config.seq_len, config.micro_batch_size) == ("Qwen/Qwen2.5-0.5B", 512, 4)
    assert (config.lora_rank, config.lora_targets) == (16, "q_proj,v_proj")
    assert (config.quantization, config.checkpointing) == ("none", "full")
    assert config.precision == "bf16_mixed"
    names = "--base, --batch_size, --bf16, --four_bit, --max-length, --rank, --recompute, --targets"
    assert f"are assumed: {names}. Pass the shell script" in assumed(found)


def test_the_words_of_a_script_replace_the_defaults(tmp_path: Path) -> None:
    command = (
        "SIZE=2\nexport RANK_OF='32'\nCUDA_VISIBLE_DEVICES=0 python train.py \\\n"
        "  -b mistralai/Mistral-7B-v0.1 --max-length=128 --batch_size $SIZE --rank ${RANK_OF} \\\n"
        "  --targets q_proj k_proj v_proj --four_bit --no-recompute --bf16 False --epochs 2 \\\n"
        "  --lr 3e-5 --unknown 1 # --max-length 64"
    )
    found = program(tmp_path, ARGPARSE.replace("EPOCHS", "args.epochs"), command)
    config = found.config
    assert (found.model, config.seq_len) == ("mistralai/Mistral-7B-v0.1", 128)
    assert (config.micro_batch_size, config.lora_rank, found.epochs) == (2, 32, 2.0)
    assert config.lora_targets == "k_proj,q_proj,v_proj"
    assert (config.quantization, config.checkpointing) == ("nf4", "none")
    assert assumed(found) == ""
    assert "--unknown" in found.ignored and "--lr" not in found.ignored


@pytest.mark.parametrize(
    ("epochs", "command", "words"),
    [
        ("args.epochs", "", "num_train_epochs is the argument --epochs of the command line"),
        ("args.epochs", "python train.py", "which has no default"),
        ("args.epochs", "python train.py --epochs $1", r"the value of \$1 is unknown"),
        ("args.epochs", "python train.py --epochs 'a b", "No closing quotation"),
        ("args.absent", "", "num_train_epochs is computed when"),
        ("int(os.environ['EPOCHS'])", "", "num_train_epochs is computed when"),
        ("3", "X=1\nX=2\npython train.py --max-length $X", r"train.py:.*length of the examples"),
    ],
)
def test_an_argument_without_a_value_is_refused(
    tmp_path: Path, epochs: str, command: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        program(tmp_path, ARGPARSE.replace("EPOCHS", epochs), command)


def test_arguments_that_the_program_changes_or_sets_elsewhere_are_unknown(tmp_path: Path) -> None:
    for change in ("args.batch_size = fit()", "parser.set_defaults(batch_size=8)"):
        text = ARGPARSE.replace("EPOCHS", "3").replace(
            "    tokenizer =", f"    {change}\n    tokenizer ="
        )
        with pytest.raises(UsageError, match="per_device_train_batch_size is computed when"):
            program(tmp_path, text)


def test_a_parser_of_known_arguments_is_read(tmp_path: Path) -> None:
    text = ARGPARSE.replace("EPOCHS", "3").replace(
        "return parser.parse_args()", "args, rest = parser.parse_known_args()\n    return args"
    )
    assert program(tmp_path, text).config.seq_len == 512
    own = text.replace("parse_known_args()", "parse_known_args(['--batch_size', '1'])")
    with pytest.raises(UsageError, match=r"is computed|is chosen"):
        program(tmp_path, own)


def test_the_environment_is_read(tmp_path: Path) -> None:
    text = ARGPARSE.replace("EPOCHS", "int(os.environ.get('EPOCHS', 3))").replace(
        "args.base", "os.getenv('BASE', 'facebook/opt-125m')"
    )
    plain = program(tmp_path, text)
    assert (plain.model, plain.epochs) == ("facebook/opt-125m", 3.0)
    assert "BASE, EPOCHS" in assumed(plain)
    given = program(tmp_path, text, "export BASE=a/b\nEPOCHS=7 python train.py")
    assert (given.model, given.epochs, assumed(given)) == ("a/b", 7.0, "")


def test_dataclasses_are_read_with_the_words_of_the_command(tmp_path: Path) -> None:
    found = program(tmp_path, DATACLASSES)
    config = found.config
    assert (found.model, config.seq_len, config.optimizer) == (
        "facebook/opt-125m",
        256,
        "adafactor",
    )
    assert (config.method, config.micro_batch_size) == ("full", 8)
    names = "--model_max_length, --model_name_or_path, --optim, --use_lora"
    assert f"are assumed: {names}." in assumed(found)

    command = (
        "torchrun --nproc_per_node=2 train.py --model_name_or_path huggyllama/llama-7b --bf16 True "
        "--model_max_length 512 --per_device_train_batch_size 2 --learning_rate 2e-5 --use_lora "
        "--gradient-accumulation-steps 8 --fsdp 'full_shard auto_wrap'"
    )
    given = program(tmp_path, DATACLASSES, command)
    config = given.config
    assert (given.model, config.seq_len, given.num_gpus) == ("huggyllama/llama-7b", 512, 2)
    assert (config.micro_batch_size, given.accumulation) == (2, 8)
    assert (config.method, config.lora_targets) == ("lora", "q_proj,v_proj")
    assert config.precision == "bf16_mixed" and given.values["fsdp"] == "full_shard auto_wrap"
    assert given.ignored == "" and assumed(given) == ""
    with pytest.raises(UsageError, match="no_such_key: transformers has no such key"):
        program(tmp_path, DATACLASSES, f"{command} --no_such_key 1")


def test_trls_own_scripts_are_read(tmp_path: Path) -> None:
    command = (
        "accelerate launch train.py --model_name_or_path Qwen/Qwen2.5-0.5B --use_peft --lora_r 32 "
        "--lora_target_modules q_proj k_proj --max_length 2048 --packing --dataset_name a/b"
    )
    found = program(tmp_path, TRL_SCRIPT, command)
    config = found.config
    assert (found.model, config.method, config.lora_rank) == ("Qwen/Qwen2.5-0.5B", "lora", 32)
    assert (config.seq_len, config.packing, config.lora_targets) == (2048, True, "k_proj,q_proj")
    assert found.dataset == "a/b" and found.ignored == ""
    whole = program(tmp_path, TRL_SCRIPT, command.replace("--use_peft", ""))
    assert whole.config.method == "full"
    with pytest.raises(UsageError, match="the model is chosen when"):
        program(tmp_path, TRL_SCRIPT)


def test_a_function_that_fire_calls_is_read(tmp_path: Path) -> None:
    text = """
def train(base_model: str = "", micro_batch_size: int = 4, batch_size: int = 128,
          cutoff_len: int = 256, lora_target_modules: List[str] = ["q_proj", "v_proj"]):
    accumulation = batch_size // micro_batch_size
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size != 1:
        accumulation = accumulation // world_size
    tokenizer = LlamaTokenizer.from_pretrained(base_model)
    model = LlamaForCausalLM.from_pretrained(base_model, load_in_8bit=True)
    model = get_peft_model(model, LoraConfig(target_modules=lora_target_modules))
    rows = load().map(lambda row: tokenizer(row["text"], truncation=True, max_length=cutoff_len))
    Trainer(model=model, train_dataset=rows, args=transformers.TrainingArguments(
        per_device_train_batch_size=micro_batch_size, gradient_accumulation_steps=accumulation))

if __name__ == "__main__":
    fire.Fire(train)
"""
    command = "{} train.py --base_model huggyllama/llama-7b --cutoff_len=512 --micro_batch_size 8"
    alone = program(tmp_path, text, command.format("python"))
    assert (alone.model, alone.config.seq_len) == ("huggyllama/llama-7b", 512)
    assert (alone.config.micro_batch_size, alone.accumulation) == (8, 16)
    assert alone.config.lora_targets == "q_proj,v_proj"
    four = program(tmp_path, text, command.format("torchrun --nproc_per_node=4"))
    assert (four.accumulation, four.num_gpus) == (4, 4)
    with pytest.raises(UsageError, match="the model is chosen when"):
        program(tmp_path, text)


SCRIPTS_OF_VARIABLES = {
    "defaults": "BATCH_OF=${BATCH_OF:-4}\n"
    'python train.py --batch_size "${BATCH_OF}" --max-length 256',
    "set if unset": ": ${BATCH_OF:=4}\npython train.py --batch_size $BATCH_OF --max-length 256",
    "defaults in defaults": "python train.py --batch_size ${A_OF:-${B_OF:-4}} --max-length 256",
    "computed": "N=8\npython train.py --batch_size $((N / 2)) --max-length $((N * 32))",
    "an array": "ARGS=(\n  --batch_size 4  # small\n)\nARGS+=(--max-length 256)\n"
    'python train.py "${ARGS[@]}" "$@"',
    "added words": 'ARGS="--batch_size 4"\nARGS+=" --max-length 256"\n'
    "python train.py $ARGS $EXTRA_OF",
    "refused without a value": ": ${SET_OF:?set SET_OF}\nBATCH_OF=${SET_OF:?set it}\n"
    "python train.py --batch_size $BATCH_OF --max-length 256",
    "only with a value": "python train.py --batch_size 4 ${OTHER_OF:+--batch_size 8} "
    "--max-length 256",
}


@pytest.mark.parametrize("script", SCRIPTS_OF_VARIABLES.values(), ids=SCRIPTS_OF_VARIABLES)
def test_variables_of_the_shell_are_followed(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_OF", "4")
    config = program(tmp_path, ARGPARSE.replace("EPOCHS", "1"), script).config
    assert (config.micro_batch_size, config.seq_len) == (4, 256)


def test_the_environment_replaces_defaults_and_both_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_OF", "2")
    script = (
        "BATCH_OF=${BATCH_OF:-4}\npython train.py --batch_size $BATCH_OF --max-length ${LEN_OF-64}"
    )
    found = program(tmp_path, ARGPARSE.replace("EPOCHS", "1"), script)
    assert (found.config.micro_batch_size, found.config.seq_len) == (2, 64)
    assert any("values of this environment: BATCH_OF=2, LEN_OF=64" in one for one in found.notes)

    swift = 'swift sft --model Qwen/Qwen2.5-7B --dataset a --max_length "${LEN_OF:-128}"'
    found = program(tmp_path, "", swift)
    assert found.config.seq_len == 128 and "LEN_OF" not in found.ignored
    assert any("this environment: LEN_OF=128" in one for one in found.notes)


def test_variables_that_a_program_reads_are_those_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ARGPARSE.replace("EPOCHS", "int(os.environ.get('EPOCHS_OF', 3))")
    command = "python train.py --batch_size 4 --max-length 64"
    assert program(tmp_path, text, command).epochs == 3
    monkeypatch.setenv("EPOCHS_OF", "2")
    found = program(tmp_path, text, command)
    assert found.epochs == 2
    assert any("values of this environment: EPOCHS_OF=2." in note for note in found.notes)
    assert program(tmp_path, text, f"EPOCHS_OF=5 {command}").epochs == 5


def test_no_secret_of_the_environment_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number such as MAX_TOKENS is none."""
    monkeypatch.setenv("HF_TOKEN", "canary-hub")
    monkeypatch.setenv("DATABASE", "postgresql://me:canary-password@host/db")
    monkeypatch.setenv("MAX_TOKENS", "128")
    script = (
        "swift sft --model Qwen/Qwen2.5-7B --dataset a --hub_token $HF_TOKEN --max_length"
        " $MAX_TOKENS --output_dir ${DATABASE} --run_name ${A_TOKEN:-canary-default}"
    )
    found = program(tmp_path, "", script)
    assert found.config.seq_len == 128 and "canary" not in str(found)
    assert any("values of this environment: MAX_TOKENS=128" in one for one in found.notes)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("if true; then\n  A='--batch_size 8'\nfi\npython train.py $A", r"the words of \$A are"),
        ('A=(--bf16)\nif true; then\n A+=(--bf16)\nfi\npython train.py "${A[@]}"', "the words of"),
        ("python train.py --batch_size $((8 / $(nproc)))", "per_device_train_batch_size is comp"),
        ("python train.py --batch_size 2 3", "per_device_train_batch_size is computed"),
    ],
)
def test_unknown_words_are_refused_instead_of_left_out(
    tmp_path: Path, script: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        program(tmp_path, ARGPARSE.replace("EPOCHS", "1"), script)
