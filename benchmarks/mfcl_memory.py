"""How much memory MFCL's second phase takes, beside how much its clients send.

    python benchmarks/mfcl_memory.py [--smoke] [--clients 5] [--images 2000] [--upload-mb 64]

Runs the method's own second phase on figures: clients encode and send in parts, the server stores
them and trains one epoch. Prints the bytes that lie on disk and the most memory that the process
held for itself while it worked (RssAnon; pages of mapped files are the system's to take back).
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from measuring import parse, parser

from furlong.core.exchange import Server
from furlong.engines.inprocess import InProcess
from furlong.runs.config import from_tree
from furlong.runs.prepare import prepare


def held() -> int:
    """Bytes of memory that are this process's own."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc/self/status")


class Peak(threading.Thread):
    """The most that was held, looked at every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0

    def run(self) -> None:
        while True:
            self.most = max(self.most, held())
            time.sleep(0.005)


def main() -> None:
    """Measure and print."""
    words = parser(__doc__)
    words.add_argument("--clients", type=int, default=5)
    words.add_argument("--images", type=int, default=2000, help="per client")
    words.add_argument("--upload-mb", type=int, nargs="+", default=[32, 128])
    words.add_argument("--encoder", default="small")
    given = parse(words, clients=2, images=20, upload_mb=[1])
    watch = Peak()
    watch.start()
    for limit in given.upload_mb:
        options = {
            "method": "mfcl",
            "encoder": given.encoder,
            "clients": given.clients,
            "partition": "iid",
            "rounds": 1,
            "data.images": given.clients * given.images,
            "data.test_images": 100,
            "method.server_epochs": 1,
            "method.upload_mb": limit,
        }
        p = prepare(from_tree({}, options, "benchmark"))
        server = Server(p.method, p.setup)
        state, before, began = server.init(), held(), time.perf_counter()
        watch.most = 0
        with InProcess(p.method, p.federation, p.setup) as transport:  # one after another, here
            for exchange in server.exchanges()[1:]:  # not the sensor's training
                state = server.step(transport, state, exchange).server
        files = sum(f.stat().st_size for f in server.workspace().rglob("*.bin"))
        print(
            f"upload_mb {limit}: {files / 1e9:.2f} GB on disk, at most "
            f"{(watch.most - before) / 1e6:.0f} MB of memory more than before, "
            f"{time.perf_counter() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
