"""The layers hold: who imports whom, where the heavy libraries live, and what the quick commands
load.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from autotune.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "autotune"
TRAINER = PACKAGE / "trainer"  # exported as it is: its modules import each other relatively

# A package imports only from packages before it, and from itself.
PACKAGES = [
    "trainer",
    "core",
    "catalog",
    "problem",
    "prediction",
    "probe",
    "dry",
    "study",
    "export",
    "report",
    "planning",
    "api",
    "cli",
    "__main__",
    "",  # autotune/__init__.py, the public face
]

# The modules of the worker's process and of the process that counts dry steps.
CHILD = {
    "dry": (
        "compiled",
        "counting",
        "expert_parallel",
        "fast_kernels",
        "flex",
        "meta_device",
        "preference",
        "segments",
        "storage_counter",
        "worker",
    ),
    "probe": (
        "accounting",
        "ahead_worker",
        "channel",
        "collective_rates",
        "device_rates",
        "engine_worker",
        "engines",
        "fault_injection",
        "grpo_entry",
        "harness",
        "kernels",
        "learner",
        "health",
        "meters",
        "micro_profiler",
        "model_settings",
        "model_shape",
        "phase_log",
        "rank",
        "recorder",
        "resident",
        "rollout_trainer",
        "schedule",
        "skewed_routing",
        "demo_model",
        "synthetic_model",
        "tiny_probe",
        "trl_entry",
        "trl_trainer",
        "turns",
        "worker",
    ),
}
IN_CHILD = {f"{package}.{name}" for package, names in CHILD.items() for name in names}
CHILD_MAY = {"core"}
IN_A_TRAINER = {"api.trainer_callback"}  # another trainer's process imports it

TORCH = frozenset(
    {
        "torch",
        "transformers",
        "peft",
        "bitsandbytes",
        "accelerate",
        "torchao",
        "safetensors",
        "trl",
        "datasets",
    }
)
HEAVY = TORCH | {"optuna", "sqlalchemy", "plotly", "numpy", "pandas", "pydantic", "jinja2"}
STORAGE = {f"study.storage.{name}" for name in ("database", "probe_store", "leases")}
HOMES = {
    "optuna": {"study.optimizer", "study.storage.optuna_storage", "report.dashboard"},
    "optuna_dashboard": {"report.dashboard"},
    "sqlalchemy": STORAGE,
    "plotly": {"report.style", "report.dashboard", "api.studies"},
    "gpuhunt": {"catalog.live_prices"},
    "ray": {"study.worker_group"},
    "jinja2": {"core.pages"},
    "pynvml": {"core.nvml"},
    "numpy": set[str](),
    "pandas": set[str](),
}


def runs_in_child(module: str) -> bool:
    return layer(module) == "trainer" or module in IN_CHILD


def home_of(library: str) -> set[str] | None:
    """The modules that may import a library; None for any."""
    if library in TORCH:
        child = {module for module in modules() if runs_in_child(module)}
        return child | IN_A_TRAINER | ({"problem.dataset"} if library == "transformers" else set())
    return HOMES.get(library)


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name: `module` as it stands, `name` for `from module import name`, else None."""

    module: str
    name: str | None
    at_module_level: bool
    for_types_only: bool


def imports(text: str, package: str | None = None) -> Iterator[Import]:
    """Every import of a source text, inside functions too.

    Relative ones are allowed within `package` alone.
    """

    def walk(node: ast.AST, top: bool, types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(
                        module=alias.name, name=None, at_module_level=top, for_types_only=types
                    )
            elif isinstance(child, ast.ImportFrom):
                module = child.module
                if child.level:
                    assert package and child.level == 1, f"line {child.lineno}: a relative import"
                    module = f"{package}.{module}" if module else package
                for alias in child.names:
                    yield Import(
                        module=module, name=alias.name, at_module_level=top, for_types_only=types
                    )
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                yield from walk(ast.Module(child.body, []), top, True)
                yield from walk(ast.Module(child.orelse, []), top, types)
            else:
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, top and not function, types)

    return walk(ast.parse(text), True, False)


def module_name(path: Path) -> str:
    """'probe.model' for autotune/probe/model.py, 'report' for autotune/report/__init__.py, '' for
    the package.
    """
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@cache
def modules() -> dict[str, tuple[Import, ...]]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        package = "autotune.trainer" if path.parent == TRAINER else None
        found[module_name(path)] = tuple(imports(path.read_text(), package))
    return found


def ours(found: Import) -> str | None:
    """The module of ours that an import means, '' for the
    package itself; None for anybody else's.
    """
    if found.module != "autotune" and not found.module.startswith("autotune."):
        return None
    module = found.module.removeprefix("autotune").removeprefix(".")
    inner = f"{module}.{found.name}".removeprefix(".")
    return inner if inner in modules() else module


def layer(module: str) -> str:
    return module.partition(".")[0]


def edges() -> Iterator[tuple[str, str, Import]]:
    """(importer, imported, how) among our own modules."""
    for module, found in modules().items():
        for one in found:
            target = ours(one)
            if target:
                yield module, target, one


# --- the reader itself


def test_the_reader_sees_every_form_of_import():
    text = (
        "import os, torch.nn as nn\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from pydantic import BaseModel\nelse:\n    import one\n"
        "try:\n    import two\nexcept ImportError:\n    import three\n"
        "class A:\n    import four\n    def f(self):\n        if True:\n"
        "            from five import x, y\n"
        "async def g():\n    import six\n"
    )
    found = [
        (one.module, one.name, one.at_module_level, one.for_types_only) for one in imports(text)
    ]
    assert found == [
        ("os", None, True, False),
        ("torch.nn", None, True, False),
        ("typing", "TYPE_CHECKING", True, False),
        ("pydantic", "BaseModel", True, True),
        ("one", None, True, False),
        ("two", None, True, False),
        ("three", None, True, False),
        ("four", None, True, False),
        ("five", "x", False, False),
        ("five", "y", False, False),
        ("six", None, False, False),
    ]
    with pytest.raises(AssertionError, match="line 2: a relative import"):
        list(imports("import os\nfrom . import config\n"))
    found = list(imports("from . import rows\nfrom .clock import Clock\n", "autotune.trainer"))
    assert [(one.module, one.name) for one in found] == [
        ("autotune.trainer", "rows"),
        ("autotune.trainer.clock", "Clock"),
    ]
    with pytest.raises(AssertionError, match="line 1: a relative import"):
        list(imports("from ..core import units\n", "autotune.trainer"))


def test_our_own_modules_are_recognised():
    def one(module: str, name: str | None = None) -> str | None:
        return ours(Import(module=module, name=name, at_module_level=True, for_types_only=False))

    assert one("autotune", "core") == "core"
    assert one("autotune", "__version__") == ""
    assert one("autotune.catalog", "Price") == "catalog"
    assert one("autotune.catalog.models") == "catalog.models"
    assert one("autotune.probe", "worker") == "probe.worker"
    assert one("autotuner") is None
    assert len(list(edges())) > 100


# --- who imports whom


def test_every_module_has_a_package():
    assert {layer(module) for module in modules()} == set(PACKAGES)


def test_imports_follow_the_order_of_packages():
    wrong = [
        f"{module} imports {target}"
        for module, target, how in edges()
        if layer(module) != layer(target)
        and (PACKAGES.index(layer(target)) > PACKAGES.index(layer(module)))
    ]
    assert wrong == []


def test_the_top_level_is_short_and_no_package_outgrows_the_others():
    top = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(top) <= 16
    lines = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        lines[layer(module_name(path))] += len(path.read_text().splitlines())
    largest, count = lines.most_common(1)[0]
    assert count <= 0.18 * lines.total(), f"{largest} has {count / lines.total():.0%} of the lines"


def test_there_is_no_circle_among_modules():
    waiting = {
        module: {target for source, target, _ in edges() if source == module}
        for module in modules()
    }
    while free := [module for module, needs in waiting.items() if not needs & set(waiting)]:
        for module in free:
            del waiting[module]
    assert waiting == {}


def is_renderer(module: str) -> bool:
    """Whether a module shows answers; commands find them, and `report.values` are the answers
    themselves.
    """
    package, _, name = module.partition(".")
    return (package == "report" and not name.startswith("values")) or (
        package == "cli" and "commands" not in name
    )


def test_renderers_read_values_and_plan_nothing():
    wrong = [
        f"{module} imports {target}"
        for module, target, _ in edges()
        if is_renderer(module) and layer(target) in ("planning", "prediction")
    ]
    assert wrong == []
    assert {"cli.console", "cli.plan_text", "report.html", "report.figures"} <= set(
        filter(is_renderer, modules())
    )


def test_nothing_imports_the_worker():
    assert [module for module, target, _ in edges() if target == "probe.worker"] == []


def test_processes_of_ours_are_started_by_one_command():
    assert [path.name for path in PACKAGE.rglob("*.py") if '"-m"' in path.read_text()] == [
        "process.py"
    ]


def test_what_runs_in_the_child_knows_values_only():
    wrong = [
        f"{module} imports {target}"
        for module, target, _ in edges()
        if runs_in_child(module)
        and not runs_in_child(target)
        and not CHILD_MAY & {target, layer(target)}
        and target != "trainer"
    ]
    assert wrong == []
    assert set(modules()) >= IN_CHILD


def test_the_trainer_imports_no_other_package_of_ours():
    wrong = [
        f"{module} imports {target}"
        for module, target, _ in edges()
        if layer(module) == "trainer" and layer(target) != "trainer"
    ]
    assert wrong == []


# --- where the heavy libraries live


def test_libraries_stay_in_their_homes():
    wrong = [
        f"{module or 'autotune'} imports {one.module}"
        for module, found in modules().items()
        for one in found
        if (home := home_of(layer(one.module))) is not None and module not in home
    ]
    assert wrong == []
    at_home = {layer(one.module) for found in modules().values() for one in found}
    assert {
        "torch",
        "transformers",
        "peft",
        "optuna",
        "sqlalchemy",
        "plotly",
        "jinja2",
        "pynvml",
    } <= at_home


@pytest.mark.parametrize("library", ["pydantic", "pydantic_core", "plotly", "pynvml", "yaml"])
def test_slow_imports_wait_until_they_are_needed(library):
    eager = {
        module
        for module, found in modules().items()
        for one in found
        if layer(one.module) == library and one.at_module_level and not one.for_types_only
    }
    # Modules that are themselves loaded on use.
    loaded_on_use = {
        "yaml": {"export.recipe_yaml"},
        "pydantic": {"planning.submission", "problem.space_file"},
        "pydantic_core": {"problem.space_file"},
    }
    assert eager == loaded_on_use.get(library, set())


# --- what is installed

PACKAGE_OF = {
    "PIL": "pillow",
    "yaml": "pyyaml",
    "pynvml": "nvidia-ml-py",
}  # where the import has another name than the package


NAME = "autotune-llm"


def names_of(requirements: list[str]) -> set[str]:
    """'psycopg[binary]==3.3.9' -> 'psycopg'."""
    return {re.split(r"[^\w.-]", one)[0].lower().replace("_", "-") for one in requirements}


def packages_of(found: Iterable[Import]) -> set[str]:
    """The packages of others that these imports need."""
    theirs = {layer(one.module) for one in found} - sys.stdlib_module_names - {"autotune", "tests"}
    return {PACKAGE_OF.get(name, name.replace("_", "-")) for name in theirs}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name: names_of(requirements)
        for name, requirements in project["optional-dependencies"].items()
    }
    for_tests = (extras.pop("test") | extras.pop("test-extra")) - {NAME}
    declared = names_of(project["dependencies"]).union(*extras.values())
    imported = packages_of(one for found in modules().values() for one in found)
    # SQLAlchemy imports psycopg, if the URL says so. Extras name this package's extra `run`. With
    # torch for GPUs comes triton. Axolotl loads the plug-in that imports it. vLLM needs one version
    # of torch, so its users install it themselves. With `datasets` comes pyarrow, which can
    # decompress files, too.
    assert imported - {"triton", "axolotl", "vllm", "pyarrow"} == declared - {"psycopg", NAME}

    tools = {"refresh_export_keys.py"}  # runs where the trainers are installed
    files = [
        path
        for name in ("tests", "benchmarks")
        for path in (ROOT / name).rglob("*.py")
        if path.name not in tools
    ]
    benchmarks = {path.stem.replace("_", "-") for path in files if path.parent.name == "benchmarks"}
    used = packages_of(one for path in files for one in imports(path.read_text()))
    # Which labels.py and the programs named *_tool.py take from given folders.
    others = {"axolotl", "llamafactory", "liger-kernel", "omegaconf", "torchtune", "unsloth"}
    others |= {"canifinetune", "fitcheck", "fitscout", "hf-vram-calc"}  # of estimators_tool.py
    others |= {"vllm"}  # tests/helpers/vllm_stand_in
    assert used - declared - for_tests - benchmarks - others == {"triton"}


# --- what the quick commands load


def run(code: str, directory: Path, *args: str) -> tuple[int, set[str], str, str]:
    """(exit status, the top-level modules that were loaded in the end, stderr, stdout) of a fresh
    interpreter.
    """
    code = f"import atexit, sys\natexit.register(lambda: print('LOADED', *sys.modules))\n{code}"
    # A command may look for a Hub or a card; there is none, and no network is waited for.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PYTHONPATH": os.pathsep.join((str(directory), str(ROOT)))}
    environment |= {"XDG_CACHE_HOME": str(directory / "cache")}  # of counted steps
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    printed, _, loaded = done.stdout.rpartition("LOADED ")
    assert "autotune" in loaded.split(), done.stderr
    return done.returncode, {layer(name) for name in loaded.split()}, done.stderr, printed


def test_the_command_line_is_light(tmp_path):
    status, loaded, _, _ = run("import autotune.cli.app", tmp_path)
    assert status == 0
    assert loaded & (HEAVY | {"yaml", "rich", "pynvml", "psutil"}) <= {"rich"}  # typer brings rich
    assert "typer" in loaded


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["--help"], 0, ""),
        (["gpus"], 0, ""),
        (["models", "--json"], 0, ""),
        (["run", "--model", "demo-3m", "--epochs", "0"], 2, "error: epochs cannot be 0"),
        (
            ["run", "--model", "x", "--budget", "nonsense"],
            2,
            "error: --budget: 'nonsense' is not a duration",
        ),
        (["run", "--model", "demo-3m"], 3, "error: an NVIDIA GPU was asked for"),
    ],
)
def test_quick_commands_load_nothing_heavy(tmp_path, args, status, says):
    code, loaded, errors, _ = run("from autotune.cli.app import main; main()", tmp_path, *args)
    assert code == status, errors
    assert errors.startswith(says)
    assert "Traceback" not in errors
    # by typer itself, which builds a command's parameters with it
    assert loaded & HEAVY <= {"pydantic"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [*COMMANDS, "dev inject"])
def test_the_help_of_every_command_loads_nothing_heavy(tmp_path, command):
    code, loaded, errors, _ = run(
        "from autotune.cli.app import main; main()", tmp_path, *command.split(), "--help"
    )
    assert code == 0, errors
    assert loaded & HEAVY <= {"pydantic"}
    assert list(tmp_path.iterdir()) == []


def test_commands_load_other_packages_when_they_run():
    eager = {
        target
        for module, target, how in edges()
        if module.startswith("cli.commands.") and how.at_module_level and not how.for_types_only
    }
    # Options are made from the first, which loads the second; the third is small, and the last are
    # values.
    light = {
        "problem.study_spec",
        "problem.gpu_counts",
        "study.storage.location",
        "report.values.commands",
    }
    assert {target for target in eager if layer(target) not in ("cli", "core")} <= light
    # These print what was found, or stand on what finds it.
    assert eager & {"cli.console", "cli.plan_text", "cli.check_text"} == set()
