"""`autotune explain`: probes a study's winner with one knob after another set back, and says what each is worth."""

import json
import sys

from autotune.cli.commands.session import open_study
from autotune.cli.stop import Stop
from autotune.core.errors import Cancelled, EnvironmentProblem, Interrupted, NothingFits
from autotune.core.probe_types import ProbeRequest
from autotune.core.serialization import to_data
from autotune.core.train_config import TrainConfig
from autotune.prediction.depth_extrapolation import depths
from autotune.probe.supervisor import WorkerProber
from autotune.problem.target import find_target
from autotune.report import describe
from autotune.report.study_directory import write_study
from autotune.study.ablation import ablate
from autotune.study.storage.location import storage_url


def command(name: str | None, storage: str | None, *, as_json: bool = False) -> None:
    """Explain a study's winner on the device that probed it; the result is kept with the study.

    Raises:
        UsageError: no such study.
        NothingFits: the study has no winner, or no baseline to compare it with.
        EnvironmentProblem: another device than the one that probed, or the winner does not come through again.
    """
    from autotune.study.evaluator import Evaluator
    from autotune.study.optimizer import Optimizer
    from autotune.study.storage.probe_store import ProbeStore
    from autotune.study.storage.study_record import update_record

    found = open_study(name, storage)
    task, recipe, url = found.task, found.summary.recipe, storage_url(storage)
    if recipe is None or recipe.baseline is None:
        missing = "winner" if recipe is None else "baseline that came through"
        raise NothingFits(f"study {found.summary.study!r} has no {missing}", remedy="continue it with `autotune run`")
    probed_on = task.measured_on or task.device
    here = find_target("cpu" if probed_on.kind == "cpu" else "auto")
    if here.device.name != probed_on.name:
        raise EnvironmentProblem(
            f"the study was probed on {probed_on.name}, here is {here.device.name}", remedy="explain it there"
        )
    logs = found.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    store, cpu = ProbeStore(url), probed_on.kind == "cpu"
    with Stop().listening() as stop, WorkerProber("cpu" if cpu else "cuda", logs, should_stop=stop) as prober:
        say("starting the probe worker")

        def request(config: TrainConfig) -> ProbeRequest:
            return found.record.terms.request(task, config, prober.device)

        try:
            shape = prober.describe(task.model.config)
            shallow = shape is not None and depths(shape, recipe.winner.config.checkpoint_every) is not None
            evaluator = Evaluator(
                prober,
                store,
                study=f"{found.summary.study}, explained",  # apart, or a lucky probe would be another winner
                logs=logs,
                request=request,
                model=task.model_key,
                shape=shape,
                shallow_only=shallow,
            )
            winner, baseline = recipe.winner.config, recipe.baseline.config
            done = ablate(task, evaluator, winner, baseline, say=say, should_stop=stop)
        except Cancelled:
            raise Interrupted("stopped; what was probed is kept", exit_code=128 + (stop.signal or 2)) from None
    search = Optimizer.open(url, found.summary.study, task.space)
    update_record(search, ablation=done)
    write_study(found.out, open_study(found.summary.study, storage).summary)
    if as_json:
        sys.stdout.write(json.dumps(to_data(done), indent=2) + "\n")
    else:
        print("\n".join(describe.ablation(done) or ["the winner is the baseline itself"]))
    if stop.signal is not None:
        raise Interrupted("stopped; not every knob was looked at", exit_code=128 + stop.signal)
