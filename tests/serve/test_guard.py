"""Keys, and who may change a server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from starlette.requests import Request

from penstock.cli.app import run
from penstock.config.values import ServeTable
from penstock.errors import ConfigError
from penstock.transport.machine_keys import is_loopback
from penstock_serve.observe.metrics import ServerMetrics
from penstock_serve.server.app import Server
from penstock_serve.server.guard import Guard, find_key
from penstock_serve.server.openai_requests import BadRequest
from penstock_serve.server.router import Router
from tests.serve.vllm_servers import fake_vllm, running

if TYPE_CHECKING:
    from pathlib import Path

HERE = ("127.0.0.1", 5)
THERE = ("192.0.2.7", 5)
LOCAL = {"host": "localhost:8000"}


def request(
    client: tuple[str, int] | None,
    *,
    server: tuple[str, int | None] | None = ("127.0.0.1", 8000),
    **headers: str,
) -> Request:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request(
        {
            "type": "http",
            "method": "POST",
            "path": "/admin/reset",
            "server": server,
            "scheme": "http",
            "query_string": b"",
            "client": client,
            "headers": given,
        }
    )


@pytest.mark.parametrize("given", ["Bearer secret", "bearer secret", "Bearer  secret", "secret"])
def test_who_has_the_key_may_pass(given: str) -> None:
    Guard("secret").require_key(request(THERE, authorization=given))
    Guard("secret").require_admin(request(THERE, authorization=given, host="model.example"))


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", "Bearer secre", "Basic secret", "Bearer é"]
)
def test_who_has_not_is_refused(given: str) -> None:
    for refuses in (Guard("secret").require_key, Guard("secret").require_admin):
        with pytest.raises(BadRequest, match="the API key is missing or wrong") as refused:
            refuses(request(HERE, authorization=given, **LOCAL))

        assert refused.value.status == 401


def test_without_a_key_everybody_is_served() -> None:
    Guard("").require_key(request(THERE))


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000", "127.0.0.1", "[::1]:8000"])
def test_without_a_key_this_machine_may_change_the_server(host: str) -> None:
    Guard("").require_admin(request(HERE, host=host))
    Guard("").require_admin(request(("::1", 5), host=host))
    Guard("").require_admin(request(HERE, host=host, origin=f"http://{host}"))


@pytest.mark.parametrize("server", [None, ("/run/penstock.sock", None)])
def test_without_a_key_who_can_connect_to_the_socket_may_change_the_server(
    server: tuple[str, int | None] | None,
) -> None:
    Guard("").require_admin(request(None, server=server, **LOCAL))
    for headers in ({"host": "rebound.example"}, {**LOCAL, "x_forwarded_for": "192.0.2.7"}):
        with pytest.raises(BadRequest):
            Guard("").require_admin(request(None, server=server, **headers))
    # Who has left already is not told apart from whom it was.
    with pytest.raises(BadRequest):
        Guard("").require_admin(request(None, **LOCAL))


@pytest.mark.parametrize(
    ("client", "headers"),
    [
        (THERE, LOCAL),
        (HERE, {"host": "rebound.example"}),  # A name of somebody else that leads here.
        (HERE, {}),
        (HERE, {**LOCAL, "x_forwarded_for": "127.0.0.1"}),
        (HERE, {**LOCAL, "forwarded": "for=127.0.0.1"}),
        (HERE, {**LOCAL, "via": "1.1 proxy"}),
    ],
)
def test_without_a_key_nobody_else_may(client: tuple[str, int], headers: dict[str, str]) -> None:
    with pytest.raises(BadRequest, match="/admin/reset needs an API key") as refused:
        Guard("").require_admin(request(client, **headers))

    assert refused.value.status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://elsewhere.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
@pytest.mark.parametrize("key", ["", "secret"])
def test_a_page_of_another_site_is_refused_with_or_without_a_key(
    key: str, headers: dict[str, str]
) -> None:
    asked = request(HERE, authorization="Bearer secret", **LOCAL, **headers)

    with pytest.raises(BadRequest, match="not for pages of other sites") as refused:
        Guard(key).require_admin(asked)

    assert refused.value.status == 403


def asked(
    *, method: str = "GET", server: tuple[str, int | None] = ("127.0.0.1", 8000), **headers: str
) -> Request:
    found = request(HERE, server=server, **headers)
    found.scope["method"] = method
    found.scope["path"] = "/v1/models"
    return found


@pytest.mark.parametrize("host", ["rebound.example:8000", "127.0.0.1.nip.io", "evil.com."])
def test_a_name_of_another_site_that_leads_to_the_loopback_interface_is_refused(host: str) -> None:
    """DNS rebinding: the browser takes the page and this server for one site."""
    with pytest.raises(BadRequest, match="must be a name of this server") as refused:
        Guard("").require_own_site(asked(host=host))

    assert refused.value.status == 403
    assert "--allowed-hosts or serve.allowed_hosts" in str(refused.value)


OWN = ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7:8000", "gpu7:8000", "LOCALHOST."]


@pytest.mark.parametrize("host", [*OWN, "penstock.ns.svc.cluster.local", "host.docker.internal"])
def test_names_that_nobody_else_can_have_are_served(host: str) -> None:
    Guard("").require_own_site(asked(host=host))


def test_a_client_without_a_host_header_is_no_browser() -> None:
    Guard("").require_own_site(asked())


def test_the_machine_s_own_name_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu7.example.com")

    Guard("").require_own_site(asked(host="GPU7.example.com:8000"))


def test_names_that_the_operator_gave_are_served() -> None:
    guard = Guard("", ["llm.example.com"])

    guard.require_own_site(asked(host="llm.example.com"))
    # A proxy that sets another `Host`, on a network without TLS.
    guard.require_own_site(
        asked(method="POST", host="127.0.0.1:8000", origin="http://llm.example.com")
    )


def test_any_name_leads_to_an_address_of_the_network_and_to_a_socket() -> None:
    """Such as Prometheus by the name of the machine, or a proxy before the socket."""
    Guard("").require_own_site(asked(server=("10.0.0.7", 8000), host="gpu7.example.com:8000"))
    Guard("").require_own_site(asked(server=("/run/penstock.sock", None), host="llm.example.com"))


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
@pytest.mark.parametrize("server", [("127.0.0.1", 8000), ("10.0.0.7", 8000)])
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://elsewhere.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"},
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"},
    ],
)
def test_pages_of_other_sites_are_refused_at_every_path(
    server: tuple[str, int], method: str, headers: dict[str, str]
) -> None:
    for key in ("", "secret"):
        with pytest.raises(BadRequest, match="not for pages of other sites") as refused:
            Guard(key).require_own_site(asked(method=method, server=server, **LOCAL, **headers))

        assert refused.value.status == 403


def test_a_form_of_another_site_is_no_link() -> None:
    headers = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    document = {**headers, "sec_fetch_dest": "document", **LOCAL}

    Guard("").require_own_site(asked(**document))
    with pytest.raises(BadRequest):
        Guard("").require_own_site(asked(method="POST", **document))


def test_the_key_is_what_a_page_of_another_site_does_not_have() -> None:
    """A page that was given the key may ask; that of a proxy with TLS is such a page, too."""
    given = {"authorization": "Bearer secret", "host": "llm.example.com"}

    Guard("secret").require_own_site(asked(origin="https://chat.example.com", **given))
    Guard("secret").require_own_site(asked(host="llm.example.com"))


def test_a_page_behind_a_proxy_that_sets_another_host_is_known_by_its_browser() -> None:
    headers = {"origin": "https://llm.example.com", "sec_fetch_site": "same-origin"}

    Guard("").require_own_site(asked(method="POST", host="127.0.0.1:8000", **headers))


@pytest.mark.parametrize("names", ["http://llm.example.com", "llm.example.com:8000", "a b", "*"])
def test_names_that_no_host_can_have_are_refused(names: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed_hosts: has .*, must have names of hosts"):
        ServeTable(allowed_hosts=f"fine.example, {names}")


PATHS = ("/", "/health", "/metrics", "/live", "/v1/models", "/nowhere")


def test_a_router_refuses_pages_of_other_sites_at_every_path() -> None:
    with fake_vllm("decode") as decode, running([], [decode]) as router:
        for headers in ({"host": "rebound.example"}, {"origin": "https://elsewhere.example"}):
            for path in PATHS:
                answer = router.client.get(path, headers=headers)
                assert answer.status_code == 403, (path, headers)
                assert answer.json()["error"]["type"] == "permission_error"
            answer = router.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert answer.status_code == 403
        text = router.client.post("/v1/completions", content=b'{"prompt": "x"}')

        assert text.status_code == 415
        assert decode.asked == []
        assert router.client.get("/health").status_code == 200


def test_a_server_refuses_pages_of_other_sites_at_every_path() -> None:
    text: Any = None
    served = Server(Router(), text, ServerMetrics(), model="m", settings=ServeTable()).app()

    async def statuses(**headers: str) -> set[int]:
        transport = httpx.ASGITransport(served)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as here:
            answers = [await here.get(path, headers=headers) for path in (*PATHS, "/cache")]
            body = {"prompt": "x"}
            answers.append(await here.post("/v1/completions", json=body, headers=headers))
        return {answer.status_code for answer in answers}

    assert asyncio.run(statuses(host="rebound.example")) == {403}
    assert asyncio.run(statuses(origin="https://elsewhere.example")) == {403}
    assert 403 not in asyncio.run(statuses())


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.1", False),
        ("127.0.0.1.example", False),
        ("", False),
    ],
)
def test_which_addresses_are_this_machine_alone(host: str, *, is_here: bool) -> None:
    assert is_loopback(host) is is_here


def test_a_key_is_read_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("of-the-file\n")
    environment = {"PENSTOCK_API_KEY": "of-the-environment", "PATH": "x"}

    assert find_key(ServeTable(api_key_file=str(file)), dict(environment)) == "of-the-file"
    assert find_key(ServeTable(api_key="said"), dict(environment)) == "said"
    assert find_key(ServeTable(), environment) == "of-the-environment"
    # No process that is started later finds it.
    assert environment == {"PATH": "x"}
    assert find_key(ServeTable(), {}) == ""


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"two words", b"one\ntwo", b"\xff\xfe", b"x" * 513]
)
def test_a_file_without_a_usable_key_is_refused_and_not_shown(
    content: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match="must be from 1 to 512 printable") as refused:
        find_key(ServeTable(api_key_file=str(file)), {})

    assert "words" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        find_key(ServeTable(api_key_file=str(tmp_path / "none")), {})


@pytest.mark.parametrize("option", ["--api-key", "--api-key-file"])
@pytest.mark.parametrize("words", [["dashboard", "--metrics"], ["router", "--vllm-decode"]])
def test_an_option_that_an_unset_variable_left_empty_opens_no_server(
    option: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "http://127.0.0.1:1", option, ""]) == 2
    assert capsys.readouterr().err.startswith(f"penstock: {option}: is empty, must be left out")
