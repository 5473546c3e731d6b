"""Derives the form and the JSON Schema of each command's `--json` output from the answers' types.

A form is a pydantic type that has every key of the output and forbids other keys. Unknown values
are null.
"""

from functools import cache
from typing import Any

from autotune.catalog import ModelSpec
from autotune.core.errors import UsageError, did_you_mean
from autotune.core.json_view import json_form
from autotune.problem.calibration import Calibration
from autotune.report.oom import OomReport
from autotune.report.oom_message import OomMessage
from autotune.report.values.catalog import DatedPrice, Gpu, Suite
from autotune.report.values.check import CheckReport
from autotune.report.values.commands import (
    Check,
    Files,
    Imported,
    KnobRow,
    StudyRow,
    Training,
    Worked,
)
from autotune.report.values.compared import Compared
from autotune.report.values.longest import LongestAnswer
from autotune.report.values.plan import Plan
from autotune.report.values.profile import ProfileReport
from autotune.report.values.rollouts import RolloutPlan, RolloutStudy
from autotune.report.values.trainable import Trainable
from autotune.study.ablation import Ablation
from autotune.study.learning import Learning
from autotune.study.named_configs import SourcedResult
from autotune.study.nodes import NodeRow
from autotune.study.scaling import GpuPlan
from autotune.study.summary import Status, SummaryFile, Verification

# The type of each command's answer. If an option changes the type, the command with this option has
# a key of its own.
ANSWERS: dict[str, Any] = {
    "gpus": list[Gpu],
    "models": list[ModelSpec],
    "prices": list[DatedPrice],
    "spaces": dict[str, dict[str, KnobRow]],
    "suites": list[Suite],
    "plan": Plan,
    "plan --spec": list[SourcedResult],
    "plan --gpu": Trainable,
    "plan --gpus": GpuPlan,
    "plan --objective grpo": RolloutPlan,
    "compare": Compared,
    "check": CheckReport,
    "run": SummaryFile,
    "run --objective grpo": RolloutStudy,
    "resume": SummaryFile,
    "status": Status,
    "status --nodes": list[NodeRow],
    "list": list[StudyRow],
    "oom": OomReport,
    "oom MESSAGE": OomMessage,
    "explain": Ablation,
    "explain --profile": ProfileReport,
    "verify": Verification,
    "learn": Learning,
    "train": Training,
    "longest": LongestAnswer,
    "calibrate": Calibration,
    "doctor": list[Check],
    "delete": Files,
    "export": Files,
    "report": Files,
    "fleet": Files,
    "submit": Files,
    "import": Imported,
    "worker": Worked,
}
STORED = ("explain", "calibrate")  # commands that print the content of a stored file


@cache
def form_of(command: str) -> Any:
    """Return the pydantic adapter of a command's output.

    Raises UsageError for an unknown command.
    """
    from pydantic import TypeAdapter

    if command not in ANSWERS:
        raise UsageError(
            f"there is no schema of {command!r}{did_you_mean(command, ANSWERS)}",
            remedy="`autotune schema` lists the commands",
        )
    answer = ANSWERS[command]
    return TypeAdapter(answer if command in STORED else json_form(answer))


def schema(command: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the output of `command --json`.

    Raises UsageError for an unknown command.
    """
    form: dict[str, Any] = form_of(command).json_schema(mode="serialization")
    title = f"autotune {command} --json"
    return (
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
        | form
        | {"title": title}
    )
