"""Write planning/known_keys.yaml: the keys that TRL, Axolotl and LLaMA-Factory have in a run's
file.

`python tests/helpers/refresh_known_keys.py FOLDER`, where FOLDER has the unpacked wheels of
axolotl, llamafactory, trl and transformers, in one or several versions (`pip download --no-deps`,
`unzip`). Nothing of them is
imported: the names are those of annotated fields, and of aliases, in the classes that the tools
read a file into.
"""

import ast
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

TARGET = Path(__file__).parents[2] / "autotune" / "planning" / "known_keys.yaml"
SOURCES = {
    "trl": ("trl/scripts/utils.py", "trl/trainer/*config.py", "transformers/training_args*.py"),
    "axolotl": ("axolotl/utils/schemas/**/*.py", "axolotl/integrations/**/args.py"),
    "llamafactory": ("llamafactory/hparams/*.py", "transformers/training_args*.py"),
}
TITLES = {"trl": "TRL 1.16", "axolotl": "Axolotl 0.19", "llamafactory": "LLaMA-Factory 0.9.5"}
# Keys that the tools take outside of those classes, and older names that autotune still reads.
MORE = {
    "trl": {
        "accelerate_config",
        "config",
        "env",
        "max_seq_length",
        "num_processes",
        "objective",
        "torch_dtype",
    },
    "axolotl": set[str](),
    "llamafactory": {"model_name", "new_special_tokens", "config"}
    # keys of its next version, which its examples already have
    | {"kt_config", "kt_cpu_activation", "kt_non_expert_weight_path"},
}
HEAD = """\
# The keys that a tool accepts in the configuration file of a run.
# tests/helpers/refresh_known_keys.py extracted them from the sources of the tools and of
# transformers 4 and 5. planning/foreign_config.py reports every other key in a user's file: TRL and
# LLaMA-Factory refuse such a key, and Axolotl ignores it.
"""


def fields(files: Iterable[Path]) -> set[str]:
    """The annotated names of all classes in these files, and their aliases."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                annotated = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
                found |= {target.id for target in annotated if isinstance(target, ast.Name)}
            if isinstance(node, ast.keyword) and node.arg in ("alias", "validation_alias"):
                constants = [
                    part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)
                ]
                found |= {value for value in constants if isinstance(value, str)}
    return {name for name in found if not name.startswith("_")}


def main(folder: Path) -> None:
    text = HEAD
    for tool, patterns in SOURCES.items():
        files = [file for pattern in patterns for file in folder.glob(f"*/{pattern}")]
        names = ", ".join(sorted(fields(files) | MORE[tool]))
        keys = textwrap.fill(
            names, 112, initial_indent="    ", subsequent_indent="    ", break_long_words=False
        )
        text += f"\n{tool}:\n  title: {TITLES[tool]}\n  keys: [\n{keys}]\n"
    TARGET.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
