"""The local launcher with real processes: ports, logs, the first error, exit codes, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from dilocox.config import Config, load_config
from dilocox.errors import DilocoxError, SyncError
from dilocox.launchers.local import launch
from dilocox.launchers.processes import Outcome, ProcessSpec, report_error, run_together
from dilocox.outer.transport.rendezvous import Address

MARK = "DILOCOX_TEST_MARK"


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[psutil.Process]]]:
    """The processes that this test started, wherever they hang in the process tree; they must be gone at its end."""
    monkeypatch.setenv(MARK, str(tmp_path))

    def marked() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(MARK) == str(tmp_path):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    yield marked
    # Who was killed is there for another moment when its own parent is dead, and on a busy machine for longer.
    _, left = psutil.wait_procs(marked(), timeout=10)
    for process in left:
        process.kill()
    assert not left


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", textwrap.dedent(code)]


def run(scripts: Sequence[str], logs: Path, *, grace_s: float = 1, terminate_s: float = 1) -> Outcome:
    specs = [ProcessSpec(f"rank{i}", python(code), {"RANK": str(i)}) for i, code in enumerate(scripts)]
    return run_together(specs, logs, on_start=lambda: None, grace_s=grace_s, terminate_s=terminate_s)


def until(condition: Callable[[], object]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("waited 30 s in vain")


FOREVER = "import time; print('up'); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"


def reporting(message: str, *, after_s: float, then: str = "sys.exit(1)") -> str:
    """A script that reports an expected error as a rank does, without the seconds that its imports would take."""
    return f"""
        import json, os, sys, time
        time.sleep({after_s})
        path = os.environ["DILOCOX_ERROR_FILE"]
        report = dict(time=time.time(), message={message!r}, expected=True, traceback="long")
        open(path + ".tmp", "w").write(json.dumps(report))
        os.replace(path + ".tmp", path)
        {then}
    """


def test_all_succeed_and_logs_keep_the_order_of_stdout_and_stderr(tmp_path: Path, mark: object) -> None:
    code = "import sys\nfor i in range(3): print('out', i); print('err', i, file=sys.stderr)"
    assert run([code, "print('other')"], tmp_path) == Outcome(0, None)
    assert (tmp_path / "rank0.log").read_text() == "".join(f"out {i}\nerr {i}\n" for i in range(3))
    assert (tmp_path / "rank1.log").read_text() == "other\n"


def test_logs_are_appended_and_an_old_error_is_forgotten(tmp_path: Path, mark: object) -> None:
    assert run([reporting("first life", after_s=0)], tmp_path).exit_code == 1
    assert run(["print('second life')"], tmp_path) == Outcome(0, None)
    assert run(["print('third life'); raise SystemExit(2)"], tmp_path).exit_code == 2
    assert (tmp_path / "rank0.log").read_text() == "second life\nthird life\n"


def test_a_silent_death_is_told_with_the_last_lines_of_this_start_only(tmp_path: Path, mark: object) -> None:
    run(["print('old')"], tmp_path)
    outcome = run(["print('last words'); raise SystemExit(7)", FOREVER], tmp_path)
    assert outcome.exit_code == 7
    assert outcome.failure is not None
    assert "rank0 ended with exit code 7" in outcome.failure.message
    assert "| last words" in outcome.failure.message
    assert "| old" not in outcome.failure.message
    assert str(tmp_path / "rank0.log") in outcome.failure.message


def test_the_first_error_by_time_is_the_cause_of_the_others(tmp_path: Path, mark: object) -> None:
    outcome = run([reporting("a consequence", after_s=0.6), reporting("the cause", after_s=0.1)], tmp_path, grace_s=30)
    assert outcome.failure is not None
    assert outcome.failure.message.startswith("rank1: the cause")
    assert "a consequence" in (tmp_path / "rank0.error.json").read_text()


def test_a_rank_that_hangs_after_its_error_does_not_hold_up_the_end(tmp_path: Path, mark: object) -> None:
    outcome = run([FOREVER, reporting("went wrong", after_s=0, then="time.sleep(600)")], tmp_path, grace_s=0.3)
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    assert outcome.failure.message.startswith("rank1: went wrong")


def test_a_killed_rank_gives_128_plus_the_signal(tmp_path: Path, mark: object) -> None:
    outcome = run([FOREVER, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], tmp_path, grace_s=0.2)
    assert outcome.exit_code == 128 + signal.SIGKILL
    assert outcome.failure is not None
    assert "rank1 was killed by SIGKILL" in outcome.failure.message


def test_ranks_that_ignore_sigterm_and_their_own_children_are_killed(
    tmp_path: Path, mark: Callable[[], list[psutil.Process]]
) -> None:
    parent = f"""
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-S", "-c", {STUBBORN!r}])
        print("up")
        time.sleep(600)
    """
    both_up = """
        import os, sys, time
        while open(os.environ["PARENT_LOG"]).read().count("up") < 2: time.sleep(0.05)
        sys.exit(3)
    """
    specs = [
        ProcessSpec("parent", python(parent), {}),
        ProcessSpec("failing", python(both_up), {"PARENT_LOG": str(tmp_path / "parent.log")}),
    ]
    outcome = run_together(specs, tmp_path, on_start=lambda: None, grace_s=0.1, terminate_s=0.3)
    assert outcome.exit_code == 3
    until(lambda: not mark())


def test_nothing_is_left_when_on_start_raises(tmp_path: Path, mark: object) -> None:
    def fail() -> None:
        raise KeyError("on_start")

    with pytest.raises(KeyError, match="on_start"):
        run_together([ProcessSpec("rank0", python(FOREVER), {})], tmp_path, on_start=fail)


def test_a_command_that_does_not_exist_ends_those_already_started(tmp_path: Path, mark: object) -> None:
    specs = [ProcessSpec("rank0", python(FOREVER), {}), ProcessSpec("rank1", [str(tmp_path / "absent")], {})]
    with pytest.raises(FileNotFoundError):
        run_together(specs, tmp_path, on_start=lambda: None)


def test_reported_errors_carry_what_a_person_needs(tmp_path: Path) -> None:
    def report(error: Exception) -> dict[str, object]:
        try:
            raise error
        except Exception as caught:
            report_error(tmp_path / "e.json", caught)
        loaded: dict[str, object] = json.loads((tmp_path / "e.json").read_text())
        return loaded

    expected, unexpected = report(SyncError("island 1 left")), report(ValueError("a bug"))
    assert (expected["message"], expected["expected"]) == ("island 1 left", True)
    assert (unexpected["message"], unexpected["expected"]) == ("a bug", False)
    assert "test_launcher.py" in str(unexpected["traceback"])
    assert issubclass(SyncError, DilocoxError)


LAUNCHER = """
import sys
from pathlib import Path
from dilocox.launchers.processes import ProcessSpec, run_together
logs = Path(sys.argv[1])
specs = [ProcessSpec(f"rank{i}", [sys.executable, "-S", "-c", code], {}) for i, code in enumerate(sys.argv[2:])]
sys.exit(run_together(specs, logs, on_start=lambda: None, terminate_s=1).exit_code)
"""


@pytest.mark.parametrize(
    ("number", "script", "exit_code"),
    [
        (signal.SIGINT, FOREVER, 130),
        (signal.SIGTERM, STUBBORN, 143),
        (signal.SIGKILL, STUBBORN, -signal.SIGKILL),
    ],
)
def test_signals_to_the_launcher_end_all_ranks(
    number: signal.Signals, script: str, exit_code: int, tmp_path: Path, mark: Callable[[], list[psutil.Process]]
) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path), script, script])
    logs = [tmp_path / "rank0.log", tmp_path / "rank1.log"]
    until(lambda: all(log.exists() and log.read_text() == "up\n" for log in logs))
    assert len(mark()) == 3
    launcher.send_signal(number)
    assert launcher.wait(timeout=30) == exit_code
    until(lambda: not mark())


def config(*overrides: str) -> Config:
    return load_config(["model=tiny", "steps=2", "schedule.inner_steps=1", *overrides])


SHOW_ENVIRONMENT = """
import json, os, socket, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
for port in (os.environ["MASTER_PORT"], sys.argv[2].split(":")[1]):
    socket.create_connection(("127.0.0.1", int(port)), timeout=10).close()
print(json.dumps({name: os.environ[name] for name in names} | {"island": sys.argv[1], "rendezvous": sys.argv[2]}))
"""


def show_environment(island: int | None, rendezvous: Address) -> list[str]:
    return [sys.executable, "-S", "-c", SHOW_ENVIRONMENT, str(island), str(rendezvous)]


def launched(configuration: Config, folder: Path) -> dict[str, dict[str, str]]:
    """What each rank saw, by the name of its log; all stores must answer while the ranks run."""
    errors: list[str] = []
    code = launch(configuration, folder, show_environment, on_start=lambda: None, show=errors.append)
    assert (code, errors) == (0, [])
    return {log.stem: json.loads(log.read_text()) for log in (folder / "logs").glob("*.log")}


def test_each_island_is_a_world_of_its_own(tmp_path: Path, mark: object) -> None:
    ranks = launched(config("islands=2", "island=tp2", "threads_per_rank=3"), tmp_path)
    assert set(ranks) == {f"island{i}-rank{r}" for i in range(2) for r in range(2)}
    for island in range(2):
        for rank in range(2):
            seen = ranks[f"island{island}-rank{rank}"]
            assert (seen["RANK"], seen["WORLD_SIZE"], seen["island"]) == (str(rank), "2", str(island))
            assert (seen["LOCAL_RANK"], seen["OMP_NUM_THREADS"]) == (str(2 * island + rank), "3")
    ports = [{seen["MASTER_PORT"] for name, seen in ranks.items() if name.startswith(f"island{i}")} for i in range(2)]
    rendezvous = {seen["rendezvous"].split(":")[1] for seen in ranks.values()}
    assert [len(found) for found in (*ports, rendezvous)] == [1, 1, 1]
    assert len(ports[0] | ports[1] | rendezvous) == 3


def test_in_process_islands_share_one_world(tmp_path: Path, mark: object) -> None:
    ranks = launched(config("islands=3", "island=pp2", "launcher=inprocess"), tmp_path)
    assert set(ranks) == {"rank0", "rank1"}
    assert {seen["island"] for seen in ranks.values()} == {"None"}


def test_the_first_error_is_shown(tmp_path: Path, mark: object) -> None:
    def command(island: int | None, rendezvous: Address) -> list[str]:
        return python(reporting(f"island {island} has no data", after_s=0 if island == 1 else 0.5))

    errors: list[str] = []
    code = launch(config("islands=2", "island=single"), tmp_path, command, on_start=lambda: None, show=errors.append)
    assert code == 1
    assert len(errors) == 1
    assert errors[0].startswith("island1-rank0: island 1 has no data")


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path, mark: object) -> None:
    def command(island: int | None, rendezvous: Address) -> list[str]:
        return python(FOREVER)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    shown: list[str] = []
    code = launch(config("islands=1", "island=single"), tmp_path, command, on_start=interrupt, show=shown.append)
    assert code == 130
    assert len(shown) == 1
    assert "SIGINT" in shown[0]
    assert "resume=auto" in shown[0]
