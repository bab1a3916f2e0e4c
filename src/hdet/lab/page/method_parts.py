"""The parts of the method in a run, one line each: what each did, for a terminal or a page."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hdet.lab.page.read_runs import Run
from hdet.lab.page.sentences import count, figure, looks_sentence
from hdet.lab.page.what_held_out_data_said import what_held_out_data_said
from hdet.lab.page.what_replicas_said import explored, what_replicas_said
from hdet.round_record import is_learning_rate


def method_parts(run: Run) -> Iterator[tuple[str, str]]:
    """Give the name of every part that the run had, and what it did, in the order of the method."""
    if run.search is not None:
        ended = "kept" if run.search.found == run.search.asked else f"found {figure(run.search.found)} from"
        trials = count(len(run.search.trials), "trial")
        steps = count(run.search.num_steps, "step")
        yield "search", f"{trials}, {steps}: {ended} {figure(run.search.asked)}"
    rounds = [record for record in run.records if record.ends_round]
    names = explored(rounds)
    replicas = count(run.num_replicas or 1, "replica")
    if names:
        widths = ", ".join(f"{name} x{low:.3g} to x{high:.3g}" for name, low, high in _ranges(run, names))
        yield "fan-out", f"{replicas}, {widths}, {count(len(rounds), 'round')}"
        share = _share_of_time(run)
        took = "" if share is None else f", {share:.2g} % of the time in syncs"
        yield "converge", f"{count(sum(record.converged for record in run.records), 'time')}{took}"
        for said in what_replicas_said(rounds):
            yield "replicas said", said.sentence
    else:
        yield "fan-out", f"none: {replicas}" + (", all alike" if run.num_replicas != 1 else "")
    yield from _steered(run)
    for name in names:
        if not is_learning_rate(name) and (bases := [r.base[name] for r in rounds if name in r.base]):
            yield "explored", f"{name} began at {figure(bases[0])} and ended at {figure(bases[-1])}"
    for looks in what_held_out_data_said(run.records):
        yield looks.name.replace("_", " "), looks_sentence(looks)
    if run.records and run.records[-1].num_averaged_steps:
        steps = count(run.records[-1].num_averaged_steps, "step")
        yield "tail", f"the final weights are the mean over the last {steps}"


def _ranges(run: Run, names: list[str]) -> Iterator[tuple[str, float, float]]:
    for name in names:
        factors = [factor for record in run.records for factor in record.multipliers.get(name, [])]
        yield name, min(factors), max(factors)


def _share_of_time(run: Run) -> float | None:
    """Give the percentage of the run's time that was spent in syncs, probes included."""
    spent = math.fsum(time for record in run.records for time in record.milliseconds.values())
    return None if not run.seconds else spent / (10 * run.seconds)


def _steered(run: Run) -> Iterator[tuple[str, str]]:
    if run.compares:
        ends = ", ".join(f"{name} at {figure(base)}" for name, base in run.records[-1].base.items())
        yield "auto-LR", f"ended with {ends}"
        return
    factors = [factor for record in run.records for factor in record.thermostat_factors]
    if factors:
        rounds = count(len(factors), "round")
        yield "thermostat", f"learning rate x{factors[-1]:.3g}, by what averaging gained in {rounds}"
    if run.config.get("controller") in ("guard", "thermostat"):
        times = count(run.num_brakes, "time")
        yield "guard", f"went back {times}" if run.num_brakes else "had nothing to do"
