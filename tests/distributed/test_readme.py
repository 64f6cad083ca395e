"""What the README shows is what there is: its example runs, its tables are complete, its files exist."""

import os
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from dilocox.config import ROLES, choices
from tests.distributed.ranks import run_ranks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


class Model(nn.Module):
    """Returns its loss, as the example expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 1)

    def forward(self, batch: Tensor) -> Tensor:
        return (self.layer(batch) - batch.sum(dim=1, keepdim=True)).square().mean()


def _example_rank(code: str) -> tuple[float, list[Tensor]]:
    island = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(island)
    batches = [torch.randn(8, 16, generator=generator) for _ in range(300)]
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    code = code.replace("host:29400", place).replace("island=0", f"island={island}")
    first = model(batches[0]).item()
    exec(code, {"model": model, "optimizer": optimizer, "batches": batches})
    return model(batches[0]).item() / first, [parameter.detach() for parameter in model.parameters()]


def test_the_library_example_trains_two_islands_to_the_same_weights() -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.S)
    (improvement, weights), (_, others) = run_ranks(2, _example_rank, code)
    assert improvement < 0.5
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_the_table_of_roles_is_that_of_conf() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", README, re.M)
    listed = {role: set(re.findall(r"`(\w+)`", cells)) for role, cells in rows}
    assert listed == {role: set(choices(role)) for role in ROLES}


def test_presets_and_files_that_are_named_exist() -> None:
    [presets] = re.findall(r"Presets in `conf/algo/`: (.*?)\. ", README)
    assert set(re.findall(r"`(\w+)`", presets)) == set(choices("algo"))
    for link in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / link).exists(), link
