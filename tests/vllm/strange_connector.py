"""The connector as it finds itself in a vLLM that it was not tested with."""

from __future__ import annotations

from penstock.connectors.vllm import versions

versions.TESTED = ((0, 1),)
StrangeConnector = versions.connector_class()
