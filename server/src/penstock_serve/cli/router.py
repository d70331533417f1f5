"""`penstock router` and `penstock dashboard`: what stands in front of vLLM and SGLang servers."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.conventions import with_options
from penstock.errors import ConfigError, counted
from penstock.toolkit import set_up_logs
from penstock_serve.cli.serve import (
    api_at,
    require_packages,
    serve_table,
    server_url,
    warn_of_openness,
)
from penstock_serve.server.serve_options import ServeOptions

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from penstock.config import ServeTable
    from penstock_serve.server.guard import Guard
    from penstock_serve.server.vllm_router import VllmRouter


NEEDED = ("starlette", "uvicorn", "h11", "prometheus_client")

VllmPrefillOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="A vLLM server that computes prompts, such as http://127.0.0.1:8100; as often as "
        "there are servers. Without one, decode servers compute them.",
    ),
]
VllmDecodeOption = Annotated[
    list[str] | None,
    typer.Option(metavar="URL", help="A vLLM server that answers; as often as there are servers."),
]
SilenceOption = Annotated[
    float,
    typer.Option(
        "--timeout-s", metavar="S", min=1, help="How long a server may be silent in an answer."
    ),
]


GUARD_AND_LOG = ("host", "api_key", "api_key_file", "allowed_hosts", "log_level", "log_json")


@with_options(ServeOptions, *GUARD_AND_LOG, "port", "drain_s")
def route(
    *,
    vllm_prefill: VllmPrefillOption = None,
    vllm_decode: VllmDecodeOption = None,
    timeout_s: SilenceOption = 600.0,
    **given: Any,  # noqa: ANN401 - see `ServeOptions`
) -> None:
    """Route requests to vLLM servers: one computes the prompt, another one answers.

    The servers are `vllm serve` with the flags of `penstock vllm-config --role`. They may start and
    end at any time.
    """
    require_packages(NEEDED, "")
    from penstock_serve.server.server_socket import address_of  # noqa: PLC0415  (needs the extras)
    from penstock_serve.server.vllm_server import read_urls  # noqa: PLC0415

    prefill, decode = read_urls(
        [server_url(each) for each in vllm_prefill or ()],
        [server_url(each) for each in vllm_decode or ()],
    )
    with _listening(given) as here:
        bound, table, guard = here
        from penstock_serve.server.vllm_app import RouterSettings, run_router  # noqa: PLC0415

        settings = RouterSettings(
            prefill=prefill,
            decode=decode,
            guard=guard,
            timeout_s=timeout_s,
            drain_s=table.drain_s,
        )
        run_router(settings, bound, partial(_show_start, address_of(bound)))


@contextmanager
def _listening(given: dict[str, Any]) -> Iterator[tuple[socket.socket, ServeTable, Guard]]:
    """The socket that a command listens on by its options, its settings, and who may ask."""
    from penstock_serve.server import guard as guards  # noqa: PLC0415  (needs the extras)
    from penstock_serve.server.server_socket import listen  # noqa: PLC0415

    guards.require_usable_options(given["api_key"], given["api_key_file"])
    table = serve_table(**given)
    with listen(table.host, table.port) as bound:
        set_up_logs(table.log_level, as_json=table.log_json)
        key = guards.find_key(table)
        warn_of_openness(table, key, on_command_line=given["api_key"] is not None)
        yield bound, table, guards.Guard(key, guards.read_hosts(table.allowed_hosts))


def _show_start(address: str, router: VllmRouter) -> None:
    up = [
        f"{sum(each.is_up for each in found)} of {counted(len(found), f'{role} server')}"
        for role, found in (("prefill", router.prefill), ("decode", router.decode))
    ]
    print(f"penstock: router at {api_at(address)}, up: {', '.join(up)}", flush=True)


PORT = 8090
"""Not 8000, where vLLM and Penstock are, nor 30000, where SGLang is."""
SERVERS_MAX = 64

MetricsOption = Annotated[
    list[str],
    typer.Option(
        metavar="URL",
        help="A server with metrics, such as http://127.0.0.1:8000, with or without /metrics; as "
        "often as there are servers.",
    ),
]
DashboardPortOption = Annotated[
    int, typer.Option(min=0, max=65535, help="The port; 0: a free one.")
]


@with_options(ServeOptions, *GUARD_AND_LOG)
def show_dashboard(
    *,
    metrics: MetricsOption,
    port: DashboardPortOption = PORT,
    **given: Any,  # noqa: ANN401 - see `ServeOptions`
) -> None:
    """Serve the live page for vLLM and SGLang servers, from their metrics.

    Servers may start and end at any time; one that does not answer is shown as down. SGLang needs
    --enable-metrics.
    """
    require_packages(NEEDED, "")
    from penstock_serve.server.server_socket import address_of  # noqa: PLC0415  (needs the extras)
    from penstock_serve.server.vllm_server import ServerUrl  # noqa: PLC0415

    if len(metrics) > SERVERS_MAX:
        raise ConfigError("--metrics", f"is there {len(metrics)} times, may be {SERVERS_MAX} times")
    urls = [ServerUrl.read("--metrics", _server(each)) for each in metrics]
    for url, times in Counter(urls).items():
        if times > 1:
            raise ConfigError("--metrics", f"has {url} twice, must have each server once")
    with _listening({"port": port, **given}) as (bound, _, guard):
        from penstock_serve.server.dashboard import run_dashboard  # noqa: PLC0415

        servers = counted(len(urls), "server")
        print(f"penstock: dashboard of {servers} at {address_of(bound)}/", flush=True)
        run_dashboard(urls, bound, guard)


def _server(url: str) -> str:
    """The address of a server whose metrics are named, too."""
    return server_url(url).removesuffix("/").removesuffix("/metrics")
