"""Worker: transformers, its continuous batching manager on token ids."""

from __future__ import annotations

import loop

WEIGHTS, DTYPE, THREADS, POOL_TOKENS = loop.start()

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.generation import ContinuousBatchingConfig  # noqa: E402

ATTENTION, PAGE, BATCH_TOKENS = "sdpa", 256, 256


class Transformers:
    settings = f"{ATTENTION} attention, pages of {PAGE}, at most {BATCH_TOKENS} tokens per batch, not compiled"

    def __init__(self) -> None:
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        torch.set_num_threads(THREADS)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            WEIGHTS / f"hf-{DTYPE}", dtype=getattr(torch, DTYPE), attn_implementation=ATTENTION
        )
        batching = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=(POOL_TOKENS or 32 * 768) // PAGE,
            max_batch_tokens=BATCH_TOKENS,
            allow_block_sharing=False,
        )
        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)  # -1: no end of text
        with torch.inference_mode():
            self.manager = model.init_continuous_batching(greedy, batching)
            self.manager.start()

    def generate(self, prompts: list[list[int]], output_tokens: int, at_most: int) -> list[list[int]]:
        names: list[str] = []
        texts: dict[str, list[int]] = {}
        while len(texts) < len(prompts):
            while len(names) < len(prompts) and len(names) - len(texts) < at_most:
                names.append(self.manager.add_request(prompts[len(names)], max_new_tokens=output_tokens))
            result = self.manager.get_result(timeout=1)
            if result is not None:
                texts[result.request_id] = list(result.generated_tokens)
            elif not self.manager.is_running():
                raise RuntimeError("the generation thread ended")
        return [texts[name] for name in names]


peer = Transformers()
loop.serve(peer)
peer.manager.stop()  # its thread would keep the process
