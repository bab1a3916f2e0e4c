"""Claims beyond the paper's Table 1: the studies, what is read from their runs, and the verdicts."""

import json
import math

import pytest
import torch

from hdet.lab.train.config import RunConfig
from hdet.records import RoundRecord
from research.claims import STUDIES, Claims, read_claims, run_claims, table
from research.claims.page import write_figure
from research.claims.training import slopes


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(study, variant, loss, seed=0, **more):
    record = {
        "study": study,
        "variant": variant,
        "task": "charlm",
        "task_options": {},
        "steps": 500,
        "replicas": 8,
        "lr": 0.05,
        "seed": seed,
        "settings": {},
        "final_loss": loss,
        "corrections": {},
        "slopes": {"own": None, "probe": None},
        "prior": None,
        "seconds": 1.0,
    }
    return record | more


def test_every_setting_of_every_study_is_a_valid_one():
    for study, specs in STUDIES.items():
        for spec in specs(500):
            settings = {k: v for k, v in spec["settings"].items() if k not in ("prior_seeds", "groups_alike")}
            RunConfig(task="charlm", lr=spec["lr"], steps=500, task_options=spec["task_options"], **settings)
        names = [spec["variant"] for spec in specs(500)]
        assert len(set(names)) == len(names), study


def explored(better_at, asked):
    """Full runs that are better at one side, and replicas that ask for a side."""
    records = []
    for seed in range(3):
        for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
            loss = 2 - 0.1 * better_at * math.log(factor) + 0.001 * seed
            records.append(made("exploration", f"dropout x{factor:g}", loss, seed))
        corrections = {"lr": 1.0, "dropout": math.exp(asked + 0.01 * seed)}
        records.append(made("exploration", "dropout probe", 2.0, seed, corrections=corrections))
    return next(line for line in table(Claims(records)).splitlines() if line.startswith("| dropout"))


@pytest.mark.parametrize(
    ("better_at", "asked", "verdict"),
    [(1, 0.3, "holds"), (-1, -0.3, "holds"), (1, -0.3, "does not hold"), (0, 0.3, "cannot be told")],
)
def test_exploration_is_judged_by_what_full_runs_prefer(better_at, asked, verdict):
    assert explored(better_at, asked).endswith(f"| **{verdict}** |")


def test_robustness_and_prior_are_judged():
    names = [spec["variant"] for spec in STUDIES["robustness"](500)]
    near = [made("robustness", name, 2.0 if name != "plain" else 1.0) for name in names]
    assert "**holds**: the farthest is 0.0 %" in table(Claims(near))
    far = [r | {"final_loss": 2.1} if r["variant"] == "T = 50" else r for r in near]
    assert "**does not hold**: the farthest is 5.0 %" in table(Claims(far))
    told = {"lr.a": {"spread": 0.1, "drop": 0.01}}
    start = [made("prior", "uniform", 2.0 + 0.01 * s, s) for s in range(3)]
    start += [made("prior", "from earlier runs", 1.9 + 0.011 * s, s, prior=told) for s in range(3)]
    text = table(Claims(start))
    assert "That it helps: **holds**, lower by 0.09" in text
    assert "difference between groups does: **cannot be told**." in text


def test_crashes_are_marked_and_never_hold():
    names = [spec["variant"] for spec in STUDIES["robustness"](500)]
    runs = [made("robustness", name, 2.0 + 0.01 * seed, seed) for name in names for seed in range(2)]
    lost = [r | {"final_loss": None} if (r["variant"], r["seed"]) == ("T = 50", 1) else r for r in runs]
    text = table(Claims(lost))
    assert "| T = 50 | 2.0000 † 1/2 crashed |" in text
    assert "**does not hold**: 1 runs crashed." in text
    none = [r for r in runs if r["variant"] == "plain"]
    assert "**cannot be told**: no run of the paper's settings." in table(Claims(none))


def test_runs_of_two_lengths_are_not_judged_together(tmp_path):
    lines = [json.dumps(made("prior", "uniform", 2.0) | {"steps": steps}) for steps in (100, 500)]
    (tmp_path / "claims.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="must hold runs of one length"):
        read_claims(tmp_path)


def test_slopes_leave_out_the_warmup_and_what_failed():
    def record(step, losses, probes=()):
        multipliers = {"lr": [math.exp(-0.1), math.exp(0.1)]}
        return RoundRecord(
            round=0, step=step, num_replicas=2, losses=losses, probes=list(probes), multipliers=multipliers
        )

    records = [record(5, [9.0, 0.0]), record(10, [1.0, 1.2]), record(15, [1.0, 1.4]), record(20, [1.0, None])]
    found = slopes(records, "own", skip=5)
    assert found == {"mean": pytest.approx(1.5), "deviation": pytest.approx(0.5), "count": 2}
    assert slopes(records, "probe") is None


def test_studies_from_end_to_end(tmp_path):
    settings = {"studies": ["prior"], "seeds": 1, "steps": 100, "replicas": 2, "num_jobs": 1}
    progress = []
    found = run_claims(**settings, folder=tmp_path, on_done=lambda *pair: progress.append(pair))
    assert found.is_complete
    assert progress == [(0, 3), (1, 3), (2, 3), (3, 3)]
    uniform, learned, alike = found.records
    assert len({told["drop"] for told in alike["prior"].values()}) == 1
    assert set(learned["prior"]) == {"lr.embedding", "lr.no_decay", "lr.non_embedding", "lr.transformer"}
    assert all(0 < told["drop"] < 0.1 for told in learned["prior"].values())
    assert uniform["final_loss"] != learned["final_loss"]
    lines = (tmp_path / "claims.jsonl").read_text().splitlines()
    run_claims(**settings, folder=tmp_path)
    assert (tmp_path / "claims.jsonl").read_text().splitlines() == lines  # nothing again
    assert read_claims(tmp_path).records == [json.loads(line) for line in lines]
    with pytest.raises(ValueError, match="studies must be one of"):
        run_claims(**settings | {"studies": ["nothing"]}, folder=tmp_path)


def test_the_figure_of_the_mechanism(tmp_path):
    records = [
        made(
            "mechanism",
            f"{lr:g}",
            abs(math.log(lr / 0.03)),
            lr=lr,
            slopes={
                "own": {"mean": 0.1, "deviation": 1.0, "count": 9},
                "probe": {"mean": math.log(lr / 0.01), "deviation": 0.1, "count": 9},
            },
        )
        for lr in (0.01, 0.03, 0.1)
    ]
    path = write_figure(Claims(records), tmp_path / "mechanism.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "| 0.03 | 0.0000 | +0.1000 ± 1.0000 | +0.10 |" in table(Claims(records))
    assert write_figure(Claims([]), tmp_path / "none.png") is None
