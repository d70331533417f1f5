"""Public test kit: conformance suites for tiers, movers and policies, and the simulator."""
