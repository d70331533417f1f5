"""KV between machines by NIXL (UCX: RDMA, TCP), as the data transport `nixl`.

    engine (prefill) ── mirror ──→ relay ══ NIXL write, notice ══→ relay ── area ──→ engine (decode)

A rank has one relay for all its pairs: a process that shares memory with it and has the NIXL
agents. `sides.py` is what engines call, `process.py` is the relay as they
see it, `server.py` and `agents.py` are the relay itself.

Public: `sides.NixlTarget`, `sides.NixlWriter`, `process.hold_relay` and `agents.is_installed`.
"""
