"""The prefill → decode protocol as state machines without I/O or clock; `PROTOCOL.md` rules."""
