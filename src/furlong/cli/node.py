"""``furlong node``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table

import furlong
from furlong.cli.common import console, say, warn
from furlong.errors import FurlongError

if TYPE_CHECKING:
    from furlong.deploy.node import Site


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
    identity: Path | None = None,
    patience: float = 75.0,
    stall: float = 300.0,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    expect_package: str | None = None,
) -> None:
    """Take part in a federation with the images of this machine, until Ctrl-C.

    Answers with the furlong that is installed here: no code comes from the server. Images, their
    names and their labels stay; what leaves, ``--dry-run`` shows.

    Parameters
    ----------
    superlink
        HOST:PORT of the server.
    certs
        The folder that the coordinator made for this site: ca.crt and node.key.
    data
        This site's images: folder:PATH, parquet:PATH, manifest:PATH, or a named set. Labels are
        not used.
    part
        Instead of --data: this part of the data that a run names and splits, for experiments.
    agree
        A configuration file: take part in runs of exactly this configuration, refuse others.
    name
        This site's name, where the server does not know it by its key (default: of --certs).
    state
        Folder for state between rounds and for learnt encoders (default: ~/.furlong/NAME).
    root
        Where a named set lies, or the files of a manifest.
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
    identity
        Folder of this site's signing key, made if there is none, and of the keys of the other sites
        (known/NAME.pub): then a server cannot put itself in the place of a site, and only runs with
        secure.sums = true are taken part in.
    patience
        Seconds to try again for when the server refuses this node: so long it holds the place of
        one that died, and a key may be registered late.
    stall
        Seconds that a question may take to arrive whole; then it is given up. More for a link that
        is slower than 2 Mbit/s.
    dry_run
        Read the images, show what would leave this site in a run of --agree, and end.
    expect_package
        Refuse to start unless the installed furlong has this digest: sha256: and 64 digits, as
        'furlong --version' prints them where the package was checked.
    """
    from furlong.deploy import processes
    from furlong.deploy.node import OwnImages, Site, identity_at
    from furlong.deploy.package import package_digest, require_package
    from furlong.runs import config

    if expect_package is not None:
        require_package(expect_package)
    if (data is None) == (part is None):
        raise FurlongError("say which images: --data folder:PATH (or --part K, for experiments).")
    known = name or (certs.absolute().name if certs is not None else None)
    site = Site(
        (state or Path.home() / ".furlong" / (known or f"part-{part}")).absolute(),
        None if data is None else OwnImages(data, root, strict, images),
        part,
        known,
        None if agree is None else config.load(agree),
        trust_server,
        device,
        isolate=True,
        identity=None if identity is None else identity.absolute(),
        say=say,
    )
    if site.identity is not None:
        own = identity_at(site.identity)
        say(
            f"this site signs with {own.public.hex()} ({site.identity / 'identity.pub'}) and knows "
            f"the keys of {len(own.known)} others"
        )
    if dry_run:
        site.check()
        _show_what_leaves(site)
        return
    if superlink is None or insecure == (certs is not None):
        raise FurlongError("say --superlink HOST:PORT and --certs FOLDER-OF-THIS-SITE.")
    say(f"this node runs furlong {furlong.__version__}, package {package_digest()}")
    if agree is None:
        say("without --agree this node takes part in any run that the server begins")
    if certs is None:
        warn(processes.INSECURE)
    processes.require_flower()
    from furlong.deploy.membership import take_part

    try:
        take_part(site, superlink, certs, patience, stall)
    except KeyboardInterrupt:
        say("ended")
        sys.exit(130)


def _show_what_leaves(site: Site) -> None:
    """Fields and bytes of every kind of answer, and the words of the method about them."""
    from furlong.deploy.disclosure import disclosure
    from furlong.words import size

    found = disclosure(site)
    say(
        f"Once: its name ({site.name or 'that of its key'}), the numbers of its images "
        f"({found.images:,}) and of their channels."
    )
    table = Table("answer", "field", "what", "numbers", "bytes")
    for column in table.columns[3:]:
        column.justify = "right"
    for row in found.fields:
        table.add_row(row.answer, row.name, row.kind, f"{row.elements:,}", size(row.bytes))
    console.print(table)
    say(
        f"In all {size(found.total)} in {found.answers:,} answers, if other sites are like this "
        "one."
    )
    say(f"What that may reveal: {found.caution}")
    secure = site.agree is not None and site.agree.secure.sums
    means = "" if secure else "the loss and other means of the training, "
    say(
        f"With every answer: the number of images, {means}and an error's text if it fails. Never: "
        "images, file names, paths, labels."
    )
