"""The prefill to decode protocol, both roles, without I/O: see PROTOCOL.md."""
