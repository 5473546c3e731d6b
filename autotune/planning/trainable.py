"""Lists the models that a card can train with each method, with speed, cost and longest row.

The atlas (docs/atlas.md) has such entries for all models on ten cards. Every number is an estimate.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from autotune.catalog import DeviceSpec, ModelSpec, list_models
from autotune.catalog.model_sizes import Sizes
from autotune.core.errors import UsageError
from autotune.core.objective import Objective
from autotune.core.text import printable
from autotune.core.train_config import TrainConfig
from autotune.planning.compare import QUIET_S, compare_card
from autotune.planning.device_estimate import accuracy_text, limit_of
from autotune.planning.observations import Say, ignore_message
from autotune.planning.plan import DEPENDENT, candidates, planned_setup
from autotune.prediction.estimate import memory_of, memory_state
from autotune.prediction.observed_speed import Observation
from autotune.prediction.transfer import calibrated_parts, is_measured_kind
from autotune.problem.run_cost import FITS
from autotune.problem.search_space import SearchSpace
from autotune.problem.setup import Setup, open_reserve
from autotune.problem.study_spec import StudySpec
from autotune.report.values.comparison import ComparedCard
from autotune.report.values.trainable import METHODS, Entry, Trainable

# If the numbers of parameters of several models differ by at most this factor, only one of these
# models is listed.
STEP = 1.2
# A model that needs more than this multiple of the memory limit does not fit with any knob values.
HOPELESS = 1.5
LEAST_PARAMS = 10**8
SHORTEST, LONGEST = 128, 2**20  # the shortest and the longest row to try, in tokens
# Pinning these knobs shortens the search. If a configuration fits, each pin changes the speed of
# the best configuration by less than 5 %.
_ADAPTERS = {"lora_rank": 16, "optimizer": "adamw_torch_fused", "padding": "bucket"}
PINS: dict[str, dict[str, Any]] = {
    "full": {"padding": "bucket"},
    "lora": _ADAPTERS,
    "qlora": _ADAPTERS | {"double_quant": True},
}


def entry_of(
    spec: StudySpec,
    method: str,
    device: DeviceSpec,
    observations: Sequence[Observation] = (),
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> Entry:
    """Return the entry of the spec's model, without its longest row.

    `fixed` has values of knobs to search in place of the values in the space of the method.
    """
    space = SearchSpace.load(method)
    for name, value in fixed.items():
        space = space.pin(name, value)
    try:
        setup = planned_setup(replace(spec, space=space), device)
        card = compare_card(setup, limit_of(spec, device), observations)
    except UsageError as error:
        card = ComparedCard(device=device, problem=printable(str(error)))
    return _entry(spec.model, method, card)


def _entry(model: str, method: str, card: ComparedCard) -> Entry:
    """Convert a compared card to an entry."""
    best = card.best
    leanest = card.least
    need = best or leanest
    return Entry(
        model=model,
        method=method,
        card=card.device.name,
        state=FITS if card.holds_it else card.state,
        need_gib=need.need_gib if need else None,
        least_gib=leanest.need_gib if leanest else None,
        memory_by=need.memory_by if need else None,
        tokens_per_s=card.tokens_per_s or None,
        interval=best.interval if best else None,
        usd_per_1000=card.cost.cost_per_1000_samples_usd if card.cost else None,
        config=need.config.label() if need else None,
        learns_differently=best is not None and card.plan is not None and card.plan.from_reserve,
        problem=card.problem,
    )


def _entry_with_row(
    spec: StudySpec, method: str, device: DeviceSpec, observations: Sequence[Observation]
) -> Entry:
    """Return the entry with its longest row.

    The search first pins the knobs in PINS. If no configuration fits, the search is repeated
    without these pins, unless the model needs more than HOPELESS times the memory limit.
    """
    limit_gib = limit_of(spec, device)
    entry = entry_of(spec, method, device, observations, PINS[method])

    if entry.problem or (entry.least_gib or 0.0) > HOPELESS * limit_gib:
        return entry
    if entry.state != FITS:
        entry = entry_of(spec, method, device, observations)

    return replace(
        entry,
        longest_row=longest_row(planned_setup(replace(spec, space=method), device), limit_gib),
    )


def trainable(
    spec: StudySpec,
    device: DeviceSpec,
    models: Sequence[ModelSpec] = (),
    observations: Sequence[Observation] = (),
    say: Say = ignore_message,
) -> Trainable:
    """Return the models that the card can train with the options of `spec` (all except its model).

    The default of `models` is the result of `sizes`. `say` gets progress messages. Raises
    UsageError if the card's memory is unknown, or if no model has a plan for the card.
    """
    if spec.objective != Objective.SFT:
        raise UsageError(
            f"--objective {spec.objective} is planned for one model only",
            remedy="name the model with --model",
        )

    models = tuple(models or sizes())
    limit_gib = limit_of(spec, device)
    last_progress = time.monotonic()

    entries: list[Entry] = []
    for number, model in enumerate(models):
        if time.monotonic() - last_progress > QUIET_S:
            say(f"{number} of {len(models)} models: {model.short}")
            last_progress = time.monotonic()
        for method in METHODS:
            entries.append(
                _entry_with_row(replace(spec, model=model.name), method, device, observations)
            )
    if all(entry.problem for entry in entries):
        raise UsageError(
            "\n".join(dict.fromkeys(str(entry.problem) for entry in entries)),
            remedy="see `plan --help`",
        )

    task = planned_setup(replace(spec, model=models[0].name, space="lora"), device).task
    return Trainable(
        device=device,
        price=task.price,
        limit_gib=limit_gib,
        lengths=str(task.workload.lengths),
        models=models,
        entries=tuple(entries),
        how_sure=accuracy_text(task),
        calibrated=calibrated_parts(task.calibration, device),
        is_guess=not is_measured_kind(device),
    )


def sizes(models: Iterable[ModelSpec] = ()) -> list[ModelSpec]:
    """Return a model of each size, the smallest first.

    Models count as one size if their numbers of parameters differ at most by the factor STEP. Each
    size is represented by the model with the longest context. Models without a formula, and models
    with fewer than LEAST_PARAMS parameters, are left out. By default, `models` are all models of
    the catalogue.
    """
    sized_models = [
        (model.params or 0, model) for model in models or list_models() if Sizes.of(model)
    ]

    groups: list[list[tuple[int, ModelSpec]]] = []
    for params, model in sorted(
        ((params, model) for params, model in sized_models if params >= LEAST_PARAMS), key=_size
    ):
        if not groups or params > STEP * groups[-1][0][0]:
            groups.append([])
        groups[-1].append((params, model))

    return [max(group, key=lambda item: (item[1].max_seq_len or 0, item[0]))[1] for group in groups]


def _size(item: tuple[int, ModelSpec]) -> tuple[int, str]:
    return item[0], item[1].name


def longest_row(setup: Setup, limit_gib: float) -> int | None:
    """Return the tokens of the longest row that certainly fits, according to the formulas.

    The result is a power of two, or the model's context length. The row is for the configuration
    that needs the least memory. Returns None if not even a row of SHORTEST tokens fits.
    """
    task = open_reserve(setup).task
    space = task.space.pin("micro_batch_size", min(task.space.choices("micro_batch_size")))
    for name, value in (space.leanest() | {"seq_len": SHORTEST}).items():
        if name not in DEPENDENT and space.knob(name):
            space = space.pin(name, value)

    most = min(task.model.max_seq_len or LONGEST, LONGEST)
    lengths = [
        *takewhile(lambda length: length < most, (SHORTEST << power for power in range(20))),
        most,
    ]

    def fits(config: TrainConfig, length: int) -> bool:
        need = memory_of(task.model, replace(config, seq_len=length))
        return (
            need is not None and memory_state(need.peak_reserved_gib, limit_gib, need.error) == FITS
        )

    num_fitting = 0
    for config in candidates(space):
        # With each configuration, try only rows longer than the longest row that fit before.
        num_fitting += sum(1 for _ in takewhile(partial(fits, config), lengths[num_fitting:]))
    return lengths[num_fitting - 1] if num_fitting else None
