"""Optimizers that keep a part of their state on each rank (ZeRO): sound while all replicas use one value."""

from __future__ import annotations

import importlib.util
import os
import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.round_record import GuardRecord
from tests.helpers.models import Net, batch
from tests.helpers.replicas import end_processes, run_replicas

STEPS, SYNC_EVERY = 60, 5
EVENTS = ("", "collapse", "spoilt")
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed; make test-integrations runs them",
)
KINDS = ["zero redundancy", *(pytest.param(f"deepspeed {stage}", marks=needs_deepspeed) for stage in (1, 2))]


def loss_of(model, data):
    x, y = data
    return (model(x) - y).square().mean()


def zero_redundancy(net):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it uses what torch itself deprecates
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def deepspeed_engine(net, stage, rank):
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "DS_BUILD_OPS": "0"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed

        # Nothing is compiled: torch's own collectives do.
        deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
        engine, *_ = deepspeed.initialize(
            model=net,
            optimizer=torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1),
            config={
                "train_micro_batch_size_per_gpu": 8,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "gradient_clipping": 0.0,  # it clips to 1 by default
            },
            dist_init_required=False,
        )
    return engine


class Loop:
    """A loop of two ranks with one of these optimizers, or with a plain one."""

    def __init__(self, kind, rank, net=None):
        self.net, self.rank, self.engine = net or Net().float(), rank, None
        if kind.startswith("deepspeed"):
            self.engine = self.model = deepspeed_engine(self.net, int(kind[-1]), rank)
            self.optimizer = self.engine.optimizer
            return
        self.model = DistributedDataParallel(self.net)
        self.optimizer = (
            torch.optim.AdamW(self.net.parameters(), lr=0.01, weight_decay=0.1)
            if kind == "plain"
            else zero_redundancy(self.net)
        )

    def step(self, step):
        x, y = batch(self.rank, step)
        loss = loss_of(self.model, (x.float(), y.float()))
        if self.engine is not None:
            self.engine.backward(loss)
            self.engine.step()
            return loss.detach()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _trained(rank, kind, event):
    net = Net().float()
    data = [tuple(part.float() for part in batch(rank, step)) for step in range(40)]
    # The search needs a plain optimizer, and a model that DeepSpeed has not hooked into yet.
    plain = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    found = hdet.find_lr(net, plain, data, loss_of, total_steps=STEPS)
    loop = Loop(kind, rank, net)
    records = hdet.Records()
    auto = hdet.AutoLR(
        loop.optimizer,
        total_steps=STEPS,
        model=loop.net,
        found=found,
        sync_every=SYNC_EVERY,
        records=records,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            loss = loop.step(step)
            if event == "spoilt" and (step, rank) == (24, 1):
                with torch.no_grad():
                    loop.net.w1.fill_(torch.nan)
            has_collapsed = event == "collapse" and 30 <= step < 40
            auto.step(loss * 1000 if has_collapsed else loss)
    told = [str(warning.message) for warning in caught if "not finite" in str(warning.message)]
    brakes = [record.section(GuardRecord).num_brakes for record in records]
    return found.lr, [p.detach().clone() for p in loop.net.parameters()], brakes[-1:], told


def _refused(rank, kind):
    loop, told = Loop(kind, rank), []
    settings = {"model": loop.net, "explore": [hdet.LearningRate(0.0)], "sync_every": 5}
    noisy = hdet.Ensemble(loop.optimizer, **settings)
    attempts = [
        lambda: noisy.warm_start(0.1),
        lambda: hdet.find_lr(loop.net, loop.optimizer, [], loss_of, total_steps=100),
        lambda: hdet.Ensemble(loop.optimizer, **{**settings, "explore": [hdet.LearningRate(0.1)]}),
        lambda: hdet.Ensemble(loop.optimizer, **{**settings, "model": None}),
        lambda: (hdet.warm_start(loop.net, 0.1), hdet.Ensemble(loop.optimizer, **settings)),
    ]
    for attempt in attempts:
        try:
            attempt()
        except (TypeError, ValueError) as error:
            told.append(str(error))
        noisy.close()
    return told


def _all_of_it(rank, kind):
    """All that is asked of one kind: DeepSpeed keeps process groups, and needs processes of its own."""
    runs = [(_trained(rank, "plain", event), _trained(rank, kind, event)) for event in EVENTS]
    return runs, _refused(rank, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_a_plain_optimizer_and_what_is_not_sound_is_refused(kind):
    """Also where the guard goes back, and where the weights of one replica are spoilt at a sync."""
    end_processes()
    ranks = run_replicas(_all_of_it, 2, kind, timeout_seconds=110)  # deepspeed takes long to import
    end_processes()
    for i, event in enumerate(EVENTS):
        plain, _ = ranks[0][0][0 if event == "spoilt" else i]  # what is spoilt is healed
        others = [runs[i][1] for runs, _ in ranks]
        assert plain[2] == ([1] if event == "collapse" else [0])
        for lr, mine, _, _ in others:
            assert lr == plain[0]
            torch.testing.assert_close(mine, plain[1], rtol=1e-5, atol=1e-6)
        assert others[0][2] == plain[2]
        assert all(torch.equal(a, b) for a, b in zip(others[0][1], others[1][1], strict=True))
        assert ("replica 1 are not finite" in str(others[0][3])) == (event == "spoilt")
    name = "ZeroRedundancyOptimizer" if kind == "zero redundancy" else "DeepSpeedZeroOptimizer"
    words = [
        "Leave the noise out, or use a plain optimizer",
        f"Search with a plain optimizer, then build the {name} and give AutoLR what was found",
        "Set every spread to 0 and share gradients, or use a plain optimizer",
        f"model must be given with a {name}",
        "all replicas must start from the same parameters",
    ]
    for _, told in ranks:
        for message, expected in zip(told, words, strict=True):
            assert expected in message and name in message
