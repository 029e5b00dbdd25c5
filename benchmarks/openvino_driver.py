"""Runs workloads with OpenVINO GenAI, which has no server, and measures their times for benchmarks/compare.py.

    python openvino_driver.py FOLDER --port 8000 [--precision bf16] [--kv-precision u8] [--threads 2]

FOLDER is a model written by `optimum-cli export openvino`. The only dependency is openvino_genai. GET /health responds
once the model is loaded, GET /version returns the version, and POST /run takes

    {"prompts": [[1, 2, …], …], "output_lens": [128, …], "at_once": 16, "sampling": {"temperature": 0.7, …}}

(greedy without sampling fields) and returns, at the end, times in seconds since the start of the workload:
{"answers": [{"sent": …, "times": […], "sizes": […]}, …]}, where `sizes` are the numbers of tokens that arrived at each
time. No token ends an answer early.
"""

import argparse
import json
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import openvino_genai
from openvino import Tensor

parser = argparse.ArgumentParser(prog="openvino_driver.py")
parser.add_argument("folder")
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--precision", help="INFERENCE_PRECISION_HINT: bf16, f16 or f32 (default: the plugin's)")
parser.add_argument("--kv-precision", help="KV_CACHE_PRECISION (default: the plugin's, which is u8)")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--cache-gib", type=int, default=2)
parser.add_argument("--max-seqs", type=int, default=16)
parser.add_argument("--max-batch-tokens", type=int, default=512)


class Driver:
    """Runs the pipeline, one workload at a time."""

    def __init__(self, given: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = given.cache_gib
        scheduler.max_num_seqs = given.max_seqs
        scheduler.max_num_batched_tokens = given.max_batch_tokens
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        hints = {"INFERENCE_NUM_THREADS": given.threads, "PERFORMANCE_HINT": "LATENCY"}
        if given.precision:
            hints["INFERENCE_PRECISION_HINT"] = given.precision
        if given.kv_precision:
            hints["KV_CACHE_PRECISION"] = given.kv_precision
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(given.folder, scheduler, "CPU", hints)
        self._count = 0  # requests so far; each needs a unique id

    def run(self, prompts: list, output_lens: list, at_once: int, sampling: dict) -> list:
        """Return the answers' times, in the order of the prompts."""
        began = time.perf_counter()
        waiting = list(zip(prompts, output_lens, strict=True))[::-1]
        answers, running = [], []
        while waiting or running:
            while waiting and len(running) < at_once:
                sent = time.perf_counter() - began
                handle = self._add(*waiting.pop(), sampling)
                answers.append({"sent": sent, "times": [], "sizes": []})
                running.append((handle, answers[-1]))
            self._pipeline.step()
            now = time.perf_counter() - began
            for handle, answer in running:
                while handle.can_read():
                    size = sum(len(output.generated_ids) for output in handle.read().values())
                    if size:
                        answer["times"].append(now)
                        answer["sizes"].append(size)
            running = [each for each in running if each[0].get_status() == openvino_genai.GenerationStatus.RUNNING]
        if silent := sum(1 for each in answers if not each["times"]):
            raise RuntimeError(f"{silent} of {len(answers)} requests got no token")
        return answers

    def _add(self, prompt: list, output_len: int, sampling: dict) -> object:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output_len
        config.ignore_eos, config.do_sample = True, bool(sampling)
        for name, value in sampling.items():
            setattr(config, name, value)
        self._count += 1
        return self._pipeline.add_request(self._count, Tensor(np.array([prompt], dtype=np.int64)), config)


def main() -> None:
    given = parser.parse_args()
    driver = Driver(given)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {"/health": {}, "/version": {"version": openvino_genai.__version__}}
            self.answer(200 if self.path in known else 404, known.get(self.path, {}))

        def do_POST(self) -> None:
            try:
                work = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                result = {
                    "answers": driver.run(work["prompts"], work["output_lens"], work["at_once"], work["sampling"])
                }
            except Exception as error:  # reported to the comparison
                self.answer(500, {"error": f"{type(error).__name__}: {error}"})
            else:
                self.answer(200, result)

        def answer(self, status: int, result: dict) -> None:
            content = json.dumps(result).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    HTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
