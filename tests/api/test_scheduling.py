"""Who may see and change what of the scheduler."""

from __future__ import annotations

from typing import Any, cast

import httpx2
import pytest

from headrace.gateway import Tenant
from support.app import refusal_of, site
from support.overseen import OverseenGateway

pytestmark = pytest.mark.anyio

CONFIG = "/scheduler/config"
LOCAL = "127.0.0.1:8000"


async def patch(client: httpx2.AsyncClient, changes: object, **headers: str) -> httpx2.Response:
    return await client.patch(CONFIG, json=changes, headers=headers)


def keyed(**more: Any) -> Any:
    return site(server={"api_keys": ["sk-other"]}, kind=OverseenGateway, **more)


def introduce(gateway: object) -> None:
    """Key a is tenant a's, key root an admin's."""
    people = cast("OverseenGateway", gateway).people
    people[b"a"] = Tenant("a")
    people[b"root"] = Tenant("root", admin=True)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_tenant_sees_its_own_queue_and_an_admin_all() -> None:
    async with keyed() as s:
        introduce(s.gateway)
        refusal_of(await s.client.get("/scheduler/queue"), 401)
        own = await s.client.get("/scheduler/queue", headers=bearer("a"))
        row = {
            "model": "m",
            "priority_class": "interactive",
            "flow": "a",
            "depth": 2,
            "running": 1,
            "tokens": 300,
            "oldest_wait_s": 0.5,
            "predicted_wait_s": 1.25,
        }
        assert own.json() == {"rows": [row], "depth": 2, "running": 1, "tokens": 300}
        everything = (await s.client.get("/scheduler/queue", headers=bearer("root"))).json()
        assert [row["flow"] for row in everything["rows"]] == ["a", "b"]
        assert everything["rows"][1]["predicted_wait_s"] is None
        assert (everything["depth"], everything["tokens"]) == (7, 9300)


@pytest.mark.parametrize("path", [CONFIG, "/scheduler/trace"])
async def test_settings_and_trace_are_for_admins(path: str) -> None:
    async with keyed() as s:
        introduce(s.gateway)
        refusal_of(await s.client.get(path), 401)
        for key in ("a", "sk-other"):
            error = refusal_of(await s.client.get(path, headers=bearer(key)), 403)
            assert error["code"] == "permission_denied"
        assert (await s.client.get(path, headers=bearer("root"))).status_code == 200


async def test_without_keys_both_are_open() -> None:
    async with site(kind=OverseenGateway, address=("203.0.113.9", 1)) as s:
        assert (await s.client.get(CONFIG)).json() == {"window_s": 2.0, "auto_targets": True}
        trace = (await s.client.get("/scheduler/trace")).json()
        assert trace == {"steps": [{"step": 1, "prefill_tokens": 64, "reason": "target"}]}


async def test_an_admin_changes_settings_from_anywhere() -> None:
    async with keyed(address=("203.0.113.9", 1)) as s:
        introduce(s.gateway)
        changed = await patch(
            s.client, {"window_s": 3.0}, **bearer("root"), **{"x-forwarded-for": "10.0.0.1"}
        )
        assert changed.json() == {"window_s": 3.0, "auto_targets": True}
        found = await s.client.get(CONFIG, headers=bearer("root"))
        assert found.json() == changed.json()


async def test_nobody_else_does_even_on_the_same_machine() -> None:
    async with keyed(host=LOCAL) as s:
        introduce(s.gateway)
        refusal_of(await patch(s.client, {"window_s": 3.0}), 401)
        for key in ("a", "sk-other"):
            refusal_of(await patch(s.client, {"window_s": 3.0}, **bearer(key)), 403)
        assert cast("OverseenGateway", s.gateway).settings["window_s"] == 2.0


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("127.0.0.1", LOCAL),
        ("127.8.9.1", "localhost"),
        ("::1", "[::1]:8000"),
        ("::ffff:127.0.0.1", "LOCALHOST:8000"),
    ],
)
async def test_without_keys_the_own_machine_may(address: str, host: str) -> None:
    async with site(kind=OverseenGateway, address=(address, 1), host=host) as s:
        assert (await patch(s.client, {"window_s": 3.0})).json()["window_s"] == 3.0


@pytest.mark.parametrize(
    ("address", "host", "headers"),
    [
        ("203.0.113.9", LOCAL, {}),
        ("10.0.0.7", LOCAL, {}),
        ("::2", LOCAL, {}),
        ("::ffff:10.0.0.1", LOCAL, {}),
        ("/run/socket", LOCAL, {}),
        ("127.0.0.1", LOCAL, {"X-Forwarded-For": "127.0.0.1"}),
        ("127.0.0.1", LOCAL, {"Forwarded": "for=127.0.0.1"}),
        ("127.0.0.1", LOCAL, {"X-Real-IP": "127.0.0.1"}),
        ("127.0.0.1", LOCAL, {"Via": "1.1 proxy"}),
        ("127.0.0.1", "llm.example.org", {}),
        ("127.0.0.1", "127.0.0.1.evil.example", {}),
        ("127.0.0.1", "localhost.evil.example:8000", {}),
    ],
)
async def test_without_keys_others_may_not(
    address: str, host: str, headers: dict[str, str]
) -> None:
    async with site(kind=OverseenGateway, address=(address, 1), host=host) as s:
        refusal_of(await patch(s.client, {"window_s": 3.0}, **headers), 403)
        assert cast("OverseenGateway", s.gateway).settings["window_s"] == 2.0


async def test_a_web_page_may_not() -> None:
    async with site(kind=OverseenGateway, host=LOCAL) as s:
        asked = {"origin": "https://evil.example", "access-control-request-method": "PATCH"}
        refused = await s.client.options(CONFIG, headers=asked)
        assert refused.status_code == 400
        assert "PATCH" not in refused.headers["access-control-allow-methods"]
        posted = await s.client.patch(
            CONFIG, content=b"{}", headers={"origin": "https://evil.example"}
        )
        refusal_of(posted, 400)


@pytest.mark.parametrize(
    ("body", "param"),
    [(b'{"nope": 1}', "nope"), (b"[]", None), (b"{", None), (b'{"a":1,"a":2}', None), (b"", None)],
)
async def test_what_is_wrong_with_a_change_is_said(body: bytes, param: str | None) -> None:
    async with site(kind=OverseenGateway, host=LOCAL) as s:
        error = refusal_of(await s.client.patch(CONFIG, content=body), 400)
        assert error["param"] == param
