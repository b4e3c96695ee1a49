# SPDX-License-Identifier: Apache-2.0
"""Makes the tritonserver of the installed nvidia-pytriton wheel runnable, in a cache directory.

The wheel carries one Python-backend stub per Python version and expects its own launcher to pick
one; here a small tree of links (and a copy of the right stub) is made once per wheel and
interpreter. Not its job: starting the server (`launcher.py`), or any other tritonserver, which
needs nothing from here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from glmserve import env
from glmserve.errors import GlmServeError

_WHEEL = "nvidia-pytriton"


class BinariesError(GlmServeError):
    """The installed packages cannot run tritonserver; the message says what to install."""


@dataclass(frozen=True)
class ServerBinaries:
    """A runnable tritonserver."""

    executable: Path
    backends: Path  # for --backend-directory
    library_path: tuple[Path, ...]  # must lead LD_LIBRARY_PATH of the server and its stubs

    def environment(self, base: dict[str, str]) -> dict[str, str]:
        """`base` with what the server needs: this interpreter first on PATH, and its libraries.

        The stub embeds the first `python3` on PATH and ignores PYTHONPATH, so the virtual
        environment is chosen by its bin directory.
        """
        libraries = [str(path) for path in self.library_path]
        if base.get("LD_LIBRARY_PATH"):
            libraries.append(base["LD_LIBRARY_PATH"])
        scripts = str(Path(sys.prefix) / "bin")
        path = scripts + os.pathsep + base.get("PATH", os.defpath)
        return {**base, "PATH": path, "LD_LIBRARY_PATH": os.pathsep.join(libraries)}


def prepare(cache: Path | None = None) -> ServerBinaries:
    """Returns the runnable server, building its tree under `cache` when it is not there yet.

    The tree is built under a private name and renamed into place, so two processes may call this at
    once. Raises BinariesError for a missing wheel, numpy >= 2, a Python version without a stub, and
    a Python without a shared library.
    """
    site = _wheel_site()
    _check_numpy()
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = site / "pytriton" / "tritonserver" / "python_backend_stubs" / minor
    stub /= "triton_python_backend_stub"
    if not stub.is_file():
        raise BinariesError(f"{_WHEEL} has no Python backend stub for Python {minor}")
    version = metadata.version(_WHEEL)
    key = hashlib.sha256(f"{site}|{sys.base_prefix}|{minor}".encode()).hexdigest()[:12]
    root = cache or Path(env.CACHE_DIR.get() or "~/.cache/glmserve").expanduser()
    tree = root / f"tritonserver-{version}-py{minor}-{key}"
    if not tree.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=root))
        try:
            _build_tree(building, site, stub)
            _check_libraries(_binaries(building))
            try:
                building.rename(tree)
            except OSError:  # another process was first: its tree is the same
                if not tree.is_dir():
                    raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return _binaries(tree)


def _binaries(tree: Path) -> ServerBinaries:
    return ServerBinaries(
        executable=tree / "pytriton" / "tritonserver" / "bin" / "tritonserver",
        backends=tree / "pytriton" / "tritonserver" / "backends",
        library_path=(tree / "nvidia_pytriton.libs", Path(sys.base_prefix) / "lib"),
    )


def _wheel_site() -> Path:
    try:
        distribution = metadata.distribution(_WHEEL)
    except metadata.PackageNotFoundError:
        raise BinariesError(
            f"{_WHEEL} is not installed in {sys.prefix}: run `make setup`, or use your own "
            "tritonserver on model_repository/"
        ) from None
    return Path(str(distribution.locate_file(""))).resolve()


def _check_numpy() -> None:
    version = metadata.version("numpy")
    if int(version.split(".")[0]) >= 2:
        raise BinariesError(
            f"numpy {version} is installed, but the Python backend of {_WHEEL} was built for "
            "numpy 1: its stub would die on the first request. Install 'numpy<2'."
        )


def _build_tree(tree: Path, site: Path, stub: Path) -> None:
    """The wheel's layout again: the binaries' run path finds `nvidia_pytriton.libs` by it."""
    source = site / "pytriton" / "tritonserver"
    bin_dir = tree / "pytriton" / "tritonserver" / "bin"
    python_dir = tree / "pytriton" / "tritonserver" / "backends" / "python"
    bin_dir.mkdir(parents=True)
    python_dir.mkdir(parents=True)
    tree.chmod(0o755)
    (tree / "nvidia_pytriton.libs").symlink_to(site / "nvidia_pytriton.libs")
    server = source / "bin" / "tritonserver"
    if os.access(server, os.X_OK):
        (bin_dir / "tritonserver").symlink_to(server)
    else:
        _copy_executable(server, bin_dir / "tritonserver")
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (python_dir / name).symlink_to(source / "backends" / "python" / name)
    _copy_executable(stub, python_dir / stub.name)


def _copy_executable(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    target.chmod(0o755)


def _check_libraries(binaries: ServerBinaries) -> None:
    """Asks the dynamic loader what it cannot find."""
    stub = binaries.backends / "python" / "triton_python_backend_stub"
    for program in (binaries.executable, stub):
        trace = binaries.environment(dict(os.environ)) | {"LD_TRACE_LOADED_OBJECTS": "1"}
        listing = subprocess.run(
            [program], env=trace, capture_output=True, text=True, timeout=60, check=False
        )
        missing = [line.split()[0] for line in listing.stdout.splitlines() if "not found" in line]
        if not missing and listing.returncode == 0:
            continue
        hint = ""
        if any(name.startswith("libpython") for name in missing):
            hint = (
                "; this Python was built without a shared library: install the distribution's "
                "libpython package, or use a Python built with --enable-shared"
            )
        reason = ", ".join(missing) or listing.stderr.strip()
        raise BinariesError(f"{program.name} cannot be loaded: {reason} not found{hint}")
