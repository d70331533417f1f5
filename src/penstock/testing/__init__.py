"""Conformance suites: what every tier, mover, policy and data transport must do.

    from penstock.testing import TierSuite

    class TestMyTier(TierSuite):
        def make_tier(self, layout): ...

Inherit a suite in a test module, implement its abstract methods, and pytest runs every sentence
of it on your class. The suites need pytest.

| you write            | inherit                                                               |
|----------------------|-----------------------------------------------------------------------|
| a tier               | `TierSuite`, or `SumKeepingTierSuite` if it keeps checksums           |
| a mover              | `SavingMoverSuite`, `LoadingMoverSuite` or `CheckingMoverSuite`;      |
|                      | `MoverSuite` for any other                                            |
| an eviction policy   | `PolicySuite`                                                         |
| a data transport     | `DataTransportSuite`                                                  |
| a client of a store  | `BlobStoreSuite`, or `FailingBlobStoreSuite` if a test can stop it    |

Public: `TierSuite`, `SumKeepingTierSuite`, `MoverSuite`, `SavingMoverSuite`, `LoadingMoverSuite`,
`CheckingMoverSuite`, `PolicySuite`, `DataTransportSuite`, `BlobStoreSuite`,
`FailingBlobStoreSuite`; what they take, `Ends`, `SuiteWriter`,
`LocalWriter` and `ProcessWriter`; `failing_seed`; for tests of layouts `tier_suite.draw_blocks`,
`tier_suite.read_slots` and `tier_suite.write_slots`. Suites for parts that only Penstock itself can
have, as control channels, are in `lab/fixtures` of its repository.
docs/conformance.md has an example.

The one rule: this file loads no suite. Processes that a suite starts are modules of this package,
and need neither pytest nor NumPy before their work begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy_names import homes_of, load_name

if TYPE_CHECKING:
    from penstock.testing.blob_store_suite import BlobStoreSuite as BlobStoreSuite
    from penstock.testing.blob_store_suite import FailingBlobStoreSuite as FailingBlobStoreSuite
    from penstock.testing.data_transport_suite import DataTransportSuite as DataTransportSuite
    from penstock.testing.mover_suite import CheckingMoverSuite as CheckingMoverSuite
    from penstock.testing.mover_suite import Ends as Ends
    from penstock.testing.mover_suite import LoadingMoverSuite as LoadingMoverSuite
    from penstock.testing.mover_suite import MoverSuite as MoverSuite
    from penstock.testing.mover_suite import SavingMoverSuite as SavingMoverSuite
    from penstock.testing.policy_suite import PolicySuite as PolicySuite
    from penstock.testing.seeds import failing_seed as failing_seed
    from penstock.testing.tier_suite import SumKeepingTierSuite as SumKeepingTierSuite
    from penstock.testing.tier_suite import TierSuite as TierSuite
    from penstock.testing.writer_process import LocalWriter as LocalWriter
    from penstock.testing.writer_process import ProcessWriter as ProcessWriter
    from penstock.testing.writer_process import SuiteWriter as SuiteWriter
else:

    def __getattr__(name: str) -> object:
        return load_name(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *homes_of(__name__)})
