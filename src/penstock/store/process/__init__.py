"""The store process itself, its protocol, and the ways to it from engines and ranks.

Public: `link`, `client`, `messages`, which the runtime uses; `server` runs in the process.
"""
