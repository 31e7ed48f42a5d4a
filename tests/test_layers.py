"""Which room may import which, as docs/architecture.md says."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace

SOURCE = Path(headrace.__file__).parent
ALLOWED = {
    "core": set(),
    "config": set(),
    "config_loading": {"config"},
    "telemetry": {"core", "config", "engine.wire"},
    "caching": {"core"},
    "scheduling": {"core"},
    "backends": {"core", "config", "engine"},
    "engine": {"core"},
    "gateway": {"core", "config", "telemetry", "caching", "scheduling", "backends"},
    "api": {"core", "config", "telemetry", "gateway", "backends.base", "caching"},
}
ENGINE_EXTRA = ("torch", "tokenizers", "gguf", "safetensors", "jinja2", "huggingface_hub", "numpy")


def imports(file: Path) -> Iterator[str]:
    """Modules of ours that a file names, wherever in it, without the package's own name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("headrace."):
                yield name.removeprefix("headrace.")


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    path = SOURCE / room
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    wrong = [
        f"{file.relative_to(SOURCE)} imports {name}"
        for file in files
        for name in imports(file)
        if not any(
            name == may or name.startswith(may + ".")
            for may in (*ALLOWED[room], room, "__version__")
        )
    ]
    assert wrong == []


def test_only_the_command_and_the_package_itself_see_everything() -> None:
    rooms = {
        path.name if path.is_dir() else path.stem
        for path in SOURCE.iterdir()
        if path.is_dir() or path.suffix == ".py"
    }
    assert rooms - set(ALLOWED) - {"cli", "__init__", "__main__", "__pycache__"} == set()


@pytest.mark.parametrize(
    "module", ["api", "gateway", "backends", "backends.engine", "config_loading", "cli.server"]
)
def test_the_front_needs_nothing_of_the_engine_extra(module: str) -> None:
    """In an interpreter where those packages cannot be imported at all."""
    code = (
        "import sys\n"
        f"for name in {ENGINE_EXTRA!r}: sys.modules[name] = None\n"
        f"import headrace.{module}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
