"""The learnt encoder for other programs: a scikit-learn transformer, and a model on the Hub.

scikit-learn is not needed: where it is installed, the class is one of its estimators; elsewhere it
has the same methods. So it is with huggingface_hub, which only the Hub itself needs.
"""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furlong.data.decode import many
from furlong.data.folders import place_of
from furlong.data.reading import ByteArray, Skipped, printable
from furlong.errors import FurlongError
from furlong.files import replacing, require_free
from furlong.reports.embed import BLOCK, Embedder
from furlong.reports.export import export
from furlong.runs.saved_encoder import read_encoder

if TYPE_CHECKING:

    class _Base:
        """What scikit-learn's classes give."""

else:
    try:
        from sklearn.base import BaseEstimator, TransformerMixin

        class _Base(TransformerMixin, BaseEstimator):
            """scikit-learn's own."""

    except ImportError:

        class _Base:
            """Nothing: scikit-learn is not installed."""


MODEL, CONFIG, CARD = "model.safetensors", "config.json", "README.md"  # the Hub's names
HEAD = """---
library_name: furlong
pipeline_tag: image-feature-extraction
tags:
- furlong
- federated-learning
- self-supervised-learning
---

"""


class Encoder(_Base):
    """Images to features by a run's encoder, as a step of a scikit-learn pipeline.

    ``run``: a run folder, a file of ``furlong export --to safetensors``, or a folder of
    :meth:`save_pretrained`. ``batch_size``: images at a time. Images are paths of files, or uint8
    arrays N×C×H×W or N×H×W×C (NumPy or torch), of any size. Of a file that holds several images,
    ``PATH#k`` is the slice or frame k. A file that cannot be read is an error, since a row that is
    left out would shift the labels: ``furlong embed`` leaves such files out and has the path in
    every row. ``fit`` learns nothing: it reads the encoder, and ``transform`` does so by itself
    where nobody has called it.
    """

    def __init__(self, run: str | os.PathLike[str] = "", *, batch_size: int = 128) -> None:
        self.run = run
        self.batch_size = batch_size

    # ------------------------------------------------------------ an estimator

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002
        """The parameters by name, as scikit-learn asks for them."""
        names = list(inspect.signature(type(self)).parameters)
        return {name: getattr(self, name) for name in names}

    def set_params(self, **params: Any) -> Self:
        """Other parameters; the encoder is read again when it is needed."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"Encoder has no parameter {name!r}: {', '.join(known)}.")
            setattr(self, name, value)
        self.__dict__.pop("_embedder", None)
        return self

    def fit(self, X: Any = None, y: Any = None) -> Self:  # noqa: ARG002
        """Read the encoder; images and labels are not looked at."""
        _ = self._encodes
        return self

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Features N×d of images: paths, or uint8 arrays N×C×H×W or N×H×W×C."""
        images = _images(X)
        if isinstance(images, Tensor):
            return self._of_arrays(images)
        return self._of_paths(images)

    def fit_transform(self, X: Any, y: Any = None, **_: Any) -> NDArray[np.float32]:  # noqa: ARG002
        """``transform``, as there is nothing to fit."""
        return self.fit().transform(X)

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[np.object_]:  # noqa: ARG002
        """``feature0``, ``feature1``, …"""
        names = [f"feature{k}" for k in range(self.n_features_out_)]
        return np.array(names, dtype=object)

    @property
    def n_features_out_(self) -> int:
        """How many numbers an image becomes."""
        return self._encodes.width

    def __sklearn_is_fitted__(self) -> bool:
        """There is nothing to learn."""
        return True

    def __getstate__(self) -> dict[str, Any]:
        """The parameters alone: another process reads the encoder itself."""
        return self.get_params()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As :meth:`__getstate__` gave it."""
        self.__dict__.update(state)

    @property
    def _place(self) -> Path:
        """Where the encoder lies: of a folder in the Hub's layout, the file in it."""
        if not str(self.run):
            raise FurlongError("Encoder(run): give a run folder, or a file of 'furlong export'.")
        place = Path(self.run)
        return place / MODEL if (place / MODEL).is_file() else place

    @property
    def _encodes(self) -> Embedder:
        """The encoder, read once."""
        found: Embedder | None = self.__dict__.get("_embedder")
        if found is None:
            found = self.__dict__["_embedder"] = Embedder(self._place)
        return found

    def _of_paths(self, paths: Sequence[Path]) -> NDArray[np.float32]:
        embedder, rows = self._encodes, []
        with many(embedder.read) as read_all:
            for start in range(0, len(paths), BLOCK):
                part = paths[start : start + BLOCK]
                found = read_all([(printable(str(p)), place_of(Path(), str(p))) for p in part])
                for each in found:
                    if isinstance(each, Skipped):  # a row that is left out would shift the labels
                        raise FurlongError(
                            f"{each.name} cannot be read: {each.reason}. 'furlong embed' writes "
                            "the features of all images that can, with their paths."
                        )
                rows += self._of([each.pixels for each in found if not isinstance(each, Skipped)])
        return np.concatenate([self._none, *rows])

    def _of_arrays(self, images: Tensor) -> NDArray[np.float32]:
        channels = int(self._encodes.about["channels"])
        if images.ndim == 3 and channels == 1:
            images = images[:, None]
        if images.ndim == 4 and images.shape[1] != channels and images.shape[-1] == channels:
            images = images.permute(0, 3, 1, 2)
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != channels:
            raise FurlongError(
                f"the encoder takes uint8 images N×{channels}×H×W or N×H×W×{channels}, not "
                f"{images.dtype} of shape {tuple(images.shape)}."
            )
        return np.concatenate([self._none, *self._of(list(images.numpy()))])

    def _of(self, pixels: list[ByteArray]) -> list[NDArray[np.float32]]:
        """Features of images C×H×W of one size, a batch at a time."""
        starts = range(0, len(pixels), self.batch_size)
        return [self._encodes(pixels[k : k + self.batch_size]).numpy() for k in starts]

    @property
    def _none(self) -> NDArray[np.float32]:
        """The features of no image, 0×d."""
        return np.empty((0, self.n_features_out_), dtype=np.float32)

    # ------------------------------------------------------------ the Hub

    def save_pretrained(self, folder: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the Hub's layout to a folder: model.safetensors, config.json and a model card.

        ``force`` replaces files that are there. Needs the run folder, which the card describes. No
        path of this machine, no image and no name of a client is in the files.
        """
        place = Path(folder)
        for name in (MODEL, CONFIG, CARD):
            require_free(place / name, force)
        done = export(Path(self.run), "safetensors", place / MODEL, force=force)
        about = read_encoder(done.path)[0]
        text = done.card.read_text(encoding="utf-8")
        done.card.unlink()
        loading = (
            "import furlong\n"
            "encoder = furlong.Encoder.from_pretrained(REPOSITORY)  # or a folder\n"
            "features = encoder.transform(images)  # paths, or uint8 N×C×H×W, to N×d"
        )
        kept = {"model_type": "furlong", **{k: v for k, v in about.items() if k != "format"}}
        for name, words in (
            (CONFIG, json.dumps(kept, indent=2) + "\n"),
            (CARD, HEAD + text.replace(done.load, loading)),
        ):
            with replacing(place / name, force) as draft:
                draft.write_text(words, encoding="utf-8")
        return place

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = True,
        token: str | None = None,
        commit_message: str = "Upload the encoder of a furlong run",
    ) -> str:
        """Upload what :meth:`save_pretrained` writes; where it lies now.

        A ``repo_id`` that begins with ``/`` or ``.`` is a folder of this machine. ``private`` is
        of a repository that does not exist yet.
        """
        if repo_id.startswith(("/", ".")):
            return str(self.save_pretrained(repo_id, force=True))
        hub = _hub()
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            try:
                api = hub.HfApi(token=token)
                api.create_repo(repo_id, private=private, exist_ok=True)
                done = api.upload_folder(
                    repo_id=repo_id, folder_path=folder, commit_message=commit_message
                )
            except Exception as error:  # of the network, of rights, of names: the Hub's own words
                raise FurlongError(f"cannot upload to {repo_id}: {_first_line(error)}") from None
        return str(done)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | None = None,
        batch_size: int = 128,
    ) -> Self:
        """The encoder of a folder or repository that :meth:`push_to_hub` wrote.

        Only weights and numbers are read: a repository cannot run code here.
        """
        place = Path(name)
        if not place.is_dir():
            try:
                found = _hub().snapshot_download(
                    str(name), revision=revision, token=token, allow_patterns=[MODEL, CONFIG]
                )
            except FurlongError:
                raise
            except Exception as error:
                raise FurlongError(
                    f"{name} is no folder here, and the Hub does not give it: {_first_line(error)}"
                ) from None
            place = Path(found)
        if not (place / MODEL).is_file():
            raise FurlongError(f"{name} has no {MODEL}: 'push_to_hub' did not write it.")
        return cls(place / MODEL, batch_size=batch_size).fit()


def _images(found: Any) -> Tensor | list[Path]:
    """Images as a tensor, or as paths; a column of a table has one path in each row."""
    if isinstance(found, Tensor):
        return found
    if isinstance(found, str | os.PathLike):
        raise FurlongError(f"give a list of images, not one: [{str(found)!r}].")
    array = found if isinstance(found, np.ndarray) else np.asarray(found)
    if array.dtype.kind in "OUS" or not array.size:
        return [Path(str(each)) for each in array.ravel().tolist()]
    return torch.from_numpy(np.ascontiguousarray(array))


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise FurlongError("the Hub needs huggingface_hub: pip install huggingface_hub.") from None
    return huggingface_hub


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
