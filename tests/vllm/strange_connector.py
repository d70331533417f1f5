"""The connector as it finds itself in a vLLM that it was not tested with."""

from __future__ import annotations

from penstock.connectors.vllm import facing
from penstock.connectors.vllm.adapter import PenstockConnector

facing.TESTED = (0, 1)


class StrangeConnector(PenstockConnector):
    pass
