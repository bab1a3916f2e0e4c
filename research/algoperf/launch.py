"""Call AlgoPerf's ``submission_runner`` on its mnist workload, with steps in the place of seconds.

    python -m research.algoperf.launch --workload=mnist ...

It takes the runner's flags and changes two of the workload's numbers. There is no limit of time, so that
``--max_global_steps`` ends a run. Evaluations, whose time does not count, come every so many steps, not every
ten seconds. So a seed gives the same result on a fast machine and on one that others use too. The clone and
this repository have to be on PYTHONPATH, and the clone is where to call it from.
"""

from __future__ import annotations

import math

__all__ = ["STEPS_BETWEEN_EVALUATIONS"]

STEPS_BETWEEN_EVALUATIONS = 250


class _Period:
    """Seconds between evaluations. The runner asks once before the run, for its log, and after every step."""

    def __init__(self) -> None:
        self._num_asked = -1

    def __get__(self, workload: object, owner: type) -> float:
        self._num_asked += 1
        is_due = self._num_asked > 0 and self._num_asked % STEPS_BETWEEN_EVALUATIONS == 0
        return 0.0 if is_due else math.inf


def main() -> None:
    """The command."""
    import submission_runner  # pyright: ignore[reportMissingImports]
    from absl import app
    from algoperf.workloads.mnist.workload import (  # pyright: ignore[reportMissingImports]
        BaseMnistWorkload,
    )

    BaseMnistWorkload.max_allowed_runtime_sec = 10**9
    BaseMnistWorkload.eval_period_time_sec = _Period()
    app.run(submission_runner.main)


if __name__ == "__main__":
    main()
