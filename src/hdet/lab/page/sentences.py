"""A run in plain words: how numbers are written, a headline, a sentence, and a tile for each part."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from hdet.lab.page import run_numbers as numbers
from hdet.lab.page.chart import short
from hdet.lab.page.read_runs import Run, number
from hdet.lab.page.verdicts import explored, what_held_out_data_said, what_replicas_said
from hdet.round_record import ThermostatRecord
from hdet.search.decisions import should_search_again

_MAX_METRICS = 2

Tile = tuple[str, str, str]
"""Label, value and hint of what came of a run, or of what a part of the method did."""


def figure(value: float | None, digits: int = 3) -> str:
    """A number as one would say it: plain where that is short, else with an exponent.

    >>> figure(0.41234), figure(3e-4), figure(0.00039312, 2), figure(1234567.0), figure(0.0), figure(None)
    ('0.412', '3e-4', '3.9e-4', '1.23e6', '0', 'unknown')
    >>> figure(1.0), figure(600.0), figure(43210.0)
    ('1', '600', '43200')
    """
    if value is None or not math.isfinite(value):
        return "unknown" if value is None else "not finite"
    rounded = float(f"{value:.{digits}g}") + 0.0  # minus zero is zero
    if rounded == 0 or 0.01 <= abs(rounded) < 1e5:
        return f"{rounded:.15g}"
    mantissa, exponent = f"{rounded:.{digits - 1}e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def count(amount: int, what: str) -> str:
    """An amount and its noun.

    >>> count(1, "replica"), count(12000, "step")
    ('1 replica', '12,000 steps')
    """
    return f"{amount:,} {what}" + ("" if amount == 1 else "s")


def duration(seconds: float) -> str:
    """A time in a unit that suits it.

    >>> duration(0.25), duration(41.3), duration(200), duration(7530)
    ('0.25 s', '41 s', '3.3 min', '2.1 h')
    """
    size, unit = (3600, "h") if seconds >= 7200 else (60, "min") if seconds >= 120 else (1, "s")
    return f"{figure(seconds / size, 2)} {unit}"


def headline(run: Run) -> str:
    """The learning rate that was found, in one sentence; empty where nothing is known of one.

    >>> from pathlib import Path
    >>> headline(Run(path=Path("runs/a"), name="a", config={"lr": 3e-4}))
    'Trained with a learning rate of 3e-4, without a search.'
    """
    search, asked = run.search, numbers.asked_lr(run)
    if search is None:
        began = "Started from" if run.compares else "Trained with"
        return "" if asked is None else f"{began} a learning rate of {figure(asked)}, without a search."
    if search.found == search.asked:
        reason = search.reason.rpartition(": ")[2]
        return f"Kept the guess of {figure(asked)} for the learning rate, because {reason}."
    return f"Found a learning rate of {figure(search.found)}, {_against(search.found, search.asked)}."


def _against(lr: float, asked: float) -> str:
    """Compare a learning rate with the guess.

    >>> _against(0.1, 0.01), _against(0.01, 0.25)
    ('10 times the guess of 0.01', '25 times below the guess of 0.25')
    >>> _against(0.0101, 0.01)
    'close to the guess of 0.01'
    """
    if not (0 < asked < math.inf and 0 < lr < math.inf):
        return f"from a guess of {figure(asked)}"
    how = f"{figure(lr / asked, 2)} times" if lr > asked else f"{figure(asked / lr, 2)} times below"
    return f"{'close to' if 0.95 < lr / asked < 1.05 else how} the guess of {figure(asked)}"


def sentence(run: Run) -> str:
    """Tell how far the run came, and how sure its search is, in a few plain sentences.

    >>> from pathlib import Path
    >>> sentence(Run(path=Path("runs/a"), name="a"))
    'Nothing has been recorded of this run yet.'
    """
    if not (run.search or run.records or run.evaluations or run.result):
        return "Nothing has been recorded of this run yet."
    return " ".join(filter(None, (search_sentence(run), _training(run))))


def search_sentence(run: Run) -> str:
    """Tell how sure the search is, and what it cost; empty if there was none."""
    search, text = run.search, ""
    if search is None:
        return ""
    if should_search_again(search.asked, search.found, search.trials):
        text = "The search went to its limits. Search again with this learning rate as the guess. "
    elif search.found == search.asked:
        text = "The search could not tell, so the guess stays. "
    elif 0 < search.low < search.high < math.inf:
        low, high = figure(search.low, 2), figure(search.high, 2)
        text = f"The best learning rate is probably between {low} and {high} (80 %). "
    return f"{text}The search took {count(search.num_steps, 'step')}."


def _training(run: Run) -> str:
    planned, last = number(run.config.get("steps")), run.last_step
    who = count(run.num_replicas, "replica") if run.num_replicas else "The replicas"
    is_short = planned is not None and (last < planned or run.status == "unfinished")
    steps = f"{last:,} of {count(int(planned or 0), 'step')}" if is_short else count(last, "step")
    time = f" in {duration(run.seconds)}" if run.seconds is not None else ""
    if run.status in ("failed", "diverged"):
        # Without what it says of each replica: the table of results has it in full.
        reason = re.sub(r" \(replica \d+: [^)]*\)", "", str(run.result.get("reason") or "")).rstrip(".")
        why = f" The reason is this: {reason}." if reason else ""
        return f"The run {run.status} after {steps}{time}.{why}"
    if run.status == "unfinished" and not last:
        return "The run is unfinished. It has not trained yet."
    done = f"{who} trained for {steps}{time}"
    if run.status == "stopped":
        return f"{done}, then the run was stopped."
    return f"The run is unfinished. {done} so far." if run.status == "unfinished" else f"{done}."


def run_tiles(run: Run) -> list[Tile]:
    """Give the key figures of a run, and what each part of the method did; what is unknown has no tile."""
    return [*_result_tiles(run), *_method_tiles(run)]


def method_parts(run: Run) -> Iterator[tuple[str, str]]:
    """Give the name of every part of the method that the run had, and what it did, one line each."""
    for label, value, hint in _method_tiles(run):
        yield label[0].lower() + label[1:], f"{value}, {hint}" if hint else value


def _result_tiles(run: Run) -> Iterator[Tile]:
    found = numbers.found_lr(run)
    if found is not None:
        origins = {"guess": numbers.asked_lr(run), "search": run.search and run.search.found}
        others = [f"{what}: {figure(lr)}" for what, lr in origins.items() if lr and lr != found]
        yield "Learning rate", figure(found), ", ".join(others) or "peak, as given"
    label, last, losses = "Held-out loss", run.final_loss, numbers.evaluated(run)[1]
    if last is None:
        label, losses = "Training loss", numbers.training_losses(run)[1]
        last = losses[-1] if losses else None
    if last is not None:
        began = f"{figure(losses[0])} at first" if len(losses) > 1 else ""
        yield label, figure(last, 4), ", ".join(filter(None, (run.loss_unit, began)))
    for name, value in list(numbers.main_metrics(run.final_metrics).items())[:_MAX_METRICS]:
        yield name.replace("_", " "), figure(value, 4), "held-out"


def _method_tiles(run: Run) -> Iterator[Tile]:
    if run.search is not None:
        trials, steps = count(len(run.search.trials), "trial"), count(run.search.num_steps, "step")
        did = "kept" if run.search.found == run.search.asked else f"found from {figure(run.search.asked)}"
        yield "Search", figure(run.search.found), f"{did} by {trials} in {steps}"
    if run.records:
        yield from _replica_tiles(run)
        yield from _steering_tiles(run)
        if run.records[-1].num_averaged_steps:
            steps = count(run.records[-1].num_averaged_steps, "step")
            yield "Tail", steps, "the final weights are their mean"
    left_out = sorted({replica for _, replica, _ in run.excluded_events})
    if left_out:
        who = short(", ".join(map(str, left_out)))
        yield "Left out", count(len(run.excluded_events), "time"), f"then healed: replica {who}"


def _replica_tiles(run: Run) -> Iterator[Tile]:
    """Tell how far the replicas differed, how often they converged, and what they said."""
    rounds = [record for record in run.records if record.ends_round]
    names, replicas = explored(rounds), count(run.num_replicas or 1, "replica")
    if not names:
        yield "Fan-out", "none", replicas + (", all alike" if run.num_replicas != 1 else "")
        return
    factors = {name: [x for record in rounds for x in record.multipliers.get(name, [])] for name in names}
    yield "Fan-out", replicas, f"{_ranges(factors, 'x')}, {count(len(rounds), 'round')}"
    spent = math.fsum(time for record in run.records for time in record.milliseconds.values())
    share = f"{figure(spent / (10 * run.seconds), 2)} % of the time in syncs" if run.seconds else ""
    yield "Converge", count(sum(record.converged for record in run.records), "time"), share
    said = what_replicas_said(rounds)
    told = [one for one in said if one.side] or said[:1]
    if told:
        yield "Replicas said", ", ".join(one.verdict for one in told), ", ".join(one.counts for one in told)


def _ranges(values: Mapping[str, Sequence[float]], sign: str = "") -> str:
    """The lowest and the highest value of each hyperparameter, of all its parameter groups.

    >>> _ranges({"lr.head": [0.9, 1.1], "lr.body": [0.8], "weight_decay": [1.0]}, "x")
    'lr x0.8 to x1.1, weight_decay x1'
    """
    said = list[str]()
    for family, names in numbers.families(values).items():
        known = [value for name in names for value in values[name]]
        ends = dict.fromkeys(f"{sign}{figure(value)}" for value in (min(known), max(known)))
        said.append(f"{family} {' to '.join(ends)}")
    return ", ".join(said)


def _steering_tiles(run: Run) -> Iterator[Tile]:
    """Tell what each controller did."""
    last = run.records[-1]
    if run.compares:
        ends = f"{_ranges({name: [x] for name, x in last.correction.items()}, 'x')} of the plan"
        if "paper" in run.controllers:  # it holds the values itself
            ends = f"{_ranges({name: [x] for name, x in last.base.items()})} at the end"
        yield "Auto-LR", "moved the values", ends
    factors = [factor for record in run.records for factor in record.section(ThermostatRecord).factors]
    if factors:
        yield "Thermostat", f"x{factors[-1]:.3g}", "on the learning rate, by what averaging gained"
    if run.num_brakes:
        yield "Guard", f"went back {count(run.num_brakes, 'time')}", "and lowered the learning rate"
    elif "guard" in run.controllers:
        yield "Guard", "had nothing to do", ""
    looks = what_held_out_data_said(run.records)
    if looks is not None:
        moved = " to ".join(dict.fromkeys((figure(looks.first), figure(looks.last))))
        num_looks = count(len(looks.slopes), "look")
        yield "Weight decay", moved, f"by {num_looks} at held-out data, {looks.verdict}"
