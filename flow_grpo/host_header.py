"""Host header check against DNS rebinding.

A page that a browser has open can point its own domain name at 127.0.0.1 and then send requests to
servers on this machine. Its requests still carry that domain in the Host header, so a server that
listens on a loopback address accepts only loopback names there.
"""

from ipaddress import ip_address
from urllib.parse import urlsplit


def is_local(host: str) -> bool:
    """Return whether a host name or address, without a port, denotes this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def is_allowed_host(served_at: str, header: str) -> bool:
    """Return whether to answer a request with this Host header.

    Args:
        served_at: Address the server listens on. One that other machines can reach may have any
            name, so every Host header is allowed there.
        header: The Host header, with or without a port.
    """
    try:
        host = urlsplit(f"//{header}").hostname or ""
    except ValueError:  # unbalanced brackets
        return False
    return is_local(host) or not is_local(served_at)
