"""NIXL says what every data transport says; its writer has a relay, which is stopped with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.relay.sides import NixlTarget
from penstock.testing.data_transport_suite import DataTransportSuite
from penstock.testing.writer_process import ProcessWriter, SuiteWriter
from tests.relay.relays import needs_nixl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.transport.remote import Target


@pytest.fixture(scope="module", autouse=True)
def relay() -> Iterator[None]:
    """Keeps the relay of this process: it ends with the last target, and starts in a second."""
    kept = NixlTarget()
    yield
    kept.close()


@needs_nixl
class TestNixl(DataTransportSuite):
    moves_itself = True
    fences_at_once = True

    def make_target(self) -> Target:
        return NixlTarget()

    def make_writer(self) -> SuiteWriter:
        return ProcessWriter("nixl")
