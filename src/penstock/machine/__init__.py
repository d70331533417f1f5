"""The state machine of one engine's cache: events in, effects out, no I/O and no clock.

`machine` holds `CacheMachine`, which hands each event to the module that handles it: `acquire`,
`leases`, `offload`, `copies`, `gate`, `faults`. All of them work on the state in `books`.

Public: `machine.CacheMachine`, and the values it takes and returns in `events`, `effects`,
`statistics` and `kv_events`.
"""
