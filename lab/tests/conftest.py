"""What the tests of the lab share: processes that they start end with them."""

from lab.fixtures.run_end import end_processes_with_this_run

end_processes_with_this_run()
