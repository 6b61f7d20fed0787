"""FedMAE: what is masked, what the encoder sees, the loss, and a client's round by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import a_batch, assert_round, spy
from conftest import Call
from torch import Tensor

from furlong.core.context import Batch
from furlong.data.augment import preset
from furlong.methods.fedmae import MaskedAutoencoder, patches_of, rows
from furlong.nn.vit import VisionTransformer
from furlong.runs.config import from_tree


def network(p: Any) -> MaskedAutoencoder:
    net = p.method.network(p.server.context(p.server.exchanges()[0]))
    assert isinstance(net, MaskedAutoencoder)
    return net


def squares(images: Tensor, patch: int) -> Tensor:
    """B×N×Cp² by slices: the patches row by row, each as its channels' pixels row by row."""
    corners = [
        (top, left)
        for top in range(0, images.shape[2], patch)
        for left in range(0, images.shape[3], patch)
    ]
    found = [images[:, :, y : y + patch, x : x + patch].flatten(1) for y, x in corners]
    return torch.stack(found, 1)


def test_patches_are_in_the_order_of_the_tokens(prepared: Any) -> None:
    images = torch.randn(2, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    assert torch.equal(patches_of(images, 4), squares(images, 4))
    encoder = network(prepared("fedmae")).backbone
    weight = encoder.patch_embed.proj.weight.detach().flatten(1)
    tokens = squares(images, encoder.patch) @ weight.T + encoder.patch_embed.proj.bias
    torch.testing.assert_close(encoder.embed(images), tokens + encoder.pos_embed[:, 1:])


def loss_by_hand(net: Any, batch: Batch, mask: float = 0.75, normalise: bool = True) -> Tensor:
    """Image by image: hide patches, encode the others, put everything in its place, compare."""
    encoder, decoder = net.backbone, net.decoder
    (view,) = batch.views(1)
    order = torch.rand(len(view), encoder.grid**2).argsort(1)
    seen = round(encoder.grid**2 * (1 - mask))
    losses = []
    for image, places in zip(view, order, strict=True):
        visible, hidden = places[:seen], places[seen:]
        tokens = encoder.embed(image[None])[0, visible]
        found = decoder.embed(encoder.encode(tokens[None])[0])
        filled = decoder.mask_token[0].repeat(encoder.grid**2, 1)
        filled = filled.index_copy(0, visible, found[1:]) + decoder.places
        out = decoder.norm(decoder.blocks(torch.cat([found[:1], filled])[None]))[0, 1:]
        wanted = squares(image[None], encoder.patch)[0]
        if normalise:
            mean, std = wanted.mean(1, keepdim=True), wanted.var(1, keepdim=True)
            wanted = (wanted - mean) / (std + 1e-6).sqrt()
        losses.append((decoder.pixels(out)[hidden] - wanted[hidden]).pow(2).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("normalise", [True, False])
def test_a_round_by_hand(prepared: Any, normalise: bool) -> None:
    p = prepared("fedmae", **{"method.normalise": normalise, "method.mask": 0.75})
    assert_round(p, lambda net, batch: loss_by_hand(net, batch, 0.75, normalise))


@pytest.mark.parametrize(("mask", "seen"), [(0.75, 4), (0.5, 8), (0.999, 1), (0.001, 15)])
def test_the_encoder_sees_the_other_patches_only(
    prepared: Any, monkeypatch: pytest.MonkeyPatch, mask: float, seen: int
) -> None:
    p = prepared("fedmae")
    net, method = network(p), replace(p.method, mask=mask)
    encoded = spy(monkeypatch, VisionTransformer, "encode")
    called = spy(monkeypatch, MaskedAutoencoder, "forward")
    method.loss(net, a_batch(p))
    ((_, images, order, count),) = called
    ((_, tokens),) = encoded
    assert count == seen
    assert tokens.shape[1] == seen
    assert torch.equal(order.sort(1).values, torch.arange(16).expand(6, -1))
    assert len({tuple(places) for places in order.tolist()}) == 6  # every image its own
    assert torch.equal(tokens, rows(net.backbone.embed(images), order[:, :seen]))


def test_what_is_masked_does_not_reach_the_prediction(prepared: Any) -> None:
    p = prepared("fedmae")
    net = network(p)
    order = torch.rand(2, 16).argsort(1)
    images = torch.randn(2, 3, 16, 16)
    changed = images.clone()
    patch = net.backbone.patch
    for image, places in zip(changed, order[:, 4:], strict=True):
        for place in places.tolist():
            top, left = patch * (place // 4), patch * (place % 4)
            image[:, top : top + patch, left : left + patch] = 7
    with torch.no_grad():
        assert torch.equal(net(images, order, 4), net(changed, order, 4))
        assert not torch.equal(net(images, order, 5), net(changed, order, 5))


def test_patches_that_were_seen_do_not_count(
    prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = prepared("fedmae")
    net, batch = network(p), replace(a_batch(p), augment=preset("none"))
    wanted = squares(batch.plain, net.backbone.patch)

    def answer(_: Any, __: Tensor, order: Tensor, seen: int) -> Tensor:
        wrong = wanted + 1
        for row, places in enumerate(order):
            wrong[row, places[seen:]] = wanted[row, places[seen:]] + offset
        return wrong

    monkeypatch.setattr(MaskedAutoencoder, "forward", answer)
    method = replace(p.method, normalise=False)
    for offset in (0.0, 0.5):
        assert method.loss(net, batch).item() == pytest.approx(offset**2)


def test_the_decoder_stays_out_of_the_encoder(prepared: Any) -> None:
    p = prepared("fedmae")
    server, ctx = p.server.init(), p.server.context(p.server.exchanges()[0])
    assert any(name.startswith("decoder.") for name in server.weights)
    assert not any("places" in name for name in server.weights)  # fixed: they need not travel
    encoder = p.method.encoder(server, ctx)
    assert isinstance(encoder, VisionTransformer)
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, server.weights[f"backbone.{name}"])


def test_registers_and_class_token_are_passed_to_the_decoder(prepared: Any) -> None:
    p = prepared("fedmae", encoder="vit_mini_reg2")
    net = network(p)
    loss = p.method.loss(net, a_batch(p))
    loss.backward()
    assert all(q.grad is not None for q in net.parameters())


def test_another_encoder_is_refused_before_the_run_begins(furlong_: Call) -> None:
    done = furlong_("run", "--method", "fedmae", "--encoder", "small", "--out", "run")
    assert "vision transformer; small is none. Give --encoder vit_" in done.err
    assert done.code == 2
    assert not Path("run").exists()
    done = furlong_("methods", "fedmae", "--encoder", "small")
    assert "vision transformer; small is none" in done.err


def test_a_run_that_names_only_the_method_has_a_transformer() -> None:
    assert from_tree({}, {"method": "fedmae"}, "options").model.encoder == "vit_mini"
    given = {"method": "fedmae", "encoder": "vit_tiny"}
    assert from_tree({}, given, "options").model.encoder == "vit_tiny"
