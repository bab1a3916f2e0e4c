"""Charts of the training itself: losses, metrics, probes, cost of the syncs, replicas left out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hdet.lab.page.chart import Chart, Choice, Trace, line, series_color, spread_color
from hdet.lab.page.facts import compares, excluded_events, training_losses
from hdet.lab.page.runs import Run
from hdet.lab.page.series import Slot, by_replica, by_slot, explored, mean, thin
from hdet.records import RoundRecord

_MAX_CHOICES = 6
_MAX_LINES = 16
_MAX_BARS = 240
_PHASES = ("probe", "measure", "converge", "steer")


def loss_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """The loss over the run, held-out and of the training."""
    held_out = [e for e in run.evaluations if e.loss is not None]
    trained = training_losses(run)
    if not (held_out or trained):
        return
    traces = []
    if trained:
        kept = thin([[loss for _, loss in trained]], max_points)
        x, y = [trained[i][0] for i in kept], [trained[i][1] for i in kept]
        color, width = ("--replica", 1.5) if held_out else ("--accent", 2.2)
        traces.append(line(x, y, "training loss", color, width=width, unit=run.loss_unit))
    if held_out:
        traces.append(
            _evaluated([e.step for e in held_out], [e.loss for e in held_out], max_points, run.loss_unit)
        )
    caption = "The strong line is the loss on held-out data. " if held_out else ""
    if held_out and run.records and run.records[-1].num_averaged_steps:
        caption += "Its last point is the mean of the weights over the last steps. "
    if trained:
        who = " of the replicas" if run.num_replicas != 1 else ""
        caption += f"{'The thin line' if held_out else 'This'} is the mean training loss{who} in each round."
    yield Chart(
        title="Loss",
        caption=caption,
        traces=traces,
        y_title=run.loss_title,
        is_wide=False,
        height=290,
        is_log=_is_far([e.loss for e in held_out if e.loss is not None], [loss for _, loss in trained]),
        max_decades=4,
    )


def training_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """Losses of the replicas where these differ, metrics, and the probe."""
    unit = run.loss_unit
    chosen = _replica_choices(run, "losses", max_points, unit) if explored(run) else []
    if chosen:
        held_out = [e for e in run.evaluations if e.loss is not None]
        base = _evaluated([e.step for e in held_out], [e.loss for e in held_out], max_points, unit)
        yield Chart(
            title="Losses of the replicas",
            caption="Thin lines are training losses, round by round, coloured by where the replica stood in "
            "the spread. Look for one colour that stays below the others."
            + (" The strong line is the loss on held-out data." if held_out else ""),
            traces=[base] if held_out else [],
            y_title=run.loss_title,
            height=380,
            is_log=_is_far(
                [e.loss for e in held_out if e.loss is not None],
                [loss for r in run.records for loss in r.losses if loss is not None],
            ),
            choices=chosen,
            choice_label="Colour by",
            has_spread_key=True,
        )
    names = dict.fromkeys(name for e in run.evaluations for name in e.metrics if name != "loss")
    for family, members in _families(list(names)).items():
        traces = []
        for i, name in enumerate(members):
            found = [(e.step, e.metrics[name]) for e in run.evaluations if name in e.metrics]
            trace = _evaluated([s for s, _ in found], [v for _, v in found], max_points, "", _spaced(name))
            if len(members) > 1:
                color, dash = series_color(i)
                trace["line"] |= {"color": color, "dash": dash}
            traces.append(trace)
        yield Chart(
            title="Parts of the loss" if family == "loss" else f"Metric: {_spaced(family)}",
            caption="Measured on held-out data.",
            traces=traces,
            y_title=_spaced(family),
            hover="x unified",
            height=260,
            is_wide=False,
        )
    probes = _replica_choices(run, "probes", max_points, unit)
    if probes:
        yield Chart(
            title="Probe",
            caption="Loss on one batch, the same for every replica, just before they are averaged."
            + (" The controller compares these losses." if compares(run) else ""),
            y_title=run.loss_title,
            is_log=False,
            choices=probes,
            choice_label="Colour by",
            has_spread_key=bool(explored(run)),
        )


def _families(names: Sequence[str]) -> dict[str, list[str]]:
    """Metrics that share the part before their first underscore go into one chart.

    >>> _families(["auc_like", "auc_dwell", "auc", "bits_per_character"])
    {'auc': ['auc_like', 'auc_dwell', 'auc'], 'bits_per_character': ['bits_per_character']}
    """
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(name.split("_")[0], []).append(name)
    return {(key if len(members) > 1 else members[0]): members for key, members in families.items()}


def health_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """What the syncs cost, and which replicas were left out."""
    cost, size = _cost(run.records)
    if cost:
        each = "every sync" if size == 1 else f"a sync, as means over {size} of them"
        yield Chart(
            title="Cost of the syncs",
            caption=f"Time on the host for {each}, by what it was spent on. The first sync also sets up "
            "buffers. A rising trend is worth a look.",
            traces=cost,
            y_title="milliseconds",
            hover="x unified",
            height=280,
            is_wide=False,
            layout={
                "barmode": "stack",
                "bargap": 0.15,
                "xaxis": {"type": "category", **_ticks(cost[0]["x"])},
            },
        )
    timeline = _timeline(run)
    if timeline:
        replicas = max((len(r.losses) for r in run.records), default=0)
        replicas = max([replicas, *(r + 1 for _, r, _ in excluded_events(run))])
        yield Chart(
            title="Replicas left out",
            caption="Each mark is a sync in which a replica did not count, or had losses that were not "
            "finite. Marks in one row point at one worker. Marks in one column point at the step.",
            traces=timeline,
            y_title="replica",
            height=280,
            is_wide=False,
            is_table_of_points=True,
            layout={
                "xaxis": {"range": [0, 1.03 * run.last_step]},
                "yaxis": {"range": [replicas - 0.5, -0.5], "dtick": max(1, replicas // 8), "tick0": 0},
            },
        )


def _is_far(held_out: Sequence[float], trained: Sequence[float]) -> bool:
    """Whether a few losses are so far above the others that they would flatten them."""
    known = [loss for loss in [*held_out, *trained] if math.isfinite(loss)]
    usual = max(held_out, default=math.inf)
    if len(held_out) > 2:  # one that jumped is no measure of the others
        usual = min(usual, 2 * max(held_out[0], statistics.median(held_out)))
    return min(known, default=0.0) > 0 and max(known) > 5 * usual


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _evaluated(
    steps: Sequence[int], values: Sequence[float | None], max_points: int, unit: str, name: str = ""
) -> Trace:
    kept = thin([values], max_points)
    trace = line(
        [steps[i] for i in kept],
        [values[i] for i in kept],
        name or "held-out loss",
        "--accent" if name else "--strong",
        width=2.5 if name else 3,
        unit=unit,
    )
    if len(kept) <= 60:
        trace |= {"mode": "lines+markers", "marker": {"size": 6}}
    return trace


def _replica_choices(run: Run, field: str, max_points: int, unit: str) -> list[Choice]:
    records = [record for record in run.records if any(v is not None for v in getattr(record, field))]
    if not records:
        return []
    steps = [record.step for record in records]
    what = "probe loss" if field == "probes" else "training loss"
    if not explored(run):  # replicas differ by noise only
        means = [mean(getattr(record, field)) for record in records]
        kept = thin([means], max_points)
        x, y = [steps[i] for i in kept], [means[i] for i in kept]
        return [Choice("mean", [line(x, y, what, "--accent", width=2.2, unit=unit)])]
    columns = by_replica(records, field)
    is_much = len(columns) > _MAX_LINES or max_points < 250
    names = explored(run)[: 1 if is_much else _MAX_CHOICES]
    # Numbers on the page: replicas x rounds x choices. Lines of many replicas need fewer points each.
    num_lines = min(_MAX_LINES, len(columns)) * (len(names) + 1)
    kept = thin([column.values for column in columns], min(max_points, max(40, 6 * max_points // num_lines)))
    style = _LineStyle([steps[i] for i in kept], kept, what, unit)
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
            slot = slots[k]
            name = f"replica {k}" if are_replicas else f"{self.what}, position {slot.position:+.2f}"
            trace = self._line(
                name, "--replica" if are_replicas else spread_color(slot.position), slot.values
            )
            if not are_replicas:
                trace["customdata"] = [slot.replicas[i] for i in self.kept]
                trace["hovertemplate"] = trace["hovertemplate"].replace(
                    "<extra>", "<br>replica %{customdata}<extra>"
                )
            traces.append(trace)
        # One entry in the legend switches all of them.
        label = f"{self.what} of the replicas" + (
            f" ({num_drawn} of {len(slots)})" if last >= num_drawn else ""
        )
        entry = line([None], [None], label, "--replica", width=1.5, legendgroup="replicas")
        return [*traces, {**entry, "hoverinfo": "skip", "meta": ["", "legend"]}]

    def _line(self, name: str, color: str, values: Sequence[float | None]) -> Trace:
        trace = line(self.steps, [values[i] for i in self.kept], name, color, width=1.2, unit=self.unit)
        trace |= {"legendgroup": "replicas", "showlegend": False}
        if len(self.kept) == 1:
            trace |= {"mode": "markers", "marker": {"color": color, "size": 7}}
        return trace

    def _band(self, slots: Sequence[Slot]) -> list[Trace]:
        rows = [
            [v for slot in slots if (v := slot.values[i]) is not None] for i in range(len(slots[0].values))
        ]
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "hovertemplate": None}
        low = self._line("lowest of all", "--band", [min(row, default=None) for row in rows]) | edge
        high = self._line("highest of all", "--band", [max(row, default=None) for row in rows]) | edge
        return [low, {**high, "fill": "tonexty", "fillcolor": "--band"}]


def _cost(records: Sequence[RoundRecord]) -> tuple[list[Trace], int]:
    timed = [record for record in records if record.milliseconds]
    if not timed:
        return [], 1
    names = dict.fromkeys(_PHASES) | dict.fromkeys(name for record in timed for name in record.milliseconds)
    size = math.ceil(len(timed) / _MAX_BARS)
    bars = [timed[i : i + size] for i in range(0, len(timed), size)]
    traces = []
    for index, name in enumerate(names):
        heights = [sum(r.milliseconds.get(name, 0.0) for r in bar) / len(bar) for bar in bars]
        if any(heights):
            traces.append(
                {
                    "type": "bar",
                    "name": name,
                    "x": [bar[-1].step for bar in bars],
                    "y": heights,
                    "marker": {
                        "color": f"--series-{(0, 4, 3, 2)[index] + 1 if index < 4 else index % 8 + 1}"
                    },
                    "hovertemplate": "%{y:.3~g} ms",
                }
            )
    return traces, size


def _ticks(steps: Sequence[int]) -> dict[str, object]:
    """A few of them, with the first and the last; a category axis would leave out the last."""
    last = len(steps) - 1
    chosen = sorted({round(i * last / 5) for i in range(6)})
    return {"tickmode": "array", "tickvals": [steps[i] for i in chosen]}


def _timeline(run: Run) -> list[Trace]:
    left_out = excluded_events(run)
    counts = [
        (record.step, replica, f"{count} losses were not finite" if count > 1 else "one loss was not finite")
        for record in run.records
        for replica, count in enumerate(record.num_nonfinite_losses)
        if count and replica not in record.excluded
    ]
    traces = []
    for events, name, symbol, color in (
        (left_out, "left out of the mean", "x", "--alarm"),
        (counts, "losses not finite", "circle-open", "--replica"),
    ):
        if events:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name,
                    "x": [step for step, _, _ in events[:2000]],
                    "y": [replica for _, replica, _ in events[:2000]],
                    "customdata": [why for _, _, why in events[:2000]],
                    "marker": {"color": color, "size": 10, "symbol": symbol},
                    "hovertemplate": "replica %{y}<br>step %{x:,}<br>%{customdata}<extra></extra>",
                }
            )
    return traces
