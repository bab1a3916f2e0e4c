"""The submission to AlgoPerf, on a stand-in for its workload and its loop. AlgoPerf itself is not needed."""

from __future__ import annotations

import enum
import io
import json
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from research.algoperf import __main__ as command
from research.algoperf import baseline, submission
from research.algoperf.data import distorted


class Mode(enum.Enum):
    TRAIN = 0


class Workload:
    """A line to fit, with what the submission asks of a workload."""

    step_hint = 400
    metrics_logger = None

    def __init__(self):
        self.dropout_rates = set()

    def init_model_fn(self, seed):
        torch.manual_seed(seed)
        return nn.Linear(4, 1), None

    def model_fn(
        self, params, augmented_and_preprocessed_input_batch, model_state, mode, rng, update_batch_norm,
        dropout_rate=0.1,
    ):  # fmt: skip
        assert mode is Mode.TRAIN and update_batch_norm
        self.dropout_rates.add(dropout_rate)
        return params(augmented_and_preprocessed_input_batch["inputs"]).squeeze(1), model_state

    def loss_fn(self, label_batch, logits_batch, mask_batch=None, label_smoothing=0.0):
        losses = (logits_batch - label_batch).square() * mask_batch
        return {"summed": losses.sum(), "n_valid_examples": mask_batch.sum(), "per_example": losses}

    def queue(self, seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(16, 4, generator=generator)
            yield {"inputs": x, "targets": x.sum(1), "weights": torch.ones(16, dtype=torch.bool)}


@pytest.fixture(autouse=True)
def _spec(monkeypatch):
    spec = ModuleType("algoperf.spec")
    spec.ForwardPassMode = Mode
    monkeypatch.setitem(sys.modules, "algoperf", ModuleType("algoperf"))
    monkeypatch.setitem(sys.modules, "algoperf.spec", spec)


class Loop:
    """The calls of AlgoPerf's runner, in its order."""

    def __init__(self, workload, seed=0):
        self.workload, self.queue = workload, workload.queue(seed)
        self.model, self.model_state = workload.init_model_fn(seed)
        self.state = submission.init_optimizer_state(workload, self.model, self.model_state, None, (0, 0))
        self.global_step = 0

    def step(self):
        batch = submission.data_selection(
            self.workload, self.queue, self.state, self.model, self.model_state, None, self.global_step, None
        )  # fmt: skip
        self.state, self.model, self.model_state = submission.update_params(
            workload=self.workload, current_param_container=self.model, current_params_types=None,
            model_state=self.model_state, hyperparameters=None, batch=batch, loss_type=None,
            optimizer_state=self.state, eval_results=[], global_step=self.global_step, rng=(0, 0),
        )  # fmt: skip
        self.global_step += 1

    def prepare(self):
        self.state, self.model, self.model_state = submission.prepare_for_eval(
            workload=self.workload, current_param_container=self.model, current_params_types=None,
            model_state=self.model_state, hyperparameters=None, loss_type=None, optimizer_state=self.state,
            eval_results=[], global_step=self.global_step, rng=(0, 0),
        )  # fmt: skip


def weights(loop):
    return nn.utils.parameters_to_vector(loop.model.parameters()).detach().clone()


def test_a_run_searches_first_and_learns():
    loop = Loop(Workload())
    before = weights(loop)
    loop.step()
    training = loop.state["training"]
    num_search_steps = 300 - training.auto.total_steps
    assert 15 < num_search_steps < 60
    assert training.auto.num_steps == 1 and not torch.equal(before, weights(loop))
    assert loop.workload.dropout_rates == {0.0, 0.1}  # none where the search scores
    while loop.global_step < training.auto.total_steps:
        loop.step()
    loop.prepare()
    assert (weights(loop) - torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])).abs().max() < 0.05
    with pytest.warns(UserWarning, match="stays at its last value"):
        loop.step()


def test_an_evaluation_sees_the_mean_and_the_run_goes_on_from_its_own_weights():
    plain, evaluated = Loop(Workload()), Loop(Workload())
    mean, seen = torch.zeros(5), []
    for step in range(30):
        plain.step()
        evaluated.step()
        share = (submission.RECENCY + 1) / (step + 1 + submission.RECENCY)
        mean = (1 - share) * mean + share * weights(plain)
        if step % 10 == 3:
            evaluated.prepare()
            evaluated.prepare()  # twice is as good as once
            assert torch.allclose(weights(evaluated), mean, atol=1e-6)
            seen.append(not torch.equal(weights(evaluated), weights(plain)))
    assert all(seen)
    assert torch.equal(weights(evaluated), weights(plain))


def test_a_checkpoint_that_was_saved_at_an_evaluation_resumes_bit_for_bit():
    whole = Loop(Workload())
    for _ in range(40):
        whole.step()
    whole.prepare()
    file = io.BytesIO()
    torch.save((whole.model.state_dict(), {k: entry.state_dict() for k, entry in whole.state.items()}), file)
    file.seek(0)
    model, saved = torch.load(file)
    resumed = Loop(Workload())
    resumed.model.load_state_dict(model)
    for name, entry in resumed.state.items():
        entry.load_state_dict(saved[name])
    resumed.global_step = whole.global_step
    batches = [next(whole.queue) for _ in range(20)]
    for loop in (whole, resumed):
        loop.queue = iter(batches)
        for _ in range(20):
            loop.step()
    assert torch.equal(weights(whole), weights(resumed))


def test_batch_sizes():
    assert submission.get_batch_size("mnist") == 64
    with pytest.raises(ValueError, match=r"workload_name must be one of .*mnist.*, got 'mnits'"):
        submission.get_batch_size("mnits")


def test_a_baseline_gets_its_learning_rate(monkeypatch):
    theirs = ModuleType("theirs")
    theirs.init_optimizer_state = lambda workload, model, state, hyperparameters, rng: hyperparameters
    theirs.update_params = lambda *, hyperparameters, batch: (hyperparameters.learning_rate, batch)
    theirs.data_selection = lambda queue: queue
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    monkeypatch.setitem(baseline.BASELINES, "adamw", "theirs")
    monkeypatch.setenv("ALGOPERF_BASELINE", "adamw")
    monkeypatch.setenv("ALGOPERF_LEARNING_RATE", "0.25")
    made = baseline.init_optimizer_state(None, None, None, None, None)
    assert (made.learning_rate, made.beta1) == (0.25, 0.9)
    assert baseline.update_params(hyperparameters=None, batch=3) == (0.25, 3)
    assert baseline.data_selection(7) == 7
    assert getattr(baseline, "prepare_for_eval", None) is None


def test_every_digit_is_shown_equally_often_and_distorted():
    images = torch.rand(5, 28, 28, generator=torch.Generator().manual_seed(0))
    made = list(distorted(images, 20, torch.Generator().manual_seed(1)))
    assert sorted(number for _, number in made) == [i for i in range(5) for _ in range(4)]
    assert all(image.shape == (28, 28) and not torch.equal(image, images[n]) for image, n in made)


def test_the_table(tmp_path):
    runs = [
        {"key": ["hdet", None, 1], "found": 4e-3, "search_steps": 200, "evaluations": [[800, 9.0, 0.98]]},
        {"key": ["nadamw", 1e-4, 1], "evaluations": [[1, 9.0, 0.1], [7813, 80.0, 0.9612]]},
    ]
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"runs": runs}))
    lines = command.table(path).splitlines()
    assert lines[2] == "| hdet | found: 0.004 | 1 | 1 | 1000 | 0.9800 |"
    assert lines[3] == "| nadamw | 0.0001 | 1 | 0 | never | 0.9612 |"
