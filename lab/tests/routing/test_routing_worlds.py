"""Simulated engines behind the router: each fault, equal runs of a seed, and bad policies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from lab.routing.faults import Fault
from lab.routing.policies import Policy, TimedRouter
from lab.routing.report import losses_of
from lab.routing.traffic import CHATS, TRACES, arrivals_of, conversations_of
from lab.routing.world import Conditions, Outcome, simulate

if TYPE_CHECKING:
    from penstock_serve.server.fleet import PromptKeys
    from penstock_serve.server.instance_link import InstanceLink
    from penstock_serve.server.routes import RequestRoute

SMALL = Conditions(engines=10, seconds=40.0, traffic=CHATS, faults=frozenset(), load=0.6)
MEASURED = (
    *("choice_cpu_p50_ms", "choice_cpu_p99_ms", "event_keys_a_cpu_s", "directory_bytes", "wall_s"),
)
"""What does not follow from the seed."""


def followed(outcome: Outcome) -> dict[str, object]:
    names = (name for name in Outcome.__slots__ if name not in (*MEASURED, "conditions"))
    return {name: getattr(outcome, name) for name in names}


@pytest.fixture(scope="module")
def calm() -> Outcome:
    return simulate(SMALL)


def test_without_faults_every_request_is_answered(calm: Outcome) -> None:
    assert calm.requests > 150
    assert (calm.failed, calm.retried) == (0, 0)
    assert 0.3 < calm.hit_rate < 1
    assert 0 < calm.first_token_p50_s < calm.first_token_p99_s
    assert calm.event_keys > 0
    assert calm.directory_bytes > calm.directory_blocks > 0


def test_a_seed_decides_all_that_is_not_measured(calm: Outcome) -> None:
    assert followed(simulate(SMALL)) == followed(calm)
    assert followed(simulate(replace(SMALL, seed=1))) != followed(calm)


@pytest.mark.parametrize("fault", Fault)
def test_with_a_fault_requests_are_answered_but_for_those_that_had_begun(
    fault: Fault, calm: Outcome
) -> None:
    found = simulate(replace(SMALL, faults=frozenset({fault})))

    assert found.requests == calm.requests
    assert followed(found) != followed(calm)
    # Answers that an engine had begun end with it.
    dies = fault in (Fault.DEATHS, Fault.RACK, Fault.PARTITION)
    assert found.failed <= (0.05 * found.requests if dies else 0)
    assert dies or not found.retried


@pytest.mark.parametrize("fault", [Fault.RACK, Fault.PARTITION])
def test_requests_of_a_lost_engine_go_to_another_one(fault: Fault) -> None:
    found = simulate(replace(SMALL, policy=Policy.ROUND_ROBIN, faults=frozenset({fault})))
    assert found.retried > 0


def test_our_policy_is_not_worse_than_others_at_what_they_are_good_at(calm: Outcome) -> None:
    others = [simulate(replace(SMALL, policy=policy)) for policy in Policy if policy != "ours"]
    assert losses_of([calm, *others]) == []


class Crowding(TimedRouter):
    """A planted policy: whoever had the last request gets the next one."""

    def _decide(self, prompt: PromptKeys, tried: set[InstanceLink]) -> RequestRoute:
        route = super()._decide(prompt, tried)
        first = next((link for link in self.answering if link not in tried), route.decode)
        return route._replace(decode=first)


class Scattering(TimedRouter):
    """A planted policy: what instances have does not count."""

    def _decide(self, prompt: PromptKeys, tried: set[InstanceLink]) -> RequestRoute:
        prompt._named = {naming: [] for naming in self._fleet._alike}
        return super()._decide(prompt, tried)


def test_bad_policies_are_seen_as_worse() -> None:
    least, affine = (
        simulate(replace(SMALL, policy=policy)) for policy in (Policy.LEAST_LOADED, Policy.AFFINE)
    )
    crowding, scattering = simulate(SMALL, Crowding), simulate(SMALL, Scattering)

    assert any("first token p99" in line for line in losses_of([crowding, least]))
    assert any("hits" in line for line in losses_of([scattering, affine]))


@pytest.mark.parametrize("traffic", [*TRACES, CHATS])
def test_conversations_are_repeated_with_blocks_of_their_own(traffic: str) -> None:
    arrivals = arrivals_of(traffic, requests=2000, seconds=100.0, seed=1)

    assert [each.at_s for each in arrivals] == sorted(each.at_s for each in arrivals)
    assert all(0 <= each.at_s < 100.0 for each in arrivals)
    assert arrivals == arrivals_of(traffic, requests=2000, seconds=100.0, seed=1)
    # Two conversations have a beginning in common at most: a system prompt.
    assert len({each.prompt[-1] for each in arrivals}) > len(arrivals) / 4
    assert all(turn.blocks for each in conversations_of(traffic) for turn in each)
