"""Charts of the method: how far replicas fan out, what they said, what steers, and what syncs cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hdet.lab.page import run_numbers as numbers
from hdet.lab.page.chart import Chart, Trace, band, dots, estimates, line, series_color
from hdet.lab.page.read_runs import Run
from hdet.lab.page.verdicts import explored, what_held_out_data_said, what_replicas_said
from hdet.method.thermostat import Thermostat
from hdet.round_record import ComparingRecord, GuardRecord, ThermostatRecord, is_learning_rate


def rate_charts(run: Run) -> Iterator[Chart]:
    """The learning rate over the run: its base, the values of the replicas around it, and the plan."""
    names = numbers.learning_rates(run)
    chart = _value_chart(run, names, "learning rate")
    pairs = [(record.step, record.section(GuardRecord).num_brakes) for record in run.records]
    brakes = {step for (_, before), (step, now) in pairwise([(0, 0), *pairs]) if now > before}
    if brakes and names:
        chart.caption += " At the crosses the run had collapsed, and the guard went back."
        used = zip(*numbers.base_series(run, names[0]), strict=True)
        given_up = [point for point in used if point[0] in brakes]
        chart.traces.append(dots(given_up, "guard went back", "--alarm", "x"))
    peaks = [max((y for y in trace["y"] if 0 < y < math.inf), default=1.0) for trace in chart.traces]
    chart.is_log = bool(peaks) and max(peaks) > 10 * min(peaks)
    chart.max_decades, chart.layout = 3, {"yaxis": {"rangemode": "tozero"}}
    yield chart


def value_charts(run: Run) -> Iterator[Chart]:
    """Every other hyperparameter that replicas explored, or that changed over the run."""
    others = (name for name in numbers.hyperparameters(run) if not is_learning_rate(name))
    for family, members in numbers.families(others).items():
        chart = _value_chart(run, members, family.replace("_", " "))
        chart.is_log = True
        is_moving = any(len(set(trace["y"])) > 1 for trace in chart.traces)
        if is_moving or {*members} & {*explored(run.records)}:
            yield chart


def _value_chart(run: Run, names: Sequence[str], what: str) -> Chart:
    """Draw bands, plans where they were not kept to, and bases; what is equal is drawn once."""
    fans, plans, bases = list[Trace](), list[Trace](), list[Trace]()
    used = _by_series({name: numbers.base_series(run, name) for name in names})
    for index, (series, members) in enumerate(used):
        label = ", ".join(members) if len(used) > 1 else what
        bases.append(line(*series, label, series_color(index, len(used)), width=2.2))
        low, high = (numbers.value_series(run, members[0], choose) for choose in (min, max))
        fans += band(*low, high[1], "replicas", showlegend=not fans) if low[0] else []
    for plan, _ in _by_series({members[0]: numbers.plan_series(run, members[0]) for _, members in used}):
        # A plan may fall far below the base that was learned: the axis does not follow it there.
        aside = {"width": 1.5, "meta": ["", "aside"]}
        plans.append(line(*plan, "planned", ("--muted", "dot"), **aside))
    caption = "The line is the value that was used."
    if fans:
        caption = "Each replica used a value of its own within the band. The line is the base."
    caption += " The dotted line is what was planned." if plans else ""
    traces = [*fans, *plans, *bases]
    return Chart(f"{what[:1].upper()}{what[1:]}", caption, traces, what, hover="x unified")


def _by_series(series: dict[str, numbers.Series]) -> list[tuple[numbers.Series, list[str]]]:
    """Every series that has points, with the names that share it."""
    found = dict[str, tuple[numbers.Series, list[str]]]()
    for name, (steps, values) in series.items():
        key = f"{steps} {[f'{value:.9g}' for value in values]}"
        if steps:
            found.setdefault(key, ((steps, values), []))[1].append(name)
    return list(found.values())


def said_charts(run: Run) -> Iterator[Chart]:
    """Draw the replicas' losses against their values."""
    said = what_replicas_said(run.records)
    traces = [estimates(one.losses, one.name, series_color(i, len(said))[0]) for i, one in enumerate(said)]
    counts = (one.counts + ("" if one.side else f" ({one.verdict})") for one in said)
    caption = "".join(f"{told[:1].upper()}{told[1:]}. " for told in counts)
    loud = dict[str, list[str]]()
    for one in said:
        loud.setdefault(one.loudness, []).append(one.name)
    caption += "".join(f"Signal over noise of {', '.join(who)}: {how}. " for how, who in loud.items())
    caption += "Dots are means over the rounds, with two standard errors. Short rounds favour small learning "
    caption += "rates, so the better side of a round is not always the better one in the end."
    axes = "loss minus mean of the round", "value over the mean value"
    yield Chart("What the replicas said", caption, traces, *axes)


def signal_charts(run: Run) -> Iterator[Chart]:
    """Draw which way the losses pointed, for a controller that compares replicas."""
    told = [(record.step, record.section(ComparingRecord)) for record in run.records if record.ends_round]
    names = dict.fromkeys(name for _, seen in told for name in seen.velocity)
    for family, members in numbers.families(names).items():
        traces = list[Trace]()
        for index, name in enumerate(members):
            color = series_color(index, len(members))[0]
            signal = [(step, seen.signal[name]) for step, seen in told if name in seen.signal]
            velocity = [(step, seen.velocity[name]) for step, seen in told if name in seen.velocity]
            traces.append(dots(signal, f"{name}, signal", color, opacity=0.45))
            traces.append(dots(velocity, f"{name}, velocity", color, mode="lines"))
        caption = "Each dot says which way the replicas' losses pointed in a round. The line is their "
        caption += "running mean. Above zero means towards larger values. Dots on both sides alike are noise."
        yield Chart(f"Signal and velocity: {family}", caption, traces, "direction")


def averaging_charts(run: Run) -> Iterator[Chart]:
    """Draw what a thermostat has judged the learning rate by."""
    gains, right = list[tuple[int, float]](), list[tuple[int, float]]()
    for record in run.records:
        told = record.section(ThermostatRecord)
        for gain, progress in zip(told.averaging_gains, told.time_gains, strict=False):
            if gain is not None and progress is not None:
                gains.append((record.step, gain))
                right.append((record.step, Thermostat.target * max(0.0, progress)))
    caption = "What averaging the weights of a round gained on held-out data. Where that was more than the "
    caption += "dotted line, the learning rate was too high. Where it was less, it was too low. The line is "
    caption += f"{Thermostat.target:g} of what an e-fold of steps gained."
    traces = [dots(gains, "averaging gained", "--accent", mode="lines+markers")]
    traces.append(dots(right, "right", "--strong", mode="lines", line={"color": "--strong", "dash": "dot"}))
    yield Chart("What averaging gains", caption, traces, "fall of the held-out loss", hover="x unified")


def look_charts(run: Run) -> Iterator[Chart]:
    """Draw what held-out data said at each look at the weight decay."""
    looks = what_held_out_data_said(run.records)
    if looks is not None:
        caption = "Each dot is a look at held-out data, with two standard errors. Below zero smaller weights "
        caption += "would score better, and weight decay is added. Above zero it is taken away, if the "
        caption += "held-out loss is close to the training loss. Two looks that agree move it, also where "
        caption += f"their bars include zero. At the end {looks.verdict}."
        traces = [estimates(looks.slopes, "rise of the held-out loss", "--accent")]
        title, rise = "Would smaller weights help?", "rise per e-fold of shrinking"
        yield Chart(title, caption, traces, rise, layout={"yaxis": {"zeroline": True}})


def cost_charts(run: Run) -> Iterator[Chart]:
    """Draw what the syncs cost."""
    timed = [record for record in run.records if record.milliseconds]
    steps, traces = [record.step for record in timed], list[Trace]()
    for index, name in enumerate(dict.fromkeys(name for record in timed for name in record.milliseconds)):
        spent = [record.milliseconds.get(name, 0.0) for record in timed]
        traces.append(line(steps, spent, name, series_color(index), unit="ms", stackgroup="cost"))
    caption = "Time on the host, by what it was spent on. The first sync also sets up buffers."
    yield Chart("Cost of the syncs", caption, traces, "milliseconds", hover="x unified", height=280)


def left_out_charts(run: Run) -> Iterator[Chart]:
    """Draw which replicas did not count, and which had losses that were not finite."""
    not_finite = [
        (record.step, replica, f"losses that were not finite: {count}")
        for record in run.records
        for replica, count in enumerate(record.num_nonfinite_losses)
        if count and replica not in record.excluded
    ]
    hover = "replica %{y}<br>step %{x:,}<br>%{customdata}<extra></extra>"
    traces = [
        dots(run.excluded_events, "left out of the mean", "--alarm", "x", hovertemplate=hover),
        dots(not_finite, "losses not finite", "--replica", "circle-open", hovertemplate=hover),
    ]
    caption = "A replica that was left out of a sync gets the mean of the others, and goes on from it. "
    caption += "Marks in one row point at one worker. Marks in one column point at the step."
    num = run.num_replicas or 1
    axis = {"range": [num - 0.5, -0.5], "dtick": max(1, num // 8), "tick0": 0}
    layout = {"xaxis": {"range": [0, 1.03 * run.last_step]}, "yaxis": axis}
    yield Chart("Replicas left out and healed", caption, traces, "replica", height=280, layout=layout)
