"""What a configuration file may not say: all of it is told at once, with what would be right."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from penstock.config import load_config, parse_config
from penstock.config.values import EngineTable
from penstock.errors import ConfigError
from tests.test_config import refusal

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """
version = 1
[model]
name = "m"
"""
DEVICE = """
[cache]
blocks = 100
"""


def test_all_that_is_wrong_with_a_file_is_listed_at_once() -> None:
    text = (
        'version = 1\nmodell.name = "m"\n[model]\nname = 5\nkv_dtype = "bf17"\n'
        "[cache]\nblock_tokens = 0\nblock = 8\n"
        '[[tiers]]\nname = "host"\nkind = "disc"\nblocks = -1\n'
        '[[tiers]]\nname = "far"\nkind = "memory"\n'
        '[engine]\ndevice = "tpu"\n[serve]\nhost = "not an address!"\n'
    )

    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="my.toml")

    lines = str(caught.value).splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["my.toml", field]
        for field in [
            "modell",
            "model.name",
            "model.kv_dtype",
            "cache.block_tokens",
            "cache.block",
            "tiers[0].blocks",
            "tiers[0].kind",
            "tiers[1].blocks",
            "engine.device",
            "serve.host",
        ]
    ]
    assert [lines[0], *map(str, caught.value.further)] == lines


def test_what_concerns_one_table_is_judged_though_another_is_wrong() -> None:
    text = (
        HEAD + "[cache]\nblocks = 8\nlow_watermark = 0.5\nhigh_watermark = 0.2\n"
        "[engine]\nprefill_tp = 2\n[serve]\nport = -1\n"
    )

    message = refusal(text)

    assert [line.split(":")[0] for line in message.splitlines()] == [
        "cache.high_watermark" if "cache.high_watermark" in message else "cache.low_watermark",
        "engine.prefill_tp",
        "serve.port",
    ]


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1048576", 1 << 20),
        ("'1MiB'", 1 << 20),
        ("'1.5 KiB'", 1536),
        ("'2kb'", 2000),
        ("'1 gb'", 10**9),
    ],
)
def test_a_size_may_be_written_with_its_unit(written: str, size: int) -> None:
    config = parse_config(HEAD + DEVICE + f"[serve]\nbody_bytes_max = {written}")

    assert config.serve is not None
    assert config.serve.body_bytes_max == size


@pytest.mark.parametrize(
    "written", ["''", "'MiB'", "'12'", "'1 XiB'", "'-1MiB'", "'1e3MiB'", "'1.3B'", "true", "1.5"]
)
def test_what_is_no_size_is_refused_with_an_example(written: str) -> None:
    message = refusal(HEAD + DEVICE + f"[serve]\nbody_bytes_max = {written}")

    assert message.startswith("serve.body_bytes_max: is ")
    assert 'such as "512MiB" or "10GiB"' in message


SHARED = """
[[tiers]]
name = "host"
kind = "host"
blocks = 8
[[tiers]]
name = "shared"
"""


def test_a_quota_that_a_shared_store_cannot_keep_is_refused() -> None:
    text = HEAD + DEVICE + SHARED + 'kind = "redis"\nurl = "redis://a"\nquotas = { free = 0.5 }'

    message = refusal(text)

    assert message.startswith(
        "tiers[1].quotas: are {'free': 0.5}, must be left out for kind 'redis'"
    )


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        (
            'kind = "redis"\nurl = "redis://kv:hunter2@host"',
            "tiers[1].url: is 'redis://***@host', which has a password, must be redis://HOST:PORT",
        ),
        ('kind = "redis"\nurl = "redis://h/?p=hunter2"', "tiers[1].url: is 'redis://h/?***', must"),
        ('kind = "redis"\nurl = "hunter2"', "tiers[1].url: is '***', must be redis://HOST:PORT"),
        ('kind = "redis"\nurl = "hunter2@host"', "tiers[1].url: is '***', must be redis://HOST"),
        ('kind = "redis"\nurl = "redis://:a@hunter2/b"', "tiers[1].url: is 'redis://***@***', "),
        ('kind = "redis"\nurl = "host:6379"', "tiers[1].url: is 'host:6379', must be redis://"),
        ('kind = "redis"\nurl = "redis://a,b"', "tiers[1].url: has 2 servers, must have one"),
        (
            'kind = "redis"\nurl = "redis://a"\npassword_file = "/p"\npassword_env = "P"',
            "tiers[1].password_file: is given beside password_env, must be one of the two",
        ),
        ('kind = "mooncake"\nmaster = "host"', "tiers[1].master: is 'host', must be HOST:PORT"),
        ('kind = "objects"\nurl = "s3:bucket"', "tiers[1].url: is '***', must be s3://BUCKET"),
        (
            'kind = "objects"\nurl = "s3://id:hunter2@bucket"',
            "tiers[1].url: is 's3://***@bucket', must be s3://BUCKET/PREFIX",
        ),
    ],
)
def test_a_shared_store_that_cannot_be_there_is_refused_without_its_password(
    tier: str, said: str
) -> None:
    message = refusal(HEAD + DEVICE + SHARED + tier)

    assert message.startswith(said)
    assert "hunter2" not in message


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:3"])
def test_a_device_that_torch_has_is_taken(device: str) -> None:
    config = parse_config(HEAD + DEVICE + f'[engine]\ndevice = "{device}"')

    assert config.engine is not None
    assert config.engine.device == device


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 512), ("cuda", 2048), ("cuda:1", 2048)])
def test_a_step_has_as_many_tokens_as_suit_the_device(device: str, tokens: int) -> None:
    assert EngineTable(device=device).tokens_a_step == tokens
    assert EngineTable(device=device, step_requests=4096).tokens_a_step == 4096
    assert EngineTable(device=device, step_tokens=100).tokens_a_step == 100


@pytest.mark.parametrize("device", ["", "tpu", "cuda:", "cuda:-1", "CPU", "cuda:x"])
def test_a_device_that_no_engine_computes_on_is_refused(device: str) -> None:
    message = refusal(HEAD + DEVICE + f'[engine]\ndevice = "{device}"')

    assert message == (
        f"engine.device: is {device!r}, must be 'cpu', 'cuda' or 'cuda:N', the N-th GPU from 0 on"
    )


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "0.0.0.0", "::1", "::", "localhost", "a-b.example.org", "unix:/run/a.sock"],
)
def test_a_host_may_be_an_address_or_a_name(host: str) -> None:
    config = parse_config(HEAD + DEVICE + f'[serve]\nhost = "{host}"')

    assert config.serve is not None
    assert config.serve.host == host


@pytest.mark.parametrize("host", ["unix:", "unix:a.sock", f"unix:/{'x' * 107}", "unix://a"])
def test_a_socket_that_nobody_can_listen_on_is_refused(host: str) -> None:
    assert refusal(HEAD + DEVICE + f'[serve]\nhost = "{host}"').startswith(
        f"serve.host: is {host!r}, must be unix: and the absolute path of a socket"
    )
    # Other machines hand over to a host.
    elsewhere = refusal(HEAD + DEVICE + '[engine]\nhandoff_host = "unix:/run/a.sock"')
    assert elsewhere.startswith("engine.handoff_host: is 'unix:/run/a.sock', must be an address")


@pytest.mark.parametrize(
    "host", ["", "not an address!", "1.2.3", "256.1.1.1", ":::", "a..b", "-a", "http://x"]
)
def test_a_host_that_nobody_can_listen_on_is_refused(host: str) -> None:
    assert refusal(HEAD + DEVICE + f'[serve]\nhost = "{host}"').startswith(
        f"serve.host: is {host!r}, must be an address to listen on"
    )


@pytest.mark.parametrize(
    "nested",
    # A dotted key costs tomllib the square of its length: 100,000 parts take a minute.
    ["a = " + "[" * 100_000, "a = " + "{b=" * 100_000, ".".join("a" * 10_000)],
)
def test_text_that_is_nested_too_deeply_is_refused_in_one_line(nested: str) -> None:
    assert "\n" not in refusal(nested)


SHARED = """
[[tiers]]
name = "host"
kind = "host"
blocks = 8
[[tiers]]
name = "shared"
"""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            'url = "s3://b"\nkey_id_file = "/id"',
            "key_id_file: is given without secret_file or secret_env, must be both or none",
        ),
        (
            'url = "s3://b"\nsecret_env = "KEY"',
            "secret_env: is given without key_id_file or key_id_env, must be both or none",
        ),
        (
            'url = "gs://b"\nkey_id_env = "ID"',
            "key_id_env: is given, which has no effect with gs://; leave it out",
        ),
        (
            'url = "file:///kv"\nsecret_file = "/key"',
            "secret_file: is given, which has no effect with file://; leave it out",
        ),
    ],
)
def test_a_key_of_an_object_store_is_refused_by_the_name_in_the_file(
    keys: str, message: str
) -> None:
    found = refusal(f'{HEAD}{DEVICE}{SHARED}kind = "objects"\n{keys}\n')

    assert found == f"tiers[1].{message}"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            'kind = "redis"\nurl = "redis://h"\nca_file = "/ca"',
            "ca_file: is given, which has no effect without TLS; url must begin with rediss://",
        ),
        (
            'kind = "redis"\nurl = "unix:///s"\ncertificate_file = "/c"\nkey_file = "/k"',
            "certificate_file: is given, which has no effect without TLS; url must begin with "
            "rediss://",
        ),
        (
            'kind = "redis"\nurl = "redis://h"\nsentinel_password_env = "KEY"',
            "sentinel_password_env: is given, which has no effect without sentinel; leave it out",
        ),
        (
            'kind = "mooncake"\nmaster = "h:1"\ndevices = "mlx5_0"',
            "devices: is 'mlx5_0', which has no effect with protocol 'tcp', must be empty",
        ),
        (
            'kind = "mooncake"\nmaster = "h:99999"',
            "master: has port 99999, must be from 1 to 65535",
        ),
        ('kind = "mooncake"\nmaster = "h:0"', "master: has port 0, must be from 1 to 65535"),
        (
            'kind = "objects"\nurl = "file:///"',
            "url: is 'file:///', must be file:// and the absolute path of a folder of its own",
        ),
        (
            'kind = "objects"\nurl = "az://account"',
            "url: is 'az://account', must be az://ACCOUNT/CONTAINER/PATH",
        ),
        (
            'kind = "objects"\nurl = "az://account/"',
            "url: is 'az://account/', must be az://ACCOUNT/CONTAINER/PATH",
        ),
    ],
)
def test_what_a_shared_store_could_not_use_is_refused_when_the_file_is_read(
    keys: str, message: str
) -> None:
    assert refusal(f"{HEAD}{DEVICE}{SHARED}{keys}\n") == f"tiers[1].{message}"


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000, "-" + "9" * 30])
def test_a_number_that_is_too_long_for_a_message_is_refused_in_one_line(number: str) -> None:
    said = refusal(f"{HEAD}[cache]\nblocks = {number}\n")

    assert said == "TOML: cannot be read: it has a whole number of more than 64 bits"


def test_blocks_in_the_place_of_a_size_that_has_a_default_are_refused_with_what_to_give() -> None:
    tier = '[[tiers]]\nname = "far"\nkind = "objects"\nurl = "file:///far"\nblocks = 9\n'

    assert refusal(HEAD + DEVICE + tier) == (
        "tiers[0].blocks: has no effect while gib is 256.0, its default here; give gib in its place"
    )


def test_a_long_value_is_shown_in_part() -> None:
    said = refusal(f'{HEAD}[cache]\nblocks = "{"A" * 100_000}"\n')

    assert said.endswith("A… (100002 characters), must be a whole number from 0 to 2147483647")
    assert len(said) < 500


@pytest.mark.parametrize("name", ["/dev/zero", "large.toml"])
def test_a_file_that_is_too_large_for_a_configuration_is_not_read(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name  # The first stays as it is.
    if name == "large.toml":
        path.write_text("#" * (1 << 20) + "\n")

    with pytest.raises(ConfigError, match=re.escape(f"{path}: has more than 1048576 characters")):
        load_config(path)
