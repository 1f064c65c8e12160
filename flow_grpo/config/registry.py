"""Registries of named plug-ins: algorithms, model families, losses and rewards."""

from collections.abc import Iterator, Mapping, MutableMapping
from pkgutil import resolve_name
from typing import Any, TypeVar

from flow_grpo.errors import UserError, did_you_mean, join_hints

T = TypeVar("T")


class Registry(MutableMapping[str, T]):
    """Mapping of names to objects, of which each is imported when it is first looked up.

    Listing names and testing membership import nothing, so a config can be checked without torch.
    Custom entries are assigned: `registry["mine"] = Mine`.

    Args:
        kind: What an entry is, for messages: "algorithm".
        paths: Built-in entries as "package.module:attribute".
    """

    def __init__(self, kind: str, paths: Mapping[str, str]) -> None:
        self.kind = kind
        self.paths = dict(paths)
        self._entries: dict[str, Any] = dict(paths)

    def __getitem__(self, name: str) -> T:
        """Return the entry of a name, imported on first access; raise KeyError if there is none."""
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = self._entries[name] = resolve_name(entry)
        return entry

    def __setitem__(self, name: str, entry: T | str) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: str, field: str = "") -> T:
        """Return the entry of this name.

        Args:
            name: Name to look up.
            field: Setting or argument that gave the name, for the error message.

        Raises:
            UserError: If there is no such entry; the message lists the names and the nearest one.
        """
        if name not in self:
            known = f"known: {', '.join(self)}"
            raise UserError(
                f"is not a known {self.kind}",
                field=field or self.kind,
                value=name,
                hint=join_hints(did_you_mean(name, self), known),
            )
        return self[name]
