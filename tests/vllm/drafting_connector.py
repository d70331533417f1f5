"""The connector, telling which tokens were drafted for each request in each step."""

from __future__ import annotations

import json
import sys
from typing import Any

from penstock.connectors.vllm.adapter import PenstockConnector


class DraftingConnector(PenstockConnector):
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for request, drafted in scheduler_output.scheduled_spec_decode_tokens.items():
            sys.stdout.write(f"DRAFTED {json.dumps([request, drafted])}\n")
        sys.stdout.flush()
        return super().build_connector_meta(scheduler_output)
