"""An object store at an address of this machine: moto's server, a real process that speaks S3."""

from __future__ import annotations

import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_vlm import stores

KEY, SECRET = "AKIAKEYOFTHETEST", "secret-of-the-test"  # no message, log or file may hold them
BUCKET = "bucket"


@contextmanager
def store(**environment: str) -> Iterator[Server]:
    """A store with an empty bucket, which this process and those that it starts use meanwhile.

    `environment` is the server's.
    """
    before = dict(os.environ)
    server = Server(environment)
    try:
        os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        os.environ |= {"AWS_ENDPOINT_URL": server.address, "AWS_EC2_METADATA_DISABLED": "true"}
        forget()
        server.make_bucket()
        yield server
    finally:
        server.stop()
        os.environ.clear()
        os.environ |= before
        forget()


def forget() -> None:
    """multi-storage-client keeps its clients, with the address and the keys that they began with."""
    from multistorageclient import shortcuts

    shortcuts._STORAGE_CLIENT_CACHE.clear()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Server:
    def __init__(self, environment: dict[str, str]):
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=os.environ | environment, **quiet)
        wait_for(self.port)

    def make_bucket(self) -> None:
        import boto3

        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=BUCKET)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Line:
    """A line to a server, a process of its own, that can be cut, mended, and slow by some seconds a block."""

    def __init__(self, to: int, seconds: float = 0.0):
        self._to, self._seconds = to, seconds
        self._place = socket.socket()  # keeps the port while the line is cut; it never listens
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._place.bind(("127.0.0.1", 0))
        self.port = self._place.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.mend()

    def mend(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.port), str(self._to), str(self._seconds)]
        )
        wait_for(self.port)

    def cut(self) -> None:
        self._process.kill()
        self._process.wait()


class Passing(socketserver.BaseRequestHandler):
    """Passes on what comes on a line, each block after some seconds, and what is answered."""

    def handle(self) -> None:
        _, _, to, seconds = sys.argv
        with socket.create_connection(("127.0.0.1", int(to))) as other:
            threading.Thread(target=self._pass_on, args=(other, self.request), daemon=True).start()
            self._pass_on(self.request, other, float(seconds))

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, seconds: float = 0.0) -> None:
        with suppress(OSError):
            while block := source.recv(1 << 16):
                time.sleep(seconds)
                target.sendall(block)
            target.shutdown(socket.SHUT_WR)


def put(folder: Path, url: str) -> None:
    """Copies a folder with all folders in it."""
    for file in folder.rglob("*"):
        if file.is_file():
            with stores.at(f"{url}/{file.relative_to(folder)}") as (client, path):
                client.upload_file(path, str(file))


def write(url: str, content: bytes) -> None:
    with stores.at(url) as (client, path):
        client.write(path, content)


def names(url: str) -> dict[str, int]:
    """The files in a folder and in those within it, each by its name from there, with their bytes."""
    with stores.at(url) as (client, path):
        start = f"{path}/" if path else ""
        entries = client.list_recursive(start)
        sizes = {entry.key.lstrip("/"): entry.content_length for entry in entries}
        return {key.removeprefix(start): size for key, size in sizes.items() if key.startswith(start)}


if __name__ == "__main__":
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    socketserver.ThreadingTCPServer.allow_reuse_port = True
    socketserver.ThreadingTCPServer(("127.0.0.1", int(sys.argv[1])), Passing).serve_forever()
