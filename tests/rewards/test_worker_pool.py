"""The worker pool survives crashes, hangs and failed starts of its processes."""

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from server_process import is_running, wait_until
from user_errors import raises_user_error

from flow_grpo.rewards.failure import Failed
from flow_grpo.rewards.workers import pool as pool_module
from flow_grpo.rewards.workers.pool import PoolClosed, WorkerPool, WorkerStartError, WorkerTimedOut


def test_the_workers_run_without_torch(stub_path: None) -> None:
    with stub_pool("modules_after_rapidocr") as pool:
        [modules] = pool.map([""])
    assert "rapidocr" in modules
    assert "torch" not in modules


# The pool, with an engine that obeys the commands in its jobs

STUB = """
    import os, signal, struct, subprocess, sys, time
    from pathlib import Path

    class NoText(Exception):
        def __str__(self):
            return None

    def obey():
        def engine(job):
            order, _, argument = job.partition(" ")
            if order == "die":
                with open(argument, "a") as tries:
                    tries.write("x")
                os.kill(os.getpid(), signal.SIGKILL)
            if order == "die_once" and not Path(argument).exists():
                Path(argument).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if order == "hang":
                Path(argument).touch()
                time.sleep(1000)
            if order == "touch":
                Path(argument).touch()
            if order == "await":
                while not Path(argument).exists():
                    time.sleep(0.01)
            if order == "raise":
                raise ValueError(argument)
            if order == "fork":
                os.fork()
            if order == "daemons":  # orphaned, and one of them in its own session
                start = "import os, time; open('{}', 'w').write(str(os.getpid())); time.sleep(1000)"
                for n in range(2):
                    command = [sys.executable, "-c", start.format(f"{argument}{n}")]
                    if os.fork() == 0:
                        subprocess.Popen(command, start_new_session=n == 0)
                        os._exit(0)
                while not Path(f"{argument}_die").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            if order == "stop_half_way":
                length = struct.pack("!i", 1_000_000)
                os.write(int(sys.argv[1]), length + b"half a message")
                time.sleep(1000)
            if order == "garble":
                os.write(int(sys.argv[1]), struct.pack("!i", 4) + b"junk")
            if order == "signal_group":  # as tools do to end a process that they started
                child = subprocess.Popen(["sleep", "1000"])
                os.killpg(os.getpgid(child.pid), signal.SIGKILL)
            if order == "raise_without_text":
                raise NoText
            if order == "garble_from_child":
                write = f"import os; os.write({sys.argv[1]}, b'x' * 9)"
                subprocess.call([sys.executable, "-c", write], close_fds=False)
            return f"{len(argument)} read"
        return engine

    def modules_after_rapidocr():
        from flow_grpo.rewards.scorers.ocr import rapidocr_reader
        rapidocr_reader("auto")
        return lambda job: list(sys.modules)

    def broken():
        raise FileNotFoundError("no such model")

    def need(file):
        if not Path(file).exists():
            raise FileNotFoundError(file)
        return obey()

    def only_one(file):
        open(file, "x")
        return obey()

    def die_at_start(times):
        starts = Path(__file__).with_name("starts")
        with starts.open("a") as file:
            file.write("x")
        if len(starts.read_text()) <= times:
            os._exit(3)
        return obey()
"""


@pytest.fixture
def stub_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stub_engine.py").write_text(textwrap.dedent(STUB))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def stub_pool(
    engine: str = "obey", *, workers: int = 1, timeout: float = 30.0, **options: object
) -> WorkerPool:
    return WorkerPool(f"stub_engine:{engine}", options, workers=workers, timeout=timeout)


class Payload:
    """A payload that can be weakly referenced."""


@pytest.mark.usefixtures("stub_path")
class TestPool:
    def test_starts_no_process_before_its_first_use(self) -> None:
        with stub_pool() as pool:
            assert pool.pids() == []
            assert pool.map([]) == []
            assert pool.pids() == []
            assert pool.map(["read x"]) == ["1 read"]
            assert len(pool.pids()) == 1

    def test_keeps_the_order_and_marks_failures(self) -> None:
        jobs = ["read " + "x" * n for n in range(40)]
        jobs[7] = "raise it is corrupt"
        with stub_pool(workers=2) as pool:
            results = pool.map(jobs)
        assert results[7].reason == "ValueError: it is corrupt"
        del results[7]
        assert results == [f"{n} read" for n in range(40) if n != 7]

    def test_a_slow_job_does_not_delay_the_last_ones(self, tmp_path: Path) -> None:
        last = tmp_path / "last"
        jobs = ["read x"] * 38 + [f"await {last}", f"touch {last}"]
        with stub_pool(workers=2, timeout=10.0) as pool:
            results = pool.map(jobs)
        assert results == ["1 read"] * 38 + [f"{len(str(last))} read"] * 2

    def test_retries_a_job_after_its_worker_died(self, tmp_path: Path) -> None:
        marker = tmp_path / "tried"
        with stub_pool() as pool:
            pool.map(["read x"])
            before = pool.pids()
            results = pool.map([f"die_once {marker}"] + ["read x"] * 20)
            assert pool.pids() != before
        assert marker.exists()
        assert results == [f"{len(str(marker))} read"] + ["1 read"] * 20

    def test_fails_only_the_job_that_two_workers_died_on(self, tmp_path: Path) -> None:
        tries = tmp_path / "tries"
        jobs = ["read x"] * 20
        jobs[3] = f"die {tries}"
        with stub_pool(workers=2) as pool:
            results = pool.map(jobs)
            assert pool.map(["read xy"]) == ["2 read"]
        assert isinstance(results.pop(3), Failed)
        assert results == ["1 read"] * 19
        assert tries.read_text() == "xx"

    def test_replaces_a_worker_killed_while_idle(self) -> None:
        with stub_pool() as pool:
            for _ in range(3):
                assert pool.map(["read x"]) == ["1 read"]
                os.kill(pool.pids()[0], signal.SIGKILL)

    def test_fails_only_the_job_that_hangs(self, tmp_path: Path) -> None:
        jobs = ["read x"] * 20
        jobs[3] = f"hang {tmp_path / 'hanging'}"
        with stub_pool(timeout=2.0) as pool:
            pool.map(["read x"])
            results = pool.map(jobs)
        assert isinstance(hung := results.pop(3), WorkerTimedOut)
        assert "2 s" in hung.reason
        assert results == ["1 read"] * 19

    def test_does_not_wait_for_a_stopped_worker_to_take_its_job(self) -> None:
        large = "read " + "x" * 10_000_000  # more than a pipe holds
        with stub_pool(timeout=2.0) as pool:
            pool.map(["read x"])
            [worker] = psutil.Process(pool.pids()[0]).children()
            worker.suspend()
            assert pool.map([large]) == ["10000000 read"]

    @pytest.mark.parametrize("end", ["die", "close"])
    def test_child_processes_end_with_their_worker(self, tmp_path: Path, end: str) -> None:
        """Including a daemon in its own session whose parent has exited."""
        files = [tmp_path / f"pid{n}" for n in range(2)]
        die = tmp_path / "pid_die"
        with stub_pool(timeout=1000.0) as pool, ThreadPoolExecutor(1) as thread:
            result = thread.submit(pool.map, [f"daemons {tmp_path / 'pid'}"])
            wait_until(lambda: all(file.exists() and file.read_text() for file in files))
            pids = [int(file.read_text()) for file in files]
            assert all(is_running(pid) for pid in pids)
            if end == "die":
                die.touch()
                assert isinstance(result.result()[0], Failed)
            else:
                pool.close()
                assert isinstance(result.exception(), PoolClosed)
            assert not any(is_running(pid) for pid in pids)

    def test_a_job_that_forks_has_one_result(self) -> None:
        jobs = ["fork", "read x", "read xx", "fork a", "read xxx", "read xxxx"]
        expected = ["0 read", "1 read", "2 read", "1 read", "3 read", "4 read"]
        with stub_pool() as pool:
            for job, result in zip(jobs, expected, strict=True):  # one request at a time
                assert pool.map([job]) == [result]
            assert pool.map(jobs) == expected

    def test_an_incomplete_reply_times_out(self) -> None:
        with stub_pool(timeout=2.0) as pool:
            half, whole = pool.map(["stop_half_way", "read x"])
            assert isinstance(half, WorkerTimedOut)
            assert whole == "1 read"

    def test_an_unreadable_reply_fails_its_own_job(self, tmp_path: Path) -> None:
        with stub_pool() as pool:
            bad, good = pool.map(["garble", "read x"])
            assert isinstance(bad, Failed)
            assert good == "1 read"

    def test_a_child_process_cannot_write_to_the_pipe(self) -> None:
        with stub_pool() as pool:
            assert pool.map(["garble_from_child", "read x"]) == ["0 read", "1 read"]

    def test_a_signal_to_the_group_of_a_worker_does_not_reach_the_trainer(self) -> None:
        with stub_pool() as pool:
            pool.map(["read x"])
            [worker] = psutil.Process(pool.pids()[0]).children()
            assert os.getpgid(worker.pid) == worker.pid != os.getpgid(0)  # or pytest would die
            killed, other = pool.map(["signal_group", "read x"])
        assert isinstance(killed, Failed)
        assert other == "1 read"

    def test_an_exception_whose_str_fails_is_reported_by_type(self) -> None:
        with stub_pool() as pool:
            assert pool.map(["raise_without_text"])[0].reason.startswith("NoText: ")

    def test_serves_several_threads(self) -> None:
        def call(n: int) -> list[str]:
            return pool.map([f"read {'x' * n}"] * 30)

        with stub_pool(workers=2) as pool, ThreadPoolExecutor(8) as threads:
            assert list(threads.map(call, range(8))) == [[f"{n} read"] * 30 for n in range(8)]

    def test_reports_why_an_engine_cannot_be_built(self) -> None:
        with stub_pool("broken", workers=2) as pool:
            for _ in range(2):
                with raises_user_error("FileNotFoundError: no such model"):
                    pool.map(["read x"] * 20)

    def test_restarts_a_worker_that_died_while_starting(self, tmp_path: Path) -> None:
        with stub_pool("die_at_start", times=2) as pool:
            assert pool.map(["read x"]) == ["1 read"]
        assert (tmp_path / "starts").read_text() == "xxx"

    def test_gives_up_on_workers_that_never_start(self, tmp_path: Path) -> None:
        with stub_pool("die_at_start", times=99) as pool, raises_user_error("3 worker processes"):
            pool.map(["read x"] * 20)
        assert (tmp_path / "starts").read_text() == "xxx"

    def test_keeps_trying_until_workers_start(self, tmp_path: Path) -> None:
        model = tmp_path / "model"
        with stub_pool("need", workers=2, file=str(model)) as pool:
            for _ in range(2):
                with raises_user_error("FileNotFoundError", kind=WorkerStartError):
                    pool.map(["read x"] * 20)
                assert str(model) in pool.unavailable_reason
            model.touch()
            wait_until(lambda: not pool.unavailable_reason)
            assert pool.map(["read x"] * 20) == ["1 read"] * 20

    def test_keeps_trying_after_three_died_while_starting(self, tmp_path: Path) -> None:
        with stub_pool("die_at_start", times=4) as pool:
            with raises_user_error("3 worker processes", kind=WorkerStartError):
                pool.map(["read x"])
            wait_until(lambda: not pool.unavailable_reason)
            assert len(pool.pids()) == 1  # started without a call of `map`
            assert pool.map(["read x"]) == ["1 read"]
        assert (tmp_path / "starts").read_text() == "xxxxx"

    def test_releases_payloads_after_a_failed_start(self) -> None:
        payloads: weakref.WeakSet[Payload] = weakref.WeakSet()
        with stub_pool("broken") as pool:
            for _ in range(5):
                payload = Payload()
                payloads.add(payload)
                with raises_user_error("no such model", kind=WorkerStartError):
                    pool.map([payload])
            del payload
            gc.collect()
            assert len(payloads) <= 1  # the thread may still hold the last

    def test_restart_delays_double_with_each_round_of_all_workers(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pool_module, "MIN_RESTART_DELAY", 0.125)
        monkeypatch.setattr(logging.getLogger("flow_grpo"), "propagate", True)
        with stub_pool("broken", workers=4) as pool:
            with pytest.raises(WorkerStartError):
                pool.map(["read x"] * 4)
            wait_until(lambda: len(caplog.messages) >= 2)
        delays = [message.rpartition(" in ")[2] for message in caplog.messages]
        assert delays[:2] == ["0.25 s", "0.5 s"]

    def test_other_workers_take_the_jobs_of_one_that_cannot_start(self, tmp_path: Path) -> None:
        with stub_pool("only_one", workers=2, file=str(tmp_path / "taken")) as pool:
            assert pool.map(["read x"] * 20) == ["1 read"] * 20
            assert not pool.unavailable_reason

    def test_closing_ends_processes_and_pending_calls(self, tmp_path: Path) -> None:
        pool = stub_pool()
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(pool.map, [f"hang {tmp_path / 'hanging'}"] * 20)
            wait_until((tmp_path / "hanging").exists)
            pids = pool.pids()
            pool.close()
            with pytest.raises(PoolClosed):
                waiting.result(timeout=60)
        assert len(pids) == 1
        assert not is_running(pids[0])
        with pytest.raises(PoolClosed):
            pool.map(["read x"])

    def test_workers_do_not_outlive_a_killed_parent(self, tmp_path: Path) -> None:
        # There is no `__main__` guard: workers must not import the script.
        script = tmp_path / "trainer.py"
        script.write_text(
            textwrap.dedent(f"""
            import threading, time
            from flow_grpo.rewards.workers.pool import WorkerPool

            pool = WorkerPool("stub_engine:obey", {{}}, workers=2, timeout=1000)
            jobs = ["hang {tmp_path / "a"}", "hang {tmp_path / "b"}"]
            threading.Thread(target=pool.map, args=(jobs,), daemon=True).start()
            while len(pool.pids()) < 2:
                time.sleep(0.01)
            print(*pool.pids(), flush=True)
            time.sleep(1000)
            """)
        )
        parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        wait_until(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists())
        assert [is_running(pid) for pid in pids] == [True, True]
        parent.kill()
        parent.communicate()
        wait_until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("flow_grpo.rewards.workers.worker", "{fd} {parent}"),
        ("reward_server", "--rewards jpeg_compressibility --fd {fd} --parent-pid {parent}"),
    ],
)
def test_a_process_whose_parent_ended_while_it_started_exits(module: str, arguments: str) -> None:
    """Its parent is not the one that it is told; otherwise it would wait for work."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        descriptor = listener.fileno()
        command = arguments.format(fd=descriptor, parent=os.getppid()).split()
        done = subprocess.run(
            [sys.executable, "-m", module, *command], pass_fds=[descriptor], timeout=60
        )
    assert done.returncode == 0
