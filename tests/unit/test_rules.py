"""Rules of the design that no reader should have to check: who imports whom, defaults, sizes, paths."""

import ast
import dataclasses
import inspect
import re
import subprocess
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

import dilocox.config
from dilocox.config import ROLES, build_role, choices, conf_dir, load_config
from dilocox.method import build_roles

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_MAY_IMPORT = {
    "islands": {"config", "errors", "shards", "topology"},
    "outer": {"errors", "shards", "topology", "dilocox_kernels"},
    "data": {"config", "errors"},
    "checkpoint": {"config", "errors", "shards", "topology"},
    "observe": {"config", "errors", "files", "parameters"},
    "files": set(),
    "errors": set(),
    "shards": set(),
    "topology": {"errors"},
    "config": {"errors", "topology"},
}
MAY_IMPORT_MEGATRON = {"dilocox/islands/mcore.py", "dilocox/islands/shim.py"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Full dotted names of all that a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unit(dotted: str) -> str | None:
    """The part of this repository that a name belongs to: a package or module of dilocox, or the kernels."""
    parts = dotted.split(".")
    if parts[0] == "dilocox_kernels":
        return "dilocox_kernels"
    if parts[0] != "dilocox" or len(parts) == 1:
        return None
    found = (ROOT / "dilocox" / parts[1]).is_dir() or (ROOT / "dilocox" / f"{parts[1]}.py").is_file()
    return parts[1] if found else None


def unit_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "dilocox").parts
    return parts[0].removesuffix(".py")


def unit_imports() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for path in sources("dilocox"):
        mine = unit_of(path)
        graph.setdefault(mine, set()).update(
            other for name in imports(path) if (other := unit(name)) not in (None, mine)
        )
    return graph


def test_imports_run_one_way() -> None:
    graph = unit_imports()
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle
    for package, allowed in PACKAGE_MAY_IMPORT.items():
        assert graph[package] <= allowed, f"{package} may not import {sorted(graph[package] - allowed)}"
    assert not [name for name, others in graph.items() if "cli" in others]
    assert {name for name, others in graph.items() if "train" in others} <= {"cli", "launchers"}


def test_the_outer_loop_needs_torch_alone() -> None:
    for path in sources("dilocox/outer", "kernels/dilocox_kernels"):
        foreign = {name.split(".")[0] for name in imports(path)} & {"megatron", "hydra", "omegaconf", "rich", "wandb"}
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_kernels_know_nothing_of_dilocox() -> None:
    for path in sources("kernels"):
        assert not [name for name in imports(path) if name.split(".")[0] == "dilocox"], path.relative_to(ROOT)


def test_megatron_is_imported_in_one_place() -> None:
    importing = {
        str(path.relative_to(ROOT))
        for path in sources("dilocox", "kernels")
        if any(name.split(".")[0] == "megatron" for name in imports(path))
    }
    assert "dilocox/islands/mcore.py" in importing
    assert importing <= MAY_IMPORT_MEGATRON


def test_the_import_rule_sees_imports_inside_functions(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text("def f():\n    from dilocox.outer import loop\n    import megatron.core\n")
    assert list(imports(file)) == ["dilocox.outer.loop", "megatron.core"]
    assert unit("dilocox.outer.loop") == "outer"


@pytest.mark.parametrize(
    "path", sources("dilocox", "kernels", "benchmarks", "tests"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_files_are_short_and_say_what_they_are_for(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert not text.strip() or path.name == "__init__.py" or ast.get_docstring(ast.parse(text)), "no module docstring"


def all_choices() -> list[str]:
    groups = sorted(folder.name for folder in conf_dir().iterdir() if folder.is_dir() and folder.name[0] != "_")
    return [f"{group}={choice}" for group in groups for choice in choices(group)]


def settings_of(path: Path) -> dict[str, Any]:
    loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


@pytest.mark.parametrize("choice", all_choices())
def test_every_choice_composes_and_builds(choice: str) -> None:
    group, name = choice.split("=")
    left_to_the_user = [
        key for key, value in settings_of(conf_dir() / group / f"{name}.yaml").items() if value == "???"
    ]
    overrides = [choice, *(f"{group}.{key}=chosen" for key in left_to_the_user)]
    if group == "island":
        overrides += ["model=70b", "island.batch_size=512"]  # divides by every layout
    config = load_config(overrides)
    for role in ROLES:
        build_role(config, role)
    if group in ("algo", "experiment"):
        build_roles(config)


def targets() -> list[str]:
    """All classes that the configuration builds."""
    settings = [settings_of(path) for path in conf_dir().rglob("*.yaml")]
    found = {str(each["_target_"]) for each in settings if "_target_" in each}
    assert len(found) > 5
    return sorted(found)


@pytest.mark.parametrize("target", targets())
def test_a_role_has_no_default_outside_conf(target: str) -> None:
    parameters = inspect.signature(get_object(target)).parameters.values()
    assert not [p.name for p in parameters if p.default is not inspect.Parameter.empty]


def test_the_schema_has_no_default_outside_conf() -> None:
    schema = [c for c in vars(dilocox.config).values() if inspect.isclass(c) and dataclasses.is_dataclass(c)]
    defaults = [
        f"{c.__name__}.{field.name}"
        for c in schema
        if c.__module__.startswith("dilocox.config")
        for field in dataclasses.fields(c)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    ]
    assert len(schema) > 5
    assert not defaults


ABSOLUTE_PATH = re.compile(r"(?<![\w.:/}~-])/(?:home|root|Users|tmp|work|opt|mnt|scratch)/[\w.]")


def test_no_tracked_file_names_a_path_of_some_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tracked = [ROOT / name for name in listed.split("\0") if name]
    assert ROOT / "pyproject.toml" in tracked
    found = []
    for path in tracked:
        try:
            text = path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        found += [f"{path.relative_to(ROOT)}: {line}" for line in text.splitlines() if ABSOLUTE_PATH.search(line)]
    assert not found


@pytest.mark.parametrize("root", ["home", "root", "Users", "tmp", "work", "opt", "mnt", "scratch"])
@pytest.mark.parametrize("before", ["", "see ", '"', "path=", "("])
def test_absolute_paths_are_recognised(before: str, root: str) -> None:
    assert ABSOLUTE_PATH.search(f"{before}/{root}/me")
    assert ABSOLUTE_PATH.search(f"{before}/{root}/.cache")


@pytest.mark.parametrize("root", ["home", "root", "Users", "tmp", "work", "opt", "mnt", "scratch"])
@pytest.mark.parametrize("before", ["https://host", "runs", "../..", "~", "${HOME}"])
def test_other_paths_are_not(before: str, root: str) -> None:
    assert not ABSOLUTE_PATH.search(f"{before}/{root}/me")
    assert not ABSOLUTE_PATH.search("#!/usr/bin/env bash")
