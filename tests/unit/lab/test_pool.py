"""Worker processes: what they give, how many are under way, how they stop."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hdet.lab.pool import Pool, interruptible

ROOT = Path(__file__).parents[3]


def double(number):
    return 2 * number, torch.get_num_threads(), os.getpid()


def slow_if_first(number, folder):
    """The first waits for a sign of the third."""
    if number == 0:
        while not (folder / "2").exists():
            time.sleep(0.01)
    (folder / str(number)).touch()
    return number


def fail():
    raise ValueError("no such thing")


def interrupted_before_it_listens():
    """As when Ctrl-C is pressed while the worker starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    os.kill(os.getpid(), signal.SIGINT)
    before = "not heard"
    try:
        with interruptible():
            return before, "not heard"
    except KeyboardInterrupt:
        return before, "heard"


def test_results_come_with_their_places_from_processes_of_one_thread():
    with Pool(2) as pool:
        found = dict(pool.run(double, [(i,) for i in range(5)]))
        again = dict(pool.run(double, [(7,)]))
    assert {place: result[:2] for place, result in found.items()} == {i: (2 * i, 1) for i in range(5)}
    workers = {result[2] for result in found.values()}
    assert os.getpid() not in workers
    assert 1 <= len(workers) <= 2
    assert again[0][2] in workers  # they serve to the end


def test_results_come_as_they_are_done(tmp_path):
    with Pool(2) as pool:
        order = [result for _, result in pool.run(slow_if_first, [(i, tmp_path) for i in range(3)])]
    assert order[0] == 1
    assert sorted(order) == [0, 1, 2]


def test_a_stop_starts_nothing_more_and_gives_what_is_under_way():
    found = []
    with Pool(2) as pool:
        for place, _ in pool.run(double, [(i,) for i in range(50)], should_stop=lambda: bool(found)):
            found.append(place)
    assert found
    assert set(found) == {0, 1}
    with Pool(2) as pool:
        assert not list(pool.run(double, [(1,)], should_stop=lambda: True))
    answers = iter([False])  # asked before the first job; a stop comes while it is started
    with Pool(2) as pool:
        given = pool.run(double, [(1,), (2,)], should_stop=lambda: next(answers, True))
        assert [place for place, _ in given] == [0]


def test_an_error_in_a_job_is_raised_here():
    with pytest.raises(ValueError, match="no such thing"), Pool(1) as pool:
        list(pool.run(fail, [()]))


def test_a_worker_hears_ctrl_c_only_where_a_job_says_so():
    with Pool(1) as pool:
        ((_, found),) = pool.run(interrupted_before_it_listens, [()])
        assert found == ("not heard", "heard")
        assert not list(pool.run(interrupted_before_it_listens, [()]))  # no other job after that


SCRIPT = """
import os, signal, sys
from hdet.lab.pool import Pool
from hdet.lab.pool import stop_on_signal
from tests.unit.lab.test_pool import wait_for_ctrl_c

if __name__ == "__main__":
    with stop_on_signal() as should_stop, Pool(2) as pool:
        print("ready", flush=True)
        jobs = [()] * 9
        print(sorted(result for _, result in pool.run(wait_for_ctrl_c, jobs, should_stop=should_stop)))
"""


def wait_for_ctrl_c():
    try:
        with interruptible():
            Path(f"{os.getpid()}.running").touch()
            while True:
                time.sleep(0.01)
    except KeyboardInterrupt:
        return "stopped"


@pytest.mark.parametrize("is_running", [True, False])
def test_ctrl_c_in_a_terminal_ends_jobs_and_pool_even_while_workers_start(tmp_path, is_running):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal gives
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while is_running and len(list(tmp_path.glob("*.running"))) < 2 and process.poll() is None:
            time.sleep(0.05)
        time.sleep(0.5)  # enough to start a worker, but not for its imports
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:  # nothing is left behind, or other tests would hear of it
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert (process.returncode, err) == (0, "")
    # A job that has not begun by then is left.
    assert out in [f"{['stopped'] * count}\n" for count in ([2] if is_running else [0, 1, 2])]
