"""Changes one thing in a copy of the package and asks whether the tests notice it: `python -m
tests.mutate`.

Neither mutmut nor cosmic-ray takes a seeded sample. mutmut rewrites functions so that they import
mutmut, which breaks the exported script, and it does not reach tables and defaults. cosmic-ray
changes the working tree and has one test command for all modules.

Mutants that change nothing that anybody could see are named, with the reason, in
`equivalent_mutants.yaml`.
"""

import argparse
import ast
import hashlib
import itertools
import multiprocessing
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import time
from bisect import bisect, bisect_left
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autotune"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.yaml")
# What computes, decides, stores and exports.
PACKAGES = (
    "core",
    "catalog",
    "prediction",
    "problem",
    "trainer",
    "probe",
    "dry",
    "study",
    "export",
    "planning",
)
# A module is asked about by the tests with its name, the unit tests of its package and those that
# import it, and where these see nothing by the first of these that fits.
MORE_TESTS = {
    "core/errors": "unit/cli",
    "core/train_config": "unit/problem unit/prediction unit/probe/test_model_settings.py",
    "core/probe_types": "unit/probe unit/prediction unit/problem unit/study/test_selection.py",
    "prediction/": "unit/planning/test_one_estimate.py unit/test_benchmarks.py",
    "study/storage/": "contract",
    "study/optimizer": "contract/test_optimizer.py",
    "study/session": "system/test_loop.py system/test_resume.py",
    "study/scaling": "unit/planning/test_several_gpus.py unit/report",
    "study/progress": "unit/cli",
    "study/s": "unit/report unit/test_benchmarks.py",
    "study/": "unit/test_benchmarks.py system/test_resume.py",
    "trainer/patches": "probe/test_tiles.py probe/test_train_script.py",
    "trainer/rows": "probe/test_packing.py probe/test_train_script.py",
    "trainer/varlen": "probe/test_packing.py probe/test_kept_activations.py",
    "trainer/grouped_kernels": "probe/test_grouped_lora.py",
    "trainer/grouped_lora": "probe/test_mixture_levers.py",
    "trainer/packed_experts": "probe/test_mixture_quality.py",
    "trainer/float8": "probe/test_mixture_levers.py probe/test_patches.py",
    "trainer/host_checkpoints": "probe/test_tiles.py probe/test_patches.py",
    "trainer/model_builder": "probe/test_lora_targets.py probe/test_wrappers.py "
    "probe/test_quantised_checkpoints.py probe/test_train_script.py",
    "trainer/lean_trainer": "probe/test_mixture_levers.py probe/test_train_script.py",
    "trainer/": "probe/test_train_script.py",
    "probe/trl": "probe/test_trl_trainer.py",
    "probe/synthetic_model": "system/test_verify.py",
    "probe/demo_model": "system/test_demo.py",
    "probe/worker": "probe/test_supervisor.py",
    "probe/calibrate": "probe/test_calibrate_command.py",
    "probe/device_rates": "probe/test_calibrate_command.py",
    "probe/collective_rates": "probe/test_worlds.py",
    "probe/rank": "probe/test_worlds.py",
    "probe/learner": "system/test_quality.py",
    "probe/ahead_worker": "probe/test_compile_ahead.py",
    "probe/micro_profiler": "probe/test_micro_profile.py",
    "probe/model": "probe/test_lora_targets.py probe/test_mixture_levers.py",
    "probe/": "probe/test_truncation.py",
    "dry/prober": "probe/test_dry_prober.py probe/test_dry.py",
    "dry/worker": "probe/test_dry_prober.py",
    "dry/preference": "probe/test_dry_objectives.py",
    "dry/flex": "probe/test_kept_activations.py",
    "dry/meta_device": "probe/test_dry.py",
    "dry/storage_counter": "probe/test_meta_device.py probe/test_dry.py",
    "dry/counting": "probe/test_kept_activations.py probe/test_joined_lora.py probe/test_dry.py",
    "dry/": "probe/test_dry.py",
    "planning/counted_memory": "probe/test_counted_plan.py",
    "planning/": "unit/cli/test_check.py unit/test_benchmarks.py",
    "problem/demo": "system/test_demo.py",
    "problem/": "unit/planning/test_one_estimate.py unit/test_docs.py",
    "export/run/quality": "system/test_quality.py",
    "export/run/learn": "system/test_quality.py",
    "export/run/train": "system/test_train.py",
    "export/run/": "system/test_verify.py",
    "catalog/": "unit/problem/test_setup.py unit/test_docs.py",
}

OPPOSITES = {
    **{
        ast.Eq: ("==", "!="),
        ast.NotEq: ("!=", "=="),
        ast.Is: ("is", "is not"),
        ast.IsNot: ("is not", "is"),
    },
    **{ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")},
}
COMPARISONS = {
    **OPPOSITES,
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
}
ARITHMETIC = {
    **{
        ast.Add: ("+", "-"),
        ast.Sub: ("-", "+"),
        ast.Mult: ("*", "/"),
        ast.Div: ("/", "*"),
        ast.FloorDiv: ("//", "/"),
    },
    **{ast.Mod: ("%", "*"), ast.Pow: ("**", "*")},
}
BOOLEAN = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "floor": "ceil",
    "ceil": "floor",
    "abs": "float",
}
TEXT = (ast.List, ast.Tuple, ast.JoinedStr)  # what is only ever joined
WORD = re.compile(r"[a-z0-9_.-]+")


# Imported once, by the process that is forked for each mutant: to import them takes longer than
# many a test.
PRELOADED = ["pytest", "numpy", "torch", "transformers.trainer", "peft", "optuna", "sqlalchemy.orm"]
PRELOADED += ["alembic", "plotly.graph_objects", "pydantic", "typer.testing", "datasets", "trl"]
FORKS = multiprocessing.get_context("forkserver")
LOG = "pytest.log"  # in a copy of the tree
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)*)", re.MULTILINE)  # in pytest's summary
MANY = 30  # tests import what nearly all need, and MORE_TESTS says which of them ask about it
TEST_S, GROUP_S = 240, 1800  # no test takes longer, and no group of them


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of a file of the package; `start` and `end` count its bytes."""

    file: str
    scope: str
    line: int
    was: str
    now: str
    start: int
    end: int
    text: str
    repeat: int = 0

    @property
    def name(self) -> str:
        """The mutant in words, without its line and a comment, so that a change of other code or of
        a comment leaves the name valid.
        """
        again = f" (again: {self.repeat})" if self.repeat else ""
        return f"{self.file} {self.scope}: {self.was} -> {self.now}{again}"

    @property
    def package(self) -> str:
        return self.file.split("/")[0]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What tests say of a mutant, or of the package itself: `failed` names those that failed."""

    mutant: Mutant | None
    passed: bool
    failed: set[str]
    seconds: float


class _Finder(ast.NodeVisitor):
    """Collects the changes of one file as (scope, first byte, last byte, new text)."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.lines = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
        self._scope: list[str] = []
        self._returns: list[str] = []
        self.found: list[tuple[str, int, int, str]] = []

    def _start(self, node: ast.AST) -> int:
        return self.lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self.lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        return self.source[self._start(node) : self._end(node)].decode()

    def _replace(self, node: ast.AST, text: str) -> None:
        self.found.append((".".join(self._scope), self._start(node), self._end(node), text))

    def _between(self, left: ast.AST, right: ast.AST, change: tuple[str, str] | None) -> None:
        """Change the operator between two operands."""
        if change is None:
            return
        start = self._end(left)
        gap = self.source[start : self._start(right)]
        at = gap.find(change[0].encode())
        if at >= 0:
            start += at
            self.found.append((".".join(self._scope), start, start + len(change[0]), change[1]))

    def _negate(self, test: ast.expr) -> None:
        """Negate a condition, unless that is what changing its only operator does."""
        is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if not is_not and not (isinstance(test, ast.Compare) and type(test.ops[0]) in OPPOSITES):
            self._replace(test, f"not ({self._text(test)})")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        for child in node.body:
            self.visit(child)
        self._scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._scope.append(node.name)
        self._returns.append(ast.unparse(node.returns) if node.returns else "")
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        for child in node.body:
            self.visit(child)
        self._scope.pop()
        self._returns.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if self._text(node.test) != "TYPE_CHECKING":
            self._negate(node.test)
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._replace(condition, "True")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self._between(left, right, COMPARISONS.get(type(operator)))
        for operand in operands:
            if isinstance(operand, ast.Constant) and isinstance(operand.value, str):
                self._word(operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not isinstance(node.left, TEXT) and not isinstance(node.right, TEXT):
            self._between(node.left, node.right, ARITHMETIC.get(type(node.op)))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, BOOLEAN[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            self._replace(node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not isinstance(node.value, TEXT):
            self._between(node.target, node.value, ARITHMETIC.get(type(node.op)))
        self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        stored = all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
        if stored and self._scope and self._scope[-1] != "__init__":
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._replace(node, "pass")
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        """Where mypy would accept another value, return it."""
        returns = self._returns[-1] if self._returns else ""
        if node.value is None:
            self._replace(node, "pass")
        elif returns == "bool":
            self._negate(node.value)
        elif returns in ("int", "float"):
            self._replace(node.value, f"({self._text(node.value)}) + 1")
        elif returns.endswith("| None") and self._text(node.value) != "None":
            self._replace(node.value, "None")
        if node.value:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if self._text(node.func) == "zip":  # `strict` states what is always true
            node.keywords = []
        for keyword in node.keywords:
            name = self._text(node.func).rpartition(".")[2]
            # A class would miss the argument at once, and text is in UTF-8 on Linux.
            if keyword.arg not in (None, "encoding") and name[:1].islower():
                end = re.compile(rb"\s*,\s*|").match(self.source, self._end(keyword))
                assert end
                self.found.append((".".join(self._scope), self._start(keyword), end.end(), ""))
            if isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
                self._word(keyword.value)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in NAMES:
            self._replace(node, NAMES[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace(node, str(not value))
        elif isinstance(value, int):
            self._replace(node, str(value // 2 if value > 16 else value + 1))
        elif isinstance(value, float):
            self._replace(node, repr(value / 2 if value else 1.0))

    def _word(self, node: ast.Constant) -> None:
        if WORD.fullmatch(node.value):
            self._replace(node, repr(node.value + "_x"))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Python 3.11 does not know where the parts of an f-string stand."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assertion narrows a type or states what is always true."""

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...


def mutants() -> list[Mutant]:
    """All changes of the modules in PACKAGES, with a few that Python cannot read."""
    paths = [path for package in PACKAGES for path in sorted((PACKAGE / package).rglob("*.py"))]
    return [mutant for path in paths for mutant in _mutants(path)]


def _mutants(path: Path) -> Iterator[Mutant]:
    finder = _Finder(path.read_bytes())
    finder.visit(ast.parse(finder.source))
    names = Counter[str]()
    for scope, start, end, text in sorted(finder.found, key=lambda change: change[1:3]):
        line = bisect(finder.lines, start)
        first, last = finder.lines[line - 1], finder.lines[bisect_left(finder.lines, end)]
        before = finder.source[first:start].decode()
        after = finder.source[end:last].decode().partition("  # ")[0]
        mutant = Mutant(
            file=str(path.relative_to(PACKAGE)),
            scope=scope,
            line=line,
            was=" ".join((before + finder.source[start:end].decode() + after).split()),
            now=" ".join((before + text + after).split()),
            start=start,
            end=end,
            text=text,
        )
        yield replace(mutant, repeat=names[mutant.name])
        names[mutant.name] += 1


def changed(mutant: Mutant, source: bytes) -> bytes:
    """The source of the mutant's file with the change in it."""
    return source[: mutant.start] + mutant.text.encode() + source[mutant.end :]


def sample(candidates: list[Mutant], seed: int, count: int) -> list[Mutant]:
    """The first `count` mutants in an order by hashes of seed and name, which edits elsewhere do
    not change.
    """
    ordered = sorted(
        candidates, key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest()
    )
    return list(itertools.islice(filter(_is_python, ordered), count))


def _is_python(mutant: Mutant) -> bool:
    try:
        ast.parse(changed(mutant, (PACKAGE / mutant.file).read_bytes()))
    except SyntaxError:
        return False
    return True


def tests_for(file: str) -> list[tuple[str, ...]]:
    """The groups of tests to ask about a module, one after another: unit tests with its name, other
    tests with its name, its package's, unit tests that import it, and those of MORE_TESTS.
    """
    tests, stem = ROOT / "tests", Path(file).stem
    folder = tests / "unit" / file.split("/")[0]
    own = sorted(folder.glob(f"test_{stem}*.py"))
    named = [tests / kind / f"test_{stem}.py" for kind in ("probe", "contract", "system")]
    named = [path for path in named if path.exists()]
    package = sorted(folder.glob("test_*.py"))
    importing = _importing_tests().get(file.removesuffix(".py").replace("/", "."), [])
    if len(importing) > MANY:
        importing = []
    more = next((text for prefix, text in MORE_TESTS.items() if file.startswith(prefix)), "")
    groups: list[tuple[str, ...]] = []
    # without tests with its name, a module has its own in those that import it
    middle = (package, importing) if own or named else (importing, package)
    for paths in (own, named, *middle, [tests / name for name in more.split()]):
        known = {test for group in groups for test in group}
        new = dict.fromkeys(str(path.relative_to(ROOT)) for path in paths if path.exists())
        groups.append(tuple(test for test in new if test not in known))
    return [group for group in groups if group]


@cache
def _importing_tests() -> dict[str, list[Path]]:
    """The unit tests that import each module of the package, by its name within the package."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests" / "unit").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autotune."):
                module = (node.module or "").removeprefix("autotune.")
                for name in {module, *(f"{module}.{alias.name}" for alias in node.names)}:
                    found.setdefault(name, []).append(path)
    return found


class Copies:
    """Copies of the working tree, one for each job: nothing is changed or tested in the tree
    itself.
    """

    def __init__(self, folder: Path, jobs: int) -> None:
        folder.chmod(0o755)  # the PostgreSQL server of the contract tests does not run as root
        self._free: queue.Queue[Path] = queue.Queue()
        for job in range(jobs):
            shutil.copytree(
                ROOT, folder / str(job), ignore=shutil.ignore_patterns(".*", "__pycache__", "runs")
            )
            self._free.put(folder / str(job))

    def try_tests(self, groups: list[tuple[str, ...]], mutant: Mutant | None = None) -> Answer:
        """Ask one group of tests after another, with this change, until one notices it."""
        tree = self._free.get()
        start = time.monotonic()
        try:
            with _changed(tree, mutant) if mutant else nullcontext():
                passed = all(_pass(tree, tests, stop=mutant is not None) for tests in groups)
            failed = FAILED.findall((tree / LOG).read_text(errors="replace"))
            return Answer(
                mutant=mutant, passed=passed, failed=set(failed), seconds=time.monotonic() - start
            )
        finally:
            self._free.put(tree)


@contextmanager
def _changed(tree: Path, mutant: Mutant) -> Iterator[None]:
    path = tree / PACKAGE.name / mutant.file
    source = path.read_bytes()
    _write(path, changed(mutant, source))
    try:
        yield
    finally:
        _write(path, source)


def _write(path: Path, source: bytes) -> None:
    """Write a module, and remove its bytecode, which stays valid if second and size of the source
    agree.
    """
    path.write_bytes(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def _pass(tree: Path, tests: tuple[str, ...], *, stop: bool) -> bool:
    """Whether all these tests pass in time.

    They run in a fork of a process that has imported the libraries.
    """
    process = FORKS.Process(target=_run_tests, args=(tree, tests, stop))
    process.start()
    process.join(GROUP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # and what the tests have left behind
    process.join()
    return process.exitcode == 0


def _run_tests(tree: Path, tests: tuple[str, ...], stop: bool) -> None:
    """Run tests of a copy in this process, which exits as pytest does; `stop` ends them at the
    first that fails.
    """
    os.setsid()
    os.chdir(tree)
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        if path.startswith(str(ROOT)) and "site-packages" not in path:
            del sys.modules[name]  # the copy has its own
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)
    options = [
        "-q",
        "-n0",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=0",
        f"--basetemp={tree / 't'}",
    ]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is preloaded
    options += ["-o", f"faulthandler_timeout={TEST_S}", "-o", "faulthandler_exit_on_timeout=true"]
    sys.exit(pytest.main([*options, *(["-x"] if stop else []), *tests]))


def ask(chosen: list[Mutant], jobs: int) -> list[tuple[Mutant, bool]]:
    """Each mutant and whether the tests notice it. A test without an end notices.

    Tests that fail without a mutant too notice nothing.
    """
    FORKS.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies = Copies(Path(folder), jobs)
        if not copies.try_tests([("tests/unit/core",)]).passed:
            raise SystemExit("tests/unit/core fails without a mutant")
        tasks = [pool.submit(copies.try_tests, tests_for(mutant.file), mutant) for mutant in chosen]
        answers = []
        for number, task in enumerate(as_completed(tasks), 1):
            answer = task.result()
            answers.append(answer)
            mutant, verdict = answer.mutant, "SURVIVED" if answer.passed else "killed"
            assert mutant
            print(
                f"{number}/{len(chosen)} {verdict} in {answer.seconds:.0f} s "
                f" {mutant.file}:{mutant.line}",
                flush=True,
            )
            if answer.passed:
                print(f"    - {mutant.was}\n    + {mutant.now}", flush=True)
        noticed = sorted(
            {test for answer in answers if not answer.passed for test in answer.failed}
        )
        print(f"the {len(noticed)} tests that noticed, without a mutant", flush=True)
        broken = copies.try_tests([tuple(noticed)]).failed if noticed else set()
    for test in broken:
        print(f"    it fails without a mutant too: {test}", flush=True)
    return [
        (answer.mutant, not answer.passed and not (answer.failed and answer.failed <= broken))
        for answer in answers
        if answer.mutant
    ]


def equivalents() -> dict[str, str]:
    """The mutants that change nothing, by name, each with the reason."""
    return {row["mutant"]: row["reason"] for row in yaml.safe_load(EQUIVALENT.read_text())}


def choose(candidates: list[Mutant], seed: int, count: int) -> tuple[list[Mutant], list[Mutant]]:
    """A sample, and the equivalent mutants in it apart."""
    known = equivalents()
    drawn = sample(candidates, seed, count)
    return [m for m in drawn if m.name not in known], [m for m in drawn if m.name in known]


def main() -> None:
    """Draw mutants, ask the tests about each, and print the share that they noticed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument(
        "--jobs", type=int, default=2, help="how many mutants are tested at the same time"
    )
    parser.add_argument(
        "--package",
        default="",
        help="a package, or the beginning of a module's path: study/storage",
    )
    parser.add_argument(
        "--survivors", type=Path, help="write the survivors to this file, one a line"
    )
    parser.add_argument(
        "--again", type=Path, help="try the mutants of such a file instead of a sample"
    )
    args = parser.parse_args()
    candidates = [mutant for mutant in mutants() if mutant.file.startswith(args.package)]
    if args.again:
        names = args.again.read_text().splitlines()
        candidates = [mutant for mutant in candidates if mutant.name in names]
    chosen, equivalent = choose(candidates, args.seed, args.count)
    survivors = []
    for mutant, killed in ask(chosen, args.jobs):
        if not killed:
            survivors.append(mutant.name)
            if args.survivors:
                args.survivors.write_text("\n".join(survivors) + "\n")
    share = f"{1 - len(survivors) / len(chosen):.0%}" if chosen else "none"
    print(
        f"killed {share} of {len(chosen)} mutants, and {len(equivalent)} equivalent ones set aside"
    )


if __name__ == "__main__":
    main()
