"""Problems to train on, and the machinery that trains on them from the command line."""

from hdet.experiments.task import Task, batch_generator, load_task

__all__ = ["Task", "batch_generator", "load_task"]
