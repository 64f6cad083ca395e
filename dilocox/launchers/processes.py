"""The processes of a run on this machine: started together, watched, and all ended when one fails.

Each process leads a process group of its own, so that a Ctrl-C in the terminal reaches the launcher alone, and whatever
a process starts ends with it. Each is killed by the kernel when the launcher dies, however it dies. A process that has
ended stays a zombie until all are collected, so that its id and its group belong to nobody else meanwhile.
"""

import contextlib
import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from dilocox.errors import ConfigError, DilocoxError
from dilocox.files import write_beside

ERROR_FILE_VARIABLE = "DILOCOX_ERROR_FILE"
GRACE_S = 5.0
"""How long the others may run on after the first failure, to find out by themselves and say so in their logs."""
TERMINATE_S = 5.0
"""How long a process may take to end after SIGTERM, before SIGKILL."""

_POLL_S = 0.1
_TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # opened here: a freshly forked child should do as little as it can


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start: its name (in messages and file names), its command, what its environment has besides ours."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Failure:
    """Why a process failed: when (seconds since the epoch), its exit code, and a text for people."""

    time: float
    exit_code: int
    message: str


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `failure` is the first by time, which is the cause of the others; None after a signal."""

    exit_code: int
    failure: Failure | None


def report_error(path: Path, error: BaseException) -> None:
    """Tell the launcher why this process ends; a process finds the path in the environment as DILOCOX_ERROR_FILE."""
    report = {
        "time": time.time(),
        "message": str(error),
        "expected": isinstance(error, DilocoxError),
        "traceback": "".join(traceback.format_exception(error)),
    }
    write_beside(path, json.dumps(report))


def run_together(
    specs: Sequence[ProcessSpec],
    logs: Path,
    *,
    on_start: Callable[[], None],
    grace_s: float = GRACE_S,
    terminate_s: float = TERMINATE_S,
) -> Outcome:
    """Run the processes until all have ended; when one fails, or a signal comes, end the others.

    Each appends stdout and stderr to `logs/NAME.log`. `on_start` is called when all are started. Must be called from
    the main thread, which the processes do not survive. Leaves no process behind, also when it raises.
    The exit code is 0 when all are 0, 128 + n after signal n (130 for Ctrl-C), else that of the first failure.
    Raises ConfigError on systems that cannot promise this.
    """
    if sys.platform != "linux":
        raise ConfigError(
            "launcher", "local", f"needs Linux, and this is {sys.platform}", "Set launcher=inprocess, or use torchrun"
        )
    logs.mkdir(parents=True, exist_ok=True)
    children: list[_Child] = []
    with _stop_signals() as stop:
        try:
            for spec in specs:
                children.append(_Child(spec, logs))
            on_start()
            _watch(children, stop, grace_s)
            stopped_by = stop.first
        finally:
            _end(children, stop, terminate_s)
    if stopped_by is not None:
        return Outcome(128 + stopped_by, None)
    failure = min(filter(None, (child.failure() for child in children)), key=lambda f: f.time, default=None)
    return Outcome(0 if failure is None else failure.exit_code, failure)


class _Child:
    def __init__(self, spec: ProcessSpec, logs: Path) -> None:
        self.name = spec.name
        self._log = logs / f"{spec.name}.log"
        self._error = logs / f"{spec.name}.error.json"
        self._error.unlink(missing_ok=True)
        self._exit_code: int | None = None
        self._ended_at = math.inf
        self._told_to_end = False
        environment = os.environ | spec.environment | {ERROR_FILE_VARIABLE: str(self._error), "PYTHONUNBUFFERED": "1"}
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                spec.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_die_with(os.getpid()),
            )
        self.descriptor = os.pidfd_open(self._process.pid)

    def running(self) -> bool:
        if self._exit_code is None:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._ended_at = time.time()
                self._exit_code = ended.si_status + (0 if ended.si_code == os.CLD_EXITED else 128)
        return self._exit_code is None

    def failed(self) -> bool:
        """Whether it has ended badly, or said that it will: a process may hang after its error."""
        return self._exit_code not in (None, 0) or self._error.exists()

    def terminate(self) -> None:
        self._told_to_end = True
        self._signal(signal.SIGTERM)

    def collect(self) -> None:
        """Kill what is left of its group, reap it, and give its id back."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        os.close(self.descriptor)

    def failure(self) -> Failure | None:
        code = self._exit_code if self._exit_code and not self._told_to_end else 1
        if self._error.exists():
            report = json.loads(self._error.read_text())
            text = report["message"] if report["expected"] else report["traceback"]
            return Failure(report["time"], code, f"{self.name}: {text.strip()}\n(log: {self._log})")
        if not self._exit_code or self._told_to_end:
            return None
        how = f"was killed by {signal.Signals(code - 128).name}" if code > 128 else f"ended with exit code {code}"
        return Failure(self._ended_at, code, f"{self.name} {how}\n{self._last_lines()}(log: {self._log})")

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)  # cannot miss: the leader is there, if only as a zombie

    def _last_lines(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return "".join(f"  | {line}\n" for line in lines)


@dataclass
class _Stop:
    """The signals that asked the launcher to stop, in order."""

    signals: list[int] = field(default_factory=list)

    @property
    def first(self) -> int | None:
        return self.signals[0] if self.signals else None

    @property
    def impatient(self) -> bool:
        """Asked twice: then children are killed at once."""
        return len(self.signals) > 1


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    stop = _Stop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda n, _frame: stop.signals.append(n)) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _watch(children: Sequence[_Child], stop: _Stop, grace_s: float) -> None:
    """Return when all have ended, when `grace_s` have passed since the first failure, or when a signal came."""
    deadline = math.inf
    while stop.first is None and time.monotonic() < deadline:
        running = [child.descriptor for child in children if child.running()]
        if not running:
            return
        if deadline == math.inf and any(child.failed() for child in children):
            deadline = time.monotonic() + grace_s
        wait(running, timeout=_POLL_S)


def _end(children: Sequence[_Child], stop: _Stop, terminate_s: float) -> None:
    for child in children:
        if child.running():
            child.terminate()
    deadline = time.monotonic() + terminate_s
    while not stop.impatient and time.monotonic() < deadline:
        running = [child.descriptor for child in children if child.running()]
        if not running:
            break
        wait(running, timeout=_POLL_S)
    for child in children:
        child.collect()


def _die_with(parent: int) -> Callable[[], None]:
    """What a forked child does before its command: ask for SIGKILL when `parent` dies, unless that has happened."""

    def before_exec() -> None:
        failed = _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if failed or os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return before_exec
