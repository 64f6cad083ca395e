"""W&B for real, offline and refused: in processes of their own, as it keeps a service and an account in a process."""

import os
import subprocess
import sys
from pathlib import Path

from dilocox.observe.reader import read
from dilocox.observe.schema import METRICS_FILE

_RUN = """
import sys
from pathlib import Path
from dilocox.errors import ConfigError
from dilocox.observe.recorder import Recorder
from tests import observe_harness as made_up

config = made_up.config(Path(sys.argv[1]), "steps=50", f"observe.wandb={sys.argv[2]}", "observe.wandb_project=project7")
try:
    with Recorder(config, 0, leader=True) as first, Recorder(config, 1, leader=True) as second:
        for island, recorder in enumerate((first, second)):
            made_up.start(recorder)
            made_up.take_steps(recorder, island, 1, 50)
            recorder.evaluation(step=50, round=1, loss=2.125)
            made_up.end(recorder, 50)
except ConfigError as error:
    sys.exit(f"refused: {error}")
"""


def _run(tmp_path: Path, mode: str) -> subprocess.CompletedProcess[str]:
    """Two islands of one process record with W&B in `mode`, on a machine without an account."""
    home = tmp_path / "home"
    home.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(home), "NETRC": str(home / "netrc"), "XDG_CONFIG_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", _RUN, str(tmp_path / "runs"), mode],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_offline_keeps_each_islands_history_in_the_run_folder(tmp_path: Path) -> None:
    done = _run(tmp_path, "offline")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "test"
    kept = [path.read_bytes() for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]
    assert len(kept) == 2
    kept.sort(key=lambda content: b"test-island1" in content)
    for island, content in enumerate(kept):
        assert f"test-island{island}".encode() in content
        assert b"project7" in content
        for key in ("step/loss", "sync/bytes_sent", "evaluation/loss", "checkpoint/seconds", "end/parameter_hash"):
            assert f"island{island}/{key}".encode() in content
            assert f"island{1 - island}/{key}".encode() not in content
        assert b"inner_step" in content
        assert b"2.125" in content, "the held-out loss is missing"
    assert len(read(folder / METRICS_FILE)) == 2 * (1 + 50 + 2 + 1 + 1), "metrics.jsonl is kept all the same"


def test_online_without_an_account_is_refused_with_the_remedy_and_no_question(tmp_path: Path) -> None:
    done = _run(tmp_path, "online")
    assert done.returncode == 1
    assert "refused: observe.wandb='online': this machine is not logged in" in done.stderr
    assert "`wandb login`" in done.stderr
    assert not (tmp_path / "runs" / "test" / "wandb").exists()
