"""Worker: OpenVINO GenAI, ContinuousBatchingPipeline on token ids."""

from __future__ import annotations

import loop

WEIGHTS, DTYPE, THREADS, POOL_TOKENS = loop.start()  # before the imports below count cores

import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
import openvino_genai as genai  # noqa: E402

KIND = {"float32": "f32", "bfloat16": "bf16"}[DTYPE]
PROPERTIES = {
    "PERFORMANCE_HINT": "LATENCY",
    "INFERENCE_NUM_THREADS": THREADS,
    "INFERENCE_PRECISION_HINT": KIND,
    "KV_CACHE_PRECISION": KIND,  # the default is 8 bits, which no other engine here uses
}


class OpenVino:
    settings = ", ".join(f"{key}={value}" for key, value in PROPERTIES.items())

    def __init__(self) -> None:
        self.versions = {"openvino": ov.__version__, "openvino-genai": genai.__version__}
        self.submitted = 0
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 256
        scheduler.enable_prefix_caching = False
        if POOL_TOKENS:
            scheduler.num_kv_blocks = POOL_TOKENS // 32  # the CPU's block is 32 positions
        else:
            scheduler.cache_size = 2  # GB
        self.pipeline = genai.ContinuousBatchingPipeline(WEIGHTS / f"ov-{DTYPE}", scheduler, "CPU", PROPERTIES)

    def generate(self, prompts: list[list[int]], output_tokens: int, at_most: int) -> list[list[int]]:
        config = genai.GenerationConfig(max_new_tokens=output_tokens, ignore_eos=True, do_sample=False)
        handles: list[genai.GenerationHandle] = []
        done: set[int] = set()
        while len(done) < len(prompts):
            while len(handles) < len(prompts) and len(handles) - len(done) < at_most:
                self.submitted += 1
                prompt = ov.Tensor(np.array([prompts[len(handles)]], dtype=np.int64))
                handles.append(self.pipeline.add_request(self.submitted, prompt, config))
            self.pipeline.step()
            for number, handle in enumerate(handles):
                if number not in done and handle.get_status() != genai.GenerationStatus.RUNNING:
                    done.add(number)
        return [list(handle.read_all()[0].generated_ids) for handle in handles]


loop.serve(OpenVino())
