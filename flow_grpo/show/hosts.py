"""Whom a page on this machine answers: a page of somebody else's, under a name that leads here (DNS
rebinding), must not read it."""

from ipaddress import ip_address
from urllib.parse import urlsplit

REFUSED = "this server answers requests for this machine only"


def is_local(host: str) -> bool:
    """Whether a name or an address, without its port, is that of this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def may_ask(served_at: str, header: str) -> bool:
    """Whether a request with this Host header is answered: whoever serves other machines too has
    names that we do not know."""
    try:
        asked = urlsplit(f"//{header}").hostname or ""
    except ValueError:  # brackets that do not close
        return False
    return is_local(asked) or not is_local(served_at)


class OnlyOurs:
    """Around an ASGI app, which sees no other request."""

    def __init__(self, app, served_at: str) -> None:
        self.app, self.served_at = app, served_at

    async def __call__(self, scope, receive, send) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "lifespan" or may_ask(
            self.served_at, headers.get(b"host", b"").decode("latin-1")
        ):
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close"})
        await send({"type": "http.response.start", "status": 403, "headers": []})
        await send({"type": "http.response.body", "body": REFUSED.encode()})
