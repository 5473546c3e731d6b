"""The form of what each command prints with `--json`, as pydantic models: the source of its JSON Schema.

A form has every key of its output, and forbids others. Null is what is not known. Where the content depends on the
model, such as the knobs of a configuration, the form says no more than its kind.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, Literal

from autotune.catalog import DeviceSpec, ModelSpec, Price, Purchase
from autotune.core.errors import UsageError, did_you_mean
from autotune.core.micro_profile import MicroBatchProfile
from autotune.planning.longest import Attempt, LongestRow
from autotune.planning.micro_batch import Bound, HostNeed
from autotune.planning.rent_or_buy import Bought, Purse, SizeCost
from autotune.planning.trainable import Entry
from autotune.problem.calibration import Calibration
from autotune.problem.run_cost import CostProjection
from autotune.study.ablation import Ablation
from autotune.study.learning import Learning
from autotune.study.summary import Verification

Number: Any = float | None
Text: Any = str | None
Count: Any = int | None
Data: Any = dict[str, Any]
Interval: Any = tuple[float, float] | None
EVIDENCE: Any = Literal["measured", "extrapolated", "projected", "estimated"]


def _form(name: str, /, *parts: type, **keys: Any) -> Any:
    """The model of an object with the fields of these dataclasses and these keys."""
    from pydantic import ConfigDict, create_model

    of_parts: dict[str, Any] = {field.name: field.type for part in parts for field in fields(part)}
    forbidding = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    needed: dict[str, Any] = {key: (kind, ...) for key, kind in (of_parts | keys).items()}
    return create_model(name, __config__=forbidding, **needed)


def _rows(form: Any) -> Any:
    return list[form]


def _values(form: Any) -> Any:
    return dict[str, form]


def _price() -> Any:
    return _form("Price", Price)


def _cost() -> Any:
    return _form("Cost", CostProjection, pauses=Data | None, evidence=EVIDENCE)


def _gpus() -> Any:
    price = _form("DatedPrice", Price, usd_per_day=float, usd_per_week=float, age=str)
    return _rows(_form("Gpu", DeviceSpec, price=price | None, purchase=_form("Purchase", Purchase) | None))


def _prices() -> Any:
    return _rows(_form("DatedPrice", Price, usd_per_day=float, usd_per_week=float, age=str))


def _models() -> Any:
    sizes = {"num_layers": int, "hidden_size": int, "vocab_size": int, "max_seq_len": Count}
    return _rows(_form("Model", ModelSpec, **sizes))


def _spaces() -> Any:
    knob = _form("Knob", values=list[Any], range=list[Any] | None, when=Any)
    return _values(_values(knob))


def _suites() -> Any:
    return _rows(_form("Suite", name=str, gpu=str, configs=int, source=Text, file=str))


def _named_configs() -> Any:
    numbers = ("tokens_per_s", "samples_per_s", "step_time_s", "peak_allocated_gib", "peak_reserved_gib")
    return _rows(
        _form(
            "NamedConfig",
            name=str,
            config=Data,
            outcome=str,
            verdict=str,
            evidence=EVIDENCE,
            reason=Text,
            tight=bool,
            interval=Interval,
            interval_gib=Interval,
            with_context_gib=Number,
            published=_values(_form("Published", theirs=float | str, ours=float | str | None)),
            source=Text,
            **dict.fromkeys(numbers, Number),
        )
    )


def _estimate() -> Any:
    return _form(
        "Estimate",
        config=Data,
        label=str,
        fits=str,
        peak_reserved_gib=float,
        limit_gib=float,
        memory_gib=dict[str, float] | None,
        memory_by=Text,
        tokens_per_s=Number,
        interval_tokens_per_s=Interval,
        samples_per_s=Number,
        cost=_cost() | None,
        measurements_on_this_card=int,
        evidence=EVIDENCE,
    )


def _plan() -> Any:
    cell = _form("Cell", micro_batch_size=int, seq_len=int, none_gib=float, full_gib=float, fits=str, checkpointing=str)
    return _form(
        "Plan",
        model=str,
        device=str,
        own_card=Text,
        workload=Data,
        price=_price() | None,
        limit_gib=float,
        best=_estimate() | None,
        baseline=_estimate(),
        reason=str,
        configurations=_form("Looked", looked_at=int, of=int),
        seen=list[str],
        how_sure=str,
        calibrated=Text,
        what_fits=_values(_rows(cell)),
    )


def _trainable() -> Any:
    return _form(
        "Trainable",
        device=str,
        own_card=Text,
        limit_gib=float,
        price=_price() | None,
        samples=str,
        how_sure=str,
        calibrated=Text,
        evidence=EVIDENCE,
        entries=_rows(_form("Entry", Entry, params=Count)),
    )


def _gpu_plan() -> Any:
    choice = _form("Choice", num_gpus=int, strategy=str, hosts=int) | None
    row = _form(
        "Row",
        num_gpus=int,
        strategy=str,
        hosts=int,
        precision=str,
        accumulation=Count,
        state=Text,
        problem=Text,
        num_without_speed=Count,
        tokens_per_s=Number,
        interval_tokens_per_s=Interval,
        efficiency=Number,
        hours=Number,
        usd=Number,
        step=Data | None,
        of_one_gpu=_estimate() | None,
        evidence=EVIDENCE,
    )
    return _form(
        "GpuPlan",
        model=str,
        device=str,
        workload=Data,
        price=_price() | None,
        limit_gib=float,
        link_gb_s=Number,
        how_sure=str,
        rows=_rows(row),
        cheapest=choice,
        fastest=choice,
        within_hours=Number,
        cheapest_within=choice,
    )


def _compare() -> Any:
    ranged = {
        f"{name}{end}": Number for name in ("tokens_per_s", "hours", "usd", "usd_spot") for end in ("", "_low", "_high")
    }
    texts = ("own_card", "memory_by", "configuration", "evidence", "calibrated", "provider", "price_as_of")
    numbers = ("need_gib", "limit_gib", "guides_need_gib", "relative_speed", "usd_per_1000_samples")
    usd = ("kwh_at_most", "usd_per_hour", "usd_per_day", "usd_per_week", "spot_usd_per_hour")
    card = _form(
        "Card",
        model=str,
        method=str,
        card=str,
        state=str,
        from_reserve=bool,
        is_guess=bool,
        spot_provider=Text,
        spot_as_of=Text,
        measurements_on_this_card=Count,
        price_of_instance_of=Count,
        **ranged,
        **dict.fromkeys(texts, Text),
        **dict.fromkeys((*numbers, *usd), Number),
    )
    buying = _form("Buying", Purse, buy=Text, cards=_rows(_form("Bought", Bought, evidence=EVIDENCE)))
    group = _form(
        "Group",
        model=str,
        method=str,
        workload=Data | None,
        cards=_rows(card),
        cheapest=Text,
        cheapest_rivals=list[str],
        fastest=Text,
        fastest_rivals=list[str],
        smallest_card=Text,
        smallest_compared=Text,
        advice=Data | None,
        own_run=Data | None,
        sizes=_rows(_form("Size", SizeCost, evidence=EVIDENCE)),
        buying=buying | None,
    )
    budget = _form("Budget", max_usd=Number, max_hours=Number)
    return _form("Comparison", how_sure=str, budget=budget, owned=Data | None, groups=_rows(group))


def _change(**more: Any) -> Any:
    return _form(
        "Change",
        verdict=str,
        label=str,
        config=Data,
        accumulation=int,
        peak_reserved_gib=float,
        bounds_gib=tuple[float, float],
        memory_gib=dict[str, float],
        phase=Text,
        duration=Data | None,
        **more,
    )


def _check() -> Any:
    return _form(
        "Check",
        **{name: info.annotation for name, info in _change().model_fields.items()},
        file=str,
        format=str,
        objective=str,
        model=str,
        device=str,
        own_card=Text,
        limit_gib=float,
        num_gpus=Count,
        epochs=Number,
        max_steps=Count,
        workload=Data,
        price=_price() | None,
        change=_change(edits=Data) | None,
        each_change=_rows(_change(edits=Data, saves_gib=Number)),
        smallest_card=Text,
        faster=_form("Faster", config=Data, times=float, command=str) | None,
        notes=list[str],
        how_sure=str,
        calibrated=Text,
        evidence=EVIDENCE,
    )


def _candidate() -> Any:
    performance = _form("Performance", samples_per_second=float, tokens_per_second=float, step_time_s=float, mfu=Number)
    gib = dict.fromkeys(("model_gib", "peak_during_training_gib", "peak_reserved_gib", "limit_gib"), float)
    usd = dict.fromkeys(("usd_per_hour", "cost_per_1000_samples_usd", "full_run_usd", "startup_s", "kwh"), Number)
    cost = _form("RunCost", full_run_hours=float, interval_hours=Interval, interval_usd=Interval, pauses=Any, **usd)
    return _form(
        "Candidate",
        config=Data,
        performance=performance,
        memory=_form("Memory", **gib),
        cost=cost,
        host_share=Number,
        telemetry=Data | None,
        energy_j_per_token=Number,
        evidence=EVIDENCE,
        memory_evidence=EVIDENCE,
    )


def _summary(**more: Any) -> Any:
    """summary.json; what is of the winner is null while there is none."""
    found = dict.fromkeys(("quality", "learning", "verification", "explanation", "fingerprint"), Data | None)
    numbers = dict.fromkeys(("speedup", "search_usd", "within_hours"), Number)
    candidate = _candidate()
    return _form(
        "Summary",
        schema_version=int,
        study=str,
        evidence=EVIDENCE | None,
        model=Text,
        device=Text,
        winner=candidate | None,
        baseline=candidate | None,
        speedup_interval=Interval,
        speedup_evidence=EVIDENCE | None,
        speedup_factors=_rows(Data) | None,
        reason=Text,
        trials=dict[str, int],
        probe_seconds=float,
        wall_seconds=float,
        cards=_rows(Data),
        cells=_rows(candidate),
        by_gpus=_rows(candidate),
        numerics=Text,
        caveats=list[str],
        out_dir=str,
        **found,
        **numbers,
        **more,
    )


def _nodes() -> Any:
    speed = _form(
        "Speed",
        samples_per_second=Number,
        tokens_per_second=Number,
        step_time_s=Number,
        relative_to_others=Number,
        micro_batch_variation=Number,
        evidence=EVIDENCE | None,
    )
    gib = dict.fromkeys(("peak_during_training", "peak_reserved", "limit"), Number)
    told = dict.fromkeys(("temperature_c", "sm_clock_mhz", "power_w", "utilization"), Number)
    node = _form(
        "Node",
        **dict.fromkeys(("study", "node", "host", "device"), str),
        probes=int,
        failed_probes=int,
        last_seen=Text,
        read_at=Text,
        config=Data | None,
        apart=list[str],
        unmeasured=Text,
        performance=speed,
        memory=_form("NodeMemory", unit=Literal["GiB"], **gib),
        card=_form("NodeCard", throttle_reasons=list[str], **told),
        cost=_form("NodeCost", cost_per_1000_samples_usd=Number),
    )
    return _rows(node)


def _list() -> Any:
    texts = dict.fromkeys(("study", "model", "device", "files"), str)
    return _rows(_form("Study", **texts, trials=int, running=bool, tokens_per_s=Number))


def _oom() -> Any:
    return _form("Oom", schema_version=int, study=str, trials=int, oom=int, refused=int, entries=_rows(Data))


def _doctor() -> Any:
    return _rows(_form("Check", name=str, ok=bool | None, found=str, remedy=Text))


def _profile() -> Any:
    return _form(
        "Profile",
        study=str,
        device=str,
        config=Data,
        accumulation=int,
        evidence=EVIDENCE,
        of=Literal["kernels", "operators"],
        profile=MicroBatchProfile,
        optimizer_s=float,
        idle_s=Number,
        bounds=_rows(_form("Bound", Bound, lost_s=Number)),
        uncounted=Text,
        host=_rows(_form("HostNeed", HostNeed, suffices=bool | None)),
        trace=str,
    )


def _verify() -> Any:
    errors = dict.fromkeys(("tokens_per_s", "speed_error", "memory_error"), Number)
    return _form("Verify", Verification, **errors, holds=bool, better=list[str])


def _learn() -> Any:
    return _form("Learn", Learning, learning_rate=float, is_sure=bool, steps=int, seconds=float, notes=list[str])


def _train() -> Any:
    counts = dict.fromkeys(("schema_version", "steps", "of", "exit_code"), int)
    numbers = dict.fromkeys(("spent_usd", "projected_usd", "loss", "error"), Number)
    seconds = dict.fromkeys(("trained_s", "projected_s", "wall_s"), float)
    return _form("Train", study=str, **counts, **seconds, **numbers)


def _longest() -> Any:
    attempt = _form("Attempt", Attempt)
    row = _form("LongestRow", LongestRow, config=Data, evidence=EVIDENCE, attempts=_rows(attempt), tokens_per_s=Number)
    texts, limits = dict.fromkeys(("model", "device"), str), dict.fromkeys(("host_limit_gib", "positions"), Number)
    return _form("Longest", **texts, limit_gib=float, **limits, rows=_rows(row))


def _import() -> Any:
    texts = dict.fromkeys(("device", "label"), str)
    row = _form("Row", **texts, model=Text, tokens_per_s=Number, peak_reserved_gib=Number, evidence=EVIDENCE)
    return _form("Import", file=str, was_known=bool, rows=_rows(row))


def _files() -> Any:
    return _form("Files", study=str, files=list[str])


# By command, with the option that makes it print another form.
FORMS: dict[str, Callable[[], Any]] = {
    "gpus": _gpus,
    "models": _models,
    "prices": _prices,
    "spaces": _spaces,
    "suites": _suites,
    "plan": _plan,
    "plan --spec": _named_configs,
    "plan --gpu": _trainable,
    "plan --gpus": _gpu_plan,
    "compare": _compare,
    "check": _check,
    "run": _summary,
    "resume": _summary,
    "status": lambda: _summary(running=bool),
    "status --nodes": _nodes,
    "list": _list,
    "oom": _oom,
    "explain": lambda: Ablation,
    "explain --profile": _profile,
    "verify": _verify,
    "learn": _learn,
    "train": _train,
    "longest": _longest,
    "calibrate": lambda: Calibration,
    "doctor": _doctor,
    "delete": _files,
    "export": _files,
    "report": _files,
    "fleet": _files,
    "submit": _files,
    "import": _import,
    "worker": lambda: _form("Worker", study=str, trials=int),
}


@cache
def form_of(command: str) -> Any:
    """The pydantic adapter of what a command prints. Raises UsageError for an unknown one."""
    from pydantic import TypeAdapter

    if command not in FORMS:
        raise UsageError(
            f"there is no schema of {command!r}{did_you_mean(command, FORMS)}", remedy="`autotune schema` lists them"
        )
    return TypeAdapter(FORMS[command]())


def schema(command: str) -> Data:
    """The JSON Schema (draft 2020-12) of what `command --json` prints. Raises UsageError for an unknown command."""
    made: Data = form_of(command).json_schema(mode="serialization")
    title = f"autotune {command} --json"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title} | made | {"title": title}
