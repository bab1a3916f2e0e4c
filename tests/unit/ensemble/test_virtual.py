from __future__ import annotations

import copy
import io
import math
import time
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.replicas.row_optimizers import columns_of, rule_for


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def build(model: nn.Module, **settings: Any) -> hdet.VirtualEnsemble:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"num_replicas": 4, "sync_every": 3} | settings
    return hdet.VirtualEnsemble(model, optimizer, settings.pop("loss", loss_of), **settings)


def hyperparameters_of(ensemble: hdet.VirtualEnsemble) -> Any:
    """Of the first parameter group, as the next step uses them."""
    replicas = ensemble.replicas
    return columns_of(
        ensemble.engine.optimizer.param_groups[0], replicas.explored_in(0), replicas.weights()[0]
    )


def test_the_model_holds_the_mean_after_a_sync() -> None:
    model = nn.Linear(3, 2)
    ensemble = build(model)
    for t in range(3):
        ensemble.step(
            batches=[torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * t + r)) for r in range(4)]
        )
    weight = ensemble.replicas.rows.matrices[0][:, :6].view(4, 2, 3)
    for r in range(4):
        assert torch.equal(weight[r], model.weight)


def test_sixty_four_replicas_run_in_one_process() -> None:
    ensemble = build(nn.Linear(3, 2), num_replicas=64)
    assert ensemble.step(torch.ones(5, 3)).shape == (64,)


def test_dropout_differs_between_replicas() -> None:
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5))
    for vectorize in (True, False):
        losses = build(model, vectorize=vectorize).step(torch.ones(2, 3))
        assert len(set(losses.tolist())) == 4


def test_attention_runs_vectorized() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(-3)
            q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    model = Attends()
    together = build(model, vectorize=True).step(x)
    one_by_one = build(model, vectorize=False).step(x)
    torch.testing.assert_close(together, one_by_one)


class Branches(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if y.sum().item() > 0 else -y


def test_what_cannot_be_vectorized_is_named_and_runs_one_by_one() -> None:
    with pytest.raises(hdet.CannotVectorizeError, match=r"item\(\).*vectorize=False"):
        build(Branches(3, 2)).step(torch.ones(5, 3))
    build(Branches(3, 2), vectorize=False).step(torch.ones(5, 3))


def test_what_the_model_reads_need_replicas_one_by_one() -> None:
    model = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5))
    explore = [hdet.Dropout(model, 0.3)]
    with pytest.raises(ValueError, match=r"vectorize must be False to explore \['dropout'\]"):
        build(model, explore=explore)
    seen = []

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(model[1].p)
        return loss_of(m, x)

    ensemble = build(model, explore=explore, vectorize=False, loss=loss)
    ensemble.step(torch.ones(2, 3))
    assert sorted(seen) == pytest.approx([0.5 * m for m in (0.7, 0.9, 1.1, 1.3)])


def test_a_bad_replica_is_left_out_and_healed() -> None:
    records = hdet.Records()
    ensemble = build(nn.Linear(3, 2), records=records)
    for _ in range(2):
        ensemble.step(torch.ones(5, 3))
    ensemble.replicas.rows.matrices[0][2].fill_(math.nan)
    with pytest.raises(hdet.AllReplicasFailedError):  # its gradient has spoilt the shared one
        ensemble.step(torch.ones(5, 3))

    local = build(nn.Linear(3, 2), records=records, gradients="local")
    for _ in range(2):
        local.step(torch.ones(5, 3))
    local.replicas.rows.matrices[0][2].fill_(math.nan)
    local.step(torch.ones(5, 3))
    assert records[-1].excluded == {2: "parameters are not finite"}
    assert torch.isfinite(local.replicas.rows.matrices[0]).all()


def test_replicas_are_compared_by_the_probe() -> None:
    records = hdet.Records()
    probe_data = torch.ones(2, 3)
    ensemble = build(nn.Linear(3, 2), records=records, controllers=[hdet.Controller()], probe=[probe_data])
    for _ in range(3):
        ensemble.step(batches=[torch.randn(5, 3) for _ in range(4)])
    assert len(set(records[0].probes)) == 4


def test_the_time_and_the_draws_of_a_probe_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    records = hdet.Records()
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def slow_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += 0.01
        torch.rand(1)
        return loss_of(model, x)

    probe = hdet.Probe([torch.ones(2, 3)], slow_loss)
    ensemble = build(nn.Linear(3, 2), records=records, sync_every=1, probe=probe)
    state = torch.get_rng_state()
    ensemble.step(torch.ones(5, 3))
    assert records[0].milliseconds["probe"] == pytest.approx(40)  # four replicas
    assert sum(records[0].milliseconds.values()) == pytest.approx(40)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("stop_at", [3, 5])
@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_resume_ends_in_the_same_bits(stop_at: int, gradients: Any) -> None:
    def run(begin: int, state: bytes | None) -> tuple[torch.Tensor, bytes]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        ensemble = build(
            model, gradients=gradients, controllers=[hdet.Controller()], total_steps=11, average_tail=0.8
        )
        if state is not None:
            ensemble.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))
        file = io.BytesIO()
        for t in range(begin, 11):
            draws = [torch.Generator().manual_seed(9 * t + r) for r in range(4)]
            ensemble.step(batches=[torch.randn(5, 3, generator=draw) for draw in draws])
            if t + 1 == stop_at and state is None:
                ensemble.converge()
                torch.save(ensemble.state_dict(), file)
        ensemble.converge()
        return model.weight.detach().clone(), file.getvalue()

    whole, saved = run(0, None)
    resumed, _ = run(stop_at, saved)
    assert torch.equal(whole, resumed)


def test_a_checkpoint_loads_into_another_number_of_replicas() -> None:
    first = build(nn.Linear(3, 2), total_steps=4, average_tail=0.5)
    for _ in range(3):
        first.step(torch.ones(5, 3))
    ends = {}
    for share in (0.0, 0.5):
        second = build(nn.Linear(3, 2), num_replicas=8, total_steps=4, average_tail=share)
        second.load_state_dict(first.state_dict())
        assert second.step(torch.ones(5, 3)).shape == (8,)
        assert second.engine.num_steps == 4
        ends[share] = second.model.weight.detach()
    torch.testing.assert_close(ends[0.5], (first.model.weight.detach() + ends[0.0]) / 2)


@pytest.mark.parametrize("sync_every", [3, 100])
def test_replicas_that_join_within_the_tail_have_one_mean(sync_every: int) -> None:
    def run(average_tail: float, saved: Any = None) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
        torch.manual_seed(0)
        ensemble = build(
            nn.Linear(3, 2),
            explore=[hdet.LearningRate(0.0)],
            sync_every=sync_every,
            join_equal=True,
            total_steps=5,
            average_tail=average_tail,
        )
        ensemble.warm_start(0.1)
        if saved is not None:
            ensemble.load_state_dict(saved)
        means = []
        for t in range(ensemble.engine.num_steps, 5):
            ensemble.step(torch.ones(5, 3))
            rows = ensemble.replicas.rows.matrices[0][: ensemble.replicas.num_distinct, :6]
            means.append(rows.mean(dim=0).view(2, 3))
            if t == 3:
                ensemble.converge()
                saved = ensemble.state_dict()
        assert ensemble.replicas.num_distinct == 1
        return ensemble.model.weight.detach().clone(), means, saved

    _, means, _ = run(0.0)
    weight, _, saved = run(0.8)
    torch.testing.assert_close(weight, torch.stack(means[1:]).mean(dim=0))
    assert torch.equal(run(0.8, saved)[0], weight)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"num_replicas": 0}, ValueError, "num_replicas must be an integer of at least 1"),
        ({"gradients": "own"}, ValueError, "gradients must be one of 'shared', 'local'"),
        ({"vectorize": 1}, TypeError, "vectorize must be True or False"),
        ({"loss": None}, TypeError, r"loss must be a function loss\(model, batch\), got None"),
        ({"probe": 3}, TypeError, r"probe must be an hdet\.Probe, held-out batches .*, or None, got 3"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build(nn.Linear(3, 2), **change)


def test_bad_optimizers_and_batches() -> None:
    model = nn.Linear(3, 2)
    for optimizer, words in (
        (torch.optim.RMSprop(model.parameters()), "SGD, Adam or AdamW with virtual replicas, got RMSprop"),
        (torch.optim.Adam(model.parameters(), amsgrad=True), "must not use amsgrad"),
        (torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "parameters of the model only"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            hdet.VirtualEnsemble(model, optimizer, loss_of)
    with pytest.raises(ValueError, match="batches must be 4, one per replica, got 2"):
        build(model).step(batches=[torch.ones(5, 3)] * 2)


def test_frozen_parameters_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    for vectorize in (True, False):
        ensemble = build(model, vectorize=vectorize)
        for _ in range(3):
            ensemble.step(torch.ones(5, 3))
        assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_without_a_spread_the_model_is_trained_and_averaged(gradients: Any) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    ensemble = build(model, gradients=gradients, explore=[hdet.LearningRate(0.0)])
    for t in range(4):
        ensemble.step(
            batches=[torch.randn(5, 3, generator=torch.Generator().manual_seed(9 * t + r)) for r in range(4)]
        )
    ensemble.converge()
    assert not torch.equal(model.weight, before)
    rows = ensemble.replicas.rows.matrices[0]
    assert torch.equal(rows[0], rows[3])


def test_half_precision_trains_like_torch() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).bfloat16()
    plain = nn.Linear(3, 2).bfloat16()
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    ensemble = build(model, explore=[hdet.LearningRate(0.0)])
    x = torch.ones(5, 3, dtype=torch.bfloat16)
    for _ in range(6):
        ensemble.step(x)
        optimizer.zero_grad()
        loss_of(plain, x).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, plain.weight, rtol=0.02, atol=0.01)


def test_a_resume_restores_what_is_not_explored() -> None:
    def build_cycled() -> tuple[hdet.VirtualEnsemble, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)  # cycles beta1 too
        explore = [hdet.WeightDecay()]
        settings: dict[str, Any] = {
            "scheduler": scheduler,
            "explore": explore,
            "num_replicas": 4,
            "sync_every": 3,
        }
        return hdet.VirtualEnsemble(model, optimizer, loss_of, **settings), optimizer

    first, optimizer = build_cycled()
    for _ in range(6):
        first.step(torch.ones(5, 3))
    second, loaded = build_cycled()
    second.load_state_dict(first.state_dict())
    for key in ("lr", "betas", "weight_decay"):
        assert loaded.param_groups[0][key] == optimizer.param_groups[0][key]
    for ensemble in (first, second):
        for _ in range(3):
            ensemble.step(torch.ones(5, 3))
    assert torch.equal(first.model.weight, second.model.weight)  # pyright: ignore[reportArgumentType]


def test_going_back_forgets_the_abandoned_losses() -> None:
    records = hdet.Records()
    ensemble = build(nn.Linear(3, 2), records=records)
    for _ in range(3):
        ensemble.step(torch.ones(5, 3))
    state = ensemble.state_dict()
    ensemble.step(100 * torch.ones(5, 3))
    ensemble.load_state_dict(state)
    for _ in range(3):
        ensemble.step(torch.zeros(5, 3))
    assert max(loss for loss in records[-1].losses if loss is not None) < 10


def test_bounds_hold_in_every_row() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        loss_of,
        num_replicas=2,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 + t),
        explore=[hdet.LearningRate(0.3, bounds=(0.01, 0.3))],
        sync_every=10,
    )
    for _ in range(4):
        column = hyperparameters_of(ensemble)["lr"]
        assert column.max() <= 0.3 and column.min() >= 0.01
        ensemble.step(torch.zeros(5, 3))


def test_base_values_change_nothing_for_later_steps() -> None:
    ensemble = build(nn.Linear(3, 2))
    before = hyperparameters_of(ensemble)["lr"]
    with ensemble.engine.base_values():
        pass
    assert torch.equal(hyperparameters_of(ensemble)["lr"], before)


@pytest.mark.parametrize("vectorize", [True, False])
def test_buffers_that_are_replaced_are_kept(vectorize: bool) -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n = self.n + 1
            return super().forward(x)

    model = Counts()
    ensemble = build(model, vectorize=vectorize)
    for _ in range(3):
        ensemble.step(torch.ones(5, 3))
    assert model.n == 3


@pytest.mark.parametrize("join_equal", [True, False])
@pytest.mark.parametrize("vectorize", [True, False])
def test_a_tensor_with_two_names_is_one(vectorize: bool, join_equal: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight
            self.register_buffer("scale", torch.full((), 0.5))
            self.same_scale = self.scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * self.same_scale * self.second(self.first(x).tanh()) - 1

    torch.manual_seed(0)
    model, other = Tied(), Tied()
    other.load_state_dict(model.state_dict())
    ensemble = build(model, vectorize=vectorize, join_equal=join_equal, explore=[hdet.LearningRate(0.0)])
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    for _ in range(3):
        ensemble.step(torch.ones(5, 3))
        loss_of(other, torch.ones(5, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.second.weight is model.first.weight
    torch.testing.assert_close(model.first.weight, other.first.weight, rtol=1e-5, atol=1e-7)


def test_an_error_in_the_loss_leaves_the_model_its_own_tensors() -> None:
    def fails(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of luck")

    model = nn.BatchNorm1d(3)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ensemble = build(model, loss=fails, vectorize=False)
    with pytest.raises(RuntimeError, match="out of luck"):
        ensemble.step(torch.ones(5, 3))
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(now[name] is tensor for name, tensor in held.items())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_number_for_all_rows_is_a_column_of_it(kind: Any, decay: float) -> None:
    rule = rule_for(kind([nn.Parameter(torch.zeros(1))]))
    generator = torch.Generator().manual_seed(0)
    hyper = {"lr": 0.1, "weight_decay": decay, "momentum": 0.9, "dampening": 0.25, "eps": 1e-8}
    hyper |= {"beta1": 0.9, "beta2": 0.99}
    flags = {"has_momentum": True, "nesterov": False, "is_decoupled": kind is torch.optim.AdamW}
    columns = {key: torch.full((2, 1), value, dtype=torch.float64) for key, value in hyper.items()}
    start = torch.randn(2, 5, generator=generator)
    results = []
    for values in (hyper, columns):
        parameters, moments = start.clone(), {}
        draws = torch.Generator().manual_seed(1)
        for step in range(1, 4):
            told = {**values, **flags, "step": step}
            rule(parameters, torch.randn(2, 5, generator=draws), moments, told)
        results.append(parameters)
    assert not torch.equal(results[0], start)
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_loss_that_is_no_scalar_is_refused_before_anything_changes(vectorize: bool) -> None:
    model = nn.Linear(3, 2)
    ensemble = build(model, vectorize=vectorize, loss=lambda m, x: m(x).square().mean(dim=0))
    before = ensemble.replicas.rows.matrices[0].clone()
    with pytest.raises(ValueError, match=r"one element, got shape \(2,\): take its mean"):
        ensemble.step(torch.ones(5, 3))
    assert torch.equal(ensemble.replicas.rows.matrices[0], before)


def test_after_a_step_the_model_reads_the_shared_rate() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3))
    ensemble = build(model, explore=[hdet.Dropout(model)], vectorize=False)
    ensemble.step(torch.ones(5, 3))
    assert model[1].p == 0.3


@pytest.mark.parametrize("join_equal", [True, False])
def test_a_warm_start_gives_each_replica_the_noise_of_its_own(join_equal: bool) -> None:
    model = nn.Linear(3, 2)
    ensemble = build(model, join_equal=join_equal, explore=[hdet.LearningRate(0.0)])
    ensemble.step(torch.ones(5, 3))  # within a round: the model still shows the start
    start, now = copy.deepcopy(model), ensemble.replicas.rows.matrices[0][0].clone()
    assert not torch.equal(now[:6].view(2, 3), model.weight)
    ensemble.warm_start(0.1)
    assert torch.equal(model.weight, start.weight)
    for replica in range(4):
        alone = copy.deepcopy(model)
        with torch.no_grad():
            alone.weight.copy_(now[:6].view(2, 3))
            alone.bias.copy_(now[6:])
        hdet.warm_start(alone, 0.1, replica=replica)
        assert torch.equal(ensemble.replicas.rows.matrices[0][replica][:6].view(2, 3), alone.weight)


@pytest.mark.parametrize(
    "change", [{"vectorize": True}, {"join_equal": True, "explore": [hdet.LearningRate(0.0)]}]
)
def test_batches_of_unequal_size_are_named(change: dict[str, Any]) -> None:
    ensemble = build(nn.Linear(3, 2), **change)
    with pytest.raises(
        ValueError, match=r"batches must have the same .* got sizes \[5, 5, 5, 2\].*drop_last"
    ):
        ensemble.step(batches=[torch.ones(5, 3)] * 3 + [torch.ones(2, 3)])
    assert ensemble.engine.num_steps == 0
    one_by_one = build(nn.Linear(3, 2), vectorize=False)
    one_by_one.step(batches=[torch.ones(5, 3)] * 3 + [torch.ones(2, 3)])
    assert one_by_one.engine.num_steps == 1


def test_a_probe_that_returns_no_number_is_named() -> None:
    probe = hdet.Probe([torch.zeros(1)], lambda model, batch: "low")  # pyright: ignore[reportArgumentType]
    ensemble = build(nn.Linear(3, 2), sync_every=1, probe=probe)
    with pytest.raises(TypeError, match="loss must return a tensor with one element, got 'low'"):
        ensemble.step(torch.ones(5, 3))


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_batch_of_a_data_loader_is_one_batch_for_all_replicas(kind: type, vectorize: bool):
    def pairs(model: nn.Module, batch) -> torch.Tensor:
        x, y = batch
        return (model(x) - y[:, :1]).square().mean()

    model = nn.Linear(3, 1)
    ensemble = build(model, loss=pairs, num_replicas=2, vectorize=vectorize)
    batch = kind([torch.ones(4, 3), torch.full((4, 3), 2.0)])
    expected = pairs(model, batch).item()
    assert ensemble.step(batch).tolist() == pytest.approx([expected, expected])


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, TypeError, r"must be given either batch or batches, got neither: pass step\(batch\)"),
        ({"batch": torch.ones(4, 3), "batches": [torch.ones(4, 3)] * 2}, TypeError, "got both"),
        ({"batches": [torch.ones(4, 3)] * 3}, ValueError, r"batches must be 2, one per replica, got 3"),
        ({"batches": torch.ones(2, 4, 3)}, TypeError, "batches must be a list of 2 batches, one per replica"),
    ],
)
def test_what_a_step_of_virtual_replicas_is_given_is_said_explicitly(given, error, words: str):
    ensemble = build(nn.Linear(3, 1), num_replicas=2)
    with pytest.raises(error, match=words):
        ensemble.step(**given)
    assert ensemble.engine.num_steps == 0
