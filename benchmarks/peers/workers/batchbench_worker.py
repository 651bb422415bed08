"""Worker: this project's engine, from the working copy."""

from __future__ import annotations

import loop

WEIGHTS, DTYPE, THREADS, POOL_TOKENS = loop.start()

import torch  # noqa: E402

from engine.config import SchedulerConfig  # noqa: E402
from engine.core import Engine  # noqa: E402
from engine.decoders import choose_decoder  # noqa: E402
from engine.hf_folder import load_folder  # noqa: E402
from engine.runner import ModelRunner  # noqa: E402

BLOCK = 16


class Batchbench:
    def __init__(self) -> None:
        torch.set_num_threads(THREADS)
        model = load_folder(WEIGHTS / f"hf-{DTYPE}", getattr(torch, DTYPE), torch.device("cpu"))
        self.model = choose_decoder(model, threads=THREADS)
        self.settings = f"numerics {self.model.numerics}, blocks of {BLOCK}"
        self.versions = {"torch": torch.__version__}
        self.engines: dict[tuple[int, int], Engine] = {}

    def generate(self, prompts: list[list[int]], output_tokens: int, at_most: int) -> list[list[int]]:
        blocks = (POOL_TOKENS or at_most * 1024) // BLOCK
        engine = self.engines.get((at_most, blocks))
        if engine is None:
            config = SchedulerConfig(at_most, blocks, BLOCK)
            engine = self.engines[at_most, blocks] = Engine(config, ModelRunner(self.model, config))
        names = [str(number) for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.submit(name, prompt, output_tokens)
        while engine.has_work:
            engine.step()
        return [engine.take(name).token_ids for name in names]


loop.serve(Batchbench())
