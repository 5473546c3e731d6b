"""Trace two values through a real study and write their walks into docs/architecture.md.

The first value is a micro batch size, from the YAML of a search space to the exported script. The
second is a measured peak of memory, from the worker to the report. A study of a tiny model on the
CPU runs in this process with a profile function; its worker is traced in the same way.

A module is on the walk if one of its functions receives or returns the value: the number or its
text, or an object that holds the number in one of its fields. Modules appear in the order in which
the value reaches them. A return is a call from one module of the walk back into a module that the
value had reached earlier; each pair of modules counts once.
"""

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(ROOT / "autotune") + os.sep
DOCUMENT = ROOT / "docs" / "architecture.md"
TRACE = "TORCH_WALK_TRACE"  # the prefix lets the variable pass to workers
LINE_LENGTH = 100
NUM_BATCHES = 3  # a size that no other number of the study has

SPACE = f"""\
version: 1
knobs:
  micro_batch_size: {{values: [{NUM_BATCHES}], kind: system}}
  seq_len: 32
  lora_rank: 8
  precision: fp32
  checkpointing: none
  optimizer: adamw_torch
"""
IN_CHILD = f"""\
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import walks
walks.trace_child()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One value to follow: the fields and the text that carry it, and the modules between which it
    walks.
    """

    title: str
    fields: frozenset[str]
    text: str
    start: str
    end: str


MICRO_BATCH = Walk(
    title="A micro batch size, from the YAML file to the exported script",
    fields=frozenset({"micro_batch_size"}),
    text="micro_batch_size",
    start="problem.space_file",
    end="export.script",
)
PEAK = Walk(
    title="A measured peak, from the worker to the report",
    fields=frozenset({"peak_reserved_gib"}),
    text="peak_reserved_gib",
    start="probe.harness",
    end="report.html",
)
WALKS = (MICRO_BATCH, PEAK)


@dataclass(slots=True)
class Steps:
    """The calls that carried the value of one walk, as (caller,
    callee) pairs of modules in order.
    """

    calls: list[tuple[str, str]] = field(default_factory=list)
    seen: set[tuple[str, str]] = field(default_factory=set)

    def add(self, caller: str, callee: str) -> None:
        """Keep a pair at its first call."""
        if caller != callee and (caller, callee) not in self.seen:
            self.seen.add((caller, callee))
            self.calls.append((caller, callee))

    def modules(self) -> list[str]:
        """Return the modules in the order in which the value reached them."""
        return list(dict.fromkeys(callee for _, callee in self.calls))

    def num_returns(self) -> int:
        """Count the pairs whose callee the value had reached before their caller."""
        place = {module: index for index, module in enumerate(self.modules())}
        return sum(place[callee] < place.get(caller, -1) for caller, callee in self.calls)


# --- the profile function


def module_of(code: CodeType) -> str | None:
    """Return the module of ours in which this code stands, for example 'probe.worker'."""
    name = code.co_filename
    if not (name.startswith(PACKAGE) and name.endswith(".py")):  # a template is no module
        return None
    return name.removeprefix(PACKAGE).removesuffix(".py").replace(os.sep, ".")


def carries(value: Any, walk: Walk, depth: int = 2) -> bool:
    """Tell whether an argument holds the value: by a field of an object, a key of a mapping, or its
    text.
    """
    if isinstance(value, str):
        return walk.text in value
    if type(value) is dict:
        return any(name in value for name in walk.fields)
    if depth and isinstance(value, list | tuple) and value:
        return carries(value[0], walk, depth - 1)
    if isinstance(value, type) or not is_dataclass(value):
        return False
    names = type(value).__dataclass_fields__
    if not walk.fields.isdisjoint(names):
        return True
    return depth > 0 and any(carries(getattr(value, name, None), walk, depth - 1) for name in names)


def arguments_of(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a function's arguments."""
    code = frame.f_code
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        yield name, frame.f_locals.get(name)


def profiler(record: Callable[[int, str, str], None]) -> Callable[[FrameType, str, Any], None]:
    """Return a profile function that records each call or result
    that carries the value of a walk.
    """
    modules: dict[CodeType, str | None] = {}
    found: set[tuple[int, str, str]] = set()

    def profile(frame: FrameType, event: str, result: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        callee = modules.setdefault(code, module_of(code))
        if callee is None:
            return
        caller = next(_callers(frame, modules), "") if event == "call" else ""
        values = list(arguments_of(frame)) if event == "call" else [("", result)]

        for index, walk in enumerate(WALKS):
            key = index, caller, callee
            if key not in found and any(
                name in walk.fields or carries(value, walk) for name, value in values
            ):
                found.add(key)
                record(*key)

    return profile


def _callers(frame: FrameType, modules: dict[CodeType, str | None]) -> Iterator[str]:
    above = frame.f_back
    while above is not None:
        module = modules.setdefault(above.f_code, module_of(above.f_code))
        if module is not None:
            yield module
        above = above.f_back


def trace_child() -> None:
    """Trace the process of a worker into the file that its parent named."""
    path = os.environ.get(TRACE)
    if not path:
        return
    file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - it stays open until the process ends

    def record(index: int, caller: str, callee: str) -> None:
        file.write(f"{index} {caller or '-'} {callee}\n")

    start(record)


def start(record: Callable[[int, str, str], None]) -> None:
    """Profile this thread and those that start later."""
    profile = profiler(record)
    threading.setprofile(profile)
    sys.setprofile(profile)


# --- the study, and what it leaves


def run_study(folder: Path) -> list[Steps]:
    """Run a study of one configuration, and return the steps of each walk."""
    (folder / "space.yaml").write_text(SPACE)
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(IN_CHILD)
    path = folder / "trace"
    path.touch()

    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT)])
    os.environ[TRACE] = str(path)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    os.chdir(folder)

    # One file orders the calls of this process and of the worker.
    trace_child()
    try:
        from autotune.api.main import main as run
        from autotune.problem.study_spec import StudySpec

        spec = StudySpec(
            model="demo-3m",
            gpu="cpu",
            space="space.yaml",
            global_batch=NUM_BATCHES,
            examples=60,
            budget="10m",
            trials=1,
            study="walk",
            storage=f"sqlite:///{folder / 'walk.db'}",
            out=str(folder / "out"),
        )
        outcome = run(spec)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if outcome.error is not None:
        raise outcome.error

    walks = [Steps() for _ in WALKS]
    for line in path.read_text(encoding="utf-8").splitlines():
        index, caller, callee = line.split()
        walks[int(index)].add("" if caller == "-" else caller, callee)
    return [between(steps, walk) for steps, walk in zip(walks, WALKS, strict=True)]


def between(steps: Steps, walk: Walk) -> Steps:
    """Keep the calls from the first module of the walk to its last one."""
    reached = [callee for _, callee in steps.calls]
    first = reached.index(walk.start) if walk.start in reached else 0
    last = len(reached) - reached[::-1].index(walk.end) if walk.end in reached else len(reached)
    kept = Steps()
    for caller, callee in steps.calls[first:last]:
        kept.add(caller, callee)
    return kept


def markdown(walk: Walk, steps: Steps) -> str:
    """Return the text of one walk for the document."""
    modules = steps.modules()
    lines = [
        f"**{walk.title}**: {len(modules)} modules, {steps.num_returns()} returns.",
        "",
    ]
    line = ""
    for index, module in enumerate(modules):
        word = f"`{module}`" + (" →" if index < len(modules) - 1 else "")
        if line and len(line) + 1 + len(word) > LINE_LENGTH:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def main() -> None:
    """Trace both walks; print them, or write them into the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="write the walks into docs/architecture.md"
    )
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="autotune-walks-") as folder:
        found = run_study(Path(folder))
        os.chdir(ROOT)
    text = "\n\n".join(markdown(walk, steps) for walk, steps in zip(WALKS, found, strict=True))
    print(text)

    if args.write:
        start_mark, end_mark = "<!-- walks -->\n", "<!-- end of walks -->"
        document = DOCUMENT.read_text(encoding="utf-8")
        before, rest = document.split(start_mark)
        after = rest.partition(end_mark)[2]
        DOCUMENT.write_text(f"{before}{start_mark}\n{text}\n\n{end_mark}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
