"""The study as tables for people: measured, modelled, and how far they are apart."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_splitkv.scale.beyond import Cell, rows_text
from megatron_splitkv.scale.comparison import STEP, Prediction, error_table, sensitivity
from megatron_splitkv.scale.constants import FITTED, Constants
from megatron_splitkv.scale.methods import METHODS
from megatron_splitkv.scale.paper import METHODS as COMPARED
from megatron_splitkv.scale.paper import SETTINGS, points_of
from megatron_splitkv.scale.study import MachineStudy

TITLES = {
    "weak": "weak scaling: 128k context rows a rank, Q = 64k, b = 8",
    "strong": "strong scaling: S = 1M, Q = 32k, b = 4",
    "ratio": "Q:S ablation: P = 32, Q = 64k, 128k a sample",
}


def print_study(study: MachineStudy, console: Console) -> None:
    """All tables of one machine."""
    console.rule(f"[bold]{study.machine.label}")
    for setting in SETTINGS:
        if any(p.bar.setting == setting for p in study.predictions):
            console.print(setting_table(study, setting))
    if study.machine.is_paper and study.predictions:
        console.print(errors_table(study.predictions))
        print_order(study, console)
        console.print(sensitivity_table(study))
    for model, cells in study.beyond.items():
        console.print(beyond_table(model, cells))


def setting_table(study: MachineStudy, setting: str) -> Table:
    """Every method's seconds, measured -> modelled; below, the quickest of our variants."""
    is_paper = study.machine.is_paper
    shown = "measured -> modelled seconds a step" if is_paper else "modelled seconds a step"
    table = Table(title=f"{TITLES[setting]}\n{shown}", box=SIMPLE_HEAD)
    table.add_column("drafter")
    table.add_column("method")
    for x in points_of(setting):
        calibrated = is_paper and setting != "ratio" and x == points_of(setting)[0]
        name = f"1:{x}" if setting == "ratio" else f"P = {x}"
        table.add_column(name + (" (calibrates)" if calibrated else ""), justify="right")
    here = [p for p in study.predictions if p.bar.setting == setting]
    found = {(p.bar.model, p.bar.method, p.bar.x): p for p in here}
    for model in dict.fromkeys(key[0] for key in found):
        for method in COMPARED:
            cells = [_cell(found.get((model, method, x)), is_paper) for x in points_of(setting)]
            style = "bold" if method == "splitkv" else None
            table.add_row(model, METHODS[method].label, *cells, style=style)
        best = [study.best_variant(setting, model, x) for x in points_of(setting)]
        texts = [f"{METHODS[v.method].label} {v.seconds:.2f}" for v in best]
        table.add_row(model, "ours, best places (prediction)", *texts, style="cyan")
        table.add_section()
    return table


def _cell(prediction: Prediction | None, is_paper: bool) -> str:
    if prediction is None:
        return "N/A"
    modelled = f"{prediction.modelled.total:.2f}"
    if not is_paper:
        return modelled
    return f"{prediction.bar.seconds:.2f} -> {modelled} ({100 * prediction.error:+.0f} %)"


def errors_table(predictions: list[Prediction]) -> Table:
    """Held-out errors by method and setting."""
    table = Table(
        title="errors of held-out bars: mean of |error| / worst / bars within 15 %",
        box=SIMPLE_HEAD,
    )
    table.add_column("method")
    errors = error_table(predictions)
    settings = [s for s in (*SETTINGS, "all") if any(key[1] == s for key in errors)]
    for setting in settings:
        table.add_column(setting, justify="right")
    for method in COMPARED:
        row = []
        for setting in settings:
            e = errors.get((method, setting))
            row.append(
                f"{100 * e.mean:.0f} % / {100 * e.worst:+.0f} % / {e.within_15} of {e.bars}"
                if e
                else ""
            )
        table.add_row(METHODS[method].label, *row, style="bold" if method == "splitkv" else None)
    return table


def print_order(study: MachineStudy, console: Console) -> None:
    """How often methods stand in the measured order, and each pair that does not."""
    order = study.order()
    console.print(
        f"held-out order: {order.right} of {order.pairs} pairs of methods as measured; all five at "
        f"{order.exact} of {order.places} places; the fastest at {order.fastest}",
        highlight=False,
    )
    for line in order.wrong:
        console.print(f"  {line}", highlight=False, style="dim")


def sensitivity_table(study: MachineStudy, constants: Constants = FITTED) -> Table:
    """Mean |error| of held-out bars when one number is a fifth off."""
    table = Table(
        title=f"sensitivity: mean |held-out error| with one number {100 * STEP:.0f} % off",
        box=SIMPLE_HEAD,
    )
    for name in ("number", "Split-KV's bars", "all bars"):
        table.add_column(name, justify="left" if name == "number" else "right")
    bars = [p.bar for p in study.predictions]
    for name, (_, own, every) in sensitivity(study.machine.links, constants, bars).items():
        table.add_row(name, f"{100 * own:.1f} %", f"{100 * every:.1f} %")
    return table


def beyond_table(model: str, cells: list[Cell]) -> Table:
    """The quickest method and by how much Split-KV leads or trails the quickest of the others."""
    contexts = list(dict.fromkeys(cell.context_rows for cell in cells))
    table = Table(
        title=f"{model}: past the paper (prediction), b = 8, Q = 64k\nSplit-KV's best seconds, the "
        "others' best, and how many times quicker Split-KV is",
        caption="gathered + scattered; scatters are summed inside nodes, then at the owner. group: "
        "queries go to ranks with their document's keys",
        box=SIMPLE_HEAD,
    )
    table.add_column("P", justify="right")
    for context in contexts:
        table.add_column(f"S = {rows_text(context)}")
    for ranks in dict.fromkeys(cell.cp_size for cell in cells):
        row = [_beyond_cell(cell) for cell in cells if cell.cp_size == ranks]
        table.add_row(str(ranks), *row)
    return table


def _beyond_cell(cell: Cell) -> str:
    own, other = cell.best_of(own=True), cell.best_of(own=False)
    a, b = cell.seconds[own], cell.seconds[other]
    return f"{a:.2f} {METHODS[own].label}\n{b:.2f} {METHODS[other].label}: {b / a:.2f}x"
