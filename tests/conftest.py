"""What all tests share: how hypothesis runs, the flag that rewrites golden files, and no process left behind."""

import os
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

_OF_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # live as long as the process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write the golden files anew; look at the difference"
    )


@pytest.fixture
def rewrite_golden(request: pytest.FixtureRequest) -> bool:
    """Whether a test should write its golden file instead of comparing with it."""
    return bool(request.config.getoption("--rewrite-golden"))


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fails a test that leaves a child process running, and ends that process."""
    before = {child.pid for child in _children()}
    yield
    left = _new_children(before)
    deadline = time.monotonic() + 5  # daemons that are told to end need a moment
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = _new_children(before)
    names = [" ".join(_command(child))[:200] for child in left]
    for child in left:
        child.kill()
    assert not names, f"the test left processes running: {names}"


def _new_children(before: set[int]) -> list[psutil.Process]:
    return [child for child in _children() if child.pid not in before and not _of_python(child)]


def _children() -> list[psutil.Process]:
    running = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                running.append(child)
        except psutil.NoSuchProcess:
            continue
    return running


def _of_python(child: psutil.Process) -> bool:
    return any(module in argument for argument in _command(child) for module in _OF_PYTHON)


def _command(child: psutil.Process) -> list[str]:
    try:
        return child.cmdline()
    except psutil.NoSuchProcess:
        return []
