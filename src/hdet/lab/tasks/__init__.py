"""Problems to train on: those that are built in, and the class that your own derives from."""

from hdet.lab.tasks.task import Task, batch_generator, load_task

__all__ = ["Task", "batch_generator", "load_task"]
