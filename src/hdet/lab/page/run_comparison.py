"""Several runs side by side: in words, in common charts, and in a table of results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from hdet.lab.page import run_numbers as numbers
from hdet.lab.page.chart import Chart, line, series_color
from hdet.lab.page.html_page import Cell
from hdet.lab.page.loss_charts import against_rates, shown_range
from hdet.lab.page.paper_figures import training_chart
from hdet.lab.page.read_runs import Run, loss_title
from hdet.lab.page.sentences import count, duration, figure


def are_comparable(runs: Sequence[Run]) -> bool:
    """Tell whether all runs measured the same loss on the same task."""
    return len({(str(run.config.get("task")), run.loss_unit) for run in runs}) == 1


def comparison_words(runs: Sequence[Run]) -> tuple[str, str]:
    """Name the best of several runs, and the next; or tell why nobody can."""
    who, losses = count(len(runs), "run"), _by_loss(runs)
    if not are_comparable(runs):
        return "", f"{who} on different tasks. Their losses cannot be compared with each other."
    if len(losses) < 2:
        return "", f"{who}, of which {'one has' if losses else 'none has'} a held-out loss."
    (lowest, best), (loss, second), *_ = losses
    share = f"{figure(100 * (loss / lowest - 1), 2)} % above" if lowest > 0 else f"at {figure(loss, 4)}"
    headline = f"“{best.name}” ended best, with a held-out loss of {figure(lowest, 4)}."
    return headline, f"Next comes “{second.name}”, {share}."


def _by_loss(runs: Sequence[Run]) -> list[tuple[float, Run]]:
    known = [(run.final_loss, run) for run in runs if run.final_loss is not None]
    return sorted(known, key=lambda pair: pair[0])


def comparison_charts(runs: Sequence[Run]) -> Iterator[Chart]:
    """Loss against learning rate, and held-out loss and learning rate of all runs over steps."""
    is_fair = are_comparable(runs)
    unit = runs[0].loss_unit if is_fair else ""
    curves = [numbers.evaluated(run) for run in runs]
    first = [values[0] for steps, values in curves if steps and steps[0] == 0]
    untrained = statistics.median_low(first) if first and is_fair else None
    ends = [(lr, run.final_loss, run.name) for run in runs if (lr := numbers.found_lr(run))]
    if is_fair and len({lr for lr, _, _ in ends}) > 1:
        chart = against_rates("Loss against learning rate", "runs", ends, untrained, unit)
        chart.caption = "Each dot is a run, at the learning rate that it came to."
        if any(run.search or run.compares for run in runs):  # else it is a sweep
            chart.traces[0]["mode"] = "markers"
        yield chart
    losses = [value for _, values in curves for value in values]
    high, *shown = shown_range(losses, untrained)
    chart = _over_steps("Held-out loss", runs, curves, loss_title(unit))
    chart.caption = "Measured on held-out data. Compare where the curves end, not where they cross."
    if high < max(losses, default=high):
        chart.caption += " Losses far above the first one are cut off."
        chart.layout = {"yaxis": {"range": shown}}
    yield chart
    broken = [run.status in ("failed", "diverged") for run in runs]
    names, trained = [run.name for run in runs], map(numbers.training_losses, runs)
    yield training_chart(list(zip(names, trained, broken, strict=True)), unit)
    rates = [numbers.base_series(run, next(iter(numbers.learning_rates(run)), "")) for run in runs]
    chart = _over_steps("Learning rate", runs, rates, "learning rate")
    chart.caption = "The base of each run. Of several parameter groups, the first is shown."
    chart.is_log, chart.max_decades = True, 5
    yield chart


def _over_steps(title: str, runs: Sequence[Run], series: Sequence[numbers.Series], y_title: str) -> Chart:
    pairs = enumerate(zip(runs, series, strict=True))
    lines = [line(*one, run.name, series_color(i), width=2.2) for i, (run, one) in pairs]
    return Chart(title, "", lines, y_title, hover="x unified", is_log=False)


def comparison_table(runs: Sequence[Run]) -> tuple[list[str], list[list[Cell]]]:
    """Final results: a head, and a row of cells per run; the best loss is marked if losses are comparable."""
    metrics = numbers.main_metrics({name: 0.0 for run in runs for name in run.final_metrics})
    losses = _by_loss(runs) if are_comparable(runs) else []
    best = losses[0][0] if len(losses) > 1 else None
    table = [_row(run, list(metrics), best) for run in runs]
    head = [name for name in table[0] if any(row[name].value is not None for row in table)]
    return head, [[row[name] for name in head] for row in table]


def _row(run: Run, metrics: Sequence[str], best: float | None) -> dict[str, Cell]:
    """The results of a run, by the head of their column."""
    return {
        "run": Cell(run.name, run.name.lower()),
        "held-out loss": _cell(run.final_loss, 5, is_best=best is not None and run.final_loss == best),
        **{name.replace("_", " "): _cell(run.final_metrics.get(name), 5) for name in metrics},
        "guess": _cell(numbers.asked_lr(run)),
        "learning rate": _cell(numbers.found_lr(run)),
        "controllers": _cell(", ".join(run.controllers) or None),
        "replicas": _cell(run.num_replicas),
        "steps": Cell(f"{run.last_step:,}", run.last_step),
        "time": Cell("-" if run.seconds is None else duration(run.seconds), run.seconds),
        "status": _cell(run.status),
    }


def _cell(value: float | str | None, digits: int = 3, *, is_best: bool = False) -> Cell:
    if isinstance(value, str):
        return Cell(value, value.lower())
    return Cell("-" if value is None else figure(value, digits), value, is_best)
