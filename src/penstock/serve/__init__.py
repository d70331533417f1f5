"""The OpenAI-compatible server and router in front of the engine."""
