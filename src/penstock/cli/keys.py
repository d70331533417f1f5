"""`penstock keys`: the keys by which machines know each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import ConfigError, UnavailableError
from penstock.transport.machine_keys import MachineKeys

commands = typer.Typer(no_args_is_help=True)

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="The file with the keys of this machine.")
]

HostArgument = Annotated[
    str, typer.Argument(metavar="HOST", help="A machine, as addresses name it.")
]


@commands.command()
def new(file: FileArgument, host: HostArgument) -> None:
    """Make a key pair for this machine, and print the line that lists it on the others.

    HOST is this machine as the others dial it: an IP address or a name. The file is readable by
    this user only, and holds the private key: it stays on this machine.
    """
    keys = MachineKeys.new()
    try:
        keys = keys.with_peer(host, keys.public)
        keys.write(file)
    except ValueError as error:
        raise _field_error(error) from error
    except FileExistsError as error:
        raise ConfigError("FILE", f"is {str(file)!r}, which exists, must be a new file") from error
    except OSError as error:
        raise UnavailableError(f"{file} cannot be written: {error.strerror}") from error
    print(f"{file}: a new key. On each other machine, with the name of its own file:")
    print(f"penstock keys add FILE {host} {keys.public}")


@commands.command()
def show(file: FileArgument) -> None:
    """Print the public key of this machine, and the machines it talks to."""
    keys = _read(file)
    print(f"public  {keys.public}")
    for host, key in sorted(keys.peers.items()):
        print(f"peer    {key}  {host}")


@commands.command()
def add(
    file: FileArgument,
    host: HostArgument,
    public: Annotated[
        str, typer.Argument(metavar="PUBLIC", help="Its public key, from `penstock keys show`.")
    ],
) -> None:
    """List a machine that this one talks to; one with the same host is replaced."""
    keys = _read(file)
    try:
        keys.with_peer(host, public).write(file, replace=True)
    except ValueError as error:
        raise _field_error(error) from error
    except OSError as error:
        raise UnavailableError(f"{file} cannot be written: {error.strerror}") from error
    print(f"{file}: {host} added; restart what was started with it")


def _field_error(error: ValueError) -> ConfigError:
    """The message names the argument first."""
    field, _, problem = str(error).partition(" ")
    return ConfigError(field, problem)


def _read(file: Path) -> MachineKeys:
    try:
        return MachineKeys.read(file)
    except OSError as error:
        raise ConfigError(
            "FILE", f"is {str(file)!r}, which cannot be read: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ConfigError("FILE", str(error)) from error
