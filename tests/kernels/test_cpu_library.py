"""The compiled library: what is told when it cannot be had, levels of instructions, and its checksum."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dilocox_kernels import checksum
from dilocox_kernels.backend import BackendError
from dilocox_kernels.checksum import checksum64
from dilocox_kernels.cpu import CpuBackend, library
from dilocox_kernels.kernels import select
from tests.kernels.cases import threads


def test_a_library_that_is_missing_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"libdilocox_kernels.so is missing; build it .*make setup"):
        library.Library(tmp_path / "libdilocox_kernels.so")


def test_a_back_end_without_its_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PATH", tmp_path / "none.so")
    library.load.cache_clear()
    select.cache_clear()
    try:
        with pytest.raises(BackendError, match="is missing"):
            CpuBackend()
        with pytest.raises(BackendError, match="is missing"):
            select("auto", "cpu")
        with pytest.raises(BackendError, match="is missing"):
            checksum64(torch.zeros(3))
    finally:
        library.load.cache_clear()
        select.cache_clear()


@pytest.mark.parametrize("content", [b"", b"no library at all"])
def test_a_library_that_does_not_load_is_refused(tmp_path: Path, content: bytes) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(content)
    with pytest.raises(BackendError, match=r"damaged.so does not load .*build it"):
        library.Library(damaged)


def build(tmp_path: Path, source: str) -> Path:
    built = tmp_path / "other.so"
    (tmp_path / "other.cpp").write_text(source)
    subprocess.run(["g++", "-shared", "-fPIC", tmp_path / "other.cpp", "-o", built], check=True)
    return built


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    names = [name for name in library._FUNCTIONS if name != "abi_version"]
    stubs = "".join(f"void dilocox_{name}() {{}}\n" for name in names)
    source = f'extern "C" {{ int dilocox_abi_version() {{ return 999; }}\n{stubs}}}'
    with pytest.raises(BackendError, match=f"has interface 999, this package needs {library.ABI_VERSION}"):
        library.Library(build(tmp_path, source))


def test_a_library_without_the_functions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"does not load .*dilocox_"):
        library.Library(build(tmp_path, "int nothing;"))


def test_versions_on_both_sides_agree() -> None:
    header = Path(library.__file__).parent / "csrc" / "library.h"
    assert f"kAbiVersion = {library.ABI_VERSION};" in header.read_text()


def test_structures_are_as_long_on_both_sides(tmp_path: Path) -> None:
    structures = ("Format", "Spans", "Bodies", "TileNorms", "EncodeJob", "DecodeJob", "OuterStepJob")
    header = Path(library.__file__).parent / "csrc" / "library.h"
    sizes = "".join(f"int size_of_{name}() {{ return sizeof({name}); }}\n" for name in structures)
    built = build(tmp_path, f'#include "{header}"\nextern "C" {{\n{sizes}}}')
    loaded = ctypes.CDLL(str(built))
    for name in structures:
        structure = getattr(library, name)
        assert ctypes.sizeof(structure) == getattr(loaded, f"size_of_{name}")(), name


def test_a_level_that_the_processor_lacks_is_refused() -> None:
    with pytest.raises(BackendError, match=f"no level 'x86-64-v9'; it has {', '.join(CpuBackend.levels())}"):
        CpuBackend("x86-64-v9")


def test_there_is_a_level_for_every_processor() -> None:
    assert CpuBackend.levels()[-1] in ("x86-64", "aarch64")


@given(numel=st.integers(0, 20_000), offset=st.integers(0, 5), start=st.integers(0, 1 << 62), seed=st.integers(0, 99))
def test_the_checksum_is_that_of_torch(numel: int, offset: int, start: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    held = torch.randint(0, 256, (offset + numel,), generator=generator, dtype=torch.uint8)
    tensors: list[Tensor] = [held[offset:], held[: numel // 4 * 4].view(torch.float32)]
    for tensor in tensors:
        for count in (1, 2):
            with threads(count):
                assert checksum64(tensor, start) == checksum._by_torch(tensor, start)


def test_the_checksum_of_torch_goes_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_CHUNK_WORDS", 1000)
    values = torch.randn(200_003, generator=torch.Generator().manual_seed(1))
    for start in (0, 2**31 - 100_000):
        assert checksum._by_torch(values, start) == checksum64(values, start)
