"""What an eviction policy has learned outlives its process, and no file of it does harm."""

from __future__ import annotations

import logging
import os
import struct
import threading
import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

import penstock
from penstock.cache.eviction import SAVED_BYTES_MAX, LearnedPolicy
from penstock.machine.machine import CacheMachine
from penstock.replay.simulation import sized_cache
from penstock.runtime.saved_curves import SavedCurves, traffic_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOML = """
version = 1
[model]
name = "m"
weights_version = "v1"
[cache]
block_tokens = 4
blocks = 32
eviction = "learned"
[[tiers]]
name = "host"
kind = "host"
blocks = 16
eviction = "learned"
[[tiers]]
name = "disk"
kind = "disk"
path = "{path}"
gib = 0.03
"""


def busy_policy() -> LearnedPolicy:
    """A policy that has seen prompts come back after two seconds, and others not at all."""
    policy = LearnedPolicy(4000, dict.fromkeys(range(4000), 0).get)
    policy.resize(4000)
    for number in range(200):
        policy.advance(10.0 * number)
        back = np.arange(20 * number, 20 * number + 4, dtype=np.int32)
        gone = np.arange(20 * number + 4, 20 * number + 20, dtype=np.int32)
        for nodes in (back, gone):
            policy.add(nodes, [b"%d" % node for node in nodes.tolist()], tick=number)
            policy.release(nodes, tick=number)
        policy.advance(10.0 * number + 2.0)
        policy.touch(back, tick=number)
    return policy


def sealed(head: bytes, body: bytes) -> bytes:
    return head + body + struct.pack("<Q", xxh3_64_intdigest(head + body))


def hostile_files() -> Iterator[tuple[str, bytes]]:
    whole = LearnedPolicy(8, {}.get).learned()
    head = whole[:14]
    count = len(zlib.decompress(whole[14:-8]))
    yield "empty", b""
    yield "too short", whole[:20]
    yield "cut", whole[:-1]
    yield "a bit flipped", whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]
    yield "text", b"{" * 500
    yield "another version", sealed(head[:8] + b"\2\0" + head[10:], whole[14:-8])
    yield "other classes", sealed(head[:10] + b"\1\0" + head[12:], whole[14:-8])
    yield "not compressed", sealed(head, bytes(100))
    yield "too few counts", sealed(head, zlib.compress(bytes(count - 2)))
    yield "far too many", sealed(head, zlib.compress(bytes(1 << 26)))
    yield "counts without end", sealed(head, zlib.compress(b"\xff" * count))
    yield "huge", bytes(1 << 20)
    yield "lengths without end", sealed(head, zlib.compress(bytes(count - 12) + b"\0\x30" * 6))


HOSTILE = dict(hostile_files())


def test_what_was_learned_comes_back_in_few_bytes() -> None:
    policy = busy_policy()
    data = policy.learned()
    other = LearnedPolicy(50, {}.get)
    other.recall(data)

    assert len(data) < 16 << 10
    before = policy._curves.counts()
    assert other._curves.counts() == pytest.approx(before, rel=0.03, abs=1.1)
    assert other._shared.usually_hit.mean == pytest.approx(2.0, rel=0.01)
    # It is known what such blocks are worth, but LRU has not been beaten here yet.
    fresh = LearnedPolicy(50, {}.get)._curves
    assert other._curves.values.max() > 2 * fresh.values.max()
    assert other._curves.ranking.by_use


@pytest.mark.parametrize("what", HOSTILE)
def test_bytes_that_were_not_saved_are_refused_and_change_nothing(what: str) -> None:
    policy = LearnedPolicy(8, {}.get)
    before = policy.learned()

    with pytest.raises(ValueError, match="it"):
        policy.recall(HOSTILE[what])
    assert policy.learned() == before


@pytest.fixture
def curves(tmp_path: Path) -> SavedCurves:
    found = SavedCurves.of(config_of(tmp_path), machine_of(config_of(tmp_path)))
    assert found is not None
    return found


def quota_config(folder: Path) -> penstock.Config:
    """Like the other, and tenants have shares of the host tier."""
    quotas = '[tiers.quotas]\nacme = 0.5\n"*" = 0.25\n'
    text = TOML.format(path=folder).replace(
        '[[tiers]]\nname = "disk"', f'{quotas}[[tiers]]\nname = "disk"'
    )
    return penstock.parse_config(text)


def machine_of(config: penstock.Config) -> CacheMachine:
    return CacheMachine(sized_cache(config, token_bytes=1024), incarnation=1)


def config_of(folder: Path) -> penstock.Config:
    return penstock.parse_config(TOML.format(path=folder))


def test_without_a_disk_or_a_policy_that_learns_there_is_nothing_to_save(tmp_path: Path) -> None:
    config = penstock.parse_config(TOML.format(path=tmp_path).replace("learned", "lru"))
    assert SavedCurves.of(config, machine_of(config)) is None


@pytest.mark.parametrize("what", HOSTILE)
def test_a_damaged_file_is_logged_once_and_replaced(
    what: str, tmp_path: Path, curves: SavedCurves, caplog: pytest.LogCaptureFixture
) -> None:
    curves.save()
    file = next(tmp_path.glob("*.host.curves"))
    good = file.read_bytes()
    file.write_bytes(HOSTILE[what])
    with caplog.at_level(logging.WARNING):
        curves.restore()

    assert [record.getMessage().partition(" cause=")[0] for record in caplog.records] == [
        f"curves not used: file={file}"
    ]
    assert len(good) < SAVED_BYTES_MAX
    curves.save()
    assert file.read_bytes() == good


def test_neither_a_pipe_nor_a_folder_in_place_of_a_file_keeps_a_cache_waiting(
    tmp_path: Path, curves: SavedCurves, caplog: pytest.LogCaptureFixture
) -> None:
    curves.save()
    for file, put in zip(sorted(tmp_path.iterdir()), (os.mkfifo, os.mkdir), strict=True):
        file.unlink()
        put(file)
    with caplog.at_level(logging.WARNING):
        curves.restore()

    assert [record.getMessage()[:15] for record in caplog.records] == ["curves not used"] * 2


def test_files_are_the_owners_alone_and_nothing_else_is_left(
    tmp_path: Path, curves: SavedCurves
) -> None:
    curves.save()

    files = sorted(tmp_path.iterdir())
    assert [file.name.partition(".")[2] for file in files] == ["device.curves", "host.curves"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_what_could_not_be_put_in_place_is_not_left_behind(
    tmp_path: Path, curves: SavedCurves, caplog: pytest.LogCaptureFixture
) -> None:
    curves.save()
    files = sorted(tmp_path.iterdir())
    for file in files:
        file.unlink()
        file.mkdir()
    with caplog.at_level(logging.WARNING):
        curves.save()

    assert sorted(tmp_path.iterdir()) == files
    assert [record.getMessage()[:16] for record in caplog.records] == ["curves not saved"] * 2


def test_a_folder_that_cannot_be_written_to_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path / "missing")
    curves = SavedCurves.of(config, machine_of(config))
    assert curves is not None
    with caplog.at_level(logging.WARNING):
        curves.restore()
        curves.save()

    assert [record.getMessage()[:16] for record in caplog.records] == ["curves not saved"] * 2


def learn(config: penstock.Config, folder: Path) -> None:
    """Leaves behind the curves of a busy policy, for whoever asks for any of this cache's."""
    curves = SavedCurves.of(config, machine_of(config))
    assert curves is not None
    curves.save()
    for file in folder.glob("*.curves"):
        file.write_bytes(busy_policy().learned())


def test_tenants_with_quotas_begin_with_what_such_tenants_learned(tmp_path: Path) -> None:
    config = quota_config(tmp_path)
    learn(config, tmp_path)
    machine = machine_of(config)
    curves = SavedCurves.of(config, machine)
    assert curves is not None
    curves.restore()

    assert sorted(file.name.partition(".")[2] for file in tmp_path.iterdir()) == [
        "device.curves",
        "host.curves",
        "host.quotas.curves",
    ]
    host = machine._books.tiers[1]
    for tenant, name in enumerate(("acme", "another")):
        host.introduce(tenant, name)
    policies = [policy for _, policy in host.quota_policies()]
    assert len(policies) == 2
    for policy in policies:
        assert isinstance(policy, LearnedPolicy)
        assert policy._curves.counts().sum() > 1000
        assert policy._curves is not host.policy._curves  # type: ignore[attr-defined]


def test_a_tenant_learns_for_the_next_process(tmp_path: Path) -> None:
    config = quota_config(tmp_path)
    machine = machine_of(config)
    host = machine._books.tiers[1]
    host.introduce(0, "acme")
    ((_, policy),) = host.quota_policies()
    before = machine.learned()
    node = np.arange(4, dtype=np.int32)
    policy.add(node, [b"%d" % each for each in node.tolist()], tick=1)
    after = machine.learned()

    assert [name for name in after if after[name] != before[name]] == ["host.quotas"]


@pytest.mark.parametrize(
    ("old", "new"),
    [('"v1"', '"v2"'), ('"m"', '"another model"'), ("block_tokens = 4", "block_tokens = 8")],
)
def test_curves_are_of_the_traffic_so_new_weights_keep_them_and_another_model_has_its_own(
    old: str, new: str, tmp_path: Path
) -> None:
    learn(config_of(tmp_path), tmp_path)
    text = TOML.format(path=tmp_path).replace(old, new)
    machine = machine_of(penstock.parse_config(text))
    curves = SavedCurves.of(penstock.parse_config(text), machine)
    assert curves is not None
    curves.restore()

    policy = machine._books.device.policy
    assert isinstance(policy, LearnedPolicy)
    assert (policy._curves.counts().sum() > 1000) == (new == '"v2"')


def test_what_is_learned_before_new_weights_and_after_them_is_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    kv = np.zeros((32, 64), dtype=np.int64)
    with penstock.open(config_of(tmp_path / "disk"), kv=kv) as cache:
        cache.change_weights("v2")

    names = [file.name.partition(".")[0] for file in (tmp_path / "disk").glob("*.curves")]
    changed = TOML.format(path=tmp_path).replace('"v1"', '"v2"')
    assert {*names} == {traffic_name(penstock.parse_config(changed)).hex()}


def test_a_disk_that_does_not_answer_keeps_no_cache_from_closing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path)
    machine = machine_of(config)
    curves = SavedCurves(tmp_path, bytes(16), machine, patience_s=0.05)
    stuck = tmp_path / f"{bytes(16).hex()}.device.curves.{os.getpid()}.new"
    os.mkfifo(stuck)  # To write into a pipe that nobody reads takes for ever, too.
    with caplog.at_level(logging.WARNING):
        curves.save()

    assert [record.getMessage() for record in caplog.records] == [
        f"curves not saved: folder={tmp_path} cause=not written within 0.05 s"
    ]
    left = [each for each in threading.enumerate() if each.name == "penstock-curves"]
    assert [each.daemon for each in left] == [True]
    reader = os.open(stuck, os.O_RDONLY | os.O_NONBLOCK)
    left[0].join(600)
    os.close(reader)
    assert not left[0].is_alive()


def test_a_disk_that_does_not_answer_keeps_no_cache_from_opening(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(config_of(tmp_path), tmp_path)
    machine = machine_of(config_of(tmp_path))
    before = machine.learned()
    answers, real_open = threading.Event(), os.open

    def slow_open(path: Path, *arguments: int) -> int:
        if str(path).endswith(".curves"):
            answers.wait(600)
        return real_open(path, *arguments)

    monkeypatch.setattr(os, "open", slow_open)
    name = next(tmp_path.glob("*.host.curves")).name.partition(".")[0]
    with caplog.at_level(logging.WARNING):
        SavedCurves(tmp_path, bytes.fromhex(name), machine, patience_s=0.05).restore()

    assert [record.getMessage() for record in caplog.records] == [
        f"curves not used: folder={tmp_path} cause=not read within 0.05 s"
    ]
    left = [each for each in threading.enumerate() if each.name == "penstock-curves"]
    answers.set()
    for each in left:
        each.join(600)
    # What comes too late is not used: the machine may be at work by then.
    assert machine.learned() == before


def test_a_cache_that_is_opened_again_begins_with_what_the_last_one_learned(
    tmp_path: Path,
) -> None:
    # The store process makes it otherwise, if it is there before the cache is closed.
    (tmp_path / "disk").mkdir(mode=0o700)
    kv = np.zeros((32, 64), dtype=np.int64)
    for life in range(2):
        with penstock.open(config_of(tmp_path / "disk"), kv=kv) as cache:
            policy = cache._driver.machine._books.device.policy
            assert isinstance(policy, LearnedPolicy)
            assert (policy._curves.counts()[-1] > 100) == bool(life)
            for number in range(200):
                with cache.acquire([number, 1, 2, 3, 4]) as lease:
                    lease.commit_prompt(5)
