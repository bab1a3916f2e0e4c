"""Charts of losses and metrics: held-out, of the training, and of every replica."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hdet.lab.page.chart import (
    Chart,
    Choice,
    Trace,
    band,
    legend_entry,
    line,
    series_color,
    spread_color,
    thin,
    unzip,
)
from hdet.lab.page.read_runs import Run, loss_title
from hdet.lab.page.run_numbers import (
    Slot,
    by_replica,
    by_slot,
    explored,
    families,
    mean,
    training_losses,
)

_MAX_CHOICES = 6
_MAX_LINES = 16


def loss_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """The loss over the run, held-out and of the training."""
    held_out, trained = _held_out(run), training_losses(run)
    traces, caption = [], ""
    if trained:
        color, width = ("--replica", 1.5) if held_out else ("--accent", 2.2)
        style = {"width": width, "unit": run.loss_unit, "max_points": max_points}
        traces.append(line(*unzip(trained), "training loss", color, **style))
    if held_out:
        traces.append(_evaluated(held_out, max_points, run.loss_unit))
        caption = "The strong line is the loss on held-out data. "
        if run.records and run.records[-1].num_averaged_steps:
            caption += "Its last point is the mean of the weights over the last steps. "
    if trained:
        who = " of the replicas" if run.num_replicas != 1 else ""
        caption += f"{'The thin line' if held_out else 'This'} is the mean training loss{who} in each round."
    if traces:
        yield Chart(
            title="Loss",
            caption=caption,
            traces=traces,
            y_title=loss_title(run.loss_unit),
            is_log=_is_far(held_out, [loss for _, loss in trained]),
            max_decades=4,
        )


def training_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """Losses of the replicas where these differ, metrics, and the probe."""
    y_title, held_out = loss_title(run.loss_unit), _held_out(run)
    chosen = _replica_choices(run, "losses", max_points) if explored(run) else []
    if chosen:
        yield Chart(
            title="Losses of the replicas",
            caption="Thin lines are training losses, round by round, coloured by where the replica stood in "
            "the spread. Look for one colour that stays below the others."
            + (" The strong line is the loss on held-out data." if held_out else ""),
            traces=[_evaluated(held_out, max_points, run.loss_unit)] if held_out else [],
            y_title=y_title,
            is_wide=True,
            height=380,
            is_log=_is_far(held_out, [loss for r in run.records for loss in r.losses if loss is not None]),
            choices=chosen,
            choice_label="Colour by",
            has_spread_key=True,
        )
    names = dict.fromkeys(name for e in run.evaluations for name in e.metrics if name != "loss")
    for family, members in families(names, "_").items():
        shown = (family if len(members) > 1 else members[0]).replace("_", " ")
        traces = []
        for i, name in enumerate(members):
            found = [(e.step, e.metrics[name]) for e in run.evaluations if name in e.metrics]
            color, dash = series_color(i, len(members))
            traces.append(_evaluated(found, max_points, "", name.replace("_", " "), color, dash))
        yield Chart(
            title="Parts of the loss" if shown == "loss" else f"Metric: {shown}",
            caption="Measured on held-out data.",
            traces=traces,
            y_title=shown,
            hover="x unified",
            height=260,
        )
    probes = _replica_choices(run, "probes", max_points)
    if probes:
        yield Chart(
            title="Probe",
            caption="Loss on one batch, the same for every replica, just before they are averaged."
            + (" The controller compares these losses." if run.compares else ""),
            y_title=y_title,
            is_wide=True,
            is_log=False,
            choices=probes,
            choice_label="Colour by",
            has_spread_key=bool(explored(run)),
        )


def _held_out(run: Run) -> list[tuple[int, float]]:
    return [(e.step, e.loss) for e in run.evaluations if e.loss is not None]


def _is_far(evaluated: Sequence[tuple[int, float]], trained: Sequence[float]) -> bool:
    """Tell whether a few losses are so far above the others that they would flatten them."""
    held_out = [loss for _, loss in evaluated]
    known = [loss for loss in [*held_out, *trained] if math.isfinite(loss)]
    usual = max(held_out, default=math.inf)
    if len(held_out) > 2:  # one that jumped is no measure of the others
        usual = min(usual, 2 * max(held_out[0], statistics.median(held_out)))
    return min(known, default=0.0) > 0 and max(known) > 5 * usual


def _evaluated(
    points: Sequence[tuple[int, float]],
    max_points: int,
    unit: str,
    name: str = "held-out loss",
    color: str = "--strong",
    dash: str = "solid",
) -> Trace:
    width = 3 if color == "--strong" else 2.5
    trace = line(*unzip(points), name, color, dash=dash, width=width, unit=unit, max_points=max_points)
    return trace | ({"mode": "lines+markers", "marker": {"size": 6}} if len(trace["x"]) <= 60 else {})


def _replica_choices(run: Run, field: str, max_points: int) -> list[Choice]:
    records = [record for record in run.records if any(v is not None for v in getattr(record, field))]
    if not records:
        return []
    steps, names = [record.step for record in records], explored(run)
    what = "probe loss" if field == "probes" else "training loss"
    if not names:  # replicas differ by noise only
        means = [mean(getattr(record, field)) for record in records]
        style = {"width": 2.2, "unit": run.loss_unit, "max_points": max_points}
        return [Choice("mean", [line(steps, means, what, "--accent", **style)])]
    columns = by_replica(records, field)
    names = names[: 1 if len(columns) > _MAX_LINES or max_points < 250 else _MAX_CHOICES]
    # Numbers on the page: replicas x rounds x choices. Lines of many replicas need fewer points each.
    num_lines = min(_MAX_LINES, len(columns)) * (len(names) + 1)
    kept = thin([column.values for column in columns], min(max_points, max(40, 6 * max_points // num_lines)))
    style = _LineStyle([steps[i] for i in kept], kept, what, run.loss_unit)
    choices = [Choice(f"position of {name}", style.lines(by_slot(records, field, name))) for name in names]
    return [*choices, Choice("replica", style.lines(columns, are_replicas=True))]


@dataclass
class _LineStyle:
    """What the lines of all replicas have in common."""

    steps: list[int]
    kept: list[int]
    what: str
    unit: str

    def lines(self, slots: Sequence[Slot], *, are_replicas: bool = False) -> list[Trace]:
        """A line per slot, or a band and some of the lines if there are many."""
        traces = self._band(slots) if len(slots) > _MAX_LINES else []
        last, num_drawn = len(slots) - 1, min(len(slots), _MAX_LINES)
        for k in sorted({round(i * last / max(1, num_drawn - 1)) for i in range(num_drawn)}):
            position, values, replicas = slots[k]
            name = f"replica {k}" if are_replicas else f"{self.what}, position {position:+.2f}"
            color = "--replica" if are_replicas else spread_color(position)
            shown = [values[i] for i in self.kept]
            trace = line(self.steps, shown, name, color, width=1.2, unit=self.unit)
            trace |= {"legendgroup": "replicas", "showlegend": False}
            if len(shown) == 1:
                trace |= {"mode": "markers", "marker": {"color": color, "size": 7}}
            if not are_replicas:
                hover = trace["hovertemplate"].replace("<extra>", "<br>replica %{customdata}<extra>")
                trace |= {"customdata": [replicas[i] for i in self.kept], "hovertemplate": hover}
            traces.append(trace)
        label = f"{self.what} of the replicas"
        label += f" ({num_drawn} of {len(slots)})" if len(slots) > num_drawn else ""
        return [*traces, legend_entry(label, "--replica", "replicas", 1.5)]

    def _band(self, slots: Sequence[Slot]) -> list[Trace]:
        rows = [[v for slot in slots if (v := slot.values[i]) is not None] for i in self.kept]
        low, high = ([end(row, default=None) for row in rows] for end in (min, max))
        return band(self.steps, low, high, ("lowest of all", "highest of all"), "replicas")
