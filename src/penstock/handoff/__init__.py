"""The handoff of KV from prefill to decode ranks: `protocol` decides, `driver` does."""
