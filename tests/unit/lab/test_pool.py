"""Worker processes: what they give, how many are under way, how they stop."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hdet.lab.pool import Pool

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


def wait_forever(folder):
    (folder / f"{os.getpid()}.running").touch()
    os.kill(os.getpid(), signal.SIGINT)  # as a terminal sends it to all
    time.sleep(600)


def test_results_come_with_their_places_from_processes_of_one_thread():
    with Pool(2) as pool:
        found = dict(pool.run(double, [(i,) for i in range(5)]))
        again = dict(pool.run(double, [(7,)]))
    assert {place: result[:2] for place, result in found.items()} == {i: (2 * i, 1) for i in range(5)}
    workers = {result[2] for result in found.values()}
    assert os.getpid() not in workers
    assert 1 <= len(workers) <= 2
    assert again[0][2] in workers  # they serve to the end


def test_a_job_that_waits_for_a_later_one_does_not_hold_it_up(tmp_path):
    with Pool(2) as pool:
        order = [result for _, result in pool.run(slow_if_first, [(i, tmp_path) for i in range(3)])]
    assert sorted(order) == [0, 1, 2]


def test_a_stop_ends_what_is_under_way(tmp_path):
    with Pool(2) as pool:
        done = pool.run(
            wait_forever, [(tmp_path,)] * 4, should_stop=lambda: len(list(tmp_path.iterdir())) == 2
        )
        assert not list(done)
    with Pool(2) as pool:
        assert not list(pool.run(double, [(1,)], should_stop=lambda: True))


def test_an_error_in_a_job_is_raised_here():
    with pytest.raises(ValueError, match="no such thing"), Pool(1) as pool:
        list(pool.run(fail, [()]))


SCRIPT = """
from pathlib import Path
from hdet.lab.pool import Pool, stop_on_signal
from tests.unit.lab.test_pool import wait_forever

if __name__ == "__main__":
    with stop_on_signal() as should_stop, Pool(2) as pool:
        print("ready", flush=True)
        print(list(pool.run(wait_forever, [(Path(),)] * 9, should_stop=should_stop)))
"""


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
    assert (process.returncode, out, err) == (0, "[]\n", "")
