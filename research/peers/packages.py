"""Schedule-free, Prodigy, D-Adaptation, DoG and Mechanic: their authors' packages, by their advice."""

from __future__ import annotations

from functools import partial

from hdet.lab.train.runner import evaluate
from hdet.method.recipe import one_cycle
from research.peers.base import Job, Method, Trained, descend, load_package

__all__ = ["METHODS", "first_estimate"]


def first_estimate(start_lr: float) -> float:
    """``d0`` of Prodigy and D-Adaptation for a user who would start from this learning rate.

    It must lie well below the right learning rate and then grows by itself: a thousandth of the start leaves
    room for a start that is far too high. Never below the packages' default, 1e-6, nor above 1e-4, the
    largest value that Prodigy's README advises.

    >>> first_estimate(3e-2), first_estimate(1e-5), first_estimate(10.0)
    (3e-05, 1e-06, 0.0001)
    """
    return min(1e-4, max(1e-6, start_lr * 1e-3))


def _schedulefree(job: Job) -> Trained:
    package = load_package("schedulefree")
    model = job.build_model()
    warmup = round(0.1 * job.steps)
    parameters = job.parameters(model)
    if job.optimizer_kind == "sgd":
        # The README: 10 to 50 times a classical learning rate.
        optimizer = package.SGDScheduleFree(parameters, lr=10 * job.start_lr, warmup_steps=warmup)
    else:
        optimizer = package.AdamWScheduleFree(parameters, lr=job.start_lr, warmup_steps=warmup)
    optimizer.train()
    descend(job, model, optimizer, job.batches(), job.steps)
    optimizer.eval()  # the averaged weights
    return Trained(evaluate(job.task, model))


def _prodigy(job: Job) -> Trained:
    model = job.build_model()
    optimizer = load_package("prodigyopt").Prodigy(
        job.parameters(model), lr=1.0, d0=first_estimate(job.start_lr)
    )
    # The README advises an anneal without restarts, and warns of warmup.
    shape = partial(one_cycle, total_steps=job.steps, warmup=0.0, anneal="linear")
    descend(job, model, optimizer, job.batches(), job.steps, shape=shape)
    return Trained(evaluate(job.task, model), optimizer.param_groups[0]["d"])


def _dadaptation(job: Job) -> Trained:
    package = load_package("dadaptation")
    model = job.build_model()
    parameters, d0 = job.parameters(model), first_estimate(job.start_lr)
    if job.optimizer_kind == "sgd":
        optimizer = package.DAdaptSGD(parameters, lr=1.0, momentum=job.config().momentum, d0=d0)
    else:
        optimizer = package.DAdaptAdam(parameters, lr=1.0, d0=d0)
    # The README: the schedule that one would use anyway.
    shape = partial(one_cycle, total_steps=job.steps, anneal="linear")
    descend(job, model, optimizer, job.batches(), job.steps, shape=shape)
    group = optimizer.param_groups[0]
    return Trained(evaluate(job.task, model), group["d"] / group.get("g0_norm", 1.0))


def _dog(job: Job) -> Trained:
    package = load_package("dog")
    model = job.build_model()
    optimizer = package.DoG(job.parameters(model))
    averager = package.PolynomialDecayAverager(model)  # the README: crucial, as the step size never decays
    descend(job, model, optimizer, job.batches(), job.steps, after_step=averager.step)
    return Trained(evaluate(job.task, averager.averaged_model), float(optimizer.param_groups[0]["eta"][0]))


def _mechanic(job: Job, s_init: float = 1e-8) -> Trained:
    package = load_package("mechanic_pytorch")
    model = job.build_model()
    base = job.optimizer(model, 1.0)
    optimizer = package.mechanize(type(base), s_init=s_init)(base.param_groups)
    # The README: the schedule that one would use anyway, with a peak of 1.
    shape = partial(one_cycle, total_steps=job.steps, anneal="linear")
    descend(job, model, optimizer, job.batches(), job.steps, shape=shape)
    return Trained(evaluate(job.task, model), float(optimizer.state["_mechanic"]["s"].sum()))


METHODS = (
    Method(
        name="schedulefree",
        description="Schedule-Free AdamW at the start LR, or SGD at ten times it; 10 % warmup, no anneal",
        run=_schedulefree,
        package="schedulefree",
    ),
    Method(
        name="prodigy",
        description="Prodigy (Adam for either optimizer), lr 1, d0 = start/1000 within 1e-6 to 1e-4; no "
        "warmup, linear anneal",
        run=_prodigy,
        package="prodigyopt",
    ),
    Method(
        name="dadaptation",
        description="D-Adaptation of Adam or SGD, lr 1, d0 = start/1000 within 1e-6 to 1e-4; 10 % warmup, "
        "linear anneal",
        run=_dadaptation,
        package="dadaptation",
    ),
    Method(
        name="dog",
        description="DoG (an SGD for either optimizer), which needs no LR; no schedule, "
        "polynomial-decay average",
        run=_dog,
        package="dog",
        uses_start=False,
    ),
    Method(
        name="mechanic",
        description="Mechanic over AdamW or SGD at lr 1, as its authors advise; 10 % warmup, linear anneal",
        run=_mechanic,
        package="mechanic_pytorch",
        uses_start=False,
    ),
    Method(
        name="mechanic_1e-6",
        description="as mechanic, with s_init 1e-6, the default of its authors in optax, instead of 1e-8",
        run=partial(_mechanic, s_init=1e-6),
        package="mechanic_pytorch",
        uses_start=False,
        is_default=False,
    ),
)
