"""The nodes of a run on Flower: how they are reached, who they are, and what they were told.

What must outlive the server is in RUN/federation.json: the run's identity, under which nodes keep
their clients' states, and with data = sites who is which client.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from furlong.engines.remote import DAY, Remote, Roster, Wire, question
from furlong.errors import FurlongError
from furlong.runs import checkpoint
from furlong.runs.config import Config
from furlong.runs.folder import RunFolder
from furlong.runs.prepare import (
    SITES,
    Members,
    Prepared,
    describe_partition,
    fingerprint,
    own_size,
    told,
)
from furlong.runs.record import Federation

MOST = 10_000_000  # images that a site may claim: it counts for as many in the mean
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


class Meeting:
    """Server and nodes of one run; use it as a context manager."""

    def __init__(
        self, settings: Config, folder: RunFolder, say: Callable[[str], None], wire: Wire | None
    ) -> None:
        self._settings, self._folder, self._say, self._wire = settings, folder, say, wire
        saved = folder.record.federation or Federation(secrets.token_hex(16), [])
        self._run, self._begun = saved.run, saved.begun
        self._sites: list[dict[str, Any]] = list(saved.sites)  # by client
        self._channels: int | None = saved.channels
        self._simulated = wire is None and settings.flower.superlink is None
        self._prepared: Prepared | None = None
        self._roster: Roster | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *exc: Any) -> bool | None:
        return self._stack.__exit__(*exc)

    # ------------------------------------------------------------ reaching nodes

    def _reach(self, clients: int) -> Wire:
        """The wire: given, to a SuperLink, or to a simulation of ``clients`` nodes."""
        if self._wire is None:
            flower = engine()
            settings, path = self._settings.flower, self._folder.path
            if settings.superlink is None:
                self._say(f"starting Flower's simulation of {clients} nodes on Ray")
                log = path / "flower.log"
                opened = flower.simulated(clients, path / "nodes", settings.cpus, log)
            else:
                certs = None if settings.certs is None else Path(settings.certs)
                door, names = flower.door(settings.superlink, certs, settings.insecure)
                opened = flower.connected(door, names)
            self._wire = self._stack.enter_context(opened)
        return self._wire

    def _meet(self, settings: Config, clients: int) -> Roster:
        if self._roster is None:
            hello = question(self._run, self._told(settings))
            self._roster = Roster(self._reach(clients), hello, self._admit, self._say)
        return self._roster

    def _told(self, settings: Config) -> dict[str, Any]:
        return told(settings, paths=self._simulated)

    # ------------------------------------------------------------ who takes part

    def members(self) -> Members | None:
        """With data = sites: who brings how many images. Waits for the nodes of a new run."""
        settings = self._settings
        if settings.data.name != SITES:
            return None
        if settings.flower.superlink is None and self._wire is None:
            raise FurlongError("data = sites needs nodes: give --superlink HOST:PORT.")
        if settings.data.clients is None:
            raise FurlongError("data = sites needs --clients N: how many nodes to wait for.")
        own_size(settings)
        if not self._begun:
            many, least = settings.data.clients, max(1, settings.train.min_clients)
            roster = self._meet(settings, many)
            roster.wait(lambda: len(roster.nodes) >= many, settings.flower.wait, f"{many} nodes")
            if len(roster.nodes) < least:
                raise FurlongError(
                    f"only {len(roster.nodes)} of at least {least} nodes came within "
                    f"{settings.flower.wait:g} s (flower.wait). Are they running, with the same "
                    "version of furlong?"
                )
            self._sort(roster)
            self._begun = True
            self._save()
        assert self._channels is not None
        return Members({k: site["images"] for k, site in enumerate(self._sites)}, self._channels)

    def _sort(self, roster: Roster) -> None:
        """Number the sites by name, so that nothing depends on who came first."""
        old = sorted(range(len(self._sites)), key=lambda k: str(self._sites[k]["name"]))
        roster.renumber({before: now for now, before in enumerate(old)})
        self._sites = [self._sites[k] for k in old]
        names = (f"{k}: {site['name']}" for k, site in enumerate(self._sites))
        self._say(f"the clients of this run are {', '.join(names)}")

    def _admit(self, node: int, answer: dict[str, Any], key: str | None) -> int | str:
        """A node's client number, or why it cannot take part."""
        if self._settings.data.name == SITES:
            return self._admit_site(node, answer, key)
        assert self._prepared is not None
        p, part = self._prepared, answer.get("part")
        if type(part) is not int or part not in p.federation.rows:
            return f"it holds part {part!r} of the images; the run has {len(p.federation.rows)}"
        if answer.get("mark") != fingerprint(p.train, p.split):
            return "its images are not those of the server's configuration"
        return part

    def _admit_site(self, node: int, answer: dict[str, Any], key: str | None) -> int | str:
        name, images = key or answer.get("name") or f"node-{node}", answer.get("images")
        channels = answer.get("channels")
        if not _NAME.fullmatch(str(name)):
            return f"its name {str(name)[:80]!r} is not a short word"
        if (
            type(images) is not int
            or not 2 <= images <= MOST
            or channels not in (1, 3)
            or channels is True
        ):
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

    # ------------------------------------------------------------ the engine

    def transport(self, prepared: Prepared) -> Remote:
        """The engine of the run, after its nodes have been waited for."""
        self._prepared, settings = prepared, prepared.config
        clients = prepared.federation.clients
        self._begun = True
        self._save()
        roster = self._meet(settings, len(clients))
        sites = settings.data.name == SITES
        need = max(1, settings.train.min_clients)
        roster.wait(
            lambda: len(roster.nodes) >= len(clients),
            settings.flower.wait,
            f"{len(clients)} nodes",
        )
        return Remote(
            self._reach(len(clients)),
            roster,
            question(self._run, self._told(settings)),
            sizes=lambda: prepared.setup.sizes if sites else None,
            oldest=lambda: checkpoint.oldest(self._folder.path),
            deadline=settings.run.deadline or DAY,
            wait=settings.flower.wait,
            need=need,
            slice_bytes=settings.flower.slice_mb << 20,
            encoding=settings.flower.encoding,
        )


def engine() -> Any:
    """Flower's engine, if it is installed."""
    try:
        from furlong.deploy import flower
    except ImportError as error:
        raise FurlongError(
            f"--engine flower needs Flower 1.41 ({error}): pip install 'furlong-fl[flower]'."
        ) from None
    return flower
