"""How messages and remote writes travel, and what counts as a fence on each way."""
