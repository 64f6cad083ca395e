"""Composes the configuration from `conf/` and overrides, with errors that name the field and the nearest known key."""

import difflib
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc import locate
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dilocox.config.checks import check
from dilocox.config.schema import ROLES, Config
from dilocox.errors import ConfigError


def conf_dir() -> Path:
    """The folder of YAML files: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError("conf", str(package), "no folder conf/ with config.yaml", "Reinstall dilocox")


def load_config(overrides: Sequence[str]) -> Config:
    """Compose `conf/config.yaml` with Hydra overrides, check types and keys, then what crosses groups.

    Raises ConfigError, which names the field and what to change.
    """
    try:
        composed = _compose(overrides)
    except HydraException as error:
        raise _explain_override(error, overrides) from error
    return parse_config(composed)


def parse_config(composed: DictConfig) -> Config:
    """A composed or stored configuration as typed, checked `Config`."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), composed)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise _explain_value(error, composed) from error
    assert isinstance(config, Config)
    check(config)
    for role in ROLES:
        build_role(config, role)
    return config


def _compose(overrides: Sequence[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def to_yaml(config: Config) -> str:
    """The resolved configuration, as written into the run's folder; `read_config` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def read_config(path: Path) -> Config:
    loaded = OmegaConf.load(path)
    assert isinstance(loaded, DictConfig)
    return parse_config(loaded)


def build_role(config: Config, role: str) -> Any:
    """Construct one role from its mapping; a key or type that its constructor does not know is a ConfigError."""
    settings = getattr(config, role)
    if "_target_" not in settings:
        raise ConfigError(role, settings, "no _target_", f"Choose one of: {', '.join(choices(role))}")
    _check_types(role, settings)
    try:
        return instantiate(settings)
    except HydraException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigError):
            raise cause from error
        raise ConfigError(role, settings, str(cause or error), f"See conf/{role}/ for its keys") from error


_TYPES = {int: "an integer", float: "a finite number", bool: "true or false", str: "a word"}


def _check_types(role: str, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value that is not of the plain type that the role's constructor declares."""
    constructor = locate(settings["_target_"])
    if not callable(constructor):
        raise ConfigError(f"{role}._target_", settings["_target_"], "not found", "Name a class with its module")
    for key, parameter in inspect.signature(constructor, eval_str=True).parameters.items():
        if key in settings and not _fits(settings[key], parameter.annotation):
            expected = _TYPES[parameter.annotation]
            raise ConfigError(f"{role}.{key}", settings[key], f"expected {expected}", f"See conf/{role}/ for examples")


def _fits(value: object, declared: object) -> bool:
    if declared is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if declared is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, declared) if declared in (bool, str) and isinstance(declared, type) else True


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def _explain_override(error: HydraException, overrides: Sequence[str]) -> ConfigError:
    """What is wrong with the override that Hydra's error is about."""
    override = next((one for one in overrides if one.split("=")[0].lstrip("+~") in str(error)), "")
    key, _, value = override.partition("=")
    field = key.lstrip("+~") or "config"
    problem = str(error).splitlines()[0].rstrip(".")
    if isinstance(error, MissingConfigException) and error.options:
        return ConfigError(field, value, "no such choice", f"Choose one of: {', '.join(sorted(error.options))}")
    if isinstance(error, OverrideParseException):
        return ConfigError(field, value or None, problem, "Write an override as key=value")
    unknown = problem.startswith("Could not override")
    return ConfigError(field, value, "unknown key" if unknown else problem, _nearest(field))


def _explain_value(error: OmegaConfBaseException, composed: DictConfig) -> ConfigError:
    """What is wrong with a key or a value of a composed configuration."""
    field = error.full_key or "config"
    problem = str(error).splitlines()[0].rstrip(".")
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        return ConfigError(field, OmegaConf.select(composed, field), "unknown key", _nearest(field))
    value = OmegaConf.select(composed, field, throw_on_resolution_failure=False)
    return ConfigError(field, value, problem, "See conf/ for what it may be")


def _nearest(field: str) -> str:
    """The remedy for an unknown key: the known ones of that last name, or the nearest."""
    groups = [folder.name for folder in conf_dir().iterdir() if folder.is_dir()]
    known = sorted({*_keys(OmegaConf.to_container(_compose([])), ""), *groups})
    known = [key for key in known if not field.startswith(f"{key}.")]
    near = [key for key in known if key.split(".")[-1] == field] or difflib.get_close_matches(field, known, n=1)
    return f"Did you mean {' or '.join(near)}?" if near else "See conf/ for the known keys"


def _keys(node: Any, prefix: str) -> list[str]:
    """All keys of nested mappings, with dots."""
    if not isinstance(node, dict):
        return []
    nested = (key for name, child in node.items() for key in (name, *_keys(child, f"{name}.")))
    return [f"{prefix}{key}" for key in nested]
