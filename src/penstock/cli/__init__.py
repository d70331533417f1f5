"""The `penstock` command.

Public: nothing. docs/cli.md describes the commands.
"""
