"""What all tests share: equal examples every time, and an end for every process they start."""

from __future__ import annotations

import gc

from hypothesis import HealthCheck, settings

from lab.fixtures.run_end import end_processes_with_this_run

end_processes_with_this_run()

settings.register_profile(
    "penstock",
    deadline=None,
    derandomize=True,
    max_examples=50,
    # How long examples take to draw says something about the machine, and nothing about the code.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("penstock")

# Ten thousand tests, and the libraries they import, stay until the end: looking for garbage among
# them costs a tenth of a run.
gc.disable()


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, not among what was collected."""
    gc.freeze()
    gc.enable()
