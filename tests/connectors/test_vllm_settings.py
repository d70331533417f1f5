"""What the flag may say."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pytest reads it
from typing import Any

import pytest

from penstock.connectors.base.engine import LayerGroup, ServedEngine
from penstock.connectors.vllm.versions import read_settings
from penstock.errors import ConfigError
from penstock.vocabulary.layout import GroupKind

TOML = """
version = 1
model.name = "toy"
[cache]
blocks = 64
[[tiers]]
name = "host"
kind = "host"
blocks = 8
"""


def test_the_configuration_is_a_path_or_the_content(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(TOML)

    inside = read_settings({"config": TOML}, failure_policy="recompute")
    beside = read_settings({"config": str(file)}, failure_policy="recompute")

    assert inside.config == beside.config


@pytest.mark.parametrize("name", ["a=b", "k8s=prod.toml", "x = 1", "version=1"])
def test_a_path_may_have_an_equals_sign_in_it(tmp_path: Path, name: str) -> None:
    file = tmp_path / name / "penstock.toml"
    file.parent.mkdir()
    file.write_text(TOML)

    settings = read_settings({"config": str(file)}, failure_policy="recompute")

    assert settings == read_settings({"config": TOML}, failure_policy="recompute")


def test_a_missing_path_with_an_equals_sign_is_reported_as_a_path() -> None:
    with pytest.raises(ConfigError, match="no/such=file"):
        read_settings({"config": "no/such=file"}, failure_policy="recompute")


@pytest.mark.parametrize("role", ["producer", "KV_BOTH", "", None])
def test_a_role_that_the_connector_does_not_have_is_refused(role: str | None) -> None:
    with pytest.raises(ConfigError, match=r"kv_role: is .*, must be one of kv_both, kv_"):
        read_settings({"config": TOML}, failure_policy="recompute", role=role)


@pytest.mark.parametrize(
    ("extra", "policy", "field"),
    [
        ({}, "recompute", "config"),
        ({"config": 7}, "recompute", "config"),
        ({"config": "no/such/file"}, "recompute", "no/such/file"),
        ({"config": TOML, "host_gib": 3}, "recompute", "host_gib"),
        ({"config": TOML, "use_layerwise": True}, "recompute", "use_layerwise"),
        ({"config": TOML, "any_version": "yes"}, "recompute", "any_version"),
        ({"config": TOML, "layerwise": "yes"}, "recompute", "layerwise"),
        ({"config": TOML, "handoff": "ipc:///here"}, "recompute", "handoff"),
        ({"config": TOML}, "fail", "kv_load_failure_policy"),
    ],
)
def test_what_is_wrong_is_refused_by_name(extra: dict[str, Any], policy: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        read_settings(extra, failure_policy=policy)


def test_failing_requests_must_be_meant() -> None:
    assert read_settings({"config": TOML, "allow_fail": True}, failure_policy="fail").config


def test_layerwise_is_asked_for_by_name() -> None:
    assert read_settings({"config": TOML, "layerwise": True}, failure_policy="recompute").layerwise
    assert not read_settings({"config": TOML}, failure_policy="recompute").layerwise


@pytest.mark.parametrize(
    ("role", "handoff", "prefills", "decodes"),
    [
        ("kv_both", False, False, False),
        ("kv_both", True, True, True),
        ("kv_producer", False, True, False),
        ("kv_consumer", False, False, True),
    ],
)
def test_the_role_says_in_which_direction_prompts_go(
    role: str, *, handoff: bool, prefills: bool, decodes: bool
) -> None:
    extra = {"config": TOML, "handoff": handoff}

    settings = read_settings(extra, failure_policy="recompute", role=role)

    assert (settings.prefills, settings.decodes) == (prefills, decodes)


def engine(**how: Any) -> ServedEngine:
    group = LayerGroup(kind=GroupKind.ATTENTION, layer_names=("a",), block_tokens=32)
    return ServedEngine(
        **{"name": "e", "groups": (group,), "block_count": 8, "rank_count": 1, **how}
    )


LATENT = LayerGroup(kind=GroupKind.LATENT, layer_names=("a",), block_tokens=32)
SLIDING = LayerGroup(kind=GroupKind.SLIDING, layer_names=("b",), block_tokens=32)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({}, ""),
        ({"rank_count": 2}, ""),
        ({"rank_count": 2, "equal_ranks": True, "groups": (LATENT,)}, ""),
        ({"groups": (LATENT, SLIDING)}, ""),
        ({"groups": (SLIDING,)}, ""),
        ({"device": "cuda"}, ""),
        ({"device": "xpu"}, "KV lies on xpu"),
    ],
)
def test_an_engine_whose_prompts_cannot_be_handed_over_says_why(
    how: dict[str, Any], why: str
) -> None:
    refused = engine(**how).why_not_handoff()

    assert bool(refused) == bool(why)
    assert why in refused


def test_what_vllm_decides_replaces_what_the_file_says() -> None:
    config = read_settings({"config": TOML}, failure_policy="recompute").config

    fitted = engine(rank_count=2, kv_dtype="float32").fit_config(config)

    assert fitted.cache.device is None
    assert (fitted.cache.block_tokens, fitted.cache.rank_count) == (32, 2)
    assert fitted.model.kv_dtype == "float32"
    assert fitted.cache.tiers == config.cache.tiers
    assert not fitted.equal_ranks


def test_ranks_with_equal_bytes_share_a_host_tier() -> None:
    config = read_settings({"config": TOML}, failure_policy="recompute").config

    assert engine(rank_count=2, equal_ranks=True).fit_config(config).equal_ranks
    assert not engine(rank_count=1, equal_ranks=True).fit_config(config).equal_ranks
    in_memory = TOML.replace('kind = "host"', 'kind = "memory"')
    config = read_settings({"config": in_memory}, failure_policy="recompute").config
    assert not engine(rank_count=2, equal_ranks=True).fit_config(config).equal_ranks


def test_groups_with_blocks_of_different_sizes_are_left_alone() -> None:
    small = LayerGroup(kind=GroupKind.SLIDING, layer_names=("b",), block_tokens=16)

    why_not = engine(groups=(*engine().groups, small)).why_not()

    assert "16 and 32" in why_not
    assert engine(unsupported=("pipeline parallelism is not supported",)).why_not()
    assert engine().why_not() == ""


def test_a_peer_is_silent_as_long_as_the_configuration_says() -> None:
    named = read_settings({"config": f"{TOML}[handoff]\nsuspect_s = 7"}, failure_policy="recompute")
    default = read_settings({"config": TOML}, failure_policy="recompute")

    assert named.handoff("cpu").times.suspect_s == 7
    # A first step on a CPU may hold the interpreter's lock longer than five seconds.
    assert default.handoff("cuda").times.suspect_s == 20


def test_times_of_handoffs_that_do_not_fit_each_other_are_refused() -> None:
    toml = f"{TOML}[handoff]\nsuspect_s = 1\nping_s = 2"

    with pytest.raises(ConfigError, match=r"handoff\.suspect_s: .* must be more than ping_s 2"):
        read_settings({"config": toml}, failure_policy="recompute")


@pytest.mark.parametrize("transport", ["auto", "gpu", "shared_memory"])
def test_kv_travels_as_the_configuration_says(transport: str) -> None:
    toml = f'{TOML}[handoff]\ntransport = "{transport}"'

    settings = read_settings({"config": toml}, failure_policy="recompute", role="kv_producer")

    assert settings.transport == transport


def test_kv_does_not_travel_between_machines() -> None:
    toml = f'{TOML}[handoff]\ntransport = "nixl"'

    # Without a handoff nobody needs it.
    read_settings({"config": toml}, failure_policy="recompute")
    with pytest.raises(ConfigError, match=r"handoff\.transport: is 'nixl', must be one of auto"):
        read_settings({"config": toml}, failure_policy="recompute", role="kv_consumer")


def test_layers_fill_where_steps_wait_for_them() -> None:
    config = read_settings({"config": TOML}, failure_policy="recompute").config

    assert engine().fit_config(config, layerwise=True).layer_wise == "auto"
    assert engine().fit_config(config).layer_wise == config.layer_wise == "off"


@pytest.mark.parametrize("kinds", [(GroupKind.ATTENTION, GroupKind.SLIDING), (GroupKind.SLIDING,)])
def test_where_vllm_cannot_take_a_step_back_none_computes_on_loads(
    kinds: tuple[GroupKind, ...],
) -> None:
    groups = tuple(
        LayerGroup(kind=kind, layer_names=(str(number),), block_tokens=32)
        for number, kind in enumerate(kinds)
    )

    why_not = engine(groups=groups).why_not_layerwise()

    assert f"is true with {len(kinds)} KV groups" in why_not


def test_a_refusal_says_what_to_set() -> None:
    runner = "the V2 model runner is on, set VLLM_USE_V2_MODEL_RUNNER=0"

    assert runner in engine(irreversible=(runner,)).why_not_layerwise()
    assert engine().why_not_layerwise() == ""
