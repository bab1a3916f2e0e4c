"""find_lr: what it finds, what it leaves, and the same answer on ranks as in one process."""

from __future__ import annotations

import dataclasses
import itertools
import math

import prodigyopt
import pytest
import schedulefree
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.replicas.rows import join
from hdet.search.decisions import Trial, answer
from tests.helpers.errors import error_of
from tests.helpers.models import Net, batch, linear, loss_of, mean_square
from tests.helpers.replicas import run_replicas

X, Y = torch.randn(200, 3), torch.randn(200, 1)


def batches_of(replica):
    return (batch(replica, step) for step in itertools.count())


def found_from(lr, *, total_steps=1000, kind=torch.optim.AdamW, **settings):
    net = Net()
    return hdet.find_lr(
        net, kind(net.parameters(), lr=lr), batches_of(0), loss_of, total_steps=total_steps, **settings
    )


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_starts_that_are_off_by_ten_thousand_end_close_together(kind):
    found = [found_from(lr, kind=kind).lr[0] for lr in (1e-4, 1e-2, 1.0)]
    assert max(found) / min(found) < 12  # the number that was given counts too
    assert 1e-3 < found[1] < 1


def test_it_takes_a_tenth_of_a_thousand_steps_and_less_of_more():
    assert 60 <= found_from(1e-2).num_steps <= 125
    assert found_from(1e-2, total_steps=5000).num_steps <= 0.056 * 5000


def test_everything_is_put_back():
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.1), nn.Linear(5, 2)).double()
    net[2].eval()
    lr = torch.tensor(1e-2)
    optimizer = torch.optim.AdamW(
        [{"params": net[0].parameters()}, {"params": [*net[1].parameters(), *net[3].parameters()], "lr": lr}],
        lr=1e-3,
    )
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, batch(0, step)).backward()
        optimizer.step()
    tensors = [*net.parameters(), *net.buffers()]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    before = [tensor.detach().clone() for tensor in [*tensors, *moments]]
    gradients = [(p.grad, p.grad.clone()) for p in net.parameters()]
    generator = torch.random.get_rng_state()

    found = hdet.find_lr(net, optimizer, batches_of(0), loss_of, total_steps=300)

    moments = [value for state in optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip([*tensors, *moments], before, strict=True))
    for parameter, (gradient, values) in zip(net.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, values)
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert optimizer.param_groups[1]["lr"] is lr and lr.item() == pytest.approx(1e-2)
    assert [module.training for module in net] == [True, True, False, True]
    assert found.lr[1] / found.lr[0] == pytest.approx(10)
    assert found.asked == pytest.approx([1e-3, 1e-2])


@pytest.mark.parametrize("kind", [schedulefree.AdamWScheduleFree, prodigyopt.Prodigy])
def test_what_an_optimizer_counts_in_its_groups_is_put_back(kind):
    net = Net()
    optimizer = kind(net.parameters(), lr=0.01)
    if kind is schedulefree.AdamWScheduleFree:
        optimizer.train()
    before = {**optimizer.param_groups[0]}
    first, again = (
        hdet.find_lr(net, optimizer, batches_of(0), loss_of, total_steps=100, probe=[batch(9, 9)])
        for _ in range(2)
    )
    assert optimizer.param_groups[0] == before
    assert first == again


def test_an_error_in_the_loss_leaves_everything_as_it_was():
    net, calls = Net(), itertools.count()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = [p.detach().clone() for p in net.parameters()]

    def fails(model, data):
        if next(calls) > 30:
            raise RuntimeError("no more")
        return loss_of(model, data)

    with pytest.raises(RuntimeError, match="no more"):
        hdet.find_lr(net, optimizer, batches_of(0), fails, total_steps=1000)
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state


def test_where_there_is_nothing_to_see_the_learning_rate_stays_and_it_says_so():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = hdet.find_lr(net, optimizer, batches_of(0), lambda m, d: 0 * loss_of(m, d) + 1, total_steps=500)
    assert found.lr == [0.1]
    assert "your guess, because the search could not tell: the loss is the same" in found.reason
    assert found.low[0] < 0.01 and found.high[0] > 1


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"total_steps": 20}, ValueError, "total_steps must be .* at least 50"),
        ({"clip_norm": 0}, ValueError, "clip_norm must be a number above 0"),
        ({"batches": []}, ValueError, "batches must have at least one batch"),
        ({"batches": iter([batch(0, 0)])}, ValueError, "pass the DataLoader itself"),
        ({"loss": None}, TypeError, r"loss must be a function loss\(model, batch\), got None"),
        ({"loss": lambda m, d: loss_of(m, d) * 1j}, TypeError, "loss must return .* got torch.complex128"),
        ({"loss": lambda m, d: m(d[0])}, ValueError, "loss must return a tensor with one element"),
        (
            {"loss": lambda m, d: loss_of(m, d) * math.nan},
            hdet.NotFiniteError,
            "check the data and the model",
        ),
    ],
)
def test_bad_input_is_named(change, error, message):
    net = Net()
    arguments = {"batches": batches_of(0), "loss": loss_of, "total_steps": 500} | change
    with pytest.raises(error, match=message):
        hdet.find_lr(net, torch.optim.SGD(net.parameters(), lr=0.1), **arguments)


@pytest.mark.parametrize("whole", [False, True])
def test_layers_that_are_kept_in_evaluation_mode_stay_there(whole):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    if whole:
        net.eval()  # as a pretrained model comes: a loop calls train() first
    else:
        net[1].eval()
    seen = set()

    def loss_of(model, x):
        seen.add((model[1].training, model[2].training))
        return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()

    batches = [torch.randn(16, 4) for _ in range(20)]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    hdet.find_lr(net, optimizer, batches, loss_of, total_steps=60)
    assert seen == ({(True, True), (True, False)} if whole else {(False, True), (False, False)})
    assert [m.training for m in net] == ([False] * 4 if whole else [True, False, True, True])


def test_trials_of_a_model_with_batch_norm_see_sixteen_examples():
    net, sizes = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), set()

    def loss_of(model, x):
        if model.training and torch.is_grad_enabled():
            sizes.add(len(x))
        return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()

    batches = [torch.randn(24, 4) for _ in range(20)]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    found = hdet.find_lr(net, optimizer, batches, loss_of, total_steps=60)
    assert sizes == {24, 16} and len(found.trials) >= 8  # the ramp, and eight trials on parts that overlap


@pytest.mark.parametrize(("size", "of_trials"), [(64, {8}), (16, {4}), (8, {4}), (6, {1})])
def test_trials_see_four_examples_where_a_batch_has_eight(size, of_trials):
    torch.manual_seed(0)
    net, sizes = nn.Linear(4, 1), set()

    def loss_of(model, x):
        if torch.is_grad_enabled():
            sizes.add(len(x))
        return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()

    batches = [torch.randn(size, 4) for _ in range(20)]
    hdet.find_lr(net, torch.optim.SGD(net.parameters(), lr=1e-3), batches, loss_of, total_steps=100)
    assert sizes == {size} | of_trials


def test_adagrad_gets_more_than_its_trials_say():
    torch.manual_seed(0)  # a first model that is nearly right by chance has nothing to learn
    net = nn.Linear(4, 1)
    batches = [torch.randn(16, 4) for _ in range(20)]
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    found = hdet.find_lr(
        net, optimizer, batches, lambda model, x: (model(x) - x).square().mean(), total_steps=400
    )
    said = answer([Trial(lr / 0.1, score) for lr, score in found.trials], first_score=math.inf)
    assert found.lr[0] / 0.1 > 1.5 * said.factor


def test_a_model_and_an_optimizer_that_do_not_go_together_are_named():
    net, optimizer = Net(), torch.optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="model must have parameters that the optimizer trains, got a Net"):
        hdet.find_lr(net, optimizer, [], loss_of, total_steps=500)
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got 0.1"):
        hdet.find_lr(net, 0.1, [], loss_of, total_steps=500)
    with pytest.raises(TypeError, match=r"got a model of type Net: are model and optimizer swapped\?"):
        hdet.find_lr(optimizer, net, [], loss_of, total_steps=500)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got 'net'"):
        hdet.find_lr("net", optimizer, [], loss_of, total_steps=500)


def test_a_group_without_a_learning_rate_keeps_none_and_what_cannot_be_searched_is_refused():
    net = Net()
    groups = [{"params": [net.w1], "lr": 0.0}, {"params": [net.w2]}]
    optimizer = torch.optim.SGD(groups, lr=1e-3)
    found = hdet.find_lr(net, optimizer, batches_of(0), loss_of, total_steps=500)
    assert found.lr[0] == 0 < 1e-3 < found.lr[1]
    assert found.trials[0][0] > 0
    with pytest.raises(ValueError, match="got 0 in all: give any guess"):
        hdet.find_lr(net, torch.optim.SGD(net.parameters(), lr=0), [], loss_of, total_steps=500)
    with pytest.raises(ValueError, match="must step without a closure, got LBFGS"):
        hdet.find_lr(net, torch.optim.LBFGS(net.parameters()), [], loss_of, total_steps=500)


def test_what_a_loss_cannot_take_is_told_with_how_it_is_called():
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    batches = [torch.randn(16, 4) for _ in range(20)]

    def notes_of(loss):
        with pytest.raises(Exception) as caught:
            hdet.find_lr(net, optimizer, batches, loss, total_steps=60)
        return " ".join(getattr(caught.value, "__notes__", [str(caught.value)]))

    assert "loss(model, batch), with the model first" in notes_of(lambda x, model: model(x).mean())
    assert "cuts the tensors of a batch" in notes_of(lambda model, x: model(x).reshape(16, 1).mean())
    net.requires_grad_(False)
    frozen = notes_of(lambda model, x: model(x).mean())
    assert "no parameter of the optimizer has requires_grad=True" in frozen


def test_data_that_ends_starts_over():
    net = Net()
    data = [batch(0, step) for step in range(7)]
    found = hdet.find_lr(net, torch.optim.SGD(net.parameters(), lr=1e-3), data, loss_of, total_steps=500)
    assert found.lr[0] > 1e-3


def _on_rank(rank, wrapped, clip_norm, has_probe=True):
    net = Net()
    model = DistributedDataParallel(net) if wrapped else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    probe = hdet.Probe([batch(99, 0)], loss_of) if has_probe else None
    return hdet.find_lr(
        model, optimizer, batches_of(rank), loss_of, total_steps=400, probe=probe, clip_norm=clip_norm
    )


@pytest.mark.parametrize("count", [2, 8])
def test_ranks_find_what_one_process_finds_on_all_their_batches(count):
    ranks = run_replicas(_on_rank, count, count == 2, 1.0)
    assert all(found == ranks[0] for found in ranks)
    net = Net()
    alone = hdet.find_lr(
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-4),
        (join([batch(replica, step) for replica in range(count)]) for step in itertools.count()),
        loss_of,
        total_steps=400,
        probe=[batch(99, 0)],
        clip_norm=1.0,
    )
    assert ranks[0].lr == pytest.approx(alone.lr, rel=1e-6)
    assert ranks[0].num_steps == alone.num_steps
    for (lr, score), (same_lr, same_score) in zip(ranks[0].trials, alone.trials, strict=True):
        assert lr == pytest.approx(same_lr)
        assert score == pytest.approx(same_score, rel=1e-6)


def test_ranks_agree_without_a_probe_where_each_scores_on_its_own_batches():
    mine, theirs = run_replicas(_on_rank, 2, True, None, False)
    assert mine == theirs
    assert len(mine.trials) == 16  # the highest of the first eight did best
    assert mine.lr[0] > 1e-3


def test_a_batch_is_split_into_parts_with_a_trial_on_each():
    seen = []

    def counted(model, data):
        seen.append(len(data[0]))
        return loss_of(model, data)

    net = Net()
    data = [tuple(torch.cat([t] * 4) for t in batch(0, step)) for step in range(9)]
    size = len(data[0][0])
    last = tuple(t[:3] for t in data[0])  # as of an epoch that does not divide
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    found = hdet.find_lr(net, optimizer, [*data, last], counted, total_steps=400)
    assert len(found.trials) == 8
    assert set(seen) == {size, size // 8, 3}
    assert found.num_steps < 0.2 * 400


def test_a_list_of_inputs_and_targets_is_one_batch():
    """As a DataLoader gives them by default."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    pairs = [batch(0, step) for step in range(40)]
    lists, tuples = (
        hdet.find_lr(net, optimizer, [kind(pair) for pair in pairs], loss_of, total_steps=400)
        for kind in (list, tuple)
    )
    assert lists == tuples


def test_a_batch_that_cannot_be_split_gets_fewer_trials_in_turns():
    net = Net()
    data = [tuple(t[:1] for t in batch(0, step)) for step in range(50)]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    found = hdet.find_lr(net, optimizer, data, loss_of, total_steps=1000)
    assert len(found.trials) == 4
    assert found.num_steps < 0.12 * 1000


def test_a_batch_with_nan_does_not_count_against_the_learning_rate_that_met_it():
    def data(spoilt):
        for step in range(200):
            x, y = join([batch(replica, step) for replica in range(4)])
            yield (x * math.nan if step in spoilt else x), y

    def found(spoilt):
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        return hdet.find_lr(net, optimizer, data(spoilt), loss_of, total_steps=400)

    clean, spoilt = found(()), found((1, 9, 40, 41, 45))  # in the probe, the ramp and the trials
    assert 0.5 < spoilt.lr[0] / clean.lr[0] < 2
    assert all(score is not None for _, score in spoilt.trials)
    assert "batches whose loss is not finite were left out" in spoilt.reason
    assert "left out" not in clean.reason


def test_auto_lr_begins_with_what_was_found():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    found = hdet.find_lr(net, optimizer, batches_of(0), loss_of, total_steps=300)
    auto = hdet.AutoLR(optimizer, total_steps=300, model=net, found=found)
    assert auto.found_lr == {"lr": pytest.approx(found.lr[0])}
    before = loss_of(net, batch(1, 0)).item()
    for step in range(300):
        loss = loss_of(net, batch(0, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
    assert loss_of(net, batch(1, 0)).item() < 0.8 * before
    assert auto.found_lr == {"lr": pytest.approx(found.lr[0])}
    other = torch.optim.SGD([{"params": [net.w1]}, {"params": [net.w2]}], lr=0.1)
    with pytest.raises(ValueError, match="optimizer must have the 1 parameter groups"):
        hdet.AutoLR(other, total_steps=300, model=net, found=found)


def test_the_picture_and_the_words(tmp_path):
    found = found_from(1e-4)
    found.plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 5000
    assert str(found).startswith("learning rate ")
    assert found.lr[0] > 300 * 1e-4
    assert "your guess was 0.0001). The search went to its limits." in str(found)
    again = found_from(found.lr[0])
    assert not again.should_search_again
    assert "The best one is probably between" in str(again)


def train_with(net, optimizer, auto, first, last):
    for step in range(first, last):
        loss = loss_of(net, batch(0, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)


def test_a_run_with_what_was_found_resumes_bit_for_bit(tmp_path):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    found = hdet.find_lr(net, optimizer, batches_of(0), loss_of, total_steps=300)
    auto = hdet.AutoLR(optimizer, total_steps=300, model=net, found=found)
    train_with(net, optimizer, auto, 0, 150)
    parts = {"net": net, "optimizer": optimizer, "auto": auto}
    torch.save({"found": vars(found)} | {n: p.state_dict() for n, p in parts.items()}, tmp_path / "state.pt")
    train_with(net, optimizer, auto, 150, 300)

    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again = Net()
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-4)
    auto = hdet.AutoLR(optimizer, total_steps=300, model=again, found=hdet.FoundLR(**state["found"]))
    again.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    auto.load_state_dict(state["auto"])
    train_with(again, optimizer, auto, 150, 300)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_an_optimizer_that_makes_its_state_when_it_is_built():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1)
    batches = [torch.randn(8, 3) for _ in range(10)]
    kept = optimizer.state[model.weight]["sum"]
    hdet.find_lr(
        model, optimizer, batches, lambda m, x: (m(x) - x.sum(1, True)).square().mean(), total_steps=60
    )
    assert optimizer.state[model.weight]["sum"] is kept
    assert torch.equal(kept, torch.full_like(kept, 0.1))


def test_a_loss_without_gradients_is_named():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"gradients flow through.*before backward\(\)"):
        hdet.find_lr(net, optimizer, batches_of(0), lambda m, d: loss_of(m, d).detach(), total_steps=500)
    with pytest.raises(TypeError, match=r"leave out \.item\(\)"):
        hdet.find_lr(net, optimizer, batches_of(0), lambda m, d: loss_of(m, d).item(), total_steps=500)
    with pytest.raises(TypeError, match=r"got 500\.0 of type float: write 500"):
        hdet.find_lr(net, optimizer, batches_of(0), loss_of, total_steps=500.0)  # pyright: ignore


def test_an_error_of_the_loss_says_how_it_was_called():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"loss must be a function loss\(model, batch\), .* \(TypeError: "):
        hdet.find_lr(net, optimizer, batches_of(0), lambda model, x, y: model(x), total_steps=500)


def test_a_search_that_cannot_tell_says_so_in_the_log(caplog):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = hdet.find_lr(net, optimizer, batches_of(0), lambda m, d: 0 * loss_of(m, d) + 1, total_steps=500)
    assert found.is_guess and "could not tell" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (
            {"total_steps": 10**12},
            ValueError,
            "must be at most 100000000.*not examples or tokens",
        ),
        (
            {"batches": None},
            TypeError,
            "batches must be a DataLoader or a list of batches.* got None",
        ),
        ({"probe": [torch.zeros(0, 3)]}, ValueError, "batches must hold at least one example, got none"),
        (
            {"probe": torch.zeros(2, 3)},
            TypeError,
            r"probe must be an hdet\.Probe, held-out batches .* write \[batch\]",
        ),
    ],
)
def test_a_search_names_what_is_wrong(wrong: dict, error: type[Exception], words: str):
    model, optimizer = linear()
    settings = {"batches": [torch.randn(16, 3)] * 9, "loss": mean_square, "total_steps": 100} | wrong
    with pytest.raises(error, match=words):
        hdet.find_lr(model, optimizer, **settings)


@pytest.mark.parametrize(("returned", "remedy"), [(None, "give the loss alone"), (0.5, "leave out .item")])
def test_a_loss_function_that_returns_no_tensor_is_told_what_to_return(returned, remedy: str):
    model, optimizer = linear()
    data = [torch.randn(16, 3)] * 9
    with pytest.raises(TypeError, match=f"loss must return a tensor with one element, got .*: {remedy}"):
        hdet.find_lr(model, optimizer, data, lambda model, batch: returned, total_steps=100)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.MSELoss(), lambda batch, model: loss_of(model, batch)]
)
def test_a_loss_that_takes_something_else_is_told_and_nothing_has_changed(loss):
    model, optimizer = linear(0.01)
    before = model.weight.detach().clone()
    text = error_of(hdet.find_lr, model, optimizer, [(X, Y)], loss, total_steps=100)
    assert text.startswith("loss must be a function loss(model, batch), with the model first, but it failed")
    assert "a value of type tuple and length 2 (" in text and ": write def loss(model, batch)" in text
    assert torch.equal(model.weight, before) and optimizer.param_groups[0]["lr"] == 0.01


def test_an_error_of_torch_keeps_its_type():
    model, optimizer = linear(0.01)

    def loss(model, batch):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        hdet.find_lr(model, optimizer, [(X, Y)], loss, total_steps=100)
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes") as caught:
        hdet.find_lr(model, optimizer, [(X[:, :2], Y)], loss_of, total_steps=100)
    if hasattr(caught.value, "__notes__"):
        assert "hdet called loss(model, batch), with the model first" in caught.value.__notes__[0]


def test_a_second_search_begins_where_the_ramp_of_the_first_moves_the_loss():
    told = {"low": [1e-6], "high": [1e-4], "reason": "your guess", "trials": [(1e-5, None)], "num_steps": 50}
    lost = hdet.FoundLR(
        lr=[0.0, 1e-5],
        asked=[0.0, 1e-5],
        ramp=[(1e-7, 2.0), (1e-4, 2.01), (1e-3, 2.1), (1e-2, math.inf)],
        **told,
    )
    assert not lost.should_search_again and lost.next_guess == [0.0, pytest.approx(1e-3)]
    again = dataclasses.replace(
        lost, asked=[0.0, 1e-3], lr=[0.0, 3e-3], reason="trials, weighed against your guess"
    )
    joined = lost.then(again)
    assert (joined.asked, joined.began_at, joined.lr) == (lost.asked, again.asked, again.lr)
    assert (
        joined.num_steps == 100 and joined.reason == "a second search: trials, weighed against where it began"
    )
    unsure = dataclasses.replace(again, lr=again.asked)
    assert lost.then(unsure).lr == lost.lr and lost.then(unsure).num_steps == 100
    fallen = dataclasses.replace(lost, ramp=[(1e-7, 2.0), (1e-6, 1.9), (1e-5, 3.0)])
    assert fallen.next_guess is None
    assert hdet.FoundLR(**dataclasses.asdict(joined)) == joined


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(9, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x, time):
        return self.layers(torch.cat([x, time], dim=1))


def diffusion_loss(model, x):
    """Noise and time are drawn anew in every call, as a denoising diffusion model has it."""
    time, noise = torch.rand(len(x), 1), torch.randn_like(x)
    kept = torch.cos(time * torch.pi / 2)
    return (model(kept * x + (1 - kept.square()).sqrt() * noise, time) - noise).square().mean()


def test_a_loss_that_draws_random_numbers_does_not_drown_the_trials():
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(2, 8, generator=generator)
    data = [(torch.randn(16, 2, generator=generator) @ mixing).tanh() for _ in range(64)]

    def begun(lr):
        torch.manual_seed(0)
        model = Denoiser()
        return model, torch.optim.AdamW(model.parameters(), lr=lr)

    def trained(lr):
        model, optimizer = begun(lr)
        auto = hdet.AutoLR(optimizer, total_steps=400, model=model)
        for step in range(400):
            loss = diffusion_loss(model, data[step % 64])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            auto.step(loss)
        return hdet.Probe(data, diffusion_loss).mean(model).item()

    swept = [trained(lr) for lr in (4e-4, 1.6e-3, 6.3e-3, 2.5e-2, 1e-1)]
    for guess in (1e-5, 1e-4):
        model, optimizer = begun(guess)
        before = torch.get_rng_state()
        found = hdet.find_lr(model, optimizer, data, diffusion_loss, total_steps=400)
        assert torch.equal(torch.get_rng_state(), before)
        assert trained(found.lr[0]) < 1.4 * min(swept)
