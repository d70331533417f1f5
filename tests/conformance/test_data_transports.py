"""Every way of remote writing says the same sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.fixtures.file_device import PROGRAM, FileDevice
from lab.fixtures.inproc import InprocFabric
from penstock.errors import UnavailableError
from penstock.testing.data_transport_suite import AREA_BYTES, DataTransportSuite
from penstock.testing.writer_process import LocalWriter, ProcessWriter, SuiteWriter
from penstock.transport.shared_memory import SharedTarget

if TYPE_CHECKING:
    from lab.fixtures.inproc import InprocLink
    from penstock.transport.remote import Area, Target


class TestInproc(DataTransportSuite):
    @pytest.fixture(autouse=True)
    def make_fabric(self) -> None:
        self.fabric = InprocFabric()

    def make_target(self) -> Target:
        return self.fabric.target()

    def make_writer(self) -> SuiteWriter:
        return LocalWriter(self.connect)

    def connect(self, description: bytes) -> InprocLink:
        try:
            return self.fabric.connect(description)
        except UnavailableError as error:
            raise ValueError(str(error)) from error


class TestSharedMemory(DataTransportSuite):
    """The writer is a process of its own, and is ended by SIGKILL."""

    def make_target(self) -> Target:
        return SharedTarget()

    def make_writer(self) -> SuiteWriter:
        return ProcessWriter()


class TestSharedDeviceMemory(DataTransportSuite):
    """The same where areas lie in memory of a device that both processes map."""

    def make_target(self) -> Target:
        return SharedTarget(device=FileDevice())

    def make_writer(self) -> SuiteWriter:
        return ProcessWriter(program=PROGRAM)


class TestDeviceMemoryThatNobodyMaps(DataTransportSuite):
    """Its areas are moved to the host when their writers say so."""

    def make_target(self) -> Target:
        return SharedTarget(device=FileDevice())

    def make_writer(self) -> SuiteWriter:
        return ProcessWriter()

    def join(self, target: Target, writer: SuiteWriter, size: int = AREA_BYTES) -> Area:
        area = super().join(target, writer, size)
        assert target.notices() == []
        area.memory[:] = 0
        writer.observe(0)
        return area
