"""Flower's side: its FedAvg and its simulation on Ray, one actor for each worker.

A client reads its images from files that are mapped into memory, and keeps nothing.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import Clock, Job, network


def client_app(job: Job) -> ClientApp:
    """Trains the unit's network on the images of a node's partition."""
    app, unit = ClientApp(), job.unit

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        net = network(unit).train()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(net.parameters(), unit.lr)
        images, labels = job.tensors(int(context.node_config["partition-id"]))
        for _ in range(unit.epochs):
            for rows in torch.randperm(len(labels)).split(unit.batch):
                optimiser.zero_grad()
                F.cross_entropy(net(images[rows]), labels[rows]).backward()
                optimiser.step()
        answer = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": len(labels)}),
        }
        return Message(content=RecordDict(answer), reply_to=message)

    return app


def main() -> None:
    job = Job.given()
    unit = job.unit
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:  # noqa: ARG001
        torch.manual_seed(job.seed)
        clock = Clock()
        strategy = FedAvg(
            fraction_train=unit.cohort / unit.clients,
            fraction_evaluate=0.0,
            min_train_nodes=unit.cohort,
            min_available_nodes=unit.clients,
        )
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(network(unit).state_dict()),
            num_rounds=job.rounds,
            evaluate_fn=lambda *_: clock.mark(),
        )
        weights = result.arrays.to_torch_state_dict()
        job.hand_in(clock, weights, flwr=version("flwr"), ray=version("ray"))

    run_simulation(
        server_app,
        client_app(job),
        num_supernodes=unit.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": job.workers, "include_dashboard": False},
        },
    )


if __name__ == "__main__":
    main()
