"""Keys, and who may change a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from starlette.requests import Request

from penstock.cli.app import run
from penstock.config.values import ServeTable
from penstock.errors import ConfigError
from penstock.serve.guard import Guard, find_key
from penstock.serve.openai_requests import BadRequest
from penstock.transport.machine_keys import is_loopback

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
