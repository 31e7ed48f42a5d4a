"""The documents say what is so."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from urllib.parse import urlparse

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.main import get_command

from headrace.cli.app import app
from headrace.cli.reference import settings_table
from headrace.config_loading import env_name, load_settings, setting_fields

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", text("Makefile"), re.MULTILINE))


@pytest.mark.parametrize("key", setting_fields())
def test_every_setting_has_its_words_and_its_row(key: str) -> None:
    description = setting_fields()[key].description
    assert description, f"{key} needs a docstring in headrace/config.py"
    assert env_name(key) in text("docs/configuration.md")


def test_the_table_of_settings_is_the_current_one() -> None:
    document = text("docs/configuration.md")
    table = document.partition("reference` -->\n")[2].partition("\n<!-- /settings -->")[0]
    assert table == settings_table(), "paste the output of: headrace config reference"


def test_the_example_file_can_be_used(tmp_path: Path) -> None:
    file = ROOT / "examples" / "headrace.toml"
    loaded = load_settings(config_file=file, environ={"HOME": str(tmp_path)}, cwd=tmp_path)
    assert loaded.settings.engine.kv_memory == 2 << 30


def test_serve_flags_are_documented() -> None:
    document = text("docs/configuration.md")
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]  # it is a group
    flags = [option for item in serve.params for option in item.opts if option.startswith("--")]
    assert len(flags) > 10
    missing = [flag for flag in flags if flag != "--help" and f"`{flag}" not in document]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_exist(document: Path) -> None:
    words = document.read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^)make ([a-z]+)", words, re.MULTILINE):
        assert target in make_targets(), f"make {target}"
    verbs = get_command(app).commands  # type: ignore[attr-defined]  # it is a group
    for verb, sub in re.findall(r"(?:`|^)headrace ([a-z]+)(?: ([a-z]+))?", words, re.MULTILINE):
        assert verb in verbs, f"headrace {verb}"
        if sub and hasattr(verbs[verb], "commands"):
            assert sub in verbs[verb].commands, f"headrace {verb} {sub}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_in_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8")):
        if not urlparse(target).scheme:
            assert (document.parent / target.partition("#")[0]).exists(), target


def test_the_architecture_names_every_room() -> None:
    document = text("docs/architecture.md")
    rooms = {
        path.parent.relative_to(ROOT / "src" / "headrace").as_posix()
        for path in (ROOT / "src" / "headrace").rglob("*.py")
        if path.parent.name != "headrace"
    }
    assert [room for room in sorted(rooms) if f"{room.rpartition('/')[2]}/" not in document] == []


def test_python_in_the_readme_and_examples_is_python() -> None:
    for block in re.findall(r"```python\n(.*?)```", text("README.md"), re.DOTALL):
        ast.parse(block)
    for example in (ROOT / "examples").glob("*.py"):
        ast.parse(example.read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", [".ci/run", "examples/curl.sh"])
def test_shell_scripts_parse_and_are_executable(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o100
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_every_package_is_pinned_once_and_installed_as_pinned() -> None:
    """All that Headrace's requirements draw in. What torch's own index build adds, torch pins."""
    lines = [line for line in text("constraints.txt").splitlines() if not line.startswith("#")]
    pins = {
        str(canonicalize_name(name)): version
        for name, _, version in (line.partition("==") for line in lines)
    }
    assert len(pins) == len(lines)
    assert "torch==2.13.0" in lines
    document = tomllib.loads(text("pyproject.toml"))
    build = {Requirement(line).name for line in document["build-system"]["requires"]}
    assert build <= set(pins)
    project = document["project"]
    roots = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        roots += extra
    for name, version in installed_closure(roots).items():
        if name != "headrace" and not name.startswith(("nvidia-", "cuda-", "triton")):
            assert pins.get(name) == version.partition("+")[0], name


def installed_closure(roots: list[str]) -> dict[str, str]:
    """Versions of all distributions that these requirements draw in, here."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(line, frozenset({""})) for line in roots]
    while waiting:
        line, extras = waiting.pop()
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = str(canonicalize_name(requirement.name))
        inner = frozenset({"", *requirement.extras})
        if (name, inner) not in seen:
            seen.add((name, inner))
            found[name] = metadata.version(name)
            waiting += [(needed, inner) for needed in metadata.requires(name) or ()]
    return found


def test_no_file_of_the_setup_names_an_index() -> None:
    for path in ("Makefile", "constraints.txt", ".ci/run", "pyproject.toml"):
        assert not re.search(r"index-url|find-links|extra-index|pypi", text(path), re.IGNORECASE)
