"""Runs in plain words: sentences and key figures, and how numbers are written."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence

from hdet.lab.page import run_numbers as numbers
from hdet.lab.page.chart import short
from hdet.lab.page.read_runs import Run, number
from hdet.lab.page.what_held_out_data_said import Looks, what_held_out_data_said
from hdet.lab.page.what_replicas_said import explored, what_replicas_said
from hdet.round_record import is_learning_rate
from hdet.search.decisions import should_search_again

_MAX_METRICS = 2

Tile = tuple[str, str, str]
"""Label, value and hint of a key figure."""


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
    """A time in its two largest units.

    >>> duration(0.25), duration(41.3), duration(200), duration(7530), duration(200000)
    ('0.25 s', '41 s', '3 min 20 s', '2 h 6 min', '2 d 8 h')
    """
    if seconds < 10:
        return f"{figure(seconds, 2)} s"
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        whole, rest = divmod(round(seconds / part), size // part)
        if whole:
            return f"{whole} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{round(seconds)} s"


def headline(run: Run) -> str:
    """The learning rate that was found, in one sentence; empty where nothing is known of one.

    >>> from pathlib import Path
    >>> headline(Run(path=Path("runs/a"), name="a", config={"lr": 3e-4}))
    'Trained with a learning rate of 3e-4, without a search.'
    """
    search, asked, found = run.search, numbers.asked_lr(run), numbers.found_lr(run)
    if search is not None:
        if search.found == search.asked:
            reason = search.reason.rpartition(": ")[2]
            return f"Kept the guess of {figure(asked)} for the learning rate, because {reason}."
        text = f"Found a learning rate of {figure(search.found)}"
        if figure(search.found) == figure(search.asked):
            return f"{text}, as guessed."
        return f"{text}, {_against(search.found, search.asked)}."
    if asked is None:
        return ""
    is_kept = found is None or math.isclose(found, asked, rel_tol=1e-6)
    if found is not None and not is_kept and numbers.corrections(run) and run.compares:
        return f"The controller asks for a learning rate of {figure(found)}, {_against(found, asked)}."
    began = "Started from" if run.compares else "Trained with"
    peaks = numbers.group_peaks(run)
    if len(peaks) > 1:
        low, high = figure(min(peaks)), figure(max(peaks))
        return f"{began} learning rates from {low} to {high}, without a search."
    return f"{began} a learning rate of {figure(asked)}, without a search."


def sentence(run: Run) -> str:
    """Tell what happened in the run, in a few plain sentences.

    >>> from pathlib import Path
    >>> sentence(Run(path=Path("runs/a"), name="a"))
    'Nothing has been recorded of this run yet.'
    """
    if not (run.search or run.records or run.evaluations or run.result):
        return "Nothing has been recorded of this run yet."
    parts = [search_sentence(run), _training(run)]
    if run.records:
        said = what_replicas_said(run.records)
        unclear = "no clear side" if any(one.can_tell for one in said) else "too few rounds to tell"
        verdict = _list([one.verdict for one in said if one.is_clear]) or unclear
        parts += [f"What the replicas said: {verdict}."] if said else []
        parts.append(_moved(run))
        factors = [factor for record in run.records for factor in record.thermostat_factors]
        parts += [f"The thermostat multiplied the learning rate by {figure(x)}." for x in factors[-1:]]
        parts += [looks_sentence(one) for one in what_held_out_data_said(run.records)]
        num_steps = count(run.records[-1].num_averaged_steps, "step")
        is_mean = bool(run.records[-1].num_averaged_steps)
        parts.append(f"The final weights are the mean over the last {num_steps}." * is_mean)
        parts.append(_left_out(run))
    return " ".join(part for part in parts if part)


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


def looks_sentence(looks: Looks) -> str:
    """Tell what looks at held-out data made of a weight decay, and what they ask for at the end."""
    what, first, last = looks.name.replace("_", " "), figure(looks.first), figure(looks.last)
    did = f"left the {what} at {first}" if first == last else f"moved the {what} from {first} to {last}"
    return f"Held-out data {did} ({count(len(looks.slopes), 'look')}). {looks.verdict}."


def search_sentence(run: Run) -> str:
    """Tell how sure the search is, and what it cost; empty if there was none."""
    search = run.search
    if search is None:
        return ""
    text = ""
    if should_search_again(search.asked, search.found, search.trials):
        text = "The search went to its limits. "
        text += "To be sure, search again with this learning rate as the guess. "
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
        reason = run.result.get("error") or run.result.get("reason")
        # Without what it says of each replica: the table of results has it in full.
        reason = re.sub(r" \(replica \d+: [^)]*\)", "", reason).rstrip(".") if isinstance(reason, str) else ""
        why = f" The reason is this: {reason}." if reason else ""
        return f"The run {run.status} after {steps}{time}.{why}"
    if run.status == "unfinished" and not last:
        return "The run is unfinished. It has not trained yet."
    names = [*numbers.families(explored(run.records))]
    differed = f", each with its own value of {_list(names)}, averaged at every sync" if names else ""
    done = f"{who} trained for {steps}{time}{differed}"
    if run.status == "stopped":
        return f"{done}, then the run was stopped."
    return f"The run is unfinished. {done} so far." if run.status == "unfinished" else f"{done}."


def _moved(run: Run) -> str:
    """Tell what the guard, or a controller that compares replicas, made of the learning rate."""
    brakes, found, factors = run.num_brakes, numbers.found_lr(run), numbers.corrections(run)
    if brakes:
        often = "once" if brakes == 1 else f"{brakes} times"
        lowered = f" to {figure(found)}" if found is not None else ""
        return f"The run collapsed {often}. The guard went back and lowered the learning rate{lowered}."
    if not run.compares:
        differed = any(is_learning_rate(name) for name in explored(run.records))
        controller = run.config.get("controller")
        is_known = differed and controller in ("guard", "none")
        return f"In this run they did not move the learning rate (controller {controller})." * is_known
    if run.config.get("controller") == "paper":
        last = [value for name, value in run.records[-1].base.items() if is_learning_rate(name)]
        ends = " to ".join(dict.fromkeys((figure(min(last), 2), figure(max(last), 2)))) if last else "none"
        return f"The controller held the learning rate itself, and ended at {ends}."
    if not factors:
        return ""
    low, high = figure(min(factors)), figure(max(factors))
    by = f"{low} times the plan" if low == high else f"{low} to {high} times the plan, by parameter group"
    asks = f", so it asks for a peak of {figure(found)}" if run.search is not None and low == high else ""
    return f"The controller ended at {by}{asks}."


def _left_out(run: Run) -> str:
    num_times = len(run.excluded_events)
    replicas = sorted({replica for _, replica, _ in run.excluded_events})
    if len(replicas) == 1:
        return f"Replica {replicas[0]} was left out of {count(num_times, 'sync')} and healed."
    if len(replicas) > 5:
        return f"{len(replicas)} replicas were left out and healed, {num_times} times in all."
    return f"Replicas {_list(replicas)} were left out and healed, {num_times} times in all." * bool(replicas)


def _list(items: Sequence[object]) -> str:
    *others, last = map(str, items or [""])
    return f"{', '.join(others)} and {last}" if others else last


def run_tiles(run: Run) -> Iterable[Tile]:
    """Key figures of a run; what is unknown has no tile."""
    # What has moved the learning rate since the search counts, as it does in the terminal.
    is_kept = run.search is not None and not run.num_brakes and not run.compares
    found = run.search.found if run.search is not None and is_kept else numbers.found_lr(run)
    if found is not None:
        is_new = numbers.asked_lr(run) not in (None, found)
        yield "Learning rate found" if is_new else "Learning rate", figure(found), _origin(run, found)
    measured, trained = numbers.evaluated(run), numbers.training_losses(run)
    if run.final_loss is not None:
        yield "Held-out loss", figure(run.final_loss, 4), _unit_and_start(run, measured)
    elif trained:
        yield "Training loss", figure(trained[-1][1], 4), _unit_and_start(run, trained)
    for name, value in list(numbers.main_metrics(run.final_metrics).items())[:_MAX_METRICS]:
        yield short(name.replace("_", " "), 30), figure(value, 4), "held-out"
    rounds = [record for record in run.records if record.ends_round]
    for looks in what_held_out_data_said(run.records):
        first, last = figure(looks.first), figure(looks.last)
        hint = "left there by held-out data" if first == last else f"found by held-out data, from {first}"
        yield looks.name.replace("_", " ").capitalize(), last, hint
    names = explored(run.records)
    if names:
        families = numbers.families(names)
        # A schedule alone moves a learning rate to its end too, which says nothing.
        moved = [name for name, *_ in families.values() if run.compares or not is_learning_rate(name)]
        ends = [f"{name} ended at {figure(run.records[-1].base.get(name))}" for name in moved]
        hint = ", ".join(ends) or f"{count(run.num_replicas or 0, 'value')} in every round"
        yield "Explored", next(iter(families)) if len(families) == 1 else str(len(families)), hint
    if rounds:
        size = statistics.mode(record.num_steps for record in rounds)
        yield "Rounds", f"{len(rounds):,}", f"of {count(size, 'step')}" if size else ""
    milliseconds = sum(v for record in run.records for v in record.milliseconds.values())
    if run.seconds and math.isfinite(milliseconds) and milliseconds:
        share = figure(milliseconds / run.seconds / 10, 2)
        yield "Time in syncs", f"{share} %", f"{duration(milliseconds / 1000)} in all"


def _unit_and_start(run: Run, losses: Sequence[tuple[int, float]]) -> str:
    began = f"{figure(losses[0][1])} at first" if len(losses) > 1 else ""
    return ", ".join(filter(None, (run.loss_unit, began)))


def _origin(run: Run, found: float) -> str:
    """Tell where the learning rate comes from, in a few words."""
    asked = numbers.asked_lr(run)
    if run.num_brakes:
        return f"lowered {count(run.num_brakes, 'time')} by the guard"
    if len(numbers.group_peaks(run)) > 1:
        return "peak of the first group"
    if asked is None or math.isclose(asked, found, rel_tol=1e-6):
        return "peak, as given"
    return f"from a guess of {figure(asked)}"
