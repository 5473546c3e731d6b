"""What `autotune plan` prints, and the words of an estimate that `autotune check` prints too."""

from datetime import date

from autotune.catalog import NO_PRICE, describe_price
from autotune.cli.terminal import print_table
from autotune.core.units import DASH, fmt_count, fmt_gib, fmt_hours, fmt_usd
from autotune.planning.device_estimate import how_known
from autotune.planning.plan import LITTLE_KNOWN, Cell, Plan, memory_tables
from autotune.prediction.estimate import Estimate
from autotune.problem.run_cost import FITS, OOM, TIGHT
from autotune.problem.task import Task


def print_plan(made: Plan) -> None:
    """Print the best configuration and the guides' one, then the tables of what fits."""
    task = made.task
    memory = fmt_gib(task.device.memory_gib)
    print(f"{task.model.name} on {task.device.label}: {memory}, {fmt_gib(made.limit_gib)} of it for tensors")
    objective = task.workload.objective
    print(f"{how_known(task.calibration, task.device, counted=made.counted, objective=objective)}.\n")
    best = None if made.best is made.baseline else made.best
    for name, estimated in (("best", best), ("guides", made.baseline)):
        if estimated is not None:
            print(f"{name:>8}  {estimated.config.label()}")
            for label, text in _lines(estimated, task).items():
                print(f"{label:>8}  {text}")
            print()
    if made.reason in LITTLE_KNOWN:
        print(f"{'why':>8}  {made.reason}\n")
    elif made.best is not None:
        part = ""
        if made.num_estimated < made.space_size and not made.counted:
            part = f" (of the first {made.num_estimated:,} of {made.space_size:,} configurations)"
        print(f"{'why':>8}  {made.reason}{part}\n")
    for name, cells in memory_tables(made).items():
        _print_table(name, cells, made.limit_gib)


def _print_table(name: str, cells: list[Cell], limit_gib: float) -> None:
    if not any(cell.chosen.state in (FITS, TIGHT) for cell in cells):
        least = min(cell.recomputed.need_gib for cell in cells)
        print(f"{name}: does not fit, the least it needs is {fmt_gib(least)} of {fmt_gib(limit_gib)}")
        return
    print(f"{name}: GiB by length and micro batch (c: only with every layer recomputed, ?: too close to tell)")
    lengths = dict.fromkeys(cell.seq_len for cell in cells)
    print_table(
        None,
        {"seq_len": "right"} | {str(cell.micro_batch_size): "right" for cell in cells},
        [(str(length), *(_cell(cell) for cell in cells if cell.seq_len == length)) for length in lengths],
    )


def _cell(cell: Cell) -> str:
    """'31.2', '18.4 c', '22.0 c?', 'OOM'."""
    chosen = cell.chosen
    if chosen.state not in (FITS, TIGHT):
        return "OOM"
    mark = ("c" if chosen.config.checkpointing == "full" else "") + ("?" if chosen.state == TIGHT else "")
    return f"{chosen.need_gib:.1f} {mark}".strip()


def _lines(estimated: Estimate, task: Task) -> dict[str, str]:
    """What is estimated of a configuration, by what it is about."""
    need = f"{fmt_gib(estimated.need_gib)} of {fmt_gib(estimated.limit_gib)}, {estimated.state}"
    terms = memory_terms(estimated)
    cost, price = estimated.cost, task.price
    if estimated.interval is None or cost is None:
        return {"memory": f"{need}: {terms}"} | ({} if estimated.state == OOM else {"speed": "unknown"})
    hours = " to ".join(map(fmt_hours, cost.interval_hours))
    lines = {
        "memory": f"{need}: {terms}",
        "speed": speed_text(estimated),
        "run": f"{fmt_hours(cost.full_run_hours)} ({hours}) for {cost.examples:,} examples x {cost.epochs}",
        "cost": f"{DASH} ({NO_PRICE}: --price USD_PER_HOUR)",
    }
    if price is not None and cost.interval_usd is not None:
        bounds = " to ".join(map(fmt_usd, cost.interval_usd))
        spot = f", spot {fmt_usd(cost.spot_usd)}" if cost.spot_usd is not None else ""
        lines["cost"] = f"{fmt_usd(cost.full_run_usd)} ({bounds}){spot} at {describe_price(price, date.today())}"
    return lines


def memory_terms(estimated: Estimate) -> str:
    """'weights 13.5 + adapters 0.2 + ...': what the memory is made of, without what is too little to show."""
    terms = estimated.memory.terms() if estimated.memory else {}
    return " + ".join(f"{name} {value:.1f}" for name, value in terms.items() if value >= 0.05)


def speed_text(estimated: Estimate, unit: str = "useful tokens/s") -> str:
    """'1,109 useful tokens/s (934 to 1,318, tightened by 2 measured on this card)', or what was calibrated and when."""
    low, high = map(fmt_count, estimated.interval or (None, None))
    count = estimated.num_observations
    tightened = f", tightened by {count} measured on this card" if count else ""
    tightened = ", no measurement of this kind of card" if estimated.is_guess else tightened
    tightened += f", {estimated.calibrated}" if estimated.calibrated else ""
    return f"{fmt_count(estimated.tokens_per_s)} {unit} ({low} to {high}{tightened})"
