"""The wheel: complete, and able to train where no checkout is."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = {"dilocox": "dilocox", "kernels/dilocox_kernels": "dilocox_kernels", "conf": "dilocox/conf"}
"""Folders of the checkout and where the wheel has them."""
LIBRARY = "dilocox_kernels/cpu/libdilocox_kernels.so"


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command as a user would who never saw the checkout; returns what it prints, raises with it on failure."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that no earlier build of the checkout leaks into a wheel."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("dilocox", "kernels", "conf"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", built, source, cwd=source)
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder bin/ of a clean environment that has the wheel, and borrows all other packages from this one."""
    home = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    python = home / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=home).strip())
    # Only a site folder's own .pth files are read, so that the editable install beside the borrowed ones has no effect.
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", "--ignore-installed", wheel, cwd=home)
    return home / "bin"


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder, place in PACKAGED.items():
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so")]
        assert files
        expected = {f"{place}/{path.relative_to(ROOT / folder)}" for path in files}
        assert expected <= inside, f"missing from the wheel: {sorted(expected - inside)}"
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    assert {name.split("/")[0] for name in inside if "dist-info" not in name} == {"dilocox", "dilocox_kernels"}


def test_the_wheel_holds_the_compiled_kernels_for_any_python(wheel: Path) -> None:
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert wheel.name.split("-")[4].startswith("linux_")
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()


def test_the_installed_wheel_encodes_with_the_compiled_kernels(installed: Path, tmp_path: Path) -> None:
    code = """
import torch
from dilocox_kernels.formats import BlockFormat
from dilocox_kernels.kernels import select
from dilocox_kernels.spans import Spans
fmt, values, spans = BlockFormat("int4", 64, "fp16"), torch.linspace(-1, 1, 1000), Spans.whole(1000)
bodies = []
for name in ("cpu", "reference"):
    body = torch.empty(fmt.encoded_bytes(1000), dtype=torch.uint8)
    select(name, "cpu").encode(fmt, [values], spans, anchor=None, residual=None, decay=1.0, rounding=None, start=0,
                               out=body, residual_out=None)
    bodies.append(body)
print(torch.equal(*bodies), bool(bodies[0].any()))
"""
    assert run(installed / "python", "-c", code, cwd=tmp_path).split() == ["True", "True"]


def test_without_a_compiler_the_build_ends_with_one_sentence(source: Path, tmp_path: Path) -> None:
    command = (sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path)
    environment = os.environ | {"CXX": "no-such-compiler"}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    (sentence,) = done.stderr.splitlines()
    assert "C++ compiler 'no-such-compiler'" in sentence
    assert "apt-get install g++" in sentence


def test_the_lock_pins_what_the_package_asks_for() -> None:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert not [line for line in lines if line.count("==") != 1 or "/" in line or "+" in line]
    pinned = {line.split("==")[0] for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {requirement.split(">=")[0] for requirement in project["dependencies"] + extras["dev"] + extras["bench"]}
    assert asked <= pinned


def test_the_installed_wheel_stands_alone(installed: Path, tmp_path: Path) -> None:
    code = "import dilocox as d, dilocox_kernels as k, dilocox.config as c; print(d.__file__, k.__file__, c.conf_dir())"
    for found in run(installed / "python", "-c", code, cwd=tmp_path).split():
        assert Path(found).is_relative_to(installed.parent)


def test_the_installed_wheel_trains_two_steps(installed: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for document in range(200):
        (corpus / f"{document}.txt").write_text(f"Document {document} counts: {list(range(document, document + 60))}\n")
    settings = ["launcher=inprocess", "islands=1", "island=single", "device=auto", "steps=2", "schedule.inner_steps=1"]
    data = ["data=folder", f"data.path={corpus}", "data.heldout_fraction=0.2", "evaluation.batches=1"]
    run(installed / "dilocox", "train", *settings, *data, "name=two-steps", cwd=tmp_path)
    assert (tmp_path / "runs" / "two-steps" / "summary.json").is_file()
    assert (tmp_path / "runs" / "latest").resolve().name == "two-steps"
