"""Write export_keys.yaml, the keys that Axolotl and LLaMA-Factory accept, and let them check the
exports.

These tools pin other versions of the same packages than autotune, so that the tests cannot install
them. This program installs each without its dependencies into its own directory, together with the
transformers that it pins. All other packages come from the environment of the tests. After raising
a version below, review the changes in export_keys.yaml:

    python tests/helpers/refresh_export_keys.py [DIRECTORY]     # about 3 minutes and 500 MB;
    DIRECTORY is not deleted
"""

import os
import subprocess
import sys
import tempfile
import textwrap
import types
from pathlib import Path
from typing import Any

import yaml

KEYS = Path(__file__).with_name("export_keys.yaml")
BOTH = (
    "huggingface_hub==1.17.0",
    "datasets==4.8.4",
    "httpx",
    "httpcore",
    "h11",
    "anyio",
    "sniffio",
)
TOOLS = {
    "axolotl": (
        *(
            "axolotl==0.19.0",
            "transformers==5.16.1",
            "addict",
            "art",
            "colorama",
            "einops",
            "fire",
            "pillow",
            "scipy",
        ),
        *("termcolor", *BOTH),
    ),
    "llamafactory": (
        *("llamafactory==0.9.5", "transformers==5.6.0", "tokenizers==0.22.2", "omegaconf==2.3.0"),
        *("antlr4-python3-runtime==4.9.3", *BOTH),
    ),
}
# Options that Axolotl switches on by itself and that do not affect a training step.
HARMLESS = (
    "attn_decontaminates_packing attn_supports_packing attn_uses_flash_lib attn_needs_dtype_cast"
    " eval_sample_packing"
    " experimental_skip_move_to_device generation_do_sample pretrain_multipack_attn"
    " qgalore_proj_quant save_safetensors"
    " shuffle_merged_datasets tiled_mlp_use_original_mlp tokenizer_save_jinja_files"
)


def main(directory: Path) -> None:
    keys_of = {}
    for tool, packages in TOOLS.items():
        home = directory / tool
        if not home.exists():
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                str(home),
                *packages,
            ]
            subprocess.run(pip, check=True)
        files = []
        for number, text in enumerate(_exported(tool)):
            files.append(directory / f"{tool}-{number}.yaml")
            files[-1].write_text(text, encoding="utf-8")
        path = os.pathsep.join((str(home), str(KEYS.parents[2])))
        environment = os.environ | {
            "PYTHONPATH": path,
            "DISABLE_VERSION_CHECK": "1",
            "AXOLOTL_DO_NOT_TRACK": "1",
        }
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        child = [sys.executable, __file__, "--inside", tool, *map(str, files)]
        done = subprocess.run(
            child, env=environment, check=True, stdout=subprocess.PIPE, text=True, cwd=directory
        )
        keys_of[tool] = yaml.safe_load(done.stdout.partition("---\n")[2])
        print(f"{tool}: {len(files)} files accepted, {len(keys_of[tool]['keys'])} keys")
    KEYS.write_text(_text(keys_of), encoding="utf-8")


def _exported(tool: str) -> list[str]:
    """The exports of each configuration of the tests, of models with hostile names, and of runs
    that evaluate.
    """
    from dataclasses import replace

    from autotune.export.formats import FORMATS
    from autotune.problem.run_options import TRACKERS, RunOptions
    from tests.unit.export.test_tool_file_axolotl import CONFIGS, HOSTILE, recipe

    plain = recipe(CONFIGS[0])
    recipes = [
        *map(recipe, CONFIGS),
        *(replace(plain, model=replace(plain.model, name=name)) for name in HOSTILE),
    ]
    held_out = replace(plain.workload, eval_share=0.05)
    options = [RunOptions(eval_steps=50, report_to=tracker) for tracker in TRACKERS]
    recipes += [
        replace(plain, workload=held_out, run_options=one, study=f"a ${{{one}}}") for one in options
    ]
    return [FORMATS[tool](one)[f"{tool}.yaml"] for one in recipes]


def _text(keys_of: dict[str, Any]) -> str:
    lines = ["# Written by refresh_export_keys.py; names are separated by spaces."]
    for tool, lists in keys_of.items():
        lines += [f"{tool}:", f"  source: {' '.join(TOOLS[tool][:2])}"]
        for name, values in lists.items():
            wrapped = textwrap.wrap(" ".join(sorted(values)), 116, break_on_hyphens=False)
            lines += [f"  {name}: >-", *(f"    {line}" for line in wrapped)]
    return "\n".join(lines) + "\n"


def _axolotl(files: list[str]) -> dict[str, list[str]]:
    from axolotl.integrations.liger.args import LigerArgs
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.schemas.config import AxolotlInputConfig
    from axolotl.utils.schemas.datasets import SFTDataset
    from axolotl.utils.schemas.enums import CANONICAL_ATTN_IMPLS, CustomSupportedOptimizers
    from transformers.training_args import OptimizerNames

    gpu = {
        "bf16": True,
        "fp8": True,
        "tf32": True,
        "n_gpu": 1,
        "n_node": 1,
        "compute_capability": "sm_90",
    }
    for file in files:
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        cfg = DictDefault(values)
        prepare_plugins(cfg)
        checked = validate_config(
            cfg, capabilities=gpu, env_capabilities={"torch_version": "2.11.0"}
        ).to_dict()
        for key, value in values.items():  # unchanged by what Axolotl sets itself
            if key != "datasets" and checked.get(key) != value:
                raise SystemExit(f"{file}: {key}: {checked.get(key)!r}, and not {value!r}")
        switched_on = {key for key, value in checked.items() if value is True and key not in values}
        if unknown := switched_on - set(HARMLESS.split()):
            raise SystemExit(f"{file}: Axolotl switches on by itself: {', '.join(sorted(unknown))}")
    return {
        "keys": [*AxolotlInputConfig.model_fields, *LigerArgs.model_fields],
        "dataset_keys": [*SFTDataset.model_fields],
        "attentions": [*CANONICAL_ATTN_IMPLS],
        "optimizers": [
            *(name.value for name in OptimizerNames),
            *(name.value for name in CustomSupportedOptimizers),
        ],
    }


def _llamafactory(files: list[str]) -> dict[str, list[str]]:
    from dataclasses import fields

    import llamafactory
    from llamafactory.extras.constants import AttentionFunction
    from llamafactory.hparams import parser
    from omegaconf import OmegaConf
    from transformers.training_args import OptimizerNames

    data_package = types.ModuleType("llamafactory.data")  # its own imports torchaudio
    data_package.__path__ = [str(Path(llamafactory.__file__).parent / "data")]
    sys.modules["llamafactory.data"] = data_package
    from llamafactory.data.parser import DatasetAttr, get_dataset_list

    from autotune.core.files import load_data

    datasets = load_data("autotune.export", "tools")["llamafactory"]["json_files"][
        "dataset_info.json"
    ]
    (dataset,) = get_dataset_list(["your_dataset"], datasets)
    if (dataset.load_from, dataset.formatting, dataset.messages, dataset.role_tag) != (
        "file",
        "sharegpt",
        "messages",
        "role",
    ):
        raise SystemExit(f"dataset_info.json is read differently: {vars(dataset)}")
    parser.is_torch_bf16_gpu_available = lambda: True
    for file in files:
        # as `llamafactory-cli train` reads it
        values = OmegaConf.to_container(OmegaConf.load(file))
        if values != yaml.safe_load(Path(file).read_text(encoding="utf-8")):
            raise SystemExit(f"{file}: OmegaConf reads it differently")
        without_gpu = {"use_cpu": True, "bf16": False, "fp16": False}
        model, data, training, finetuning, _ = parser.get_train_args(values | without_gpu)
        read = {**vars(training), **vars(finetuning), **vars(data), **vars(model)}
        for key, value in values.items():
            if key in ("bf16", "fp16", "report_to", "dataset", "lora_target"):
                continue
            if key == "cutoff_len":
                value -= values["packing"]  # packed rows get one more
            if read[key] != value:
                raise SystemExit(f"{file}: {key}: {read[key]!r}, and not {value!r}")
    return {
        "keys": [field.name for arguments in parser._TRAIN_ARGS for field in fields(arguments)],
        "dataset_keys": [
            *(field.name for field in fields(DatasetAttr)),
            "file_name",
            "columns",
            "tags",
            "hf_hub_url",
        ],
        "attentions": [name.value for name in AttentionFunction],
        "optimizers": [name.value for name in OptimizerNames],
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside = {"axolotl": _axolotl, "llamafactory": _llamafactory}[sys.argv[2]](sys.argv[3:])
        print("---")
        print(yaml.safe_dump({name: sorted(set(values)) for name, values in inside.items()}))
    elif len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
