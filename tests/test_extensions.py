"""Parts that another distribution adds: a policy, a tier kind and a data transport.

The distribution is a real one, as an installer leaves it: a module and its metadata in a folder on
the path.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from penstock.cache.eviction import LruPolicy, policy_named
from penstock.config import parse_config
from penstock.errors import ConfigError
from penstock.extensions import OTHER_TIERS
from penstock.handoff.pair import transport_named
from penstock.testing import (
    DataTransportSuite,
    PolicySuite,
    ProcessWriter,
    SuiteWriter,
    SumKeepingTierSuite,
)
from penstock.transport.unix_sockets import private_folder, socket_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.cache.eviction import EvictionPolicy, Standing
    from penstock.tiers.base import SlotStore
    from penstock.transport.remote import Target
    from penstock.vocabulary.layout import Layout

    Install = Callable[..., None]

PARTS = """
from penstock.cache.eviction import LruPolicy
from penstock.config import TierOption, Whole
from penstock.errors import ConfigError, UnavailableError
from penstock.extensions import DataTransport, TierFactory
from penstock.tiers.host import MemoryTier
from penstock.transport.shared_memory import SharedTarget
from penstock.transport.shared_memory import connect_shared

used = []


class Fifo(LruPolicy):
    name = "fifo"

    def touch(self, nodes, *, tick):
        used.append("policy")


def build(layout, slot_count, *, name, options):
    if options["failures"] == 1:
        raise UnavailableError("the pool has no room")
    if options["failures"] == 2:
        raise ConfigError("failures", "is 2, must be another number")
    used.append(f"tier {name} {options['failures']}")
    return MemoryTier(layout, slot_count - (options["failures"] == 3))


pool = TierFactory(build=build, options={"failures": TierOption(Whole(minimum=0, maximum=9), 0)})


def open_target(folder):
    used.append("target")
    return SharedTarget(huge_pages=False, folder=folder)


def connect(description):
    used.append("link")
    return connect_shared(description)


wire = DataTransport(open_target=open_target, connect=connect)
"""
ENTRY_POINTS = {
    "penstock.policies": "fifo = outside_parts:Fifo",
    "penstock.tiers": "pool = outside_parts:pool",
    "penstock.transports": "wire = outside_parts:wire",
}
CONFIG = """
version = 1
model.name = "toy"
cache = { block_tokens = 4, blocks = 8, eviction = "fifo" }
tiers = [{ name = "below", kind = "pool", blocks = 16, failures = FAILURES }]
"""


def install_into(folder: Path, name: str, points: dict[str, str]) -> None:
    facts = folder / f"{name}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\n{point}\n" for group, point in points.items()]
    (facts / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module", autouse=True)
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What the installed parts were used for."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "outside_parts.py").write_text(PARTS)
    install_into(folder, "outside-parts", ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder))
        import outside_parts  # noqa: PLC0415

        yield outside_parts.used
    sys.modules.pop("outside_parts")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name, points: install_into(tmp_path, name, points)


class TestPolicy(PolicySuite):
    def make_policy(self, slot_count: int, standing: Standing) -> EvictionPolicy:
        return policy_named("fifo")(slot_count, standing)


class TestTier(SumKeepingTierSuite):
    def make_tier(self, layout: Layout) -> SlotStore:
        factory = OTHER_TIERS.find("pool", "kind")
        assert factory is not None
        tier: SlotStore = factory.build(
            layout, layout.block_count, name="below", options={"failures": 0}
        )
        return tier


@pytest.mark.long  # Each sentence has a process; the next test is a share of it.
class TestTransport(DataTransportSuite):
    def make_target(self) -> Target:
        target: Target = transport_named("wire").open_target(None)
        return target

    def make_writer(self) -> SuiteWriter:
        return ProcessWriter("wire")


def test_a_writer_in_another_process_uses_the_transport_of_another_distribution() -> None:
    suite = TestTransport()
    target, writer = suite.make_target(), suite.make_writer()
    try:
        suite.test_bytes_land_where_they_belong_and_nowhere_else(target, writer)
    finally:
        writer.end()
        target.close()


def open_cache(*, failures: int = 0) -> penstock.Cache:
    config = parse_config(CONFIG.replace("FAILURES", str(failures)))
    return penstock.open(config, kv=np.zeros((8, 4, 2), dtype=np.float32))


def test_a_cache_uses_a_policy_and_a_tier_of_another_distribution(outside: list[str]) -> None:
    outside.clear()
    cache = open_cache(failures=7)

    for _ in range(2):
        with cache.acquire(range(8)) as lease:
            lease.commit(list(range(8))[lease.cached_tokens :])
        while cache.busy:
            cache.step()

    assert {*outside} == {"tier below 7", "policy"}
    assert cache.statistics().tiers[1].ready == 2
    assert parse_config(cache.config.to_toml()) == cache.config


def test_what_the_tier_of_another_distribution_refuses_is_named_as_in_the_file() -> None:
    assert open_cache(failures=1).health().reasons == (
        "tier below is off: rank 0: the pool has no room",
    )
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.failures: is 2, must be another number"):
        open_cache(failures=2)
    with pytest.raises(ConfigError, match=r"kind: is 'pool', which made a MemoryTier; must make"):
        open_cache(failures=3)
    with pytest.raises(ConfigError, match=r"failures: is 10, must be a whole number from 0 to 9"):
        open_cache(failures=10)


def a_pair(transport: str) -> penstock.HandoffPair:
    folder = private_folder()
    prefill, decode = (
        penstock.HandoffEngine(name=name, address=f"ipc://{socket_path(folder)}")
        for name in ("prefill", "decode")
    )
    return penstock.HandoffPair(
        prefill=prefill, decode=decode, model="toy", weights="1", transport=transport
    )


def hand_over(
    kv: NDArray[np.float32], of_prefill: penstock.HandoffPair, of_decode: penstock.HandoffPair
) -> penstock.HandoffResult:
    """Hands three tokens over, to block 2 of `kv`."""
    with ExitStack() as stack:
        source = stack.enter_context(penstock.open_prefill(of_prefill, kv=kv + 1, block_tokens=4))
        target = stack.enter_context(penstock.open_decode(of_decode, kv=kv, block_tokens=4))
        target.claim("h", [1, 2, 3], slots=[2], timeout_s=30.0)
        source.offer("h", [1, 2, 3], slots=[0])
        source.computed({"h": 3})
        source.first_token("h", 9)
        results: list[penstock.HandoffResult] = []
        while not results:  # The claim ends by itself.
            source.step()
            results = target.step()
            target.wait(time.monotonic() + 0.01, descriptors=source.descriptors)
    return results[0]


def test_a_handoff_uses_the_transport_of_another_distribution(outside: list[str]) -> None:
    outside.clear()
    kv, pair = np.zeros((4, 4, 2), dtype=np.float32), a_pair("wire")

    result = hand_over(kv, pair, pair)

    assert result.delivered
    assert kv[2, :3].all()
    assert outside == ["target", "link"]


def test_engines_with_different_transports_refuse_each_other() -> None:
    kv, pair = np.zeros((4, 4, 2), dtype=np.float32), a_pair("wire")

    result = hand_over(kv, pair, replace(pair, transport="shared_memory"))

    assert not result.delivered
    assert "transport is 'shared_memory' here and 'wire' there" in result.why


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "cache.eviction = 'fif'",
            "cache.eviction: is 'fif', must be one of lru, adaptive, fifo; ",
        ),
        (
            "tiers = [{name = 'a', kind = 'p'}]",
            "'p', must be one of memory, host, disk, redis, mooncake, objects, shared, peers, pool",
        ),
        ("handoff.transport = 'w'", "is 'w', must be one of auto, shared_memory, gpu, nixl, wire"),
    ],
)
def test_a_name_that_nobody_has_is_refused_with_those_there_are(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config(f"version = 1\nmodel.name = 'm'\ncache.blocks = 8\n{text}\n")

    assert problem in str(refusal.value)


@pytest.mark.parametrize(
    ("point", "problem"),
    [
        (
            "lost = nowhere:Policy",
            "cannot be loaded: ModuleNotFoundError: No module named 'nowhere'; must be "
            "'module:object' and name a callable (slot_count, standing) that makes an",
        ),
        ("lost = outside_parts:Nobody", "cannot be loaded: AttributeError: module 'outside_parts'"),
        ("lost = outside_parts:used", "names a list, must name a callable (slot_count, standing)"),
        ("lost = a b", "cannot be loaded: AttributeError"),
    ],
)
def test_a_broken_entry_point_is_one_clear_message(
    install: Install, point: str, problem: str
) -> None:
    install("broken-parts", {"penstock.policies": point})

    with pytest.raises(ConfigError) as refusal:
        policy_named("lost", place="cache.eviction")

    value = point.partition(" = ")[2]
    named = f"lost = {value!r} of distribution broken-parts in group 'penstock.policies'"
    assert str(refusal.value).startswith(f"cache.eviction: is 'lost': the entry point {named}")
    assert problem in str(refusal.value)


def test_two_entry_points_of_one_name_are_refused_with_both_values(install: Install) -> None:
    install("first-parts", {"penstock.transports": "double = outside_parts:wire"})
    install("second-parts", {"penstock.transports": "double = elsewhere:wire"})

    with pytest.raises(ConfigError) as refusal:
        transport_named("double")

    for fact in (
        "'penstock.transports'",
        "'outside_parts:wire' of distribution first-parts",
        "'elsewhere:wire' of distribution second-parts",
        "uninstall all but one",
    ):
        assert fact in str(refusal.value)


def test_a_name_that_is_built_in_is_never_looked_for(install: Install) -> None:
    install("rude-parts", {"penstock.policies": "lru = nowhere:Policy"})

    assert policy_named("lru") is LruPolicy
