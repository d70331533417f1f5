"""An engine of tests with a tier of peers: it computes, finds and resets as it is told.

python -m tests.machines.peer_program FOLDER LISTEN PEERS [KEYS [TRANSPORT]]

    save N      computes prompt N, and says how many of its tokens were cached
    find N      looks for it among the peers first
    listed      says how many blocks peers have listed
    health      says how it is
    reset       begins anew
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

from penstock.logs import set_up_logs
from tests.runtime.sharing_engine import SharingEngine
from tests.runtime.stored_engine import prompt

LIMITS = "ask_ms = 2000\ntimeout_s = 1.5\n"


def carry_out(engine: SharingEngine, words: list[str]) -> object:
    match words:
        case ["save", number]:
            return engine.save(prompt(int(number)))
        case ["find", number]:
            engine.look_for(prompt(int(number)))
            return engine.answer(prompt(int(number)))
        case ["listed"]:
            store = engine.cache.statistics().tiers[-1].store
            return None if store is None else store.blocks
        case ["health"]:
            return engine.cache.health()
        case ["reset"]:
            return engine.cache.reset("it was asked for")
    return f"what is {words}?"


def say(answer: object) -> None:
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


def run(engine: SharingEngine) -> None:
    say("ready")
    said = b""
    while True:
        engine.cache.wait(time.monotonic() + 0.2, descriptors=[0])
        engine.cache.step()
        if select.select([0], [], [], 0)[0]:
            read = os.read(0, 4096)
            if not read:
                return
            *lines, said = (said + read).split(b"\n")
            for line in lines:
                say(carry_out(engine, line.decode().split()))


def main(folder: str, listen: str, peers: str, keys: str = "", transport: str = "zeromq") -> None:
    set_up_logs("warning", as_json=False, fields={})
    store = f'kind = "peers"\nlisten = "{listen}"\npeers = "{peers}"\nkeys_file = "{keys}"\n'
    store += f'transport = "{transport}"\n'
    with SharingEngine(Path(folder), store, LIMITS) as engine:
        engine.wait_until_on()
        run(engine)


if __name__ == "__main__":
    main(*sys.argv[1:])
