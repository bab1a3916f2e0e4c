"""The paper's figures 1, 2 and 3, of runs of one's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import itemgetter

from hdet.lab.page import run_numbers as numbers
from hdet.lab.page.chart import Chart, Trace, dots, line, series_color
from hdet.lab.page.read_runs import Run, loss_title
from hdet.lab.page.sentences import figure

Curve = tuple[str, numbers.Series, bool]
"""Name of a run, its training losses by step, and whether it crashed."""


def cycle_charts(run: Run) -> Iterator[Chart]:
    """Figure 1: two rounds in the middle of the run, in which replicas part and a sync averages them.

    With shared gradients a replica's distance from the mean is its multiplier less one, times the way of the
    round, whatever the model.
    """
    name = next(iter(numbers.learning_rates(run)), "")
    spread = [r for r in run.records if r.ends_round and len(set(r.multipliers.get(name, ()))) > 1]
    if not spread or run.config.get("gradients") == "local":
        return
    rounds = spread[max(0, len(spread) // 2 - 1) :][:2]
    replicas = list(zip(*(record.multipliers[name] for record in rounds), strict=False))
    traces = list[Trace]()
    for replica, factors in enumerate(replicas):
        x = [step for r in rounds for step in (r.step - r.num_steps, r.step, r.step)]
        y = [height for factor in factors for height in (0, 100 * (factor - 1), 0)]
        label = f"replica {replica}: " + ", then ".join(f"x{figure(factor)}" for factor in factors)
        traces.append(line(x, y, label, series_color(replica, len(replicas)), unit="%"))
    places = [(step, 0.0) for step in dict.fromkeys([traces[0]["x"][0], *(r.step for r in rounds)])]
    traces.append(dots(places, "sync", "--strong", "square"))
    caption = "Two rounds in the middle of the run. Replicas share each gradient and take steps of their own "
    caption += "size, so they part (fan-out). A sync averages them (converge), and deals the multipliers of "
    caption += f"{name} anew."
    first, last = rounds[0].step - rounds[0].num_steps, rounds[-1].step
    room = 0.03 * (last - first)
    layout = {"xaxis": {"range": [first - room, last + room]}}
    y_title = "% of the round's way from the mean"
    yield Chart("Fan-out and converge (figure 1)", caption, traces, y_title, is_wide=True, layout=layout)


def training_chart(curves: Sequence[Curve], unit: str = "") -> Chart:
    """Figure 2: the training losses of several runs, from the first step to the last."""
    traces, crashes = list[Trace](), list[tuple[int, float, str]]()
    for place, (name, (steps, losses), is_crash) in enumerate(curves):
        traces.append(line(steps, losses, name, series_color(place, len(curves)), unit=unit))
        known = [(x, y, f"{name} crashed") for x, y in zip(steps, losses, strict=True) if math.isfinite(y)]
        crashes += known[-1:] * is_crash
    traces.append(dots(crashes, "crashed", "--alarm", "x", hovertemplate="%{customdata}<extra></extra>"))
    caption = "The mean of the replicas' training losses over the whole run."
    caption += " A cross stands at the end of a run that crashed." if crashes else ""
    more = {"height": 420, "is_wide": True, "is_log": True, "hover": "x unified"}
    return Chart("Training loss (figure 2)", caption, traces, loss_title(unit), **more)


def schedule_charts(run: Run) -> Iterator[Chart]:
    """Figure 3: the learning rate of replica 0 in each parameter group, beside that of OneCycleLR.

    It is drawn where a controller compared replicas, as in the paper.
    """
    for name in numbers.learning_rates(run) if run.compares else ():
        steps, rates = numbers.value_series(run, name, itemgetter(0))
        bases, planned = numbers.base_series(run, name)[1], numbers.plan_series(run, name)
        if not steps:
            continue
        planned = planned if planned[0] else numbers.base_series(run, name)
        end, share = bases[-1], bases[-1] / max(planned[1])
        residual = f"residual: {figure(end, 2)}, {figure(100 * share, 2)} % of the peak"
        traces = [
            line(*planned, "OneCycleLR, as planned", "--series-8"),
            line(steps, rates, "replica 0", "--accent", width=1.5),
            line([steps[0], steps[-1]], [end, end], residual, ("--alarm", "dot"), width=1.5),
        ]
        caption = (
            "Replica 0 gets another multiplier at every sync. The residual is the shared value at the end."
        )
        group = name.partition(".")[2] or name
        title = f"Learning rate of {group} (figure 3)" if group != name else "Learning rate (figure 3)"
        yield Chart(title, caption, traces, "learning rate", hover="x unified", height=280)
