"""A client of a store process with 60 saves under way, until it is killed: `main([CONFIG])`."""

from __future__ import annotations

import os

from penstock.store.process.messages import StoreConfig
from tests.store.store_lab import StoreEngine


def main(arguments: list[str]) -> None:
    engine = StoreEngine(StoreConfig.from_json(arguments[0]), life=5, ranks=2)
    engine.up()
    engine.save([1])
    for number in range(60):
        engine.order_save([number], [number])
    engine.link.dispatch()
    os.write(1, b"ready\n")
    engine.until(lambda: False, 60)
