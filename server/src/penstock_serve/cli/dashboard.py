"""`penstock dashboard`: the live page for vLLM and SGLang servers, from their `/metrics`."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import Annotated, TypeAlias

import typer

from penstock.errors import ConfigError, UnavailableError, counted, server_install_hint
from penstock.toolkit import set_up_logs
from penstock_serve.cli.router import NEEDED
from penstock_serve.cli.serve import (
    AllowedHostsOption,
    ApiKeyFileOption,
    ApiKeyOption,
    HostOption,
    LogJsonOption,
    LogLevelOption,
    serve_table,
    server_url,
    warn_of_openness,
)

PORT = 8090
"""Not 8000, where vLLM and Penstock are, nor 30000, where SGLang is."""
SERVERS_MAX = 64

MetricsOption: TypeAlias = Annotated[
    list[str],
    typer.Option(
        metavar="URL",
        help="A server with metrics, such as http://127.0.0.1:8000, with or without /metrics; as "
        "often as there are servers.",
    ),
]
DashboardPortOption: TypeAlias = Annotated[
    int, typer.Option(min=0, max=65535, help="The port; 0: a free one.")
]


def show_dashboard(
    *,
    metrics: MetricsOption,
    host: HostOption = None,
    port: DashboardPortOption = PORT,
    api_key: ApiKeyOption = None,
    api_key_file: ApiKeyFileOption = None,
    allowed_hosts: AllowedHostsOption = None,
    log_level: LogLevelOption = None,
    log_json: LogJsonOption = None,
) -> None:
    """Serve the live page for vLLM and SGLang servers, from their metrics.

    Servers may start and end at any time; one that does not answer is shown as down. SGLang needs
    --enable-metrics.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UnavailableError(f"{missing[0]} is not installed: {server_install_hint()}")
    from penstock_serve.server.guard import (  # noqa: PLC0415  (needs the extras)
        Guard,
        find_key,
        read_hosts,
        require_usable_options,
    )
    from penstock_serve.server.server_socket import address_of, listen  # noqa: PLC0415
    from penstock_serve.server.vllm_server import ServerUrl  # noqa: PLC0415

    if len(metrics) > SERVERS_MAX:
        raise ConfigError("--metrics", f"is there {len(metrics)} times, may be {SERVERS_MAX} times")
    urls = [ServerUrl.read("--metrics", _server(each)) for each in metrics]
    for url, times in Counter(urls).items():
        if times > 1:
            raise ConfigError("--metrics", f"has {url} twice, must have each server once")
    require_usable_options(api_key, api_key_file)
    table = serve_table(
        host=host,
        api_key=api_key,
        api_key_file=api_key_file,
        allowed_hosts=allowed_hosts,
        log_level=log_level,
        log_json=log_json,
    )
    with listen(table.host, port) as bound:
        from penstock_serve.server.dashboard import run_dashboard  # noqa: PLC0415

        set_up_logs(table.log_level, as_json=table.log_json)
        key = find_key(table)
        warn_of_openness(table, key, on_command_line=api_key is not None)
        servers = counted(len(urls), "server")
        print(f"penstock: dashboard of {servers} at {address_of(bound)}/", flush=True)
        run_dashboard(urls, bound, Guard(key, read_hosts(table.allowed_hosts)))


def _server(url: str) -> str:
    """The address of a server whose metrics are named, too."""
    return server_url(url).removesuffix("/").removesuffix("/metrics")
