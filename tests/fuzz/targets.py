"""A target per parser: what good files look like, and what reading any file like them may raise."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pyarrow.csv as csv
import pyarrow.parquet as pq
import torch
from safetensors.numpy import save

from batchbench.adapters import engine_factory
from batchbench.calibration import load_calibration
from batchbench.errors import BatchbenchError
from batchbench.gate_rules import load_demands
from batchbench.length_files import read_columns
from batchbench.parts import Parts
from batchbench.prompts import load_prompts
from batchbench.protocol import Point
from batchbench.repetitions import measured
from batchbench.results import ResultWriter, load_point, load_result
from batchbench.resuming import difference
from batchbench.running import refuse_untrusted
from batchbench.scenario import load_scenario
from batchbench.schema import TABLES
from batchbench.service import Slo
from batchbench.service_sheet import service_sheet
from batchbench.sheets import sweep_sheet
from batchbench.status import sight
from batchbench.sweep import SweepObserver, sweep_pool_sizes
from batchbench.trace_stats import collect
from batchbench.traces import open_trace
from batchbench.workload import build_requests, needs_tokenizer, workload_hash
from engine.errors import EngineError
from engine.gguf_file import load_gguf, open_gguf
from engine.gguf_tokenizer import gguf_tokenizer
from engine.hf_folder import load_folder
from engine.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Target:
    """seeds: good files. name: of the file that is changed. read: given the folder that it is in.

    kept: a folder whose files lie beside it.
    """

    seeds: tuple[bytes, ...]
    name: str
    read: Callable[[Path], object]
    raises: tuple[type[Exception], ...] = (BatchbenchError,)
    kept: Path | None = None


def _files(pattern: str, most_bytes: int = 200_000) -> tuple[bytes, ...]:
    found = sorted(path for path in ROOT.glob(pattern) if path.is_file())
    assert found, pattern
    return tuple(path.read_bytes()[:most_bytes] for path in found)


def _scenario(folder: Path) -> None:
    """As `validate` reads it, but for sizes that only take long."""
    scenario = load_scenario(folder / "x.toml")
    refuse_untrusted(scenario, None)
    engine_factory("schedule", scenario.engine)
    workload = scenario.workload
    if workload.request_count > 1000 or workload.conversation or workload.prefix or needs_tokenizer(workload):
        return
    if all(max(prompt or 0, 1) <= 10_000 for prompt, _ in workload.request_lengths or ()):
        requests = build_requests(workload, None, scenario.clock)
        if sum(request.prompt_tokens for request in requests) < 10_000_000:
            workload_hash(requests)


def _trace(folder: Path) -> None:
    collect(open_trace(folder / "trace"), None)


def _trace_as(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        collect(open_trace(folder / "trace", name), None)

    return read


def _result(folder: Path) -> None:
    result = load_result(folder)
    tables = {name: result.rows(name) for name in TABLES}
    objectives = bool(result.run["scenario"].get("slo"))
    sweep_sheet(tables["pools"], tables["statistics"]).markdown()
    service_sheet(tables["pools"], tables["service"], objectives=objectives).markdown()


PARTS = "batchbench-parts"
ABOUT = {"scenario": {"name": "day34"}, "versions": {"pandas": "1"}, "points": ["pool 48", "pool 12"]}
POINTS = (Point(48), Point(12))


class _Saving(SweepObserver):
    """Saves as a sweep does."""

    def __init__(self, writer: ResultWriter) -> None:
        self._writer = writer
        self.ledger, self.on_timing = writer.open_point, writer.save_point  # type: ignore[method-assign]


def _small_parts(folder: Path) -> Path:
    """What a sweep of two points by a schedule leaves in its folder when it ends before its second repetition does."""
    scenario, place = load_scenario(ROOT / "scenarios/day34.toml"), folder / "begun"
    place.mkdir()
    with ResultWriter(place) as writer:
        writer.open(ABOUT)
        timings = sweep_pool_sizes(
            build_requests(scenario.workload),
            POINTS,
            engine_factory("schedule", scenario.engine),
            observer=_Saving(writer),
        )
        writer.save_repetition(1, 0, measured(timings[0]))
    status = {"version": 1, "pid": 1, "started_at": 1.5, "elapsed_s": 2.5, "points": 2, "requests": 6, "running": None,
              "pass_name": "repetition 1 of 1", "choices": "", "iterations": 7}  # fmt: skip
    (place / PARTS / "status.json").write_text(json.dumps(status))
    return place


def _run(folder: Path) -> None:
    """A finished point, as --resume reads it and goes on from it."""
    requests = build_requests(load_scenario(ROOT / "scenarios/day34.toml").workload)
    parts, manifest = Parts(folder, ()), json.loads((folder / PARTS / "sweep.json").read_text())
    measured(load_point(parts.point(0), 0, POINTS[0], requests, manifest["run_id"], Slo(ttft_s=0.01)))


def _manifest(folder: Path) -> None:
    manifest = Parts(folder, ()).manifest()
    difference(manifest or {}, ABOUT)


def _lengths(folder: Path) -> None:
    read_columns(str(folder / "lengths.txt"), 1)


def _gguf(folder: Path) -> None:
    load_gguf(folder / "model.gguf", torch.float32, CPU)


def _gguf_words(folder: Path) -> None:
    gguf_tokenizer(open_gguf(folder / "model.gguf"))


def _checkpoint(folder: Path) -> None:
    load_folder(folder, torch.float32, CPU)


def _words(folder: Path) -> None:
    load_tokenizer(folder).decode(load_tokenizer(folder).encode("a text"))


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16, "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
SHAPES = {
    "model.embed_tokens": (16, 8), "lm_head": (16, 8), "model.norm": (8,),
    "model.layers.0.self_attn.q_proj": (8, 8), "model.layers.0.self_attn.k_proj": (4, 8),
    "model.layers.0.self_attn.v_proj": (4, 8), "model.layers.0.self_attn.o_proj": (8, 8),
    "model.layers.0.mlp.gate_proj": (8, 8), "model.layers.0.mlp.up_proj": (8, 8),
    "model.layers.0.mlp.down_proj": (8, 8), "model.layers.0.input_layernorm": (8,),
    "model.layers.0.post_attention_layernorm": (8,),
}  # fmt: skip
GGUF_NAMES = {
    "token_embd": (16, 8), "output": (16, 8), "output_norm": (8,), "blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8),
    "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8), "blk.0.ffn_gate": (8, 8), "blk.0.ffn_up": (8, 8),
    "blk.0.ffn_down": (8, 8), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,),
}  # fmt: skip


def _small_gguf(folder: Path) -> bytes:
    writer = gguf.GGUFWriter(folder / "small.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(chr(97 + n) for n in range(15)), "ab"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * 16)
    for name, shape in GGUF_NAMES.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (folder / "small.gguf").read_bytes()


def _small_tokenizer() -> bytes:
    model = {"type": "BPE", "vocab": {chr(97 + n): n for n in range(16)}, "merges": []}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "ByteLevel"},
                       "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}).encode()  # fmt: skip


def _small_result(folder: Path) -> Path:
    """Day 34's, in a copy, with its large tables cut to a row group that a change is likely to hit."""
    return Path(shutil.copytree(ROOT / "results/day34", folder / "day34"))


def targets(folder: Path) -> dict[str, Target]:
    """All of them, by name. folder: for what they need beside them."""
    result, model = _small_result(folder), folder / "model"
    model.mkdir()
    weights = save({f"{name}.weight": np.zeros(shape, dtype=np.float32) for name, shape in SHAPES.items()})
    config = json.dumps(CONFIG).encode()
    (model / "config.json").write_bytes(config)
    (model / "model.safetensors").write_bytes(weights)
    (model / "tokenizer.json").write_bytes(_small_tokenizer())
    small_gguf, engine = _small_gguf(folder), (BatchbenchError, EngineError)
    load_folder(model, torch.float32, CPU)  # the seeds are good, and what is imported late is imported now
    found = {
        "scenario": Target(_files("scenarios/*.toml"), "x.toml", _scenario),
        "lengths": Target((b"# made\n3 4\n5 6\n", b"prompt,output\n1,2\n7,8\n", b"1\n2\n"), "lengths.txt", _lengths),
        "prompts": Target((b"one\ntwo\n",), "p.txt", lambda folder: load_prompts(str(folder / "p.txt"))),
        "prompts-toml": Target(
            (b'prompts = ["a", "b\\u0041"]\n',), "p.toml", lambda folder: load_prompts(str(folder / "p.toml"))
        ),
        "calibration": Target(
            _files("scenarios/cheaper.calibration.json"), "c.json", lambda folder: load_calibration(folder / "c.json")
        ),
        "trace": Target(_files("tests/traces/*.csv", 3000) + _files("tests/traces/*.json*", 6000), "trace", _trace),
        "trace-parquet": Target((_parquet_trace(folder),), "trace", _trace_as("parquet")),
        "run.json": Target(_files("results/day34/run.json"), "run.json", _result, kept=result),
        "run.json-v1": Target(_files("tests/results/v1/run.json"), "run.json", _result, kept=ROOT / "tests/results/v1"),
        "safetensors": Target((weights,), "model.safetensors", _checkpoint, engine, model),
        "config.json": Target((config,), "config.json", _checkpoint, engine, model),
        "tokenizer.json": Target((_small_tokenizer(),), "tokenizer.json", _words, engine, model),
        "gguf": Target((small_gguf,), "model.gguf", _gguf, engine),
        "gguf-tokenizer": Target((small_gguf,), "model.gguf", _gguf_words, engine),
    }
    begun = _small_parts(folder)
    found["rules"] = Target(_files("scenarios/*.gate.toml"), "g.toml", lambda folder: load_demands(folder / "g.toml"))
    for name, file, read in (
        ("status.json", "status.json", sight),
        ("sweep.json", "sweep.json", _manifest),
        ("repetition.json", "repetition-1-0.json", lambda folder: Parts(folder, ()).repetition(1, 0)),
        ("run.npz", "point-0/run.npz", _run),
        ("part-run.json", "point-0/run.json", _run),
        ("part-iterations", "point-0/iterations.parquet", _run),
        ("part-evictions", "point-0/evictions.parquet", _run),
    ):
        seeds = ((begun / PARTS / file).read_bytes(),)
        found[name] = Target(seeds, f"{PARTS}/{file}", read, kept=begun)
    for name in TABLES:
        seeds = _files(f"results/day34/{name}.parquet")
        found[f"{name}.parquet"] = Target(seeds, f"{name}.parquet", _result, kept=result)
    return found


def _parquet_trace(folder: Path) -> bytes:
    table = csv.read_csv(ROOT / "tests/traces/azure2023_code_first2000.csv").slice(0, 40)
    pq.write_table(table.rename_columns(["arrival_s", "prompt_tokens", "output_tokens"]), folder / "trace.parquet")
    return (folder / "trace.parquet").read_bytes()


TOKENS = (
    b"\x00", b"\xff", b"\n", b"\r", b'"', b"'", b"|", b",", b"[", b"]", b"{", b"}", b"=", b"-1", b"0", b"1e999",
    b"nan", b"inf", b"9" * 25, b"9" * 5000, b"0x10", b"1_000", b"2147483648", b"9223372036854775808", b"null", b"true",
    b"[" * 5000, b'{"a":' * 2000, b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"\x1b[31m", b"<script>",
    b"../../etc/passwd", b"/dev/zero", b"/dev/stdin", b"decoy:run", b"os:system", b"__import__", "٣".encode(),
    b" " * 100, struct.pack("<Q", 2**63), struct.pack("<q", -1), struct.pack("<I", 2**31),
)  # fmt: skip
