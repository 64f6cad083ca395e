"""The folder of a run: what many writers at once leave in it, and who may claim it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox.config import load_config
from dilocox.errors import ConfigError
from dilocox.files import write_beside
from dilocox.run_folder import RunFolder, check_resume, check_unused, create_folder

TEXTS = [f"{number}\n" * 1000 for number in range(8)]


def test_a_file_is_always_one_writers_whole_text(tmp_path: Path) -> None:
    """Threads have one process id, as have processes on machines that share a folder."""
    path = tmp_path / "config.yaml"

    def write(text: str) -> set[str]:
        seen = set()
        for _ in range(50):
            write_beside(path, text)
            seen.add(path.read_text())
        return seen

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        seen = set().union(*pool.map(write, TEXTS))
    assert seen <= set(TEXTS)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("runs_dir", ["a-file", "a-file/below"])
def test_a_folder_that_cannot_be_made_is_a_setting_to_change(tmp_path: Path, runs_dir: str) -> None:
    (tmp_path / "a-file").touch()
    config = replace(load_config(["name=a"]), runs_dir=str(tmp_path / runs_dir))
    with pytest.raises(ConfigError, match=r"cannot be used: Not a directory\. Choose a folder") as caught:
        create_folder(config)
    assert caught.value.field == "runs_dir"


def test_a_run_to_go_on_from_must_be_there(tmp_path: Path) -> None:
    config = replace(load_config(["name=a"]), runs_dir=str(tmp_path))
    for resume in ("never", "auto", str(tmp_path)):
        check_resume(replace(config, resume=resume))
    with pytest.raises(ConfigError, match=r"no such folder\. Set resume=auto"):
        check_resume(replace(config, resume=str(tmp_path / "gone")))


def test_islands_claim_a_run_together_and_each_only_once(tmp_path: Path) -> None:
    config = replace(load_config(["name=a"]), runs_dir=str(tmp_path))
    folders = [RunFolder(config, island) for island in range(2)]
    for island in range(2):
        with pytest.raises(ConfigError, match=f"island {island} of this run is running now"):
            RunFolder(config, island)
    check_unused(config)
    assert not (tmp_path / "latest").exists(), "nothing has begun, and nothing may look as if it had"
    for folder in folders:
        folder.begin()
    assert (tmp_path / "latest").readlink() == Path("a")
    for folder in folders:
        folder.close()
    with pytest.raises(ConfigError, match="already holds a run"):
        check_unused(config)
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder(config, 0)
    again = replace(config, resume="auto")
    check_unused(again)
    first = RunFolder(again, 0)
    with pytest.raises(ConfigError, match="island 0 of this run is running now"):
        RunFolder(again, 0)
    first.close()
