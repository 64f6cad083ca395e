"""The choice of the inner AdamW, and the package on PyPI that only bears apex's name."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dilocox.config import AdamImplementation
from dilocox.errors import ConfigError
from dilocox.islands.adam import FusedTorchAdamW, choose_adam, refuse_apex_impostor

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("wanted", [AdamImplementation.auto, AdamImplementation.torch])
def test_on_a_cpu_it_is_torchs_fused_one(wanted: AdamImplementation) -> None:
    choice = choose_adam(wanted, CPU)
    assert choice.optimizer is FusedTorchAdamW
    assert "torch" in choice.name
    assert "fused" in choice.name
    optimizer = choice.optimizer([torch.nn.Parameter(torch.ones(3))], lr=0.1, adam_w_mode=True)
    assert optimizer.defaults["fused"] is True


@pytest.mark.parametrize("wanted", [AdamImplementation.apex, AdamImplementation.transformer_engine])
def test_a_gpu_optimizer_is_refused_on_a_cpu(wanted: AdamImplementation) -> None:
    with pytest.raises(ConfigError, match=rf"inner\.implementation='{wanted.value}'.*GPUs only.*Set inner"):
        choose_adam(wanted, CPU)


@pytest.mark.parametrize("wanted", [AdamImplementation.apex, AdamImplementation.transformer_engine])
def test_what_is_not_installed_is_refused_on_a_gpu(wanted: AdamImplementation, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("amp_C", "apex", "apex.optimizers", "transformer_engine", "transformer_engine.pytorch.optimizers"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"inner\.implementation=.*nstall.*set inner\.implementation=auto"):
        choose_adam(wanted, GPU)


def test_adam_with_coupled_decay_is_not_adamw() -> None:
    with pytest.raises(ValueError, match="adam_w_mode"):
        FusedTorchAdamW([torch.nn.Parameter(torch.ones(3))], adam_w_mode=False)


@pytest.fixture
def impostor(tmp_path: Path) -> Path:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('the impostor was imported')\n")
    return tmp_path


def test_the_impostor_is_refused(impostor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(impostor)
    with pytest.raises(ConfigError, match=r"not NVIDIA's apex.*pip uninstall apex"):
        refuse_apex_impostor()


def test_what_has_optimizers_is_taken_for_nvidias(impostor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (impostor / "apex" / "optimizers").mkdir()
    monkeypatch.syspath_prepend(impostor)
    refuse_apex_impostor()


def test_megatron_is_not_imported_beside_the_impostor(impostor: Path) -> None:
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(impostor)!r})\n"
        "from dilocox.errors import ConfigError\n"
        "try:\n"
        "    import dilocox.islands.mcore\n"
        "except ConfigError as error:\n"
        "    assert not any(name.startswith('megatron') for name in sys.modules)\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Run `pip uninstall apex`" in done.stdout
