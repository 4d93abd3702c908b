"""JSON messages over a socket, whose time-out holds for every piece of them. For both sides: standard library only."""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")


def send_message(connection: socket.socket, message: Any) -> None:
    """Raises OSError, of which TimeoutError is one."""
    text = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def receive_message(connection: socket.socket) -> Any:
    """The next message.

    Raises:
        EOFError: the other side is gone or has closed the connection.
        OSError: of which TimeoutError is one.
    """
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    return json.loads(_receive(connection, length))


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < num_bytes:
        piece = connection.recv(num_bytes - len(pieces))
        if not piece:
            raise EOFError("the connection was closed")
        pieces += piece
    return bytes(pieces)
