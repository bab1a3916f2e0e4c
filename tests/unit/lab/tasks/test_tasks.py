"""Every built-in task keeps the promises of Task; quadratic against theory."""

import itertools
import math

import pytest
import torch
import torch.utils._pytree as pytree

import hdet
from hdet.lab.tasks import Task, load_task
from hdet.lab.tasks.task import BUILT_IN_TASKS, parse_options
from hdet.lab.train.runner import evaluate
from hdet.method.recipe import one_cycle
from hdet.replicas.rows import join

CASES = [(name, {}) for name in BUILT_IN_TASKS] + [("digits", {"model": "conv", "width": 4, "dropout": 0.1})]


@pytest.fixture(params=CASES, ids=lambda case: case[0] + case[1].get("model", ""), scope="module")
def task(request) -> Task:
    return load_task(*request.param)


def assert_same(a, b, *, same=True):
    equal = all(torch.equal(x, y) for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))
    assert equal == same


def test_models_follow_from_their_seed_and_leave_the_global_generator_alone(task):
    before = torch.random.get_rng_state()
    one, two = task.build_model(3), task.build_model(3)
    assert torch.equal(before, torch.random.get_rng_state())
    assert_same(one.state_dict(), two.state_dict())


def test_streams_are_seeded_never_alike_and_begin_anywhere(task):
    def take(n, **which):
        return list(itertools.islice(task.train_batches(**which), n))

    batches = take(4, seed=0, replica=1)
    assert_same(batches, take(4, seed=0, replica=1))
    assert_same(batches[3], take(1, seed=0, replica=1, start=3)[0])
    for other in ({"seed": 1, "replica": 1}, {"seed": 0, "replica": 2}):
        assert_same(batches, take(4, **other), same=False)


def test_groups_hold_every_parameter_once_and_have_names(task):
    model = task.build_model(0)
    groups = task.parameter_groups(model)
    held = [p for group in groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))
    assert len({group["name"] for group in groups}) == len(groups)


def test_evaluation_is_repeatable_and_probe_is_another_batch(task):
    model = task.build_model(0)
    assert evaluate(task, model) == evaluate(task, model)
    assert model.training
    assert math.isfinite(task.loss(model, task.probe_batch()).item())


def test_virtual_replicas_run_and_learn(task):
    model = task.build_model(0)
    optimizer = torch.optim.AdamW(task.parameter_groups(model), lr=task.learning_rate)
    ensemble = hdet.VirtualEnsemble(
        model, optimizer, task.loss, num_replicas=2, sync_every=10, vectorize=task.can_vectorize
    )
    before = evaluate(task, model)["loss"]
    streams = [task.train_batches(seed=0, replica=r) for r in range(2)]
    for _ in range(30):
        ensemble.step(batches=[next(stream) for stream in streams])
    assert evaluate(task, model)["loss"] < before


def test_the_loss_of_joined_batches_is_the_mean_of_their_losses(task):
    model = task.build_model(0).eval()
    batches = [next(task.train_batches(seed=0, replica=r)) for r in range(3)]
    joined = task.loss(model, join(batches)).item()
    assert joined == pytest.approx(sum(task.loss(model, b).item() for b in batches) / 3, rel=1e-5)


def test_quadratic_ends_where_theory_says():
    task = load_task("quadratic", {"size": 20})
    lrs = [0.5 * one_cycle(t, 200) for t in range(200)]
    losses = []
    for seed in range(40):
        model = task.build_model(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for lr, batch in zip(lrs, task.train_batches(seed=seed), strict=False):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
        losses.append(evaluate(task, model)["loss"])
    expected = task.expected_loss(lrs)
    spread = torch.tensor(losses).std().item() / math.sqrt(len(losses))
    assert sum(losses) / len(losses) == pytest.approx(expected, abs=4 * spread)
    assert abs(expected - task.expected_loss([0.0] * 200)) > 100 * spread  # the test can fail


class Mine(Task):
    def __init__(self, width: int = 2):
        self.width = width

    def build_model(self, seed):
        return torch.nn.Linear(self.width, 1)

    def train_batches(self, *, seed, replica=0, start=0):
        return itertools.repeat(torch.ones(3, self.width))

    def evaluation_batches(self):
        return [torch.ones(3, self.width)]

    def loss(self, model, batch):
        return model(batch).square().mean()


def test_a_task_of_ones_own_is_loaded_from_a_file_with_options(tmp_path):
    source = tmp_path / "mine.py"
    source.write_text(f"from {__name__} import Mine\nclass Partial(Mine.__base__):\n    pass\nx = 3\n")
    assert load_task(f"{source}:Mine", {"width": 5}).build_model(0).in_features == 5
    assert load_task(f"{__name__}:Mine").learning_rate == Task.learning_rate
    with pytest.raises(ValueError, match="must define build_model, train_batches, evaluation_batches, loss"):
        load_task(f"{source}:Partial")
    with pytest.raises(ValueError, match=r"option 'depth' is not known to task .*: it takes width"):
        load_task(f"{source}:Mine", {"depth": 1})
    with pytest.raises(ValueError, match=r"derived from hdet.lab.tasks.Task"):
        load_task(f"{source}:x")
    with pytest.raises(ValueError, match="has no Other"):
        load_task(f"{source}:Other")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "task must be one of feed, charlm, digits, quadratic or path/to/file.py:MyTask, got 'nope'"),
        ("no/such/file.py:Mine", "there is no such file"),
        ("no_such_module:Mine", "cannot be imported"),
    ],
)
def test_unknown_tasks_say_what_is_known(name, message):
    with pytest.raises(ValueError, match=message):
        load_task(name)


def test_a_batch_of_digits_is_no_larger_than_the_training_set():
    with pytest.raises(ValueError, match="batch_size must be at most 1197, the training set, got 1198"):
        load_task("digits", {"batch_size": 1198})


def test_options_must_be_pairs():
    with pytest.raises(ValueError, match="--option must be NAME=VALUE, got 'width'"):
        parse_options(["width"])


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            "x = 1\ny = undefined\n",
            {},
            r"cannot be imported: .*mine\.py, line 2: NameError: name 'undefined'",
        ),
        ("import math\nmath.nothing\n", {}, r"mine\.py, line 2: AttributeError: module 'math'"),
        ("x = 1\nimport no_such_module\n", {}, r"mine\.py, line 2: ModuleNotFoundError: No module named"),
        ("x = (\n", {}, r"mine\.py, line 1: SyntaxError: '\(' was never closed"),
        (
            f"from {__name__} import Mine as Base\nclass Mine(Base):\n    def __init__(self, size=1):\n"
            "        self.share = 1 / size\n",
            {"size": 0},
            r"cannot be built: .*mine\.py, line 4: ZeroDivisionError: division by zero",
        ),
        (
            f"from {__name__} import Mine as Base\nclass Mine(Base):\n"
            "    def __init__(self, size):\n        pass\n",
            {},
            r"cannot be built: TypeError: .*missing 1 required positional argument: 'size'",
        ),
    ],
)
def test_a_bug_in_a_task_of_ones_own_is_named_with_file_and_line(source, options, message, tmp_path):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ValueError, match=rf"task '.*mine\.py:Mine' .*{message}"):
        load_task(f"{tmp_path / 'mine.py'}:Mine", options)
