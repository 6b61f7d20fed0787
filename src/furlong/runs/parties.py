"""The parties of a run: the method, who holds which images, and what everybody knows.

Server and nodes build these from the same settings by the same code, so that they agree.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from furlong.core.aggregation import COLLECTED
from furlong.core.context import Setup
from furlong.core.exchange import cohort_size
from furlong.core.federation import Federation
from furlong.core.given import Given
from furlong.core.method import AnyMethod
from furlong.core.noise import secret_from
from furlong.core.payload import Weights
from furlong.data.augment import preset
from furlong.data.images import ImageSet
from furlong.data.partition import Partition
from furlong.devices import pick_device
from furlong.errors import FurlongError
from furlong.methods.wrappers.alone import Alone
from furlong.methods.wrappers.private_clients import PrivateClients
from furlong.methods.wrappers.private_records import PrivateRecords
from furlong.methods.wrappers.ruled import Ruled
from furlong.nn.encoders import build_encoder, evaluating, out_dim
from furlong.runs.config import Config
from furlong.runs.datasets import SITES
from furlong.runs.split import left_out

STREAMED = ("mean", "momentum", "adam")  # rules that need no more than the mean of the answers


def parties(
    settings: Config, train: ImageSet, split: Partition, secret: bytes | None = None
) -> tuple[AnyMethod, Federation]:
    """The method, as bounds, server rules and a budget wrap it, and who holds which images.

    ``secret``: what the noise of a privacy budget is made from, where something is trained.
    """
    height, width = train.size
    if height != width:
        raise FurlongError(
            f"the images are {width}×{height}; encoders take squares. Give --data.image-size."
        )
    federation, method = Federation.of(train, split), settings.make_method()
    if method.needs_labels and train.labels is None:
        raise FurlongError(f"method {settings.method['name']} needs labels; {train.name} has none.")
    check_privacy(settings)
    repeated = train.weights is not None and bool(train.weights.gt(1).any())
    if settings.privacy.level == "record" and repeated:
        raise FurlongError(
            "privacy.level = record with weights above 1 (the column 'weight'): such an image is "
            "there several times, and the budget is that of one. Leave the weights out."
        )
    if settings.run.bound == "pooled":
        return private(method, settings, secret), federation.pooled()
    if settings.run.bound == "single":
        return Alone(method), federation
    if (client := left_out(settings, train, split)) is not None:
        federation = federation.without(client)
    return wrapped(method, settings, len(federation.rows), secret), federation


def wrapped(
    method: AnyMethod, settings: Config, clients: int, secret: bytes | None = None
) -> AnyMethod:
    """The method under the server's rule, its privacy budget, and masks, if the run has them.

    Masks are outermost: what a wrapper inside does to an upload is done before it is masked.
    """
    size = cohort_size(clients, settings.train.fraction)
    if settings.server.rule != "mean":
        settings.server.check_cohort(size)
        method = Ruled(method, settings.server)
    method = private(method, settings, secret)
    return _secured(method, settings, size) if settings.secure.sums else method


def _secured(method: AnyMethod, settings: Config, size: int) -> AnyMethod:
    """The method under masks, unless something of the run needs single clients' numbers."""
    model, rule, encoding = settings.model, settings.server.rule, settings.flower.encoding
    reasons = {
        f"method {settings.method['name']}": method.singles,
        f"server.rule = {rule}": "it compares the answers of single clients"
        if rule in COLLECTED
        else "",
        f"server.outlier = {settings.server.outlier}": "it compares the updates of single clients"
        if settings.server.outlier is not None
        else "",
        "model.adapter_average = products": "it multiplies the factors of single clients"
        if model.adapter != "none" and model.adapter_average == "products"
        else "",
        f"evaluate.angles = {settings.evaluate.angles}": "it measures the encoders of single "
        "clients"
        if settings.evaluate.angles
        else "",
        "privacy.noise_at = server": "the server cuts single clients' updates before it adds "
        "noise; with --privacy.noise-at clients they do both"
        if settings.privacy.level == "client" and settings.privacy.noise_at == "server"
        else "",
        f"flower.encoding = {encoding}": "masked numbers are random ones, which cannot be rounded"
        if encoding != "exact"
        else "",
    }
    for what, reason in reasons.items():
        if reason:
            raise FurlongError(
                f"secure.sums = true shows the server nothing but sums, and {what} needs more: "
                f"{reason}. Change that, or leave --secure out."
            )
    secure = settings.secure
    if settings.privacy.level == "client":  # fewer shares are less noise than is accounted for
        secure = replace(secure, fewest=max(secure.fewest, min(settings.train.min_clients, size)))
    secure.check_cohort(size)
    from furlong.methods.wrappers.secured import Secured  # imports cryptography

    return Secured(method, secure, settings.train.fraction)


def private(method: AnyMethod, settings: Config, secret: bytes | None = None) -> AnyMethod:
    """The method under its privacy budget, if it has one."""
    level = settings.privacy.level
    if level == "none":
        return method
    if settings.privacy.noise_from == "seed":
        secret = secret_from(settings.run.seed)
    kind = PrivateClients if level == "client" else PrivateRecords
    train = settings.train
    return kind(method, settings.privacy, train.fraction, train.min_clients, secret)


def check_privacy(settings: Config) -> None:
    """Refuse what no privacy budget covers."""
    level, bound, rule = settings.privacy.level, settings.run.bound, settings.server.rule
    if level == "none":
        return
    if bound == "single":
        raise FurlongError(
            f"privacy.level = {level} with bound = single: nothing leaves a client there. Leave "
            "one of them out."
        )
    if level == "record":
        return
    if bound == "pooled":
        raise FurlongError(
            "privacy.level = client with bound = pooled: there is one client, and its data is all "
            "there is to learn from. Use level record."
        )
    if rule not in STREAMED:
        raise FurlongError(
            f"privacy.level = client with server.rule = {rule}: the noise is made for a sum of "
            f"clipped updates, and this rule picks or weighs single ones. Use "
            f"{', '.join(STREAMED)}."
        )
    if settings.server.outlier is not None:
        raise FurlongError(
            f"privacy.level = client with server.outlier = {settings.server.outlier:g}: it looks "
            "at single updates, which the budget does not cover, and the clip bounds them already. "
            "Leave it out."
        )
    if settings.evaluate.angles:
        raise FurlongError(
            f"privacy.level = client with evaluate.angles = {settings.evaluate.angles}: it "
            "measures the encoders of single clients and writes down what it finds, and no noise "
            "covers that. Leave it out."
        )
    if settings.data.name == SITES:
        raise FurlongError(
            "privacy.level = client with data = sites: every node tells how many images it holds, "
            "and all are told, which the budget does not cover. Use level record, for which these "
            "numbers are public."
        )


def setup_of(
    settings: Config, method: AnyMethod, federation: Federation, weights: Weights | None = None
) -> Setup:
    """What every party knows, alike at the server and at a client.

    ``weights``: those of the encoder that are fixed, where they are there already.
    """
    images, train = federation.images, settings.train
    height = images.size[0]
    architecture = _architecture(settings, method)
    with torch.random.fork_rng(devices=[]):
        encoder = build_encoder(architecture, images.channels, height)
        _try_encoder(encoder, architecture, images.channels, height)
    return Setup(
        encoder=architecture,
        width=out_dim(encoder, images.channels, height),
        channels=images.channels,
        image_size=height,
        augment=preset(augmentation(settings, method), height),
        rounds=train.rounds,
        epochs=train.epochs,
        batch_size=train.batch_size,
        optimiser=settings.optimiser,
        sizes=federation.sizes,
        classes=images.n_classes if method.needs_labels else 0,
        seed=settings.run.seed,
        device=pick_device(settings.run.device),
        server_threads=train.server_threads,
        given=_given(settings, encoder, weights or {}),
    )


def _given(settings: Config, encoder: nn.Module, weights: Weights) -> Given | None:
    """What of the encoder is fixed, if anything is, by ``weights`` as far as these are known."""
    model = settings.model
    given = Given(
        weights, str(model.freeze), model.adapter, model.adapter_average, settings.run.seed
    )
    fixed = given.fixed(encoder)
    if not fixed:
        return None
    if weights and weights.keys() != set(fixed):
        raise FurlongError("the fixed weights are not those of the encoder that the run names.")
    given.begin(encoder)  # find out now whether these fit
    if model.adapter != "none" and not any(True for _ in encoder.parameters()):
        raise FurlongError(
            f"model.adapter = {model.adapter} leaves nothing of the encoder {model.encoder} to "
            f"train with model.freeze = {model.freeze}. Give a smaller rank, or freeze less."
        )
    return given


def augmentation(settings: Config, method: AnyMethod) -> str:
    """The preset of views: as given, else the method's usual one."""
    name = settings.data.augment
    if name == "auto":
        name = method.usual_augment
        if settings.data.name == "shapes" and name not in ("flip", "flip_crop", "none"):
            name = "shapes"  # instead of any that changes colours
    return name


def _architecture(settings: Config, method: AnyMethod) -> str:
    """The full name of the encoder: ``resnet18+pn``, ``rep32_pn+resnet18``."""
    name, norm = settings.model.encoder, settings.model.early_norm
    if norm == "pn" and not method.pairs_views:
        raise FurlongError(
            f"model.early_norm = pn needs both views of an image in one pass; method "
            f"{settings.method['name']} does not declare pairs_views. Use gn, or method fedsimclr."
        )
    return method.architecture(name if norm == "bn" else f"{name}+{norm}")


def _try_encoder(encoder: nn.Module, name: str, channels: int, size: int) -> None:
    """Find out before anything is trained whether the encoder takes the images."""
    try:
        with evaluating(encoder):
            encoder(torch.zeros(2, channels, size, size))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise FurlongError(
            f"encoder {name} cannot take {channels}×{size}×{size} images ({reason}). Give a larger "
            "--data.image-size or another --encoder."
        ) from None
