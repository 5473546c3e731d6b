"""The process that runs dry probes: it reads one request per line and writes one answer per line.

A request is `{"describe": config of a model}` or `{"count": a ProbeRequest}`, the latter with an
OtherTrainer as "trainer" if the step is not that of autotune's trainer. An answer contains
`shape`, `count`, or `refused` with a sentence that gives the reason.
"""

import json
import os
import resource
import sys
import traceback
import warnings
from contextlib import suppress
from functools import cache
from typing import Any

import psutil

from autotune.core.files import load_data
from autotune.core.other_trainer import OtherTrainer
from autotune.core.probe_types import ProbeRequest
from autotune.core.process import die_with_parent, pause_garbage_collection
from autotune.core.serialization import from_data, to_data
from autotune.core.units import GIB

# The most memory that building a model without weights may take. The limit protects the machine
# from a downloaded config with, for example, two billion layers.
MOST_GIB = 8
READS_VALUES = (
    "transformers' code for this model reads the values of tensors during a step, and a dry probe"
    " has no values"
)


def main() -> None:
    """Answer requests until the input ends."""
    die_with_parent(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # text that libraries print must not mix with answers
    warnings.filterwarnings("ignore")

    # With a limit on this process's memory, building an oversized model fails with MemoryError.
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = psutil.Process().memory_info().data + MOST_GIB * GIB
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))

    packages = tuple(sys.argv[2:])
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line), packages)) + "\n")
        answers.flush()


@cache  # a second `pause_garbage_collection` would exempt later objects from collection
def _load(packages: tuple[str, ...]) -> None:
    # Block the import of all packages with fast kernels, because their kernels need a GPU. Then
    # `install` makes the imitated `packages` importable. Without the other packages, transformers
    # uses torch's operations.
    blocked = load_data("autotune.catalog", "data/fast_kernels")["distributions"]
    sys.modules.update(dict.fromkeys(blocked))
    with pause_garbage_collection():
        if packages:
            from autotune.dry.fast_kernels import install

            install(packages)
        import autotune.dry.counting
        import autotune.probe.model_shape  # noqa: F401


def _answer(message: dict[str, Any], packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Answer one request; `packages` are the packages whose fast kernels are imitated."""
    try:
        _load(packages)
        if "describe" in message:
            from autotune.probe.model_shape import describe

            return {"shape": to_data(describe(message["describe"]))}
        from autotune.dry.counting import dry_probe

        request = from_data(ProbeRequest, message["count"])
        other = from_data(OtherTrainer, message.get("trainer", {}))
        return {"count": to_data(dry_probe(request, other))}
    except MemoryError:
        return {
            "refused": f"building the model takes more than {MOST_GIB} GiB, even without weights"
        }
    except Exception as error:
        if isinstance(error, ValueError | ImportError) and not _is_from_model(error):
            return {"refused": " ".join(str(error).split())[:300]}
        if "meta tensor" in str(error):  # some mixtures of experts choose experts in Python
            return {"refused": READS_VALUES}
        reason = _cause(error, message)
        return {"refused": f"transformers cannot train this model on text alone{reason}"}


def _is_from_model(error: Exception) -> bool:
    """Return whether the forward pass of a model in transformers raised this error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        frame.f_code.co_name == "forward"
        and str(frame.f_globals["__name__"]).startswith("transformers.models.")
        for frame in frames
    )


def _cause(error: Exception, message: dict[str, Any]) -> str:
    from autotune.probe.model_shape import cause
    from autotune.trainer.model_builder import config_of

    config = None
    with suppress(Exception):  # the error may be in the config itself
        config = config_of(message.get("describe") or message["count"]["model"])
    return cause(error, config)


if __name__ == "__main__":
    main()
