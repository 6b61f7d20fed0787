"""A run with nodes on Flower: how they are reached, who they are, and what they were told.

What must outlive the server is in RUN/federation.json: the run's identity, under which nodes keep
their clients' states, and with data = sites who is which client.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from furlong.core.payload import pack_tensors
from furlong.deploy.agreement import MOST_IMAGES
from furlong.deploy.processes import require_flower
from furlong.engines.remote import DAY, Directory, Remote, Wire, question
from furlong.errors import FurlongError
from furlong.runs import checkpoint
from furlong.runs.config import Config
from furlong.runs.datasets import SITES
from furlong.runs.folder import RunFolder
from furlong.runs.initial import fixed
from furlong.runs.nodes import Members, own_size, told
from furlong.runs.prepare import Prepared
from furlong.runs.record import Federation
from furlong.runs.split import describe_partition, fingerprint

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


class Session:
    """Server and nodes of one run; use it as a context manager. ``wire``: to nodes that wait."""

    def __init__(
        self,
        settings: Config,
        folder: RunFolder,
        say: Callable[[str], None],
        wire: Wire | None = None,
    ) -> None:
        self._settings, self._folder, self._say, self._wire = settings, folder, say, wire
        saved = folder.record.federation or Federation(secrets.token_hex(16), [])
        self._run, self._begun = saved.run, saved.begun
        self._sites: list[dict[str, Any]] = list(saved.sites)  # by client
        self._channels: int | None = saved.channels
        self._simulated = wire is None and settings.flower.superlink is None
        self._own_images = settings.data.name == SITES
        self._prepared: Prepared | None = None
        self._directory: Directory | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: Any) -> bool | None:
        return self._stack.__exit__(*exc)

    # ------------------------------------------------------------ for the loop

    def members(self) -> Members | None:
        """With data = sites: who brings how many images. Waits for the nodes of a new run."""
        settings = self._settings
        if not self._own_images:
            return None
        if self._simulated:
            raise FurlongError("data = sites needs nodes: give --superlink HOST:PORT.")
        if settings.data.clients is None:
            raise FurlongError("data = sites needs --clients N: how many nodes to wait for.")
        own_size(settings)
        if not self._begun:
            directory = self._wait_for(settings.data.clients, settings)
            found, least = len(directory.nodes), max(1, settings.train.min_clients)
            if found < least:
                raise FurlongError(
                    f"only {found} of at least {least} nodes came within "
                    f"{settings.flower.wait:g} s (flower.wait). Are they running, with the same "
                    "version of furlong?"
                )
            self._number_by_name(directory)
            self._begun = True
            self._save()
        assert self._channels is not None
        return Members({k: site["images"] for k, site in enumerate(self._sites)}, self._channels)

    def engine(self, prepared: Prepared) -> Remote:
        """The engine of the run, after its nodes have been waited for."""
        self._prepared, settings = prepared, prepared.config
        self._begun = True
        self._save()
        directory = self._wait_for(len(prepared.federation.clients), settings)
        given = bytes(pack_tensors(tensors, {})) if (tensors := fixed(prepared.setup)) else b""
        about = {"given": hashlib.sha256(given).hexdigest()} if given else {}
        return Remote(
            directory.wire,
            directory,
            {**self._question(settings), **about},
            sizes=lambda: prepared.setup.sizes if self._own_images else None,
            oldest=lambda: checkpoint.oldest(self._folder.path),
            deadline=settings.run.deadline or DAY,
            wait=settings.flower.wait,
            need=max(1, settings.train.min_clients),
            whole=settings.train.min_clients == 0,
            slice_bytes=settings.flower.slice_mb << 20,
            encoding=settings.flower.encoding,
            given=given,
        )

    # ------------------------------------------------------------ reaching nodes

    def _wait_for(self, clients: int, settings: Config) -> Directory:
        """Who is connected, once ``clients`` nodes are, or the time for that is over."""
        if self._directory is None:
            wire = self._wire or self._stack.enter_context(self._connect(clients))
            hello = self._question(settings)
            self._directory = Directory(wire, hello, self._admit, self._say)
        directory = self._directory
        enough = lambda: len(directory.nodes) >= clients  # noqa: E731
        directory.wait(enough, settings.flower.wait, f"{clients} nodes")
        return directory

    def _connect(self, clients: int) -> AbstractContextManager[Wire]:
        """To a SuperLink, or to a simulation of ``clients`` nodes."""
        require_flower()
        from furlong.deploy.flower import connected, simulated

        settings, path = self._settings.flower, self._folder.path
        if settings.superlink is None:
            self._say(f"starting Flower's simulation of {clients} nodes on Ray")
            return simulated(clients, path / "nodes", settings.cpus, path / "flower.log")
        certs = None if settings.certs is None else Path(settings.certs)
        return connected(settings.superlink, certs, settings.insecure)

    def _question(self, settings: Config) -> dict[str, Any]:
        return question(self._run, told(settings, paths=self._simulated))

    # ------------------------------------------------------------ who takes part

    def _number_by_name(self, directory: Directory) -> None:
        """Number the sites by name, so that nothing depends on who came first."""
        old = sorted(range(len(self._sites)), key=lambda k: str(self._sites[k]["name"]))
        directory.renumber({before: now for now, before in enumerate(old)})
        self._sites = [self._sites[k] for k in old]
        names = (f"{k}: {site['name']}" for k, site in enumerate(self._sites))
        self._say(f"the clients of this run are {', '.join(names)}")

    def _admit(self, node: int, answer: dict[str, Any], key: str | None) -> int | str:
        """A node's client number, or why it cannot take part."""
        if self._own_images:
            return self._admit_site(key or answer.get("name") or f"node-{node}", answer)
        assert self._prepared is not None
        p, part = self._prepared, answer.get("part")
        if type(part) is not int or part not in p.federation.rows:
            return f"it holds part {part!r} of the images; the run has {len(p.federation.rows)}"
        if answer.get("mark") != fingerprint(p.train, p.split):
            return "its images are not those of the server's configuration"
        return part

    def _admit_site(self, name: Any, answer: dict[str, Any]) -> int | str:
        images, channels = answer.get("images"), answer.get("channels")
        if not _NAME.fullmatch(str(name)):
            return f"its name {str(name)[:80]!r} is not a short word"
        if type(images) is not int or type(channels) is not int:
            return "it does not say how many images it has"
        if not 2 <= images <= MOST_IMAGES or channels not in (1, 3):
            return f"it claims {str(images)[:20]} images of {str(channels)[:20]} channels"
        if self._channels not in (None, channels):
            return f"its images have {channels} channel(s), those of others {self._channels}"
        for client, site in enumerate(self._sites):
            if site["name"] == name:
                if site["images"] != images:
                    return f"it began the run with {site['images']} images and now has {images}"
                return client
        client = len(self._sites)
        if self._begun:
            assert self._prepared is not None
            if not self._prepared.join(client, images):
                return "this method plans with all clients from the start; it can join the next run"
        self._sites.append({"name": name, "images": images})
        self._channels = channels
        if self._begun:
            self._save()
        return client

    def _save(self) -> None:
        """Nodes keep state under this identity: it must be on disk before they are asked."""
        about = {"run": self._run, "begun": self._begun, "sites": self._sites}
        self._folder.write("federation.json", {**about, "channels": self._channels})
        if self._prepared is not None:
            about = describe_partition(self._prepared.train, self._prepared.split)
            names = {"names": [site["name"] for site in self._sites]} if self._sites else {}
            self._folder.write("partition.json", {**about, **names})
