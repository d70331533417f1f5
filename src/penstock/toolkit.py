"""What programs around a cache use: channels, processes, private files, logs, traces.

The server of `penstock-serve` is made with these, and another one can be. A cache alone needs none
of them; `penstock` exports what an engine needs. Each name is imported when it is first asked for.

The one rule: torch is not loaded from here (`penstock.tensors` does that).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy_names import load_name

if TYPE_CHECKING:
    # Channels: frames in order and once, or the channel has failed. A `Listener` takes them,
    # `connect` waits for the other side and `dial` does not; `FrameCodec` packs messages.
    from penstock.transport.base import BacklogError as BacklogError
    from penstock.transport.base import Channel as Channel
    from penstock.transport.base import ChannelClosed as ChannelClosed
    from penstock.transport.base import ChannelFailed as ChannelFailed
    from penstock.transport.base import Empty as Empty
    from penstock.transport.base import FRAME_BYTES_MAX as FRAME_BYTES_MAX
    from penstock.transport.base import ReceivedFrame as ReceivedFrame
    from penstock.transport.base import Waitable as Waitable
    from penstock.transport.waiting import wait_any as wait_any
    from penstock.transport.waiting import wait_readable as wait_readable
    from penstock.transport.zeromq import IPC as IPC
    from penstock.transport.zeromq import Listener as Listener
    from penstock.transport.zeromq import connect as connect
    from penstock.transport.zeromq import dial as dial
    from penstock.transport.zmq_channel import ZmqChannel as ZmqChannel
    from penstock.transport.zmq_link import ChannelSettings as ChannelSettings
    from penstock.transport.zmq_link import SECRET_BYTES_MIN as SECRET_BYTES_MIN
    from penstock.transport.zmq_link import private_address as private_address
    from penstock.vocabulary.frames import FrameCodec as FrameCodec

    # Who may join, and files that no other user can read.
    from penstock.transport.machine_keys import Secret as Secret
    from penstock.transport.machine_keys import is_local as is_local
    from penstock.transport.machine_keys import is_loopback as is_loopback
    from penstock.transport.machine_keys import read_private as read_private
    from penstock.transport.unix_sockets import private_folder as private_folder
    from penstock.transport.unix_sockets import socket_path as socket_path

    # Processes: a supervisor starts and restarts them, passes descriptors on to them, and keeps
    # the arenas of a rank over its restart.
    from penstock.supervisor.client import Supervisor as Supervisor
    from penstock.supervisor.descriptors import inherited_descriptor as inherited_descriptor
    from penstock.supervisor.descriptors import keeper as keeper
    from penstock.supervisor.messages import ProcessExited as ProcessExited
    from penstock.supervisor.messages import RestartsExhausted as RestartsExhausted
    from penstock.supervisor.messages import OnFailure as OnFailure
    from penstock.supervisor.messages import ProcessSpec as ProcessSpec

    # Handoffs between machines: NIXL is in a process of its own, the relay.
    from penstock.handoff import ListenerShare as ListenerShare
    from penstock.relay.agents import is_installed as is_installed
    from penstock.relay.process import hold_relay as hold_relay
    from penstock.transport.remote import HandoffAddresses as HandoffAddresses

    # What a cache is told and says, beside what `penstock` exports.
    from penstock.machine.kv_events import KEYS_PER_EVENT as KEYS_PER_EVENT
    from penstock.machine.statistics import HopStatistics as HopStatistics
    from penstock.machine.statistics import StoreStatistics as StoreStatistics
    from penstock.machine.statistics import TierStatistics as TierStatistics
    from penstock.store.base import OPENING as OPENING
    from penstock.store.process.client import STARTING as STARTING
    from penstock.vocabulary.hints import HINT_FIELDS as HINT_FIELDS
    from penstock.vocabulary.hints import NO_HINTS as NO_HINTS
    from penstock.vocabulary.hints import RETENTIONS as RETENTIONS
    from penstock.vocabulary.hints import RetentionHints as RetentionHints
    from penstock.vocabulary.hints import read_hints as read_hints
    from penstock.vocabulary.hints import with_retention as with_retention
    from penstock.vocabulary.keys import Key as Key
    from penstock.vocabulary.keys import OperationId as OperationId

    # Memory of this machine, arguments that a caller passed, log lines.
    from penstock.logs import FIELDS as FIELDS
    from penstock.logs import set_up_logs as set_up_logs
    from penstock.tiers.linux_memory import gib as gib
    from penstock.tiers.linux_memory import give_back_private as give_back_private
    from penstock.tiers.linux_memory import memory_limits as memory_limits
    from penstock.tiers.linux_memory import read_text as read_text
    from penstock.vocabulary.arguments import as_flag as as_flag
    from penstock.vocabulary.arguments import as_float as as_float
    from penstock.vocabulary.arguments import as_int as as_int
    from penstock.vocabulary.arguments import as_seconds as as_seconds
    from penstock.vocabulary.arguments import as_text as as_text
    from penstock.vocabulary.arguments import as_tuple as as_tuple

    # Traces of requests, and pages and tables about them.
    from penstock.replay.page import COLOURS as COLOURS
    from penstock.replay.page import LineChart as LineChart
    from penstock.replay.page import STYLE as STYLE
    from penstock.replay.page import round_step as round_step
    from penstock.replay.trace import Recorder as Recorder
    from penstock.replay.trace import recorder_of as recorder_of
    from penstock.replay.report import text_table as text_table
    from penstock.replay.trace import TraceReader as TraceReader
    from penstock.replay.trace import TraceRequest as TraceRequest
else:

    def __getattr__(name: str) -> object:
        return globals().setdefault(name, load_name(__name__, name))
