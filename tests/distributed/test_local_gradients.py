"""Gradients that stay in their replica, on real ranks: the numbers of virtual replicas."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet import presets
from tests.distributed.test_sharded import batch_of, build, joined, loss_of, whole
from tests.helpers.members import OWN_RULES, WeightedPull
from tests.helpers.replicas import ReplicaError, run_replicas

STEPS = 25


def optimizer_of(kind, parameters):
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def settings(**more):
    return {"sync_every": 7, "total_steps": STEPS, "seed": 3, "explore": [hdet.LearningRate(0.2)]} | more


def train(model, optimizer, ensemble, rank, first=0, steps=STEPS):
    for step in range(first, steps):
        loss = loss_of(model, batch_of(rank, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ensemble.step(loss)


def run_virtual(count, kind="adamw", batch=lambda r, step: batch_of(r, step), **more):
    model = build()
    optimizer = optimizer_of(kind, model.parameters())
    records = hdet.Records()
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        loss_of,
        num_replicas=count,
        records=records,
        **({"gradients": "local"} | settings(**more)),
    )
    for step in range(STEPS):
        ensemble.step(batches=[batch(r, step) for r in range(count)])
    return [p.detach() for p in model.parameters()], list(records), ensemble


def assert_equal_to_virtual(ranks, count, kind="adamw", **more):
    expected, expected_records, _ = run_virtual(count, kind, **more)
    for parameters, records in ranks:
        for mine, theirs in zip(parameters, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
        if records:
            assert [r.step for r in records] == [r.step for r in expected_records]
            for ours, theirs in zip(records, expected_records, strict=True):
                assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
                assert ours.excluded == theirs.excluded
    assert sum(bool(records) for _, records in ranks) == 1


def _ddp(rank, kind, more):
    warnings.simplefilter("ignore", FutureWarning)
    model = build()
    ddp = DistributedDataParallel(model)
    optimizer = optimizer_of(kind, model.parameters())
    records = hdet.Records()
    chosen = {"gradients": "local"} | settings(**more)
    ensemble = hdet.Ensemble(optimizer, model=ddp, records=records, **chosen)
    assert not ddp.require_backward_grad_sync
    train(ddp, optimizer, ensemble, rank)
    assert not ddp.require_backward_grad_sync
    ensemble.finish()
    assert ddp.require_backward_grad_sync
    ensemble.close()
    return [p.detach().clone() for p in model.parameters()], list(records) if rank == 0 else []


@pytest.mark.parametrize(
    ("count", "kind", "more"),
    [
        (2, "adamw", {}),
        (4, "adamw", {"average_tail": 0.3}),
        (4, "sgd", {"moments": "keep", "explore": [hdet.LearningRate(0.0)]}),
        (2, "adamw", {"moments": "reset"}),
        (2, "adamw", presets.diloco(sync_every=7) | {"average_tail": 0.3}),
        (2, "sgd", {"moments": "average", "controllers": [hdet.Controller()]}),
    ],
)
def test_ddp_ranks_equal_virtual_replicas(count, kind, more):
    assert_equal_to_virtual(run_replicas(_ddp, count, kind, more), count, kind, **more)


def _bare(rank):
    model = build()
    optimizer = optimizer_of("sgd", model.parameters())
    records = hdet.Records()
    ensemble = hdet.Ensemble(optimizer, gradients="local", records=records, **settings())
    train(model, optimizer, ensemble, rank)
    return [p.detach().clone() for p in model.parameters()], list(records) if rank == 0 else []


def test_a_bare_model_is_local_by_itself():
    assert_equal_to_virtual(run_replicas(_bare, 2), 2, "sgd")


def _sharded(rank, axes, more=None):
    model = build()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh if axes == 2 else mesh["shard"])
    optimizer = optimizer_of("adamw", model.parameters())
    records = hdet.Records()
    ensemble = hdet.Ensemble(
        optimizer,
        model=model,
        replicas=mesh["replicate"],
        records=records,
        **({"gradients": "local"} | settings(average_tail=0.3) | (more or {})),
    )
    train(model, optimizer, ensemble, rank)
    return whole(model.parameters()), list(records) if rank == 0 else []


def test_a_replica_of_two_ranks_has_the_gradient_of_both():
    ranks = run_replicas(_sharded, 4, 1)
    both = lambda r, step: joined(step, (2 * r, 2 * r + 1))  # noqa: E731
    assert_equal_to_virtual(ranks, 2, batch=both, average_tail=0.3)


def test_a_model_that_shares_gradients_itself_is_refused_with_the_remedy():
    with pytest.raises(ReplicaError, match=r"fully_shard\(module, mesh=mesh\[\"shard\"\]\)"):
        run_replicas(_sharded, 4, 2)


def _static(rank):
    ddp = DistributedDataParallel(build(), static_graph=True)
    with pytest.raises(ValueError, match="Wrap the model without static_graph"):
        hdet.Ensemble(optimizer_of("sgd", ddp.parameters()), model=ddp, gradients="local")
    return ddp.require_backward_grad_sync


def test_a_static_graph_is_refused_because_torch_fails_with_it():
    assert all(run_replicas(_static, 2))


def _undone(rank, how):
    ddp = DistributedDataParallel(build())
    optimizer = optimizer_of("sgd", ddp.parameters())
    ensemble = hdet.Ensemble(optimizer, model=ddp, gradients="local", sync_every=2)
    assert not ddp.require_backward_grad_sync
    if how == "close":
        ensemble.close()
    elif how == "framework":  # something turns it on again
        ddp.require_backward_grad_sync = True
        train(ddp, optimizer, ensemble, rank, steps=1)
        return not ddp.require_backward_grad_sync
    else:
        with torch.no_grad():
            next(ddp.parameters()).fill_(float("nan"))
        with pytest.raises(hdet.AllReplicasFailedError):
            train(ddp, optimizer, ensemble, rank, steps=2)
    return ddp.require_backward_grad_sync


@pytest.mark.parametrize("how", ["close", "error", "framework"])
def test_ddp_is_put_back(how):
    assert all(run_replicas(_undone, 2, how))


def _shared_by_mistake(rank):
    model = build()
    ddp = DistributedDataParallel(model)
    optimizer = optimizer_of("sgd", model.parameters())
    ensemble = hdet.Ensemble(
        optimizer, model=model, gradients="local", sync_every=3, explore=[hdet.LearningRate(0.0)]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(ddp, optimizer, ensemble, rank, steps=6)
    return [str(w.message) for w in caught if issubclass(w.category, hdet.HdetWarning)]


def test_gradients_that_are_shared_all_the_same_are_noticed():
    first, other = run_replicas(_shared_by_mistake, 2)
    assert len(first) == 1 and "pass the DistributedDataParallel module" in first[0]
    assert other == []


def _spoilt(rank, moments, how):
    ddp = DistributedDataParallel(build())
    optimizer = optimizer_of("adamw", ddp.parameters())
    records = hdet.Records()
    ensemble = hdet.Ensemble(
        optimizer, model=ddp, gradients="local", moments=moments, sync_every=20, records=records
    )
    train(ddp, optimizer, ensemble, rank, steps=4)
    if rank == 1:
        with torch.no_grad():
            for p in ddp.parameters():
                if how == "nan":
                    p.fill_(float("nan"))
                    optimizer.state[p]["exp_avg"].fill_(float("nan"))
                else:
                    p.mul_(30)
    train(ddp, optimizer, ensemble, rank, first=4, steps=20)
    after = [optimizer.state[p]["exp_avg"].clone() for p in ddp.parameters()]
    train(ddp, optimizer, ensemble, rank, first=20, steps=40)
    return [p.detach().clone() for p in ddp.parameters()], after, [r.excluded for r in records]


@pytest.mark.parametrize("how", ["nan", "far"])
@pytest.mark.parametrize("moments", ["average", "keep"])
def test_a_replica_that_is_left_out_gets_parameters_and_moments_of_the_others(moments, how):
    ranks = run_replicas(_spoilt, 4, moments, how)
    reason = "parameters are not finite" if how == "nan" else "its loss is far above the others'"
    assert ranks[0][2] == [{1: reason}, {}]
    for parameters, after, _ in ranks:
        assert all(torch.isfinite(t).all() for t in [*parameters, *after])
        assert all(torch.equal(a, b) for a, b in zip(parameters, ranks[0][0], strict=True))
    equal = [all(torch.equal(a, b) for a, b in zip(r[1], ranks[0][1], strict=True)) for r in ranks]
    assert equal == ([True] * 4 if moments == "average" else [True, True, False, False])


def _unused(rank):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 1).double(), nn.Linear(6, 1).double()

        def forward(self, x):
            return self.a(x) + (self.b(x) if rank == 0 else 0)

    model = Half()
    optimizer = optimizer_of("adamw", model.parameters())
    ensemble = hdet.Ensemble(optimizer, gradients="local", sync_every=2)
    with pytest.raises(hdet.ConfigurationMismatchError, match="moments='keep'"):
        train(model, optimizer, ensemble, rank, steps=2)
    return True


def test_moments_that_some_replicas_lack_are_an_error_and_no_hang():
    assert all(run_replicas(_unused, 2))


RULES = {name: rule | {"sync_every": 7} for name, rule in OWN_RULES.items()} | {
    "local_sgd": presets.local_sgd(sync_every=7),
    "diloco": presets.diloco(sync_every=7),
}


def _every_rule(rank):
    warnings.simplefilter("ignore", FutureWarning)
    return [_ddp(rank, "adamw", more) for more in RULES.values()]


def test_every_merge_rule_on_ranks_equals_virtual_replicas():
    by_rank = run_replicas(_every_rule, 4)
    for more, *ranks in zip(RULES.values(), *by_rank, strict=True):
        assert_equal_to_virtual(ranks, 4, **more)


SHARDED_RULES = ("diloco", "lookahead", "pull")


def _every_sharded_rule(rank):
    return [_sharded(rank, 1, RULES[name]) for name in SHARDED_RULES]


def test_every_merge_rule_of_sharded_replicas_equals_virtual_ones():
    by_rank = run_replicas(_every_sharded_rule, 4)
    both = lambda r, step: joined(step, (2 * r, 2 * r + 1))  # noqa: E731
    for name, *ranks in zip(SHARDED_RULES, *by_rank, strict=True):
        assert_equal_to_virtual(ranks, 2, batch=both, average_tail=0.3, **RULES[name])


def _differ(rank):
    model = build()
    optimizer = optimizer_of("sgd", model.parameters())
    with pytest.raises(hdet.ConfigurationMismatchError, match=r"gradients .*'local'.*'shared'"):
        hdet.Ensemble(optimizer, gradients="local" if rank == 0 else "shared")
    return True


def test_gradients_is_a_setting_that_all_ranks_share():
    assert all(run_replicas(_differ, 2))


def _rules_differ(rank):
    optimizer = optimizer_of("sgd", build().parameters())
    with pytest.raises(hdet.ConfigurationMismatchError, match=r"merge .*pull=0\.25.*pull=0\.5"):
        hdet.Ensemble(optimizer, gradients="local", merge=WeightedPull(0.5 if rank else 0.25))
    hdet.Ensemble(optimizer, gradients="local", merge=WeightedPull()).close()
    return True


def test_settings_of_a_rule_are_compared_between_ranks_though_it_is_no_dataclass():
    assert all(run_replicas(_rules_differ, 2))


def _saved(rank, more):
    """Train, save within a round after converging, go on; and the same from the checkpoint."""

    def make():
        model = build()
        ddp = DistributedDataParallel(model)
        optimizer = optimizer_of("adamw", model.parameters())
        return (
            model,
            ddp,
            optimizer,
            hdet.Ensemble(optimizer, model=ddp, **({"gradients": "local"} | settings(**more))),
        )

    model, ddp, optimizer, ensemble = make()
    train(ddp, optimizer, ensemble, rank, steps=10)
    ensemble.converge()
    parts = {"m": model, "o": optimizer, "e": ensemble}
    box = [copy.deepcopy({name: part.state_dict() for name, part in parts.items()})]
    dist.broadcast_object_list(box, src=0)
    train(ddp, optimizer, ensemble, rank, first=10)
    again, ddp_again, optimizer_again, ensemble_again = make()
    again.load_state_dict(box[0]["m"])
    optimizer_again.load_state_dict(box[0]["o"])
    ensemble_again.load_state_dict(box[0]["e"])
    train(ddp_again, optimizer_again, ensemble_again, rank, first=10)
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "lookahead"])
def test_a_checkpoint_of_one_rank_resumes_bit_for_bit(name):
    assert all(run_replicas(_saved, 2, RULES[name]))


def _bytes(rank, moments):
    """What local mode sends in 200 steps with T = 100, over what DistributedDataParallel sends."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    ddp, sent = DistributedDataParallel(model), [0]

    def counting_hook(state, bucket):
        sent[0] += bucket.buffer().numel() * bucket.buffer().element_size()
        return default_hooks.allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, counting_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, records = torch.Generator().manual_seed(rank), hdet.Records()

    def steps(number, after=lambda loss: None):
        for _ in range(number):
            loss = (ddp(torch.randn(2, 64, generator=generator)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            after(loss)

    steps(20)
    shared_per_step, sent[0] = sent[0] / 20, 0
    ensemble = hdet.Ensemble(
        optimizer,
        model=ddp,
        gradients="local",
        moments=moments,
        sync_every=100,
        total_steps=200,
        records=records,
    )
    steps(200, ensemble.step)
    assert sent[0] == 0 and [record.num_steps for record in records] == ([100, 100] if rank == 0 else [])
    return sum(record.bytes_sent for record in records) / 200 / shared_per_step


@pytest.mark.parametrize(("moments", "at_most"), [("keep", 1 / 90), ("reset", 1 / 90), ("average", 1 / 30)])
def test_local_mode_sends_a_fraction_of_what_ddp_sends(moments, at_most):
    share, _ = run_replicas(_bytes, 2, moments)
    assert 0.9 * at_most < share <= at_most  # averaging AdamW's two moments sends three times as much
