"""Connections of tests."""

import socket


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected TCP pair, as gloo has them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]
