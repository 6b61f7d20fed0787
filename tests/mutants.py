"""Deliberate mistakes in the source, each with the tests that should notice it.

    python tests/mutants.py                      # all of them, one after the other
    python tests/mutants.py --only krum fedca    # those whose name or file holds one of these words
    python tests/mutants.py --json tests/mutants.json --label before

A mutant is one short text of a source file and what takes its place. The script copies the
repository to a temporary folder, makes one mistake there at a time, and runs the tests that are
named for it. The tests must fail: the mutant is killed. The same tests without any mistake must
pass, which is checked once for every choice of tests.

Results are written after every mutant, so that a run that was stopped goes on where it was.
``tests/runs/test_lock.py`` is never among the tests: it notices every change of bits, also a right
one, and so it proves nothing about the other tests.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import pytest
import scipy.stats  # noqa: F401 - imported once, for all children
import torch

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300.0  # for the tests of one mutant; a mutant that never ends counts as killed
MOMENTS = count(1_000_000_000)
KEPT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "runs-*")


@dataclass(frozen=True)
class Mutant:
    """One mistake: ``old`` stands exactly once in ``file``, and ``tests`` are arguments of pytest.

    A text that has moved to another file is found there, if it is the only one of its kind.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    why: str
    known_survivor: bool = False  # no test notices it yet: issue 13


LOSSES = "tests/nn/test_losses.py"
ATTACKS = "tests/audit/test_attacks.py"
REPLAYED = "tests/audit/test_audit.py -k replay"
AUDITED = "tests/audit/test_audit.py -k shell"
PACKAGE = "tests/deploy/test_package.py"
FCL = "tests/methods/test_fcl.py"
FEDCA = "tests/methods/test_fedca.py"
MFCL = "tests/methods/test_mfcl.py -k 'not test_settings'"
RULES = "tests/core/test_aggregation.py -k 'not same_bits and not one_bad and not checkpoint'"
WEIGHTS = (
    "tests/core/test_weights.py tests/methods/test_averaging.py tests/methods/test_fedu.py"
    " tests/methods/test_fedema.py"
)
GUARD = "tests/core/test_guard.py"
OUTLIERS = "tests/core/test_outliers.py"
PAYLOAD = "tests/core/test_payload.py"
CHECKPOINT = (
    "tests/runs/test_checkpoint.py -k 'not kill_9 and not more_to_keep and not every_round'"
)
STATES = "tests/engines/test_inprocess.py -k 'states_are_files'"
PARTITION = "tests/data/test_partition.py"
AUGMENT = "tests/data/test_augment.py"
MEDICAL = "tests/data/test_medical.py -k 'quoted or log_is or guessed'"
FROZEN = "tests/evaluation/test_frozen.py"
PROTOCOLS = "tests/evaluation/test_protocols.py"
CONFIG = "tests/runs/test_config.py"
TABLES = "tests/reports/test_tables.py"
SECURE = "tests/core/test_secure.py"
IDENTITY = "tests/deploy/test_secured_remote.py -k 'answers_once or stranger'"
SECURED = "tests/methods/test_secured.py -k 'drops_out or plain_run or random_bytes or changed'"
PRIVACY = "tests/core/test_privacy.py tests/methods/test_private.py -m 'not slow'"
SPENT = "tests/methods/test_secured.py -k 'is_spent or masked_numbers'"
SITE = (
    "tests/deploy/test_secured_remote.py tests/deploy/test_node.py -k 'budget or noise'"
    " -m 'not slow'"
)
CODEC = "tests/engines/test_codec.py -k 'not methods_run'"
COST = (
    "tests/runs/test_cost.py"
    " -k 'fedsimclr or fcl or table_8 or without_data or one_client or now_and_then'"
)
CLUSTERING = "tests/nn/test_clustering.py"
REMOTE = (
    "tests/deploy/test_remote.py -k 'slice or nonsense or bad_answer or restarts "
    "or (same_bits and fedu)'"
)
FEDU = "tests/methods/test_fedu.py"
SWAV = "tests/methods/test_fedswav.py"
QUALITY = "tests/evaluation/test_protocols.py -k 'rank or collapse or diagnosis'"
MONITOR = "tests/runs/test_evaluate.py -k 'collapse'"
LOOP = "tests/runs/test_loop.py -k 'mean_is_over or more_protocols'"
PAGE = "tests/reports/test_page.py -k 'logs or heading'"

MUTANTS = [
    # ------------------------------------------------------------ losses
    Mutant(
        "nt_xent-partner",
        "nn/losses.py",
        ".roll(len(z1))",
        ".roll(1)",
        LOSSES,
        "a view's positive is another image",
    ),
    Mutant(
        "nt_xent-temperature",
        "nn/losses.py",
        "z @ z.T / temperature",
        "z @ z.T * temperature",
        LOSSES,
        "the temperature multiplies",
    ),
    Mutant(
        "nt_xent-diagonal",
        "nn/losses.py",
        ".fill_diagonal_(-torch.inf)",
        "",
        LOSSES,
        "a view is its own negative",
    ),
    Mutant(
        "info_nce-temperature",
        "nn/losses.py",
        "query @ negatives.T], dim=1) / temperature",
        "query @ negatives.T], dim=1)",
        LOSSES,
        "MoCo without a temperature",
    ),
    Mutant(
        "matching-entropy",
        "nn/losses.py",
        "far * rest_entropy",
        "near * rest_entropy",
        f"{LOSSES} {FCL} -k 'entropy or matching or neighbour'",
        "FCL's second loss weighs the rest by the wrong probability",
    ),
    Mutant(
        "dictionary-candidates",
        "nn/losses.py",
        "torch.cat([z2, dictionary.detach()])",
        "torch.cat([z1, dictionary.detach()])",
        FEDCA,
        "FedCA contrasts a view with itself",
    ),
    Mutant(
        "alignment-reduction",
        "nn/losses.py",
        'if reduction == "mean"',
        'if reduction != "mean"',
        FEDCA,
        "sum and mean are exchanged",
    ),
    Mutant(
        "byol-sign",
        "nn/losses.py",
        "2 + 2 * cosine_simsiam",
        "2 - 2 * cosine_simsiam",
        f"{LOSSES} {FEDU}",
        "BYOL drives views apart",
    ),
    Mutant(
        "simsiam-stop-gradient",
        "nn/losses.py",
        "(prediction, target.detach(), dim=1)",
        "(prediction, target, dim=1)",
        LOSSES,
        "without the stop-gradient SimSiam collapses",
    ),
    Mutant(
        "barlow-diagonal",
        "nn/losses.py",
        "(1 - off_diagonal) * squares.trace()",
        "squares.trace()",
        "tests/methods/test_fedbarlow.py",
        "the diagonal counts 1 + λ times",
    ),
    Mutant(
        "vicreg-half",
        "nn/losses.py",
        ".sqrt()).mean() / 2",
        ".sqrt()).mean()",
        "tests/methods/test_fedvicreg.py",
        "the variance term is twice too strong",
    ),
    Mutant(
        "moon-direction",
        "nn/losses.py",
        "(far - near) / temperature",
        "(near - far) / temperature",
        "tests/methods/test_moon.py",
        "MOON moves away from the global model",
    ),
    Mutant(
        "swav-swap",
        "nn/losses.py",
        "codes.detach().flip(0)",
        "codes.detach()",
        CLUSTERING,
        "a view predicts its own code",
    ),
    Mutant(
        "relational-mean",
        "nn/losses.py",
        " - math.log(2)",
        "",
        "tests/methods/test_fedx.py",
        "FedX's mean of two relations does not sum to 1",
    ),
    Mutant(
        "agreement-gradient",
        "nn/losses.py",
        "F.normalize(target.detach(), dim=1) @ centroids.T",
        "F.normalize(target, dim=1) @ centroids.T",
        CLUSTERING,
        "Orchestra's target network gets a gradient",
    ),
    # ------------------------------------------------------------ methods
    Mutant(
        "fedema-blend",
        "methods/fedema.py",
        "lerp(state.online, down.encoder, 1 - mu)",
        "lerp(state.online, down.encoder, mu)",
        "tests/methods/test_fedema.py",
        "the blend of own and global encoder is reversed",
    ),
    Mutant(
        "fedema-scale-frozen",
        "methods/fedema.py",
        "return self.tau / distance if",
        "return distance / self.tau if",
        "tests/methods/test_fedema.py",
        "λ = d/τ instead of τ/d",
    ),
    Mutant(
        "fedu-dapu",
        "methods/fedu.py",
        "state.divergence >= self.threshold",
        "state.divergence < self.threshold",
        FEDU,
        "the predictor update is reversed",
    ),
    Mutant(
        "fedu-loss-negated",
        "methods/byol.py",
        "losses.append(byol(predictor(z), goal)",
        "losses.append(-byol(predictor(z), goal)",
        FEDU,
        "BYOL drives views apart",
    ),
    Mutant(
        "fedu-views-not-crossed",
        "methods/byol.py",
        "((v1, t2), (v2, t1))",
        "((v1, t1), (v2, t2))",
        FEDU,
        "a view predicts itself",
    ),
    Mutant(
        "fedu-one-direction",
        "methods/byol.py",
        "[: 2 if self.symmetric else 1]",
        "[:1]",
        FEDU,
        "symmetric = true does nothing",
    ),
    Mutant(
        "fedu-ema-first",
        "methods/byol.py",
        "optimiser.descend(loss_of, batch)\n            ema_(target, online, self.decay)",
        "ema_(target, online, self.decay)\n            optimiser.descend(loss_of, batch)",
        FEDU,
        "the target follows the weights before the step",
    ),
    Mutant(
        "fedu-divergence-of-target",
        "methods/fedu.py",
        "(nets.online, start.online)",
        "(nets.target, start.target)",
        FEDU,
        "the divergence is that of the target",
    ),
    Mutant(
        "fedu-aggregate-from",
        "methods/fedu.py",
        'nets.online if self.aggregate_from == "online" else nets.target',
        "nets.online",
        FEDU,
        "aggregate_from does nothing",
    ),
    Mutant(
        "fedu-relative-ignored",
        "methods/fedu.py",
        'state.first if self.threshold_kind == "relative" else 1.0',
        "1.0",
        FEDU,
        "a relative threshold is taken as absolute",
    ),
    Mutant(
        "fedu-relative-always",
        "methods/fedu.py",
        'state.first if self.threshold_kind == "relative" else 1.0',
        "state.first",
        FEDU,
        "the paper's threshold is taken as relative",
    ),
    Mutant(
        "fedu-relative-to-last",
        "methods/fedu.py",
        "first=moved if state is None else state.first",
        "first=moved",
        FEDU,
        "a relative threshold counts in last divergences",
    ),
    Mutant(
        "fedu-took-global",
        "methods/fedu.py",
        "float(start.predictor is down.predictor)",
        "float(start.predictor is not down.predictor)",
        FEDU,
        "the log says the opposite of what a client did",
    ),
    Mutant(
        "fedu-target-slot",
        "methods/fedu.py",
        'self.update in ("online", "none")',
        'self.update in ("target", "none")',
        FEDU,
        "the global encoder overwrites the wrong network",
    ),
    Mutant(
        "ema-decay",
        "core/weights.py",
        "1.0 - decay)",
        "decay)",
        WEIGHTS,
        "targets follow at once",
    ),
    Mutant(
        "moon-previous",
        "methods/moon.py",
        "(down if state is None else state).weights",
        "down.weights",
        "tests/methods/test_moon.py",
        "MOON forgets the client's last model",
    ),
    Mutant(
        "fedsc-own-moment",
        "methods/fedsc.py",
        "if k != client]",
        "]",
        "tests/methods/test_fedsc.py",
        "a client's own moment is among the others'",
    ),
    Mutant(
        "fedsc-share",
        "methods/fedsc.py",
        "spectral_contrast(z1, z2, others, share)",
        "spectral_contrast(z1, z2, others, 1.0)",
        "tests/methods/test_fedsc.py",
        "the others' moments count nothing",
    ),
    Mutant(
        "fedsc-both-exchanges",
        "methods/fedsc.py",
        "excess.clamp(min=1)",
        "excess",
        "tests/methods/test_fedsc.py",
        "short projections are made longer",
    ),
    Mutant(
        "fedsc-loss-sign",
        "nn/losses.py",
        "near = -2 * (z1 * z2)",
        "near = 2 * (z1 * z2)",
        "tests/methods/test_fedsc.py",
        "views of one image are pushed apart",
    ),
    Mutant(
        "furlong-views-others",
        "nn/losses.py",
        "logits.masked_fill(same, -torch.inf).logsumexp(dim=1, keepdim=True)",
        "logits.logsumexp(dim=1, keepdim=True)",
        "tests/nn/test_losses.py -k several",
        "a view's own partners, and itself, are among its negatives",
    ),
    Mutant(
        "furlong-views-mixed",
        "methods/furlong.py",
        "z.unflatten(0, (self.views, -1))",
        "z.unflatten(0, (-1, self.views)).transpose(0, 1)",
        "tests/methods/test_furlong.py",
        "views of different images are taken for partners",
    ),
    Mutant(
        "furlong-same-view",
        "methods/furlong.py",
        "torch.cat(batch.views(self.views))",
        "torch.cat(batch.views(1) * self.views)",
        "tests/methods/test_furlong.py",
        "all views are the same one",
    ),
    Mutant(
        "scenes-loss-negated",
        "runs/drawn.py",
        "optimiser.step(method.loss(net, batch))",
        "optimiser.step(-method.loss(net, batch))",
        "tests/runs/test_drawn.py -k lowers",
        "what is learnt from drawn scenes is the opposite",
    ),
    Mutant(
        "scenes-one-start-for-all-seeds",
        "runs/drawn.py",
        "[setup.seed, setup.server_threads, str(setup.device)]",
        "[setup.server_threads, str(setup.device)]",
        "tests/runs/test_drawn.py -k once",
        "the cache gives another seed's weights",
    ),
    Mutant(
        "scenes-flat",
        "data/scenes.py",
        "torch.lerp(image, surface(), cover[:, None])",
        "torch.lerp(image, image, cover[:, None])",
        "tests/data/test_scenes.py",
        "nothing is drawn onto the ground",
    ),
    Mutant(
        "ssd-target-gradient",
        "methods/ssd.py",
        "(z * scaling).detach()",
        "(z * scaling)",
        "tests/methods/test_ssd.py",
        "separation shrinks instead of spreading",
    ),
    Mutant(
        "ssd-distillation-direction",
        "methods/ssd.py",
        "F.kl_div(found, wanted,",
        "F.kl_div(wanted, found,",
        "tests/methods/test_ssd.py",
        "the divergence is the other one",
    ),
    Mutant(
        "ssd-same-dimensions",
        "methods/ssd.py",
        "torch.arange(place * share, (place + 1) * share)",
        "torch.arange(share)",
        "tests/methods/test_ssd.py",
        "all clients have the same dimensions",
    ),
    Mutant(
        "fedu2-no-regulariser",
        "methods/byol.py",
        "byol(predictor(z), goal) + self.regulariser(z)",
        "byol(predictor(z), goal)",
        "tests/methods/test_fedu2.py",
        "nothing draws projections to the whole sphere",
    ),
    Mutant(
        "fedu2-target-forgotten",
        "methods/fedu2.py",
        "Triple(down.encoder, down.target, down.predictor)",
        "Triple(down.encoder, down.encoder, down.predictor)",
        "tests/methods/test_fedu2.py",
        "the averaged target is thrown away",
    ),
    Mutant(
        "uniform-order",
        "nn/losses.py",
        "torch.arange(count - 1, -count, -2",
        "torch.arange(1 - count, count, 2",
        "tests/methods/test_fedu2.py",
        "bundled angles are nearer to even ones",
    ),
    Mutant(
        "feddecorr-kept",
        "core/context.py",
        "            self._features.clear()\n",
        "",
        "tests/methods/test_fedu2.py",
        "the features of earlier steps count again",
    ),
    Mutant(
        "eua-norms",
        "core/aggregation.py",
        "least_norm(products / norms / norms[:, None]) / norms",
        "least_norm(products / norms / norms[:, None])",
        "tests/core/test_aggregation.py -k eua",
        "those who went far count as much",
    ),
    Mutant(
        "fedx-global-view",
        "methods/fedx.py",
        "nt_xent(y1, g2, t)",
        "nt_xent(y1, z2, t)",
        "tests/methods/test_fedx.py",
        "the received network does not teach",
    ),
    Mutant(
        "fedsimsiam-one-direction",
        "methods/fedsimsiam.py",
        "cosine_simsiam(predictor(z1), z2), cosine_simsiam(predictor(z2), z1)",
        "cosine_simsiam(predictor(z1), z2), cosine_simsiam(predictor(z1), z2)",
        "tests/methods/test_fedsimsiam.py",
        "only one view is predicted",
    ),
    Mutant(
        "fedsimsiam-predictor-alone",
        "methods/fedsimsiam.py",
        "range(self.predictor_steps)",
        "range(0)",
        "tests/methods/test_fedsimsiam.py",
        "the predictor takes no steps of its own",
    ),
    Mutant(
        "fedsimsiam-predictor-private",
        "methods/fedsimsiam.py",
        'return "no" if self.predictor_steps else "records"',
        'return "records"',
        "tests/methods/test_fedsimsiam.py",
        "steps on whole batches count as steps on single images",
    ),
    Mutant(
        "moco-key-order",
        "methods/fedmoco.py",
        "zip(views, reversed(keys), strict=False)",
        "zip(views, keys, strict=False)",
        "tests/methods/test_fedmoco.py",
        "a query's positive is the key of the same view",
    ),
    Mutant(
        "proximal-half",
        "methods/networks.py",
        "torch.stack(moved).sum() / 2",
        "torch.stack(moved).sum()",
        "tests/methods/test_fedavg.py",
        "FedProx's pull is twice too strong",
    ),
    Mutant(
        "fcl-own-features",
        "methods/fcl.py",
        "c != client and ",
        "",
        FCL,
        "a client gets its own features as those of others",
    ),
    Mutant(
        "fcl-staleness",
        "methods/fcl.py",
        "server.rounds[c] >= oldest",
        "server.rounds[c] > oldest",
        FCL,
        "features are dropped a round too early",
    ),
    Mutant(
        "fcl-remote-only",
        "methods/fcl.py",
        'self.negatives == "remote_only"',
        'self.negatives != "remote_only"',
        FCL,
        "the negatives are those of the other setting",
    ),
    Mutant(
        "fedca-exclude-own",
        "methods/fedca.py",
        "self.exclude_own and k == client",
        "k == client",
        FEDCA,
        "own rows are always left out",
    ),
    Mutant(
        "fedca-share",
        "methods/dictionary.py",
        "-(-total * own // everybody)",
        "total * own // everybody",
        FEDCA,
        "shares of the dictionary are rounded down",
    ),
    Mutant(
        "fedca-ensembling",
        "methods/fedca.py",
        "if before is None else before, self.ensembling)",
        "if before is None else before, 1 - self.ensembling)",
        FEDCA,
        "old and new projections change their weights",
    ),
    Mutant(
        "mfcl-senders",
        "methods/mfcl.py",
        "int(self.drop * len(clients) + 1e-9)",
        "int(self.drop * len(clients))",
        MFCL,
        "0.3 of 10 clients is 2",
    ),
    Mutant(
        "mfcl-fewest",
        "methods/representations.py",
        "if len(now) >= fewest",
        "if len(now) > fewest",
        MFCL,
        "a step with just enough clients is left out",
    ),
    Mutant(
        "mfcl-rate",
        "methods/mfcl.py",
        "self.pairs_per_client / 256",
        "self.pairs_per_client / 128",
        MFCL,
        "the server's learning rate is doubled",
    ),
    Mutant(
        "swav-unit-after-mean",
        "methods/fedswav.py",
        "return unit(super().aggregate(server, reports, ctx))",
        "return super().aggregate(server, reports, ctx)",
        SWAV,
        "averaged prototypes are shorter than 1",
    ),
    Mutant(
        "swav-queue-from",
        "methods/fedswav.py",
        "if full and before >= self.queue_from:",
        "if full:",
        SWAV,
        "the queue fills from the first epoch",
    ),
    Mutant(
        "swav-queue-from-late",
        "methods/fedswav.py",
        "before >= self.queue_from",
        "before > self.queue_from",
        SWAV,
        "the queue begins an epoch late",
    ),
    Mutant(
        "swav-queue-partly-filled",
        "methods/fedswav.py",
        "queue if queue.shape[1] == full else queue[:, :0]",
        "queue",
        SWAV,
        "a queue that is not full counts",
    ),
    Mutant(
        "swav-queue-forgotten",
        "methods/fedswav.py",
        "if state is None else state.rows",
        "if True else state.rows",
        SWAV,
        "the queue is empty at the start of a round",
    ),
    Mutant(
        "swav-queue-oldest",
        "methods/fedswav.py",
        "dim=1)[:, -full:]",
        "dim=1)[:, :full]",
        SWAV,
        "the queue keeps the oldest rows",
    ),
    Mutant(
        "swav-queue-too-long",
        "methods/fedswav.py",
        "min(self.queue, len(ctx.data))",
        "self.queue",
        SWAV,
        "a queue that is longer than an epoch never gets full in time",
    ),
    Mutant(
        "swav-code-entropy",
        "methods/fedswav.py",
        "/ log(self.prototypes)",
        "",
        SWAV,
        "uniform codes are not 1 in the log",
    ),
    Mutant(
        "feddc-heads",
        "methods/feddc.py",
        "views[head % 2]",
        "views[0]",
        "tests/methods/test_feddc.py",
        "all heads cluster the first view",
    ),
    Mutant(
        "orchestra-cluster-first",
        "methods/orchestra.py",
        "memory.roll(-position, 0)",
        "memory",
        "tests/methods/test_orchestra.py",
        "the memory's oldest row is not the first",
    ),
    # ------------------------------------------------------------ networks, optimisers, clustering
    Mutant(
        "lars-trust",
        "nn/optimisers.py",
        "trust * length / size",
        "trust * size / length",
        "tests/nn/test_optimisers.py",
        "LARS's ratio is reversed",
    ),
    Mutant(
        "warmup",
        "nn/optimisers.py",
        "max(progress, 0.0) / warmup",
        "max(progress, 0.0)",
        "tests/nn/test_optimisers.py",
        "the warm-up never arrives",
    ),
    Mutant(
        "peernorm-gradient",
        "nn/peernorm.py",
        "-rstd / count * (d_bias",
        "rstd / count * (d_bias",
        "tests/nn/test_peernorm.py",
        "the gradient has a wrong sign",
    ),
    Mutant(
        "sinkhorn-clusters",
        "nn/clustering.py",
        ".mul_(clusters / rows)",
        ".mul_(rows / clusters)",
        CLUSTERING,
        "clusters get the wrong share",
    ),
    Mutant(
        "kmeans-unit",
        "nn/clustering.py",
        "F.normalize(sums, dim=1), centroids)",
        "sums, centroids)",
        CLUSTERING,
        "centroids are not unit vectors",
    ),
    Mutant(
        "schedule",
        "core/context.py",
        "(1 + math.cos(math.pi * progress))",
        "(1 + math.cos(math.pi * progress / 2))",
        WEIGHTS,
        "the learning rate falls half as fast",
    ),
    # ------------------------------------------------------------ aggregation
    Mutant(
        "mean-weights",
        "core/weights.py",
        "total.add_(each, alpha=weight)",
        "total.add_(each)",
        WEIGHTS,
        "every client counts the same",
    ),
    Mutant(
        "mean-pooled",
        "core/weights.py",
        "self._sums[name] / self.total - mean.square()",
        "self._sums[name] / self.total + mean.square()",
        "tests/methods/test_averaging.py tests/core/test_aggregation.py -k pooled",
        "pooled variances are wrong",
    ),
    Mutant(
        "lerp-buffers",
        "core/weights.py",
        "end[name].clone() if is_buffer(name)",
        "tensor.clone() if is_buffer(name)",
        WEIGHTS,
        "statistics of the wrong network",
    ),
    Mutant(
        "momentum",
        "core/aggregation.py",
        "first = s.momentum * first + delta",
        "first = first + delta",
        RULES,
        "the server's momentum never decays",
    ),
    Mutant(
        "moved-waits",
        "devices.py",
        "non_blocking=device.type in WITHOUT_WAITING",
        "non_blocking=False",
        "tests/methods/test_accelerator.py -k 'fedsimclr or views'",
        "every copy to an accelerator waits for it",
    ),
    Mutant(
        "matching-waits",
        "nn/losses.py",
        "rest = logits.gather(1, kept)",
        "rest = logits.masked_select(others).view(len(logits), -1)",
        "tests/methods/test_accelerator.py -k fcl",
        "every step of FCL waits for an accelerator",
    ),
    Mutant(
        "monitor-spacing",
        "runs/observers.py",
        "min(affordable, learning // 2)",
        "affordable",
        "tests/runs/test_loop.py -k measured_more_often",
        "a short run is measured only at its end",
    ),
    Mutant(
        "adam-second",
        "core/aggregation.py",
        "(1 - s.beta2) * delta.square()",
        "(1 - s.beta2) * delta.abs()",
        RULES,
        "Adam's second moment is not of squares",
    ),
    Mutant(
        "trimmed-one-side",
        "core/aggregation.py",
        "[cut : len(rows) - cut]",
        "[cut:]",
        RULES,
        "only small values are cut",
    ),
    Mutant(
        "krum-neighbours",
        "core/aggregation.py",
        "- cohort.faulty - 2",
        "- cohort.faulty - 1",
        RULES,
        "Krum looks at one neighbour too many",
    ),
    Mutant(
        "krum-self",
        "core/aggregation.py",
        ".sort(dim=1)[0][:, 1:]",
        ".sort(dim=1)[0]",
        RULES,
        "Krum counts the distance to oneself",
    ),
    Mutant(
        "weiszfeld",
        "core/aggregation.py",
        "beta = 1 / distances.clamp(min=SMOOTHING)",
        "beta = distances.clamp(min=SMOOTHING)",
        RULES,
        "far clients weigh most",
    ),
    Mutant(
        "norm-bound",
        "core/aggregation.py",
        "torch.where(norms > bounds",
        "torch.where(norms < bounds",
        RULES,
        "small updates are stretched, large ones pass",
    ),
    Mutant(
        "krum-fewest",
        "core/aggregation.py",
        "(clients - 3) // 2",
        "(clients - 2) // 2",
        RULES,
        "n > 2f + 2 is not required",
    ),
    Mutant(
        "ldawa-cosine",
        "core/aggregation.py",
        "(own @ ours / size)",
        "(own @ ours / size).abs()",
        RULES,
        "a client that goes back counts as one that goes ahead",
    ),
    # ------------------------------------------------------------ seeding
    Mutant(
        "seed-parts",
        "seeding.py",
        '"|".join(map(str, parts))',
        '"".join(map(str, parts))',
        "tests/engines/test_inprocess.py -k seeds_differ",
        "seeds of client 1, exchange 12 and client 11, exchange 2 are one",
    ),
    Mutant(
        "seed-set",
        "seeding.py",
        "        torch.manual_seed(seed)\n",
        "",
        "tests/test_seeding.py",
        "training is not seeded",
    ),
    Mutant(
        "seed-client",
        "core/exchange.py",
        '"client", ctx.client, ctx.exchange.index',
        '"client", ctx.exchange.index',
        "tests/test_seeding.py",
        "all clients of an exchange draw the same numbers",
    ),
    Mutant(
        "seed-exchange",
        "core/exchange.py",
        '"client", ctx.client, ctx.exchange.index',
        '"client", ctx.client',
        "tests/test_seeding.py",
        "a client draws the same numbers in every round",
    ),
    Mutant(
        "seed-cohort",
        "core/exchange.py",
        'seed, "cohort", exchange.round)',
        'seed, "cohort")',
        "tests/engines/test_inprocess.py -k cohorts",
        "every round has the same clients",
    ),
    # ------------------------------------------------------------ guard
    Mutant(
        "guard-client",
        "core/guard.py",
        "report.client != client",
        "False",
        GUARD,
        "a client signs for another one",
    ),
    Mutant(
        "guard-exchange",
        "core/guard.py",
        "report.exchange != exchange.index",
        "False",
        GUARD,
        "an old answer is accepted",
    ),
    Mutant(
        "guard-examples",
        "core/guard.py",
        "report.examples <= most",
        "report.examples",
        GUARD,
        "a client claims any number of images",
    ),
    Mutant(
        "guard-finite",
        "core/guard.py",
        "math.isfinite(low) and math.isfinite(high)",
        "True",
        GUARD,
        "NaN passes",
    ),
    Mutant(
        "guard-metric",
        "core/guard.py",
        "-self.max_metric <= value <= self.max_metric",
        "True",
        GUARD,
        "a metric of 1e300 spoils every mean",
    ),
    Mutant(
        "guard-images",
        "core/guard.py",
        "0 <= seen <= most",
        "seen <= most",
        GUARD,
        "a negative number of images is believed",
    ),
    Mutant(
        "guard-rows",
        "core/guard.py",
        "> self.max_stretch",
        "> 1e12",
        OUTLIERS,
        "long rows reach all other clients",
    ),
    Mutant(
        "outlier-median",
        "core/outliers.py",
        "moved > times * wider * usual * share",
        "False",
        OUTLIERS,
        "one huge update captures the mean",
    ),
    Mutant(
        "outlier-images",
        "core/outliers.py",
        "max(1.0, size.images / usual_images)",
        "1.0",
        OUTLIERS,
        "an honest large site is left out",
    ),
    Mutant(
        "outlier-few",
        "core/outliers.py",
        "whole and moved > _ALONE * max(1.0, whole)",
        "False",
        OUTLIERS,
        "of two clients one captures the mean",
    ),
    Mutant(
        "outlier-told",
        "core/exchange.py",
        "server.guard.outlier == 0",
        "False",
        OUTLIERS,
        "nobody is told of an outlier under the mean",
    ),
    Mutant(
        "fleet-half",
        "deploy/flower_fleet.py",
        "max_time=whole,",
        "max_time=None,",
        "tests/deploy/test_fleet.py -k half",
        "a node waits for ever for half a question",
    ),
    Mutant(
        "fleet-away",
        "deploy/flower_fleet.py",
        "if not is_away(error) or time.monotonic() + pause > end:",
        "if True:",
        "tests/deploy/test_fleet.py -k away",
        "a moment without a SuperLink costs a site its round",
    ),
    Mutant(
        "fleet-lost",
        "deploy/flower_fleet.py",
        "while not self.lost.is_set():",
        "while True:",
        "tests/deploy/test_fleet.py -k known_any_more",
        "a node that was given up never connects again",
    ),
    Mutant(
        "fleet-place",
        "deploy/flower_fleet.py",
        "if number.exists():",
        "if False:",
        "tests/deploy/test_fleet.py -k killed",
        "a node that was killed is refused for a minute",
    ),
    Mutant(
        "fleet-goodbye",
        "deploy/flower_fleet.py",
        "client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))",
        "pass",
        "tests/deploy/test_fleet.py -k 'is_answered'",
        "a node leaves without a word and is waited for",
    ),
    Mutant(
        "store-verify",
        "deploy/flower_store.py",
        "if get_object_id(object_content) != object_id:",
        "if False:",
        "tests/deploy/test_flower_store.py -k refused",
        "a site stores other bytes under an object's digest",
    ),
    Mutant(
        "store-crash",
        "deploy/flower_store.py",
        "and _digest(path) == object_id",
        "",
        "tests/deploy/test_flower_store.py -k crash",
        "after a loss of power nodes get half of the weights",
    ),
    Mutant(
        "store-rollback",
        "deploy/flower_store.py",
        """event.listen(
                    session, "after_commit", lambda _: path.unlink(missing_ok=True), once=True
                )""",
        "path.unlink(missing_ok=True)",
        "tests/deploy/test_flower_store.py -k fails",
        "an object is lost when its deletion is undone",
    ),
    Mutant(
        "store-twice",
        "deploy/flower_store.py",
        "if super().get(object_id) != row:",
        "if False:",
        "tests/deploy/test_flower_store.py -k large",
        "an object that is sent twice leaves a file for ever",
    ),
    Mutant(
        "piece-size",
        "deploy/flower.py",
        "PIECE = 12 << 20",
        "PIECE = 16 << 20",
        "tests/deploy/test_fleet.py -k nginx",
        "nginx refuses every large answer",
    ),
    Mutant(
        "resume-lacks-a-node",
        "engines/remote.py",
        "            if self.whole:",
        "            if False:",
        "tests/deploy/test_remote.py -k silently",
        "a resumed run silently has other bits",
    ),
    Mutant(
        "digest-checked",
        "runs/record.py",
        "hashlib.sha256(path.read_bytes()).hexdigest() != digest",
        "False",
        "tests/runs/test_record.py",
        "an edited configuration is gone on with",
    ),
    Mutant(
        "node-sizes",
        "deploy/agreement.py",
        "0 <= n <= MOST_IMAGES",
        "True",
        "tests/deploy/test_hostile.py -k exhaust",
        "a server takes 8 GB of a node",
    ),
    Mutant(
        "node-slices",
        "deploy/states.py",
        "of > MOST_SLICES or before + len(body) > MOST_BYTES",
        "False",
        "tests/deploy/test_hostile.py -k never_ends",
        "a download never ends",
    ),
    Mutant(
        "node-bounded",
        "deploy/agreement.py",
        "        _require_bounded(settings)\n",
        "        pass\n",
        "tests/deploy/test_hostile.py -k exhaust",
        "a node without --agree trains for ever",
    ),
    Mutant(
        "guard-value",
        "core/guard.py",
        "max(-low, high) > self.max_value",
        "high > self.max_value",
        GUARD,
        "huge negative numbers pass",
    ),
    Mutant(
        "guard-shape",
        "core/guard.py",
        "tensor.shape != want[name].shape",
        "tensor.numel() != want[name].numel()",
        GUARD,
        "a shape that would broadcast passes",
    ),
    Mutant(
        "guard-variance",
        "core/guard.py",
        'name.endswith("running_var") and low < 0',
        "False",
        GUARD,
        "negative variances pass",
    ),
    Mutant(
        "guard-dtype",
        "core/guard.py",
        "tensor.dtype != want[name].dtype",
        "False",
        GUARD,
        "another type of numbers passes",
    ),
    # ------------------------------------------------------------ exchange
    Mutant(
        "cohort-size",
        "core/exchange.py",
        "fraction * clients + 1e-9",
        "fraction * clients",
        "tests/engines/test_inprocess.py -k cohorts",
        "0.29 of 100 clients is 28",
    ),
    Mutant(
        "gate-duplicates",
        "core/exchange.py",
        "del self._waiting[client]",
        "pass",
        f"{GUARD} tests/engines/test_inprocess.py",
        "a client is counted twice, or as silent although it answered",
    ),
    Mutant(
        "gate-fewest",
        "core/exchange.py",
        "answers < min(fewest, len(self._cohort))",
        "answers < min(fewest, len(self._cohort)) - 1",
        "tests/engines/test_inprocess.py -k 'fewest or too_few or min_clients or stops'",
        "a round with too few clients counts",
    ),
    Mutant(
        "client-diverged",
        "core/exchange.py",
        "first_nonfinite((upload, kept))",
        "first_nonfinite(())",
        "tests/core tests/engines/test_inprocess.py -k 'diverge or nan or finite'",
        "NaN is sent and kept",
    ),
    Mutant(
        "client-statistics",
        "core/exchange.py",
        "down = replace_tensors(down, kept.stats)",
        "pass",
        "tests/methods/test_fedsimclr.py",
        'bn_stats = "local" forgets the statistics',
    ),
    Mutant(
        "client-moments",
        "core/exchange.py",
        "ctx.moments = list(kept.moments)",
        "ctx.moments = []",
        "tests/methods/test_battery.py tests/core"
        " -k '(persist or moments) and not mfcl and not fedca'",
        "optimiser.persist does nothing",
    ),
    Mutant(
        "order-of-clients",
        "core/exchange.py",
        "sorted(chosen.tolist())",
        "chosen.tolist()",
        "tests/engines/test_inprocess.py -k cohorts",
        "reports are not added in client order",
    ),
    # ------------------------------------------------------------ workers
    Mutant(
        "pool-longest",
        "engines/pool.py",
        "key=self._length, reverse=True",
        "key=self._length",
        "tests/engines/test_inprocess.py -k longest",
        "the longest client is the last to begin",
    ),
    Mutant(
        "pool-behind",
        "engines/pool.py",
        "client = owed.popleft() if owed else None",
        "client = owed.pop() if owed else None",
        "tests/engines/test_inprocess.py -k one_message",
        "another client of the message gets the answer, or the blame",
    ),
    Mutant(
        "sheet-read",
        "engines/blobs.py",
        "weakref.finalize(memory, self.unread).atexit = False",
        "self.unread()",
        "tests/engines/test_inprocess.py -k sheet",
        "a report is written over while the server reads it",
    ),
    Mutant(
        "one-thread",
        "seeding.py",
        "        with threads():\n            try:",
        "        with threads(torch.get_num_threads()):\n            try:",
        "tests/test_seeding.py",
        "the server waits for cores that clients have",
    ),
    Mutant(
        "fused-frozen",
        "nn/optimisers.py",
        'moving = [p for p in group["params"] if p.grad is not None]',
        'moving = list(group["params"])',
        "tests/nn/test_optimisers.py -k bits",
        "a frozen weight has no gradient to move by",
    ),
    # ------------------------------------------------------------ payload
    Mutant(
        "payload-alignment",
        "core/layout.py",
        'b" " * (-len(text) % 8)',
        'b" " * 0',
        PAYLOAD,
        "tensors are not aligned",
    ),
    Mutant(
        "payload-gaps",
        "core/layout.py",
        "begin != covered or ",
        "",
        PAYLOAD,
        "tensors may overlap",
    ),
    Mutant(
        "payload-rest",
        "core/layout.py",
        "if places.total != room",
        "if places.total > room",
        PAYLOAD,
        "bytes behind the last tensor are ignored",
    ),
    Mutant(
        "payload-nan",
        "core/payload.py",
        "return value if math.isfinite(value) else",
        "return value if True else",
        PAYLOAD,
        "NaN makes invalid JSON",
    ),
    Mutant(
        "payload-buffers",
        "core/payload.py",
        '"buffers" if is_buffer(name) else "params"',
        '"params"',
        f"{PAYLOAD} tests/runs/test_cost.py -k 'not agrees or fedsimclr'",
        "statistics are counted as parameters",
    ),
    # ------------------------------------------------------------ secure aggregation
    Mutant(
        "secure-own-mask",
        "core/secure/protocol.py",
        '    p.add_mask(vector, raw(secrets.keys["seed"]))\n',
        "",
        SECURE,
        "a vector that comes late is open to the server",
    ),
    Mutant(
        "secure-sign",
        "core/secure/protocol.py",
        "p.add_mask(vector, seed, subtract=me < other)",
        "p.add_mask(vector, seed, subtract=me > 99)",
        SECURE,
        "masks between clients do not fall out",
    ),
    Mutant(
        "secure-both-shares",
        "core/secure/protocol.py",
        "given.append(both[SHARE:] if other in alive else both[:SHARE])",
        "given.append(both[SHARE:])",
        SECURE,
        "the wrong share is revealed of who dropped out",
    ),
    Mutant(
        "secure-keys-signature",
        "core/secure/protocol.py",
        "p.verify(signer, signature, ",
        'str.format("", signer, signature, ',
        SECURE,
        "a server puts its own keys in a client's place",
    ),
    Mutant(
        "secure-list-signature",
        "core/secure/protocol.py",
        "        p.verify(adverts[other][2 * KEY : 3 * KEY], raw(signature), text, other)\n",
        "        pass\n",
        SECURE,
        "a server tells clients different lists",
    ),
    Mutant(
        "secure-session",
        "core/secure/protocol.py",
        '_require(raw(offer.keys["session"]) == session(every), "not the keys of the session")',
        "pass",
        SECURE,
        "clients do not notice that others see other keys",
    ),
    Mutant(
        "secure-threshold",
        "core/secure/protocol.py",
        "len(others) == degree and offer.threshold == threshold",
        "len(others) == degree",
        SECURE,
        "a server lowers the threshold",
    ),
    Mutant(
        "secure-enough",
        "core/secure/protocol.py",
        '_require(count >= secrets.offer.threshold, f"only {count} clients have {what}")',
        "pass",
        SECURE,
        "clients open a sum of too few",
    ),
    Mutant(
        "secure-fewest",
        "core/secure/protocol.py",
        '_require(len(set(alive.clients)) >= fewest, f"fewer than {fewest} clients")',
        "pass",
        SECURE,
        "clients sign a list of too few",
    ),
    Mutant(
        "secure-turn",
        "core/secure/protocol.py",
        "_require_in_turn(secrets.inbox is not None and secrets.alive is None)",
        "pass",
        SECURE,
        "a client signs two lists",
    ),
    Mutant(
        "secure-about",
        "core/secure/primitives.py",
        "ChaCha20Poly1305(key).decrypt(sealed[:12], sealed[12:], about)",
        "ChaCha20Poly1305(key).decrypt(sealed[:12], sealed[12:], None)",
        SECURE,
        "sealed messages are not bound to sender and receiver",
    ),
    Mutant(
        "secure-label",
        "core/secure/primitives.py",
        'b"furlong.secure/" + label',
        'b"furlong.secure/"',
        SECURE,
        "one key serves for masks and for messages",
    ),
    Mutant(
        "secure-shamir",
        "core/secure/primitives.py",
        "for _ in range(threshold - 1)]",
        "for _ in range(threshold - 2)]",
        SECURE,
        "fewer shares than the threshold give the secret",
    ),
    Mutant(
        "secure-graph",
        "core/secure/graph.py",
        "if risk >= 2.0**-SECURITY:",
        "if risk >= 2.0**-1:",
        SECURE,
        "the sparse graph's threshold is too low",
    ),
    Mutant(
        "secure-rounding",
        "core/secure/numbers.py",
        "place.copy_(scaled.round_())",
        "place.copy_(scaled)",
        SECURE,
        "numbers are cut instead of rounded",
    ),
    Mutant(
        "secure-range",
        "core/secure/numbers.py",
        "if not max(-low, high) <= most:",
        "if max(-low, high) > 1e30:",
        SECURE,
        "values that overflow are sent",
    ),
    Mutant(
        "secure-images",
        "methods/wrappers/secured.py",
        "if found.images != images:",
        "if found.images < 0:",
        SECURED,
        "a spoilt sum is used",
    ),
    Mutant(
        "secure-seed",
        "methods/wrappers/secured.py",
        'with seeded(setup.device, setup.seed, "client", ctx.client, number):',
        'with seeded(setup.device, setup.seed, "client", ctx.client, number + 1):',
        SECURED,
        "a client trains with other random numbers than in a plain run",
    ),
    Mutant(
        "secure-metrics",
        "methods/wrappers/secured.py",
        "return Local(replace(state, secrets=known), up)\n\n    def _train",
        'return Local(replace(state, secrets=known), up, {"loss": 0.0})\n\n    def _train',
        SECURED,
        "a client's loss is sent in clear",
    ),
    Mutant(
        "secure-asked",
        "methods/wrappers/secured.py",
        "return [client for client in cohort if client in there]",
        "return cohort",
        SECURED,
        "who dropped out is asked again",
    ),
    Mutant(
        "secure-forget",
        "methods/wrappers/secured.py",
        "return Local(replace(state, secrets=None), protocol.reveal(secrets, me, down))",
        "return Local(state, protocol.reveal(secrets, me, down))",
        SECURED,
        "a round's secrets stay",
    ),
    Mutant(
        "secure-once",
        "core/secure/identity.py",
        "if what in before:",
        "if what in before[:0]:",
        IDENTITY,
        "a site answers a phase twice, when a server goes back",
    ),
    Mutant(
        "secure-known",
        "core/secure/identity.py",
        "if public not in self.known:",
        "if not self.known:",
        IDENTITY,
        "a site takes part with strangers",
    ),
    # ------------------------------------------------------------ checkpoint
    Mutant(
        "checkpoint-sha",
        "runs/checkpoint.py",
        '_sha256(path) != entry["sha256"]',
        "False",
        CHECKPOINT,
        "a damaged file is read",
    ),
    Mutant(
        "checkpoint-digest",
        "runs/checkpoint.py",
        'manifest.pop("digest") != _digest(manifest)',
        'not manifest.pop("digest")',
        CHECKPOINT,
        "a damaged manifest is read",
    ),
    Mutant(
        "checkpoint-newest",
        "runs/checkpoint.py",
        "reversed(_kept(run)):\n        if most",
        "_kept(run):\n        if most",
        CHECKPOINT,
        "a run goes back to the oldest checkpoint",
    ),
    Mutant(
        "checkpoint-keep",
        "runs/checkpoint.py",
        "KEEP = 2",
        "KEEP = 1",
        CHECKPOINT,
        "there is no checkpoint to go back to",
    ),
    Mutant(
        "checkpoint-needed",
        "runs/checkpoint.py",
        "for path in _kept(run)))",
        "for path in _kept(run)[-1:]))",
        CHECKPOINT,
        "states of the checkpoint before are removed",
    ),
    Mutant(
        "checkpoint-new",
        "runs/checkpoint.py",
        "if path.name not in known]",
        "]",
        CHECKPOINT,
        "every state is read at every checkpoint",
    ),
    Mutant(
        "states-saved",
        "engines/states.py",
        "if before in self._unsaved:",
        "if before:",
        STATES,
        "a state that a checkpoint needs is removed",
    ),
    Mutant(
        "states-shorter",
        "engines/states.py",
        "size = file.truncate()",
        "size = file.tell()",
        "tests/engines/test_inprocess.py -k states_are_files",
        "the end of a longer state is behind the new one",
    ),
    Mutant(
        "guard-quick",
        "core/guard.py",
        "< self.max_value**2 / 2",
        "< math.inf",
        GUARD,
        "the quick look lets numbers pass that are far too large",
    ),
    Mutant(
        "guard-quick-variance",
        "core/guard.py",
        "(torch.cat(variances) < 0).any()",
        "False",
        GUARD,
        "the quick look lets negative variances pass",
    ),
    Mutant(
        "states-names",
        "engines/states.py",
        "self._last = max((int(name) for name in names if name.isdecimal()), default=0)",
        "self._last = len(list(names)) * 0",
        STATES,
        "a resumed run writes over states of a checkpoint",
    ),
    # ------------------------------------------------------------ data
    Mutant(
        "dicom-quoted",
        "data/reading.py",
        "file ({type(error).__name__})",
        "file ({error})",
        MEDICAL,
        "a reason quotes what a file says of a patient",
    ),
    Mutant(
        "dicom-log",
        "data/dicom.py",
        'logging.getLogger("pydicom").setLevel(logging.CRITICAL)',
        "pass",
        MEDICAL,
        "pydicom's log quotes what a file says of a patient",
    ),
    Mutant(
        "dicom-unsalted",
        "data/dicom.py",
        "key=_SALT, ",
        "",
        MEDICAL,
        "whoever has a digest can try all numbers of patients",
    ),
    Mutant(
        "dicom-salt",
        "data/dicom.py",
        "_SALT = os.urandom(32)",
        '_SALT = b"salt"',
        MEDICAL,
        "the salt is known to all",
    ),
    Mutant(
        "patients-unknown",
        "data/sources.py",
        "-1 - place for",
        "place for",
        "tests/data/test_manifest.py -k gaps",
        "an image of unknown patient counts as a patient",
    ),
    Mutant(
        "patients-interval",
        "evaluation/metrics.py",
        '"patients" if known.all()',
        '"patients" if known.any()',
        "tests/evaluation/test_metrics.py -k unknown",
        "an interval is said to be over patients where some are unknown",
    ),
    Mutant(
        "partition-windows",
        "data/partition.py",
        "used.index(min(used))",
        "used.index(max(used))",
        PARTITION,
        "classes are not used evenly",
    ),
    Mutant(
        "partition-mfcl",
        "data/partition.py",
        "(m * s + shift + i) % n",
        "(m * s + i) % n",
        PARTITION,
        "MFCL's printed scenarios",
    ),
    Mutant(
        "partition-least",
        "data/partition.py",
        "counts.sum(1).min() >= least",
        "counts.sum(1).min() >= 0",
        PARTITION,
        "a client may have nearly no images",
    ),
    Mutant(
        "partition-remainder",
        "data/partition.py",
        "sizes[k % len(sizes)] += 1",
        "sizes[0] += 1",
        PARTITION,
        "the first client gets the whole remainder",
    ),
    Mutant(
        "partition-room",
        "data/partition.py",
        "counts.sum(1) < r.n / r.clients",
        "counts.sum(1) <= r.n",
        PARTITION,
        "full clients get more images",
    ),
    Mutant(
        "augment-hue",
        "data/augment.py",
        "turn[:, None] * 6 - 3",
        "turn[:, None] * 3 - 3",
        AUGMENT,
        "hues turn half as far",
    ),
    Mutant(
        "augment-solarise",
        "data/augment.py",
        "(part >= self.solarise_from)",
        "(part < self.solarise_from)",
        AUGMENT,
        "dark pixels are inverted",
    ),
    Mutant(
        "augment-blur",
        "data/augment.py",
        "(-0.5 * (offset / sigma[:, None]) ** 2)",
        "(-(offset / sigma[:, None]) ** 2)",
        AUGMENT,
        "the blur is narrower",
    ),
    Mutant(
        "augment-flip",
        "data/augment.py",
        "wide * (1 - 2 * mirror.float())",
        "wide",
        AUGMENT,
        "crops are moved, not mirrored",
    ),
    Mutant(
        "augment-rotation",
        "data/augment.py",
        ".rot90(turn, (2, 3))",
        ".rot90(turn, (3, 2))",
        "tests/data/test_augment.py tests/methods/test_fedrot.py tests/methods/test_orchestra.py",
        "images turn clockwise",
    ),
    Mutant(
        "heterogeneity",
        "data/heterogeneity.py",
        'clients if denominator == "M2" else clients - 1',
        "clients - 1",
        "tests/data/test_heterogeneity.py",
        "β of the papers' tables",
    ),
    # ------------------------------------------------------------ evaluation
    Mutant(
        "knn-vote",
        "evaluation/knn.py",
        "/ temperature).exp()",
        "* temperature).exp()",
        FROZEN,
        "neighbours weigh nearly the same",
    ),
    Mutant(
        "knn-cosine",
        "evaluation/knn.py",
        "F.normalize(test_features.float(), dim=1)",
        "test_features.float()",
        FROZEN,
        "the temperature depends on the length of features",
    ),
    Mutant(
        "knn-k",
        "evaluation/knn.py",
        "max(1, min(k, len(bank)))",
        "len(bank)",
        FROZEN,
        "all images vote",
    ),
    Mutant(
        "linear-bias",
        "evaluation/linear.py",
        "bias -= (weight * mean).sum(dim=1)",
        "bias += (weight * mean).sum(dim=1)",
        FROZEN,
        "the classifier for raw features is wrong",
    ),
    Mutant(
        "linear-cosine",
        "evaluation/linear.py",
        "math.cos(math.pi * epoch / self.epochs)) / 2",
        "math.cos(math.pi * epoch / self.epochs))",
        f"{FROZEN} {PROTOCOLS}",
        "the probe's rate is doubled",
    ),
    Mutant(
        "linear-steps",
        "evaluation/linear.py",
        "epoch >= round(s * self.epochs)",
        "epoch > round(s * self.epochs)",
        f"{FROZEN} {PROTOCOLS}",
        "the probe's rate drops an epoch late",
    ),
    Mutant(
        "linear-shuffle",
        "evaluation/linear.py",
        "if plan.shuffle:",
        "if not plan.shuffle:",
        FROZEN,
        "recipes shuffle that must not",
    ),
    # ------------------------------------------------------------ configuration and tables
    Mutant(
        "config-fraction",
        "settings.py",
        "operator.gt",
        "operator.ge",
        CONFIG,
        "a fraction of 0 is accepted",
    ),
    Mutant(
        "config-bool",
        "runs/config.py",
        'if word in ("false", "no", "off", "0"):\n            return False',
        'if word in ("false", "no", "off", "0"):\n            return True',
        CONFIG,
        "false is read as true",
    ),
    Mutant(
        "config-int",
        "runs/config.py",
        "if hint is float or number == int(number)",
        "if True",
        CONFIG,
        "2.5 rounds become 2",
    ),
    Mutant(
        "tables-spread",
        "reports/tables.py",
        "statistics.stdev(self.values.values())",
        "statistics.pstdev(self.values.values())",
        TABLES,
        "± is of n and not of n - 1",
    ),
    Mutant(
        "tables-bytes",
        "reports/tables.py",
        "summary.bytes_up / summary.clients",
        "summary.bytes_up",
        TABLES,
        "bytes of all clients, not of one",
    ),
    Mutant(
        "holm-rank",
        "reports/significance.py",
        "(len(values) - rank) * values[i]",
        "len(values) * values[i]",
        TABLES,
        "Bonferroni in place of Holm",
    ),
    Mutant(
        "paired-test",
        "reports/significance.py",
        "stats.ttest_rel(ours, baseline)",
        "stats.ttest_ind(ours, baseline)",
        TABLES,
        "seeds are not paired",
    ),
    Mutant(
        "tables-baseline",
        "reports/tables.py",
        "ours.keys() & theirs.keys()",
        "ours.keys() | theirs.keys()",
        TABLES,
        "seeds that have no partner are paired",
    ),
    # ------------------------------------------------------------ codec, remote, cost
    Mutant(
        "codec-residual",
        "engines/codec.py",
        "wanted if lost is None else wanted + lost",
        "wanted",
        CODEC,
        "no error feedback",
    ),
    Mutant(
        "codec-scale",
        "engines/codec.py",
        "math.inf, dim=1) / 127",
        "math.inf, dim=1) / 128",
        CODEC,
        "the largest number of a row overflows int8",
    ),
    Mutant(
        "codec-clamp",
        "engines/codec.py",
        "wanted.clamp(-_HALF, _HALF).to(torch.float16)",
        "wanted.to(torch.float16)",
        CODEC,
        "large numbers become infinite",
    ),
    Mutant(
        "codec-limit",
        "engines/codec.py",
        "(4 if path in how else t.itemsize)",
        "t.itemsize",
        CODEC,
        "a small message may unpack to more than the limit",
    ),
    Mutant(
        "codec-features",
        "engines/codec.py",
        'coarse = how == "int8" and path in weights',
        'coarse = how == "int8"',
        CODEC,
        "features are rounded to int8",
    ),
    Mutant(
        "remote-slice",
        "engines/remote.py",
        'said.get("slice") != got',
        "False",
        REMOTE,
        "slices are joined in any order",
    ),
    Mutant(
        "remote-limit",
        "engines/remote.py",
        "len(answer) > most or ",
        "",
        REMOTE,
        "a node may send without end",
    ),
    Mutant(
        "remote-kept",
        "engines/remote.py",
        'if at + 1 < slices and reply.header.get("kept") != at:',
        "if False:",
        REMOTE,
        "a node that lost a slice goes unnoticed",
    ),
    Mutant(
        "remote-since",
        "engines/remote.py",
        "LastAnswer(exchange, said",
        "LastAnswer(exchange - 1, said",
        REMOTE,
        "a node trains on from the state of another round",
    ),
    Mutant(
        "cost-clients",
        "runs/cost.py",
        "only in (None, client)",
        "True",
        COST,
        "the cost of one client is that of all",
    ),
    Mutant(
        "cost-download",
        "runs/cost.py",
        "down += traffic(method.download(state, client, ctx))",
        "down = traffic(method.download(state, client, ctx))",
        COST,
        "only the last client's download counts",
    ),
    Mutant(
        "cost-state",
        "runs/cost.py",
        "state = method.outline(state, cohort, ctx)",
        "state = method.outline(state, [], ctx)",
        COST,
        "features that are passed on are not counted",
    ),
    # ------------------------------------------------------------ known survivors (learning.md)
    Mutant(
        "fcl-matching-sign",
        "methods/fcl.py",
        "loss + self.matching * matched",
        "loss - self.matching * matched",
        FCL,
        "neighbours are driven apart",
    ),
    Mutant(
        "fcl-matching-weight",
        "methods/fcl.py",
        "loss + self.matching * matched",
        "loss + matched",
        FCL,
        "λ does nothing",
    ),
    Mutant(
        "fcl-matching-temperature",
        "methods/fcl.py",
        "self.neighbours, self.matching_temperature",
        "self.neighbours, self.temperature",
        FCL,
        "matching_temperature does nothing",
    ),
    Mutant(
        "fcl-one-view",
        "methods/fcl.py",
        "keys_of(other), query(view)",
        "keys_of(view), query(view)",
        FCL,
        "query and key are of the same view",
    ),
    Mutant(
        "fcl-early-average",
        "methods/fcl.py",
        "            optimiser.step(self.loss(q, keys[0], union, remote, ctx))\n"
        "            ema_(key, query, self.decay)\n",
        "            ema_(key, query, self.decay)\n"
        "            optimiser.step(self.loss(q, keys[0], union, remote, ctx))\n",
        FCL,
        "the key network follows the query network of the step before",
    ),
    Mutant(
        "fcl-no-fusion",
        "methods/fcl.py",
        "union[:remote] if only else union,",
        "union[:remote] if only else union[remote:],",
        FCL,
        "the others' features are no negatives",
    ),
    Mutant(
        "fcl-matching-from",
        "methods/fcl.py",
        "ctx.exchange.round < self.matching_from",
        "ctx.exchange.round <= self.matching_from",
        FCL,
        "matching starts a round too late",
    ),
    Mutant(
        "fcl-uploads-plain",
        "methods/fcl.py",
        "shown = banks[-1].cpu()",
        "shown = banks[0].cpu()",
        FCL,
        "features of the plain images leave the client",
    ),
    Mutant(
        "fcl-fill-random",
        "methods/bank.py",
        "torch.full((size, width), torch.nan)",
        "F.normalize(torch.randn(size, width), dim=1)",
        FCL,
        "banks start with random rows, which are used, matched and sent",
    ),
    Mutant(
        "fcl-fill-half",
        "methods/bank.py",
        "while blank > 0:",
        "while blank > len(banks[0]) // 2:",
        FCL,
        "half of a bank is never filled",
    ),
    Mutant(
        "fcl-fill-tracked",
        "methods/fcl.py",
        "with untracked(key):  # nothing is learnt from these passes",
        "if True:",
        FCL,
        "filling moves the key network's statistics",
    ),
    Mutant(
        "fcl-fill-counted",
        "methods/fcl.py",
        "ctx.batches(self.bank, counted=False)",
        "ctx.batches(self.bank)",
        FCL,
        "images that only fill the bank count as trained on",
    ),
    Mutant(
        "fcl-purity-own",
        "methods/bank.py",
        "(q @ rows.T).fill_diagonal_(-torch.inf)",
        "(q @ rows.T)",
        FCL,
        "a query's own image is one of its neighbours",
    ),
    Mutant(
        "fcl-remote-neighbours",
        "methods/bank.py",
        "(found < first)",
        "(found >= first)",
        FCL,
        "the log says local where it should say remote",
    ),
    Mutant(
        "fedca-temperature",
        "methods/fedca.py",
        "dictionary, self.temperature, self.symmetric)",
        "dictionary, 0.5, self.symmetric)",
        FEDCA,
        "the temperature does nothing",
    ),
    Mutant(
        "fedca-symmetric",
        "methods/fedca.py",
        "dictionary, self.temperature, self.symmetric)",
        "dictionary, self.temperature)",
        FEDCA,
        "symmetric does nothing",
    ),
    Mutant(
        "fedca-one-view",
        "methods/fedca.py",
        "loss = dictionary_nce(z1, z2, dictionary",
        "loss = dictionary_nce(z1, z1, dictionary",
        FEDCA,
        "both views are the same",
    ),
    Mutant(
        "fedca-alignment-model",
        "methods/alignment.py",
        "loss = simclr.loss(net, batch)",
        "loss = -simclr.loss(net, batch)",
        FEDCA,
        "the alignment model learns the opposite",
    ),
    Mutant(
        "fedca-mass",
        "nn/losses.py",
        "softmax(dim=1)[:, len(z2) :]",
        "softmax(dim=1)[:, : len(z2)]",
        FEDCA,
        "P_D is the share of the batch",
    ),
    Mutant(
        "fedca-mass-temperature",
        "methods/fedca.py",
        "dictionary_mass(z1, z2, dictionary, self.temperature)",
        "dictionary_mass(z1, z2, dictionary, 0.5)",
        FEDCA,
        "P_D is logged for another temperature",
    ),
    Mutant(
        "fedca-mass-gradient",
        "nn/losses.py",
        "@torch.no_grad()\ndef dictionary_mass",
        "def dictionary_mass",
        FEDCA,
        "P_D keeps the graphs of all steps",
    ),
    Mutant(
        "fedca-auto",
        "methods/fedca.py",
        '"local" if self.ensembling else "global"',
        '"global" if self.ensembling else "local"',
        FEDCA,
        "auto is the other model",
    ),
    Mutant(
        "fedca-dict-model",
        "methods/fedca.py",
        'return stage if self.dict_model == "auto" else self.dict_model',
        "return stage",
        FEDCA,
        "dict_model does nothing",
    ),
    Mutant(
        "fedca-received",
        "methods/fedca.py",
        "model != self.maker:",
        'model != "local":',
        FEDCA,
        "the trained model always makes the rows",
    ),
    Mutant(
        "fedca-reduction",
        "methods/fedca.py",
        "self.align_reduction, ctx)",
        '"sum", ctx)',
        FEDCA,
        "align_reduction does nothing",
    ),
    Mutant(
        "fedca-alignment-sign",
        "methods/fedca.py",
        "loss + self.alignment * apart",
        "loss - self.alignment * apart",
        FEDCA,
        "clients flee the alignment model",
    ),
    Mutant(
        "fedca-alignment-weight",
        "methods/fedca.py",
        "loss + self.alignment * apart",
        "loss + apart",
        FEDCA,
        "β does nothing",
    ),
    Mutant(
        "fedca-alignment-temperature",
        "methods/fedca.py",
        "FedSimCLR(self.temperature, self.projection_head)",
        "FedSimCLR(projection_head=self.projection_head)",
        FEDCA,
        "the alignment model has a temperature of its own",
    ),
    Mutant(
        "fedca-advice",
        "methods/fedca.py",
        "[] if self.alignment else short_rounds",
        "[] if not self.alignment else short_rounds",
        FEDCA,
        "the warning comes where it is not needed",
    ),
    Mutant(
        "fedca-advice-steps",
        "methods/dictionary.py",
        "steps >= ENOUGH",
        "steps >= 0",
        FEDCA,
        "short rounds are passed over in silence",
    ),
    Mutant(
        "fedca-advice-batch",
        "methods/dictionary.py",
        "total <= batch or",
        "",
        FEDCA,
        "a small dictionary is warned of",
    ),
    Mutant(
        "advice-unsaid",
        "runs/prepare.py",
        "notes += method.advice(setup)",
        "pass",
        FEDCA,
        "no method's advice is said",
    ),
    Mutant(
        "advice-wrapped",
        "methods/wrappers/__init__.py",
        "return self.inner.advice(setup)",
        "return []",
        FEDCA,
        "a bound or a rule hides the advice",
    ),
    Mutant(
        "steps-small",
        "core/context.py",
        "self.epochs * (images // min(self.batch_size, images))",
        "self.epochs * (images // self.batch_size)",
        FEDCA,
        "a client smaller than a batch has no steps",
    ),
    Mutant(
        "mfcl-phase-1-pairs",
        "methods/mfcl.py",
        "with peers(sensor):",
        "with nullcontext():",
        MFCL,
        "Peer Normalization sees no pairs in phase 1",
    ),
    Mutant(
        "mfcl-reconstruction-negated",
        "methods/mfcl.py",
        "optimiser.step(self.mismatch(",
        "optimiser.step(-self.mismatch(",
        MFCL,
        "the sensor unlearns",
    ),
    Mutant(
        "mfcl-partners-reversed",
        "methods/mfcl.py",
        "nt_xent(first, second, self.temperature)",
        "nt_xent(first, second.flip(0), self.temperature)",
        MFCL,
        "the positives of phase 2 are other images",
    ),
    Mutant(
        "mfcl-one-view",
        "methods/mfcl.py",
        "torch.stack(codes, dim=1)",
        "torch.stack([codes[0], codes[0]], dim=1)",
        MFCL,
        "both representations of an image are the same",
    ),
    Mutant(
        "mfcl-lone-client",
        "methods/mfcl.py",
        "return self.min_clients if len(setup.sizes) > 1 else 1",
        "return self.min_clients",
        MFCL,
        "a client with all data waits for a second one",
    ),
    Mutant(
        "mfcl-one-is-enough",
        "methods/mfcl.py",
        "self.pairs_per_client, self.fewest(ctx.setup))",
        "self.pairs_per_client, 1)",
        MFCL,
        "an epoch ends in steps with the largest client alone",
    ),
    Mutant(
        "mfcl-untrained-sensor",
        "methods/mfcl.py",
        "return setup.rounds if self.train_sensor else 0",
        "return setup.rounds",
        MFCL,
        "the sensor is trained all the same",
    ),
    Mutant(
        "mfcl-own-statistics",
        "methods/mfcl.py",
        """        return {n: w for n, w in server.sensor.items() if n.startswith("encoder.")}""",
        """        return prefixed(server.sensor, "encoder")""",
        MFCL,
        "clients encode with other names than they keep statistics under",
    ),
    Mutant(
        "step-leftover-gradients",
        "core/context.py",
        """        self.torch.zero_grad(set_to_none=True)
        if self._features:""",
        """        if self._features:""",
        "tests/core/test_weights.py",
        "a step has the gradients of another loss",
    ),
    Mutant(
        "stepping-two-memories",
        "core/aggregation.py",
        "goal[name].copy_(moved)",
        "goal[name] = moved.to(before.dtype)",
        "tests/core/test_aggregation.py",
        "small views of a mean keep all of it alive",
    ),
    Mutant(
        "mfcl-codes-apart",
        "methods/mfcl.py",
        "views(encoder, batch, self.pair_codes)",
        "views(encoder, batch, True)",
        MFCL,
        "views share statistics in phase 2 whatever pair_codes says",
    ),
    Mutant(
        "mfcl-server-momentum",
        "methods/mfcl.py",
        "optimiser.set_moments(speed)",
        "pass",
        MFCL,
        "every epoch of phase 2 starts without momentum",
    ),
    Mutant(
        "mfcl-server-decay",
        "methods/mfcl.py",
        "self.server_lr, self.server_momentum, decay)",
        "self.server_lr, self.server_momentum, 0.0)",
        MFCL,
        "phase 2 has no weight decay",
    ),
    Mutant(
        "mfcl-server-temperature",
        "methods/mfcl.py",
        "nt_xent(first, second, self.temperature)",
        "nt_xent(first, second, 0.3)",
        MFCL,
        "the temperature of phase 2 is ignored",
    ),
    Mutant(
        "mfcl-warm-up",
        "methods/mfcl.py",
        "(epoch + step / len(steps)) / self.server_epochs",
        "epoch / self.server_epochs",
        MFCL,
        "the rate of phase 2 stays the same in an epoch",
    ),
    Mutant(
        "mfcl-given-away",
        "nn/peernorm.py",
        "alike.argmin(1) == peer",
        "alike.argmax(1) == peer",
        MFCL,
        "the nearest means are looked for, not the most opposite",
    ),
    Mutant(
        "table-8-both-ways",
        "runs/cost.py",
        "return 2 * self.parameters * self.BITS",
        "return self.parameters * self.BITS",
        COST,
        "a model counts one way",
    ),
    Mutant(
        "table-8-visits",
        "runs/cost.py",
        "visits += len(cost.cohort) if cost.up.params else 0",
        "visits += len(cost.cohort)",
        COST,
        "exchanges of representations count as rounds of the model",
    ),
    # ------------------------------------------------------------ what explains a run
    Mutant(
        "quality-rank-mean",
        "evaluation/quality.py",
        "size, x = float(x.square().sum()), x - x.mean(dim=0)",
        "size = float(x.square().sum())",
        QUALITY,
        "the mean counts as a direction",
    ),
    Mutant(
        "quality-rank-deviations",
        "evaluation/quality.py",
        "torch.linalg.eigvalsh(gram).clamp_(min=0)",
        "torch.linalg.eigvalsh(gram).clamp_(min=0).sqrt_()",
        QUALITY,
        "shares of deviations, not of variances",
    ),
    *(
        Mutant(
            f"quality-{name}",
            "evaluation/quality.py",
            "FALLEN, FAR_FALLEN, LOST = 0.5, 0.25, 0.95",
            f"FALLEN, FAR_FALLEN, LOST = {values}",
            QUALITY,
            "a warning comes too early or too late",
        )
        for name, values in {
            "fallen-early": "0.55, 0.25, 0.95",
            "fallen-late": "0.45, 0.25, 0.95",
            "far-early": "0.5, 0.3, 0.95",
            "far-late": "0.5, 0.2, 0.95",
            "lost-early": "0.5, 0.25, 1.0",
            "lost-late": "0.5, 0.25, 0.9",
        }.items()
    ),
    Mutant(
        "quality-once",
        "evaluation/quality.py",
        "all(_fallen(each, untrained) for each in latest)",
        "any(_fallen(each, untrained) for each in latest)",
        QUALITY,
        "one low measurement is enough for a warning",
    ),
    Mutant(
        "quality-classes",
        "evaluation/quality.py",
        "if gone and (gained is None or gained <= 1):",
        "if gone:",
        QUALITY,
        "two classes that were learnt count as a collapse",
    ),
    Mutant(
        "monitor-baseline",
        "runs/observers.py",
        'self._untrained = self.measure({"random": self._random})["random"]',
        "self._untrained = {}",
        MONITOR,
        "the untrained encoder is not measured",
    ),
    Mutant(
        "monitor-often",
        "runs/observers.py",
        "self._said.add(state)",
        "pass",
        MONITOR,
        "the warning is repeated at every measurement",
    ),
    Mutant(
        "line-mean",
        "runs/observers.py",
        "total = sum(result.examples[c] for c in having) or 1",
        "total = sum(result.examples.values()) or 1",
        LOOP,
        "clients without a metric count as zeros",
    ),
    Mutant(
        "also",
        "runs/results.py",
        "        asked |= more\n",
        "",
        LOOP,
        "evaluate.also has no effect",
    ),
    Mutant(
        "page-reasons",
        "reports/parts.py",
        "next((words[name] for words in known if name in words)",
        "next((words[name] for words in [] if name in words)",
        PAGE,
        "no metric is explained",
    ),
    Mutant(
        "audit-ties",
        "audit/measures.py",
        "allowed = ends & (alarms",
        "allowed = (alarms",
        ATTACKS,
        "equal scores are cut in the middle, members first",
    ),
    Mutant(
        "audit-matched",
        "audit/measures.py",
        "        kinds = images.labels[rows]\n",
        "        pass\n",
        ATTACKS,
        "classes are told apart instead of members",
    ),
    Mutant(
        "audit-control",
        "audit/measures.py",
        "    elif gain.least <= 0:\n",
        "    elif False:\n",
        ATTACKS,
        "what the images alone tell is held against the run",
    ),
    Mutant(
        "audit-halves",
        "audit/membership.py",
        "side[own != half]",
        "side[own == half]",
        ATTACKS,
        "an attack is tried on the images that it learnt from",
    ),
    Mutant(
        "audit-decoys",
        "audit/measures.py",
        "alike(images, decoys).amax(dim=1)",
        "alike(images, decoys).amin(dim=1)",
        ATTACKS,
        "the least like decoy counts",
    ),
    Mutant(
        "audit-linking",
        "audit/sharing.py",
        "@ known.T).amax(dim=1)",
        "@ known.T).mean(dim=1)",
        ATTACKS,
        "an image is compared with all rows at once",
    ),
    Mutant(
        "audit-gradient",
        "audit/gradients.py",
        "guess.grad = slope.sign()",
        "guess.grad = -slope.sign()",
        ATTACKS,
        "the inversion goes uphill",
    ),
    Mutant(
        "audit-pairs",
        "audit/gradients.py",
        "    return guesses[torch.as_tensor(columns)",
        "    return guesses[torch.as_tensor(rows)",
        ATTACKS,
        "guesses are not put in order",
    ),
    Mutant(
        "audit-proof",
        "audit/replay.py",
        "!= record.summary.weights_sha256",
        "is None",
        REPLAYED,
        "another run's end passes for this one's",
    ),
    Mutant(
        "audit-client",
        "audit/replay.py",
        "if exchange == target and report.client == client:",
        "if exchange == target:",
        REPLAYED,
        "somebody else's upload is attacked",
    ),
    Mutant(
        "audit-pictures",
        "reports/templates/audit.html.jinja",
        "for one in family.findings if pictures and one.pictures",
        "for one in family.findings if one.pictures",
        AUDITED,
        "the page holds images that nobody asked for",
    ),
    Mutant(
        "audit-share-low",
        "audit/measures.py",
        "betaincinv(found, count - found + 1, tail)",
        "betaincinv(found + 1, count - found + 1, tail)",
        ATTACKS,
        "the lower end of a share is too high",
    ),
    Mutant(
        "audit-share-high",
        "audit/measures.py",
        "if found < count else 1.0",
        "if 0 < found < count else found / count",
        ATTACKS,
        "none of n is taken for surely none",
    ),
    Mutant(
        "package-expected",
        "deploy/package.py",
        "if expected.lower() != found:",
        "if False:",
        PACKAGE,
        "a node takes any package",
    ),
    Mutant(
        "dp-clip",
        "methods/wrappers/private.py",
        "return 1.0 if length <= clip else clip / length * (1 - 1e-6)",
        "return 1.0",
        PRIVACY,
        "nothing is clipped",
    ),
    Mutant(
        "dp-finite",
        "methods/wrappers/private.py",
        "if not math.isfinite(length):\n        return 0.0",
        "if False:\n        return 0.0",
        PRIVACY,
        "NaN goes into the sum",
    ),
    Mutant(
        "dp-noise-records",
        "methods/wrappers/private_records.py",
        "self._noise = ctx.release.noise * self._clip",
        "self._noise = ctx.release.noise",
        PRIVACY,
        "the noise does not follow the clip",
    ),
    Mutant(
        "dp-expected",
        "methods/wrappers/private_records.py",
        "self._expected = ctx.release.sampling * ctx.places",
        "self._expected = ctx.places",
        PRIVACY,
        "the sum is divided by all units",
    ),
    Mutant(
        "dp-poisson",
        "methods/wrappers/private_records.py",
        "chosen = self.stream.uniform(self.places) < self.release.sampling",
        "chosen = self.stream.order(self.places) < self.places * self.release.sampling",
        PRIVACY,
        "samples have a fixed size, which is not what is accounted for",
    ),
    Mutant(
        "dp-metrics",
        "methods/wrappers/private_records.py",
        "return Local(local.state, local.upload, {})",
        "return Local(local.state, local.upload, local.metrics)",
        PRIVACY,
        "metrics leave uncovered",
    ),
    Mutant(
        "dp-examples",
        "methods/wrappers/private_clients.py",
        "equal_weights = True",
        "equal_weights = False",
        PRIVACY,
        "the number of images leaves uncovered",
    ),
    Mutant(
        "dp-server-noise",
        "methods/wrappers/private_clients.py",
        "size = release.noise * self.privacy.clip",
        "size = 0.5 * release.noise * self.privacy.clip",
        PRIVACY,
        "half the noise",
    ),
    Mutant(
        "dp-noise-content",
        "methods/wrappers/private_clients.py",
        'self._stream("sum", ctx.exchange.index, digest(total), release)',
        'self._stream("sum", ctx.exchange.index)',
        PRIVACY,
        "two sums of one round share their noise",
    ),
    Mutant(
        "dp-shares",
        "methods/wrappers/private_clients.py",
        "return max(1, min(self.min_clients, asked) - 1)",
        "return max(1, self.min_clients - 1)",
        PRIVACY,
        "a cohort smaller than min_clients has too little noise",
    ),
    Mutant(
        "dp-noise-size",
        "methods/wrappers/private_records.py",
        'self._stream("steps", ctx.client, ctx.exchange.index, started, how)',
        'self._stream("steps", ctx.client, ctx.exchange.index, started)',
        PRIVACY,
        "noise of two sizes falls out of two answers",
    ),
    Mutant(
        "dp-last-result",
        "methods/wrappers/private_clients.py",
        "self.require_budget(ledger, ctx.setup, ctx.exchange, asked, mark)",
        "self.require_budget(ledger, ctx.setup, ctx.exchange, asked)",
        PRIVACY,
        "another result of a round that was counted is free",
    ),
    Mutant(
        "dp-ratio-shares",
        "methods/wrappers/private_clients.py",
        "noise *= math.sqrt(m / self.enough(m))",
        "noise *= 1.0",
        PRIVACY,
        "noise at the clients is told smaller than it is",
    ),
    Mutant(
        "dp-new-shares",
        "methods/wrappers/private.py",
        "mark = None if self.repeats(ctx.setup) else token_hex()",
        "mark = None",
        PRIVACY,
        "a last round with new noise is done twice within one budget",
    ),
    Mutant(
        "dp-refused",
        "runs/folder.py",
        '"flower.log", f"{SERVER}/{KEY}"):',
        '"flower.log"):',
        PRIVACY,
        "a run that is refused leaves its secret behind",
    ),
    Mutant(
        "dp-opened-sum",
        "methods/wrappers/secured.py",
        "spent = State(self._merge(server.inner, [], ctx, UNMASK), None)",
        "spent = State(server.inner, None)",
        SPENT,
        "a sum that was opened is not in the account",
    ),
    Mutant(
        "dp-masked-budget",
        "methods/wrappers/secured.py",
        "return super().asked(server, cohort, _seen(ctx))",
        "return cohort",
        SPENT,
        "clients send masked numbers that the budget does not hold",
    ),
    Mutant(
        "ledger-mark",
        "core/privacy.py",
        "if e == now and mark in (None, m)}",
        "if e == now}",
        PRIVACY,
        "a round that came out differently is not counted before it is used",
    ),
    Mutant(
        "ledger-forgets",
        "core/privacy.py",
        "self._entries |= {(exchange, client, mark): r for client, mark, r in releases}",
        "self._entries = {(exchange, client, mark): r for client, mark, r in releases}",
        PRIVACY,
        "the account knows the last round only",
    ),
    Mutant(
        "ledger-best-off",
        "core/privacy.py",
        "return max((epsilon_of(account, delta) for account in accounts), default=0.0)",
        "return min((epsilon_of(account, delta) for account in accounts), default=0.0)",
        PRIVACY,
        "ε is that of the client of whom least was released",
    ),
    Mutant(
        "ledger-another-client",
        "deploy/node.py",
        "if others := ledger.clients() - {client}:",
        "if others := ledger.clients() - {client} - ledger.clients():",
        SITE,
        "a site gets the budget of every client as whom it is asked",
    ),
    Mutant(
        "ledger-of-the-run",
        "deploy/node.py",
        'return self.folder / "spent" / str(header["run"])',
        "return self._run(header)",
        SITE,
        "a server that ends the run deletes the site's account",
    ),
    Mutant(
        "ledger-no-budget",
        "deploy/node.py",
        "if Ledger(account).clients():",
        "if not account:",
        SITE,
        "a run that began with a budget goes on without one",
    ),
    Mutant(
        "dp-site-plan",
        "deploy/node.py",
        "if planned is None or replace(planned, index=exchange.index) != exchange:",
        "if planned is None:",
        SITE,
        "a site answers an exchange whose clients or round a server has made up",
    ),
    Mutant(
        "dp-site-rounds",
        "deploy/node.py",
        "if planned is None or replace(planned, index=exchange.index) != exchange:",
        "if planned is not None and replace(planned, index=exchange.index) != exchange:",
        SITE,
        "a site answers more exchanges than the run has",
    ),
    Mutant(
        "dp-site-secret",
        "deploy/node.py",
        "made = key, machine, party.pixels",
        'made = "", machine, party.pixels',
        SITE,
        "a site whose key was made anew answers again with other noise, for nothing",
    ),
    Mutant(
        "dp-site-shares",
        "deploy/agreement.py",
        'free -= {"train.min_clients"}',
        "pass",
        SITE,
        "a server makes every site add a smaller share of the noise than was agreed",
    ),
    Mutant(
        "dp-site-machine",
        "deploy/node.py",
        "made = key, machine, party.pixels",
        'made = key, "", party.pixels',
        SITE,
        "a site with another version of torch answers again, with other bits, for nothing",
    ),
    Mutant(
        "dp-site-images",
        "deploy/node.py",
        "made = key, machine, party.pixels",
        'made = key, machine, ""',
        SITE,
        "a site whose images have changed answers again with the same noise, for nothing",
    ),
    Mutant(
        "dp-machine",
        "methods/wrappers/private_records.py",
        "how = (release, self.privacy, ctx.setup.optimiser, ctx.learning_rate, machine)",
        "how = (release, self.privacy, ctx.setup.optimiser, ctx.learning_rate)",
        PRIVACY,
        "the same noise on two results that were rounded differently falls out",
    ),
    Mutant(
        "dp-masks",
        "methods/wrappers/private_clients.py",
        "else ctx.masks or token_hex()",
        "else token_hex()",
        PRIVACY,
        "a client that is asked again under the same masks adds another share of the noise",
    ),
    Mutant(
        "dp-share-twice",
        "methods/wrappers/private_clients.py",
        "else ctx.masks or token_hex()",
        'else ""',
        PRIVACY,
        "a share of the noise is used under two masks, and falls out of the sums' difference",
    ),
    Mutant(
        "dp-share-of-an-update",
        "methods/wrappers/private_clients.py",
        "ctx.exchange.index, once, digest(move))",
        "ctx.exchange.index, once)",
        PRIVACY,
        "under the same masks another update gets the same share of the noise",
    ),
    Mutant(
        "dp-views",
        "methods/wrappers/private_records.py",
        "with with_seed(views.seed(), ctx.setup.device):",
        "with with_seed(ctx.setup.seed, ctx.setup.device):",
        PRIVACY,
        "views are drawn by the public seed, so that a record moves those of all behind it",
    ),
    Mutant(
        "dp-views-again",
        "methods/wrappers/private_records.py",
        'self._stream("views", ctx.client, ctx.exchange.index, started, how)',
        'Noise(torch.rand(4).numpy().tobytes(), "views")',
        PRIVACY,
        "the same question gets another answer, which is not counted",
    ),
    Mutant(
        "dp-site-phase",
        "methods/wrappers/secured.py",
        """        if exchange.index % len(PHASES) != MASKED:
            return None
        if not (isinstance""",
        """        if exchange.index % len(PHASES) != KEYS:
            return None
        if not (isinstance""",
        SITE,
        "a site's account is charged in a phase in which nothing of its images leaves",
    ),
    Mutant(
        "dp-site-keys",
        "methods/wrappers/secured.py",
        "return _of_method(exchange), replace(state, secrets=None), down.inner",
        "return _of_method(exchange), state, down.inner",
        SITE,
        "a round that begins anew is another answer, only because its keys are",
    ),
    Mutant(
        "dp-site-new-noise",
        "deploy/node.py",
        "            mark = token_hex()",
        '            mark = ""',
        SITE,
        "a site's account counts an answer with new noise once",
    ),
    Mutant(
        "dp-site-state",
        "deploy/node.py",
        "        exchange, *values = asks",
        "        exchange, *values = asks[0], asks[2]",
        SITE,
        "a site answers again from another state, for nothing",
    ),
    Mutant(
        "dp-few-shares",
        "runs/parties.py",
        "fewest=max(secure.fewest, min(settings.train.min_clients, size))",
        "fewest=secure.fewest",
        SITE,
        "clients open a sum with fewer shares of the noise than are accounted for",
    ),
    Mutant(
        "dp-buffers",
        "methods/wrappers/private.py",
        '- {"params"})',
        '- {"params", "buffers"})',
        PRIVACY,
        "BatchNorm statistics leave uncovered",
    ),
    Mutant(
        "dp-budget",
        "methods/wrappers/private.py",
        "if after > limit * (1 + 1e-9):",
        "if after > 2 * limit:",
        PRIVACY,
        "more than the budget is spent",
    ),
    Mutant(
        "dp-group",
        "methods/wrappers/private_records.py",
        "range(0, len(self.pixels), self.size)",
        "range(0, len(self.pixels), len(self.pixels))",
        PRIVACY,
        "the whole sample is one unit",
    ),
    Mutant(
        "dp-ledger-mark",
        "core/privacy.py",
        "{(exchange, client, mark): r for",
        '{(exchange, client, ""): r for',
        PRIVACY,
        "another result of a round is not counted",
    ),
    Mutant(
        "dp-secret",
        "core/noise.py",
        "    if begun:\n",
        "    if False:\n",
        PRIVACY,
        "a lost secret is made anew",
    ),
    Mutant(
        "dp-normal",
        "core/noise.py",
        "(-2 * first.log()).sqrt()",
        "(-first.log()).sqrt()",
        PRIVACY,
        "noise of half the variance",
    ),
]


def place(copy: Path, mutant: Mutant) -> Path | None:
    """The file in ``copy`` where the mutant's text stands once, here or after a move."""
    package = copy / "src" / "furlong"
    named = package / mutant.file
    if named.is_file() and named.read_text(encoding="utf-8").count(mutant.old) == 1:
        return named
    found = [p for p in package.rglob("*.py") if mutant.old in p.read_text(encoding="utf-8")]
    alone = len(found) == 1 and found[0].read_text(encoding="utf-8").count(mutant.old) == 1
    return found[0] if alone else None


def passes(copy: Path, tests: str) -> tuple[str, float]:
    """``passed``, ``failed``, ``no tests`` or ``time``, and how long that took.

    A fork of this process runs pytest: torch and the like are imported once for all mutants.
    """
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _run(copy, shlex.split(tests))
    code: int | None = None
    while code is None and time.monotonic() - began < SECONDS:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.05)
    with suppress(ProcessLookupError):  # what has not ended, and what the tests left behind
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    said = {0: "passed", 1: "failed", 2: "failed", 5: "no tests", None: "time"}
    return said.get(code, f"pytest ended with code {code}"), round(time.monotonic() - began, 1)


def _run(copy: Path, tests: list[str]) -> NoReturn:
    """In the child: the tests of ``copy``, quietly."""
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(quiet, stream)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    code: int = 3
    try:
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    finally:
        os._exit(code)


def write(path: Path, text: str) -> None:
    """Replace a file so that Python does not take the bytecode of its last version."""
    path.write_text(text, encoding="utf-8")
    moment = next(MOMENTS)
    os.utime(path, (moment, moment))


def judge(copy: Path, mutant: Mutant, clean: dict[str, str]) -> dict[str, Any]:
    """Whether the tests notice; ``clean`` remembers which tests pass without a mistake."""
    path = place(copy, mutant)
    if path is None:
        return {"outcome": "pattern not found"}
    if mutant.tests not in clean:
        clean[mutant.tests] = passes(copy, mutant.tests)[0]
    if clean[mutant.tests] != "passed":
        return {"outcome": f"unmutated: {clean[mutant.tests]}"}
    before = path.read_text(encoding="utf-8")
    try:
        write(path, before.replace(mutant.old, mutant.new))
        said, seconds = passes(copy, mutant.tests)
    finally:
        write(path, before)
    outcome = {"failed": "killed", "time": "killed", "passed": "survived"}.get(said, said)
    return {"outcome": outcome, "seconds": seconds}


def main() -> int:
    """Try mutants, keep and count the outcomes; 1 if one survived that is not known to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], help="words of names or files")
    parser.add_argument("--json", type=Path, help="keep results in this file, and go on from them")
    parser.add_argument("--label", default="now", help="which results of the file: before, after")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    chosen = parser.parse_args()
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names), "two mutants have one name"
    kept: dict[str, Any] = {}
    if chosen.json is not None and chosen.json.exists():
        kept = json.loads(chosen.json.read_text(encoding="utf-8"))
    results = kept.setdefault(chosen.label, {})
    clean: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="furlong-mutants-") as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(ROOT, copy, ignore=KEPT_OUT)
        for mutant in MUTANTS:
            words = f"{mutant.name} {mutant.file}"
            if chosen.only and not any(word in words for word in chosen.only):
                continue
            known = results.get(mutant.name, {}).get("outcome") in ("killed", "survived")
            if known and not chosen.again:
                continue
            results[mutant.name] = judge(copy, mutant, clean)
            print(f"{results[mutant.name]['outcome']:10} {mutant.name}", flush=True)
            if chosen.json is not None:
                text = json.dumps(kept, indent=1, sort_keys=True)
                chosen.json.write_text(text + "\n", encoding="utf-8")
    outcome = {name: results[name]["outcome"] for name in names if name in results}
    print(", ".join(f"{count} {what}" for what, count in Counter(outcome.values()).items()))
    expected = {mutant.name for mutant in MUTANTS if mutant.known_survivor}
    bad = [name for name, what in outcome.items() if what != "killed" and name not in expected]
    print(f"not killed, and not known to survive: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
