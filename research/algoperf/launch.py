"""Call AlgoPerf's ``submission_runner`` on its mnist workload, with a budget in steps instead of seconds.

    python -m research.algoperf.launch --workload=mnist ...

It takes the runner's flags and changes two of the workload's numbers: there is no limit of time, and
evaluations, whose time does not count, come more often. Seconds say little where others use the machine too.
Both folders, the clone and this repository, have to be on PYTHONPATH, and the clone is where to call it from.
"""

from __future__ import annotations

SECONDS_BETWEEN_EVALUATIONS = 4


def main() -> None:
    """The command."""
    import submission_runner  # pyright: ignore[reportMissingImports]
    from absl import app
    from algoperf.workloads.mnist.workload import (  # pyright: ignore[reportMissingImports]
        BaseMnistWorkload,
    )

    BaseMnistWorkload.max_allowed_runtime_sec = property(lambda _: 10**9)
    BaseMnistWorkload.eval_period_time_sec = property(lambda _: SECONDS_BETWEEN_EVALUATIONS)
    app.run(submission_runner.main)


if __name__ == "__main__":
    main()
