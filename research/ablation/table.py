"""The ablation as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hdet.lab.ablation import NOISE_SCALE, RESIDUAL, controller_start, sync_every
from research.ablation.rules import RULES
from research.ablation.summary import Ablation, Case
from research.ablation.verdicts import VERDICT_RULE, claims, together
from research.markdown import table_line

__all__ = ["NOTES", "table"]

NOTES = (
    "Held-out loss after the last step, mean ± standard deviation over seeds; † marks crashes, whose "
    "losses count in the mean where they are finite. The paper's rows are bold. All rows have the "
    "same batches; 10 % warmup and a linear anneal, which the controller replaces from its start on. "
    "HDET: spread 1/9, learning rates per parameter group, losses of the replicas' own batches, automatic "
    f"temperature. The controller's decay ends at {100 * RESIDUAL:g} % of the peak, as in the paper's figure "
    "3, or at OneCycleLR's floor, 250,000 times below the peak (floor-matching). Warm start: noise of "
    f"{NOISE_SCALE:g} on the initial weights, or on a trained checkpoint. That is a plain run of another "
    "seed, as long, at the same learning rate (at High, a ninth of it). Rows that a verdict hangs on may "
    "have more seeds. The best plain LR is chosen by the very losses that it is compared by, which favours "
    "it a little."
)


def table(ablation: Ablation) -> str:
    """A table and the verdicts per task, optimizer and length; the verdicts of several side by side."""
    cases = ablation.cases
    parts = [_overview(cases)] if len(cases) > 1 else []
    parts += [_section(case) for case in cases]
    return "\n\n".join([*parts, NOTES, RULES, VERDICT_RULE]) + "\n"


def _overview(cases: Sequence[Case]) -> str:
    titles = [case.title.partition(":")[0] for case in cases]
    verdicts = [{claim.number: claim for claim in claims(case)} for case in cases]
    known = {number: claim for of_case in verdicts for number, claim in of_case.items()}
    lines = [table_line(["claim", "", *titles]), table_line(["---"] * (2 + len(cases)))]
    lines += [
        table_line([number, claim.text, *(v[number].verdict if number in v else "-" for v in verdicts)])
        for number, claim in known.items()
    ]
    if said := together(cases):
        lines += ["", f"Crashes at High of the records together, by Fisher's exact test: {'; '.join(said)}."]
    return "\n".join(lines)


def _section(case: Case) -> str:
    lines = [f"### {case.title}", ""]
    if case.chosen is None:
        return "\n".join([*lines, "The grid has no result yet."])
    chosen, steps = case.chosen, case.facts["steps"]
    metrics = [run.get("metrics", {}) for result in case.results for run in result.runs.values()]
    names = list(dict.fromkeys(name for of_run in metrics for name in of_run))
    high = f"High {chosen.high:g}" if chosen.breaks else f"no High (up to {chosen.high:g} no LR breaks)"
    lines += [
        f"Low {chosen.low:g}, {high}, best plain LR {chosen.best:g}; T = {sync_every(steps)}, "
        f"controller from step {controller_start(steps)}.",
        "",
        table_line(["row", "what it is", "LR", "held-out loss", *map(str.upper, names), "seconds"]),
        table_line(["---", "---", "---:", "---:", *["---:"] * len(names), "---:"]),
    ]
    for result in case.results:
        seconds = [run["seconds"] for run in result.runs.values()]
        lines.append(
            table_line(
                [
                    f"**{result.row.name}**" if result.row.is_in_paper else result.row.name,
                    result.row.description,
                    f"{result.lr:g}",
                    result.loss_text,
                    *map(result.metric_text, names),
                    f"{statistics.fmean(seconds):.1f}" if seconds else "-",
                ]
            )
        )
    lines += ["", table_line(["claim", "", "verdict", "numbers"]), table_line(["---"] * 4)]
    lines += [table_line([c.number, c.text, f"**{c.verdict}**", c.why]) for c in claims(case)]
    return "\n".join(lines)
