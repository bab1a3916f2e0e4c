"""What the studies say, as Markdown with a verdict each, and the figure of the mechanism."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from hdet.errors import HdetError, install_command
from hdet.lab.intervals import sign_of
from research.ablation.verdicts import Verdict, error_text
from research.claims.experiment import Claims
from research.claims.studies import EXPLORED, FACTORS, Explored, exploration_name, variants
from research.compare.ledger import Record
from research.markdown import table_line

__all__ = ["table", "write_figure"]

_TOLERANCE = 0.01
RULE = (
    "Losses are compared seed by seed; a difference counts if the 95 % interval of its mean (Student's t) "
    "leaves out zero. Claim 6 holds for a hyperparameter if the sign of the log correction that replicas "
    "asked for (spread 0.5 around the middle value, our controller in the log form) is that of what full "
    "runs prefer, half the value or twice the value; it cannot be told if either has no sign. Claim 7 holds "
    f"if no setting moves the mean loss by more than {100 * _TOLERANCE:g} % from that of the paper's."
)


def table(claims: Claims) -> str:
    """A section per study that has runs."""
    parts = [
        section(claims.of(name))
        for name, section in (
            ("exploration", _exploration),
            ("robustness", _robustness),
            ("prior", _prior),
            ("mechanism", _mechanism),
        )
        if claims.of(name)
    ]
    return "\n\n".join([*parts, RULE]) + "\n"


def _head(title: str, records: Sequence[Record]) -> list[str]:
    first, seeds = records[0], {r["seed"] for r in records}
    lrs = sorted({r["lr"] for r in records})
    at = f"LR {lrs[0]:g}" if len(lrs) == 1 else f"LR {lrs[0]:g} to {lrs[-1]:g}"
    return [
        f"### {title}",
        "",
        f"`charlm`, AdamW, {first['steps']} steps, {first['replicas']} replicas, {len(seeds)} seeds, {at}.",
        "",
    ]


def _by_seed(records: Sequence[Record], variant: str) -> dict[int, Record]:
    return {r["seed"]: r for r in records if r["variant"] == variant}


def _losses(runs: dict[int, Record]) -> list[float]:
    return [r["final_loss"] for r in runs.values() if r["final_loss"] is not None]


def _mean(runs: dict[int, Record], digits: int = 4) -> str:
    """Mean ± standard deviation, and a mark for runs without a finite loss."""
    values, parts = _losses(runs), []
    if values:
        deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        parts.append(f"{statistics.fmean(values):.{digits}f}{deviation}")
    if len(values) < len(runs):
        parts.append(f"† {len(runs) - len(values)}/{len(runs)} crashed")
    return " ".join(parts) or "-"


def _difference(first: dict[int, Record], second: dict[int, Record]) -> tuple[int, float, float]:
    """Of the second's losses over the first's, seed by seed: sign, mean, half-width."""
    seeds = sorted(first.keys() & second.keys())
    pairs = [(first[s]["final_loss"], second[s]["final_loss"]) for s in seeds]
    known = [b - a for a, b in pairs if a is not None and b is not None]
    return sign_of(known) if known else (0, math.nan, math.inf)


# --- claim 6 -----------------------------------------------------------------------------------------


def _exploration(records: Sequence[Record]) -> str:
    lines = _head("Claim 6: other hyperparameters by the same protocol", records)
    lines += [
        "Training text of 20,000 characters, so that it repeats. Held-out loss of full runs by value, and "
        "what replicas that explored around the middle value asked for (log of the correction at the end): "
        "scored on the probe after training on their own gradients, or by their own training losses with "
        "shared gradients, as in the paper. With shared gradients a probe cannot see dropout or label "
        "smoothing: all replicas make the same step.",
        "",
        table_line(
            [
                "hyperparameter",
                *(f"x{f:g}" for f in FACTORS),
                "full runs prefer",
                "probe, local gradients",
                "own losses, shared",
                "verdict",
            ]
        ),
        table_line(["---", *["---:"] * len(FACTORS), "---", "---:", "---:", "---"]),
    ]
    lines += [table_line(_explored_row(records, explored)) for explored in EXPLORED]
    return "\n".join(lines)


def _explored_row(records: Sequence[Record], explored: Explored) -> list[str]:
    full = {f: _by_seed(records, exploration_name(explored.name, f"x{f:g}")) for f in FACTORS}
    prefers, _, _ = _difference(full[2.0], full[0.5])  # above zero: less loss at twice the value
    by_probe, probe_text = _asked(explored, _by_seed(records, exploration_name(explored.name, "probe")))
    _, own_text = _asked(explored, _by_seed(records, exploration_name(explored.name, "own losses")))
    verdict: Verdict = "cannot be told"
    if prefers and by_probe:
        verdict = "holds" if prefers == by_probe else "does not hold"
    return [
        f"{explored.name} ({explored.base:g})",
        *(_mean(full[f], 3) for f in FACTORS),
        {1: "more", -1: "less", 0: "cannot be told"}[prefers],
        probe_text,
        own_text,
        f"**{verdict}**",
    ]


def _asked(explored: Explored, runs: dict[int, Record]) -> tuple[int, str]:
    """The log of the correction that each seed ends with; the learning rate has its own."""
    logs = [
        math.log(value)
        for run in runs.values()
        for name, value in run["corrections"].items()
        if name == explored.tunable and value > 0
    ]
    if not logs:
        return 0, "-"
    sign, mean, half = sign_of(logs)
    return sign, f"{mean:+.2f}{error_text(half, 2)}"


# --- claim 7 -----------------------------------------------------------------------------------------


def _robustness(records: Sequence[Record]) -> str:
    names = variants("robustness", records[0]["steps"])
    paper = "as in the paper"
    base = _losses(_by_seed(records, paper))
    middle = statistics.fmean(base) if base else math.nan
    lines = _head("Claim 7: robust to spread, T and temperature", records)
    lines += [
        table_line(["setting", "held-out loss", "over the paper's settings"]),
        table_line(["---", "---:", "---:"]),
    ]
    ratios, num_crashed = [], 0
    for name in names:
        runs = _by_seed(records, name)
        losses = _losses(runs)
        ratio = statistics.fmean(losses) / middle if losses else math.nan
        if name != "plain":
            ratios += [ratio] if losses and base else []
            num_crashed += len(runs) - len(losses)
        label = f"{paper}, temperature auto" if name == paper else name
        lines.append(table_line([label, _mean(runs), f"{ratio:.3f}" if losses and base else "-"]))
    return "\n".join([*lines, "", _robust(ratios, num_crashed)])


def _robust(ratios: Sequence[float], num_crashed: int) -> str:
    if num_crashed:
        return f"**does not hold**: {num_crashed} runs crashed."
    if not ratios:
        return "**cannot be told**: no run of the paper's settings."
    worst = max(abs(ratio - 1) for ratio in ratios)
    verdict: Verdict = "holds" if worst <= _TOLERANCE else "does not hold"
    return f"**{verdict}**: the farthest is {100 * worst:.1f} % from the paper's settings."


# --- the group-aware start ---------------------------------------------------------------------------


def _prior(records: Sequence[Record]) -> str:
    uniform, learned = _by_seed(records, "uniform"), _by_seed(records, "from earlier runs")
    alike = _by_seed(records, "groups alike")
    lines = _head("The group-aware start", records)
    lines += [table_line(["start", "held-out loss"]), table_line(["---", "---:"])]
    lines += [
        table_line(["one spread and decay for all groups", _mean(uniform)]),
        table_line(["`hdet.prior_from` of two earlier runs", _mean(learned)]),
        table_line(["the mean of what it says, for all groups alike", _mean(alike)]),
    ]
    lines += [
        "",
        f"That it helps: {_judged(learned, uniform)}. That the difference between groups does: "
        f"{_judged(learned, alike)}. What it said, of the first seed:",
    ]
    told = next((r["prior"] for r in learned.values() if r["prior"]), {})
    lines += ["", table_line(["group", "spread", "end over peak"]), table_line(["---", "---:", "---:"])]
    lines += [table_line([name, f"{t['spread']:.3f}", f"{t['drop']:.2g}"]) for name, t in told.items()]
    return "\n".join(lines)


def _judged(lower: dict[int, Record], higher: dict[int, Record]) -> str:
    sign, mean, half = _difference(lower, higher)
    verdict: Verdict = "holds" if sign > 0 else "does not hold" if sign < 0 else "cannot be told"
    return f"**{verdict}**" + (f", lower by {mean:.4f}{error_text(half)}" if math.isfinite(mean) else "")


# --- the mechanism -----------------------------------------------------------------------------------


def _mechanism(records: Sequence[Record]) -> str:
    lines = _head("What a signal can see", records)
    lines += [
        "Slope of the replicas' losses on the log learning rate, by round (spread 1/9, no controller): mean "
        "over rounds after warmup and seeds, its deviation between rounds, and the former over the latter.",
        "",
        table_line(["LR", "held-out loss at the end", "own losses", "S/N", "probe", "S/N"]),
        table_line(["---:"] * 6),
    ]
    for lr in sorted({r["lr"] for r in records}):
        runs = [r for r in records if r["lr"] == lr]
        cells = [f"{lr:g}", _mean({r["seed"]: r for r in runs})]
        for which in ("own", "probe"):
            mean, deviation = _slope(runs, which)
            cells += [f"{mean:+.4f} ± {deviation:.4f}", f"{mean / deviation:+.2f}" if deviation else "-"]
        lines.append(table_line(cells))
    return "\n".join(lines)


def _slope(runs: Sequence[Record], which: str) -> tuple[float, float]:
    known = [r["slopes"][which] for r in runs if r["slopes"][which]]
    if not known:
        return math.nan, math.nan
    return statistics.fmean(k["mean"] for k in known), statistics.fmean(k["deviation"] for k in known)


def write_figure(claims: Claims, path: Path) -> Path | None:
    """The mechanism: how loud a round's signal is, and where it points; None without its study."""
    records = claims.of("mechanism")
    if not records:
        return None
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise HdetError(f"matplotlib is missing. Install it: {install_command('research')}") from error
    lrs = sorted({r["lr"] for r in records})
    by_lr = {lr: [r for r in records if r["lr"] == lr] for lr in lrs}
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    noise, where = figure.subplots(1, 2)
    for which, color, label in (("own", "#d55e00", "own batches"), ("probe", "#0072b2", "one probe")):
        found = [(lr, *_slope(by_lr[lr], which)) for lr in lrs]
        known = [(lr, abs(mean) / deviation) for lr, mean, deviation in found if deviation > 0]
        noise.plot(*zip(*known, strict=True), "o-", color=color, label=f"compared on {label}")
    noise.axhline(1, color="#767b84", linewidth=1, linestyle=":")
    noise.set(
        xscale="log", yscale="log", xlabel="learning rate", ylabel="|mean slope| / its noise in one round"
    )
    noise.set_title("How loud a round's signal is")
    noise.legend(fontsize=8)
    losses = {lr: _losses({r["seed"]: r for r in by_lr[lr]}) for lr in lrs}
    best = min((lr for lr in lrs if losses[lr]), key=lambda lr: statistics.fmean(losses[lr]), default=lrs[0])
    where.axhline(0, color="#767b84", linewidth=1)
    where.plot(lrs, [_slope(by_lr[lr], "probe")[0] for lr in lrs], "o-", color="#0072b2")
    where.axvline(best, color="#009e73", linestyle="--", label=f"best at the end of the run: {best:g}")
    where.set(xscale="log", xlabel="learning rate", ylabel="slope of the probe's loss on log LR")
    where.set_title("Where it points: above zero it asks for less")
    where.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    return path
