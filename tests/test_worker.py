"""Workers: what they do in order, and that a process can end while one is still at work."""

import subprocess
import sys
import textwrap
import threading

import pytest

from deepreduce.step.worker import Worker

# The lane is gone before its last job is let go of, and main leaves at that moment.
LEAVES_WHILE_A_LANE_WORKS = """
    import atexit, threading, time
    from deepreduce.step.worker import Worker

    leaving = threading.Event()

    class Slow:
        def __del__(self):
            leaving.wait()
            time.sleep(0.2)  # for the thread of a worker that nobody waits for, this is long enough to be cut off
            print("closed")

    def job(kept, slow=Slow()):
        del kept[:]  # the lane itself

    atexit.register(leaving.set)
    kept = [Worker("test")]
    submit = kept[0].submit
    done = submit(lambda job=job: job(kept))
    del job, submit
    done.result()
"""


def test_jobs_run_one_after_another_and_errors_come_by_their_future():
    lane, seen = Worker("test"), []
    futures = [lane.submit(lambda number=number: seen.append(number)) for number in range(100)]
    failed = lane.submit(lambda: 1 // 0)
    assert [future.result() for future in futures] == [None] * 100
    assert seen == list(range(100))
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert lane.submit(lambda: "goes on").result() == "goes on"


def test_a_process_ends_after_what_its_lanes_were_about_to_close():
    script = textwrap.dedent(LEAVES_WHILE_A_LANE_WORKS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


def test_a_cancelled_job_is_left_out_and_the_worker_goes_on():
    worker, started, go_on = Worker("test"), threading.Event(), threading.Event()
    first = worker.submit(lambda: (started.set(), go_on.wait()))
    started.wait()
    cancelled = worker.submit(lambda: pytest.fail("it was cancelled"))
    assert cancelled.cancel()
    go_on.set()
    first.result()
    assert worker.submit(lambda: "goes on").result() == "goes on"


def test_a_closed_worker_ends_its_thread_and_may_start_another():
    worker = Worker("test of closing")
    worker.submit(int).result()
    worker.close()
    assert "test of closing" not in {thread.name for thread in threading.enumerate()}
    assert worker.submit(lambda: 3).result() == 3
