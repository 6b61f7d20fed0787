"""What Flower costs: seconds and CPU per round, bytes on the wire, accuracy of the encodings.

    OMP_NUM_THREADS=1 python benchmarks/flower.py [--parts overhead,wire,accuracy] [--smoke]
        [--rounds 5] [--nodes 5] [--encoders small,resnet18] [--seeds 3]
        [--ways inprocess,ray,furlong,plain,bare] [--encodings exact,float16,int8]

Everything is on loopback, with TLS and node authentication, on free ports; it takes about 15
minutes on two cores. Each client trains on ten images of 16 px, so that a round is overhead.

overhead  Seconds per round: the median without the first round. ``training`` is what an epoch of
          all clients takes in process (rounds of two epochs minus rounds of one); it is in every
          figure. CPU is of all processes, polling included: where others use the machine, compare
          that. Ways: ``inprocess`` (two workers), ``ray`` (Flower's simulation), ``furlong``
          (superlink and nodes: a resident worker), ``plain`` (flower-superlink, flower-supernode,
          ``flwr run`` with the app of ``furlong flower-app``: a process per message), ``bare``
          (Flower's own FedAvg on NumPy arrays of that size: no furlong, no torch).
wire      What passes between one node and the SuperLink in a round, counted by a TCP forwarder,
          against the packed payloads.
accuracy  FedSimCLR on shapes as in tests/methods/test_learning.py, but over a wire in this process.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from measuring import parse, parser

from furlong.deploy import processes
from furlong.deploy.addresses import free_port
from furlong.deploy.certs import make_certs
from furlong.deploy.flower_private import Connection, SuperLinkNodes
from furlong.deploy.node import Site
from furlong.deploy.proxy import Ports
from furlong.deploy.registry import Registry
from furlong.deploy.session import Session
from furlong.deploy.superlink import superlink_command, write_connection
from furlong.engines.codec import How
from furlong.engines.pool import keep_freed_memory
from furlong.engines.remote import Reply
from furlong.runs import loop
from furlong.runs.config import from_tree

FURLONG = [sys.executable, "-m", "furlong.cli"]
LIMIT = 900.0  # seconds for anything
WAYS = ("inprocess", "ray", "furlong", "plain", "bare")
LEARNING: dict[str, Any] = {  # tests/methods/test_learning.py
    "data.images": 1500,
    "data.test_images": 1000,
    "clients": 2,
    "rounds": 24,
    "batch_size": 64,
    "optimiser.name": "adam",
    "optimiser.lr": 0.003,
    "method.temperature": 0.2,
    "evaluate.probe": "default",
    "evaluate.k": 50,
}
BARE = {  # a Flower app without furlong
    "pyproject.toml": """
[project]
name = "bare"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "furlong"
[tool.flwr.app.components]
serverapp = "bare:server"
clientapp = "bare:client"
[tool.flwr.app.config]
bytes = 0
rounds = 0
nodes = 0
out = ""
""",
    "bare.py": """
import json, time
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()

@client.train()
def train(message, context):
    arrays = [a + 1 + context.node_config["partition-id"]
              for a in message.content["arrays"].to_numpy_ndarrays()]
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)

@server.main()
def main(grid, context):
    given, began = context.run_config, time.perf_counter()
    def tell(round, arrays):
        nonlocal began
        if round:
            with open(given["out"], "a") as file:
                print(json.dumps({"seconds": time.perf_counter() - began}), file=file)
        began = time.perf_counter()
    values = np.random.default_rng(0).random((20, given["bytes"] // 80), dtype=np.float32)
    n = given["nodes"]
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=n, min_available_nodes=n)
    strategy.start(grid, ArrayRecord(list(values)), num_rounds=given["rounds"], evaluate_fn=tell)
""",
}

# ---------------------------------------------------------------- measuring


def cpu(roots: Iterable[int]) -> float:
    """CPU seconds of processes, of their descendants, and of those they have waited for."""
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(words[1]), sum(map(int, words[11:15]))
    family = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


class Forwarder:
    """Passes TCP connections on to a port of this machine, and counts bytes."""

    def __init__(self, port: int) -> None:
        self.up = self.down = 0
        self._to, self._listen = port, socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listen.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, far = self._listen.accept()[0], socket.create_connection(("127.0.0.1", self._to))
            for pair in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                setattr(self, way, getattr(self, way) + len(data))  # one thread has most of it
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def read(path: Path) -> list[dict[str, Any]]:
    """The finished lines of metrics.jsonl."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


@dataclass
class Followed:
    """What a run took, its first round left out."""

    seconds: list[float]  # of each round
    cpu: float  # seconds per round of all processes
    samples: list[Any]  # one after each round, with the first


def follow(
    command: Sequence[str], env: dict[str, str], lines: Path, sample: Callable[[], Any] = int
) -> Followed:
    """Run to the end, with a look after each round."""
    samples: list[Any] = []
    spent: list[float] = []
    log = lines.parent.parent / f"{lines.parent.name}.log"
    with processes.running(command, env, log) as child:
        end = time.monotonic() + LIMIT
        while child.poll() is None and time.monotonic() < end:
            if len(read(lines)) > len(samples):
                samples.append(sample())
                spent.append(cpu([os.getpid()]) - time.process_time())
            time.sleep(0.05)
        code = child.returncode
    found = read(lines)
    if code != 0 or not found or any(line.get("failures") for line in found):
        raise SystemExit(f"{command} ended with {code}:\n{log.read_text()[-3000:]}")
    rounds = max(1, len(spent) - 1)
    return Followed([x["seconds"] for x in found[1:]], (spent[-1] - spent[0]) / rounds, samples)


# ---------------------------------------------------------------- federations


def wait(true: Callable[[], object], what: str) -> None:
    """Until it is true."""
    end = time.monotonic() + LIMIT
    while not true():
        if time.monotonic() > end:
            raise SystemExit(f"{what}: not within {LIMIT:.0f} s")
        time.sleep(0.1)


class Federation:
    """A SuperLink and nodes with TLS and authentication: furlong's commands, or Flower's."""

    def __init__(self, folder: Path, nodes: int, plain: bool) -> None:
        self.folder, self.plain, self.port = folder, plain, free_port()
        self.certs, self.state = folder / "certs" / "server", folder / "superlink"
        self.env = processes.environment(self.state / "flower")
        self._stack = ExitStack()
        self._nodes: dict[int, tuple[ExitStack, int]] = {}
        names = [f"site{k}" for k in range(nodes)]
        make_certs(folder / "certs", ["127.0.0.1"], names, ports=Ports(superlink=self.port))
        self.state.mkdir()

    def __enter__(self) -> Federation:
        with ExitStack() as stack:
            command = [*FURLONG, "superlink", "--certs", str(self.certs), "--port", str(self.port)]
            command += ["--state", str(self.state)]
            if self.plain:
                ours = superlink_command(self.certs, self.state, port=self.port)
                command = self._subprocess(ours)
            log = self.folder / "superlink.log"
            child = stack.enter_context(processes.running(command, self.env, log))
            if self.plain:
                authority = self.certs / "ca.crt"
                processes.wait_healthy(child, "127.0.0.1", self.port, authority, log)
                address = f"127.0.0.1:{self.port}"
                write_connection(self.state / "flower", address, authority)
                list(Registry(self.certs, SuperLinkNodes(Connection(address, authority))).update())
            else:
                wait(lambda: "is ready" in log.read_text(), "the SuperLink's start")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for k in list(self._nodes):
            self.stop(k)
        self._stack.close()

    def _subprocess(self, command: list[str]) -> list[str]:
        """Flower's own program, as it does it by itself: a process for every message."""
        at = command.index("--superexec-auth-secret-file")
        command = command[:at] + command[at + 2 :]
        command = [processes.program("flower-superlink"), *command[command.index("--host") :]]
        command[command.index("--isolation") + 1] = "subprocess"
        return command

    def node(self, k: int, port: int | None = None) -> None:
        """Start one; ``port``: of a forwarder."""
        superlink, state = f"127.0.0.1:{port or self.port}", self.folder / f"state{k}"
        certs = self.folder / "certs" / f"site{k}"
        command = [*FURLONG, "node", "--superlink", superlink, "--certs", str(certs)]
        command += ["--state", str(state), "--part", str(k), "--device", "cpu"]
        if self.plain:
            command = [processes.program("flower-supernode"), "--superlink", superlink]
            command += ["--root-certificates", str(certs / "ca.crt"), "--port", str(free_port())]
            command += ["--auth-supernode-private-key", str(certs / "node.key")]
            command += ["--node-config", f'partition-id={k} state="{state}"']
        stack = ExitStack()
        log = self.folder / f"node{k}.log"
        env = self.env | {"FLWR_HOME": str(state / "flower")}
        child = stack.enter_context(processes.running(command, env, log))
        self._nodes[k] = stack, child.pid

    def stop(self, k: int) -> None:
        """End one."""
        self._nodes.pop(k)[0].close()

    def cpu(self) -> float:
        """CPU seconds of all nodes."""
        return cpu(pid for _, pid in self._nodes.values())

    def run(self, name: str, options: dict[str, Any], sample: Callable[[], Any]) -> Followed:
        """A run of furlong, by ``furlong run`` or by ``flwr run``."""
        out, config = self.folder / name, self.folder / f"{name}.toml"
        more = {} if self.plain else {"superlink": f"127.0.0.1:{self.port}"}
        more |= {} if self.plain else {"certs": str(self.certs)}
        write(config, {**options, "engine": "flower", "out": str(out), **more})
        command = [*FURLONG, "run", str(config)]
        if self.plain:
            app = self.folder / f"{name}-app"
            with processes.running([*FURLONG, "flower-app", str(app), str(config)], {}) as child:
                child.wait(LIMIT)
            command = [processes.program("flwr"), "run", str(app), "furlong", "--stream"]
        return follow(command, self.env, out / "metrics.jsonl", sample)

    def bare(self, size: int, rounds: int, nodes: int) -> Followed:
        """A run of Flower's own FedAvg."""
        app, out = self.folder / "bare-app", self.folder / f"bare-{size}"
        app.mkdir(exist_ok=True)
        out.mkdir()
        for name, text in BARE.items():
            (app / name).write_text(text)
        lines = out / "metrics.jsonl"
        given = f'bytes={size} rounds={rounds} nodes={nodes} out="{lines}"'
        command = [processes.program("flwr"), "run", str(app), "furlong", "--stream", "-c", given]
        return follow(command, self.env, lines, self.cpu)


@contextmanager
def federation(nodes: int, plain: bool) -> Iterator[Federation]:
    """One with all its nodes, in a folder that goes with it."""
    with tempfile.TemporaryDirectory() as folder, Federation(Path(folder), nodes, plain) as made:
        for k in range(nodes):
            made.node(k)
        yield made


def write(path: Path, options: dict[str, Any]) -> None:
    """A configuration file."""
    path.write_text(from_tree({}, options, "benchmark").toml())


def trivial(encoder: str, nodes: int, rounds: int) -> dict[str, Any]:
    """Rounds that are nothing but overhead."""
    return {
        "method": "fedsimclr",
        "encoder": encoder,
        "data.images": 10 * nodes,
        "data.test_images": 20,
        "data.image_size": 16,
        "partition": "iid",
        "clients": nodes,
        "rounds": rounds,
        "batch_size": 8,
        "workers": 2,
        "device": "cpu",
        "evaluate.probe": "none",
        "evaluate.knn_every": 1000,
    }


def here(options: dict[str, Any]) -> Followed:
    """``furlong run`` on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder) / "run.toml", Path(folder) / "run"
        write(config, {**options, "out": str(out)})
        return follow([*FURLONG, "run", str(config)], {}, out / "metrics.jsonl")


class Direct:
    """A wire to sites of this process, which notes the bytes of what passes."""

    def __init__(self, folder: Path, clients: int) -> None:
        self._sites = [Site(folder / f"node{k}", part=k, device="cpu") for k in range(clients)]
        self._replies: dict[str, Reply] = {}
        self.down: list[int] = []
        self.up: list[int] = []

    def nodes(self) -> dict[int, str | None]:
        """All of them."""
        return dict.fromkeys(range(len(self._sites)))

    def send(self, node: int, header: dict[str, Any], body: bytes, seconds: float) -> str:  # noqa: ARG002
        """Ask and be answered."""
        said, answer = self._sites[node].answer(json.loads(json.dumps(header)), body)
        ticket = str(time.monotonic_ns())
        self._replies[ticket] = Reply(ticket, said, answer)
        if header["kind"] == "work":
            self.down.append(len(body))
            self.up.append(len(answer))
        return ticket

    def receive(self, tickets: Iterable[str]) -> list[Reply]:
        """Answers."""
        return [self._replies.pop(t) for t in list(tickets) if t in self._replies]


def direct(options: dict[str, Any], how: How) -> tuple[Direct, loop.Run]:
    """A run over a wire inside this process."""
    with tempfile.TemporaryDirectory() as folder:
        wire = Direct(Path(folder), options["clients"])
        more = {"engine": "flower", "flower.encoding": how, "out": f"{folder}/run"}
        return wire, loop.run(
            from_tree({}, {**options, **more}, "benchmark"), engine=partial(Session, wire=wire)
        )


# ---------------------------------------------------------------- tables


def table(*rows: Sequence[object]) -> None:
    """Markdown."""
    for i, row in enumerate(rows):
        print("| " + " | ".join(map(str, row)) + " |")
        if i == 0:
            print("|" + "---|" * len(row))
    print(flush=True)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def overhead(encoders: list[str], nodes: int, rounds: int, ways: list[str]) -> None:
    """Part 1."""
    print(f"### Seconds per round, {nodes} nodes: median (range) of {rounds - 1} rounds\n")
    each = {encoder: trivial(encoder, nodes, rounds) for encoder in encoders}
    sizes = {e: direct({**o, "rounds": 1}, "exact")[0].up[0] for e, o in each.items()}
    rows = [["way", "model", "s per round", "CPU s per round", "node's CPU s per message", "load"]]

    def add(way: str, encoder: str, found: Followed) -> None:
        row = [way, f"{encoder}, {sizes[encoder] / 1e6:.1f} MB", spread(found.seconds)]
        nodes_cpu = (found.samples[-1] - found.samples[0]) / nodes / (rounds - 1)
        row += [f"{found.cpu:.2f}", f"{nodes_cpu:.2f}" if nodes_cpu else "–"]
        rows.append([*row, f"{os.getloadavg()[0]:.1f}"])
        print(rows[-1], file=sys.stderr, flush=True)

    for e, o in each.items():
        if "inprocess" in ways:
            one, two = (here({**o, "epochs": n, "rounds": 2 * rounds}) for n in (1, 2))
            add("inprocess", e, one)
            more = statistics.median(two.seconds) - statistics.median(one.seconds)
            rows.append(["(training)", e, f"{more:.2f}", f"{two.cpu - one.cpu:.2f}", "", ""])
        if "ray" in ways:
            add("ray", e, here({**o, "engine": "flower"}))
    for plain, way, other in ((False, "furlong", ""), (True, "plain", "bare")):
        if way in ways or other in ways:
            with federation(nodes, plain) as made:
                for e, o in each.items():
                    if way in ways:
                        add(way, e, made.run(e, o, made.cpu))
                    if other in ways:
                        add(other, e, made.bare(sizes[e], rounds, nodes))
    table(*rows)


def wire(encoder: str, nodes: int, rounds: int, encodings: list[How]) -> None:
    """Part 2."""
    print(f"### Bytes of one of {nodes} nodes per round, {encoder}: mean of {rounds - 1} rounds\n")
    options = trivial(encoder, nodes, rounds)
    rows = [
        ["encoding", "packed down", "on the wire", "", "packed up", "on the wire", "", "s", "CPU s"]
    ]
    with federation(nodes, False) as made:
        made.stop(0)
        forwarder = Forwarder(made.port)
        made.node(0, forwarder.port)
        for how in encodings:
            packed = direct({**options, "rounds": 2}, how)[0]
            found = made.run(
                how, {**options, "flower.encoding": how}, lambda: (forwarder.down, forwarder.up)
            )
            first, last = found.samples[0], found.samples[-1]
            row = [how]
            for i, size in enumerate((packed.down[-1], packed.up[-1])):
                passed = (last[i] - first[i]) / (rounds - 1)
                row += [f"{size:,}", f"{passed:,.0f}", f"{100 * (passed / size - 1):+.2f} %"]
            rows.append([*row, spread(found.seconds), f"{found.cpu:.2f}"])
            print(rows[-1], file=sys.stderr, flush=True)
    table(*rows)


def accuracy(seeds: int, encodings: list[How]) -> None:
    """Part 3."""
    print(f"### Accuracy on shapes, mean ± std of {seeds} seeds\n")
    rows = [["encoding", "kNN %", "linear %", "MB up per client"]]
    for how in encodings:
        runs, up = [], 0
        for seed in range(seeds):
            passed, run = direct({**trivial("small", 2, 24), **LEARNING, "seed": seed}, how)
            runs.append(run)
            print(how, seed, run.accuracy("knn"), run.accuracy(), file=sys.stderr, flush=True)
            up = sum(passed.up) // LEARNING["clients"]
        found = [[100 * run.accuracy(name) for run in runs] for name in ("knn", "linear")]
        words = (f"{statistics.mean(f):.2f} ± {statistics.stdev(f):.2f}" for f in found)
        rows.append([how, *words, f"{up / 1e6:.1f}"])
    table(*rows)


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--parts", default="overhead,wire,accuracy")
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--nodes", type=int, default=5)
    words.add_argument("--encoders", default="small,resnet18")
    words.add_argument("--ways", default=",".join(WAYS))
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--encodings", default=",".join(get_args(How)))
    # one way, without a SuperLink: tests/deploy starts those
    tiny = {"parts": "overhead", "rounds": 2, "nodes": 2, "ways": "inprocess", "encoders": "small"}
    options = parse(words, **tiny)
    encodings = options.encodings.split(",")
    os.environ["OMP_NUM_THREADS"] = "1"
    # Flower's programs start others by name
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    keep_freed_memory()
    encoders, parts = options.encoders.split(","), options.parts.split(",")
    if "overhead" in parts:
        overhead(encoders, options.nodes, options.rounds, options.ways.split(","))
    if "wire" in parts:
        for encoder in encoders:
            wire(encoder, options.nodes, options.rounds, encodings)
    if "accuracy" in parts:
        accuracy(options.seeds, encodings)


if __name__ == "__main__":
    main()
