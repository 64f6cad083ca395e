"""What a run ran on: versions, commit, device, memory."""

import platform
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    packages = {name: version(name) for name in ("dilocox", "torch", "megatron-core")}
    return {"python": platform.python_version()} | packages


def git_commit() -> str | None:
    """The commit of the checkout that dilocox runs from, "-dirty" appended when it was changed; None outside of one."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():
        return None
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    command = ["git", "--no-optional-locks", "-C", str(checkout), *describe]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git here, or a checkout of another user
        return None


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: allocated on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts in bytes
    # ru_maxrss is no less than what the parent held when it started this process.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].removesuffix("kB")) * 1024
