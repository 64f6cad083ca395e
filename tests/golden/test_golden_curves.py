"""Recorded loss curves of whole runs: a change of method, model, data or seed must be seen.

`python -m pytest tests/golden --rewrite-golden` records them anew; look at the difference before committing it.
"""

import json
from pathlib import Path

import pytest

from tests.runs import TINY, train_in_one_process

CURVES = Path(__file__).parent / "curves.json"
ALGOS = ("diloco", "local_sgd", "sync_dp")
TOLERANCE = 1e-3
"""Processors round differently, and AdamW makes more of it every step; another method moves these by far more."""


def text(folder: Path) -> list[str]:
    """A corpus that never changes: documents of words drawn by a fixed rule."""
    words = ["island", "anchor", "round", "sync", "codec", "lane", "merge", "outer", "inner", "step", "shard", "slow"]
    folder.mkdir()
    state = 1
    for document in range(80):
        drawn = []
        for _ in range(300):
            state = (state * 48271) % 2147483647
            drawn.append(words[state % (len(words) - document % 7)])
        (folder / f"{document}.txt").write_text(" ".join(drawn))
    return ["data=folder", f"data.path={folder}", "data.heldout_fraction=0.1"]


def test_loss_curves_are_as_recorded(tmp_path: Path, rewrite_golden: bool) -> None:
    data = text(tmp_path / "corpus")
    runs = [
        [f"algo={algo}", "island=single", *TINY, *data, f"runs_dir={tmp_path}", f"name={algo}", "steps=30"]
        + ([] if algo == "sync_dp" else ["schedule.inner_steps=10"])
        for algo in ALGOS
    ]
    curves = {
        algo: {
            "island0": list(run.losses(0).values()),
            "island1": list(run.losses(1).values()),
            "heldout": run.heldout[30],
        }
        for algo, run in zip(ALGOS, train_in_one_process(runs), strict=True)
    }
    if rewrite_golden:
        CURVES.write_text(json.dumps(curves, indent=1) + "\n")
    recorded = json.loads(CURVES.read_text())
    assert recorded.keys() == curves.keys()
    for algo, curve in curves.items():
        for name, values in curve.items():
            assert values == pytest.approx(recorded[algo][name], rel=TOLERANCE), (algo, name)
