"""A process beside the router that is measured: instances, clients, or a sender of KV events.

python -m lab.bench.router_http_child instances ADDRESS COUNT
python -m lab.bench.router_http_child request|stream|models SERVER SECONDS
python -m lab.bench.router_http_child events ADDRESS SECONDS

Each says a line when it is ready. All but `instances` then wait for a line, work, and say how much
they have done.
"""

from __future__ import annotations

import asyncio
import json
import random
import select
import sys
import time

from penstock import BlocksRemoved, BlocksStored
from penstock.config import ServeTable, parse_config
from penstock.errors import UnavailableError
from penstock.toolkit import BacklogError, Channel, ChannelSettings, ReceivedFrame, dial
from penstock_serve.engine import messages as ms
from penstock_serve.engine.requests import Output, Reason, Request
from penstock_serve.engine.sampling_options import Sampled
from penstock_serve.server.plan import secret_between

PROMPT_TOKENS = 1_024
EVENT_KEYS = 16
CLIENTS = 16
START_S = 30.0
CONFIG = parse_config(
    'version = 1\nmodel.name = "model"\ncache = { blocks = 4096, block_tokens = 16 }\n'
)


def join(address: str, name: str) -> Channel:
    """An instance of the router."""
    secret = secret_between(ServeTable(), {"serve.router": address})
    channel = dial(address, name=name, secret=secret, settings=ChannelSettings())
    deadline = time.monotonic() + START_S
    while not channel.is_open:
        if time.monotonic() > deadline:
            raise UnavailableError(f"no router at {address}")
        channel.receive(deadline=time.monotonic() + 0.05)
    ready = ms.InstanceReady(
        model="model", positions=1 << 16, stop_tokens=[], config=CONFIG, tiers=["device"]
    )
    channel.send(ms.encode(ready))
    return channel


def serve(address: str, count: int) -> None:
    """Answers each request with one token, until its input ends."""
    channels = {}
    poll = select.poll()
    poll.register(sys.stdin, select.POLLHUP)
    for number in range(count):
        channel = join(address, f"instance-{number}")
        channels[channel.descriptor] = channel
        poll.register(channel.descriptor, select.POLLIN)
    # The router reads their first messages meanwhile.
    poll.poll(500)
    say("ready")
    while True:
        some = sum(map(_answer, channels.values()))
        if not some and sys.stdin.fileno() in dict(poll.poll(1000)):
            return


def _answer(channel: Channel) -> bool:
    some = False
    while isinstance(said := channel.receive(), ReceivedFrame):
        some = True
        message = ms.read_by_instance(said.frame)
        if isinstance(message, Request):
            output = Output(
                request=message.id, answer=0, sampled=Sampled(65, 0.0), reason=Reason.LENGTH
            )
            channel.send(ms.encode(output))
    return some


def send_events(address: str, seconds: float) -> int:
    """Sends events, half of which take back what the others say; returns how many."""
    channel = join(address, "events")
    rng = random.Random(1)
    frames = []
    for number in range(500):
        keys = [rng.randbytes(16) for _ in range(EVENT_KEYS)]
        stored = BlocksStored(sequence=number, epoch=0, tier="host", keys=keys, parent=None)
        removed = BlocksRemoved(sequence=number, epoch=0, tier="host", keys=keys)
        frames += [ms.encode(ms.CacheChanged(events=[each])) for each in (stored, removed)]
    wait_for_go()
    sent, ends = 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            channel.send(frames[sent % len(frames)])
            sent += 1
        except BacklogError:
            channel.receive(deadline=time.monotonic() + 0.002)
    # So that all of it was taken before the CPU time is read.
    channel.receive(deadline=time.monotonic() + 0.5)
    return sent


async def ask(path: str, server: str, seconds: float) -> int:
    """Asks over several connections, one request after the other; says how many."""
    host, _, port = server.partition(":")
    wait_for_go()
    ends = time.monotonic() + seconds
    counts = await asyncio.gather(
        *(_client(path, host, int(port), ends, seed) for seed in range(CLIENTS))
    )
    return sum(counts)


async def _client(path: str, host: str, port: int, ends: float, seed: int) -> int:
    rng = random.Random(seed)
    start = list(range(PROMPT_TOKENS - 64))
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    count = 0
    while time.monotonic() < ends:
        if path == "models":
            writer.write(f"GET /v1/models HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        else:
            prompt = [each % 256 for each in start] + rng.choices(range(256), k=64)
            asked = {"prompt": prompt, "max_tokens": 1, "stream": path == "stream"}
            body = json.dumps(asked).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise UnavailableError(f"the router refused: {answer.decode()}")
        if b"transfer-encoding: chunked" in answer.lower():
            await reader.readuntil(b"0\r\n\r\n")
        else:
            length = answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
        count += 1
    writer.close()
    return count


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def wait_for_go() -> None:
    say("ready")
    sys.stdin.readline()


def main(kind: str, place: str, much: str) -> None:
    if kind == "instances":
        serve(place, int(much))
    elif kind == "events":
        say(send_events(place, float(much)))
    else:
        say(asyncio.run(ask(kind, place, float(much))))


if __name__ == "__main__":
    main(*sys.argv[1:])
