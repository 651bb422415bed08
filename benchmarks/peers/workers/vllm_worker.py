"""Worker: vLLM's CPU build, LLMEngine on token ids."""

from __future__ import annotations

import os

import loop

WEIGHTS, DTYPE, THREADS, POOL_TOKENS = loop.start()
os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # two cores are all there is; the engine runs in this process
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

BLOCK = 32 if POOL_TOKENS else 128  # 128 is the CPU build's default; a small pool needs smaller blocks to run short


class Vllm:
    def __init__(self) -> None:
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        preloaded = os.environ.get("LD_PRELOAD", "")
        libraries = [name for name in ("libtcmalloc", "libiomp5") if name in preloaded]
        self.settings = f"compiled by inductor, preloaded {' and '.join(libraries) or 'nothing'}, one process"
        self.submitted = 0
        arguments = vllm.EngineArgs(
            model=str(WEIGHTS / f"hf-{DTYPE}"),
            dtype=DTYPE,
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=2 << 30,
            block_size=BLOCK,
            num_gpu_blocks_override=POOL_TOKENS and POOL_TOKENS // BLOCK,
        )
        self.engine = vllm.LLMEngine.from_engine_args(arguments)

    def generate(self, prompts: list[list[int]], output_tokens: int, at_most: int) -> list[list[int]]:
        sampling = vllm.SamplingParams(
            temperature=0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        names: list[str] = []
        texts: dict[str, list[int]] = {}
        while len(texts) < len(prompts):
            while len(names) < len(prompts) and len(names) - len(texts) < at_most:
                self.submitted += 1
                prompt = {"prompt_token_ids": prompts[len(names)]}
                names.append(str(self.submitted))
                self.engine.add_request(names[-1], prompt, sampling)
            for output in self.engine.step():
                texts[output.request_id] = list(output.outputs[0].token_ids)
        return [texts[name] for name in names]


loop.serve(Vllm())
