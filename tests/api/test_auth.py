"""Which key a request carries, and that everything but the probes asks for one."""

from __future__ import annotations

import pytest

from headrace.api.auth import credential_of
from support.app import MODEL, refusal_of, site

KEY = "sk-main-0123"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"Bearer k", b"k"),
        (b"bearer k", b"k"),
        (b"BEARER   k", b"k"),
        (b"Bearer k ", b"k "),
        (b"Bearer \xff\xfe", b"\xff\xfe"),
        (b"Bearer ", None),
        (b"Bearer", None),
        (b"Basic k", None),
        (b"k", None),
        (b"", None),
    ],
)
def test_credential_of_one_header(value: bytes, expected: bytes | None) -> None:
    assert credential_of([(b"host", b"h"), (b"authorization", value)]) == expected


def test_two_headers_name_no_one() -> None:
    assert credential_of([(b"authorization", b"Bearer k")] * 2) is None
    assert credential_of([]) is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    "value",
    [
        None,
        b"Bearer ",
        b"Bearer wrong",
        b"Basic c2stbWFpbi0wMTIz",
        b"Bearer k\xe9y",
        b"Bearer " + b"x" * 100_000,
        f"Bearer {KEY}x".encode(),
        KEY.encode(),
    ],
)
async def test_a_wrong_key_is_401_and_not_repeated(value: bytes | None) -> None:
    headers = {} if value is None else {b"authorization": value}
    async with site(server={"api_keys": [KEY]}) as s:
        response = await s.client.post("/v1/chat/completions", json=CHAT, headers=headers)
        error = refusal_of(response, 401)
        assert error["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert KEY not in response.text
        assert "wrong" not in response.text
        assert s.backend.counters.requests == []


@pytest.mark.anyio
async def test_two_keys_or_one_in_the_url_are_401() -> None:
    async with site(server={"api_keys": [KEY]}) as s:
        twice = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")]
        refusal_of(await s.client.get("/v1/models", headers=twice), 401)
        refusal_of(await s.client.get("/v1/models", params={"api_key": KEY}), 401)


@pytest.mark.anyio
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
@pytest.mark.parametrize("key", [KEY, "sk-other"])
async def test_each_of_several_keys_opens(scheme: str, key: str) -> None:
    async with site(server={"api_keys": [KEY, "sk-other"]}) as s:
        headers = {"authorization": f"{scheme} {key}"}
        assert (await s.client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/models/x", "/tokenize", "/docs", "/openapi.json", "/nothing", "/livez/"],
)
async def test_everything_else_asks_for_a_key(path: str) -> None:
    async with site(server={"api_keys": [KEY]}) as s:
        refusal_of(await s.client.get(path), 401)


@pytest.mark.anyio
@pytest.mark.parametrize("needed", [False, True])
async def test_probes_are_open_and_metrics_by_setting(needed: bool) -> None:
    async with site(server={"api_keys": [KEY], "metrics_need_key": needed}) as s:
        for path in ("/livez", "/readyz", "/health"):
            assert (await s.client.get(path)).status_code == 200
        assert (await s.client.get("/metrics")).status_code == (401 if needed else 200)


@pytest.mark.anyio
async def test_without_keys_any_key_will_do() -> None:
    async with site() as s:
        headers = {"authorization": "Bearer whatever"}
        assert (await s.client.get("/v1/models", headers=headers)).status_code == 200
