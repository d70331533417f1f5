"""Saves and loads of blocks over a link of a given rate, with and without compression.

    python -m lab.bench.compression_links '{"blocks": FILE, "links": [50], "rounds": 5, …}'

is run in a network of its own, whose loopback the kernel slows down (`tc`, tbf): a Redis there is
as far away as that link is. Both sides take turns in every round, and no process stands between
them that would take time of its own. It prints a line of JSON for each rate.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.bench.measure import summarize
from lab.bench.store_servers import StoreServers
from penstock.config.values import tier_options
from penstock.errors import UnavailableError
from penstock.store.probe import TierProbe
from penstock.store.process.messages import StoreTierConfig
from penstock.store.shared.io import encode_block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lab.bench.report import BenchReport

SIDES = {"plain": "off", "zstd": "zstd"}
ROUND_BYTES = 24 << 20
RUN_S = 600.0
TOOL_S = 30.0
BURST_S = 0.01
"""Of sending at full rate after a pause; the kernel's own clock ticks every 4 ms."""
BURST_BYTES_MIN = 256 << 10
"""A segment of loopback has up to 64 KiB, and must fit."""
QUEUE_BYTES = 64 << 20
"""Nothing is dropped: a link that is full makes its senders wait."""


def run_links(
    report: BenchReport,
    blocks: NDArray[np.uint8],
    *,
    links: Sequence[int],
    rounds: int,
    round_bytes: int = ROUND_BYTES,
) -> None:
    """Measures in a network of its own; adds rows, and what compression gains.

    Args:
        report: What it adds to.
        blocks: Of shape [blocks, bytes], in bfloat16.
        links: Rates in MB/s.
        rounds: In which both sides take turns.
        round_bytes: Of one save or load.

    Raises:
        UnavailableError: there is no such network here, or the measurement ended.
    """
    require_networks()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        file = Path(folder) / "blocks.npy"
        np.save(file, blocks)
        count = max(1, round_bytes // blocks.shape[1])
        asked = {"blocks": str(file), "links": list(links), "rounds": rounds, "count": count}
        report.progress(f"saving and loading over links of {', '.join(map(str, links))} MB/s")
        words = ["unshare", "--net", sys.executable, "-m", "lab.bench.compression_links"]
        done = subprocess.run(
            [*words, json.dumps(asked)], capture_output=True, text=True, timeout=RUN_S, check=False
        )
    if done.returncode:
        raise UnavailableError(f"links: the measurement ended: {done.stderr.strip()[-500:]}")
    reported = [json.loads(line) for line in done.stdout.splitlines()]
    for each in reported:
        tell_link(report, each)
    stored = sum(len(encode_block(block.data, item_bytes=2) or block) for block in blocks)
    tell_where_it_pays(report, reported, blocks.nbytes / stored)


def require_networks() -> None:
    """Raises `UnavailableError` where no network with a slow link can be made."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UnavailableError(f"links need {', '.join(missing)}, of iproute2 and util-linux")
    tried = subprocess.run(
        ["unshare", "--net", "true"], capture_output=True, text=True, timeout=TOOL_S, check=False
    )
    if os.geteuid() or tried.returncode:
        raise UnavailableError(f"links need root, who may make networks: {tried.stderr.strip()}")


def tell_link(report: BenchReport, reported: dict[str, Any]) -> None:
    """Adds what was measured over one link."""
    params = {"link": f"{reported['link']} MB/s", "block_bytes": reported["block_bytes"]}
    for metric, sides in reported["rates"].items():
        for side, rates in sides.items():
            report.add_row(
                bench="compression",
                side=side,
                params=params,
                metric=metric,
                unit="MB/s",
                summary=summarize([each / 1e6 for each in rates]),
            )
    for direction in ("save", "load"):
        sides = reported["rates"][direction]
        gained = median(
            zstd / plain for zstd, plain in zip(sides["zstd"], sides["plain"], strict=True)
        )
        report.add_note(
            f"link of {reported['link']} MB/s: {direction} with zstd, times plain: {gained:.2f}"
        )


def tell_where_it_pays(
    report: BenchReport, reported: Sequence[dict[str, Any]], ratio: float
) -> None:
    """Says below which link the time on the wire that is saved is more than the cores' time.

    By CPU time, so that it does not depend on how many others the cores have to serve; as if a
    thread did nothing while it waits for bytes.
    """
    costs = {
        side: median(1 / rate for each in reported for rate in each["rates"]["load, CPU"][side])
        for side in SIDES
    }
    more_s = costs["zstd"] - costs["plain"]
    if more_s > 0:
        pays = (1 - 1 / ratio) / more_s / 1e6
        report.add_note(
            f"whole loads of bfloat16, {ratio:.2f} times smaller: zstd pays on links below "
            f"{pays:.0f} MB/s for each core that the store process has"
        )


def measure_link(
    url: str, blocks: NDArray[np.uint8], *, rounds: int, count: int
) -> dict[str, dict[str, list[float]]]:
    """Bytes a second there and back of both sides, for each round."""
    block_bytes = blocks.shape[1]
    total = count * block_bytes
    options = {name: option.default for name, option in tier_options("redis").items()}
    metrics = ("save", "load", "load, CPU")
    rates: dict[str, dict[str, list[float]]] = {
        each: {side: [] for side in SIDES} for each in metrics
    }
    with (
        TierProbe(_tier(options, url, "off"), block_bytes, count, content=blocks) as plain,
        TierProbe(_tier(options, url, "zstd"), block_bytes, count, content=blocks) as zstd,
    ):
        probes = {"plain": plain, "zstd": zstd}
        for number in range(-1, rounds):  # The first round opens connections.
            for side in list(SIDES) if number % 2 else list(SIDES)[::-1]:
                saved_s = probes[side].save_new()
                began = time.process_time()
                loaded_s = probes[side].load_saved()
                cpu_s = time.process_time() - began
                if number >= 0:
                    for metric, took_s in zip(metrics, (saved_s, loaded_s, cpu_s), strict=True):
                        rates[metric][side].append(total / took_s)
    return rates


def _tier(options: dict[str, Any], url: str, compression: str) -> StoreTierConfig:
    # A slow link is what is measured: its calls have time.
    wishes: dict[str, Any] = {"url": url, "compression": compression, "timeout_s": TOOL_S}
    return StoreTierConfig(name="shared", kind="redis", options={**options, **wishes})


def shape_loopback(megabytes_s: int) -> None:
    """Slows the loopback of this network down."""
    rate = megabytes_s * 1_000_000
    burst = max(BURST_BYTES_MIN, int(rate * BURST_S))
    words = ["tc", "qdisc", "replace", "dev", "lo", "root", "tbf", "rate", f"{8 * rate}bit"]
    words += ["burst", str(burst), "limit", str(QUEUE_BYTES)]
    subprocess.run(words, check=True, timeout=TOOL_S)


def main(reported: dict[str, Any]) -> None:
    """Measures in the network that it was started in."""
    blocks = np.load(reported["blocks"])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=TOOL_S)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        StoreServers(Path(folder), Path(sys.executable)) as servers,
    ):
        url = f"redis://127.0.0.1:{servers.start_redis()}"
        for link in reported["links"]:
            shape_loopback(link)
            rates = measure_link(url, blocks, rounds=reported["rounds"], count=reported["count"])
            answer = {"link": link, "block_bytes": blocks.shape[1], "rates": rates}
            sys.stdout.write(f"{json.dumps(answer)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
