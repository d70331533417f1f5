"""An engine on a GPU that sleeps gives its memory to others; it answers as before when it wakes."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

for needed in ("httpx", "uvicorn", "starlette", "transformers"):
    pytest.importorskip(needed)

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import penstock  # noqa: E402
import penstock_serve  # noqa: E402
from tests.serve.conftest import make_tokenizer, serving  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu

MIB = 1 << 20
BLOCKS, BLOCK_TOKENS, LAYERS = 2048, 16, 4
KV_BYTES = 2 * BLOCKS * BLOCK_TOKENS * LAYERS * 2 * 64 * 4
CONFIG = penstock.parse_config(
    'version = 1\nmodel.name = "m"\nengine = { device = "cuda", dtype = "float32" }\n'
    f'cache = {{ block_tokens = {BLOCK_TOKENS}, blocks = {BLOCKS}, load_gate = "off" }}\n'
    'tiers = [{ name = "host", kind = "host", gib = 0.25 }]\n'
)
PROMPTS = [list(range(first, first + 101)) for first in (3, 50, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of some 30 MiB."""
    folder = tmp_path_factory.mktemp("gpu") / "small-model"
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def llm(model: Path) -> Iterator[penstock_serve.LLM]:
    with penstock_serve.LLM(model, config=CONFIG) as made:
        yield made


def answers(llm: penstock_serve.LLM) -> list[tuple[int, ...]]:
    found = llm.generate(PROMPTS, max_tokens=20, temperature=0)
    return [each.token_ids for each in found]


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_the_memory_of_the_kv_is_free_while_an_engine_sleeps(llm: penstock_serve.LLM) -> None:
    before = answers(llm)
    awake = free_bytes()

    llm.sleep()

    assert free_bytes() - awake >= KV_BYTES
    llm.sleep()
    llm.wake()
    assert abs(free_bytes() - awake) < 4 * MIB
    # What was in host memory is found, and recorded graphs are used again.
    copied = llm.statistics().tiers[1].ready
    assert copied > 0
    assert answers(llm) == before
    assert llm.statistics().blocks_corrupt == 0


def test_weights_and_host_memory_go_as_well(llm: penstock_serve.LLM) -> None:
    before = answers(llm)
    awake = free_bytes()
    worker = llm._engine.workers.worker  # type: ignore[attr-defined]
    weights = sum(each.nbytes for each in worker.decoder.tensors() if each.nbytes >= MIB)
    places = [each.data_ptr() for each in (*worker.decoder.tensors(), *worker.kv)]
    shared = _shared_bytes()

    llm.sleep(level=2, host=True)

    assert free_bytes() - awake >= KV_BYTES + weights > KV_BYTES + 100 * MIB
    assert shared - _shared_bytes() >= 200 * MIB
    llm.wake()
    assert [each.data_ptr() for each in (*worker.decoder.tensors(), *worker.kv)] == places
    assert llm.statistics().tiers[1].ready == 0
    assert answers(llm) == before
    assert answers(llm) == before
    assert llm.statistics().blocks_corrupt == 0


def test_an_engine_sleeps_on_while_others_have_its_memory(llm: penstock_serve.LLM) -> None:
    before = answers(llm)
    llm.sleep(level=2, host=True)
    taken = torch.empty(free_bytes() - 64 * MIB, dtype=torch.uint8, device="cuda")

    for _ in range(2):
        with pytest.raises(penstock.UnavailableError, match=r"GiB of cuda:0 are needed, 0\.0"):
            llm.wake()
        with pytest.raises(penstock.UnavailableError, match="asleep"):
            answers(llm)

    del taken
    torch.cuda.empty_cache()
    llm.wake()
    assert answers(llm) == before


def test_a_closed_engine_leaves_no_memory_behind(model: Path) -> None:
    with penstock_serve.LLM(model, config=CONFIG) as first:
        answers(first)
    del first
    before = free_bytes()

    for asleep in (False, True):
        with penstock_serve.LLM(model, config=CONFIG) as llm:
            answers(llm)
            if asleep:
                llm.sleep(level=2, host=True)
        del llm

    # Less than the KV, or the weights, of one of them: torch keeps some of its own.
    assert before - free_bytes() < 100 * MIB < KV_BYTES


def test_a_server_sleeps_and_wakes_with_a_pair_on_one_gpu(model: Path) -> None:
    options = (
        *("--device", "cuda", "--dtype", "float32", "--blocks", str(BLOCKS)),
        *("--block-tokens", "16", "--host-gib", "0.25", "--prefill-tp", "1", "--decode-tp", "1"),
    )
    with serving(model, *options) as running:
        prompt = "A block that is not where it should be is looked for below. " * 6
        before = running.complete(prompt, max_tokens=12)["choices"][0]["text"]
        awake = free_bytes()

        slept = running.client.post("/admin/sleep", json={"level": 2, "host": True})

        assert slept.status_code == 200, slept.text
        assert free_bytes() - awake >= 2 * KV_BYTES
        woken = running.client.post("/admin/wake")
        assert woken.status_code == 200, woken.text
        assert running.complete(prompt, max_tokens=12)["choices"][0]["text"] == before
        other = "Another prompt, which is handed over. " + prompt
        assert running.complete(other, max_tokens=12)["choices"][0]["text"]
        instances = running.client.get("/cache").json()["instances"]
        [decode] = [each for each in instances if each["instance"] == "decode-0"]
        assert decode["handoffs"] == {"delivered": 3}


def _shared_bytes() -> int:
    """Shared memory of this process that is in memory, by the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("RssShmem")]
    return int(line.split()[1]) * 1024
