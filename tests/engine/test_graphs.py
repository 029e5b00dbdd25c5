"""CUDA graphs without a GPU: sizes, memory, the calls of CUDA, and what the tests' recorder notices."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from engine import EngineConfig, graph_sizes, memory, models
from engine.attention import AttentionMeta, gpu_plan, gpu_shapes, static_plans
from engine.attention.gpu_plan import Plan
from engine.attention.paged_gpu import PagedGPU
from engine.attention.reference import Reference
from engine.attention.static_plans import StaticPlans
from engine.config import resolve
from engine.graph_sizes import Bucket
from engine.machine_memory import Machine
from engine.runner import buffers as buffers_module
from engine.runner import cuda_graphs
from engine.runner.buffers import Buffers, Shape
from engine.runner.cuda_graphs import DeviceMemory
from engine.runner.graphs import Graphs
from tests.engine.recorder import Freed, Recorder, Uncapturable
from tests.engine.test_attention import CPU, layer_of
from tests.engine.test_plan import GB, qwen3  # noqa: F401

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1200)  # these are files of tests
def test_replayed_steps_in_the_interpreter_equal_launched_ones():
    pytest.importorskip("triton")
    files = "tests/engine/interpreted_graphs.py", "tests/engine/interpreted_draws.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1024, 3072, 8192])
@pytest.mark.parametrize(
    "max_seqs, max_batched_tokens", [(1, 1), (1, 8192), (5, 24), (16, 256), (256, 8192), (300, 2000), (4000, 9999)]
)
def test_every_small_step_has_a_bucket_and_the_largest_come_first(max_seqs, max_batched_tokens, most):
    found = graph_sizes.sizes(max_seqs, max_batched_tokens, most)
    for part in found:
        assert part == sorted(part, key=lambda bucket: -bucket.tokens)
    assert found.all[0].tokens == found.largest <= max_batched_tokens
    assert len(set(found.all)) == len(found.all) <= 62 + 24 * (most > 1024) and len(found.at_start) <= 18
    for tokens in range(1, min(max_seqs, 512) + 1):
        at_start = [bucket for bucket in found.at_start if not bucket.has_chunks and bucket.suits(tokens)]
        assert min(at_start).tokens <= 2 * tokens, "there is more padding than rows"
    for tokens in range(2, min(max_batched_tokens, most) + 1):
        assert any(bucket.has_chunks and bucket.suits(tokens) for bucket in found.all)


def test_small_models_have_larger_buckets(qwen3):  # noqa: F811
    config = resolve(EngineConfig(model=qwen3, device="cuda", max_len=9000, max_batched_tokens=9000), "cuda", 9000)
    spec = models.describe(Path(qwen3), config)
    assert graph_sizes.of(spec, config).largest == 3072, "the shape is that of 0.6B"
    found = {numbers: graph_sizes.most_tokens(numbers) for numbers in (10_000, 15_728_640, 50_000_000, 200_000_000)}
    assert found == {10_000: 8192, 15_728_640: 3072, 50_000_000: 1024, 200_000_000: 1024}


def test_a_chunk_is_not_padded_to_twice_its_size():
    assert Bucket(64, True).suits(3) and Bucket(320, True).suits(260)
    assert not Bucket(512, True).suits(260) and not Bucket(256, True).suits(260)
    assert Bucket(512, False).suits(260)


@pytest.mark.parametrize("max_seqs, tokens", [(1, 8192), (5, 24), (100, 64), (256, 8192)])
def test_draws_have_at_most_as_much_padding_as_rows(max_seqs, tokens):
    found, most = graph_sizes.draws(max_seqs, tokens), min(max_seqs, tokens, 128)
    assert found == sorted(set(found)) and found[-1] == most <= graph_sizes.sizes(max_seqs, tokens).largest
    assert all(min(size for size in found if size >= rows) <= 2 * rows for rows in range(1, most + 1))


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_plan_reserves_memory_for_graphs_unless_they_are_off(qwen3):  # noqa: F811
    config = EngineConfig(model=qwen3)
    spec = models.describe(Path(qwen3), config)
    machine = Machine("cuda", 80 * GB, 80 * GB)
    plan = memory.arrange(spec, config, machine, PagedGPU)
    logits = 3 * 4 * 128 * spec.vocab_size  # of the draws: the result, a copy and the weights
    assert plan.graph_bytes > logits
    eager = memory.arrange(spec, EngineConfig(model=qwen3, enforce_eager=True), machine, PagedGPU)
    assert eager.graph_bytes == 0 and GB / 10 < plan.graph_bytes < GB
    block = 16 * plan.kv_bytes_per_token
    assert eager.num_blocks - plan.num_blocks == pytest.approx(plan.graph_bytes / block, abs=1)
    assert memory.arrange(spec, config, machine, Reference).graph_bytes == 0
    assert memory.arrange(spec, config, Machine("cpu", 80 * GB, 80 * GB), PagedGPU).graph_bytes == 0
    transformers = replace(spec, decoder=None)
    assert memory.arrange(transformers, config, machine, PagedGPU).graph_bytes == 0


def test_a_gpu_that_is_too_small_for_graphs_is_offered_to_do_without(qwen3):  # noqa: F811
    config = EngineConfig(model=qwen3, max_len=4096, max_seqs=16, max_batched_tokens=512, gpu_memory_utilization=1.0)
    spec = models.describe(Path(qwen3), config)

    def total(enforce_eager):
        settings = {"num_blocks": 256, "enforce_eager": enforce_eager}
        return memory.arrange(
            spec, msgspec.structs.replace(config, **settings), Machine("cuda", GB * 80, GB * 80), PagedGPU
        )

    assert total(False).memory_bytes - total(True).memory_bytes == total(False).graph_bytes
    size = total(False).memory_bytes - total(False).graph_bytes // 2
    with pytest.raises(memory.Impossible) as caught:
        memory.arrange(spec, config, Machine("cuda", size, size), PagedGPU)
    assert "of CUDA graphs" in caught.value.sentence
    assert any(each.startswith("`enforce_eager`, which saves the ") for each in caught.value.suggestions)


SEQS, TOKENS = 60, 200  # per step
STEP_BYTES = 1 << 30


class SharedGPU:
    """A GraphDevice of 80 GB, on which another process takes and frees memory while steps are captured."""

    def __init__(self, before_captures=(), within_captures=(), *, pool_bytes=80 << 20, later_bytes=0):
        self.others = 0  # bytes
        self.before_captures, self.within_captures = iter(before_captures), iter(within_captures)
        self.pool_bytes, self.later_bytes = pool_bytes, later_bytes  # of the first graph, and of each of the others
        self.reserved = self.of_driver = self.num_captures = 0

    def memory(self):
        free = 80 * GB - self.reserved - self.of_driver - self.others
        assert free >= 0
        return DeviceMemory(self.reserved, free)

    def capture(self, work):
        self.others = next(self.within_captures, self.others)
        self.reserved += self.later_bytes if self.num_captures else self.pool_bytes
        self.of_driver += (self.num_captures % 3 == 0) << 21  # the driver, too, takes memory in pieces
        self.num_captures += 1
        return lambda: None

    def change(self):
        self.others = next(self.before_captures, self.others)


def captured(device, folder, vocab_size=64):
    """Return the graphs of an engine on a GPU, after it has captured what it can."""
    config = resolve(
        EngineConfig(model=folder, device="cuda", max_seqs=SEQS, max_batched_tokens=TOKENS, max_len=64), "cuda", 64
    )
    spec = replace(models.describe(Path(folder), config), vocab_size=vocab_size)
    sizes = graph_sizes.sizes(SEQS, TOKENS)
    buffers = Buffers(max_tokens=TOKENS, max_seqs=SEQS, max_blocks=4, device=CPU, padded=sizes.largest)
    reserve = memory.graph_reserve(spec, config, PagedGPU)
    assert 80 << 20 < reserve.allocated < reserve.total < (250 << 20) + SEQS * reserve.draw_row
    graphs = Graphs(
        SimpleNamespace(run=lambda forward: torch.zeros(len(forward.ids), 1024)),
        spec,
        SimpleNamespace(backend=SimpleNamespace(invariant=False)),
        buffers,
        sizes=sizes,
        device=device,
        max_len=64,
        reserve=reserve,
        step_bytes=STEP_BYTES,
    )
    graphs.add_draws(SimpleNamespace(spec=spec), graph_sizes.draws(SEQS, TOKENS), None, None)
    graphs.capture_first()
    device.change()
    while graphs.capture_next():
        device.change()
    return graphs


NUM_GRAPHS = len(graph_sizes.sizes(SEQS, TOKENS).all)


@pytest.mark.parametrize("place", ["before_captures", "within_captures"])
@pytest.mark.parametrize("others", [[30 * GB], [0, 30 * GB, 0, 70 * GB, 10 * GB], [70 * GB, 0, 30 * GB, 0] * 9])
def test_what_another_process_takes_and_frees_is_not_counted_as_the_graphs(qwen3, place, others):  # noqa: F811
    alone = captured(SharedGPU(), qwen3)
    beside = captured(SharedGPU(**{place: others}), qwen3)
    assert alone.num_captured == beside.num_captured == NUM_GRAPHS
    assert not alone.problem and not beside.problem
    assert alone.num_bytes == beside.num_bytes > 80 << 20


def test_capturing_ends_where_the_device_has_no_memory_left_for_a_launched_step(qwen3, caplog):  # noqa: F811
    """Then another process has what the engine's steps were to have, and the next graph would take still more."""
    device = SharedGPU([0, 0, 80 * GB - (1 << 30)])
    graphs = captured(device, qwen3)
    assert NUM_GRAPHS > graphs.num_captured > len(graph_sizes.sizes(SEQS, TOKENS).at_start)
    assert "tokens was not captured: " in graphs.problem
    assert " MiB of the GPU's memory are free, and its capture and a launched step need up to 10" in graphs.problem
    assert caplog.messages == [graphs.problem] and not graphs.capture_next()
    before = device.num_captures
    assert captured(SharedGPU(within_captures=[80 * GB - (2 << 30), 0]), qwen3).num_captured == NUM_GRAPHS
    device.others = 0
    assert not graphs.capture_next() and device.num_captures == before, "what has ended does not begin again"


def test_the_logits_of_a_draw_count_before_it_is_captured(qwen3):  # noqa: F811
    at_start = len(graph_sizes.sizes(SEQS, TOKENS).at_start)
    left = [0] * (at_start - 1) + [80 * GB - STEP_BYTES - (150 << 20)]  # 80 MiB of it are the first graph's
    assert not captured(SharedGPU(within_captures=left), qwen3).problem
    graphs = captured(SharedGPU(within_captures=left), qwen3, vocab_size=150_000)
    assert graphs.num_captured == at_start
    assert f"the draw of {max(graph_sizes.draws(SEQS, TOKENS))} rows was not captured: " in graphs.problem


def test_capturing_ends_where_torch_has_taken_what_is_reserved(qwen3):  # noqa: F811
    graphs = captured(SharedGPU(later_bytes=40 << 20), qwen3)
    assert 1 < graphs.num_captured < 5
    assert graphs.problem.endswith("MiB that are reserved for them")
    large = captured(SharedGPU(pool_bytes=300 << 20), qwen3)
    assert large.num_captured == 1 and "1 graphs take the" in large.problem


# -- inputs and plans -------------------------------------------------------------------------------------------------


def test_the_tokens_after_a_steps_own_are_padding():
    buffers = Buffers(max_tokens=12, max_seqs=4, max_blocks=3, device=CPU, padded=8)
    for tokens in (3, 7, 2, 2, 8, 11, 4):
        arrays, _ = buffers.views(Shape(tokens, 1, 1, 0, 0))
        for array in (arrays.ids, arrays.positions, arrays.slot_mapping):
            array[:] = 5
        whole = buffers._views(Shape(8, 1, 1, 0, 0))[1]
        own = min(tokens, 8)
        assert whole.ids.tolist() == whole.positions.tolist() == [5] * own + [0] * (8 - own)
        assert whole.slot_mapping.tolist() == [5] * own + [-1] * (8 - own)
    buffers.views(Shape(3, 3, 1, 2, 0))[0].logits_at[:] = 2
    assert buffers._views(Shape(0, 0, 0, 8, 0))[1].logits_at.tolist() == [2, 2, 0, 0, 0, 0, 0, 0]
    padding = buffers.padding(6)
    assert padding.logits_at.tolist() == [0] * 6
    assert padding.slot_mapping.tolist() == [-1] * 6 and padding.block_table.shape == (4, 3)
    assert padding.ids.data_ptr() == buffers.views(Shape(1, 1, 1, 0, 0))[1].ids.data_ptr()


def test_the_inputs_of_steps_with_many_tokens_lie_elsewhere(monkeypatch):
    monkeypatch.setattr(buffers_module, "SMALL", 8)
    buffers = Buffers(max_tokens=40, max_seqs=4, max_blocks=3, device=CPU, padded=16)
    buffers._device = buffers._host.clone()  # as on a GPU
    buffers._copied = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    ids = {}
    for tokens in (3, 20, 8, 9, 16, 3, 40):
        arrays, tensors = buffers.views(Shape(tokens, 1, 1, 2, 0))
        for array, value in ((arrays.ids, 5), (arrays.slot_mapping, 6), (arrays.logits_at, 1)):
            array[:] = value
        buffers.upload()
        assert all(torch.equal(tensor, torch.from_numpy(array)) for tensor, array in zip(tensors, arrays, strict=True))
        assert buffers.are_static(tensors.ids) and not buffers.are_static(tensors.positions)
        ids.setdefault(tokens > 8, set()).add(tensors.ids.data_ptr())
        whole = buffers._views(Shape(16 if tokens > 8 else 8, 0, 0, 8, 0))[1]
        own = min(tokens, len(whole.ids))
        assert whole.ids.tolist() == [5] * own + [0] * (len(whole.ids) - own)
        assert whole.slot_mapping.tolist() == [6] * own + [-1] * (len(whole.ids) - own)
        assert whole.logits_at.tolist() == [1, 1] + [0] * 6, "few logits, of however many tokens, are at one place"
    assert [len(places) for places in ids.values()] == [1, 1] and ids[True] != ids[False]
    for tokens in (16, 5):
        padding = buffers.padding(tokens)
        assert buffers.are_static(padding.ids) and {padding.ids.data_ptr()} == ids[tokens > 8]
        assert padding.ids.tolist() == [0] * tokens and padding.slot_mapping.tolist() == [-1] * tokens


def test_padding_is_never_taken_for_the_inputs_of_a_step():
    buffers = Buffers(max_tokens=12, max_seqs=4, max_blocks=3, device=CPU, padded=8)
    shape = Shape(6, 4, 3, 6, 0)
    before, _ = buffers.views(shape)
    buffers.padding(6)
    after, _ = buffers.views(shape)
    assert after is not before, "Inputs would believe that they are as it has left them"


def test_a_step_is_not_replayed_by_a_graph_that_reads_other_memory(monkeypatch, qwen3):  # noqa: F811
    monkeypatch.setattr(buffers_module, "SMALL", 64)
    graphs = captured(SharedGPU(), qwen3)
    plan = SimpleNamespace(meta=SimpleNamespace(max_query=9))
    found = {tokens: graphs._bucket(SimpleNamespace(ids=range(tokens), plan=plan)) for tokens in (60, 64, 65, 90)}
    assert found == {60: (64, True), 64: (64, True), 65: (96, True), 90: (96, True)}
    del graphs._captured[Bucket(64, True)]
    graphs._suitable.clear()
    assert graphs._bucket(SimpleNamespace(ids=range(60), plan=plan)) is None


def test_a_copy_that_has_failed_is_made_when_the_step_is_tried_again(monkeypatch):
    layer = layer_of(1, 16, 16)
    first, second = (Plan(AttentionMeta.of([([0] * 10, start, 1)] * 2, 16)) for start in (9, 140))
    plans = StaticPlans([layer], torch.float32, second.meta, 8)
    plans.load(first, has_chunks=False)

    def no_memory(*_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(static_plans, "pinned", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            plans.load(second, has_chunks=False)
    (table,) = plans._decodes.values()
    table[0] = 7
    plans.load(second, has_chunks=False)
    assert table[0, 0] == len(second.on_host(next(iter(plans._decodes)))[0][0].table) - 1


def test_a_step_of_several_launches_of_decodes_is_not_replayed(monkeypatch):
    layer = layer_of(1, 16, 16)
    meta = AttentionMeta.of([([0] * 64, 999, 1)] * 3, 16)
    plans = StaticPlans([layer], torch.bfloat16, meta, 8)
    monkeypatch.setattr(gpu_plan, "MAX_PARTS", 4)  # of the steps' own plans
    kind = (None, gpu_shapes.queries_of(layer, torch.bfloat16, is_large=True))
    one, several = (Plan(AttentionMeta.of([([0] * 64, 999, 1)] * rows, 16)) for rows in (1, 3))
    assert len(several.on_host(kind)[0]) == 3
    assert plans.takes(one) and not plans.takes(several)
    (work,) = plans.plan(meta.slot_mapping[:1], has_chunks=False).launches(kind).decodes
    assert work.num_parts == len(work.table) - 1 == 24, "the workspace has room for what the table can name"


def test_the_items_of_a_step_replace_those_of_the_one_before():
    layer = layer_of(1, 16, 16)
    decodes, chunk, both = (
        Plan(AttentionMeta.of(rows, 16)) for rows in ([([0], 9, 1)] * 2, [([0], 0, 5)], [([0], 9, 1), ([0], 3, 2)])
    )
    plans, slots = StaticPlans([layer], torch.float32, both.meta, 8), torch.zeros(8, dtype=torch.int64)
    kind = (None, gpu_shapes.queries_of(layer, torch.float32, is_large=True))

    def counts():
        launches = plans.plan(slots, has_chunks=True).launches(kind)
        return [int(work.table[0, 0]) for work in (*launches.decodes, *launches.chunks)]

    for plan, has_chunks, expected in [
        (decodes, False, [2, 0]),
        (both, True, [1, 1]),
        (chunk, True, [0, 1]),
        (decodes, True, [2, 0]),
    ]:
        plans.load(plan, has_chunks=has_chunks)
        assert counts() == expected
    (table,) = plans._decodes.values()
    table[0] = 7
    plans.load(decodes, has_chunks=True)
    assert counts() == [7, 0], "what the device has already is not copied again"
    parted = Plan(AttentionMeta.of([([0] * 13, 200, 1)], 16))  # as many items, and others
    plans.load(parted, has_chunks=True)
    assert table[1:3].tolist() == parted.on_host(kind)[0][0].table[1:].tolist()
    plans.clear()
    plans.load(decodes, has_chunks=True)
    assert counts() == [2, 0]
    plans.clear()
    assert counts() == [0, 0] and not plans.plan(slots, has_chunks=False).launches(kind).chunks


# -- CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device, enforce_eager", [("cpu", False), ("cpu", True), ("cuda", True), ("cuda:1", True)])
def test_steps_are_captured_on_cuda_alone_and_not_if_that_is_off(device, enforce_eager):
    config = resolve(EngineConfig(model="m", device=device, enforce_eager=enforce_eager), device[:4], 64)
    assert cuda_graphs.device_for(config) is None


@pytest.mark.parametrize("fails", [False, True])
def test_work_runs_once_and_is_captured_on_one_stream_and_in_one_pool(monkeypatch, fails):
    """The calls of torch.cuda; the current stream is restored even if the capture's end fails."""
    calls: list[object] = []
    streams = ["default"]

    class Stream:
        def __init__(self, device=None):
            self.name = "side" if device is not None else "default"

        def wait_stream(self, other):
            calls.append((self.name, "waits for", other.name))

    @contextmanager
    def stream(of):
        before = len(streams)
        streams.append(of.name)
        try:
            yield
        finally:
            del streams[before:]

    class Graph:
        def __init__(self, graph, pool, stream, capture_error_mode):
            self.options = pool, stream.name, capture_error_mode

        def __enter__(self):
            calls.append(("begin", *self.options))
            streams.append("side")

        def __exit__(self, *_):
            calls.append("end")
            if fails:  # torch leaves the stream as it is
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            streams.pop()

    def work():
        calls.append(("work", streams[-1]))

    names = {
        "Stream": Stream,
        "stream": stream,
        "graph": Graph,
        "current_stream": lambda device: Stream(),
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: calls.append(("replay", streams[-1]))),
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    ended = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: ended.append(args), raising=False)
    device = cuda_graphs.CudaGraphs(torch.device("cuda:1"))
    begun = [
        ("side", "waits for", "default"),
        ("work", "side"),
        ("begin", (0, 1), "side", "thread_local"),
        ("work", "side"),
        "end",
    ]
    if fails:
        with pytest.raises(RuntimeError, match="during capture"):
            device.capture(work)
        assert calls == begun and streams == ["default"] and ended == [(1, (0, 1))]
        return
    device.capture(work)()
    assert not ended and calls == [*begun, ("default", "waits for", "side"), ("replay", "default")]


def test_the_memory_of_a_device_is_read_after_torch_has_given_back_what_it_does_not_use(monkeypatch):
    device, done = torch.device("cuda:1"), []
    names = {
        "Stream": lambda of: None,
        "graph_pool_handle": lambda: (0, 1),
        "synchronize": lambda of: done.append(("synchronize", of)),
        "empty_cache": lambda: done.append(("empty", done[-1][1])),
        "memory_reserved": lambda of: 5 if done[-1] == ("empty", of) else 500,
        "mem_get_info": lambda of: (30 if done[-1] == ("empty", of) else 3, 80),
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert cuda_graphs.CudaGraphs(device).memory() == (5, 30)
    assert done == [("synchronize", device), ("empty", device)]


# -- the recorder -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.numpy(),
        lambda x: bool(x[0] > 0),
        lambda x: float(x[0]),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0]),
    ],
)
def test_the_recorder_refuses_reads_and_copies_of_the_host(read):
    x = torch.ones(3)
    with pytest.raises(Uncapturable):
        Recorder().capture(lambda: read(x))


def test_the_recorder_replays_on_the_same_memory_and_notices_a_tensor_that_is_gone():
    recorder = Recorder()
    x, weight, out = torch.ones(2), torch.eye(2), torch.zeros(2)
    kept = []

    def work():
        y = weight @ (x * 2)
        kept[:] = [y]
        out.copy_(y.view(2, 1).flatten())

    replay = recorder.capture(work)
    assert kept[0].isnan().all(), "what a capture allocates is lost"
    with torch.inference_mode():
        x.fill_(4)
        replay()
    assert out.tolist() == [8.0, 8.0] and kept[0].isnan().all()
    weight = torch.eye(2)  # another one in its place
    with pytest.raises(Freed):
        replay()
