"""The study as tables for people: measured, modelled, and how far they are apart."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_splitkv.comm.links import Links
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


_CPU_FLOPS = 1e12  # of attention; no accelerator is as slow


def print_study(study: MachineStudy, console: Console) -> None:
    """All tables of one machine, for 80 columns."""
    console.rule(f"[bold]{study.machine.label}")
    hint = machine_hint(study.machine.links)
    if hint:
        console.print(hint, highlight=False)
    for setting in SETTINGS:
        models = dict.fromkeys(p.bar.model for p in study.predictions if p.bar.setting == setting)
        for model in models:
            console.print(setting_table(study, setting, model))
    if study.machine.is_paper and study.predictions:
        console.print(errors_table(study.predictions))
        print_order(study, console)
        console.print(sensitivity_table(study))
    for model, cells in study.beyond.items():
        console.print(beyond_table(model, cells))


def machine_hint(links: Links) -> str | None:
    """What to say of links that were measured on the processes of a CPU; None of others."""
    if links.attention_flops >= _CPU_FLOPS:
        return None
    return (
        f"hint: links {links.name!r} are a CPU's: {links.attention_flops / 1e12:.3g} TFLOP/s in "
        f"attention, nodes of {links.ranks_per_node:,} ranks. These are times of such a machine; "
        "for a cluster's measure there: torchrun --nnodes N --nproc-per-node M -m megatron_splitkv "
        "bench links --save FILE"
    )


def setting_table(study: MachineStudy, setting: str, model: str) -> Table:
    """A drafter's seconds by method, measured and modelled; last, our quickest variant."""
    is_paper = study.machine.is_paper
    shown = "measured -> modelled seconds a step" if is_paper else "modelled seconds a step"
    calibrates = is_paper and setting != "ratio"
    table = Table(
        title=f"{model}, {TITLES[setting]}\n{shown}",
        caption="* calibrates. ours: Split-KV's quickest places, a prediction"
        if calibrates
        else "ours: Split-KV's quickest places, a prediction",
        box=SIMPLE_HEAD,
    )
    table.add_column("method", no_wrap=True)
    for x in points_of(setting):
        star = " *" if calibrates and x == points_of(setting)[0] else ""
        name = f"1:{x}" if setting == "ratio" else f"P = {x}"
        table.add_column(name + star, justify="right", no_wrap=True)
    found = {
        (p.bar.method, p.bar.x): p
        for p in study.predictions
        if (p.bar.setting, p.bar.model) == (setting, model)
    }
    for method in COMPARED:
        cells = [_cell(found.get((method, x)), is_paper) for x in points_of(setting)]
        style = "bold" if method == "splitkv" else None
        table.add_row(METHODS[method].label, *cells, style=style)
    best = [study.best_variant(setting, model, x) for x in points_of(setting)]
    texts = [f"{v.seconds:.2f}\n" + METHODS[v.method].label.replace(", ", "\n") for v in best]
    table.add_row("ours", *texts, style="cyan")
    return table


def _cell(prediction: Prediction | None, is_paper: bool) -> str:
    if prediction is None:
        return "N/A"
    modelled = f"{prediction.modelled.total:.2f}"
    if not is_paper:
        return modelled
    return f"{prediction.bar.seconds:.2f}->{modelled}\n{100 * prediction.error:+.0f} %"


def errors_table(predictions: list[Prediction]) -> Table:
    """Held-out errors by method and setting."""
    table = Table(
        title="errors of held-out bars: mean |error| and worst, %; bars within 15 %",
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
                f"{100 * e.mean:.0f}, {100 * e.worst:+.0f}; {e.within_15}/{e.bars}" if e else ""
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
    table = Table(
        title=f"{model}: past the paper (prediction), b = 8, Q = 64k\nseconds a step of the "
        "quickest Split-KV and of the quickest other",
        caption="gathered + scattered; scatters are summed inside nodes, then at the owner. group: "
        "queries go to ranks with their document's keys",
        box=SIMPLE_HEAD,
    )
    for name, justify in (
        ("P", "right"),
        ("S", "right"),
        ("Split-KV", "right"),
        ("places", "left"),
        ("other", "right"),
        ("which", "left"),
        ("ahead", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for ranks in dict.fromkeys(cell.cp_size for cell in cells):
        for cell in (cell for cell in cells if cell.cp_size == ranks):
            own, other = cell.best_of(own=True), cell.best_of(own=False)
            a, b = cell.seconds[own], cell.seconds[other]
            table.add_row(
                str(ranks),
                rows_text(cell.context_rows),
                _seconds(a),
                METHODS[own].label,
                _seconds(b),
                METHODS[other].label,
                f"{b / a:.2f}x",
            )
        table.add_section()
    return table


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
