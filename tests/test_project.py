# SPDX-License-Identifier: Apache-2.0
"""The files around the code: licence lines, README tables, container files, the install script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from glmserve import env

ROOT = Path(__file__).resolve().parent.parent
SPDX = "SPDX-License-Identifier: Apache-2.0"
CODE_SUFFIXES = {".py", ".sh", ".toml", ".yaml", ".yml", ".pbtxt"}
SCRIPTS = ("scripts/install.sh", "docker/entrypoint.sh", ".ci/run")
MAX_LINES = 400


def project_files() -> list[Path]:
    """Every file of the repository."""
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = (ROOT / line for line in listing.stdout.splitlines())
    return [path for path in paths if path.is_file()]


FILES = project_files()


def text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def test_each_source_file_starts_with_its_licence() -> None:
    named = {"Makefile", "Dockerfile", "run"}
    wrong = [
        str(path.relative_to(ROOT))
        for path in FILES
        if (path.suffix in CODE_SUFFIXES or path.name in named)
        and not any(SPDX in line for line in path.read_text().splitlines()[:2])
    ]
    assert wrong == []


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    # In pieces, so that this file does not find itself.
    pattern = re.compile("(?<![\\w.])/" + "(work|root|home/[a-z]+)/")
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in FILES
        for match in pattern.finditer(text_of(path) or "")
    ]
    assert found == []


def test_no_file_names_a_package_registry() -> None:
    hosts = re.compile("pypi" + r"\.org|python" + r"hosted\.org|download\.py" + r"torch\.org")
    found = [str(path.relative_to(ROOT)) for path in FILES if hosts.search(text_of(path) or "")]
    assert found == []


def test_source_files_stay_readable_in_one_sitting() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in FILES
        if path.suffix == ".py"
        and path.relative_to(ROOT).parts[0] in ("src", "model_repository")
        and (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}, f"above {MAX_LINES} lines: split by role"


def test_readme_tables_say_what_the_code_says() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import readme_tables
    finally:
        sys.path.pop(0)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme_tables.render(text) == text, "run `make format`"


def test_readme_links_lead_somewhere() -> None:
    for readme in (ROOT / "README.md", ROOT / "docker" / "README.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", readme.read_text()):
            assert (readme.parent / target).exists(), target


@pytest.mark.parametrize("script", SCRIPTS)
def test_shell_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=20)


def test_users_ci_and_container_install_with_one_script() -> None:
    assert "scripts/install.sh" in (ROOT / "Makefile").read_text()
    assert "scripts/install.sh" in (ROOT / "docker" / "Dockerfile").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    assert "make setup" in ci
    assert "make test" in ci


def test_constraints_pin_the_oracle_and_the_server() -> None:
    for kind in ("cpu", "gpu"):
        lines = (ROOT / "constraints" / f"{kind}.txt").read_text().splitlines()
        pins = dict(line.split("==") for line in lines if "==" in line)
        assert pins["transformers"] == "5.24.0"  # the release whose indexer RoPE is right
        assert pins["nvidia-pytriton"] == "0.7.0"
        assert pins["numpy"].startswith("1.")  # the embedded server's stub needs numpy < 2


def test_dockerfile_uses_the_stock_server_and_turns_multicast_off() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=\S+/tritonserver:26\.07-py3$", text, re.MULTILINE)
    for name, value in env.REQUIRED_CHILD_ENV.items():
        assert f"{name}={value}" in text


def test_the_build_context_holds_what_the_dockerfile_copies() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    copied = {
        source.split("/glmserve/")[0]
        for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    }
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / path).exists() for path in copied)


def seconds(duration: str) -> int:
    match = re.fullmatch(r"(\d+)(s|m)", duration)
    assert match, duration
    return int(match.group(1)) * {"s": 1, "m": 60}[match.group(2)]


def test_compose_gives_the_ranks_what_they_need() -> None:
    compose: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    service = compose["services"]["glmserve"]
    assert service["init"] is True
    assert service["shm_size"] == "16g"
    assert service["ulimits"] == {"memlock": -1, "stack": 67108864}
    assert env.REQUIRED_CHILD_ENV.items() <= service["environment"].items()
    assert seconds(service["stop_grace_period"]) > int(service["environment"]["EXIT_TIMEOUT_S"])
    assert "/v2/models/ensemble/ready" in service["healthcheck"]["test"][-1]
    assert seconds(service["healthcheck"]["start_period"]) >= 600
    weights, kernels = service["volumes"]
    assert weights.endswith("}:/checkpoint:ro")
    assert kernels.endswith(":/var/cache/glmserve")
    (gpus,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert gpus["capabilities"] == ["gpu"]


@pytest.fixture
def container(tmp_path: Path) -> dict[str, str]:
    """An environment in which entrypoint.sh can run: stand-ins on PATH, private /dev/shm."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in {
        "tritonserver": 'printf "%s\\n" "$@"; env',
        "nvidia-smi": '[ "$1" = -L ] && printf "GPU 0: X\\nGPU 1: X\\n" || echo 580.1',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    for folder in ("shm", "checkpoint"):
        (tmp_path / folder).mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "mounts").write_text("shm /dev/shm tmpfs rw,nosuid 0 0\n")
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SHM_DIR": str(tmp_path / "shm"),
        "MOUNTS_FILE": str(tmp_path / "mounts"),
        "GLMSERVE_CHECKPOINT": str(tmp_path / "checkpoint"),
        "NCCL_NVLS_ENABLE": "1",
    }


def run_entrypoint(
    environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "docker" / "entrypoint.sh"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_entrypoint_becomes_the_server_with_multicast_off(container: dict[str, str]) -> None:
    done = run_entrypoint(container, "--log-verbose=1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.match(r"glmserve: 2 GPUs, driver 580\.1, /dev/shm \d+ MiB", lines[0])
    assert "--load-model=ensemble" in lines
    assert "--exit-timeout-secs=60" in lines
    assert "--log-verbose=1" in lines
    for name, value in env.REQUIRED_CHILD_ENV.items():
        assert f"{name}={value}" in lines


@pytest.mark.parametrize(("source", "left"), [("shm", False), ("tmpfs", True)])
def test_entrypoint_cleans_only_its_own_shared_memory(
    container: dict[str, str], source: str, left: bool
) -> None:
    region = Path(container["SHM_DIR"]) / "triton_python_backend_shm_region_1"
    region.touch()
    Path(container["MOUNTS_FILE"]).write_text(f"{source} /dev/shm tmpfs rw 0 0\n")
    assert run_entrypoint(container).returncode == 0
    assert region.exists() is left


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"GLMSERVE_CHECKPOINT": "/nowhere"}, "no checkpoint"),
        ({"GLMSERVE_RANKS": "8"}, "GLMSERVE_RANKS=8 but only 2 GPUs"),
    ],
)
def test_entrypoint_says_why_it_does_not_start(
    container: dict[str, str], change: dict[str, str], reason: str
) -> None:
    done = run_entrypoint({**container, **change})
    assert done.returncode == 1
    assert reason in done.stderr
    assert done.stdout == ""


def test_entrypoint_refuses_to_run_without_gpus_unless_told(
    container: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    refused = run_entrypoint(container)
    assert refused.returncode == 1
    assert "no GPU is visible" in refused.stderr
    assert run_entrypoint({**container, "GLMSERVE_DEVICE": "cpu"}).returncode == 0


def test_install_script_names_what_is_missing(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "/nowhere/python3.11"}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "install.sh"), "--venv", str(tmp_path / "venv")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert "PYTHON=/nowhere/python3.11 is not a working Python 3.11 or 3.12" in done.stderr
    assert not (tmp_path / "venv").exists()
