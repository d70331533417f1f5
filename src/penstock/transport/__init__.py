"""How messages and remote writes travel, and what counts as a fence on each way.

Public:

- `base`: what a control channel does; `waiting`: how to wait for several
- `zeromq`, `zmq_link.ChannelSettings`: channels between processes
- `machine_keys.MachineKeys`: who may connect from other machines
- `remote`: what a data transport does; `handoff/pair.py` says which ones there are
- `shared_memory.SharedTarget`, `shared_memory.connect_shared`: the data transport between processes
- `unix_sockets`: where sockets of one user lie, and frames with descriptors over them
"""
