"""What a worker knows of its model before it is loaded, and the choice of runner, backend and pool."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvatlas.models.errors import ModelError, ModelErrorReason
from kvatlas.models.resolve import resolve_model
from kvatlas.models.text_vocabulary import read_text_vocabulary
from kvatlas.models.vocabulary import tokenizer_digest
from worker.config import ConfigError, WorkerConfig
from worker.devices import FakeDevice, choose_device, describe, row_width
from worker.execution.fake_runner import FakeRunner
from worker.process import warm_up

TINY = WorkerConfig(model="random:tiny", page_size=4, num_pages=64, max_running=4)


def resolved(config: WorkerConfig) -> WorkerConfig:
    return config.resolved(model_context=4096, automatic_pages=64)


def write_folder(folder: Path, *, generation_config: str = "{}") -> None:
    """A model of two tokens, without weights."""
    vocabulary = {
        "model": {"vocab": {"a": 0, "b": 1}},
        "added_tokens": [],
        "decoder": {"type": "ByteLevel"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    (folder / "generation_config.json").write_text(generation_config)


def test_the_fake_runner_takes_its_ids_from_the_model() -> None:
    facts = FakeDevice().facts(replace(TINY, runner="fake"))
    assert (facts.model.model_id, facts.model.vocab_size) == ("random:tiny", 512)
    assert facts.model.tokenizer_sha256 == tokenizer_digest(resolve_model("random:tiny"))
    assert facts.model.eos_token_ids == (257,)


def test_every_end_token_of_a_model_s_files_ends_a_sequence(tmp_path: Path) -> None:
    """B076: all of them reach the scheduler, which knows no file."""
    import torch
    from safetensors.torch import save_file

    from worker.process import _scheduler_config

    files = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 12,
            "max_position_embeddings": 256,
            "eos_token_id": 5,
        },
        "generation_config.json": {"eos_token_id": [7, 9]},
        "tokenizer_config.json": {"eos_token": "<end>"},
        "tokenizer.json": {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 11, "content": "<end>"}]},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    save_file({"unread": torch.zeros(1)}, tmp_path / "model.safetensors")  # sizes come from the config
    config = replace(TINY, model=str(tmp_path))
    facts = choose_device(config).facts(config)
    assert _scheduler_config(resolved(config), facts, b"", 0.0).eos_token_ids == {5, 7, 9, 11}


@pytest.mark.parametrize(
    ("page_size", "num_pages", "context", "width"),
    [(1, 100, 31, 32), (1, 100, 33, 64), (16, 100, 150, 160), (64, 100, 150, 192), (64, 2, 4096, 128)],
)
def test_rows_hold_whole_pages_and_whole_cache_lines(
    page_size: int, num_pages: int, context: int, width: int
) -> None:
    """S1-02, S1-03, S1-25, H16: as the device's page table has it."""
    from worker.execution.page_table import table_width

    config = replace(TINY, page_size=page_size, num_pages=num_pages, max_context=context)
    assert row_width(config) == width
    assert table_width(max_context=context, num_pages=num_pages, page_size=page_size) == width


def test_a_model_that_does_not_exist_is_named() -> None:
    with pytest.raises(ModelError, match="nothing"):
        FakeDevice().facts(replace(TINY, runner="fake", model="random:nothing"))


def test_sampling_defaults_come_from_the_makers_of_the_model(tmp_path: Path) -> None:
    write_folder(tmp_path, generation_config='{"temperature": 0.6, "top_k": 20, "top_p": 0.95}')
    model = describe(resolve_model(str(tmp_path)), 128)
    assert (model.default_temperature, model.default_top_k, model.default_top_p) == (0.6, 20, 0.95)
    assert model.default_repetition_penalty == 1.0
    assert not model.has_chat_template


@pytest.mark.parametrize("odd", ['"top_k": -1', '"top_p": 2.0', '"temperature": -1', '"top_k": Infinity'])
def test_a_sampling_default_that_no_request_may_have_is_named(tmp_path: Path, odd: str) -> None:
    write_folder(tmp_path, generation_config="{" + odd + "}")
    with pytest.raises(ModelError, match=odd.split('"')[1]) as caught:
        describe(resolve_model(str(tmp_path)), 128)
    assert caught.value.reason is ModelErrorReason.INVALID_CONFIG


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", '{"chat_template": "of one"}'),
        ("tokenizer_config.json", '{"chat_template": null}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "tools", "template": "of tools"}]}'),
        ("chat_template.json", '{"chat_template": "beside"}'),
        ("chat_template.jinja", "a file of its own"),
    ],
)
def test_a_model_has_a_chat_template_where_its_service_has_one(
    tmp_path: Path, name: str, content: str
) -> None:
    write_folder(tmp_path)
    (tmp_path / name).write_text(content)
    files = resolve_model(str(tmp_path))
    assert describe(files, 128).has_chat_template is (read_text_vocabulary(files).chat_template is not None)


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="how many tokens"):
        describe(resolve_model(str(tmp_path)), 128)


def test_random_models_have_a_chat_template() -> None:
    files = resolve_model("random:tiny")
    assert describe(files, 128).has_chat_template
    assert read_text_vocabulary(files).chat_template is not None


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_warm_up_fits_the_smallest_pool(page_size: int) -> None:
    config = resolved(replace(TINY, runner="fake", page_size=page_size, num_pages=2))
    runner = FakeDevice().build(config)
    assert isinstance(runner, FakeRunner)
    warm_up(runner, page_size)
    assert runner.num_steps == 2


def test_the_torch_runner_is_made_of_what_its_facts_said() -> None:
    device = choose_device(TINY)
    facts = device.facts(TINY)
    assert (facts.layer_count, facts.kv_head_count, facts.head_dim, facts.dtype) == (2, 2, 16, "fp32")
    assert facts.page_bytes == 2 * 2 * 4 * 2 * 16 * 4
    assert (facts.model.architecture, facts.model.max_context_tokens) == ("LlamaForCausalLM", 4096)
    assert facts.attention_backend == "cpu"
    assert facts.versions["torch"]
    runner = device.build(resolved(replace(TINY, attention_backend="reference", threads=1)))
    try:
        warm_up(runner, TINY.page_size)
        assert runner.read_rows([0], [4]) == [[0, 1, 2, 3]]
    finally:
        runner.close()


def test_an_automatic_pool_is_bounded_on_a_processor() -> None:
    from worker.torch_device import MAX_AUTOMATIC_CPU_BYTES

    facts = choose_device(TINY).facts(replace(TINY, num_pages=0))
    assert 1 <= facts.automatic_pages * facts.page_bytes <= MAX_AUTOMATIC_CPU_BYTES


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"device": "cuda"}, "cuda"),
        ({"deterministic": True, "attention_backend": "reference"}, "deterministic"),
        ({"weight_dtype": "fp8"}, "weight_dtype"),
        ({"attention_backend": "paged_cuda"}, "paged_cuda"),
        ({"attention_backend": "flashinfer", "kv_dtype": "fp8"}, "flashinfer"),
    ],
)
def test_what_this_machine_or_release_cannot_do_is_refused(changes: dict[str, object], named: str) -> None:
    import torch

    if named == "cuda" and torch.cuda.is_available():
        return  # this machine can
    with pytest.raises(ConfigError, match=named):
        choose_device(TINY).facts(replace(TINY, **changes))  # type: ignore[arg-type]


def test_an_unknown_backend_is_refused_by_name() -> None:
    config = resolved(replace(TINY, attention_backend="magic"))
    with pytest.raises(ConfigError, match="magic"):
        choose_device(config).build(config)
