"""pfl's side, as its image classification benchmark is written.

With two workers the script is started by torchrun, once for each; every process trains half of the
cohort and the sums meet in an all-reduce. Users are not evaluated on, which is pfl's fastest.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from work import Clock, Job, Unit, network


class Classifier(nn.Module):
    """The unit's network, with the two methods that pfl calls."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.net = network(unit)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self.net(images), labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Weighted]:
        self.eval()
        with torch.no_grad():
            right = self.net(images).argmax(1).eq(labels).sum()
        return {"accuracy": Weighted(int(right), len(labels))}


class Marks(TrainingProcessCallback):
    """Marks the end of every round."""

    def __init__(self) -> None:
        self.clock = Clock()

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:  # noqa: ARG002
        self.clock.mark()
        return Metrics()

    def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
        self.clock.mark()
        return False, Metrics()


def main() -> None:
    job = Job.given()
    unit = job.unit
    np.random.seed(job.seed)  # noqa: NPY002  pfl draws users from NumPy's global generator
    torch.manual_seed(job.seed)
    module = Classifier(unit)
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
    )
    users = FederatedDataset(
        lambda user: Dataset(list(job.tensors(user)), user_id=user),
        get_user_sampler("minimize_reuse", range(unit.clients)),
    )
    marks = Marks()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds + 1,
            train_cohort_size=unit.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=unit.lr, local_num_epochs=unit.epochs, local_batch_size=unit.batch
        ),
        callbacks=[marks],
    )
    if pytorch_ops.distributed.global_rank == 0:
        job.hand_in(marks.clock, module.net.state_dict(), pfl=version("pfl"))


if __name__ == "__main__":
    main()
