"""Drivers of the tools that bench_peers.py compares peerload with. They import nothing of peerload: each runs in an environment of its own.

`python peer_drivers.py NAME DIRECTORY WORKERS SLOTS` starts a tool with so many workers, prints the pids of its processes as a line
of JSON, and does what each line of stdin says: ``batch N`` (N times /bin/true, to the end), or ``submit`` with a list of command
lines. Each is answered by a line: 0, or when the submission began, in ns since 1970. It ends what it has started when stdin ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

TRUE = "/bin/true"
LOOK_S = 0.005
PATIENCE_S = 120.0


def wait_until(predicate: Any) -> None:
    """Return as soon as it is true; SystemExit after PATIENCE_S."""
    until_s = time.monotonic() + PATIENCE_S
    while not predicate():
        if time.monotonic() > until_s:
            raise SystemExit("it does not answer")
        time.sleep(LOOK_S)


def run(argv: list[str]) -> int:
    """The task of those tools that call functions."""
    return subprocess.run(argv, capture_output=True, check=False).returncode


class Tool:
    """One tool that runs. pids: of what it consists, beside this process."""

    def __init__(self, directory: Path, workers: int, slots: int) -> None:
        self.directory, self.workers, self.slots = directory, workers, slots
        self.children: list[subprocess.Popen[bytes]] = []
        self.pids: list[int] = []
        self.log = (directory / "log").open("ab")
        self.start()
        self.pids += [child.pid for child in self.children]

    def child(self, *words: str, **variables: str) -> None:
        """Start a process of the tool."""
        environment = {**os.environ, **variables}
        self.children.append(
            subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=environment)
        )

    def module(self, name: str, *words: str, **variables: str) -> None:
        """Start a process of the tool, by ``python -m``."""
        self.child(sys.executable, "-m", name, *words, **variables)

    def start(self) -> None:
        """Start the tool; it can run tasks when this returns."""

    def batch(self, count: int) -> None:
        """Run /bin/true so often, and return when all have ended."""
        raise NotImplementedError

    def submit(self, argv: list[str]) -> None:
        """Hand one task over."""
        raise NotImplementedError

    def close(self) -> None:
        """End the tool."""
        for child in self.children:
            child.terminate()
        for child in self.children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class TaskSpooler(Tool):
    """One server for each user; one machine only."""

    def _tsp(self, *words: str) -> str:
        return subprocess.run(["tsp", *words], capture_output=True, text=True, check=False).stdout

    def start(self) -> None:
        """See `Tool`."""
        os.environ |= {
            "TS_SOCKET": str(self.directory / "s"),
            "TMPDIR": str(self.directory),
            "TS_MAXFINISHED": "100000",
        }
        self._tsp("-S", str(self.slots))
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.fsencode(self.directory / "s") in (entry / "environ").read_bytes():
                    words = (entry / "cmdline").read_bytes()
                    self.pids += [int(entry.name)] * words.startswith(b"tsp")

    def batch(self, count: int) -> None:
        """See `Tool`. There are no arrays: one command line a task."""
        self._tsp("-C")
        script = f"i=0; while [ $i -lt {count} ]; do tsp {TRUE} >/dev/null; i=$((i+1)); done; tsp -w"
        subprocess.run(["sh", "-c", script], stdout=subprocess.DEVNULL, check=False)
        wait_until(
            lambda: not any(line.split()[1:2] in (["queued"], ["running"]) for line in self._tsp("-l").splitlines())
        )

    def close(self) -> None:
        """See `Tool`."""
        self._tsp("-K")


class Parallel(Tool):
    """GNU parallel, which has no server."""

    def batch(self, count: int) -> None:
        """See `Tool`."""
        (self.directory / ".parallel").mkdir(exist_ok=True)
        (self.directory / ".parallel" / "will-cite").touch()
        numbers = "".join(f"{number}\n" for number in range(count)).encode()
        words = ["parallel", f"-j{self.slots}", "-n1", TRUE, "{}"]
        environment = {**os.environ, "HOME": str(self.directory)}
        subprocess.run(words, input=numbers, env=environment, stdout=self.log, stderr=self.log, check=True)


class HyperQueue(Tool):
    """Its wheel: server and workers are threads of this process, without a journal."""

    def start(self) -> None:
        """See `Tool`."""
        import hyperqueue.client as its_client
        from hyperqueue import Job
        from hyperqueue.cluster import LocalCluster, WorkerConfig

        os.environ.setdefault("RUST_LOG", "error")
        os.chdir(self.directory)
        its_client.create_progress_callback = lambda: lambda _jobs: None
        self._job = Job
        self._cluster = LocalCluster(server_dir=str(self.directory / "server"))
        for _ in range(self.workers):
            self._cluster.start_worker(WorkerConfig(cores=self.slots))
        self._client = its_client.Client(server_dir=str(self.directory / "server"))
        self._batches = 0

    def batch(self, count: int) -> None:
        """See `Tool`. The client asks once a second whether a job has ended; one more task, after all others, says so at once."""
        self._batches += 1
        place = self.directory / f"batch{self._batches}"
        place.mkdir()
        os.chdir(place)
        job = self._job(max_fails=None)
        for _ in range(count):
            job.program([TRUE])
        job.program(["touch", str(place / "over")], stdout=None, stderr=None, deps=list(job.tasks))
        submitted = self._client.submit(job)
        wait_until((place / "over").exists)
        self._client.wait_for_jobs([submitted])
        self._client.forget(submitted)

    def submit(self, argv: list[str]) -> None:
        """See `Tool`."""
        job = self._job()
        job.program(argv, stdout=None, stderr=None)
        self._client.submit(job)

    def close(self) -> None:
        """See `Tool`."""
        self._cluster.stop()


class Dask(Tool):
    """A scheduler and workers, whose tasks are functions."""

    def start(self) -> None:
        """See `Tool`."""
        from distributed import Client

        address = self.directory / "scheduler.json"
        self.module(
            "distributed.cli.dask_scheduler",
            "--host=127.0.0.1",
            "--port=0",
            "--no-dashboard",
            f"--scheduler-file={address}",
        )
        wait_until(address.exists)
        for _ in range(self.workers):
            words = ("--nthreads", str(self.slots), "--nworkers=1", "--no-dashboard", "--host=127.0.0.1")
            places = (f"--scheduler-file={address}", f"--local-directory={self.directory}")
            self.module("distributed.cli.dask_worker", *words, *places)
        self._client = Client(scheduler_file=str(address), timeout=PATIENCE_S)
        self._client.wait_for_workers(self.workers, timeout=PATIENCE_S)
        self._kept: list[Any] = []

    def batch(self, count: int) -> None:
        """See `Tool`."""
        self._client.gather(self._client.map(run, [[TRUE]] * count, pure=False))

    def submit(self, argv: list[str]) -> None:
        """See `Tool`."""
        self._kept.append(self._client.submit(run, argv, pure=False))

    def close(self) -> None:
        """See `Tool`."""
        self._kept.clear()
        self._client.close()
        super().close()


class Ray(Tool):
    """A head on this machine, whose tasks are functions."""

    def start(self) -> None:
        """See `Tool`."""
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        import ray

        self._ray = ray
        ray.init(
            num_cpus=self.slots,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            logging_level="error",
        )
        self._run = ray.remote(num_cpus=1)(run)
        self.batch(2 * self.slots)

    def batch(self, count: int) -> None:
        """See `Tool`."""
        self._ray.get([self._run.remote([TRUE]) for _ in range(count)])

    def close(self) -> None:
        """See `Tool`."""
        self._ray.shutdown()


class Celery(Tool):
    """Celery with redis as broker and for results, as both are when they are installed."""

    def start(self) -> None:
        """See `Tool`."""
        url = os.environ["CELERY_URL"] = f"redis+socket://{self.directory}/redis"
        place = ("--unixsocket", f"{self.directory}/redis", "--dir", str(self.directory))
        self.child("redis-server", "--port", "0", *place)
        wait_until((self.directory / "redis").exists)
        app = celery_app(url)
        self._run = app.tasks["run"]
        words = ("-A", "peer_drivers:APP", "worker", "-c", str(self.slots), "--loglevel=error")
        self.module("celery", *words, PYTHONPATH=str(Path(__file__).parent))
        wait_until(lambda: app.control.ping(timeout=0.5))

    def batch(self, count: int) -> None:
        """See `Tool`."""
        from celery import group

        answer = group(self._run.s([TRUE]) for _ in range(count)).apply_async()
        answer.join(interval=LOOK_S)
        answer.forget()


class Jobd(Tool):
    """A broker and a worker. systemd-run is hidden from it, since nobody has a session with systemd here."""

    def start(self) -> None:
        """See `Tool`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        (self.directory / "projects.yaml").write_text("projects: {}\n")
        places = {f"JOBD_{name}_DIR": str(self.directory) for name in ("CONFIG", "LOGS", "STATE")}
        places |= {"JOBD_DB_URL": f"sqlite:///{self.directory}/jobd.db", "JOBD_PORT": str(port), "JOBD_URL": self._url}
        os.environ |= places | {"JOBD_ALLOW_NO_AUTH": "1", "PATH": str(Path(sys.executable).parent)}
        self.child("jobd")
        wait_until(lambda: self._told() is not None)
        self.child("jobd-worker", JOBD_WORKER_MAX_CONCURRENT_JOBS=str(self.slots))

    def _told(self, count: int = 1) -> list[dict[str, Any]] | None:
        try:
            with urllib.request.urlopen(f"{self._url}/jobs?limit={count}", timeout=10) as answer:
                return list(json.load(answer))
        except OSError:
            return None

    def batch(self, count: int) -> None:
        """See `Tool`."""
        words = ["job", "submit", "-p", "bench", "--count", str(count), "--cwd", "/tmp", TRUE]
        subprocess.run(words, stdout=self.log, stderr=self.log, check=True)
        over = {"completed", "failed"}
        wait_until(lambda: {job["state"] for job in self._told(count) or [{"state": ""}]} <= over)


def celery_app(url: str) -> Any:
    """The application of Celery, for its worker and for who submits."""
    import celery

    app = celery.Celery("peer_drivers", broker=url, backend=url)
    app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)
    app.task(name="run")(run)
    return app


def __getattr__(name: str) -> Any:
    """APP is what a worker of Celery loads."""
    if name == "APP":
        return celery_app(os.environ["CELERY_URL"])
    raise AttributeError(name)


TOOLS: dict[str, type[Tool]] = {
    "task-spooler": TaskSpooler,
    "GNU parallel": Parallel,
    "HyperQueue": HyperQueue,
    "Dask": Dask,
    "Ray": Ray,
    "Celery, redis": Celery,
    "jobd": Jobd,
}


def main() -> None:
    """See the module."""
    name, directory, workers, slots = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the tools print themselves
    tool = TOOLS[name](Path(directory), int(workers), int(slots))

    def answer(what: object) -> None:
        print(json.dumps(what), file=out, flush=True)

    try:
        answer([os.getpid(), *tool.pids])
        for line in sys.stdin:
            verb, _, what = line.partition(" ")
            if verb == "batch":
                tool.batch(int(what))
                answer(0)
            else:
                argvs, began_ns = json.loads(what), time.time_ns()
                for argv in argvs:
                    tool.submit(argv)
                answer(began_ns)
    finally:
        tool.close()


if __name__ == "__main__":
    main()
