"""Flower's SuperLink with large objects in files; written for flwr 1.41. Used as its program.

A SuperLink keeps what it passes on in its SQLite database, in rows of five million bytes. SQLite
writes such a row several times (first to its journal, then to the database, and whole again when
only a counter in it changes), which was most of a SuperLink's work. Here a row only names a file.

``tests/deploy/test_flower_contract.py`` says what another version of Flower has moved.
"""

from __future__ import annotations

import sys
from pathlib import Path
from secrets import token_hex

from flwr.supercore.object_store import object_store_factory
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.inflatable.inflatable_object import get_object_id
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.superlink.cli import flower_superlink
from sqlalchemy import event

LARGE = 1 << 16
_NAMED = b"in a file: "


class FileObjectStore(SqlObjectStore):
    """Objects by their digests: small ones in the database, large ones in files beside it."""

    def __init__(self, database_path: str, verify: bool = True) -> None:
        super().__init__(database_path, verify=False)
        self.folder = Path(f"{database_path}.objects")

    def put(self, object_id: str, object_content: bytes) -> None:
        if get_object_id(object_content) != object_id:
            raise ValueError(f"Object ID {object_id} does not match content hash")
        validate_object_content(content=object_content)
        if len(object_content) < LARGE:
            return super().put(object_id, object_content)
        self.folder.mkdir(exist_ok=True)
        name = token_hex(16)
        (self.folder / name).write_bytes(object_content)
        super().put(object_id, _NAMED + name.encode())

    def get(self, object_id: str) -> bytes | None:
        content = super().get(object_id)
        if content is None or not content.startswith(_NAMED):
            return content
        return (self.folder / content[len(_NAMED):].decode()).read_bytes()

    def delete(self, object_id: str) -> None:
        with self._mutation_session() as session:
            content = super().get(object_id)
            super().delete(object_id)
            if content is not None and content.startswith(_NAMED) and object_id not in self:
                path = self.folder / content[len(_NAMED):].decode()
                event.listen(session, "after_commit", lambda _: path.unlink(), once=True)


object_store_factory.SqlObjectStore = FileObjectStore
if __name__ == "__main__":
    flower_superlink()
