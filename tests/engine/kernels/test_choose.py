"""Which kernels are taken, and that a machine where the C ones fail serves all the same."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest
import torch

from headrace.engine.kernels import choose
from headrace.engine.kernels.base import Kernels
from headrace.engine.kernels.choose import choose_kernels, self_test
from headrace.engine.kernels.native import NativeUnavailable, compiled
from headrace.engine.kernels.reference import ReferenceKernels
from support.decoders import make_kernels

CPU = torch.device("cpu")


def chosen(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Kernels:
    return choose_kernels(kind, dtype=dtype, device=CPU, folder=folder)


def compiler(folder: Path, script: str) -> str:
    path = folder / "my-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_auto_takes_native_ones_in_float32_and_plain_ones_elsewhere(tmp_path: Path) -> None:
    make_kernels("native")
    assert chosen("auto", tmp_path).name == "native"
    assert chosen("reference", tmp_path).name == "reference"
    assert chosen("auto", tmp_path, torch.bfloat16).name == "reference"
    with pytest.raises(NativeUnavailable, match="fp32 on CPU"):
        chosen("native", tmp_path, torch.bfloat16)


def test_a_build_is_kept_for_its_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_kernels("native")
    compiled(tmp_path / "kept")
    (library,) = (tmp_path / "kept").iterdir()
    before = library.stat().st_mtime_ns
    compiled(tmp_path / "kept")
    assert [path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()] == [before]
    other = compiler(tmp_path, '[ "$1" = --version ] && echo another && exit; exec cc "$@"')
    monkeypatch.setenv("CC", other)
    compiled(tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "no C compiler"),
        ("echo broken >&2; exit 1", "failed: broken"),
        ('[ "$1" = --version ] && exit; echo "cannot find -lgomp" >&2; exit 1', "-lgomp"),
        ('[ "$1" = --version ] && exit; echo no >"$8"', "cpu-"),
    ],
)
def test_without_a_working_compiler(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str | None,
    reason: str,
) -> None:
    monkeypatch.setenv("CC", "no-such-cc" if script is None else compiler(tmp_path, script))
    with pytest.raises(NativeUnavailable, match=reason):
        chosen("native", tmp_path / "kernels")
    with caplog.at_level(logging.WARNING):
        assert chosen("auto", tmp_path / "kernels").name == "reference"
    assert reason in caplog.text
    assert not list(tmp_path.glob("kernels/tmp*")), "half a build stays behind"


@pytest.mark.parametrize("call", ["rms_norm", "rotate_and_store", "attention", "silu_mul"])
def test_kernels_that_compute_wrongly_are_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    make_kernels("native")
    plain = ReferenceKernels(torch.float32, CPU)
    self_test(make_kernels("native"), plain)

    class Wrong(ReferenceKernels):
        name = "native"

        def __init__(self, library: object) -> None:
            del library
            super().__init__(torch.float32, CPU)

        def __getattribute__(self, name: str) -> object:
            method = super().__getattribute__(name)
            if name != call:
                return method

            def spoilt(first: torch.Tensor, *rest: object) -> object:
                out = method(first, *rest)
                (first if out is None else out).view(-1)[0] += 0.01
                return out

            return spoilt

    monkeypatch.setattr(choose, "NativeKernels", Wrong)
    monkeypatch.setattr(choose, "compiled", lambda _folder: None)
    with pytest.raises(NativeUnavailable, match="is wrong"):
        chosen("native", tmp_path)
    assert chosen("auto", tmp_path).name == "reference"
