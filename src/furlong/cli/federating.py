"""Commands of a federation's parties: node, and flower-app for people who use Flower itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table

from furlong.cli.common import app, console, dotted, err
from furlong.core.payload import by_field
from furlong.errors import FurlongError
from furlong.runs import config
from furlong.runs.cost import predict, sent_by
from furlong.words import size

if TYPE_CHECKING:
    from furlong.deploy.node import Site


@app.command
def node(
    *,
    superlink: str | None = None,
    certs: Path | None = None,
    data: str | None = None,
    part: int | None = None,
    agree: Path | None = None,
    name: str | None = None,
    state: Path | None = None,
    root: str | None = None,
    images: int | None = None,
    strict: Annotated[bool, Parameter(negative=())] = False,
    device: str = "auto",
    trust_server: Annotated[bool, Parameter(negative=())] = False,
    insecure: Annotated[bool, Parameter(negative=())] = False,
    patience: float = 75.0,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Take part in a federation with the images of this machine, until Ctrl-C.

    Starts Flower's SuperNode, prints its command, and does its work in this program, with the
    furlong that is installed here: no code comes from the server. Images, their names and their
    labels stay; what leaves, ``--dry-run`` shows.

    Parameters
    ----------
    superlink
        HOST:PORT of the server.
    certs
        The folder that the coordinator made for this site: ca.crt and node.key.
    data
        This site's images: folder:PATH, parquet:PATH, or a named set. Labels are not used.
    part
        Instead of --data: this part of the data that a run names and splits, for experiments.
    agree
        A configuration file: take part in runs of exactly this configuration, refuse others.
    name
        This site's name, where the server does not know it by its key (default: of --certs).
    state
        Folder for state between rounds and for learnt encoders (default: ~/.furlong/NAME).
    root
        Where a named set lies.
    images
        Use at most this many images.
    strict
        Unreadable image files are errors.
    device
        auto, cpu, cuda, mps.
    trust_server
        Let a run name files, folders and code of this machine, for experiments.
    insecure
        No certificates, no encryption, no authentication; on 127.0.0.1 only, for trials.
    patience
        Seconds to try again for when the server refuses this node: so long it holds the place of
        one that died, and a key may be registered late.
    dry_run
        Read the images, show what would leave this site in a run of --agree, and end.
    """
    from furlong.deploy.node import Own, Site

    if (data is None) == (part is None):
        raise FurlongError("say which images: --data folder:PATH (or --part K, for experiments).")
    known = name or (certs.absolute().name if certs is not None else None)
    agreed = None if agree is None else config.load(agree)
    site = Site(
        (state or Path.home() / ".furlong" / (known or f"part-{part}")).absolute(),
        None if data is None else Own(data, root, strict, images),
        part,
        known,
        agreed,
        trust_server,
        device,
        isolate=True,
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
    )
    if dry_run:
        _dry_run(site)
        return
    if superlink is None or insecure == (certs is not None):
        raise FurlongError("say --superlink HOST:PORT and --certs FOLDER-OF-THIS-SITE.")
    if agreed is None:
        site.say("without --agree this node takes part in any run that the server begins")
    _serve(site, superlink, certs, patience)


def _serve(site: Site, superlink: str, certs: Path | None, patience: float) -> None:
    """A SuperNode and what does its work; a SuperNode that ends is started again."""
    from furlong.deploy import processes
    from furlong.deploy.keys import make_secret
    from furlong.deploy.session import engine
    from furlong.engines.pool import keep_freed_memory
    from furlong.files import locked

    flower = engine()
    if certs is None:
        err.print(f"warning: {processes.INSECURE}", style="bold red", markup=False, soft_wrap=True)
    keep_freed_memory()
    site.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret, log = site.folder / "executor.secret", site.folder / "flower.log"
    with locked(site.folder):
        processes.supernode_command(certs, superlink, secret, port=1)  # are the files there?
        count = site.check()
        make_secret(secret)
        if count is not None:
            site.say(f"{count:,} images; they stay here. Ctrl-C ends this node.")
        last = time.monotonic()
        try:
            while True:
                port = processes.free_port()
                command = processes.supernode_command(certs, superlink, secret, port=port)
                settings = processes.environment(site.folder / "flower")
                os.environ.update(settings)  # no proxy for what is on this machine
                site.say(processes.shown(command, settings))
                with processes.running(command, settings, log, signal.SIGTERM) as child:
                    while child.poll() is None and not processes.healthy("127.0.0.1", port, None):
                        time.sleep(0.2)
                    door = flower.Door(f"127.0.0.1:{port}", None, secret)
                    watch = _Watch(child, log, superlink, site.say)
                    flower.serve(door, site.answer, watch.alive, site.say)
                    code = child.returncode
                if watch.connected:
                    last = time.monotonic()
                if time.monotonic() > last + patience:
                    break
                site.say(
                    f"flower-supernode ended with code {code}: {_why(superlink, certs, log)} "
                    "Trying again."
                )
                time.sleep(3.0)
        except KeyboardInterrupt:
            site.say("ended")
            sys.exit(130)
        finally:
            site.close()
    raise FurlongError(
        f"flower-supernode ended with code {code} (see {log}): {_why(superlink, certs, log)}"
    )


class _Watch:
    """Says when a SuperNode has reached the server, or has not for a while."""

    def __init__(
        self, child: Popen[bytes], log: Path, superlink: str, say: Callable[[str], None]
    ) -> None:
        self._child, self._log, self._superlink, self._say = child, log, superlink, say
        self._from, self._told = log.stat().st_size, False
        self._began = self._looked = time.monotonic()
        self.connected = False

    def alive(self) -> bool:
        """Whether the SuperNode runs."""
        now = time.monotonic()
        if not self.connected and now > self._looked + 1:
            self._looked = now
            self.connected = b"SuperNode ID" in self._log.read_bytes()[self._from :]
            if self.connected:
                self._say(f"connected to {self._superlink}; waiting for work")
            elif now > self._began + 15 and not self._told:
                self._told = True
                self._say(f"{self._superlink} cannot be reached yet; trying on (see {self._log})")
        return self._child.poll() is None


def _why(superlink: str, certs: Path | None, log: Path) -> str:
    """What a SuperNode's end means; Flower does not always say."""
    from furlong.deploy import processes

    if "305" in log.read_text(errors="replace")[-2000:]:
        return (
            "the server does not know this site's key (the coordinator adds it by 'furlong certs "
            "DIR --add node.pub'), has revoked it, or another node uses it."
        )
    authority = None if certs is None else certs / "ca.crt"
    ahead = processes.clock_ahead(*processes.split_address(superlink), authority)
    if ahead is not None and not -300 < ahead < 4:
        return f"this machine's clock is {ahead:.0f} s ahead of the server's; set it (NTP)."
    return "the server may have revoked this site's key."


def _dry_run(site: Site) -> None:
    """Fields and bytes of every kind of answer, and the words of the method about them."""
    if site.agree is None:
        raise FurlongError("--dry-run needs --agree CONFIG: what leaves depends on the method.")
    settings = site.agree
    site.check()
    server, me = site.predicted(settings), site.part or 0
    name = site.name or "that of its key"
    console.print(
        f"Once: its name ({name}), the numbers of its images ({server.setup.sizes[me]:,}) and of "
        "their channels.",
        markup=False,
        soft_wrap=True,
    )
    table = Table("answer", "field", "what", "numbers", "bytes")
    for column in table.columns[3:]:
        column.justify = "right"
    for when, flow in sent_by(server).items():
        for (field, kind), (elements, count) in by_field(flow["up"]).items():
            table.add_row(when, field, kind, f"{elements:,}", size(count))
    console.print(table)
    asked = [item for item in predict(server, me) if item.cohort]
    total = sum(item.up.total for item in asked)
    console.print(
        f"In all {size(total)} in {len(asked):,} answers, if other sites are like this one.",
        soft_wrap=True,
    )
    leaves = settings.make_method().leaves
    console.print(f"What that may reveal: {leaves}", markup=False, soft_wrap=True)
    console.print(
        "With every answer: the number of images, the loss and other means of the training, and an "
        "error's text if it fails. Never: images, file names, paths, labels.",
        soft_wrap=True,
    )


@app.command(name="flower-app")
def flower_app(
    folder: Annotated[Path, Parameter(name="DIR")],
    config_file: Annotated[Path | None, Parameter(name="CONFIG")] = None,
    /,
) -> None:
    """Write a Flower app for ``flwr run``, for people who operate a federation already.

    Every key can be overridden there: ``flwr run DIR NAME -c 'train.rounds=50'``.

    Parameters
    ----------
    folder
        A new folder for the app.
    config_file
        A TOML file; ``--section.key`` options override it.
    """
    from furlong.deploy.session import engine

    settings = config.load(config_file, dict(dotted))
    if folder.exists() and any(folder.iterdir()):
        raise FurlongError(f"{folder} is not empty: choose another folder.")
    text = engine().bundle({k: v for k, v in asdict(settings).items() if k != "flower"})
    with suppress(FileExistsError):
        folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(text)
    console.print(f"wrote {folder / 'pyproject.toml'}. Next:", markup=False, soft_wrap=True)
    console.print(f"  flwr run {folder} SUPERLINK --stream", markup=False, soft_wrap=True)
    console.print(
        'on each node: flower-supernode … --node-config \'data="folder:/data/scans" '
        "name=\"hospital-a\"' (with data.name = sites), or 'partition-id=0'.",
        markup=False,
        soft_wrap=True,
    )
