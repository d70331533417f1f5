"""The commands of `penstock` that need the server's wheel.

Public: nothing. docs/cli.md describes the commands.
"""
