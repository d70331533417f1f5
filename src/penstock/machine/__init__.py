"""The brain of an engine's cache: events in, effects out, no I/O and no clock."""
