"""A shared store of another distribution: the example, installed as an installer leaves it."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.config import parse_config
from penstock.config.shared_stores import OtherStoreSettings
from penstock.errors import ConfigError, UnavailableError
from penstock.store.process.tier_slots import open_client
from penstock.testing import BlobStoreSuite
from tests.doctor.test_checks import Machine
from tests.runtime.sharing_engine import SharingEngine
from tests.runtime.stored_engine import all_but_the_last_block, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.store.clients.blobs import BlobStore

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sqlite_store"
LINES_MAX = 80
CONFIG = """
version = 1
model = {{ name = "toy", weights_version = "1" }}
tiers = [
    {{ name = "host", kind = "host", blocks = 16 }},
    {{ name = "below", kind = "shared", store = "{store}", gib = 1 }},
]
"""
BROKEN = """
def opens_nothing(address, *, threads):
    return object()


def needs_more(address, *, threads):
    import no_such_client
"""


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example and two that are broken, on the path of this process and of those it starts."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(EXAMPLE / "sqlite_store.py", folder)
    (folder / "broken_stores.py").write_text(BROKEN)
    facts = folder / "penstock_sqlite_store-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-sqlite-store\n")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["penstock.stores"] | {
        "nothing": "broken_stores:opens_nothing",
        "more": "broken_stores:needs_more",
        "gone": "no_such_module:opens",
    }
    lines = [f"{name} = {place}" for name, place in points.items()]
    (facts / "entry_points.txt").write_text("\n".join(["[penstock.stores]", *lines]))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder))
        yield
    for name in ("sqlite_store", "broken_stores"):
        sys.modules.pop(name, None)


def opened(store: str) -> BlobStore:
    return open_client("shared", {"store": store})


class TestSqliteBlobs(BlobStoreSuite):
    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "kv.db"

    def make_client(self) -> BlobStore:
        return opened(f"sqlite:{self.path}")


def test_the_example_is_short() -> None:
    assert len((EXAMPLE / "sqlite_store.py").read_text().splitlines()) <= LINES_MAX


def test_what_one_engine_has_stored_another_one_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f'kind = "shared"\nstore = "sqlite:{tmp_path}/kv.db"\n'
    found = []
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        with SharingEngine(folder, store) as engine:
            engine.wait_until_on()
            if name == "other":
                engine.look_for(prompt(1))
                found.append(engine.answer(prompt(1)))
            else:
                engine.save(prompt(1))

    assert found == [all_but_the_last_block(prompt(1))]


def test_a_configuration_names_an_installed_store(tmp_path: Path) -> None:
    config = parse_config(CONFIG.format(store=f"sqlite:{tmp_path}/a:b.db"))
    settings = OtherStoreSettings(store="sqlite:/a:b.db")

    assert (settings.name, settings.address) == ("sqlite", "/a:b.db")
    assert parse_config(config.to_toml()) == config
    with pytest.raises(ConfigError) as refused:
        parse_config(CONFIG.format(store="sqlit:/a"))
    assert str(refused.value) == (
        "tiers[1].store: names 'sqlit', must be NAME or NAME:ADDRESS of an installed store: "
        "gone, more, nothing, sqlite"
    )


def test_a_store_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is 'nothing', which opens a object, must open a Blob"):
        opened("nothing")
    with pytest.raises(ConfigError, match=r"no_such_module:opens.* cannot be loaded"):
        opened("gone:/there")
    with pytest.raises(UnavailableError, match=r"not installed \(no_such_client\): see its"):
        opened("more")
    with pytest.raises(UnavailableError, match="SQLite: unable to open database file"):
        opened(f"sqlite:{tmp_path}/no/folder")


def test_the_doctor_asks_for_no_extra_of_ours(tmp_path: Path) -> None:
    config = CONFIG.format(store="sqlite:/a.db")

    packages = Machine(tmp_path).check("packages", config)
    (store,) = Machine(tmp_path).check("shared store", config)

    assert not [each for each in packages if "shared" in each.seen]
    assert store.seen == "tier 'below': not asked; `penstock store probe` does"
