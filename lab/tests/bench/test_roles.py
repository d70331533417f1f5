"""The benchmark of roles: simulated worlds say what they measured, and repeat themselves."""

from __future__ import annotations

from lab.bench.report import BenchReport
from lab.bench.roles import run_rates
from lab.sim.roles import RoleWorld, long_answers, long_prompts


def test_fixed_splits_and_balances_are_measured_and_compared() -> None:
    report = BenchReport(version="0", command="lab bench roles")
    run_rates(report, seeds=1)

    document = report.document()
    fixed = {"1 + 3", "2 + 2", "3 + 1"}
    assert {row.side for row in document.rows} == fixed | {"balance_s = 10", "balance_s = 30"}
    assert all(ratio.holds for ratio in document.ratios)


def test_every_request_of_a_world_ends_or_is_refused_and_a_seed_is_one_world() -> None:
    phases = [long_prompts(60.0, share=1.3), long_answers(60.0)]
    worlds = [
        RoleWorld(seed=3, prefills=2, decodes=2, phases=phases, pace_s=5.0).run() for _ in range(2)
    ]

    one, two = ((each.changes, len(each.ended), each.refused) for each in worlds)
    assert one == two
    assert worlds[0].refused > 0
    assert not any(each.in_hand for each in worlds[0].instances)
    roles = [role for _, role in worlds[0].changes]
    assert roles == ["prefill", "decode", "decode"]


def test_a_constant_load_changes_roles_in_one_direction_at_most() -> None:
    for seed in range(3):
        for phase, most in ((long_prompts(600.0), "prefill"), (long_answers(600.0), "decode")):
            world = RoleWorld(seed=seed, prefills=2, decodes=2, phases=[phase], pace_s=30.0).run()
            assert [role for _, role in world.changes] == [most]
