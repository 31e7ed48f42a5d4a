"""A real server on a real model, shared by the tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.server import Server, serve


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SmolLM2-135M-Instruct in fp32. Without the response cache, since what these tests ask twice
    is to be computed twice."""
    log = tmp_path_factory.mktemp("serve") / "log"
    uncached = {"HEADRACE__CACHING__ENABLED": "false"}
    with serve(log, "--dtype", "fp32", env=uncached) as running:
        yield running
