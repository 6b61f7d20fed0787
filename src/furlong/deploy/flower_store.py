"""Flower's program ``flower-superlink``, with large objects in files; written for flwr 1.41.

A SuperLink keeps what it passes on in its SQLite database, in rows of millions of bytes. SQLite
writes each of them several times: to its journal, from there to the database, and whole again when
the counter beside it changes. That was half of a SuperLink's work. Here a row names a file.

``tests/deploy/test_flower_contract.py`` says what another version of Flower has moved.
"""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex

from flwr.supercore.inflatable.inflatable_object import get_object_id
from flwr.supercore.inflatable.inflatable_utils import validate_object_content
from flwr.supercore.object_store import object_store_factory
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.state.schema.objectstore_models import StoredObject
from flwr.superlink.cli import flower_superlink
from sqlalchemy import event, func, select, update

LARGE = 1 << 16  # bytes of an object that gets a file
_NAMES = b"is in the file "  # no object of Flower's begins with that: they begin with a class


class FileObjectStore(SqlObjectStore):
    """Objects by their digests: small ones in the database, large ones in files beside it."""

    def __init__(self, database_path: str, verify: bool = True) -> None:
        super().__init__(database_path, verify=False)  # what a row is given is verified here
        assert verify
        self.folder = Path(f"{database_path}.objects")

    def initialize(self, log_queries: bool = False, **engine_kwargs: object) -> list[str]:
        """Open the database; after a crash or a loss of power, drop what is not whole."""
        tables = super().initialize(log_queries, **engine_kwargs)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole = set()
        with self.session() as session:
            named = select(StoredObject.object_id, StoredObject.content).where(
                func.substr(StoredObject.content, 1, len(_NAMES)) == _NAMES
            )
            for object_id, content in session.execute(named).all():
                path = self._file(content)
                if path is not None and path.exists() and _digest(path) == object_id:
                    whole.add(path)
                    continue
                lost = update(StoredObject).where(StoredObject.object_id == object_id)
                session.execute(lost.values(content=b"", is_available=0))  # it may be sent again
        for path in set(self.folder.iterdir()) - whole:
            path.unlink()
        return tables

    def put(self, object_id: str, object_content: bytes) -> None:
        """Store an object that is expected."""
        if get_object_id(object_content) != object_id:
            raise ValueError(f"Object ID {object_id} does not match content hash")
        validate_object_content(content=object_content)
        if len(object_content) < LARGE:
            super().put(object_id, object_content)
            return
        path = self.folder / token_hex(16)  # two may send the same: each has a file of its own
        path.write_bytes(object_content)
        row = _NAMES + path.name.encode()
        try:
            super().put(object_id, row)
        finally:
            if super().get(object_id) != row:  # refused, or it was there already
                path.unlink()

    def get(self, object_id: str) -> bytes | None:
        """An object; empty if it has not come yet, none if it is not expected."""
        content = super().get(object_id)
        path = self._file(content)
        try:
            return content if path is None else path.read_bytes()
        except FileNotFoundError:  # it has just been deleted
            return None

    def delete(self, object_id: str) -> None:
        """Delete an object that nothing refers to, and what only it referred to."""
        with self._mutation_session() as session:
            path = self._file(super().get(object_id))
            super().delete(object_id)
            if path is not None and object_id not in self:
                # not before: until then others see the row
                event.listen(
                    session, "after_commit", lambda _: path.unlink(missing_ok=True), once=True
                )

    def _file(self, content: bytes | None) -> Path | None:
        """The file that a row names, if it names one."""
        if content is None or not content.startswith(_NAMES):
            return None
        return self.folder / content.removeprefix(_NAMES).decode()


def _digest(path: Path) -> str:
    return str(get_object_id(path.read_bytes()))


def main() -> None:
    """Run a SuperLink."""
    object_store_factory.SqlObjectStore = FileObjectStore  # type: ignore[attr-defined]
    flower_superlink()


if __name__ == "__main__":
    main()
